"""Control groups (cgroup v2) for the nodes of this machine: whatever forks in one stays in it, and the kernel kills all
of it at once (`cgroup.kill`).

A group is a folder below the group of the process that makes it, or beside that (`_home`). It needs a kernel of 5.14 or
later and a folder that this user may write to: root has one nearly everywhere, other users below their systemd user
manager (`user@.service` and what it starts), and nobody in most containers. Its name tells what it is of,
`skyward.INSTANCE.POOL.RANK`, and its owner whose it is: so any process of the same user finds it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
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
"""An empty group that is older than this belongs to a node that has ended; a younger one may be about to be entered."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group of one node, by its folder."""

    path: Path
    instance_id: str
    pool_id: str
    rank: int

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Read a folder's name; None for any other."""
        found = NAME_SHAPE.fullmatch(path.name)
        return cls(path, found["instance"], found["pool"], int(found["rank"])) if found else None

    @property
    def is_populated(self) -> bool:
        """Whether there is a living process in it or in a group below it."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except OSError:  # removed
            return False

    def kill(self) -> None:
        """Have the kernel kill all that is in it, forks under way included, whoever it runs as."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove it with the groups below it; False if it is populated still."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return not self.path.exists()


def make(instance_id: str, pool_id: str, rank: str) -> ControlGroup | None:
    """Make a group for a node, below that of this process or beside it; None where that cannot be had."""
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
    """Return the groups of nodes that this user has made, wherever they are in the hierarchy.

    A read of its folders: some milliseconds.
    """
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


def remove_abandoned() -> None:
    """Remove the empty groups of nodes that have ended when nobody was there to do it."""
    for group in all_groups():
        with contextlib.suppress(OSError):
            if not group.is_populated and time.time() - group.path.stat().st_ctime > ABANDONED_SECONDS:
                group.remove()


def _home() -> Path | None:
    """Where groups of nodes are made; None if it is not to be seen here.

    A group with processes of its own hands no controller down (cgroups(7)). So it is the group above that of this
    process if that hands `memory` down, and if what is made there escapes no limit of this process's group: such as the
    group above a login session's or a terminal's.
    """
    own = call_groups.own_group()
    if own is None:
        return None
    above = own.parent
    hands_down = "memory" in _read(above / "cgroup.subtree_control").split()
    is_ours = os.access(above, os.W_OK) and os.access(above / "cgroup.procs", os.W_OK)
    return above if hands_down and is_ours and all(_read(own / name).strip() in NO_LIMIT for name in LIMITS) else own


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return call_groups.read(path)
    return ""
