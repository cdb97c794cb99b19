"""Writers of a ledger in SQLite: the queue before its write lock, who holds that lock, and checkpoints.

SQLite has no queue. A writer that finds the lock taken sleeps, up to 0.1 s at a time, and tries again. A process that
writes without a pause takes the lock again before any other one looks, and the others may not get it for minutes.

    come ──▶ lock a byte behind all locked ones ──▶ wait until no byte before it is locked ──▶ write ──▶ unlock

The bytes are those of an empty file beside the ledger. The kernel unlocks the byte of a process that ends. The queue
only arranges: whether a writer may write is decided by SQLite's own lock. A process in the queue may be stopped, or may
write for long. So a writer that sees no other one move for STUCK_SECONDS stops waiting. Writers behind it see that it
has passed the place in front of it, and do not wait for that place any more.

A checkpoint moves what is in the `-wal` file into the ledger's file. SQLite does this after commits by itself, beside
the commits of other processes. Before 3.51.3 (3.50.7, 3.44.6) that may lose commits or damage the file
(sqlite.org/wal.html, "The WAL-Reset Bug"), and distributions have older versions. So connections switch it off, and
`Checkpoints` does it in the mode TRUNCATE, which takes the write lock first. SQLite goes on without the lock if it does
not get it in WAIT_SECONDS. So `Checkpoints` first waits until the lock is free, and makes no checkpoint if a process
keeps it. A process that takes the lock in the moment between, and keeps it for longer than WAIT_SECONDS, can still
commit beside a checkpoint. The last connection that is closed makes a checkpoint too, when no other process has the
ledger open.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL


LARGEST_BYTES = 4 << 20
"""SQLite's own limit: 1,000 pages."""
AGAIN_SECONDS = 60.0
"""When the next attempt follows one that did not succeed, because a process reads for long, or is stopped."""
WAIT_SECONDS = 2.0
"""How long a checkpoint waits for the write lock, and then for readers. Writers wait meanwhile."""

_log = logging.getLogger("skyward")


