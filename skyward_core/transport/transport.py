"""What a client needs of a node: write a file of its directory, follow its log, large values there and back, a sign of
life.

`LocalReach` is for nodes that are processes of this machine and does all of it with files; `ssh_transport.RemoteReach`
goes over SSH. `Reaches` holds those of one pool: the pool opens it and closes it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import SkywardError
from skyward_core.events.events import SkywardEvent
from skyward_core.machines.instances import Instance
from skyward_core.worker.private_folders import is_private
from skyward_core.worker.settings import memory_directory, write_atomically
from skyward_core.worker.watchdog import uptime, write_busy, write_lease, write_paid
from skyward_core.worker.wire import Parcel

REMOTE_HOME = "skyward_core.transport.ssh_transport"
"""Where `RemoteReach` lives: imported when the first node is reached over SSH, for asyncssh costs a quarter of a second
that `Local` need not pay.
"""


class Reach(Protocol):
    """The way to one node.

    Methods block; they may be called from any thread, and raise Unreachable (ConnectionLost) when the way is cut.
    """

    instance: Instance
    is_here: bool
    """True if the node shares this machine's memory and loopback."""

    @property
    def is_connected(self) -> bool:
        """True while the node answers, as far as is known."""
        ...

    @property
    def value_directories(self) -> tuple[str, ...]:
        """Folders on the node for large values, the first in its memory."""
        ...

    def start(self, script: str, *, timeout_seconds: float, emit: Callable[[SkywardEvent], object]) -> None:
        """Have the node run its bootstrap script. Where the provider has done so already there is nothing to do."""
        ...

    def join(self, *, timeout_seconds: float, guard_seconds: float | None = None) -> object:
        """Reach a node that somebody else has started, and keep its lease from now on.

        Raises CommandFailed if it has ended.
        """
        ...

    def opened(self) -> None:
        """The node is a part of the pool: what it is asked from now on has its own limit of time, and no longer that of
        `start` or `join`.
        """
        ...

    def read(self, name: str) -> str:
        """Return the text of a file of the node's directory. Raises OSError or CommandFailed if it is not there."""
        ...

    def write(self, name: str, text: str) -> None:
        """Write a private file of the node's directory; its reader sees it whole or not at all."""
        ...

    def write_in_memory(self, name: str, text: str) -> str | None:
        """Write a private file into the node's memory, which no copy of its disk has; return its path.

        None if it has no such place: nothing is written.
        """
        ...

    def new_lines(self) -> list[str]:
        """Return the lines that the node's log has got since the last call. Does not wait."""
        ...

    def address(self, address: str) -> str:
        """Return what to connect to here in order to reach an address (`tls://host:port`) that the node listens on."""
        ...

    def can_reach(self, host: str, port: int) -> bool:
        """Tell whether the node gets through to another one."""
        ...

    def lead(self, port: int, to_local_port: int) -> None:
        """Let connections to 127.0.0.1:`port` on the node end at a port of this machine."""
        ...

    def lives(self, timeout_seconds: float) -> bool | None:
        """Tell whether the node's supervisor lives; None if it has not begun yet.

        Raises CommandTimedOut or ConnectionLost if the machine does not say.
        """
        ...

    def put(self, parcel: Parcel) -> Parcel:
        """Put a parcel into a file in the node's memory, or where it has room; return it as the node sees it.

        Raises OSError or CommandFailed without room.
        """
        ...

    def take(self, parcel: Parcel, *, keep: bool = False) -> Parcel:
        """Return a parcel that lies in a file of the node in a form that this process can read.

        The file is gone then, or with `release`, unless `keep`.
        """
        ...

    def release(self, parcel: Parcel) -> None:
        """Remove a parcel's file that nobody will take."""
        ...

    def extend_lease(self, seconds: float) -> None:
        """Let the node's lease run for so many seconds from now, unless it runs longer already; say so too if the pool
        has calls to run.
        """
        ...

    def close(self) -> None:
        """Let go of the node; it lives on until its lease runs out."""
        ...


