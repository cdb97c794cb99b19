"""How a call and its outcome look between client, worker and runner.

A `Parcel` is a pickled value whose large buffers are kept apart: inline, or in one file of a folder in memory (`/dev/shm`) that both ends see.
Named tuples, not dataclasses: thousands of them are pickled in a second, and the C pickler knows tuples.

Whoever puts a parcel into a file owns it until it is handed over; `release` is the undo and may be called twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import uuid
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

INLINE_BYTES = 64 * 1024
"""Parcels up to this size travel inside messages; one packet between worker and runner must hold them (a socket buffer is 208 KiB)."""


class Parcel(NamedTuple):
    """A pickled value on its way: `data` is the pickle, `buffers` its out-of-band parts, or `path` the file that holds them (`sizes` bytes each).

    When `path` is set and `data` is empty, the pickle itself is the first part of the file.
    """

    data: bytes
    buffers: tuple[bytes | bytearray | memoryview, ...] = ()
    path: str | None = None
    sizes: tuple[int, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[Parcel], tuple[Any, ...]]:
        """Give the buffers out of band where the pickler can take them so: Dask then sends them without a copy."""
        wrap: Callable[[Any], Any] = pickle.PickleBuffer if protocol >= 5 else bytes
        return Parcel, (self.data, tuple(map(wrap, self.buffers)) if self.buffers else (), self.path, self.sizes)

    @property
    def nbytes(self) -> int:
        """Size in bytes of what a message would have to carry."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def put_aside(self, directories: Sequence[str]) -> Parcel:
        """Return the same parcel with everything in one new file, in the first of the directories that has room. Raises OSError when none has."""
        *others, last = directories
        for directory in others:
            with contextlib.suppress(OSError):
                return self._written(directory)
        return self._written(last)

    def _written(self, directory: str) -> Parcel:
        parts: Sequence[bytes | bytearray | memoryview] = (self.data, *self.buffers)
        path = Path(directory) / uuid.uuid4().hex
        try:
            with path.open("xb", buffering=0) as file:
                for part, start in zip(parts, _starts(memoryview(part).nbytes for part in parts), strict=True):
                    file.seek(start)
                    _write_whole(file.fileno(), memoryview(part).cast("B"))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return Parcel(b"", (), str(path), tuple(memoryview(part).nbytes for part in parts))

    def contents(self, *, is_last_reader: bool = True) -> tuple[bytes | memoryview, tuple[bytearray | memoryview, ...]]:
        """Return the pickle and its buffers, which are writable. A file is mapped, and gone from memory with the last user of its values.

        The last reader gets the file's own pages; others get a private mapping, whose pages are copied when they are written to.
        """
        if self.path is None:
            return self.data, tuple(bytearray(buffer) if memoryview(buffer).readonly else memoryview(buffer) for buffer in self.buffers)
        with open(self.path, "r+b") as file:
            flags = mmap.MAP_SHARED if is_last_reader else mmap.MAP_PRIVATE
            view = memoryview(mmap.mmap(file.fileno(), 0, flags=flags | mmap.MAP_POPULATE))  # one pass over the page table instead of a fault per page
        data, *buffers = (view[start : start + size] for start, size in zip(_starts(self.sizes), self.sizes, strict=True))
        return data, tuple(buffers)

    def release(self) -> None:
        """Remove the parcel's file, if it has one."""
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


class Call(NamedTuple):
    """One call on its way to a slot. `function` names an entry of the batch's functions, `job_id` is shared by the calls of one broadcast."""

    call_id: str
    function: str
    arguments: Parcel
    job_id: str


class Batch(NamedTuple):
    """Calls that one slot runs in turn, the pickles of their functions by name, and the topic on which the client listens."""

    topic: str
    calls: tuple[Call, ...]
    functions: dict[str, Parcel]

    @property
    def nbytes(self) -> int:
        """Size in bytes of what a message would have to carry."""
        return sum(call.arguments.nbytes for call in self.calls) + sum(function.nbytes for function in self.functions.values())


class Ending(StrEnum):
    """How a call ended, or that it did not begin."""

    RESULT = "result"
    ERROR = "error"
    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    CANCELLED = "cancelled"
    RETURNED = "returned"  # not begun: the slot is busy with a long call, run it elsewhere
    HERE = "here"  # ended, but large: the outcome is in the result of the batch's task


class Outcome(NamedTuple):
    """The end of one call: for RESULT the value, for ERROR the exception (either may be empty: see `text`), for a crash its exit code and last lines."""

    call_id: str
    ending: Ending
    parcel: Parcel = Parcel(b"")
    text: str = ""
    exit_code: int | None = None
    output: tuple[str, ...] = ()
    seconds: float = 0.0


class Output(NamedTuple):
    """Lines that a call (None: no call) wrote on one stream; `timestamp` is the node's clock when they were read."""

    call_id: str | None
    stream: str
    lines: tuple[str, ...]
    timestamp: float


class Report(NamedTuple):
    """What a worker tells a client, in the order in which it happened."""

    node: int
    instance_id: str
    news: tuple[Outcome | Output, ...]


def _starts(sizes: Iterable[int]) -> list[int]:
    """Where each part begins: at multiples of 64 bytes, so that arrays stay aligned for vector instructions."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = (end + size + 63) // 64 * 64
    return starts


def _write_whole(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
