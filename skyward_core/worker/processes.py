"""Signals and memory of a process that may be gone already."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# the time that a runner has to stop: later it is in the kernel, and takes the signal before all else
STOP_SECONDS = 1.0
STOP_LOOK_SECONDS = 0.0002


def stop(pid: int) -> None:
    """Stop a process, not its children; return when it has stopped or is gone, or after STOP_SECONDS."""
    deadline = time.monotonic() + STOP_SECONDS
    send_signal(pid, signal.SIGSTOP)
    while time.monotonic() < deadline and not _is_stopped(pid):
        time.sleep(STOP_LOOK_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Return whether a process's main thread is stopped or traced (field 3 of proc(5) stat), or the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][0] in "TtZX"
    except OSError:
        return True


def kill_group(pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)


def send_signal(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, sig)


@dataclass(frozen=True, slots=True)
class StrayProcess:
    """A process that has left the group of the process that started it.

    `started` is in clock ticks since the machine's start: a later process with the same pid has another value.
    """

    pid: int
    started: int

    def send(self, sig: signal.Signals) -> None:
        """Send a signal, unless the process is gone."""
        if (status := _status_of(self.pid)) is not None and status.started == self.started:
            send_signal(self.pid, sig)


def strays_of(pid: int) -> set[StrayProcess]:
    """Return the processes that a process has started, itself or through others that live, and that are not in the
    process group of its pid.
    """
    children: dict[int, list[tuple[int, _Status]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (status := _status_of(int(name))) is not None:
            children.setdefault(status.parent, []).append((int(name), status))
    found, parents = set[StrayProcess](), [pid]
    while parents:
        for child, status in children.pop(parents.pop(), ()):
            parents.append(child)
            if status.group != pid:
                found.add(StrayProcess(child, status.started))
    return found


class _Status(NamedTuple):
    """Fields 4, 5 and 22 of proc(5) stat."""

    parent: int
    group: int
    started: int


def _status_of(pid: int) -> _Status | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return None
    return _Status(int(fields[1]), int(fields[2]), int(fields[19]))


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0
