"""Samples of a node: processor and memory through psutil, GPUs through NVML where there is one.

A sample is a dict with the fields of `events.Metrics`, which the client makes from it: importing all events would
take 10 ms at each node's start.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from skyward_core.concurrency.threads import LoopThread

MB = 1e6
GB = 1e9
VISIBLE = "CUDA_VISIBLE_DEVICES"
BROKEN_CONTEXT = re.compile(
    r"\b(CUDA|HIP) error: |\b(CUDA_ERROR_|CUBLAS_STATUS_|CUDNN_STATUS_)[A-Z]|\b(cuda|hip)Error[A-Z]"
)
"""What PyTorch ("CUDA error: ...") and CuPy ("cudaErrorIllegalAddress: ...") write when a kernel has failed, as
`make gpu` shows, and the names of errors in CUDA's driver interface. "CUDA out of memory" is not among it: after that
the context can be used.
"""


type Sample = dict[str, str | int | float | None]


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
        LoopThread("skyward-metrics", self._run).start_if_possible()

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

    measures: dict[str, Callable[[], float]] = {
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
    for name, measure in measures.items() if gpus else ():
        with contextlib.suppress(pynvml.NVMLError):
            values[name] = measure()
    return values


# NVIDIA GPUs of this machine that a process may use, through NVML.
#
# NVML shows all GPUs of a machine. `CUDA_VISIBLE_DEVICES` says which of them CUDA shows to a process. Slurm sets it,
# and so do people who share a machine. Source of the rules: CUDA C++ Programming Guide, "CUDA Environment Variables".


def is_context_broken(traceback_text: str) -> bool:
    """Return whether a call failed in a way that may leave its process without a usable CUDA context.

    After such an error each later call to CUDA in the same process fails with it too (CUDA Runtime API, "Error
    handling": "sticky" errors). Only a new process helps.
    """
    return BROKEN_CONTEXT.search(traceback_text) is not None


def gpus_here() -> tuple[tuple[str, float], ...]:
    """Return name, as the driver gives it, and memory in GB of the NVIDIA GPUs that this process may use; empty without
    a driver. Raises NVMLError if a driver is there and fails.
    """
    import pynvml

    handles = open_handles()
    try:
        return tuple(
            (str(pynvml.nvmlDeviceGetName(handle)), float(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / GB)
            for handle in handles
        )
    finally:
        if handles:
            pynvml.nvmlShutdown()


def open_handles(environ: Mapping[str, str] = os.environ) -> list[Any]:
    """Return NVML's handles of the GPUs that a process with this environment may use; empty without a driver.

    NVML stays initialised if there are some: end it with `nvmlShutdown`. Raises NVMLError if a driver is there and
    fails.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles: list[Any] = []
    try:
        handles = list(_visible(environ.get(VISIBLE)))
    finally:
        if not handles:
            pynvml.nvmlShutdown()
    return handles


def _visible(limit: str | None) -> Iterator[Any]:
    """Yield the handles in the order of the limit. A word that names no GPU ends the list, as in CUDA."""
    import pynvml

    everything = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if limit is None:
        yield from everything
        return
    for word in limit.split(","):
        if (handle := _named(word.strip(), everything)) is None:
            return
        yield handle


def _named(word: str, everything: list[Any]) -> Any | None:
    import pynvml

    if word.isdecimal():
        return everything[int(word)] if int(word) < len(everything) else None
    if word.startswith("GPU-"):  # CUDA takes the beginning of a UUID if it names one GPU
        found = [handle for handle in everything if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(word)]
        return found[0] if len(found) == 1 else None
    if word.startswith("MIG-"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(word)
        except pynvml.NVMLError:
            return None
    return None
