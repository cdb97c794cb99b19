"""Simulated accelerators are used on a machine without accelerators, if the provider simulates or no provider is given."""

import logging
import os

import pytest

import skyward_core as sky
from tests.unit.accelerators.test_simulated import (  # noqa: F401 - fixtures
    gpus,
)


@sky.compute
def seen() -> tuple[sky.InstanceInfo, str | None, str | None]:
    return sky.instance_info(), sky.current_accelerator(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_calls_know_that_accelerators_are_simulated(gpus: list[tuple[str, float]]) -> None:
    """The list of accelerators is filled as on a real machine, but no device is visible, not even a real one."""
    gpus.append(("NVIDIA GeForce RTX 4090", 24.0))
    with sky.ComputePool(provider=sky.Local(simulate="A100:2"), accelerator="A100:2", display="quiet") as pool:
        info, first, devices = pool.run(seen())
    assert (info.accelerators, info.is_simulated, first, devices) == (["A100", "A100"], True, "A100", "")


def test_without_a_provider_this_machine_simulates(
    gpus: list[tuple[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    """A program for the cloud runs on a laptop, with one warning."""
    with caplog.at_level(logging.INFO, "skyward"), sky.ComputePool(accelerator="A100", display="quiet") as pool:
        info, _, _ = pool.run(seen())
        assert pool.spec.provider is None
    assert (info.accelerators, info.is_simulated) == (["A100"], True)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no provider was named" in warning
    assert "stands in for A100 80GB" in warning
    assert "\n" not in warning
