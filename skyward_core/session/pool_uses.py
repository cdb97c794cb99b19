"""The uses of one open pool in this process: their book, made when it is needed, and the use of calls that name none.

    none ──the first such call──▶ begun: in the ledger before that call ──the pool is left──▶ ended, its cost is final

If the ledger does not answer, the book keeps what it could not write.

A pool with a name may be shared, so all of its calls belong to a use: docs/decisions/0045.

One thread of the book writes. What comes at the same time shares a transaction, so a thousand steps that begin together
cost a few writes.

    begin ──written──▶ open ──noted, when its calls have begun and every NOTE_SECONDS──▶ end ──written──▶ (gone)
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import LedgerError, PoolClosed
from skyward_core.events.events import CallReported, InstanceLost, Metrics, SkywardEvent
from skyward_core.events.utilisation import Utilisation
from skyward_core.ledger.rows import SECONDS_PER_HOUR
from skyward_core.machines.instances import Lease, Node
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.events.queue import EventQueue
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.uses import NewUse, UseCount
    from skyward_core.work import Work


@dataclass(slots=True)
class _Measured:
    """What the nodes did for one use, and for how many seconds its calls had held slots at the last sample."""

    utilisation: Utilisation
    seconds: float = 0.0


class UseGauges:
    """Listens to the events of one open pool, and gives each use the samples that were taken while its calls ran, and
    what they have reported.
    """

    def __init__(self, events: EventQueue, cluster: Callable[[], Cluster | None]) -> None:
        self._events = events
        self._cluster = cluster
        self._uses: dict[str, _Measured] = {}
        events.listen(self._see)

    def begin(self, use_id: str, utilisation: Utilisation) -> None:
        """Measure a use from now on."""
        self._uses[use_id] = _Measured(utilisation)

    def end(self, use_id: str) -> None:
        """Measure a use no more, after the events so far."""
        self._events.in_order(lambda: self._uses.pop(use_id, None))

    def _see(self, event: SkywardEvent) -> None:
        """In the thread of the events."""
        match event:
            case Metrics():
                self._measure(event)
            case CallReported(use=use) if (its := self._uses.get(use)) is not None:
                its.utilisation.see(event)
            case InstanceLost():
                for its in list(self._uses.values()):
                    its.utilisation.see(event)
            case _:
                pass

    def _measure(self, sample: Metrics) -> None:
        if (cluster := self._cluster()) is None:
            return
        held = cluster.slots_held()
        for use_id, its in list(self._uses.items()):
            seconds = sum(cluster.owner.slot_seconds.of(use_id).values())
            its.utilisation.running(held.get(use_id, 0), have_run=seconds > its.seconds)
            its.seconds = seconds
            its.utilisation.see(sample)


class PoolUses:
    """The uses of one open pool. Knows nothing of the pool object, so that a forgotten pool can be collected.

    `work` is that of calls that name no use. `log` takes a level, a message and its
    arguments.
    """

    def __init__(
        self, make_book: Callable[[], UseBook], work: Work, log: Callable[..., object], gauges: UseGauges
    ) -> None:
        self.gauges = gauges
        self._make_book = make_book
        self._work = work
        self._log = log
        self._id = uuid.uuid4().hex
        """Of the use of calls that name none."""
        self._lock = threading.RLock()
        self._book: UseBook | None = None
        self._has_begun = self._is_closed = False
        self._cost_usd = 0.0
        """What the calls that name no use have cost in all, after the end."""

    @property
    def book(self) -> UseBook:
        """The book of the uses. Raises PoolClosed after the end."""
        with self._lock:
            if self._is_closed:
                raise PoolClosed("the pool is being left: its uses have ended")
            if self._book is None:
                self._book = self._make_book()
            return self._book

    def pays(self) -> str:
        """Return the id of the use that pays for calls which name none. It is in the ledger then, if that answers."""
        with self._lock:
            if self._is_closed:
                return self._id
            if not self._has_begun:
                self.book.begin(self._id, self._work)
                self._has_begun = True
            self.book.has_calls(self._id)
        return self._id

    @property
    def cost_usd(self) -> float:
        """What the calls that name no use have cost so far; after the end in all."""
        book = self._book
        return self._cost_usd if book is None or not self._has_begun else book.count(self._id).cost_usd

    def note(self) -> None:
        """Write what the uses have had so far."""
        if (book := self._book) is not None:
            book.note()

    def close(self) -> None:
        """End the uses that are open. Raises nothing. May be called twice."""
        try:
            self._close()
        except Exception as error:  # machines are ended after this: no fault of the bookkeeping may keep them
            self._is_closed = True
            self._log(logging.WARNING, "what the calls of this process have cost is not all in the ledger: %r", error)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
        if (book := self._book) is not None:
            book.close()
            self._cost_usd, self._book = self.cost_usd, None


NOTE_SECONDS = 5.0
"""The time between two notes: a process that is killed leaves its figures at most so old."""
BEGIN_SECONDS = 0.3
"""How long after a call was submitted the slots that are held are noted: it is at its worker by then."""
LEAST_SECONDS = 1.0
"""The least time between two notes."""
STOP_SECONDS = 5.0
"""How long the end of a use waits for its last calls, which were stopped: the time that they hold slots is counted."""
REPORT_SECONDS = 2.0
"""A call that has a slot is in the reports of its worker by then: workers report twice a second. If a later report
lacks it, it waits there for a slot that others hold.
"""
LOOK_SECONDS = 0.02
FORGET_SECONDS = 10.0
"""So long after its end a use is forgotten, or each step of a long flow would leave some bytes: by then no report of a
worker, which comes late, brings its seconds again.
"""
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
    """Return what a use has had, from its seconds of slots by instance id, and the prices of slots. Its cost is in
    whole micro-dollars, the nearest: all who show it have the number of the ledger.

    `held`: how many slots it holds since `age_seconds`.
    """
    module = importlib.import_module("skyward_core.ledger.uses")  # SQLAlchemy is loaded with the ledger
    known = [prices.get(instance, 0.0) for instance in seconds] or [*prices.values()] or [0.0]
    return module.UseCount(
        sum(seconds.values()),
        round(sum(its * prices.get(instance, 0.0) for instance, its in seconds.items()) * 1_000_000) / 1_000_000,
        held,
        held * sum(known) / len(known) * SECONDS_PER_HOUR,
        age_seconds,
    )


def slots_held(at_workers: int, seen_at: float | None, submitted_at: float, reported_at: float) -> int:
    """Return how many slots a use holds, of the batches that are at workers.

    `reported_at`: when reports of workers have come last, `seen_at`: when they last had running calls of the use. Times
    are those of one clock, in seconds.
    """
    return at_workers if reported_at - max(seen_at or submitted_at, submitted_at) <= REPORT_SECONDS else 0


class UseBook:
    """The uses of one open pool. `close` it with the pool; uses that are open then end.

    If the ledger does not answer, steps go on, the first one too: their machines are paid for. What could not be
    written is kept, and written when it answers.
    """

    def __init__(self, pool_id: str, client_id: str, cluster: Cluster, lease: Callable[[], Lease | None]) -> None:
        """Begin. The thread connects to the ledger when there is something to write.

        `client_id`: the row of this process in a pool with a name, else "". `lease` returns the present nodes.
        """
        self._pool_id = pool_id
        self._client_id = client_id
        self._cluster = cluster
        self._lease = lease
        self._prices: dict[str, float] = {}
        """USD for one slot and second, by instance id, also of machines that are gone."""
        self._since: dict[str, float] = {}
        """Of each open use: when it began, or has submitted calls last, on the monotonic clock."""
        self._noted: dict[str, UseCount] = {}
        """What was noted last of each open use."""
        self._final: dict[str, UseCount] = {}
        self._ended_at: dict[str, float] = {}
        """Of the uses that have ended lately: when, on the monotonic clock."""
        self._begins: dict[str, NewUse] = {}
        self._ends: dict[str, UseCount] = {}
        """What is to be written next."""
        self._waiting: list[Future[None]] = []
        """Those who wait until that was tried."""
        self._turn = threading.Condition()
        self._note_at = time.monotonic() + NOTE_SECONDS
        self._noted_at = 0.0
        self._is_away = self._is_closed = False
        """`_is_away`: the ledger has not answered last."""
        self._ledger: Ledger | None = None
        """None before the first connection. The thread makes it."""
        self._thread = LoopThread("skyward-uses", self._run)
        self._thread.start_if_possible()

    # ── for PoolUse ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, use_id: str, work: Work) -> None:
        """Record a use, before its first call. Returns when it is in the ledger, or the ledger does not answer."""
        module = importlib.import_module("skyward_core.ledger.uses")
        self._learn_prices()
        with self._turn:
            self._since[use_id] = time.monotonic()
            self._begins[use_id] = module.NewUse(use_id, self._pool_id, work, self._client_id)
            written = self._next_write()
        written.result()

    def has_calls(self, use_id: str) -> None:
        """Note soon which slots are held: a use has submitted calls."""
        with self._turn:
            now = time.monotonic()
            self._since[use_id] = now
            soon = max(now + BEGIN_SECONDS, self._noted_at + LEAST_SECONDS)
            if soon < self._note_at:
                self._note_at = soon
                self._turn.notify()

    def count(self, use_id: str) -> UseCount:
        """Return what the calls of a use have had so far; after its end in all, for FORGET_SECONDS."""
        if (final := self._final.get(use_id)) is not None:
            return final
        self._learn_prices()
        return self._count(use_id, self._cluster.slots_held().get(use_id, 0))

    def is_waiting(self, use_id: str) -> bool:
        """Return whether calls of a use are at workers, and hold no slots: others do."""
        at_workers = self._cluster.slots_held().get(use_id, 0)
        return bool(at_workers) and not self._count(use_id, at_workers).held_slots

    def end(self, use_id: str) -> UseCount:
        """Record the end of a use, after its last calls hold no slot any more; return what it has had in all.

        If the ledger does not answer, the row is written when it does, or settled by others.
        """
        until = time.monotonic() + STOP_SECONDS
        while self._cluster.slots_held().get(use_id) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        self._take_sample([use_id])
        ended = self._end([use_id])
        return ended[use_id] if use_id in ended else self.count(use_id)

    def note(self) -> None:
        """Write now what the uses have had so far. Returns when it is in the ledger, or the ledger does not answer."""
        written: Future[None] = Future()
        with self._turn:
            if self._is_closed:
                return
            self._note_at = time.monotonic()
            if not self._has_thread():
                return
            self._waiting.append(written)
            self._turn.notify()
        written.result()

    def is_final(self, use_id: str) -> bool:
        """Return whether a use that was begun has ended, and the ledger has its end."""
        return use_id not in self._since and use_id not in self._ends

    def close(self) -> None:
        """End the uses that are open, after a last look at calls that still run, and the connection. Raises nothing."""
        self._take_sample(list(self._since))
        self._end(list(self._since))
        with self._turn:
            self._is_closed = True
            self._turn.notify()
        if self._thread.is_alive:
            self._thread.join(2 * LEDGER_BUSY_SECONDS)
        else:
            self._run()
        if self._ledger is not None:
            self._ledger.close()

    def _take_sample(self, use_ids: Iterable[str]) -> None:
        """If calls of these uses hold slots: workers have reported that some seconds ago."""
        if self._cluster.slots_held().keys() & set(use_ids):
            self._cluster.take_sample()

    def _end(self, use_ids: Iterable[str]) -> dict[str, UseCount]:
        """End those of these uses that are open, and return what they have had: the thread may forget them soon."""
        ended: dict[str, UseCount] = {}
        self._learn_prices()
        with self._turn:
            for use_id in use_ids:
                if self._since.pop(use_id, None) is not None:
                    ended[use_id] = self._ends[use_id] = self._final[use_id] = self._count(use_id, 0)
                    self._ended_at[use_id] = time.monotonic()
                    self._noted.pop(use_id, None)
            written = self._next_write()
        written.result()
        return ended

    def _next_write(self) -> Future[None]:
        """Return the future of the next write, whether it succeeds or not. With the lock held."""
        written: Future[None] = Future()
        if self._is_away or not (self._begins or self._ends) or not self._has_thread():
            written.set_result(None)  # it is tried again with the notes: nothing waits for a ledger that is away
        else:
            self._waiting.append(written)
            self._turn.notify()
        return written

    def _has_thread(self) -> bool:
        """Whether there is a thread that writes; if it could not be started, that is tried again."""
        return self._thread.is_alive or self._thread.start_if_possible()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        is_closed = False
        while not is_closed:
            with self._turn:
                while not self._waiting and not self._is_closed and (left := self._note_at - time.monotonic()) > 0:
                    self._turn.wait(left)
                is_closed = self._is_closed
                waiting, self._waiting = self._waiting, []
                begins, ends = dict(self._begins), dict(self._ends)
                is_due = time.monotonic() >= self._note_at
                if is_due:
                    self._noted_at = time.monotonic()
                    self._note_at = self._noted_at + NOTE_SECONDS
            try:
                self._write(begins, ends, is_due=is_due)
                if is_due:
                    self._forget_ended()
            finally:
                for written in waiting:
                    written.set_result(None)

    def _write(self, begins: Mapping[str, NewUse], ends: Mapping[str, UseCount], *, is_due: bool) -> None:
        """Write what begins and ends, and if it is due, what has changed. Raises nothing: all wait for this thread."""
        try:
            counts = self._counts(begins) if is_due else {}
            if not begins and not counts and not ends:
                return
            self._connected().uses.write(list(begins.values()), counts, ends)
        except Exception as error:
            if not self._is_away:
                known = isinstance(error, LedgerError)
                words = "what the uses of %s have cost is not in the ledger yet: %s"
                _log.warning(words, self._pool_id, error, exc_info=None if known else error)
            self._is_away = True
            return
        self._is_away = False
        with self._turn:
            for use_id in begins:
                self._begins.pop(use_id, None)
            for use_id in ends:
                self._ends.pop(use_id, None)
            self._noted.update({use_id: count for use_id, count in counts.items() if use_id in self._since})

    def _forget_ended(self) -> None:
        before = time.monotonic() - FORGET_SECONDS
        with self._turn:
            forgotten = [use_id for use_id, at in self._ended_at.items() if at < before and use_id not in self._ends]
            for use_id in forgotten:
                del self._ended_at[use_id], self._final[use_id]
        for use_id in forgotten:
            self._cluster.owner.slot_seconds.forget(use_id)

    def _connected(self) -> Ledger:
        if self._ledger is None:
            module = importlib.import_module("skyward_core.ledger.ledger")
            self._ledger = cast("Ledger", module.Ledger(module.default_url(), busy_timeout_seconds=LEDGER_BUSY_SECONDS))
        return self._ledger

    def _counts(self, begins: Mapping[str, NewUse]) -> dict[str, UseCount]:
        """Return what uses have had that has changed since it was noted last."""
        self._learn_prices()
        held = self._cluster.slots_held()
        counts = {use_id: self._count(use_id, held.get(use_id, 0)) for use_id in tuple(self._since)}
        return {
            use_id: count
            for use_id, count in counts.items()
            if count.held_slots or use_id in begins or count != self._noted.get(use_id)
        }

    def _learn_prices(self) -> None:
        lease = self._lease()
        self._prices |= slot_prices(lease.nodes if lease is not None else ())

    def _count(self, use_id: str, held: int) -> UseCount:
        slot_seconds = self._cluster.owner.slot_seconds
        now = time.monotonic()
        seen_at, submitted_at = slot_seconds.seen_at(use_id), self._since.get(use_id, now)
        held = slots_held(held, seen_at, submitted_at, slot_seconds.reported_at)
        since = max(seen_at or 0.0, submitted_at)
        return use_count(slot_seconds.of(use_id), self._prices, held, now - since if held else 0.0)
