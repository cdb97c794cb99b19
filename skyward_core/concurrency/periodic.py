"""A thread that calls one function periodically, so that no other work delays it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PeriodicThread:
    """Calls `step` every so many seconds, from a daemon thread of that name, until `end` is called. The first call
    comes after the first pause, or at once.

    `step` must not wait for a callback or a display, and so it must not log either. What it raises goes to `on_error`,
    and it is called again.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        step: Callable[[], object],
        on_error: Callable[[Exception], object],
        *,
        is_at_once: bool = False,
    ) -> None:
        self._first_seconds = 0.0 if is_at_once else seconds
        self._seconds = seconds
        self._step = step
        self._on_error = on_error
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Call `step` no more.

        Does not wait for a call that runs; may be called twice, before `start`, and by `step` itself.
        """
        self._ended.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for a call that runs. Does nothing in the thread itself."""
        if self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        pause = self._first_seconds
        while not self._ended.wait(pause):
            pause = self._seconds
            try:
                self._step()
            except Exception as error:  # whatever it is: the next call may succeed
                if not self._ended.is_set():  # after the end its resources may be gone
                    self._on_error(error)
