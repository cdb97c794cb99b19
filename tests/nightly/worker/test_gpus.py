"""GPUs are those that `CUDA_VISIBLE_DEVICES` shows, by CUDA's rules."""

import os

import pytest

import skyward_core as sky
from tests.system.worker.test_gpus import (  # noqa: F401 - fixtures
    pool,
    process_id,
)
from tests.unit.worker.test_gpus import (
    fail,
)


def test_a_call_finds_its_user_s_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that belongs to somebody else stays theirs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    @sky.compute
    def limit() -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")

    with sky.ComputePool(provider=sky.Local(), display="quiet") as limited:
        assert limit() >> limited == ("1,2", "PCI_BUS_ID")


def test_calls_behind_one_that_broke_its_gpu_run_in_a_new_process(pool: sky.ComputePool) -> None:
    """None is lost, and none runs twice."""
    calls = pool.submit_all([process_id(), fail("CUDA error: unspecified launch failure"), *[process_id()] * 20])
    before, *after = [call.result() for number, call in enumerate(calls) if number != 1]
    assert before not in after
    assert len(set(after)) == 1
