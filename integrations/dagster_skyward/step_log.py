"""Writes lines to the logs of Dagster in a separate thread."""

import logging
import queue
import threading
from collections.abc import Callable
from itertools import groupby

import dagster as dg

import skyward_core as sky

type Log = dg.DagsterLogManager
type _Item = tuple[Log, int, str] | threading.Event | Callable[[], object]
"""A line, the mark of a flush, or another write."""

FLUSH_SECONDS = 60.0
LINES_PER_RECORD = 100


class LogWriter:
    """Writes to Dagster's logs in a separate thread: a record takes about 14 ms in SQLite, and the pool's results
    must not wait for it.

    Lines that have come in meanwhile become one record; no line is dropped.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: sky.LoopThread | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def write(self, log: Log, level: int, text: str) -> None:
        """Queue a line, from any thread. It is written as visible text (`sky.shown_text`)."""
        self._put((log, level, sky.shown_text.visible_lines(text)))

    def do(self, work: Callable[[], object]) -> None:
        """Queue another write to Dagster's storage, in order with the lines. Its errors are logged."""
        self._put(work)

    def _put(self, item: "_Item") -> None:
        with self._lock:
            if self._thread is None:
                thread = sky.LoopThread("skyward-dagster-log", self._work)
                self._thread = thread if thread.start_if_possible() else None
        self._queue.put(item)

    def flush(self) -> None:
        """Wait until all lines so far are in the log, a minute at most."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Write the remaining lines, and end the thread."""
        self._queue.put(self._ended)
        if self._thread is not None:
            self._thread.join(FLUSH_SECONDS)
        else:
            self._work()

    def _work(self) -> None:
        while not self._ended.is_set():
            batch = [self._queue.get()]
            while len(batch) < LINES_PER_RECORD and not self._queue.empty():
                batch.append(self._queue.get())
            for _, items in groupby(batch, key=_kind):
                try:
                    _write(list(items))
                # Dagster's storage fails: the run will report it, and the pool must be able to close
                except Exception:
                    logging.getLogger("skyward").exception("lines of the pool could not be written to Dagster's log")


def _kind(item: "_Item") -> object:
    """Return equal values for lines that one record can hold."""
    return item[:2] if isinstance(item, tuple) else item


def _write(items: list["_Item"]) -> None:
    lines = [item for item in items if isinstance(item, tuple)]
    if lines:
        log, level, _ = lines[0]
        log.log(level, "\n".join(text for _, _, text in lines))
    for item in items:
        if isinstance(item, threading.Event):
            item.set()
        elif not isinstance(item, tuple):
            item()
