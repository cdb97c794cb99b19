"""The messages between client, worker and runner: calls, batches, outcomes, reports.

A `Parcel` is a pickled value whose large buffers are kept apart: inline, or in one file of a folder in memory
(`/dev/shm`) that both ends see. Named tuples, not dataclasses: thousands of them are pickled in a second, and the C
pickler knows tuples.

The process that puts a parcel into a file owns the file until it hands it over. `release` removes it; idempotent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import re
import select
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat, cast

from skyward_core.errors import BadRequest
from skyward_core.shown_text import visible_lines

INLINE_BYTES = 64 * 1024
"""Parcels up to this size travel inside messages; one packet between worker and runner must hold them (a socket buffer
is 208 KiB).
"""
KEEPS_NO_DESCRIPTOR: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Arguments of `mmap.mmap` for a mapping that keeps no file descriptor.

A program may hold a thousand results, and the usual limit is 1,024 descriptors.
"""
SHARED = "shared-"
"""Names of scattered values begin with it. They stand among the functions of a batch."""
READ_WHOLE_BYTES = 16 << 20
"""Where a mapping must keep one (Python 3.12): files up to this size are read instead."""
LINE_BYTES = select.PIPE_BUF
"""The longest line that the kernel writes to a pipe in one piece."""
BURST = 20
"""How many reports a call may write at once."""
REPORTS_PER_SECOND = 2.0
"""How many it may write in the long run."""
MOST_STEP = 1 << 62
KIND = "report"


_FILE_NAME = re.compile(r"[0-9a-f]{32}")


