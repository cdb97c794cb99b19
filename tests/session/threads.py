"""Threads that run when a test says so."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Threads:
    """Makes threads that run in `run`, or when they are joined."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], None]] = []
        self.trouble: Exception | None = None
        """Why no thread can begin."""

    def LoopThread(self, _name: str, work: Callable[[], None]) -> Any:
        return SimpleNamespace(start_if_possible=lambda: self._can_start(work), join=lambda _=None: self.run())

    def _can_start(self, work: Callable[[], None]) -> bool:
        if self.trouble is None:
            self.begun.append(work)
        return self.trouble is None

    def run(self) -> None:
        while self.begun:
            self.begun.pop(0)()
