"""How much memory a case's processes hold, seen from outside: bytes of their PSS, and of /dev/shm.

PSS (proportional set size) counts a page that n processes map as 1/n in each, so that its sum over processes is what
they hold together. Pages of /dev/shm that some process maps are in its PSS as well; the file system's own figure also
has those that nobody maps.
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
class Held:
    pss: int
    shm: int


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, so that no daemon of a system escapes the count."""
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


def held() -> Held:
    """Return what all processes below this one hold now."""
    return Held(sum(_pss(process.pid) for process in descendants()), _shm())


def settled(seconds: float = 0.6) -> Held:
    """Return what is held once nothing has moved by more than a megabyte for a while, or after five times that."""
    deadline = time.monotonic() + 5 * seconds
    before = held()
    while time.monotonic() < deadline:
        time.sleep(seconds / 2)
        now = held()
        if abs(now.pss - before.pss) < 1e6 and now.shm == before.shm:
            return now
        before = now
    return before


class Peak:
    """Samples until it is read; `read` returns the highest PSS and the highest use of /dev/shm, not necessarily of one
    moment.
    """

    def __init__(self) -> None:
        self._highest = held()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")
        self._thread.start()

    def read(self) -> Held:
        self._stop.set()
        self._thread.join()
        return self._highest

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_SAMPLES):
            now = held()
            self._highest = Held(max(self._highest.pss, now.pss), max(self._highest.shm, now.shm))


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended meanwhile


def _shm() -> int:
    usage = os.statvfs("/dev/shm")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
