"""The pool on which distributed trainings are tested."""

from collections.abc import Iterator

import pytest

import skyward_core as sky
from tests.conftest import shared

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


@pytest.fixture(scope="module")
def pool_of_two() -> Iterator[sky.ComputePool]:
    """Two local nodes, with the packages of this environment. The ranks share few processors."""
    with shared(sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", env=ONE_THREAD)) as pool:
        yield pool
