"""The pool on which distributed trainings are tested."""

from collections.abc import Iterator

import pytest

import skyward_core as sky
from tests.conftest import shared


@pytest.fixture(scope="module")
def pool_of_two() -> Iterator[sky.ComputePool]:
    """Two local nodes, with the packages of this environment."""
    with shared(sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet")) as pool:
        yield pool
