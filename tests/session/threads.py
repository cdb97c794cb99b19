"""Threads that run when a test says so."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Threads:
    """Stands for the module `threading`: a thread runs in `run`, or when it is joined."""

    Lock = staticmethod(threading.Lock)

    def __init__(self) -> None:
        self.begun: list[Callable[[], None]] = []
        self.trouble: Exception | None = None
        """Why no thread can begin."""

    def Thread(self, *, target: Callable[[], None], **_: Any) -> Any:
        return SimpleNamespace(start=lambda: self._start(target), join=lambda _=None: self.run())

    def _start(self, target: Callable[[], None]) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.begun.append(target)

    def run(self) -> None:
        while self.begun:
            self.begun.pop(0)()
