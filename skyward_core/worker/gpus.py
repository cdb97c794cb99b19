"""NVIDIA GPUs of this machine that a process may use, through NVML.

NVML shows all GPUs of a machine. `CUDA_VISIBLE_DEVICES` says which of them CUDA shows to a process. Slurm sets it, and
so do people who share a machine. Source of the rules: CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

GB = 1e9
VISIBLE = "CUDA_VISIBLE_DEVICES"
BROKEN_CONTEXT = re.compile(
    r"\b(CUDA|HIP) error: |\b(CUDA_ERROR_|CUBLAS_STATUS_|CUDNN_STATUS_)[A-Z]|\b(cuda|hip)Error[A-Z]"
)
"""What PyTorch ("CUDA error: ...") and CuPy ("cudaErrorIllegalAddress: ...") write when a kernel has failed, as
`make gpu` shows, and the names of errors in CUDA's driver interface. "CUDA out of memory" is not among it: after that
the context can be used.
"""


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
