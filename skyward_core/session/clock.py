"""The clock of an open pool: the thread "skyward-clock", which repeats several small steps until the pool ends.

It waits for no callback, and does not log to a terminal, because a terminal may block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from skyward_core.errors import LeaseLost, SkywardError

CLOCK_SECONDS = 1.0
SELDOM_SECONDS = 5.0

type Step = Callable[[], object]
type Stop = Callable[[str, SkywardError | None], None]


class Clock:
    """Takes some steps every second, and others every few seconds.

    A step that fails is logged once, does not prevent others, and is tried again. A step that raises LeaseLost stops
    the pool. Times are of `time.monotonic`, in seconds.
    """

    def __init__(
        self,
        pool_id: str,
        often: Sequence[Step],
        seldom: Sequence[Step],
        stop: Stop,
        log: Callable[..., object],
        now: float,
    ) -> None:
        self._pool_id = pool_id
        self._often = list(often)
        self._seldom = list(seldom)
        self._stop = stop
        self._log = log
        self._seldom_at = now
        """When the other steps were last taken."""
        self._trouble = ""
        """The last error that was logged."""

    def run(self, ended: threading.Event) -> None:
        """Take the due steps every CLOCK_SECONDS until the pool has ended."""
        while not ended.wait(CLOCK_SECONDS):
            for step in self.due(time.monotonic()):
                self.take(step, ended)

    def due(self, now: float) -> list[Step]:
        """Return the steps that are due now."""
        if now - self._seldom_at < SELDOM_SECONDS:
            return self._often
        self._seldom_at = now
        return [*self._often, *self._seldom]

    def take(self, step: Step, ended: threading.Event) -> None:
        """Take a step, unless the pool has ended. Raises no Exception."""
        try:
            try:
                if not ended.is_set():
                    step()
            except LeaseLost as error:
                self._log(logging.ERROR, "%s", error)
                self._stop(str(error), error)
        except Exception as error:
            if repr(error) != self._trouble:
                self._trouble = repr(error)
                self._log(logging.ERROR, "the clock of %s goes on", self._pool_id, error=error)
