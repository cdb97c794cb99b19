"""The stacks of the processes of calls, on request. The processes go on, and need not cooperate.

A runner registers a signal for which Python writes the stacks of all its threads, from C, into a file in its memory:
this works while a call is inside a library too. Its worker reads the file through /proc. A runner that has not
registered has no such file, and gets no signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import signal
import time
from typing import NamedTuple

SIGNAL = signal.SIGRTMAX - 3
"""One that nothing else uses: the first real-time signals are the C library's, and the last ones systemd's."""
FILE = "skyward-stacks"
READY = b"ready\n"
ANSWER_SECONDS, POLL_SECONDS = 3.0, 0.01


class SlotStack(NamedTuple):
    """One slot: the process of its calls, for how long it has run the present batch (None: idle), and its stacks."""

    pid: int
    busy_seconds: float | None
    text: str


def answer_requests() -> None:
    """Let this process write its stacks when it gets the signal. Called once, before the first call."""
    file = os.memfd_create(FILE)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, file, all_threads=True)
    os.write(file, READY)  # last: the signal would end a process that has not registered


async def stacks_of(pid: int) -> str:
    """Return the stacks of a runner; "" if it has ended, or is stopped."""
    path = _file_of(pid)
    if path is None:
        return ""
    try:
        with open(path, "r+b", buffering=0) as file:  # noqa: ASYNC230 - it is in memory
            begin = file.seek(0, os.SEEK_END)
            if begin == 0:
                return ""
            os.kill(pid, SIGNAL)
            await _written(file.fileno(), begin)
            file.seek(begin)
            text = file.read().decode(errors="replace")
            file.truncate(len(READY))
            return text
    except OSError:
        return ""


def _file_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{FILE}"):
                    return path
    return None


async def _written(file: int, begin: int) -> None:
    """Wait until the file has grown, and grows no more."""
    deadline = time.monotonic() + ANSWER_SECONDS
    size = begin
    while time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)
        now = os.fstat(file).st_size
        if now == size > begin:
            return
        size = now
