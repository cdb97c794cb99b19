"""The owner of a pool: a process, named so that any other process of its host can check whether it lives."""

from __future__ import annotations

import os
import pwd
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from skyward_core.wire.settings import is_stopped, process_start, this_process

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


class OwnerState(StrEnum):
    """Whether an owner lives, as far as this process can see."""

    ALIVE = "alive"
    # SIGSTOP, Ctrl-Z, a debugger: it renews nothing, and may go on at any time
    STOPPED = "stopped"
    DEAD = "dead"
    # its process is on another host, in another boot or container, or hidden: it is not visible here
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. `user` and `host` are for people.

    The combination of boot, pid namespace, pid and start (clock ticks since boot) never repeats.
    """

    user: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Self:
        """Return this process."""
        process = this_process()
        return cls(_user(), socket.gethostname(), boot_id(), _namespace(), process.pid, process.started)

    @property
    def name(self) -> str:
        """`user@host`."""
        return f"{self.user}@{self.host}"

    @property
    def process(self) -> str:
        """The part that identifies the process, as one word; `parse` reads it."""
        return f"{self.boot}.{self.namespace}.{self.pid}.{self.started}"

    @classmethod
    def parse(cls, name: str, process: str) -> Self:
        """Return the owner from its `name` and `process`. Raises ValueError if they are malformed."""
        user, _, host = name.rpartition("@")
        boot, namespace, pid, started = process.split(".")
        return cls(user, host, boot, namespace, int(pid), started)

    @classmethod
    def unknown(cls, name: str) -> Self:
        """Return an owner of which only the name is known: its state is UNKNOWN."""
        user, _, host = name.rpartition("@")
        return cls(user, host, "", "", 0, "")

    def state(self) -> OwnerState:
        """Return whether the process lives; UNKNOWN if it would not be visible here."""
        if (self.host, self.boot, self.namespace) != (socket.gethostname(), boot_id(), _namespace()) or not self.boot:
            return OwnerState.UNKNOWN
        started = process_start(self.pid)
        if started is None or not self.started:
            return OwnerState.UNKNOWN
        if started != self.started:
            return OwnerState.DEAD
        return OwnerState.STOPPED if is_stopped(self.pid) else OwnerState.ALIVE


def _user() -> str:
    """Return the name of this process's user: not that of the environment, which `su` leaves as it was."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.geteuid())


def boot_id() -> str:
    """Return the id of this boot of the kernel; empty if it is not available."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    """Return the number of this process's pid namespace, in which its pid is valid."""
    try:
        return PID_NAMESPACE.readlink().name.removeprefix("pid:[").removesuffix("]")
    except OSError:
        return ""
