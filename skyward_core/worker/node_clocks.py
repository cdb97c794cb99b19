"""How a node ends: which processes belong to it, when it must stop, and how it kills all of them.

A local instance is the set of processes that have its tag in the environment with which they started. The first process
has it, all others inherit it, and it cannot be lost with a file.

Five clocks end a node: `timeout` since the last running call; `max_lifetime` since its start; the lease, which clients
renew; the end of its warm time, which the last client of a pool with a name writes, and which the next one's first
renewal removes; and the time until which it is paid for, which the pool's owner writes. All use /proc/uptime, because
the time of day may be wrong and may jump.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from skyward_core.wire.settings import NodeSettings, write_atomically
from skyward_core.worker.keeper import KEEPER, REAPER, name_of

INSTANCE_TAG = "SKYWARD_INSTANCE_ID"
POOL_TAG = "SKYWARD_POOL_ID"
LEASE = "lease"
BUSY = "busy"
PAID = "paid"
LEAVING = "leaving"
"""The marks of clients that are about to leave, one a line. The renewal of any other client removes the file. So a
client whose mark is there knows that no other one has come (docs/decisions/0046).
"""
WARM = "warm"
"""The uptime at which the warm time of a node ends that no client uses. Any client's renewal removes the file."""
DETACHED = "detached"
"""The pool is detached: the living owner does not replace the lease any more."""
MISSED = "missed"
"""Indexes of workers that stay away from the scheduler; the pool's owner writes them. They are killed and restarted."""
LEASE_SHAPE = re.compile(rb"[0-9]+(\.[0-9]+)?\s*")  # the guard, a shell script, can read it too
PR_SET_PDEATHSIG = 1


# ── what belongs to the node ─────────────────────────────────────────────────────────────────────────────────────────


def tagged_processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield pid and starting environment of every living process of this user that carries an instance tag.

    Those of other users, which root can read too, are left out: a tag there says whatever that user has written.
    """
    needle = f"{INSTANCE_TAG}=".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{entry}/environ").read_bytes()
            if needle in raw and _real_user(entry) == os.geteuid() and not _is_zombie(entry):
                yield int(entry), _parse(raw)


def members(instance_id: str) -> dict[int, bool]:
    """Return the living processes of an instance but the calling one, each with whether it is a keeper: those with its
    tag, and all that is below them.
    """
    tagged = {pid for pid, environ in tagged_processes() if environ.get(INSTANCE_TAG) == instance_id}
    if not tagged:
        return {}
    found: dict[int, bool] = {}
    children = _children()
    waiting = list(tagged)
    while waiting:
        pid = waiting.pop()
        if pid not in found and (name := name_of(pid)) != REAPER:
            found[pid] = name == KEEPER and pid in tagged
            waiting += [child.pid for child in children.get(pid, ())]
    found.pop(os.getpid(), None)
    return found


def kill_instance(instance_id: str, sig: int = signal.SIGKILL) -> int:
    """Send a signal to every process of an instance but the calling one; return how many there were.

    Call it again until it returns 0: it may miss a process that forks. SIGKILL spares the keepers while other processes
    live, because a living keeper finds all processes below it. Processes that it may not kill count too.
    """
    alive = members(instance_id)
    others = {pid for pid, is_keeper in alive.items() if not is_keeper}
    for pid in others if others and sig == signal.SIGKILL else alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sig)
    return len(alive)


def kill_all_but_keepers(instance_id: str) -> int:
    """Send SIGKILL to every process of an instance but the calling one and the keepers; return how many there were.

    Call it again until it returns 0. A keeper has to write when and why the node has ended. So one look decides which
    processes are none: by a second one the last of the others may have ended, and only keepers would be left to kill.
    """
    others = [pid for pid, is_keeper in members(instance_id).items() if not is_keeper]
    for pid in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(others)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG); if the parent is gone
    already, die now.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


class ProcessIdentity(NamedTuple):
    """A process: its pid and start time (clock ticks since boot), which together never repeat."""

    pid: int
    started: int


def descendants(spared: AbstractSet[ProcessIdentity] = frozenset()) -> set[ProcessIdentity]:
    """Return the living processes that come from this one; nothing of those that are spared, and no reapers: those of
    pools that calls have opened.
    """
    children = _children()
    found: set[ProcessIdentity] = set()
    parents = [os.getpid()]
    while parents:
        new = {
            birth
            for birth in children.get(parents.pop(), ())
            if birth not in spared and birth not in found and name_of(birth.pid) != REAPER
        }
        found |= new
        parents += [birth.pid for birth in new]
    return found


def _children() -> dict[int, list[ProcessIdentity]]:
    """The living processes of this machine, by their parent."""
    children: dict[int, list[ProcessIdentity]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, parent, *rest = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(") ")[2].split()
            if state not in "ZX":
                children.setdefault(int(parent), []).append(ProcessIdentity(int(entry), int(rest[17])))
    return children


def kill_descendants(spared: AbstractSet[ProcessIdentity], deadline_seconds: float) -> set[ProcessIdentity]:
    """Kill and reap all descendants of this process that are not spared; return those that live at the deadline.

    These are stuck in the kernel. It finds orphans only if this process adopts them.
    """
    deadline = time.monotonic() + deadline_seconds
    while alive := descendants(spared):
        if time.monotonic() > deadline:
            return alive
        for birth in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(birth.pid, signal.SIGKILL)
        reap_all()
        # until the kernel has ended them; a process that forked meanwhile is found in the next round
        time.sleep(0.002)
    reap_all()
    return set()


def reap_all() -> None:
    """Reap all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# ── when it must stop ────────────────────────────────────────────────────────────────────────────────────────────────


