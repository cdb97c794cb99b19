"""Threads that cannot be started, and threads that fail at a given turn."""

import sys
import threading
from types import FrameType

import pytest


class Refusal:
    """Refuses the first start of a thread whose name begins with `prefix`, as a full container does."""

    def __init__(self, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: list[str] = []
        self.started: list[str] = []
        self._prefix = prefix
        self._start = threading.Thread.start
        refusal = self

        def start(thread: threading.Thread) -> None:
            refusal.let(thread)

        monkeypatch.setattr(threading.Thread, "start", start)

    def let(self, thread: threading.Thread) -> None:
        """Start a thread, or refuse it."""
        if not self.refused and thread.name.startswith(self._prefix):
            self.refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        self.started.append(thread.name)
        self._start(thread)


class ThreadKilled(Exception):
    """Ends a thread."""


class Killer:
    """Raises ThreadKilled once, when a function of ours is called for the `turn`-th time in a thread of this name.

    It sees threads that are started while it is on. The functions of `concurrency` do not count.
    """

    def __init__(self, prefix: str, turn: int) -> None:
        self.has_killed = False
        self._prefix = prefix
        self._turn = turn
        self._turns = 0

    def __enter__(self) -> "Killer":
        threading.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        threading.settrace(None)  # type: ignore[arg-type] - it turns tracing off

    def _trace(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not threading.current_thread().name.startswith(self._prefix):
            sys.settrace(None)  # this thread is not meant
            return
        module = str(frame.f_globals.get("__name__"))
        if self.has_killed or not module.startswith(OURS) or module.startswith(THREADS):
            return
        self._turns += 1
        if self._turns == self._turn:
            self.has_killed = True
            raise ThreadKilled(f"{threading.current_thread().name} in {frame.f_code.co_qualname}")


OURS = ("skyward_core.", "prefect_skyward.", "dagster_skyward.", "airflow_provider_skyward.")
THREADS = "skyward_core.concurrency."
