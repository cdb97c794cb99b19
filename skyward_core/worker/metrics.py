"""Samples of a node: processor and memory through psutil, GPUs through NVML where there is one.

A sample is a dict with the fields of `events.Metrics`, which the client makes from it: importing all events would
take 10 ms at each node's start.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from skyward_core.worker.gpus import open_handles

type Sample = dict[str, str | int | float | None]

MB = 1e6


class Sampler:
    """Takes a sample every `interval_seconds` in a separate thread, from `start` to `stop`."""

    def __init__(self, report: Callable[[Sample], None], instance_id: str, node: int, interval_seconds: float) -> None:
        self._report = report
        self._instance_id = instance_id
        self._node = node
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to sample."""
        threading.Thread(target=self._run, name="skyward-metrics", daemon=True).start()

    def stop(self) -> None:
        """Stop taking samples."""
        self._stopped.set()

    def _run(self) -> None:
        gpus = _gpus()
        # psutil measures the processor between two calls; the first one says nothing
        sample(self._instance_id, self._node, gpus)
        while not self._stopped.wait(self._interval_seconds):
            self._report(sample(self._instance_id, self._node, gpus))


def sample(instance_id: str, node: int, gpus: list[Any]) -> Sample:
    """Take one sample. The processor's share is that since the last call in this process."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "instance_id": instance_id,
        "node": node,
        "cpu_percent": psutil.cpu_percent(),
        "memory_percent": memory.percent,
        "memory_used_mb": (memory.total - memory.available) / MB,
        "memory_total_mb": memory.total / MB,
        "timestamp": time.time(),
        **_gpu_values(gpus),
    }


def _gpus() -> list[Any]:
    """Return the handles of the GPUs; none if the driver fails, because the other values are still wanted."""
    import pynvml

    try:
        return open_handles()
    except pynvml.NVMLError:
        return []


def _gpu_values(gpus: list[Any]) -> dict[str, float]:
    """Means over the GPUs (temperature: the highest).

    Values that NVML does not have, such as the utilisation of a partitioned GPU, are left out.
    """
    import pynvml

    ways: dict[str, Callable[[], float]] = {
        "gpu_utilization": lambda: (
            sum(float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) for gpu in gpus) / len(gpus)
        ),
        "gpu_memory_used_mb": lambda: (
            sum(float(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in gpus) / MB / len(gpus)
        ),
        "gpu_memory_total_mb": lambda: (
            sum(float(pynvml.nvmlDeviceGetMemoryInfo(gpu).total) for gpu in gpus) / MB / len(gpus)
        ),
        "gpu_temperature": lambda: max(
            float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)) for gpu in gpus
        ),
    }
    values: dict[str, float] = {}
    for name, way in ways.items() if gpus else ():
        with contextlib.suppress(pynvml.NVMLError):
            values[name] = way()
    return values
