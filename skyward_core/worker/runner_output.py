"""The output pipes of a runner, cut into lines and into calls."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from skyward_core.worker.call_metrics import start_of
from skyward_core.worker.progress_bars import RedrawnLines

LAST_LINES = 20
READ_BYTES = 1 << 16
MARK_START = b"\x1e"
"""How marks, and what begins with them, begin."""


@dataclass(slots=True)
class Stream:
    """One of a runner's output pipes, cut into lines and, at the mark, into calls.

    Of lines that end with carriage returns few pass (`progress_bars.py`).
    """

    name: str
    descriptor: int
    mark: bytes
    rest: bytes = b""
    marks_seen: int = 0
    tails: dict[int, deque[str]] = field(default_factory=dict[int, deque[str]])
    clock: Callable[[], float] = time.monotonic
    redrawn: RedrawnLines = field(default_factory=RedrawnLines)

    def read(self) -> bool:
        """Read at most READ_BYTES from the pipe; False if it was empty."""
        try:
            chunk = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        self.rest += chunk
        return bool(chunk)

    def lines(self, *, flush: bool = False) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the lines read, as pairs of the number of marks before them and the lines; an unfinished line waits
        unless `flush`.
        """
        while (cut := self.rest.find(self.mark)) >= 0:
            part, self.rest = self.rest[:cut], self.rest[cut + len(self.mark) :]
            yield self.marks_seen, self._remember((*self._passing(part), *self.redrawn.end()))
            self.marks_seen += 1
        whole = self.rest[:-1] if self.rest.endswith(b"\r") else self.rest  # its line feed may be on the way
        end = len(self.rest) if flush else max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        if end:
            part, self.rest = self.rest[:end], self.rest[end:]
            yield self.marks_seen, self._remember((*self._passing(part), *(self.redrawn.end() if flush else ())))
        if late := tuple(self.redrawn.due(self.rest.partition(MARK_START)[0].decode(errors="ignore"), self.clock())):
            yield self.marks_seen, self._remember(late)

    def _passing(self, part: bytes) -> tuple[str, ...]:
        text = part.decode("utf-8", errors="backslashreplace")
        if self.redrawn.are_all_plain(text):
            return tuple(text.removesuffix("\n").split("\n")) if text else ()
        return tuple(self.redrawn.lines(text, self.mark[:-1].decode() + ":", self.clock()))

    def _remember(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        if lines:
            metrics = start_of(self.mark)  # they must not push the last lines out
            tail = self.tails.setdefault(self.marks_seen, deque(maxlen=LAST_LINES))
            tail.extend(line for line in lines if not line.startswith(metrics))
        return lines

    def forget(self, mark: int) -> tuple[str, ...]:
        """Return the last lines before a mark, and forget them."""
        return tuple(self.tails.pop(mark, ()))
