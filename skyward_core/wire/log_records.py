"""Log records of calls keep their level and their lines.

What a `logging.StreamHandler` writes to stdout or stderr travels as one record.

A record is one line of the runner's output, `MARK:LEVEL "TEXT"`. Its text is JSON, so that a traceback travels without
line ends. A line `MARK:report JSON` has metrics of the call (`messages.CallMetrics`). MARK is the secret that ends the
output of a call: no call can forge it. All other output stays lines without a level.

The levels of the client's loggers hold on a node: `logging` drops there what it would drop in the client, and no more.
They travel with each call (`events/console.py` reads them), because clients with different levels may share a
pool, and their calls the process of a slot.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, TextIO, cast

from skyward_core.wire.messages import KIND, CallMetrics

_kept_mark = b""


class LogLines(NamedTuple):
    """Lines of one stream that follow each other; `level` (of `logging`) where each is a log record, which may hold
    line ends.
    """

    level: int | None
    texts: tuple[str, ...]


def kept_mark() -> bytes:
    """Return the mark of this process's records, for a process that writes to the same streams; b"" without one."""
    return _kept_mark


def keep_levels(mark: bytes, streams: tuple[TextIO, TextIO]) -> None:
    """Let each log handler of this process that writes to one of `streams` write whole records from now on.

    It changes `logging.StreamHandler` itself: the handlers are the calls' own (`logging.basicConfig()`), or Python's
    last resort, and need not exist yet. The last resort takes records of all levels: loggers drop those that the client
    does not want (`log_records.py`). It is no handler of the root logger, so that `basicConfig` in a call works.
    """
    global _kept_mark  # noqa: PLW0603 - like the handlers, it belongs to the process
    _kept_mark = mark
    start = _start_of(mark)
    write_plainly = logging.StreamHandler.emit

    def emit(self: logging.StreamHandler[TextIO], record: logging.LogRecord) -> None:
        if self.stream not in streams:
            write_plainly(self, record)
            return
        try:
            self.stream.write(f"{start}{record.levelno} {json.dumps(self.format(record))}\n")
            self.flush()
        except RecursionError:  # as logging itself does
            raise
        except Exception:
            self.handleError(record)

    logging.StreamHandler.emit = emit
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.NOTSET)


def split_records(mark: bytes, lines: Iterable[str]) -> Iterator[LogLines | CallMetrics]:
    """Yield the lines in their order, those of one level together, and reports of metrics one by one."""
    start = _start_of(mark)
    items = (item for line in lines for item in _read(start, line))
    for is_metrics, group in groupby(items, key=lambda item: isinstance(item, CallMetrics)):
        if is_metrics:
            yield from cast("Iterator[CallMetrics]", group)
            continue
        for level, pairs in groupby(cast("Iterator[tuple[int | None, str]]", group), key=lambda pair: pair[0]):
            yield LogLines(level, tuple(text for _, text in pairs))


def _start_of(mark: bytes) -> str:
    return mark[:-1].decode() + ":"


def _read(start: str, line: str) -> Iterator[tuple[int | None, str] | CallMetrics]:
    before, found, record = line.partition(start)
    if before or not found:  # a record may follow text that had no line end yet
        yield None, before
    if found:
        level, _, text = record.partition(" ")
        try:
            yield CallMetrics.from_text(text) if level == KIND else (int(level), json.loads(text))
        except (ValueError, RecursionError):  # cut short: the runner died while it wrote; or no record at all
            yield None, text


type LogLevels = tuple[tuple[str, int], ...]
"""Names of loggers and their levels; "" is the root logger."""


class LevelsOfCalls:
    """Sets the levels of this process's loggers for one call after the other.

    What a call sets itself stays for the calls after it that come with the same levels, as its other global state does.
    """

    def __init__(self) -> None:
        self.levels: LogLevels = ()
        """Those of the last call."""
        self._before: dict[str, int] = {}

    def set(self, levels: LogLevels) -> None:
        """Set these levels, and those of the call before as they were before it."""
        if levels == self.levels:
            return
        for name, level in self._before.items():
            logging.getLogger(name).setLevel(level)
        self._before = {name: logging.getLogger(name).level for name, _ in levels}
        self.levels = levels
        for name, level in levels:
            logging.getLogger(name).setLevel(level)


of_this_process = LevelsOfCalls()
"""The calls of a runner find it here, as they find the standard output."""
