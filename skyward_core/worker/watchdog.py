"""The node's own end: what belongs to it, when it must stop, and how it takes everything along.

A local instance is the set of processes that carry its tag in the environment they were started with. The tag is there from the
creating call on, is inherited, and cannot be lost with a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

INSTANCE_TAG = "SKYWARD_INSTANCE_ID"
PR_SET_PDEATHSIG = 1
POOL_TAG = "SKYWARD_POOL_ID"


def tagged_processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield pid and starting environment of every living process of this user that carries an instance tag."""
    needle = f"{INSTANCE_TAG}=".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{entry}/environ").read_bytes()
            if needle in raw and not _is_zombie(entry):
                yield int(entry), _parse(raw)


def kill_instance(instance_id: str, sig: int = signal.SIGKILL) -> int:
    """Send a signal to every process of an instance but the calling one; return how many there were. Call again until it says 0: a fork may slip by."""
    pids = [pid for pid, environ in tagged_processes() if environ.get(INSTANCE_TAG) == instance_id and pid != os.getpid()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
    return len(pids)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG); if the parent is gone already, die now."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in "ZX"


def _parse(raw: bytes) -> dict[str, str]:
    pairs = (item.partition("=") for item in raw.decode(errors="surrogateescape").split("\0") if item)
    return {name: value for name, _, value in pairs}
