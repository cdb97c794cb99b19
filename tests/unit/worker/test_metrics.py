"""NVML's values of GPUs become a sample; values that it does not report are omitted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from skyward_core.worker.metrics import _gpu_values


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
