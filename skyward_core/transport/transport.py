"""How a client talks to a node: files of its directory, its log, large values in both directions, its lease.

`LocalTransport` is for nodes that are processes of this machine, and uses files. `ssh_transport.SSHTransport` uses SSH.
`Transports` holds the transports of one pool, which opens and closes it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol, cast

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import NodeLost, SkywardError, Unreachable
from skyward_core.events.events import SkywardEvent
from skyward_core.image.local_files import NodeFile
from skyward_core.machines.instances import Instance
from skyward_core.wire.messages import Parcel
from skyward_core.wire.node_log import LogPosition
from skyward_core.wire.private_folders import is_private
from skyward_core.wire.settings import memory_directory, write_atomically
from skyward_core.worker.node_clocks import uptime, write_busy, write_lease, write_leaving, write_paid, write_warm

SSH_MODULE = "skyward_core.transport.ssh_transport"
"""The module of `SSHTransport`. It is imported for the first node over SSH: importing asyncssh takes 0.25 s."""


class Transport(Protocol):
    """Transport to one node.

    Methods block, and may be called from any thread. They raise Unreachable (ConnectionLost) if the connection is cut.
    """

    instance: Instance
    is_local: bool
    """True if the node shares this machine's memory and loopback."""

    @property
    def is_connected(self) -> bool:
        """True while the node answers, as far as is known."""
        ...

    @property
    def value_directories(self) -> tuple[str, ...]:
        """Folders on the node for large values, the first in its memory."""
        ...

    def start(
        self,
        script: str,
        *,
        timeout_seconds: float,
        emit: Callable[[SkywardEvent], object],
        files: Sequence[NodeFile] = (),
    ) -> None:
        """Give the node these files, and let it run its bootstrap script. Does nothing if the provider has done so
        already.

        Raises FileChanged if a file is not here any more.
        """
        ...

    def send(self, files: Sequence[NodeFile]) -> None:
        """Give the node these files, unless it has them. Raises FileChanged."""
        ...

    def join(self, *, timeout_seconds: float, guard_seconds: float | None = None) -> object:
        """Connect to a node that another process has started, and renew its lease from now on.

        Raises CommandFailed if the node has ended.
        """
        ...

    def visit(self, *, timeout_seconds: float) -> None:
        """Connect to read, and renew no lease: for a process that only looks. `is_connected` is then true."""
        ...

    def opened(self) -> None:
        """The node has joined the pool: from now on each request has its own time limit.

        Before, the limit of `start` or `join` holds.
        """
        ...

    def read(self, name: str) -> str:
        """Return the text of a file of the node's directory. Raises OSError or CommandFailed if the file is missing."""
        ...

    def write(self, name: str, text: str) -> None:
        """Write a private file of the node's directory, atomically."""
        ...

    def write_in_memory(self, name: str, text: str) -> str | None:
        """Write a private file into the node's memory and return its path: no image of the disk contains it.

        Return None and write nothing if the node has no folder in memory.
        """
        ...

    def new_lines(self) -> list[str]:
        """Return the lines added to the node's log since the last call. Does not wait."""
        ...

    def address(self, address: str) -> str:
        """Return the address on this machine that leads to `address` (`tls://host:port`), where the node listens."""
        ...

    def can_reach(self, host: str, port: int) -> bool:
        """Return whether the node can connect to this host and port."""
        ...

    def lead(self, port: int, to_local_port: int) -> None:
        """Forward connections to 127.0.0.1:`port` on the node to a port of this machine."""
        ...

    def lives(self, timeout_seconds: float) -> bool | None:
        """Return whether the node's supervisor lives; None if it has not started yet.

        Raises CommandTimedOut or ConnectionLost if the machine does not answer.
        """
        ...

    def put(self, parcel: Parcel) -> Parcel:
        """Write a parcel into a file in the node's memory, or on its disk if memory is full.

        Return the parcel as the node sees it. Raises OSError or CommandFailed if there is no room.
        """
        ...

    def take(self, parcel: Parcel, *, keep: bool = False) -> Parcel:
        """Fetch a parcel that is in a file of the node, in a form that this process can read.

        The file is removed now or by `release`, unless `keep`.
        """
        ...

    def release(self, parcel: Parcel) -> None:
        """Remove a parcel's file that will not be fetched."""
        ...

    def extend_lease(self, seconds: float) -> None:
        """Renew the node's lease for so many seconds from now, unless it runs longer already.

        Also report whether the pool has calls to run, and until when the node is paid for.
        """
        ...

    def begin_to_leave(self, mark: str) -> None:
        """Leave this client's mark on the node: it is about to leave the pool. Its renewals keep the node alive from
        now on, but do not count as those of a client that uses it. The renewal of any other client removes the mark.
        """
        ...

    def keep_warm(self, seconds: float, mark: str = "") -> bool:
        """Let the node end so many seconds from now, whatever its lease, unless a client comes before; return False if
        one has come since the client with this mark began to leave. Without a mark it makes a warm time longer only.

        `timeout` counts from now.
        """
        ...

    def close(self) -> None:
        """Close the connection to the node. The node lives until its lease expires."""
        ...


