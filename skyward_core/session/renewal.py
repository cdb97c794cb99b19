"""Renews the leases of one session: each in a separate thread, so that nothing else can delay a renewal.

"skyward-lease" renews the pool's lease in the ledger. "skyward-node-lease" renews those of nodes of this machine. None
of them waits for a callback, or logs to a terminal: a terminal may take nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from skyward_core.concurrency.periodic import PeriodicThread
from skyward_core.errors import LeaseLost
from skyward_core.ledger.journal import Journal

MOST_BEAT_SECONDS = 5.0


class Renewal:
    """Owns the threads that renew leases, and the error that says that the pool's lease is lost."""

    def __init__(self, pool_id: str, lease_seconds: float, log: Callable[..., object]) -> None:
        self._pool_id = pool_id
        self.beat_seconds = min(lease_seconds / 6, MOST_BEAT_SECONDS)
        self._log = log
        self._beats: list[PeriodicThread] = []
        self._lost: LeaseLost | None = None

    @property
    def lost(self) -> LeaseLost | None:
        """That the pool's lease is lost, if it is: a sweep has condemned the pool."""
        return self._lost

    def begin(self, name: str, step: Callable[[], object]) -> None:
        """Start a thread that does this six times in each lease, and at least every few seconds, until the pool
        ends.
        """
        troubles: set[str] = set()

        def on_error(error: Exception) -> None:
            if repr(error) not in troubles:  # one that comes with every beat is logged once
                troubles.add(repr(error))
                self._log(logging.ERROR, "%s of %s goes on", name, self._pool_id, error=error)

        beat = PeriodicThread(name, self.beat_seconds, step, on_error)
        self._beats.append(beat)
        beat.start()

    def renew(self, book: Journal) -> None:
        """Lengthen the pool's lease in the ledger. The clock, which looks each second, acts if it is lost."""
        try:
            book.renew()
        except LeaseLost as error:
            self._lost = error

    def raise_if_lost(self) -> None:
        """Raise LeaseLost if the pool's lease is lost."""
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Renew no more. Does not wait for a renewal that runs."""
        for beat in self._beats:
            beat.end()

    def join(self, timeout_seconds: float) -> None:
        """Wait for renewals that run, at most so long for each."""
        for beat in self._beats:
            beat.join(timeout_seconds)
