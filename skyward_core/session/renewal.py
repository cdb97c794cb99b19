"""Renews the leases of one session: each in a separate thread, so that nothing else can delay a renewal.

"skyward-lease" renews the pool's lease in the ledger. "skyward-node-lease" renews those of nodes of this machine.
Neither waits for a callback, or logs to a terminal, because a terminal may block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from skyward_core.concurrency.periodic import PeriodicThread
from skyward_core.errors import LeaseLost
from skyward_core.ledger.journal import Journal

MOST_BEAT_SECONDS = 5.0


class Renewal:
    """Owns the threads that renew leases, and the error that the pool's lease is lost."""

    def __init__(self, pool_id: str, lease_seconds: float, log: Callable[..., object]) -> None:
        self._pool_id = pool_id
        self.beat_seconds = min(lease_seconds / 6, MOST_BEAT_SECONDS)
        self._log = log
        self._beats: list[PeriodicThread] = []
        self._lost: LeaseLost | None = None

    @property
    def lost(self) -> LeaseLost | None:
        """The error that the pool's lease is lost, because a sweep has condemned the pool; else None."""
        return self._lost

    def begin(self, name: str, step: Callable[[], object]) -> None:
        """Start a thread that takes this step until the pool ends: six times in each lease, and at least every few
        seconds.
        """
        troubles: set[str] = set()

        def on_error(error: Exception) -> None:
            if repr(error) not in troubles:  # an error that repeats with every renewal is logged once
                troubles.add(repr(error))
                self._log(logging.ERROR, "%s of %s goes on", name, self._pool_id, error=error)

        beat = PeriodicThread(name, self.beat_seconds, step, on_error)
        self._beats.append(beat)
        beat.start()

    def renew(self, journal: Journal) -> None:
        """Extend the pool's lease in the ledger. If it is lost, the clock acts within a second."""
        try:
            journal.renew()
        except LeaseLost as error:
            self._lost = error

    def raise_if_lost(self) -> None:
        """Raise LeaseLost if the pool's lease is lost."""
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Stop renewing. Does not wait for a renewal that runs."""
        for beat in self._beats:
            beat.end()

    def join(self, timeout_seconds: float) -> None:
        """Wait for renewals that run, at most this long for each."""
        for beat in self._beats:
            beat.join(timeout_seconds)
