"""The uses of one open pool in this process: their book, made when it is needed, and the use of calls that name none.

    none ──the first such call──▶ begun: in the ledger before that call ──the pool is left──▶ ended, its cost is final

If the ledger does not answer, the book keeps what it could not write.

A pool with a name may be shared, so all of its calls belong to a use: docs/decisions/0045.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward_core.errors import PoolClosed
from skyward_core.events.events import CallReported, InstanceLost, Metrics, SkywardEvent
from skyward_core.events.utilisation import Utilisation

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.events.queue import EventQueue
    from skyward_core.session.use_book import UseBook
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