def no_link(path: str, flags: int) -> int:
    """Open a file of a value: no link to another file, and nothing that waits for a writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


class Parcel(NamedTuple):
    """A pickled value on its way: `data` is the pickle, `buffers` its out-of-band parts, or `path` a file with `spans`
    (offset, size) of bytes that hold them.

    When `path` is set and `data` is empty, the first span holds the pickle itself.
    """

    data: bytes
    buffers: tuple[bytes | bytearray | memoryview, ...] = ()
    path: str | None = None
    spans: tuple[tuple[int, int], ...] = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[Parcel], tuple[Any, ...]]:
        """Give the buffers out of band where the pickler can take them so: Dask then sends them without a copy."""
        wrap: Callable[[Any], Any] = pickle.PickleBuffer if protocol >= 5 else bytes
        return Parcel, (self.data, tuple(map(wrap, self.buffers)) if self.buffers else (), self.path, self.spans)

    @property
    def nbytes(self) -> int:
        """Size in bytes of what a message would have to carry."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def moved_to_file(self, directories: Sequence[str]) -> Parcel:
        """Return the parcel with all of its data in one new file, in the first of the directories that has room.

        Raises OSError if none has room.
        """
        *others, last = directories
        for directory in others:
            with contextlib.suppress(OSError):
                return self._written(Path(directory) / uuid.uuid4().hex, os.O_EXCL)
        return self._written(Path(last) / uuid.uuid4().hex, os.O_EXCL)

    def moved_into_spent_file(self, path: str, memory: mmap.mmap) -> tuple[Parcel, bool]:
        """Put the parcel into the file of spent values, whose mapping is `memory`; return it, and whether that
        succeeded.

        Fresh pages cost more than copying. A value that is in the file already stays there; any other overwrites the
        file. Both fail while anything refers to the old values. Then the parcel has views of them, and the caller
        writes it to a new file.
        """
        inside = [_span_within(memory, memoryview(buffer)) for buffer in self.buffers]
        if not any(inside):
            with contextlib.suppress(OSError):  # no room to extend the file: another folder may have room
                return (self._written(Path(path), 0), True) if _closed(memory) else (self, False)
            return self, False
        spans = tuple(span for span in inside if span is not None)
        if len(spans) < len(inside):
            return self, False
        for buffer in self.buffers:
            cast(memoryview, buffer).release()
        if _closed(memory):
            return Parcel(self.data, (), path, spans), True
        view = memoryview(memory)
        return Parcel(self.data, tuple(view[start : start + size] for start, size in spans)), False

    def open(
        self, *, is_last_reader: bool = True
    ) -> tuple[mmap.mmap | None, bytes | memoryview, tuple[bytearray | memoryview, ...]]:
        """Return the mapping of the file, if there is one, the pickle and its buffers, which are writable.

        The last reader gets the file's own pages. Others get a private mapping, which copies pages on write. The kernel
        frees the memory when the file is released and nothing refers to the values.
        """
        if self.path is None:
            return (
                None,
                self.data,
                tuple(
                    bytearray(buffer) if memoryview(buffer).readonly else memoryview(buffer) for buffer in self.buffers
                ),
            )
        with open(self.path, "r+b", opener=no_link) as file:
            if not KEEPS_NO_DESCRIPTOR and os.fstat(file.fileno()).st_size <= READ_WHOLE_BYTES:
                memory, view = None, memoryview(bytearray(file.read()))
            else:
                flags = mmap.MAP_SHARED if is_last_reader else mmap.MAP_PRIVATE
                # MAP_POPULATE: one pass over the page table instead of a fault per page
                memory = mmap.mmap(file.fileno(), 0, flags=flags | mmap.MAP_POPULATE, **KEEPS_NO_DESCRIPTOR)
                view = memoryview(memory)
        parts = [view[start : start + size] for start, size in self.spans]
        return memory, self.data or parts.pop(0), tuple(parts)

    def read_only(self) -> tuple[bytes | memoryview, tuple[memoryview, ...]]:
        """Return the pickle and its buffers, which are read-only views of the file's own pages."""
        assert self.path is not None
        with open(self.path, "rb", opener=no_link) as file:
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, **KEEPS_NO_DESCRIPTOR)
        view = memoryview(memory)
        parts = [view[start : start + size] for start, size in self.spans]
        return self.data or parts.pop(0), tuple(parts)

    def contents(self, *, is_last_reader: bool = True) -> tuple[bytes | memoryview, tuple[bytearray | memoryview, ...]]:
        """Return the pickle and its buffers, as `open` does."""
        return self.open(is_last_reader=is_last_reader)[1:]

    def lies_in(self, directories: Iterable[str]) -> bool:
        """Return whether the parcel's file, if it has one, has a name of ours in one of these folders. A node names the
        path, and may name any.
        """
        folder, name = os.path.split(self.path or "")
        return self.path is None or (folder in set(directories) and _FILE_NAME.fullmatch(name) is not None)

    def release(self) -> None:
        """Remove the parcel's file, if it has one."""
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def as_file_at(self, path: str) -> tuple[Parcel, tuple[bytes | bytearray | memoryview, ...]]:
        """Return the parcel as a file at `path`, and the content of that file in pieces."""
        parts: Sequence[bytes | bytearray | memoryview] = (self.data, *self.buffers)
        spans = _spans(memoryview(part).nbytes for part in parts)
        ends = [start + size for start, size in spans]
        paddings = [start - end for end, (start, _) in zip(ends, spans[1:], strict=False)]
        pieces = [
            piece
            for part, padding in zip(parts, (*paddings, 0), strict=True)
            for piece in (part, bytes(padding))
            if len(piece)
        ]
        return Parcel(b"", (), path, spans), tuple(pieces)

    def with_content(self, content: memoryview) -> Parcel:
        """Return the parcel with `content`, the content of its file, in its buffers."""
        parts = [content[start : start + size] for start, size in self.spans]
        data = self.data or bytes(parts.pop(0))
        return Parcel(data, tuple(parts))

    def _written(self, path: Path, flags: int) -> Parcel:
        parts: Sequence[bytes | bytearray | memoryview] = (self.data, *self.buffers)
        spans = _spans(memoryview(part).nbytes for part in parts)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        try:
            for part, (start, _) in zip(parts, spans, strict=True):
                os.lseek(descriptor, start, os.SEEK_SET)
                _write_whole(descriptor, memoryview(part).cast("B"))
            os.ftruncate(descriptor, sum(spans[-1]))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return Parcel(b"", (), str(path), spans)


class Call(NamedTuple):
    """One call on its way to a slot.

    `function` names an entry of the batch's functions, `job_id` is shared by the calls of one broadcast. `shared` are
    the names of the scattered values that it uses, which are entries of the batch's functions too. A runner keeps the
    function for later calls, unless it refers to scattered values itself. `ahead` is set for a call that streams: how
    many items it may yield before the client has taken the first.
    `timeout_seconds`: how long the slot lets it run; None: any time. `place`: for a call of a broadcast, the place of
    its node among those of the broadcast, from 0 on, and how many these are; None: as the node's settings say. `use`:
    the id of the use of the pool that pays for it; "": none but its client. `levels`: those of the client's loggers
    (`log_records.LogLevels`); all calls of a batch have the same object, which is pickled once. `env`: variables of the
    process while the call runs.
    """

    call_id: str
    function: str
    arguments: Parcel
    job_id: str
    timeout_seconds: float | None = None
    shared: tuple[str, ...] = ()
    keeps_function: bool = True
    ahead: int = 0
    place: tuple[int, int] | None = None
    use: str = ""
    levels: tuple[tuple[str, int], ...] = ()
    env: tuple[tuple[str, str], ...] = ()


class Credit(NamedTuple):
    """A message to a runner: its call may yield the items below this number. A later one replaces it."""

    call_id: str
    below: int


