"""The output pipes of a runner, cut into lines and into calls.

A progress bar ends its states with carriage returns, some ten a second. Below it others stand, if bars are nested: each
state of theirs is a line, after which the cursor goes up again. A log that keeps all of them, as a database of an
orchestrator does, holds nothing else. So few of such lines travel (`RedrawnLines`).
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from skyward_core.worker.call_metrics import start_of

LAST_LINES = 20
READ_BYTES = 1 << 16
MARK_START = b"\x1e"
"""How marks, and what begins with them, begin."""


SECONDS_BETWEEN_STATES = 15.0
"""Of one stream of a call. Its last state always travels."""
UP = "\x1b[A"
"""What moves the cursor of a terminal up by a line."""
_ENDS = re.compile("(\r\n|\r|\n)")


class RedrawnLines:
    """Takes the text of one stream of a call in pieces; lets lines pass, and some of the states of redrawn ones."""

    def __init__(self) -> None:
        self._held = ""
        """The last state that has not passed."""
        self._passed, self._passed_at = "", -math.inf
        """The last state that has passed, and when."""
        self._unfinished, self._unfinished_since = "", 0.0
        self._is_redrawn = False
        """Whether the line that goes on is drawn over another one."""
        self._is_nested = False
        """Whether the lines are bars below each other."""

    def are_all_plain(self, text: str) -> bool:
        """Return whether nothing of this text, which is to come, is redrawn."""
        return not (self._held or self._is_redrawn or self._is_nested or "\r" in text or UP in text)

    def lines(self, text: str, records: str, now: float) -> Iterator[str]:
        """Yield the lines of a text to pass on. Its last line is whole. `records` is how log records begin: they pass,
        and cut the line before them.
        """
        pieces = _ENDS.split(text)
        for piece, end in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            before, found, record = piece.partition(records)
            if found:
                yield from self._piece(before, "\r" if self._is_redrawn else "\n", now) if before else ()
                self._is_redrawn = False
                yield found + record
            elif piece or end:
                yield from self._piece(piece, end, now)

    def due(self, unfinished: str, now: float) -> Iterator[str]:
        """Yield the last state, if it is time; `unfinished` is the text of the line that goes on, which is a state if
        it stands still.
        """
        if unfinished != self._unfinished:
            self._unfinished, self._unfinished_since = unfinished, now
        stands = self._is_redrawn and unfinished.strip() and now - self._unfinished_since >= SECONDS_BETWEEN_STATES
        state = unfinished.replace(UP, "") if stands else self._held
        if state:
            yield from self._state(state, now)

    def end(self) -> Iterator[str]:
        """Yield the last state, if it has not passed: the call has ended."""
        held = self._held
        self.__init__()
        if held:
            yield held

    def _piece(self, text: str, end: str, now: float) -> Iterator[str]:
        was_redrawn, self._is_redrawn = self._is_redrawn, end == "\r"
        goes_up, text = UP in text, text.replace(UP, "")
        if not text.strip():  # a bar was cleared, or stands below a line that this ends
            if not (was_redrawn or self._is_redrawn or self._is_nested or goes_up):
                yield text
            return
        self._is_nested = goes_up or (self._is_nested and was_redrawn)
        if self._is_redrawn or self._is_nested:
            yield from self._state(text, now)
            return
        is_new = not was_redrawn or text != self._passed
        self._held = ""
        if is_new:
            yield text

    def _state(self, text: str, now: float) -> Iterator[str]:
        self._held = "" if text == self._passed else text
        if self._held and now - self._passed_at >= SECONDS_BETWEEN_STATES:
            self._held, self._passed, self._passed_at = "", text, now
            yield text


@dataclass(slots=True)
class Stream:
    """One of a runner's output pipes, cut into lines and, at the mark, into calls."""

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