class Checkpoints:
    """Decides when a ledger needs a checkpoint, and makes it. Safe to use from threads. PostgreSQL needs none."""

    def __init__(self, url: URL, busy_timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._wal = Path(f"{url.database}-wal") if url.get_backend_name() == "sqlite" else None
        self._busy_timeout_seconds = busy_timeout_seconds
        self._clock = clock
        self._again_at = 0.0

    def after_commit(self, engine: Engine) -> None:
        """Make a checkpoint if the `-wal` file is large. Raises nothing: what was committed is safe without it."""
        if self._wal is None or self._size() < LARGEST_BYTES or self._clock() < self._again_at:
            return
        self._again_at = self._clock() + AGAIN_SECONDS
        try:
            if self._make(engine):
                self._again_at = 0.0
        except (DBAPIError, sqlite3.Error) as error:  # the second one from the driver itself
            _log.debug("no checkpoint of the ledger: %s", error)

    def _size(self) -> int:
        assert self._wal is not None
        try:
            return self._wal.stat().st_size
        except OSError:  # there is none
            return 0

    def _make(self, engine: Engine) -> bool:
        """Make a checkpoint; return whether the `-wal` file is empty now."""
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver = cast("Any", connection.connection)
            driver.rollback()  # SQLite refuses a checkpoint in a transaction
            driver.execute(f"PRAGMA busy_timeout={WAIT_SECONDS * 1000:.0f}")
            try:
                driver.execute("BEGIN IMMEDIATE")  # waits for the write lock
                driver.execute("ROLLBACK")
                is_busy, _, _ = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                driver.execute(f"PRAGMA busy_timeout={self._busy_timeout_seconds * 1000:.0f}")
        return not is_busy


QUEUE_ENDING = "-queue"
STUCK_SECONDS = 1.0
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.1
"""A writer looks after so many seconds for each writer before it."""
END = 1 << 40
"""More than the places that are taken at once."""
_FLOCK = "hhqqi"  # struct flock of fcntl(2): type, whence, start, length, pid


class WriterQueue:
    """The queue of one ledger's writers. Safe to use from threads. PostgreSQL needs none: its locks have one."""

    def __init__(
        self,
        url: URL,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        is_sqlite = url.get_backend_name() == "sqlite"
        # one name for one file: a link to the ledger leads to the same queue
        self._path = Path(os.path.realpath(str(url.database)) + QUEUE_ENDING) if is_sqlite else None
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
        """Wait, and look at two places before `mine` only: the first one and the last one. A hundred writers look ten
        times a second each, and the kernel goes through all locks for each look.

        If the last place is free and the first one is not, the writer of the last one did not wait for the first one,
        or it was killed. Then this one does not wait either.
        """
        before = sorted(_taken(descriptor, mine))
        moved_at = self._clock()
        while before:
            self._pause(min(len(before) * PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
            if _is_free(descriptor, before[-1]):
                return
            taken = (number for number, place in enumerate(before) if not _is_free(descriptor, place))
            first = next(taken, len(before))
            if first:
                moved_at = self._clock()
            elif self._clock() - moved_at > STUCK_SECONDS:
                return
            before = before[first:]


def _is_free(descriptor: int, place: int) -> bool:
    return _holder(descriptor, place, place + 1) is None


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


# Who holds the write lock. The kernel knows the process, and no file is opened for that: closing one drops all locks
# that this process has on it (fcntl(2)).

SQLITE_BUSY = 5
"""A primary result code (sqlite.org/rescode.html)."""
SHARED_MEMORY_ENDING = "-shm"
WRITE_LOCK_BYTE = 120
"""The byte of the `-shm` file that a writer locks (sqlite.org/walformat.html, section 2.3.1)."""
LONGEST_COMMAND = 80


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds the write lock of a ledger. `command` is "" if it cannot be read."""

    pid: int
    command: str = ""
    is_stopped: bool = False

    def __str__(self) -> str:
        """Return it in words."""
        if self.pid == os.getpid():
            return f"this process, {self.pid}, in another thread or connection,"
        return f"process {self.pid}{f' ({self.command})' if self.command else ''}"


def lock_holder(url: URL, proc: Path = Path("/proc")) -> LockHolder | None:
    """Return who holds the write lock; None if nobody does, or if the system does not tell (Linux does, for processes
    of this container).
    """
    try:
        inode = os.stat(f"{os.path.realpath(str(url.database))}{SHARED_MEMORY_ENDING}").st_ino
        locks = (proc / "locks").read_text()
    except OSError:
        return None
    for line in locks.splitlines():
        # 12: POSIX  ADVISORY  WRITE 4711 fe:00:131074 120 120 (proc_locks(5)); "->" marks one that waits
        words = line.split()
        if len(words) != 8 or words[3] != "WRITE" or not words[4].isdigit() or not words[6].isdigit():
            continue
        last = math.inf if words[7] == "EOF" else int(words[7]) if words[7].isdigit() else -1
        if words[5].rpartition(":")[2] == str(inode) and int(words[6]) <= WRITE_LOCK_BYTE <= last and words[4] != "0":
            return _holder_of(int(words[4]), proc)
    return None


def _holder_of(pid: int, proc: Path) -> LockHolder:
    command, state = "", ""
    with suppress(OSError, IndexError):
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        # the program and its script: later words may be secrets
        text = " ".join(os.path.basename(word) for word in words[:2] if word)
        command = "".join(character for character in text if character.isprintable())[:LONGEST_COMMAND]
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return LockHolder(pid, command, state in ("T", "t"))


def is_busy(error: BaseException) -> bool:
    """Return whether an error says that another writer has kept the lock for the whole time."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return code is not None and code & 0xFF == SQLITE_BUSY


def begin_in_turn[T](begin: Callable[[], T], url: URL) -> T:
    """Begin a transaction; if another process that runs has the lock, wait once more, for as long again.

    Many processes that write one after the other make a ledger busy: it is not stuck. Raises what `begin` raises.
    """
    try:
        return begin()
    except DBAPIError as error:
        if not is_busy(error):
            raise
        holder = lock_holder(url)
        if holder is None or holder.is_stopped:
            raise
    return begin()