def uptime() -> float:
    """Return the seconds since this machine was started, as the guard sees them.

    Read from the file and not from CLOCK_BOOTTIME: in containers with lxcfs the two differ, and a shell script has only
    the file.
    """
    return float(Path("/proc/uptime").read_text().split()[0])


def read_lease(directory: Path) -> float | None:
    """Return the uptime in seconds at which the lease of a node runs out; None if there is no lease, or none that can
    be read.
    """
    return _read_uptime(directory / LEASE)


def write_lease(directory: Path, until: float, *, may_shorten: bool = False, is_leaving: bool = False) -> None:
    """Let a node's lease run until this uptime of its machine, in seconds, unless it runs longer already. Several
    clients may do so at once.

    `may_shorten` corrects an error: the lease ends at that time even if it ran longer. A client that is leaving renews
    the lease too, but does not use the node any more: marks and warm time stay.
    Raises ValueError for what is not a point in time, OSError if the node's directory is gone.
    """
    _refuse_what_is_no_time(until)
    with _turn(directory):
        if not is_leaving:
            for name in (LEAVING, WARM):
                (directory / name).unlink(missing_ok=True)
        _lengthen(directory, until, may_shorten=may_shorten)


def write_leaving(directory: Path, mark: str) -> None:
    """Add the mark of a client that is about to leave. Raises OSError if the node's directory is gone."""
    with _turn(directory):
        marks = _marks(directory)
        write_atomically(directory / LEAVING, "".join(f"{one}\n" for one in (*marks, mark)))


def write_warm(directory: Path, until: float, mark: str = "") -> bool:
    """Let the warm time of a node end at this uptime of its machine, if no client has come since the one with this mark
    was about to leave; return whether that is so. The lease lasts until then at least.

    Without a mark a warm time is made longer, never shorter; a node that has none gets the longer lease only.
    Raises ValueError for what is not a point in time, OSError if the node's directory is gone.
    """
    _refuse_what_is_no_time(until)
    with _turn(directory):
        present = read_warm(directory)
        if mark and mark not in _marks(directory):
            return False
        _lengthen(directory, until)
        if mark or (present is not None and present < until):
            write_atomically(directory / WARM, f"{until:.3f}\n")
    return True


def read_warm(directory: Path) -> float | None:
    """Return the uptime at which a node's warm time ends; None if it is not warm."""
    return _read_uptime(directory / WARM)


@contextlib.contextmanager
def _turn(directory: Path) -> Generator[None]:
    """Wait until no other client changes the lease of a node."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lengthen(directory: Path, until: float, *, may_shorten: bool = False) -> None:
    present = read_lease(directory)
    if may_shorten or present is None or present < until:
        write_atomically(directory / LEASE, f"{until:.3f}\n")


def _marks(directory: Path) -> list[str]:
    try:
        return (directory / LEAVING).read_text().splitlines()
    except FileNotFoundError:
        return []


def read_paid(directory: Path) -> float | None:
    """Return the uptime in seconds until which the node is paid for; None if that was never written."""
    return _read_uptime(directory / PAID)


def write_paid(directory: Path, until: float) -> None:
    """Write until which uptime, in seconds, the node is paid for. It may be less than before.

    Raises ValueError for what is not a point in time, OSError if the node's directory is gone.
    """
    _refuse_what_is_no_time(until)
    write_atomically(directory / PAID, f"{until:.3f}\n")


def read_busy(directory: Path) -> float:
    """Return the uptime at which a client last reported that the pool has calls to run; 0 if none has."""
    return _read_uptime(directory / BUSY) or 0.0


def write_busy(directory: Path) -> None:
    """Report that the pool has calls to run, maybe on other nodes. Raises OSError if the node's directory is gone."""
    write_atomically(directory / BUSY, f"{uptime():.3f}\n")


