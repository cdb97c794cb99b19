"""Signals and memory of a process that may be gone already."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

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


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0