class LocalReach:
    """The way to a node that is a set of processes of this machine."""

    is_here = True
    is_connected = True

    def __init__(
        self, instance: Instance, is_busy: Callable[[], bool], paid_seconds: Callable[[], float | None]
    ) -> None:
        assert instance.directory is not None
        self.instance = instance
        self._is_busy = is_busy
        self._paid_seconds = paid_seconds
        self._directory = Path(instance.directory)
        memory = memory_directory(instance.id)
        self.value_directories = (memory, str(self._directory)) if is_private(Path(memory)) else (str(self._directory),)
        self._telling = threading.Lock()
        """Held from asking for how long the node is paid until it is told: what was asked for later is what stands
        there.
        """
        self._read = 0
        self._partial = b""

    def start(self, script: str, *, timeout_seconds: float, emit: Callable[[SkywardEvent], object]) -> None:
        """Nothing to do: the provider runs the script."""

    def join(self, *, timeout_seconds: float, guard_seconds: float | None = None) -> object:
        """Nothing to connect to."""

    def opened(self) -> None:
        """Nothing to do: files are there at once."""

    def read(self, name: str) -> str:
        return (self._directory / name).read_text()

    def write(self, name: str, text: str) -> None:
        write_atomically(self._directory / name, text)

    def write_in_memory(self, name: str, text: str) -> str | None:
        """None: the disk of this machine is nobody's to copy."""
        return None

    def new_lines(self) -> list[str]:
        try:
            with (self._directory / "log").open("rb") as log:
                log.seek(self._read)
                chunk = log.read()
        except FileNotFoundError:  # given back meanwhile
            return []
        self._read += len(chunk)
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def address(self, address: str) -> str:
        return address

    def can_reach(self, host: str, port: int) -> bool:
        return True

    def lead(self, port: int, to_local_port: int) -> None:
        """Nothing to do: the node has this machine's loopback."""

    def lives(self, timeout_seconds: float) -> bool | None:
        try:
            pid = int((self._directory / "supervisor").read_text())
        except FileNotFoundError:
            return None if self._directory.is_dir() else False
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        # nothing can be read of a zombie
        return f"SKYWARD_INSTANCE_DIRECTORY={self._directory}".encode() in environ.split(b"\0")

    def put(self, parcel: Parcel) -> Parcel:
        return parcel.put_aside(self.value_directories)

    def take(self, parcel: Parcel, *, keep: bool = False) -> Parcel:
        if not keep:
            return parcel
        data, buffers = parcel.contents(is_last_reader=False)
        return Parcel(bytes(data), buffers)

    def release(self, parcel: Parcel) -> None:
        parcel.release()

    def extend_lease(self, seconds: float) -> None:
        write_lease(self._directory, uptime() + seconds)
        self.say_busy()

    def say_busy(self) -> None:
        """Let the node know until when it is paid for, and that the pool has calls to run, if it has: other nodes'
        count for this one's `timeout` too.
        """
        with self._telling:
            if (paid := self._paid_seconds()) is not None:
                write_paid(self._directory, uptime() + paid)
        if self._is_busy():
            write_busy(self._directory)

    def close(self) -> None:
        """Nothing to let go of."""


class Reaches:
    """The ways to the nodes of one pool, by instance id. `close` ends them all."""

    def __init__(
        self,
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        paid_seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._emit = emit
        self._paid_seconds = paid_seconds
        """Tells for how long from now the nodes are paid for; None: without end."""
        self.is_busy = False
        """Whether the pool has calls to run; its owner says so."""
        self._lock = threading.Lock()
        self._reaches: dict[str, Reach] = {}
        self._wires: Wires | None = None
        self._is_closed = False

    def to(self, instance: Instance) -> Reach:
        """Return the way to an instance, made when first asked for. Nothing is dialled yet."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool is closing")
            if instance.id not in self._reaches:
                self._reaches[instance.id] = (
                    self._remote().reach(instance) if instance.endpoint is not None else self._local(instance)
                )
            return self._reaches[instance.id]

    def here(self) -> list[LocalReach]:
        """Return the ways to nodes of this machine: nothing keeps their lease by itself."""
        with self._lock:
            return [reach for reach in self._reaches.values() if isinstance(reach, LocalReach)]

    def tell_paid(self) -> set[str]:
        """Tell the nodes anew for how long they are paid; return the ids of those that have heard it."""
        with self._lock:
            reaches = list(self._reaches.values())

        def tell(reach: Reach) -> None:
            try:
                if isinstance(reach, LocalReach):
                    reach.say_busy()
                elif reach.is_connected:
                    reach.extend_lease(self._lease_seconds)
                else:
                    return
            except (SkywardError, OSError):
                return  # lost, or not to be reached now
            heard.add(reach.instance.id)

        heard = set[str]()
        side_by_side(tell, reaches, "skyward-paid", max(1, len(reaches)))
        return heard

    def all(self) -> list[Reach]:
        """Return the ways to all nodes that were asked for and not forgotten."""
        with self._lock:
            return list(self._reaches.values())

    def forget(self, instance: Instance) -> None:
        """Let go of an instance that is lost."""
        with self._lock:
            reach = self._reaches.pop(instance.id, None)
        if reach is not None:
            reach.close()

    def close(self) -> None:
        """Let go of all. May be called twice."""
        with self._lock:
            self._is_closed = True
            reaches, self._reaches = list(self._reaches.values()), {}
            wires, self._wires = self._wires, None
        # one that is silent takes its time
        side_by_side(lambda reach: reach.close(), reaches, "skyward-close", len(reaches))
        if wires is not None:
            wires.close()

    def _local(self, instance: Instance) -> LocalReach:
        return LocalReach(instance, lambda: self.is_busy, self._paid_seconds)

    def _remote(self) -> Wires:
        if self._wires is None:
            self._wires = cast(
                "Wires",
                importlib.import_module(REMOTE_HOME).Wires(
                    self._lease_seconds, self._emit, lambda: self.is_busy, self._paid_seconds
                ),
            )
        return self._wires


class Wires(Protocol):
    """What all SSH connections of a pool share."""

    def reach(self, instance: Instance) -> Reach:
        """Return the way to an instance."""
        ...

    def close(self) -> None:
        """End what is shared."""
        ...
