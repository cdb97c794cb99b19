"""The task log: the lines of nodes in it, and a writing that Airflow's time limit does not interrupt.

When `execution_timeout` is over, Airflow's handler of SIGALRM writes into the log, in the main thread, and raises. If
that thread was just writing a line, it has the lock of structlog's logger, which can be taken only once: it would wait
for itself for ever, and its machines would go on. If it was just asking Airflow, the next request would read the answer
of this one. So the signal waits until the line is written, or the answer is there.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import skyward_core as sky


@contextmanager
def alarm_waits() -> Generator[None]:
    """Call the handler of SIGALRM after the block, if the signal comes in it. Only the main thread calls handlers."""
    handler = signal.getsignal(signal.SIGALRM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[tuple[Any, Any]] = []
    signal.signal(signal.SIGALRM, lambda number, frame: late.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        if late:
            handler(*late[0])


class TaskLog:
    """A logger with the methods of another one. It writes visible text (`sky.shown_text`): Airflow encodes each line,
    and shows it.
    """

    def __init__(self, log: Any) -> None:
        self._log = log

    def log(self, level: int, text: str, *args: object) -> None:
        """Write news of a pool or lines of a node, whose lines have their marks."""
        with alarm_waits():
            self._log.log(level, text, *map(sky.shown_text.visible_lines, map(str, args)))

    def info(self, text: str, *args: object) -> None:
        """Write a line."""
        with alarm_waits():
            self._log.info(*_shown(text, args))

    def warning(self, text: str, *args: object) -> None:
        """Write a line."""
        with alarm_waits():
            self._log.warning(*_shown(text, args))

    def exception(self, text: str, *args: object) -> None:
        """Write a line, and the exception that is handled just now."""
        with alarm_waits():
            self._log.exception(*_shown(text, args))


def _shown(text: str, args: Sequence[object]) -> tuple[object, ...]:
    """Return text and arguments as visible text; numbers stay, for the formats in the text."""
    return tuple(one if isinstance(one, int | float) else sky.shown_text.indented(str(one)) for one in (text, *args))


def lines_for_log(news: sky.CallNews) -> list[tuple[int, str]]:
    """Return the new lines of a call for the task log, with their levels: those of its log records, or INFO."""
    return [
        (level or logging.INFO, sky.shown_text.each_line(f"[node {news.node or 0}] ", line))
        for line, level in zip(news.lines, news.levels, strict=True)
    ]
