"""The processor of machines: in every offer, chosen by `architecture`, any by default."""

import pytest

import skyward_core as sky
from skyward_core.errors import BadRequest
from tests.unit.machines.test_architecture import (
    HERE,
    OTHER,
)


def test_an_unknown_architecture_is_refused_with_the_valid_names() -> None:
    """The message has the valid names."""
    with pytest.raises(BadRequest, match=r"architecture='sparc': .*'x86_64' or 'arm64'"):
        sky.ComputePool(architecture="sparc")
    with (
        pytest.raises(sky.NoCapacity, match=f"is {HERE}"),
        sky.ComputePool(provider=sky.Local(), architecture=OTHER, display="quiet"),
    ):
        pass
