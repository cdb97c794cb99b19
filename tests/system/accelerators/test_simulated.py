"""Simulated accelerators are used on a machine without accelerators, if the provider simulates or no provider is given."""

import pytest

import skyward_core as sky
from tests.unit.accelerators.test_simulated import (  # noqa: F401 - fixtures
    gpus,
)


def test_an_explicit_local_refuses_with_advice(gpus: list[tuple[str, float]]) -> None:
    """The message names the argument for a simulation."""
    with pytest.raises(sky.NoCapacity, match=r'has no accelerator.*Local\(simulate="A100"\) simulates one here'):
        sky.ComputePool(provider=sky.Local(), accelerator="A100", display="quiet").open()
    with pytest.raises(sky.NoCapacity, match=r'has A100.*Local\(simulate="H100"\)'):
        sky.ComputePool(provider=sky.Local(simulate="A100"), accelerator="H100", display="quiet").open()
