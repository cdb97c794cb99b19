"""What a program on a pool prints: its lines on the two streams of this process, and news of the pool on stderr."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator
from typing import TextIO, override

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
            if not event.is_shown:
                return
            is_error = event.stream == "stderr" or event.level is not None
            line = f"[node {event.node}] {event.line}" if self._has_ranks else event.line
            self._print("stderr" if is_error else "stdout", line)
        elif (news := self._narrator.tell(event)) is not None and news[0] >= self._least_level:
            self.report(news[1])

    def report(self, words: str) -> None:
        """Print news of the pool."""
        self._print("stderr", f"skyward: {words}")

    @contextlib.contextmanager
    def warnings(self) -> Generator[None]:
        """Report the warnings of the logger "skyward" too: those of a pool that are no events."""
        logger, handler = logging.getLogger("skyward"), _Reporter(self)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def text(self, text: str, *, is_error: bool) -> None:
        """Print what a function has returned or raised."""
        self._print("stderr" if is_error else "stdout", text)

    def _print(self, name: str, line: str) -> None:
        with self._lock:
            if name in self._broken:
                return
            try:
                print(line, file=self._out if name == "stdout" else self._err, flush=True)
            except (OSError, ValueError):  # a closed pipe or a full disk is no reason to stop the program
                self._broken.add(name)


class _Reporter(logging.Handler):
    def __init__(self, output: ProgramOutput) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._output.report(self.format(record))
