"""GPUs of a node: those that CUDA_VISIBLE_DEVICES shows, and their metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

import skyward_core as sky
from skyward_core.worker.metrics import _gpu_values, gpus_here, open_handles

UUIDS = ["GPU-8f12aa", "GPU-8f34bb", "GPU-c0ffee"]
PARTITION = "MIG-aaaa"


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


def test_a_driver_that_fails_is_not_taken_for_no_gpu(opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out, and NVML is ended."""

    def fail() -> int:
        raise pynvml.NVMLError_Unknown  # type: ignore[attr-defined]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", fail)
    with pytest.raises(pynvml.NVMLError):
        gpus_here()
    assert opened == [1, -1]


# ── errors after which a process cannot use its GPU ──────────────────────────────────────────────────────────────────


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, 0 and 1: half used, 40 and 60 degrees."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda gpu: SimpleNamespace(gpu=20 + 20 * gpu))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(used=10e9, total=20e9))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda gpu, _: 40 + 20 * gpu)


@pytest.mark.usefixtures("nvml")
def test_the_gpus_of_a_node_are_one_row() -> None:
    """Means, and the highest temperature."""
    assert _gpu_values([0, 1]) == {
        "gpu_utilization": 30,
        "gpu_memory_used_mb": 10_000,
        "gpu_memory_total_mb": 20_000,
        "gpu_temperature": 60,
    }
    assert _gpu_values([]) == {}


@pytest.mark.usefixtures("nvml")
def test_values_that_are_not_reported_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML does not report the utilisation of a partitioned GPU: the other values stay."""

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError_NotSupported  # type: ignore[attr-defined]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", refuse)
    assert _gpu_values([0]) == {"gpu_memory_used_mb": 10_000, "gpu_memory_total_mb": 20_000, "gpu_temperature": 40}
