"""The scheduler's memory of messages: they are numbered, and so are the lines that the messages of a call have."""

from __future__ import annotations

import pickle
from collections import deque

from skyward_core.worker.wire import Output, Report


class Topic:
    """Numbered messages. The last ones are kept; the oldest are dropped when they take more than `limit_bytes`."""

    __slots__ = ("_limit_bytes", "_messages", "nbytes", "number")

    def __init__(self, limit_bytes: int, number: int = 0) -> None:
        self.number = number
        self.nbytes = 0
        self._limit_bytes = limit_bytes
        self._messages: deque[bytes] = deque()

    def add(self, message: bytes) -> None:
        """Keep a message. The last one is always kept, even if it is larger than the limit."""
        self.number += 1
        self._messages.append(message)
        self.nbytes += len(message)
        while self.nbytes > self._limit_bytes and len(self._messages) > 1:
            self._drop_oldest()

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to this number."""
        while self._messages and self.number - len(self._messages) < number:
            self._drop_oldest()

    def after(self, number: int) -> tuple[int, list[bytes]]:
        """Return the kept messages after this number, and the number of the message before them."""
        skipped = max(0, number - (self.number - len(self._messages)))
        messages = list(self._messages)[skipped:]
        return self.number - len(messages), messages

    def _drop_oldest(self) -> None:
        self.nbytes -= len(self._messages.popleft())


class LineTopic(Topic):
    """A topic of pickled reports. `lines` is how many lines all of them have had, the dropped ones too."""

    __slots__ = ("_counts", "lines")

    def __init__(self, limit_bytes: int, number: int = 0) -> None:
        super().__init__(limit_bytes, number)
        self.lines = 0
        self._counts: deque[int] = deque()

    def add(self, message: bytes) -> None:
        """Keep a report, and count its lines."""
        count = len(lines_of(pickle.loads(message)))
        self.lines += count
        self._counts.append(count)
        super().add(message)

    def line_of(self, messages: int) -> int:
        """Return the number of the first line of the last so many messages; lines count from 0."""
        return self.lines - sum(list(self._counts)[len(self._counts) - messages :])

    def _drop_oldest(self) -> None:
        super()._drop_oldest()
        self._counts.popleft()


def lines_of(report: Report) -> list[str]:
    """Return the lines of a report, in order."""
    return [line for line, _ in lines_with_levels(report)]


def lines_with_levels(report: Report) -> list[tuple[str, int | None]]:
    """Return the lines of a report, in order, with the level (of `logging`) of those that are of a log record."""
    return [
        (line, item.level)
        for item in report.news
        if isinstance(item, Output)
        for text in item.lines
        for line in text.split("\n")
    ]
