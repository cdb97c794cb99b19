"""Who answers for a pool: a process, named so that any other process of its host can tell whether it still lives."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from skyward_core.worker.settings import process_start, this_process

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


class OwnerState(StrEnum):
    """Whether an owner lives, as far as can be told from here."""

    ALIVE = "alive"
    DEAD = "dead"
    # of another host, another boot of this one, or another container, or hidden: nobody here can see its process
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its user and host for people; boot, pid namespace, pid and start (clock ticks since boot) never repeat
    together.
    """

    user: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Self:
        """Return this very process."""
        process = this_process()
        return cls(_user(), socket.gethostname(), _boot(), _namespace(), process.pid, process.started)

    @property
    def name(self) -> str:
        """`user@host`."""
        return f"{self.user}@{self.host}"

    @property
    def process(self) -> str:
        """The part that tells this process from all others, as one word; `parse` reads it."""
        return f"{self.boot}.{self.namespace}.{self.pid}.{self.started}"

    @classmethod
    def parse(cls, name: str, process: str) -> Self:
        """Return the owner from its `name` and `process`. Raises ValueError for what is neither."""
        user, _, host = name.rpartition("@")
        boot, namespace, pid, started = process.split(".")
        return cls(user, host, boot, namespace, int(pid), started)

    @classmethod
    def unknown(cls, name: str) -> Self:
        """Return an owner of whom only the name is known: whether it lives cannot be told."""
        user, _, host = name.rpartition("@")
        return cls(user, host, "", "", 0, "")

    def state(self) -> OwnerState:
        """Tell whether the process lives; UNKNOWN if it is none that could be seen from here."""
        if (self.host, self.boot, self.namespace) != (socket.gethostname(), _boot(), _namespace()) or not self.boot:
            return OwnerState.UNKNOWN
        started = process_start(self.pid)
        if started is None or not self.started:
            return OwnerState.UNKNOWN
        return OwnerState.ALIVE if started == self.started else OwnerState.DEAD


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())


def _boot() -> str:
    """This boot of the kernel; empty where it does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    """The number of this process's pid namespace: a pid means nothing outside of it."""
    try:
        return PID_NAMESPACE.readlink().name.removeprefix("pid:[").removesuffix("]")
    except OSError:
        return ""