class Batch(NamedTuple):
    """Calls that one slot runs in turn, the pickles of their functions and scattered values by name, and the topic on
    which the client listens.
    """

    topic: str
    calls: tuple[Call, ...]
    functions: dict[str, Parcel]

    @property
    def nbytes(self) -> int:
        """Size in bytes of what a message would have to carry."""
        return sum(call.arguments.nbytes for call in self.calls) + sum(
            function.nbytes for function in self.functions.values()
        )


class Sealed(NamedTuple):
    """A pickled batch that passes through the scheduler as an opaque buffer.

    Dask searches its pickles for the name of the main module, which functions by value contain, and then pickles the
    object a second time, slowly.
    """

    data: bytes | memoryview

    def __reduce_ex__(self, protocol: Any) -> tuple[type[Sealed], tuple[Any, ...]]:
        """Give the bytes out of band where the pickler can take them so."""
        return Sealed, (pickle.PickleBuffer(self.data) if protocol >= 5 else bytes(self.data),)


class OutcomeKind(StrEnum):
    """How a call ended, or that it did not begin."""

    RESULT = "result"
    ERROR = "error"
    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    RETURNED = "returned"  # not begun: the slot is busy with a long call, run it elsewhere


class Outcome(NamedTuple):
    """The end of one call: for RESULT the value, for ERROR the exception (either may be empty: see `text`), for a crash
    its exit code and last lines.

    `text` names for OUT_OF_MEMORY what has killed the call, if not its worker; for TIMED_OUT it is the time that the
    call had, in seconds. `seconds`: how long it kept its slot
    busy, however it ended. `items`: how many items it has yielded before, if it streams. `use` is that of the call.
    """

    call_id: str
    kind: OutcomeKind
    parcel: Parcel = Parcel(b"")
    text: str = ""
    exit_code: int | None = None
    output: tuple[str, ...] = ()
    seconds: float = 0.0
    items: int = 0
    use: str = ""


class Item(NamedTuple):
    """A value that a streaming call has yielded; `number` counts them from 0 on."""

    call_id: str
    number: int
    parcel: Parcel


class Output(NamedTuple):
    """Lines that a call (None: no call) wrote on one stream; `timestamp` is the node's clock when they were read.

    With a `level` (of `logging`) each is a log record, which may hold line ends.
    """

    call_id: str | None
    stream: str
    lines: tuple[str, ...]
    timestamp: float
    level: int | None = None


class ReportedMetrics(NamedTuple):
    """Metrics that a call has reported; `timestamp` is the node's clock when they were read."""

    call_id: str | None
    metrics: CallMetrics
    timestamp: float


type News = Outcome | Output | ReportedMetrics | Item


class Report(NamedTuple):
    """A message from a worker to a client: outcomes, items, output and metrics, in order.

    `origin` names the batch and its worker process. `number` counts the batch's reports from 1 on. A report that is
    repeated, for a client of another head, keeps its number. Numbers are missing where output was dropped for lack of
    room.
    """

    node: int
    instance_id: str
    news: tuple[News, ...]
    origin: str = ""
    number: int = 0


