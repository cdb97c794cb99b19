"""The client's queue: which calls go out when, and in which batches.

One task costs Dask about a millisecond of work, also for a tiny call. So calls that are known to be short travel
together, in batches of some twenty milliseconds. Unknown and long calls travel alone, one for each slot: no slot waits
while calls queue behind a long one elsewhere. A slot hands back calls that it has not begun (`OutcomeKind.RETURNED`);
they are sent again, first in the queue. A call that was lost with its node travels alone from then on: it may be the
cause of the loss.

Pure bookkeeping, without Dask and threads. `engine.dispatcher` owns it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from skyward_core.wire.messages import Batch, Call, Parcel
from skyward_core.wire.shared_values import SharedValue

TARGET_SECONDS = 0.02  # of work in a batch
LEAST_SECONDS = 40e-6  # what a call that does nothing costs in a slot
BATCH_CALLS = 1000
BATCH_BYTES = 1 << 20
SMOOTHING = 0.2


@dataclass(slots=True)
class Entry:
    """One call, the name of the worker where it must run (None: anywhere), and how often it was lost.

    `in_group`: it needs the other calls of its broadcast, and is not repeated without them. `remote_args` says where
    its large arguments are: the id of an instance, and the file in its memory.
    """

    call: Call
    function: Parcel
    worker: str | None = None
    in_group: bool = False
    losses: int = 0
    remote_args: tuple[str, Parcel] | None = None
    shared: Mapping[str, SharedValue] = field(default_factory=dict[str, SharedValue])
    """The scattered values that it uses, by name."""
    title: str = ""
    """The name of its function, for people."""
    submitted_at: float = 0.0
    """When it was submitted, on the clock of `Dispatcher.tick`."""
    items: int = 0
    """How many items have come, if it streams."""


@dataclass(slots=True)
class Shipment:
    """A batch in flight, and its calls that have not ended."""

    number: int
    batch: Batch
    worker: str | None
    unended: set[str] = field(default_factory=set[str])


class Queue:
    """Calls waiting and calls in flight. Each call is in exactly one state: waiting, out in one shipment, ended."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.next_number = 0
        """The number of the batch that goes out next."""
        self._waiting: OrderedDict[str, Entry] = OrderedDict()
        self._pinned: OrderedDict[str, Entry] = OrderedDict()
        self._resting: OrderedDict[str, Entry] = OrderedDict()
        """Calls that could not be sent at the last attempt: they wait for `wake`.

        All three are by the id of the call, so that one can be cancelled without a search.
        """
        self._out: dict[str, tuple[Entry, Shipment]] = {}
        self._shipments: dict[int, Shipment] = {}
        self._suspects: set[int] = set()
        """Shipments with a call that was lost before: no other batch queues behind them."""
        self._seconds: dict[str, float] = {}
        self.slots = 1
        self.workers: Collection[str] | None = None
        """Names of the workers that take calls; None: any."""
        self.leaving: Collection[str] = ()
        """Names of workers that take only the calls that may run nowhere else."""

    def add(self, entries: Iterable[Entry]) -> None:
        """Take calls in, last in the queue."""
        for entry in entries:
            (self._waiting if entry.worker is None else self._pinned)[entry.call.call_id] = entry

    def ship(self) -> list[Shipment]:
        """Return the batches that should go out now, and count them as out.

        A call for a given worker waits for that worker, others for any.
        """
        ready = [
            entry
            for entry in self._pinned.values()
            if self.workers is None or entry.worker in self.workers or entry.worker in self.leaving
        ]
        for entry in ready:
            del self._pinned[entry.call.call_id]
        shipments = [self._pack([entry], entry.worker) for entry in ready]
        if self.workers is not None and not self.workers:
            return shipments
        while self._waiting and len(self._shipments) < self._limit(self._first_waiting):
            shipments.append(self._pack(self._next_group(), None))
        return shipments

    def ended(self, call_id: str, seconds: float | None = None) -> bool:
        """Note that a call has ended, after this many seconds of work; False if it was not out (it was cancelled, or
        its outcome came before).
        """
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
        """Note that calls have not begun: they wait again, in this order, first in the queue."""
        for call_id in reversed(call_ids):
            found = self._out.get(call_id)
            if found is not None:
                self.ended(call_id)
                self._put_first(found[0])

    def rest(self, call_ids: Sequence[str]) -> None:
        """Note that calls have not begun and cannot be sent just now: they wait again after `wake`."""
        for call_id in call_ids:
            if (found := self._out.get(call_id)) is not None:
                self.ended(call_id)
                self._resting[call_id] = found[0]

    def wake(self) -> None:
        """Put the calls that rest back, first in the queue."""
        while self._resting:
            _, entry = self._resting.popitem()
            self._put_first(entry)

    def _put_first(self, entry: Entry) -> None:
        queue = self._waiting if entry.worker is None else self._pinned
        queue[entry.call.call_id] = entry
        queue.move_to_end(entry.call.call_id, last=False)

    @property
    def _first_waiting(self) -> Entry:
        return next(iter(self._waiting.values()))

    @property
    def _all_waiting(self) -> Iterable[str]:
        return (*self._pinned, *self._resting, *self._waiting)

    @property
    def waiting(self) -> int:
        """How many calls for any worker wait. May be read from any thread."""
        return len(self._waiting)

    def drop(self, call_ids: AbstractSet[str]) -> set[str]:
        """Forget those of the calls that wait; return which did."""
        queues = (self._pinned, self._resting, self._waiting)
        return {call_id for call_id in call_ids if any(queue.pop(call_id, None) is not None for queue in queues)}

    def pinned_to(self, worker: str) -> list[str]:
        """Return the ids of calls that wait for this worker."""
        return [
            entry.call.call_id for entry in (*self._pinned.values(), *self._resting.values()) if entry.worker == worker
        ]

    def all_out(self) -> list[str]:
        """Return the ids of all calls that have gone out and not ended."""
        return list(self._out)

    def is_out(self, call_id: str) -> bool:
        """Return whether a call has gone out and not ended."""
        return call_id in self._out

    def batches_by_use(self) -> dict[str, int]:
        """Return how many batches that have gone out have a call of each use that has not ended. For any thread."""
        return Counter(use for use, _ in {(entry.call.use, its.number) for entry, its in list(self._out.values())})

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
        """Forget the calls that wait; return their ids."""
        ids = list(self._all_waiting)
        self._waiting.clear()
        self._pinned.clear()
        self._resting.clear()
        return ids

    def _limit(self, entry: Entry) -> int:
        """Many short calls: two batches for each slot, one running and one in transit.

        Few, long or unknown calls: one batch for each slot.
        """
        are_many = len(self._waiting) > 2 * self.slots and not entry.losses and not self._suspects
        return (
            self.slots * 2 if are_many and self._seconds.get(entry.call.function, 1.0) < TARGET_SECONDS else self.slots
        )

    def _next_group(self) -> list[Entry]:
        """Take the calls of the next batch: at most TARGET_SECONDS of work, and at most half of each slot's share of
        the queue.
        """
        most = min(BATCH_CALLS, max(1, len(self._waiting) // (2 * self.slots)))
        group, seconds, size = list[Entry](), 0.0, 0
        while self._waiting and len(group) < most:
            entry = self._first_waiting
            expected = self._seconds.get(entry.call.function)
            if group and (
                group[-1].losses
                or entry.losses
                or group[-1].call.ahead
                or entry.call.ahead
                or expected is None
                or seconds + expected > TARGET_SECONDS
                or size > BATCH_BYTES
            ):
                break
            group.append(self._waiting.popitem(last=False)[1])
            seconds += TARGET_SECONDS if expected is None else max(expected, LEAST_SECONDS)
            size += entry.call.arguments.nbytes
        return group

    def _pack(self, entries: list[Entry], worker: str | None) -> Shipment:
        functions = {entry.call.function: entry.function for entry in entries}
        functions |= {name: value.parcel for entry in entries for name, value in entry.shared.items()}
        batch = Batch(self.topic, tuple(entry.call for entry in entries), functions)
        shipment = Shipment(self.next_number, batch, worker, {entry.call.call_id for entry in entries})
        self.next_number += 1
        if worker is None:  # calls for a given worker do not count against the limit
            self._shipments[shipment.number] = shipment
            if entries[0].losses:
                self._suspects.add(shipment.number)
        self._out.update((entry.call.call_id, (entry, shipment)) for entry in entries)
        return shipment
