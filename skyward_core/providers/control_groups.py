"""Control groups (cgroup v2) for the nodes of this machine: whatever forks in one stays in it, and the kernel kills all of it at once (`cgroup.kill`).

A group is a folder below the group of the process that makes it. That needs a kernel of 5.14 or later and a folder that this user may write to: root has one
nearly everywhere, other users below their systemd user manager (`user@.service` and what it starts), and nobody in most containers. Its name tells what it is
of, `skyward.INSTANCE.POOL.RANK`, and its owner whose it is: so any process of the same user finds it, with no process left that carries a tag.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

NAME_SHAPE = re.compile(r"skyward\.(?P<instance>local-[0-9a-f]{12})\.(?P<pool>[A-Za-z0-9_-]{1,120})\.(?P<rank>[0-9]{1,6})")
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
    """Make a group for a node below that of this process; None where that cannot be had."""
    home = _own_folder()
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
    """Return the groups of nodes that this user has made, wherever they are in the hierarchy. A read of its folders: some milliseconds."""
    mount = _mount()
    found: list[ControlGroup] = []
    if mount is not None:
        for folder, below, _ in os.walk(mount[1]):
            groups = [group for name in below if name.startswith("skyward.") and (group := ControlGroup.of(Path(folder, name))) is not None]
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


def _own_folder() -> Path | None:
    """The folder of this process's group; None if it is not to be seen here."""
    mount = _mount()
    with contextlib.suppress(OSError):
        own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None)
        if mount is not None and own is not None and not own.startswith("/.."):  # above the root of a namespace
            root, point = mount
            inside = Path(own)
            return point / inside.relative_to(root) if inside.is_relative_to(root) else None
    return None


def _mount() -> tuple[Path, Path] | None:
    """Where cgroup v2 is mounted: which of its folders is the root there, and the mount point."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            front, _, back = line.partition(" - ")
            if back.startswith("cgroup2 "):
                fields = front.split()
                return Path(fields[3]), Path(fields[4])
    return None