def refuse_elsewhere(parcel: Parcel, transport: Transport) -> None:
    """Raise NodeLost for a value whose file is not in the folders that a node has for values: the node lies."""
    if not parcel.lies_in(transport.value_directories):
        raise NodeLost(f"{transport.instance.id} says that a value lies in {parcel.path!r}, where it keeps no values")


FIRST_LINE_BYTES = 64
"""So much of the first line of a log tells whether the log was cut."""


class LocalTransport:
    """Transport to a node that is a set of processes of this machine."""

    is_local = True
    is_connected = True

    def __init__(
        self,
        instance: Instance,
        is_busy: Callable[[], bool],
        paid_seconds: Callable[[], float | None],
        lease_seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        assert instance.directory is not None
        self.instance = instance
        self._is_busy = is_busy
        self._paid_seconds = paid_seconds
        self._lease_seconds = lease_seconds
        """Returns how long the node outlives its clients, in seconds; None: it ends with its owner."""
        self._directory = Path(instance.directory)
        memory = memory_directory(instance.id)
        self.value_directories = (memory, str(self._directory)) if is_private(Path(memory)) else (str(self._directory),)
        self._reporting = threading.Lock()
        """Held while the paid time is read and written, so that an older value never replaces a newer one."""
        self._is_leaving = False
        self._read = 0
        self._partial = b""
        self._first_line = b""
        """Of the log, as far as its first line tells whether it was cut."""
        self._position = LogPosition()

    def start(
        self,
        script: str,
        *,
        timeout_seconds: float,
        emit: Callable[[SkywardEvent], object],
        files: Sequence[NodeFile] = (),
    ) -> None:
        """Nothing to do: the provider runs the script, and the files are here."""

    def send(self, files: Sequence[NodeFile]) -> None:
        """Nothing to do: the files are here."""

    def join(self, *, timeout_seconds: float, guard_seconds: float | None = None) -> object:
        """Nothing to connect to."""

    def visit(self, *, timeout_seconds: float) -> None:
        """Nothing to connect to."""

    def opened(self) -> None:
        """Nothing to do: files need no time limit."""

    def read(self, name: str) -> str:
        return (self._directory / name).read_text(encoding="utf-8", errors="replace")  # calls may write to its log

    def write(self, name: str, text: str) -> None:
        write_atomically(self._directory / name, text)

    def write_in_memory(self, name: str, text: str) -> str | None:
        """None: no image is captured of this machine's disk."""
        return None

    def new_lines(self) -> list[str]:
        try:
            with (self._directory / "log").open("rb") as log:
                first_line = log.readline(FIRST_LINE_BYTES)
                if not first_line.startswith(self._first_line):  # it was cut
                    self._read, self._partial = 0, b""
                    self._position.restart()
                self._first_line = first_line
                log.seek(self._read)
                chunk = log.read()
        except FileNotFoundError:  # the node has ended meanwhile
            return []
        self._read += len(chunk)
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        lines = [line.decode(errors="replace") for line in whole]
        return [line for line in lines if self._position.is_new(line)]

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
        # the environment of a zombie is empty
        return f"SKYWARD_INSTANCE_DIRECTORY={self._directory}".encode() in environ.split(b"\0")

    def put(self, parcel: Parcel) -> Parcel:
        return parcel.moved_to_file(self.value_directories)

    def take(self, parcel: Parcel, *, keep: bool = False) -> Parcel:
        refuse_elsewhere(parcel, self)
        if not keep:
            return parcel
        data, buffers = parcel.contents(is_last_reader=False)
        return Parcel(bytes(data), buffers)

    def release(self, parcel: Parcel) -> None:
        refuse_elsewhere(parcel, self)
        parcel.release()

    def extend_lease(self, seconds: float) -> None:
        try:
            self._write_lease(seconds)
            self._write_paid_and_busy()
        except FileNotFoundError as error:
            raise Unreachable(f"the node {self.instance.id} has ended: its folder is gone") from error

    def begin_to_leave(self, mark: str) -> None:
        with self._reporting:
            write_leaving(self._directory, mark)
            self._is_leaving = True

    def keep_warm(self, seconds: float, mark: str = "") -> bool:
        if is_warm := write_warm(self._directory, uptime() + seconds, mark):
            self._write_paid_and_busy()
            write_busy(self._directory)
        return is_warm

    def keep_alive(self) -> None:
        """Renew the node's lease if it has one, and write until when it is paid for, and whether the pool has calls."""
        if (seconds := self._lease_seconds()) is not None:
            self._write_lease(seconds)
        self._write_paid_and_busy()

    def _write_lease(self, seconds: float) -> None:
        with self._reporting:
            write_lease(self._directory, uptime() + seconds, is_leaving=self._is_leaving)

    def _write_paid_and_busy(self) -> None:
        """Write until when the node is paid for, and whether the pool has calls to run.

        Calls on other nodes also count for this node's `timeout`.
        """
        with self._reporting:
            if (paid := self._paid_seconds()) is not None:
                write_paid(self._directory, uptime() + paid)
        if self._is_busy():
            write_busy(self._directory)

    def close(self) -> None:
        """Nothing to close."""


class Transports:
    """The transports to the nodes of one pool, by instance id. `close` closes them all."""

    def __init__(
        self,
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        paid_seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._emit = emit
        self._paid_seconds = paid_seconds
        """Returns for how many seconds from now the nodes are paid for; None: no limit."""
        self.is_busy = False
        """Whether the pool has calls to run. The session sets it."""
        self.lives_by_lease = False
        """Whether nodes of this machine outlive this process by their lease, new ones too. The session sets it."""
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._remote_connections: RemoteConnections | None = None
        self._is_closed = False

    def to(self, instance: Instance) -> Transport:
        """Return the transport to an instance, made at the first call. It does not connect yet."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool is closing")
            if instance.id not in self._transports:
                self._transports[instance.id] = (
                    self._remote().transport(instance) if instance.endpoint is not None else self._local(instance)
                )
            return self._transports[instance.id]

    def here(self) -> list[LocalTransport]:
        """Return the transports to nodes of this machine, whose leases the session renews."""
        with self._lock:
            return [transport for transport in self._transports.values() if isinstance(transport, LocalTransport)]

    def may_be_here(self, parcel: Parcel, instance_ids: Collection[str]) -> bool:
        """Return whether a node of this machine may have this value. `instance_ids`: those that this client has not
        connected to yet.
        """
        folders = {folder for transport in self.here() for folder in transport.value_directories}
        folders |= {memory_directory(instance_id) for instance_id in instance_ids if "/" not in instance_id}
        return parcel.lies_in(folders)

    def renew_local_leases(self) -> None:
        """Send signs of life to nodes of this machine (`LocalTransport.keep_alive`)."""
        for transport in self.here():
            with contextlib.suppress(OSError):  # the node is lost; the cluster notices that
                transport.keep_alive()

    def send_paid_time(self) -> set[str]:
        """Send the nodes their present paid time; return the ids of the nodes that have received it."""
        with self._lock:
            transports = list(self._transports.values())

        def send(transport: Transport) -> None:
            try:
                if isinstance(transport, LocalTransport):
                    transport.keep_alive()
                elif transport.is_connected:
                    transport.extend_lease(self._lease_seconds)
                else:
                    return
            except (SkywardError, OSError):
                return  # lost, or out of reach now
            received.add(transport.instance.id)

        received = set[str]()
        side_by_side(send, transports, "skyward-paid", max(1, len(transports)))
        return received

    def begin_to_leave(self, mark: str) -> None:
        """Leave this client's mark on all nodes. A node that does not answer ends with its lease: it raises nothing."""

        def begin(transport: Transport) -> None:
            with contextlib.suppress(SkywardError, OSError):
                transport.begin_to_leave(mark)

        transports = [transport for transport in self.all() if transport.is_connected]
        side_by_side(begin, transports, "skyward-nodes", max(1, len(transports)))

    def all(self) -> list[Transport]:
        """Return all transports that were made and not forgotten."""
        with self._lock:
            return list(self._transports.values())

    def forget(self, instance: Instance) -> None:
        """Close the transport to an instance that is lost."""
        with self._lock:
            transport = self._transports.pop(instance.id, None)
        if transport is not None:
            transport.close()

    def close(self) -> None:
        """Close all transports. Idempotent."""
        with self._lock:
            self._is_closed = True
            transports, self._transports = list(self._transports.values()), {}
            remote_connections, self._remote_connections = self._remote_connections, None
        # in parallel: a node that does not answer takes seconds
        side_by_side(lambda transport: transport.close(), transports, "skyward-close", len(transports))
        if remote_connections is not None:
            remote_connections.close()

    def _local(self, instance: Instance) -> LocalTransport:
        return LocalTransport(instance, lambda: self.is_busy, self._paid_seconds, self._local_lease_seconds)

    def _local_lease_seconds(self) -> float | None:
        return self._lease_seconds if self.lives_by_lease else None

    def _remote(self) -> RemoteConnections:
        if self._remote_connections is None:
            self._remote_connections = cast(
                "RemoteConnections",
                importlib.import_module(SSH_MODULE).SSHConnections(
                    self._lease_seconds, self._emit, lambda: self.is_busy, self._paid_seconds
                ),
            )
        return self._remote_connections


class RemoteConnections(Protocol):
    """What all SSH connections of a pool share; see `ssh_transport.SSHConnections`."""

    def transport(self, instance: Instance) -> Transport:
        """Return the transport to an instance."""
        ...

    def close(self) -> None:
        """Close the connections' shared thread."""
        ...
