"""Progress bars in the output of a call: lines that are drawn again and again, of which few travel.

A bar ends its states with carriage returns, some ten a second. Below it others stand, if bars are nested: each state
of theirs is a line, after which the cursor goes up again. A log that keeps all of them, as a database of an
orchestrator does, holds nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

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