def _spans(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return offset and size of each part. Offsets are multiples of 64: arrays stay aligned for vector instructions."""
    spans, end = list[tuple[int, int]](), 0
    for size in sizes:
        spans.append((end, size))
        end = (end + size + 63) // 64 * 64
    return tuple(spans)


def _span_within(memory: mmap.mmap, buffer: memoryview) -> tuple[int, int] | None:
    """Return offset and size of a buffer in the mapping; None if it is elsewhere, or read-only: no address then."""
    if buffer.readonly or not buffer.nbytes:
        return None
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) - ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return (start, buffer.nbytes) if 0 <= start <= len(memory) - buffer.nbytes else None


def _closed(memory: mmap.mmap) -> bool:
    """Close a mapping; False if anything still refers to it."""
    try:
        memory.close()
    except BufferError:
        return False
    return True


def _write_whole(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


# Metrics that a running call reports: `sky.report(step=10, loss=0.3)`.
#
# A report is one line of the runner's output, `MARK:report JSON`, as a log record is (`log_records.py`). It is at
# most LINE_BYTES long, so that the kernel writes it in one piece. It is written only while the pipe has room, so that
# it never waits. What is not written now is merged into the next report, or written when the call ends.


class CallMetrics(NamedTuple):
    """What a call has reported: the step, if it named one, and the last value of each metric."""

    step: int | None
    values: Mapping[str, float]

    def to_text(self) -> str:
        """Return one line of JSON that `from_text` reads."""
        return json.dumps([self.step, dict(self.values)])

    @classmethod
    def from_text(cls, text: str) -> CallMetrics:
        """Rebuild metrics. Raises ValueError for any other text, and RecursionError."""
        content: object = json.loads(text)
        if type(content) is not list or len(cast("list[object]", content)) != 2:
            raise ValueError("metrics are a step and values")
        step, values = cast("tuple[object, object]", content)
        if not (step is None or (type(step) is int and abs(step) <= MOST_STEP)) or not isinstance(values, dict):
            raise ValueError("a step is a whole number, and values have names")
        if any(type(value) not in (int, float) for value in cast("dict[str, object]", values).values()):
            raise ValueError("the values of metrics are numbers")
        try:
            return cls(step, {name: float(value) for name, value in cast("dict[str, float]", values).items()})
        except OverflowError as error:
            raise ValueError("a value of metrics is too large") from error

    def updated(self, later: CallMetrics) -> CallMetrics:
        """Return both in one: a later value replaces an earlier one."""
        return CallMetrics(self.step if later.step is None else later.step, {**self.values, **later.values})


class Reporter:
    """Writes the metrics of a runner's calls to a pipe. One call at a time; threads of a call may share it.

    If the runner dies, only the metrics in `pending` are lost.
    """

    def __init__(self, pipe: int, mark: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe = pipe
        self._start = start_of(mark)
        self._clock = clock
        self._allowance = float(BURST)
        self._counted_at = clock()
        self._pending: CallMetrics | None = None

    def report(self, metrics: CallMetrics) -> None:
        """Write the metrics, or keep them for the next line. Never waits.

        Raises BadRequest if one line cannot hold them.
        """
        if len(self._line(metrics)) > LINE_BYTES:
            raise BadRequest(f"sky.report: {len(metrics.values)} metrics are too many for one report of 4 kB")
        earlier, self._pending = self._pending, None
        if earlier is not None and len(self._line(earlier.updated(metrics))) <= LINE_BYTES:
            metrics = earlier.updated(metrics)
        if not (self._is_allowed() and self._has_room()):
            self._pending = metrics
            return
        self._write(metrics)

    def end_call(self) -> None:
        """Write the metrics that are still kept: the last values of a call must not be lost."""
        pending, self._pending = self._pending, None
        self._allowance = float(BURST)
        if pending is not None:
            self._write(pending)

    def _write(self, metrics: CallMetrics) -> None:
        with contextlib.suppress(OSError):  # its worker is gone, and this process soon will be
            os.write(self._pipe, self._line(metrics))

    def _line(self, metrics: CallMetrics) -> bytes:
        return f"{self._start}{metrics.to_text()}\n".encode()

    def _is_allowed(self) -> bool:
        """Count one line; False if the call has used up its allowance."""
        now = self._clock()
        self._allowance = min(float(BURST), self._allowance + (now - self._counted_at) * REPORTS_PER_SECOND)
        self._counted_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _has_room(self) -> bool:
        writable = select.poll()
        writable.register(self._pipe, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in writable.poll(0))


def start_of(mark: bytes) -> str:
    """Return how a line of metrics starts in the output of a runner with this mark."""
    return f"{mark[:-1].decode()}:{KIND} "


_reporters: list[Reporter] = []
"""The reporter of this process, if it is a runner: calls find it here, as they find the standard output."""


def use(reporter: Reporter) -> None:
    """Make this the reporter of the process. Called once, by a runner."""
    _reporters[:] = [reporter]


def report(step: int | None = None, **metrics: SupportsFloat) -> None:
    """Report metrics of a running call: they become a `CallReported` event of the pool.

    `step` counts batches, epochs or anything else that the call counts. Values are numbers, or anything that `float`
    takes, such as a tensor with one element. Never waits: at most 20 reports at once and 2 per second travel. The
    values of others are merged into the next report, and the last values always arrive. Outside a pool it does nothing.

    Raises BadRequest for values that are no numbers, and for more metrics than fit into 4 kB.

    >>> report(step=1, loss=0.25)
    """
    reported = CallMetrics(_step(step), {name: _number(name, value) for name, value in metrics.items()})
    for reporter in _reporters:
        reporter.report(reported)


def _step(step: Any) -> int | None:
    try:
        return None if step is None else int(step)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"sky.report: step must be a whole number, not {step!r}") from error


def _number(name: str, value: SupportsFloat) -> float:
    if isinstance(value, str):
        raise BadRequest(f"sky.report: {name} must be a number, not the text {value!r}: print texts")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"sky.report: {name} must be a number, not {type(value).__name__}") from error


def lines_of(report: Report) -> list[str]:
    """Return the lines of a report, in order."""
    return [line for line, _ in lines_with_levels(report)]


def lines_with_levels(report: Report) -> list[tuple[str, int | None]]:
    """Return the lines of a report as visible text (`shown_text.py`), in order, with the level (of `logging`) of those
    that are of a log record.
    """
    return [
        (line, item.level)
        for item in report.news
        if isinstance(item, Output)
        for text in item.lines
        for line in visible_lines(text).split("\n")
    ]
