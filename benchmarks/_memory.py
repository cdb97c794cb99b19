"""Measure the memory of a case's processes from outside: bytes of their PSS, and of /dev/shm.

PSS (proportional set size) counts a page that n processes map as 1/n for each. So the sum over all processes is the
memory that they use together. The PSS of a process includes its mapped pages of /dev/shm. The figure of the file system
also includes pages that no process maps.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from dataclasses import dataclass

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SECONDS_BETWEEN_SAMPLES = 0.02


@dataclass(frozen=True)
class MemoryUse:
    pss: int
    shm: int


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, so that the count includes the daemons of a system."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants() -> list[psutil.Process]:
    """Return every living process below this one, and reap the adopted ones that have ended."""
    living: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def memory_use() -> MemoryUse:
    """Return the memory of all processes below this one."""
    return MemoryUse(sum(_pss(process.pid) for process in descendants()), _shm())


def settled(seconds: float = 0.6) -> MemoryUse:
    """Return the memory use when it changes by less than a megabyte within `seconds / 2`, or after `5 * seconds`."""
    deadline = time.monotonic() + 5 * seconds
    before = memory_use()
    while time.monotonic() < deadline:
        time.sleep(seconds / 2)
        now = memory_use()
        if abs(now.pss - before.pss) < 1e6 and now.shm == before.shm:
            return now
        before = now
    return before


class Peak:
    """Takes samples until `read`, which returns the highest PSS and the highest use of /dev/shm.

    The two values may come from different samples.
    """

    def __init__(self) -> None:
        self._highest = memory_use()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")
        self._thread.start()

    def read(self) -> MemoryUse:
        self._stop.set()
        self._thread.join()
        return self._highest

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_SAMPLES):
            now = memory_use()
            self._highest = MemoryUse(max(self._highest.pss, now.pss), max(self._highest.shm, now.shm))


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0  # the process has ended


def _shm() -> int:
    usage = os.statvfs("/dev/shm")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
