"""Control groups (cgroup v2) for the nodes of this machine: child processes stay in the group of their parent, and the
kernel kills all of them at once (`cgroup.kill`).

A group is a folder below the group of the process that creates it, or beside that group (`_home`). It needs a kernel of
5.14 or later, and a folder that this user may write to. Root has one nearly everywhere, other users below their systemd
user manager (`user@.service` and its children), and no user in most containers. Its name has the instance, the pool and
the rank, `skyward.INSTANCE.POOL.RANK`, and its owner is the user: so any process of the same user finds it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from skyward_core.worker import call_groups

NAME_SHAPE = re.compile(
    r"skyward\.(?P<instance>local-[0-9a-f]{12})\.(?P<pool>[A-Za-z0-9_-]{1,120})\.(?P<rank>[0-9]{1,6})"
)
LIMITS = ("memory.max", "memory.high", "pids.max", "cpu.max", "cpuset.cpus", "io.max")
NO_LIMIT = ("", "max", "max 100000")
ABANDONED_SECONDS = 60.0
"""An empty group that is older belongs to a node that has ended. A newer one may soon get its first process."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group of one node, by its folder."""

    path: Path
    instance_id: str
    pool_id: str
    rank: int

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Return the group of a folder; None for a folder with another name."""
        found = NAME_SHAPE.fullmatch(path.name)
        return cls(path, found["instance"], found["pool"], int(found["rank"])) if found else None

    @property
    def is_populated(self) -> bool:
        """Whether a living process is in it or in a group below it."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except OSError:  # removed
            return False

    def kill(self) -> None:
        """Have the kernel kill all processes in it, of any user, including forks in progress."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove it with the groups below it; return False if it is still populated."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return not self.path.exists()


def make(instance_id: str, pool_id: str, rank: str) -> ControlGroup | None:
    """Create a group for a node, below that of this process or beside it; return None if that is impossible."""
    home = _home()
    group = None if home is None else ControlGroup.of(home / f"skyward.{instance_id}.{pool_id}.{rank}")
    if group is None:
        return None
    try:
        group.path.mkdir()
    except OSError:
        return None
    if not os.access(group.path / "cgroup.kill", os.W_OK):  # a kernel before 5.14
        group.remove()
        return None
    return group


def all_groups() -> list[ControlGroup]:
    """Return the groups of nodes that this user has created, anywhere in the hierarchy. It takes some milliseconds."""
    hierarchy = call_groups.mount()
    found: list[ControlGroup] = []
    if hierarchy is not None:
        for folder, below, _ in os.walk(hierarchy[1]):
            groups = [
                group
                for name in below
                if name.startswith("skyward.") and (group := ControlGroup.of(Path(folder, name))) is not None
            ]
            for group in groups:
                with contextlib.suppress(OSError):
                    if group.path.stat().st_uid == os.getuid():
                        found.append(group)
    return found


def remove_abandoned(clock: Callable[[], float] = time.time) -> None:
    """Remove the empty groups of nodes that have ended while no process was there to remove them."""
    for group in all_groups():
        with contextlib.suppress(OSError):
            if not group.is_populated and clock() - group.path.stat().st_ctime > ABANDONED_SECONDS:
                group.remove()


def _home() -> Path | None:
    """Return the folder for groups of nodes; None if the hierarchy is not visible.

    A group that has processes cannot pass controllers to the groups below it (cgroups(7)). So the folder is the parent
    of this process's group, if the parent passes `memory` and this process's group sets no limits. An example
    is the parent of a login session's group.
    """
    own = call_groups.own_group()
    if own is None:
        return None
    above = own.parent
    passes_memory = "memory" in _read(above / "cgroup.subtree_control").split()
    is_ours = os.access(above, os.W_OK) and os.access(above / "cgroup.procs", os.W_OK)
    return above if passes_memory and is_ours and all(_read(own / name).strip() in NO_LIMIT for name in LIMITS) else own


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return call_groups.read(path)
    return ""
