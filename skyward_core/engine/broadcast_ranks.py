"""The ranks that broadcasts use. A node that is to leave is left out of new broadcasts, and waits for those that have
begun.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager


class BroadcastRanks:
    """The ranks of a pool as its broadcasts see them. Several threads may use it; nothing waits under its lock."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._ranks = sorted(ranks)
        self._beginning: Counter[int] = Counter()
        """By rank: how many broadcasts are being packed that use it."""

    @property
    def all(self) -> list[int]:
        """The present ranks, in their order."""
        with self._lock:
            return list(self._ranks)

    @contextmanager
    def begin(self) -> Generator[list[int]]:
        """Return the ranks of a broadcast that begins; its calls must be on their way at the end of the block."""
        with self._lock:
            ranks = list(self._ranks)
            self._beginning.update(ranks)
        try:
            yield ranks
        finally:
            with self._lock:
                self._beginning.subtract(ranks)

    def set(self, ranks: Iterable[int]) -> None:
        """Let broadcasts use these ranks."""
        with self._lock:
            self._ranks = sorted(ranks)

    def take_in(self, rank: int) -> None:
        """Let broadcasts use a rank. Idempotent."""
        with self._lock:
            self._ranks = sorted({*self._ranks, rank})

    def leave_out(self, rank: int) -> None:
        """Let no more broadcasts use a rank. Idempotent."""
        with self._lock:
            self._ranks = [other for other in self._ranks if other != rank]

    def beginning_at(self, rank: int) -> int:
        """Return how many broadcasts are being packed that use a rank."""
        with self._lock:
            return self._beginning[rank]
