"""The account of one use of a pool in the ledger: what its calls have had, noted every few seconds and at the end."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

from skyward_core.concurrency.periodic import PeriodicThread
from skyward_core.errors import LedgerError
from skyward_core.ledger.rows import SECONDS_PER_HOUR
from skyward_core.machines.instances import Lease, Node
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.uses import UseCount

NOTE_SECONDS = 5.0
"""The time between two notes: a process that is killed leaves its figures at most so old."""
STOP_SECONDS = 5.0
"""How long the end of a use waits for its last calls, which were stopped: the time that they hold slots is counted."""
LOOK_SECONDS = 0.02

_log = logging.getLogger("skyward")


def slot_prices(nodes: Iterable[Node]) -> dict[str, float]:
    """Return the price of one slot for one second in USD, by instance id: its share of the machine's price."""
    prices: dict[str, float] = {}
    for node in nodes:
        extras = sum(extra.usd_per_hour for extra in node.instance.extras_per_hour)
        per_second = (node.instance.price_per_hour + extras) / SECONDS_PER_HOUR
        prices[node.instance.id] = per_second / max(1, node.workers * node.slots)
    return prices


def use_count(
    seconds: Mapping[str, float], prices: Mapping[str, float], held: int = 0, age_seconds: float = 0.0
) -> UseCount:
    """Return what a use has had, from its seconds of slots by instance id, and the prices of slots.

    `held`: how many slots it holds since `age_seconds`.
    """
    module = importlib.import_module("skyward_core.ledger.uses")  # SQLAlchemy is loaded with the ledger
    known = [prices.get(instance, 0.0) for instance in seconds] or [*prices.values()] or [0.0]
    return module.UseCount(
        sum(seconds.values()),
        sum(its * prices.get(instance, 0.0) for instance, its in seconds.items()),
        held,
        held * sum(known) / len(known) * SECONDS_PER_HOUR,
        age_seconds,
    )


class UseAccount:
    """Counts what one use of a pool has had, and notes it in the ledger. `close` it at the end."""

    def __init__(
        self,
        use_id: str,
        work: Work,
        pool_id: str,
        client_id: str,
        cluster: Cluster,
        lease: Callable[[], Lease | None],
    ) -> None:
        """Record the use. Raises LedgerError."""
        self._id = use_id
        self._name = str(work) or use_id
        self._cluster = cluster
        self._lease = lease
        self._prices: dict[str, float] = {}
        """USD for one slot and second, by instance id, also of machines that are gone."""
        self._began = time.monotonic()
        module = importlib.import_module("skyward_core.ledger.ledger")
        self._ledger = cast("Ledger", module.Ledger(module.default_url()))
        try:
            self._ledger.uses.begin(use_id, pool_id, work, client_id)
        except BaseException:
            self._ledger.close()
            raise
        self._notes = PeriodicThread("skyward-use", NOTE_SECONDS, self.note, self._on_trouble)
        self._notes.start()

    def count(self) -> UseCount:
        """Return what the calls of the use have had so far."""
        lease = self._lease()
        self._prices |= slot_prices(lease.nodes if lease is not None else ())
        own_time = self._cluster.owner.own_time
        held = self._cluster.slots_held(self._id)
        age_seconds = time.monotonic() - (own_time.seen_at(self._id) or self._began) if held else 0.0
        return use_count(own_time.of(self._id), self._prices, held, age_seconds)

    def note(self) -> None:
        """Record in the ledger what the use has had so far. Raises LedgerError."""
        self._ledger.uses.note({self._id: self.count()})

    def wait_for_stopped_calls(self) -> None:
        """Wait until the calls of the use hold no slot any more, at most STOP_SECONDS."""
        until = time.monotonic() + STOP_SECONDS
        while self._cluster.slots_held(self._id) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)

    def close(self) -> UseCount:
        """Record the end; return what the use has had in all. Raises LedgerError; it may be called again then."""
        self._notes.end()
        count = self.count()
        self._ledger.uses.note({self._id: count}, are_final=True)
        self._ledger.close()
        return count

    def _on_trouble(self, error: Exception) -> None:
        if isinstance(error, LedgerError):
            _log.warning("what %s has cost is not in the ledger yet: %s", self._name, error)
        else:
            _log.error("what %s has cost could not be counted", self._name, exc_info=error)
