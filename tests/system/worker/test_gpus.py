"""GPUs are those that `CUDA_VISIBLE_DEVICES` shows, by CUDA's rules."""

import os
from collections.abc import Iterator

import pytest

import skyward_core as sky
from tests.unit.worker.test_gpus import (
    fail,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


@sky.compute
def process_id() -> int:
    return os.getpid()


@pytest.mark.parametrize(
    ("text", "is_new"),
    [
        ("CUDA error: device-side assert triggered", True),  # PyTorch
        ("HIP error: an illegal memory access was encountered", True),
        (
            "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
            True,
        ),  # the driver interface
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", True),  # CuPy
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", False),
        ("no column cuda", False),
    ],
)
def test_the_next_call_has_a_new_process_if_the_last_one_broke_its_gpu(
    pool: sky.ComputePool, text: str, is_new: bool
) -> None:
    """CUDA repeats the error in the same process, and each retry would fail."""
    before = process_id() >> pool
    with pytest.raises(RuntimeError, match=text[:30]):
        fail(text) >> pool
    assert (process_id() >> pool != before) is is_new
