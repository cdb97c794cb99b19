"""What a runner and the process of its training say to each other: messages over a socket pair, never to the disk.

runner → process      start (TrainingJob), values (of all ranks), end (the functions of all ranks have returned)
process → runner      exchange (a value for all ranks), returned, failed, exited, over (all is torn down)
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from skyward_core.distributed.member import Place
from skyward_core.serialization.pickling import Pickled
from skyward_core.serialization.sources import Source
from skyward_core.worker.log_records import LogLevels

LOOK_SECONDS = 0.2
"""How often to look whether the other process lives, because its own children may keep the connection open."""


class TrainingJob(NamedTuple):
    """What the process of a rank needs: its place and its node's address in the group, and, pickled, the framework, the
    function and the arguments. The arguments may have the framework's arrays, and are loaded when it runs. `mark` is
    for log records, see `worker.log_records`, and `log_levels` are those of its call.
    """

    place: Place
    address: str
    sources: tuple[Source, ...]
    framework: Pickled
    work: Pickled
    mark: bytes
    log_levels: LogLevels = ()


class Failure(NamedTuple):
    """An exception as `serialization.exceptions` packs it, and its traceback."""

    packed: Pickled
    text: str


class Channel:
    """One end of the connection. Large buffers of a pickle travel by themselves and are not copied into a message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, kind: str, value: object = None) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps((kind, value), protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        self._connection.send_bytes(pickle.dumps([view.nbytes for view in views]))
        self._connection.send_bytes(head)
        for view in views:
            self._connection.send_bytes(view)

    def poll(self, seconds: float) -> bool:
        """Return whether a message has begun to arrive, or the other side is gone, within this time."""
        return self._connection.poll(seconds)

    def receive(self) -> tuple[str, object]:
        """Wait for a message; return its kind and its value. Raises EOFError or OSError if the other side is gone."""
        sizes: Sequence[int] = pickle.loads(self._connection.recv_bytes())
        head = self._connection.recv_bytes()
        buffers = [bytearray(size) for size in sizes]  # arrays that are made of them can be written to
        for buffer in buffers:
            self._connection.recv_bytes_into(buffer)
        kind, value = pickle.loads(head, buffers=buffers)
        return kind, value

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
