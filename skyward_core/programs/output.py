"""What a program on a pool prints: its lines on the two streams of this process, and news of the pool on stderr."""

from __future__ import annotations

import logging
import threading
from typing import TextIO

from skyward_core.events.events import LogLine, SkywardEvent
from skyward_core.events.narrator import Narrator


class ProgramOutput:
    """A callback that prints. After an error of a stream, such as a closed pipe, it prints nothing there any more."""

    def __init__(self, out: TextIO, err: TextIO, *, has_ranks: bool, least_level: int = logging.INFO) -> None:
        self._out = out
        self._err = err
        self._has_ranks = has_ranks
        self._least_level = least_level
        self._narrator = Narrator()
        self._lock = threading.Lock()
        """Held for one line: the thread of the events prints, and the main thread."""
        self._broken: set[str] = set()

    def __call__(self, event: SkywardEvent, /) -> None:
        if isinstance(event, LogLine) and event.call_id is not None:
            is_error = event.stream == "stderr" or event.level is not None
            line = f"[node {event.node}] {event.line}" if self._has_ranks else event.line
            self._print("stderr" if is_error else "stdout", line)
        elif (news := self._narrator.tell(event)) is not None and news[0] >= self._least_level:
            self.report(news[1])

    def report(self, words: str) -> None:
        """Print news of the pool."""
        self._print("stderr", f"skyward: {words}")

    def text(self, text: str, *, is_error: bool) -> None:
        """Print what a function has returned or raised."""
        self._print("stderr" if is_error else "stdout", text)

    @property
    def is_broken(self) -> bool:
        """Whether stdout takes no lines any more."""
        return "stdout" in self._broken

    def _print(self, name: str, line: str) -> None:
        with self._lock:
            if name in self._broken:
                return
            try:
                print(line, file=self._out if name == "stdout" else self._err, flush=True)
            except (OSError, ValueError):  # a closed pipe or a full disk is no reason to stop the program
                self._broken.add(name)
