"""The folders of this machine's nodes, one on disk and one in memory for each, and which of them no node needs.

A folder has its launcher's process in the file `launched-by`. It is written before the node's first process starts.
States, and who removes the folder:

    made, and its launcher lives           the launcher, if the start fails
    a process of the node lives            `Local.terminate`, or the keeper, if the launcher is gone
    no process, and the launcher is dead   the next sweep (`abandoned`): both were killed, or it was before the start

When a node has ended, its keeper writes when and why into a file with its id, in the folder `ended` beside `nodes`. It
stays, because the ledger may learn of the end much later. The oldest are removed when there are too many.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from skyward_core.errors import BadRequest
from skyward_core.machines.node_end import NodeEnd, node_end
from skyward_core.machines.owner import Owner, OwnerState, boot_id
from skyward_core.paths import existing, first_private, state_places
from skyward_core.worker.private_folders import NotPrivate, is_private
from skyward_core.worker.settings import memory_directory
from skyward_core.worker.watchdog import uptime

NODES, ENDS = "nodes", "ended"
MOST_ENDS = 2000
LAUNCHED_BY = "launched-by"
ID_SHAPE = re.compile(r"local-[0-9a-f]{12}")
ABANDONED_SECONDS = 86_400.0
"""An empty folder without its launcher's name is abandoned when it is older. A newer one may get the name yet."""


def make_folders(instance_id: str) -> Path:
    """Create the folders of an instance, on disk and in memory, before another process can know its id.

    Raises BadRequest if no folder is safe.
    """
    try:
        directory = first_private(NODES, state_places(), is_locked=True) / instance_id
    except NotPrivate as error:
        raise BadRequest(f"nodes of this machine need a separate folder: {error}") from error
    directory.mkdir(mode=0o700)
    with contextlib.suppress(OSError):  # then the cost of a node whose end no process sees is estimated
        end_file(directory).parent.mkdir(mode=0o700, exist_ok=True)
        _forget_old_ends(end_file(directory).parent)
    here = Owner.here()
    (directory / LAUNCHED_BY).write_text(f"{here.name}\n{here.process}\n")
    with contextlib.suppress(OSError):  # large values go into the other folder
        os.mkdir(memory_directory(instance_id), 0o700)
    return directory


def remove_folders(instance_id: str, directory: Path) -> None:
    """Remove the folders of an instance. In another user's folder nothing is ours."""
    shutil.rmtree(memory_directory(instance_id), ignore_errors=True)
    if is_private(directory.parent):
        shutil.rmtree(directory, ignore_errors=True)


def end_file(directory: Path) -> Path:
    """Return the file in which the keeper of a node with this folder writes when and why the node has ended."""
    return directory.parent.parent / ENDS / directory.name


def ends_of(instance_ids: Iterable[str], now: datetime) -> dict[str, NodeEnd]:
    """Return when and why nodes of this user have ended, by id; those that have left no file are absent."""
    found: dict[str, NodeEnd] = {}
    boot, up = boot_id(), uptime()
    for folder in existing(ENDS, state_places()):
        if not is_private(folder):
            continue
        for instance_id in instance_ids:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = (folder / instance_id).read_text() if ID_SHAPE.fullmatch(instance_id) else ""
                if (end := node_end(text, now=now, uptime=up, boot=boot)) is not None:
                    found[instance_id] = end
    return found


def _forget_old_ends(folder: Path) -> None:
    with os.scandir(folder) as entries:
        files = list(entries)
    if len(files) > MOST_ENDS:
        for entry in sorted(files, key=lambda entry: entry.stat().st_mtime)[: len(files) - MOST_ENDS // 2]:
            with contextlib.suppress(OSError):  # another process removes it
                os.unlink(entry.path)


def abandoned(has_processes: Callable[[str], bool]) -> list[Path]:
    """Return the folders on disk of nodes that have ended and whose launchers are dead.

    `has_processes` returns whether any process of an instance lives. A folder whose launcher is not visible from here
    is left: another container, or another computer with the same home, may have it.
    """
    return [
        directory
        for nodes in existing(NODES, state_places())
        if is_private(nodes)
        for directory in sorted(nodes.iterdir())
        if ID_SHAPE.fullmatch(directory.name) and _is_abandoned(directory) and not has_processes(directory.name)
    ]


def remove_abandoned_memory(has_processes: Callable[[str], bool]) -> None:
    """Remove the empty folders in memory of nodes whose keepers were killed together with all other processes.

    No other process would. Only old and empty ones: processes of another container cannot be seen here.
    """
    pattern = Path(memory_directory("local-*"))
    for folder in pattern.parent.glob(pattern.name):
        instance_id = f"local-{folder.name.rpartition('-')[2]}"
        with contextlib.suppress(OSError):  # it is not empty, or another process removes it
            is_old = time.time() - folder.stat().st_mtime > ABANDONED_SECONDS
            if is_old and ID_SHAPE.fullmatch(instance_id) and not has_processes(instance_id):
                folder.rmdir()


def _is_abandoned(directory: Path) -> bool:
    try:
        changed = directory.stat().st_mtime
    except OSError:  # another process removes it
        return False
    try:
        launcher = Owner.parse(*(directory / LAUNCHED_BY).read_text().split("\n")[:2])
    except (OSError, ValueError, TypeError):
        return not any(directory.iterdir()) and time.time() - changed > ABANDONED_SECONDS
    here = Owner.here()
    if launcher.host == here.host and "" not in (launcher.boot, here.boot) and launcher.boot != here.boot:
        # of an earlier boot; but another computer may have the same name and the same home, and writes leases there
        return changed < time.time() - uptime()
    return launcher.state() is OwnerState.DEAD
