"""Where a fleet's files and processes are, who owns them, and one function that removes all of them at every exit.

A fleet is a number from 1 to 250, held by a lock on /run/skyward-testbed-<number>.lock. The kernel releases the lock
when its owner dies in any way. The next process that gets the lock removes what that owner left.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import time
from pathlib import Path

from tests.testbed.network import Network

RUN = Path("/run")
TAG = "SKYWARD_TESTBED"
"""Every process that carries a host has the number of its fleet in this environment variable."""
NUMBERS = range(1, 251)


def claim() -> tuple[int, int]:
    """Return the first free number, and the descriptor that holds it; remains of a dead owner are removed first."""
    for number in NUMBERS:
        if (lock := take(number)) is not None:
            sweep(number)
            return number, lock
    raise RuntimeError(f"all of {len(NUMBERS)} fleets are in use: python -m tests.testbed gc")


def take(number: int, *, is_patient: bool = False) -> int | None:
    """Return a descriptor that holds the number.

    None if another process holds it, or held it during the wait and has removed the fleet.
    """
    path = _lock_of(number)
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX if is_patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock).st_ino:  # not a file that its owner removed before our lock
            return lock
    os.close(lock)
    return None


def release(number: int, lock: int) -> None:
    """Remove all of the fleet and release its number."""
    try:
        sweep(number)
    finally:
        _lock_of(number).unlink(missing_ok=True)
        os.close(lock)


def sweep_abandoned() -> list[int]:
    """Remove every fleet without a living owner; return their numbers."""
    found = [int(path.stem.rpartition("-")[2]) for path in sorted(RUN.glob("skyward-testbed-*.lock"))]
    swept = []
    for number in found:
        if (lock := take(number)) is not None:
            release(number, lock)
            swept.append(number)
    return swept


def sweep(number: int) -> None:
    """Kill and remove everything of this fleet.

    The caller holds its number. Raises RuntimeError with what could not be removed in time.
    """
    deadline = time.monotonic() + 60.0
    while True:
        for pid in _processes(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        Network(number).remove()
        if not _processes(number):
            shutil.rmtree(directory(number), ignore_errors=True)
        if not (left := leftovers(number)):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"left behind of fleet {number}: {', '.join(left)}")
        time.sleep(0.02)


def leftovers(number: int) -> list[str]:
    """Return what exists of this fleet: processes, network interfaces, mounts of this namespace, files."""
    files = [str(directory(number))] if directory(number).exists() else []
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{directory(number)}/" in line]
    return [*(f"process {pid}" for pid in _processes(number)), *Network(number).links(), *mounts, *files]


def directory(number: int) -> Path:
    """Where the fleet keeps its keys and the directories of its hosts."""
    return RUN / f"skyward-testbed-{number}"


def _processes(number: int) -> list[int]:
    """Return the living processes that carry this fleet's hosts; processes inside the hosts end with them."""
    wanted = f"{TAG}={number}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _lock_of(number: int) -> Path:
    return RUN / f"skyward-testbed-{number}.lock"
