"""The uses of one open pool in this process: recorded before their first call, noted every few seconds, and at the end.

One thread writes. What comes at the same time shares a transaction, so a thousand steps cost a few writes.

    begin ──written──▶ open ──noted, when its calls have begun and every NOTE_SECONDS──▶ end ──written──▶ (gone)
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from skyward_core.errors import LedgerError, SkywardError
from skyward_core.ledger.rows import SECONDS_PER_HOUR
from skyward_core.machines.instances import Lease, Node
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.uses import NewUse, UseCount

NOTE_SECONDS = 5.0
"""The time between two notes: a process that is killed leaves its figures at most so old."""
BEGIN_SECONDS = 0.3
"""How long after a call was submitted the slots that are held are noted: it is at its worker by then."""
STOP_SECONDS = 5.0
"""How long the end of a use waits for its last calls, which were stopped: the time that they hold slots is counted."""
LOOK_SECONDS = 0.02
LEDGER_BUSY_SECONDS = 10.0

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


@dataclass(slots=True)
class _Pending:
    """What the thread writes next, and the futures of those who wait for it."""

    begins: dict[str, tuple[NewUse, Future[None]]] = field(default_factory=dict)
    ends: dict[str, tuple[UseCount, Future[None]]] = field(default_factory=dict)
    notes_due: bool = False


class UseBook:
    """The uses of one open pool. `close` it with the pool; uses that are open then end."""

    def __init__(self, pool_id: str, client_id: str, cluster: Cluster, lease: Callable[[], Lease | None]) -> None:
        """Connect to the ledger. Raises LedgerError.

        `client_id`: the row of this process in a pool with a name, else "". `lease` returns the present nodes.
        """
        self._pool_id = pool_id
        self._client_id = client_id
        self._cluster = cluster
        self._lease = lease
        self._prices: dict[str, float] = {}
        """USD for one slot and second, by instance id, also of machines that are gone."""
        self._open: dict[str, float] = {}
        """When each use began, on the monotonic clock."""
        self._final: dict[str, UseCount] = {}
        self._pending = _Pending()
        self._turn = threading.Condition()
        self._is_closed = False
        module = importlib.import_module("skyward_core.ledger.ledger")
        self._ledger = cast("Ledger", module.Ledger(module.default_url(), busy_timeout_seconds=LEDGER_BUSY_SECONDS))
        self._thread = threading.Thread(target=self._run, name="skyward-uses", daemon=True)
        self._thread.start()

    # ── for PoolUse ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, use_id: str, work: Work) -> None:
        """Record a use, before its first call. Returns when it is in the ledger. Raises LedgerError."""
        module = importlib.import_module("skyward_core.ledger.uses")
        written: Future[None] = Future()
        with self._turn:
            self._open[use_id] = time.monotonic()
            new = module.NewUse(use_id, self._pool_id, work, self._client_id)
            self._pending.begins[use_id] = new, written
            self._turn.notify()
        written.result()

    def has_calls(self) -> None:
        """Note soon which slots are held: a use has submitted calls."""
        with self._turn:
            self._pending.notes_due = True
            self._turn.notify()

    def count(self, use_id: str) -> UseCount:
        """Return what the calls of a use have had so far; after its end in all."""
        if (final := self._final.get(use_id)) is not None:
            return final
        return self._count(use_id, self._cluster.slots_held().get(use_id, 0))

    def end(self, use_id: str, wait_seconds: float = STOP_SECONDS) -> UseCount:
        """Record the end of a use, after its last calls hold no slot any more; return what it has had in all.

        Raises LedgerError: the row is settled by others then.
        """
        until = time.monotonic() + wait_seconds
        while self._cluster.slots_held().get(use_id) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        written: Future[None] = Future()
        with self._turn:
            if use_id not in self._open:
                return self._final[use_id]
            count = self._final[use_id] = self._count(use_id, 0)
            del self._open[use_id]
            self._pending.ends[use_id] = count, written
            self._turn.notify()
        written.result()
        return count

    def close(self) -> None:
        """End the uses that are open, and the connection. Raises nothing."""
        for use_id in tuple(self._open):
            try:
                self.end(use_id, wait_seconds=0.0)
            except (SkywardError, OSError) as error:
                _log.warning("what a use of %s has cost is not in the ledger yet: %s", self._pool_id, error)
        with self._turn:
            self._is_closed = True
            self._turn.notify()
        self._thread.join(2 * LEDGER_BUSY_SECONDS)
        self._ledger.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(self._has_news, NOTE_SECONDS)
                pending, self._pending = self._pending, _Pending()
                if self._is_closed and not pending.begins and not pending.ends:
                    return
            self._write(pending, with_notes=not (pending.begins or pending.ends) or pending.notes_due)

    def _has_news(self) -> bool:
        pending = self._pending
        return bool(pending.begins or pending.ends or pending.notes_due or self._is_closed)

    def _write(self, pending: _Pending, *, with_notes: bool) -> None:
        waiting = [written for _, written in (*pending.begins.values(), *pending.ends.values())]
        if pending.notes_due and not waiting:
            time.sleep(BEGIN_SECONDS)
        try:
            self._ledger.uses.write(
                [new for new, _ in pending.begins.values()],
                self._counts() if with_notes else {},
                {use_id: count for use_id, (count, _) in pending.ends.items()},
            )
        except Exception as error:
            for written in waiting:
                written.set_exception(error)
            if not waiting and isinstance(error, LedgerError):
                _log.warning("what the uses of %s have cost is not in the ledger yet: %s", self._pool_id, error)
            elif not waiting:
                _log.exception("what the uses of %s have cost could not be noted", self._pool_id)
        else:
            for written in waiting:
                written.set_result(None)

    def _counts(self) -> dict[str, UseCount]:
        held = self._cluster.slots_held()
        return {use_id: self._count(use_id, held.get(use_id, 0)) for use_id in tuple(self._open)}

    def _count(self, use_id: str, held: int) -> UseCount:
        lease = self._lease()
        self._prices |= slot_prices(lease.nodes if lease is not None else ())
        own_time = self._cluster.owner.own_time
        since = own_time.seen_at(use_id) or self._open.get(use_id) or time.monotonic()
        return use_count(own_time.of(use_id), self._prices, held, time.monotonic() - since if held else 0.0)