def _refuse_what_is_no_time(until: float) -> None:
    """Raise ValueError for a time that cannot be read back: the node would ignore it and might never end."""
    if not math.isfinite(until) or until < 0:
        raise ValueError(f"an uptime in seconds is a point in time, not {until}")


def _read_uptime(path: Path) -> float | None:
    """Return the number in a file; None if it cannot be read."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    until = float(text) if LEASE_SHAPE.fullmatch(text) else math.inf
    return until if math.isfinite(until) else None


class BusyFlag:
    """Whether a runner has a call: one number in memory that it shares with the supervisor, odd while a call runs.

    Made before the fork.
    """

    def __init__(self) -> None:
        self._count = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self._seen = 0

    def begin(self) -> None:
        """A call begins; nothing if one runs already."""
        self._count[0] |= 1

    def end(self) -> None:
        """The call has ended; nothing if none ran."""
        self._count[0] += self._count[0] & 1

    def look(self) -> bool:
        """Return whether a call runs, or has run since the last look. Only one caller may look."""
        seen, self._seen = self._seen, self._count[0]
        return self._seen % 2 == 1 or self._seen != seen


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time limits of a node, in seconds. `max_lifetime_seconds` None: no limit."""

    timeout_seconds: float
    max_lifetime_seconds: float | None = None

    def verdict(
        self,
        now: float,
        started: float,
        busy_at: float,
        lease_until: float | None,
        paid_until: float | None = None,
        warm_until: float | None = None,
    ) -> str | None:
        """Return why the node must end now, or None.

        All are uptimes: `busy_at` when a call ran last, the last three None where there is no such limit.
        """
        if self.max_lifetime_seconds is not None and now - started >= self.max_lifetime_seconds:
            return f"alive for {self.max_lifetime_seconds:g} s (max_lifetime)"
        # before the money: that of a warm pool is reserved for the warm time, and ends with it
        if warm_until is not None and now >= warm_until:
            return "its warm time is over (keep_warm)"
        if paid_until is not None and now >= paid_until:
            return "the money is used up (max_cost, budget)"
        if lease_until is not None and now >= lease_until:
            return "no sign of life from a client, and the lease has run out (lease_seconds)"
        if now - busy_at >= self.timeout_seconds:
            return f"idle for {self.timeout_seconds:g} s (timeout)"
        return None


class Watch:
    """The present clocks of one node: when it started, when a call ran last, and the last readable lease."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._started = self._busy_at = clock()
        self._lease_until: float | None = None
        self._paid_until: float | None = None

    def note_call(self) -> None:
        """A call has run until now."""
        self._busy_at = self._clock()

    def verdict(self, settings: NodeSettings, marks: Iterable[BusyFlag]) -> str | None:
        """Look at the marks of all runners, the lease and the clocks; return why the node must end now, or None.

        An owner on this machine replaces the lease while it lives. If it is gone and has left no lease, the node ends.
        """
        now = self._clock()
        looks = [mark.look() for mark in marks]  # at every mark, not only up to the first that is busy
        if any(looks):
            self._busy_at = now
        self._busy_at = max(self._busy_at, min(now, read_busy(self._directory)))
        if (until := read_lease(self._directory)) is not None:
            self._lease_until = until
        if (until := read_paid(self._directory)) is not None:
            self._paid_until = until
        lease_until = self._lease_until
        if settings.owner is None:
            lease_until = self._started + settings.lease_seconds if lease_until is None else lease_until
        elif settings.owner.is_alive() and not (self._directory / DETACHED).exists():
            lease_until = None
        elif lease_until is None:
            return "its client is gone"
        return Clocks(settings.timeout_seconds, settings.max_lifetime_seconds).verdict(
            now, self._started, self._busy_at, lease_until, self._paid_until, read_warm(self._directory)
        )


def _real_user(pid: str) -> int:
    """Return the real user id of a process (proc(5) status).

    The owner of /proc/PID proves nothing: it is root where a process has made itself undumpable. Nor does the effective
    user id: a program with the set-user-ID bit runs with the environment of the user who has started it.
    """
    status = Path(f"/proc/{pid}/status").read_bytes()
    return int(status.partition(b"\nUid:")[2].split(None, 1)[0])


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in "ZX"


def _parse(raw: bytes) -> dict[str, str]:
    pairs = (item.partition("=") for item in raw.decode(errors="surrogateescape").split("\0") if item)
    return {name: value for name, _, value in pairs}
