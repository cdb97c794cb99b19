"""This machine is offered with its own architecture only."""

import platform

import pytest

import skyward_core as sky
from skyward_core.errors import BadRequest

HERE = {"x86_64": "x86_64", "aarch64": "arm64"}[platform.machine()]
OTHER = "arm64" if HERE == "x86_64" else "x86_64"


def test_an_architecture_that_this_machine_lacks_is_refused() -> None:
    assert list(sky.offers("local", architecture=OTHER, max_age_seconds=0)) == []
    assert sky.offers("local", architecture=HERE, max_age_seconds=0)[0].architecture == HERE
    with pytest.raises(BadRequest, match=r"architecture='sparc': .*'x86_64' or 'arm64'"):
        sky.ComputePool(architecture="sparc")
    pool = sky.ComputePool(provider=sky.Local(), architecture=OTHER, display="quiet")
    with pytest.raises(sky.NoCapacity, match=f"is {HERE}"):
        pool.open()
