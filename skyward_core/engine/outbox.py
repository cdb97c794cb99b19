"""Which calls go out when, and grouped how: the client's side of the queue.

Sending one call costs Dask about a millisecond of work, whatever the call does. So calls that have been seen to be short travel together, in batches of
some twenty milliseconds; unknown and long ones travel alone, one for each slot, so that no slot waits while another has work queued behind a long call.
A slot hands back what it has not begun (`Ending.RETURNED`); it is sent again, first in the queue. What was lost with its node travels alone from then on:
it may be what takes nodes down.

Pure bookkeeping: nothing here knows Dask or a thread. `engine.dispatcher` owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from skyward_core.worker.wire import Batch, Call, Parcel

TARGET_SECONDS = 0.02  # of work in a batch
LEAST_SECONDS = 40e-6  # what a call that does nothing costs in a slot
BATCH_CALLS = 1000
BATCH_BYTES = 1 << 20
SMOOTHING = 0.2


@dataclass(slots=True)
class Entry:
    """One call, the name of the worker where it must run (None: anywhere), and how often it has been sent out and lost.

    `aside` is where its large arguments lie: the id of an instance, and the file in the memory of that one.
    """

    call: Call
    function: Parcel
    worker: str | None = None
    losses: int = 0
    aside: tuple[str, Parcel] | None = None


@dataclass(slots=True)
class Shipment:
    """A batch that is out, and its calls that have not ended."""

    number: int
    batch: Batch
    worker: str | None
    unended: set[str] = field(default_factory=set[str])


class Queue:
    """Calls waiting and calls out. Each call is in exactly one of: waiting, out in one shipment, ended."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.next_number = 0
        """The number of the batch that goes out next."""
        self._waiting: deque[Entry] = deque()
        self._pinned: deque[Entry] = deque()
        self._resting: list[Entry] = []
        """Those that could not be sent just now: they wait for `wake`."""
        self._out: dict[str, tuple[Entry, Shipment]] = {}
        self._shipments: dict[int, Shipment] = {}
        self._suspects: set[int] = set()
        """Those with a call that was lost before: nothing waits behind them."""
        self._seconds: dict[str, float] = {}
        self.slots = 1
        self.workers: Collection[str] | None = None
        """Names of the workers that are there; None: all that were ever named."""

    def add(self, entries: Iterable[Entry]) -> None:
        """Take calls in, last in the queue."""
        for entry in entries:
            (self._waiting if entry.worker is None else self._pinned).append(entry)

    def ship(self) -> list[Shipment]:
        """Return what should go out now, and count it as out. A call for a given worker waits until that one is there, others until any is."""
        ready = [self.workers is None or entry.worker in self.workers for entry in self._pinned]
        shipments = [self._pack([entry], entry.worker) for entry, is_ready in zip(self._pinned, ready, strict=True) if is_ready]
        self._pinned = deque(entry for entry, is_ready in zip(self._pinned, ready, strict=True) if not is_ready)
        if self.workers is not None and not self.workers:
            return shipments
        while self._waiting and len(self._shipments) < self._limit(self._waiting[0]):
            shipments.append(self._pack(self._next_group(), None))
        return shipments

    def ended(self, call_id: str, seconds: float | None = None) -> bool:
        """Note that a call has ended, after so many seconds of work; False if it was not out (it was cancelled, or is told a second time)."""
        found = self._out.pop(call_id, None)
        if found is None:
            return False
        entry, shipment = found
        shipment.unended.discard(call_id)
        if not shipment.unended:
            self._shipments.pop(shipment.number, None)
            self._suspects.discard(shipment.number)
        if seconds is not None:
            before = self._seconds.get(entry.call.function)
            self._seconds[entry.call.function] = seconds if before is None else before + SMOOTHING * (seconds - before)
        return True

    def returned(self, call_ids: Sequence[str]) -> None:
        """Note that calls have not been begun: they wait again, in this order, first in the queue."""
        for call_id in reversed(call_ids):
            found = self._out.get(call_id)
            if found is not None:
                self.ended(call_id)
                (self._waiting if found[0].worker is None else self._pinned).appendleft(found[0])

    def rest(self, call_ids: Sequence[str]) -> None:
        """Note that calls have not been begun and cannot be sent just now: they wait again once `wake` was called."""
        for call_id in call_ids:
            if (found := self._out.get(call_id)) is not None:
                self.ended(call_id)
                self._resting.append(found[0])

    def wake(self) -> None:
        """Have the calls that rest wait again, first in the queue."""
        resting, self._resting = self._resting, []
        for entry in reversed(resting):
            (self._waiting if entry.worker is None else self._pinned).appendleft(entry)

    @property
    def _all_waiting(self) -> Iterable[Entry]:
        return (*self._pinned, *self._resting, *self._waiting)

    def drop(self, call_ids: AbstractSet[str]) -> set[str]:
        """Forget those of the calls that wait; return which did."""
        dropped = {entry.call.call_id for entry in self._all_waiting if entry.call.call_id in call_ids}
        if dropped:
            self._resting = [entry for entry in self._resting if entry.call.call_id not in dropped]
            self._waiting = deque(entry for entry in self._waiting if entry.call.call_id not in dropped)
            self._pinned = deque(entry for entry in self._pinned if entry.call.call_id not in dropped)
        return dropped

    def pinned_to(self, worker: str) -> list[str]:
        """Return the ids of calls that wait for this worker."""
        return [entry.call.call_id for entry in (*self._pinned, *self._resting) if entry.worker == worker]

    def all_out(self) -> list[str]:
        """Return the ids of all calls that have gone out and not ended."""
        return list(self._out)

    def is_out(self, call_id: str) -> bool:
        """Tell whether a call has gone out and not ended."""
        return call_id in self._out

    def unended(self, shipment: Shipment) -> list[str]:
        """Return the calls of a shipment that have not ended, in their order."""
        return [call.call_id for call in shipment.batch.calls if call.call_id in shipment.unended]

    def clear(self) -> list[str]:
        """Forget everything; return the ids of all calls that have not ended."""
        ids = self.withdraw() + list(self._out)
        self._out.clear()
        self._shipments.clear()
        self._suspects.clear()
        return ids

    def withdraw(self) -> list[str]:
        """Forget what has not been handed out; return the ids of those calls."""
        ids = [entry.call.call_id for entry in self._all_waiting]
        self._waiting.clear()
        self._pinned.clear()
        self._resting.clear()
        return ids

    def _limit(self, entry: Entry) -> int:
        """Many short calls: a batch at work and one on its way, for each slot. Few, long or unknown ones: one for each slot."""
        are_many = len(self._waiting) > 2 * self.slots and not entry.losses and not self._suspects
        return self.slots * 2 if are_many and self._seconds.get(entry.call.function, 1.0) < TARGET_SECONDS else self.slots

    def _next_group(self) -> list[Entry]:
        """The next calls that belong together: at most the target's work, and not more than leaves something for every slot."""
        most = min(BATCH_CALLS, max(1, len(self._waiting) // (2 * self.slots)))
        group, seconds, size = list[Entry](), 0.0, 0
        while self._waiting and len(group) < most:
            entry = self._waiting[0]
            expected = self._seconds.get(entry.call.function)
            if group and (group[-1].losses or entry.losses or expected is None or seconds + expected > TARGET_SECONDS or size > BATCH_BYTES):
                break
            group.append(self._waiting.popleft())
            seconds += TARGET_SECONDS if expected is None else max(expected, LEAST_SECONDS)
            size += entry.call.arguments.nbytes
        return group

    def _pack(self, entries: list[Entry], worker: str | None) -> Shipment:
        functions = {entry.call.function: entry.function for entry in entries}
        batch = Batch(self.topic, tuple(entry.call for entry in entries), functions)
        shipment = Shipment(self.next_number, batch, worker, {entry.call.call_id for entry in entries})
        self.next_number += 1
        if worker is None:  # calls for a given worker do not take part in the sharing out
            self._shipments[shipment.number] = shipment
            if entries[0].losses:
                self._suspects.add(shipment.number)
        self._out.update((entry.call.call_id, (entry, shipment)) for entry in entries)
        return shipment
