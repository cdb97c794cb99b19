"""Limits of memory that the kernel keeps: a control group (cgroup v2) for each process of calls, where the node has a
group that may hand `memory` down.

A group that hands a controller down holds no process itself (cgroups(7), "no internal processes"). So the node's group
(docs/decisions/0011) is divided:

    skyward.INSTANCE...    the node's own, made at its launch; killed, found and removed as a whole
    ├── node               keepers, supervisor, workers and all else
    └── calls-N            one process of calls with all that these start: memory.max is the limit, no swap, and who
    goes over it is killed with the rest

Nothing here is needed: where a step fails, a node is as without it, and the worker's own watch
(`slot.MEMORY_CHECK_SECONDS`) bounds the process of a call. That one goes on beside the groups. It sees the process of
the call alone, ten times a second; the kernel sees each page, and what the call has started too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NODE, CALLS = "node", "calls-"
MOVES = 50
"""How often what is in the node's group is moved on: what forks meanwhile is met the next time."""


class CallGroups:
    """The groups of a node's processes of calls, made and removed by its supervisor."""

    def __init__(self, group: Path, limit_bytes: int) -> None:
        self._group = group
        self._limit_bytes = limit_bytes
        self._made = 0
        self._over: set[Path] = set()
        """Of processes that have ended; what they have started may be in them still."""

    def make(self) -> Path | None:
        """Make the group of one process more; None if the kernel refuses."""
        self._made += 1
        path = self._group / f"{CALLS}{os.getpid()}-{self._made}"
        try:
            path.mkdir()
            write(path / "memory.oom.group", "1")
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                write(path / "memory.swap.max", "0")
            write(path / "memory.max", str(self._limit_bytes))
        except OSError:
            self._over.add(path)
            return None
        return path

    def end(self, path: Path) -> bool:
        """Tell whether the kernel has killed what was in a group because it took too much memory; the group is removed
        once it is empty.
        """
        was_killed = _count(path / "memory.events", "oom_kill") > 0
        self._over.add(path)
        for old in list(self._over):
            with contextlib.suppress(OSError):
                old.rmdir()
            if not old.exists():
                self._over.remove(old)
        return was_killed


def call_groups(instance_id: str, limit_bytes: int | None) -> CallGroups | None:
    """Divide the control group of this node, in which this process is; None without a limit, or where the kernel keeps
    none.
    """
    own = None if limit_bytes is None else own_group()
    if limit_bytes is None or own is None:
        return None
    group = own.parent if own.name == NODE else own
    if not f"{group.name}.".startswith(f"skyward.{instance_id}."):
        return None
    return CallGroups(group, limit_bytes) if _divide(group) else None


def _divide(group: Path) -> bool:
    try:
        if "memory" not in read(group / "cgroup.controllers").split():
            return False
        rest = group / NODE
        rest.mkdir(exist_ok=True)
        for _ in range(MOVES):
            pids = read(group / "cgroup.procs").split()
            for pid in pids:
                with contextlib.suppress(OSError):  # it has ended, or has become somebody else's
                    write(rest / "cgroup.procs", pid)
            if not pids:
                break
        write(group / "cgroup.subtree_control", "+memory")
    except OSError:
        return False
    return True


def enter(group: Path) -> bool:
    """Move this process into a group. False where that is not possible."""
    try:
        write(group / "cgroup.procs", "0")
    except OSError:
        return False
    return True


class MemoryAllowance:
    """The limit of this process's own group, made larger by the results that it has put into memory: the kernel counts
    these as the process's.
    """

    def __init__(self, group: Path, limit_bytes: int) -> None:
        self._group = group
        self._limit_bytes = limit_bytes
        self._results: dict[str, int] = {}

    def make(self, more_bytes: int) -> None:
        """Make room for a result that is to be written."""
        self._results = {path: size for path, size in self._results.items() if os.path.exists(path)}
        with contextlib.suppress(OSError):
            write(self._group / "memory.max", str(self._limit_bytes + sum(self._results.values()) + more_bytes))

    def keep(self, path: str, size: int) -> None:
        """Remember a result that was written."""
        self._results[path] = size

    def settle(self) -> None:
        """Take back what results needed that have been fetched."""
        if self._results:
            self.make(0)


def own_group() -> Path | None:
    """The folder of this process's control group; None if it is not to be seen here."""
    found = mount()
    with contextlib.suppress(OSError):
        own = next(
            (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None
        )
        if found is not None and own is not None and not own.startswith("/.."):  # above the root of a namespace
            root, point = found
            inside = Path(own)
            return point / inside.relative_to(root) if inside.is_relative_to(root) else None
    return None


def mount() -> tuple[Path, Path] | None:
    """Where cgroup v2 is mounted: which of its folders is the root there, and the mount point."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            front, _, back = line.partition(" - ")
            if back.startswith("cgroup2 "):
                fields = front.split()
                return Path(fields[3]), Path(fields[4])
    return None


def read(path: Path) -> str:
    """Ask the kernel something."""
    return path.read_text()


def write(path: Path, text: str) -> None:
    """Tell the kernel something: one write, to a file that it has made."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _count(path: Path, name: str) -> int:
    """A number of one of the kernel's tables of a name and a number in each line; 0 if it is not there."""
    with contextlib.suppress(OSError, ValueError):
        return int(dict(line.split() for line in read(path).splitlines()).get(name, 0))
    return 0
