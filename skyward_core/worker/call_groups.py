"""Memory limits that the kernel enforces: a control group (cgroup v2) for each runner.

This needs a node whose group may delegate the controller `memory`. A group that delegates a controller has no processes
itself (cgroups(7), "no internal processes"). So the node's group (docs/decisions/0011) is divided:

    skyward.INSTANCE...    the node's own, made at its launch; killed, found and removed as a whole
    ├── node               keepers, supervisor, workers and all else
    └── calls-N            one process of calls with all that these start: memory.max is the limit, no swap, and who
    goes over it is killed with the rest

All of this is optional. If a step fails, only the worker's own check (`slot.MEMORY_CHECK_SECONDS`) limits a call. That
check always runs: ten times a second, and only for the runner itself. The kernel counts each page, and includes the
processes that the call has started.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NODE, CALLS = "node", "calls-"
MOVES = 50
"""How often the processes of the node's group are moved: a process that forks meanwhile is moved the next time."""


class CallGroups:
    """The groups of a node's processes of calls, made and removed by its supervisor."""

    def __init__(self, group: Path, limit_bytes: int) -> None:
        self._group = group
        self._limit_bytes = limit_bytes
        self._made = 0
        self._over: set[Path] = set()
        """Groups of processes that have ended. Processes that they have started may still be in them."""

    def make(self) -> Path | None:
        """Make a group for another process; None if the kernel refuses."""
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
        """Return whether the kernel has killed a group for lack of memory. Remove empty groups."""
        was_killed = _count(path / "memory.events", "oom_kill") > 0
        self._over.add(path)
        for old in list(self._over):
            with contextlib.suppress(OSError):
                old.rmdir()
            if not old.exists():
                self._over.remove(old)
        return was_killed


def call_groups(instance_id: str, limit_bytes: int | None) -> CallGroups | None:
    """Divide the control group of this node, which has this process; None without a limit or a group."""
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
                with contextlib.suppress(OSError):  # it has ended, or belongs to another user now
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
    """The memory limit of this process's group.

    It grows by results in memory, which the kernel counts for the process.
    """

    def __init__(self, group: Path, limit_bytes: int) -> None:
        self._group = group
        self._limit_bytes = limit_bytes
        self._results: dict[str, int] = {}

    def make(self, more_bytes: int) -> None:
        """Raise the limit for a result that is to be written."""
        self._results = {path: size for path, size in self._results.items() if os.path.exists(path)}
        with contextlib.suppress(OSError):
            write(self._group / "memory.max", str(self._limit_bytes + sum(self._results.values()) + more_bytes))

    def keep(self, path: str, size: int) -> None:
        """Remember a result that was written."""
        self._results[path] = size

    def settle(self) -> None:
        """Lower the limit by results that were fetched."""
        if self._results:
            self.make(0)


def own_group() -> Path | None:
    """Return the folder of this process's control group; None if it is not visible here."""
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
    """Return where cgroup v2 is mounted: the folder that is the root there, and the mount point."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            front, _, back = line.partition(" - ")
            if back.startswith("cgroup2 "):
                fields = front.split()
                return Path(fields[3]), Path(fields[4])
    return None


def read(path: Path) -> str:
    """Read a file of the kernel."""
    return path.read_text()


def write(path: Path, text: str) -> None:
    """Write to a file of the kernel, in one write."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _count(path: Path, name: str) -> int:
    """Return a number of one of the kernel's tables, whose lines are a name and a number; 0 if it is missing."""
    with contextlib.suppress(OSError, ValueError):
        return int(dict(line.split() for line in read(path).splitlines()).get(name, 0))
    return 0
