"""GPUs are those that `CUDA_VISIBLE_DEVICES` shows, by CUDA's rules."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

import skyward_core as sky
from skyward_core.worker.gpus import gpus_here, open_handles

UUIDS = ["GPU-8f12aa", "GPU-8f34bb", "GPU-c0ffee"]
PARTITION = "MIG-aaaa"


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with three GPUs and one partition. Returns a list with 1 for each start of NVML, and -1 for each end."""
    changes: list[int] = []

    def by_uuid(uuid: str) -> str:
        if uuid != PARTITION:
            raise pynvml.NVMLError_NotFound  # type: ignore[attr-defined]
        return uuid

    fakes: dict[str, Any] = {
        "nvmlInit": lambda: changes.append(1),
        "nvmlShutdown": lambda: changes.append(-1),
        "nvmlDeviceGetCount": lambda: len(UUIDS),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": UUIDS.__getitem__,
        "nvmlDeviceGetName": ["NVIDIA A100", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"].__getitem__,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80e9),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    return changes


@pytest.mark.parametrize(
    ("limit", "shown"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("2, 0", [2, 0]),
        ("1,7,0", [1]),
        ("GPU-c0ffee,0", [2, 0]),
        ("GPU-8f3", [1]),
        ("GPU-8f", []),
        (PARTITION, [PARTITION]),
        ("MIG-bbbb,0", []),
    ],
)
def test_a_process_has_the_gpus_that_cuda_shows_it(opened: list[int], limit: str | None, shown: list[Any]) -> None:
    """In the order of the limit, up to the first word that names no GPU."""
    assert open_handles({} if limit is None else {"CUDA_VISIBLE_DEVICES": limit}) == shown
    assert sum(opened) == (1 if shown else 0)


@pytest.mark.usefixtures("opened")
def test_local_offers_the_gpus_that_its_user_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that others use too, for instance in a job of Slurm."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert gpus_here() == (("NVIDIA H100 80GB HBM3", 80.0),) * 2
    (offer,) = sky.Local().offers(sky.Requirements(accelerator=sky.accelerators.H100()))
    assert (offer.accelerator, offer.accelerators) == ("H100", 2)


def test_a_call_finds_its_user_s_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that belongs to somebody else stays theirs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    @sky.compute
    def limit() -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")

    with sky.ComputePool(provider=sky.Local(), display="quiet") as limited:
        assert limit() >> limited == ("1,2", "PCI_BUS_ID")


def test_a_driver_that_fails_is_not_taken_for_no_gpu(opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out, and NVML is ended."""

    def fail() -> int:
        raise pynvml.NVMLError_Unknown  # type: ignore[attr-defined]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", fail)
    with pytest.raises(pynvml.NVMLError):
        gpus_here()
    assert opened == [1, -1]


# ── errors after which a process cannot use its GPU ──────────────────────────────────────────────────────────────────


@sky.compute
def fail(text: str) -> None:
    raise RuntimeError(text)


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


def test_calls_behind_one_that_broke_its_gpu_run_in_a_new_process(pool: sky.ComputePool) -> None:
    """None is lost, and none runs twice."""
    calls = pool.submit_all([process_id(), fail("CUDA error: unspecified launch failure"), *[process_id()] * 20])
    before, *after = [call.result() for number, call in enumerate(calls) if number != 1]
    assert before not in after
    assert len(set(after)) == 1
