"""Engines that all ledgers of one process share: one for each URL and its settings.

    not known ──first ledger──▶ in use ──the last one is closed──▶ idle, without connections ──next ledger──▶ in use

SQLAlchemy keeps some two hundred objects of each engine for a server, also after its end. A process that opens pools
with a name again and again, as an orchestrator does, would grow without end. An engine is never forgotten: there are as
many as URLs. A fork makes its own, and leaves those of its parent alone.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable

from sqlalchemy import Engine


class SharedEngines:
    """The engines of this process, and how many ledgers use each. Safe to use from threads."""

    def __init__(self) -> None:
        self._engines: dict[Hashable, Engine] = {}
        self._users: Counter[Engine] = Counter()
        self._lock = threading.Lock()
        """Held while an engine is made, which connects to nothing."""
        os.register_at_fork(after_in_child=self._forget_lock)

    def _forget_lock(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it

    def take(self, key: Hashable, make: Callable[[], Engine]) -> Engine:
        """Return the engine of this key for one more ledger, which calls `leave` at its end."""
        with self._lock:
            of_this_process = (os.getpid(), key)
            if (engine := self._engines.get(of_this_process)) is None:
                engine = self._engines[of_this_process] = make()
            self._users[engine] += 1
            return engine

    def leave(self, engine: Engine) -> None:
        """A ledger does not use the engine any more: the last one closes its connections, and so does the only user of
        an engine that is not shared.
        """
        with self._lock:
            self._users[engine] -= 1
            if self._users[engine] <= 0:
                del self._users[engine]
            is_over = engine not in self._users
        if is_over:
            engine.dispose()

    def is_used(self, engine: Engine) -> bool:
        """Return whether a ledger uses the engine."""
        return engine in self._users


SHARED = SharedEngines()
