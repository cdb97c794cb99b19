"""A queue in front of the write lock of a ledger in SQLite: writers get it in the order in which they come.

SQLite has no queue. A writer that finds the lock taken sleeps, up to 0.1 s at a time, and tries again. A process that
writes without a pause takes the lock again before any other one looks, and the others may not get it for minutes.

    come ──▶ lock a byte behind all locked ones ──▶ wait until no byte before it is locked ──▶ write ──▶ unlock

The bytes are those of an empty file beside the ledger. The kernel unlocks the byte of a process that ends. The queue
only arranges: whether a writer may write is decided by SQLite's own lock. A process in the queue may be stopped, or may
write for long. So a writer that sees no other one move for STUCK_SECONDS stops waiting. Writers behind it see that it
has passed the place in front of it, and do not wait for that place any more.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

ENDING = "-queue"
STUCK_SECONDS = 1.0
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.1
"""A writer looks after so many seconds for each writer before it."""
END = 1 << 40
"""More than the places that are taken at once."""
_FLOCK = "hhqqi"  # struct flock of fcntl(2): type, whence, start, length, pid


class Turns:
    """The queue of one ledger's writers. Safe to use from threads. PostgreSQL needs none: its locks have one."""

    def __init__(
        self,
        url: URL,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        is_sqlite = url.get_backend_name() == "sqlite"
        # one name for one file: a link to the ledger leads to the same queue
        self._path = Path(os.path.realpath(str(url.database)) + ENDING) if is_sqlite else None
        self._clock = clock
        self._pause = pause

    @contextmanager
    def turn(self) -> Generator[None]:
        """Wait for the writers that came before, then hold the turn. Raises nothing: without a queue none waits."""
        descriptor = self._queue()
        if descriptor is None:
            yield
            return
        mine: int | None = None
        try:
            with suppress(OSError):  # for example a file system without locks
                mine = _take_place(descriptor)
                self._wait(descriptor, mine)
            yield
        finally:
            with suppress(OSError):
                if mine is not None:  # a fork of this process may have the descriptor too, and must not keep the place
                    _set(descriptor, fcntl.F_UNLCK, mine)
            os.close(descriptor)

    def waiting(self) -> int:
        """Return how many writers are in the queue, with the one that writes."""
        descriptor = self._queue()
        if descriptor is None:
            return 0
        try:
            return len(_taken(descriptor, END))
        finally:
            os.close(descriptor)

    def _queue(self) -> int | None:
        if self._path is None:
            return None
        with suppress(OSError):  # the folder is not writable, so the ledger is not writable either
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return None

    def _wait(self, descriptor: int, mine: int) -> None:
        before = _taken(descriptor, mine)
        moved_at = self._clock()
        while before:
            self._pause(min(len(before) * PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
            still = [place for place in before if _holder(descriptor, place, place + 1) is not None]
            if len(still) < len(before):
                moved_at = self._clock()
            elif self._clock() - moved_at > STUCK_SECONDS:
                return
            before = _moving(before, still)


def _moving(before: list[int], still: list[int]) -> list[int]:
    """Return the places in `still` that may move. One behind which another of `before` is free already does not."""
    first_free = min(set(before) - set(still), default=-1)
    return [place for place in still if place > first_free]


def _take_place(descriptor: int) -> int:
    """Lock the byte behind the last locked one, and return its number."""
    while True:
        place = 0
        while (found := _holder(descriptor, place, END)) is not None:
            place = found + 1
        with suppress(BlockingIOError, PermissionError):  # another writer has taken it just now
            _set(descriptor, fcntl.F_WRLCK, place)
            return place


def _taken(descriptor: int, end: int) -> list[int]:
    """Return the bytes before `end` that other writers have locked."""
    taken: list[int] = []
    ranges = [(0, end)]
    while ranges:
        first, last = ranges.pop()
        if (found := _holder(descriptor, first, last)) is not None:
            taken.append(found)
            ranges += [(first, found), (found + 1, last)]  # the kernel reports any of them, not the first one
    return taken


def _holder(descriptor: int, start: int, end: int) -> int | None:
    """Return the number of a byte in this range that another writer has locked; None if there is none."""
    if start >= end:
        return None
    flock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
    kind, _, found, _, _ = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, flock))
    return None if kind == fcntl.F_UNLCK else int(found)


def _set(descriptor: int, kind: int, place: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, place, 1, 0))
