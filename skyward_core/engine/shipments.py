"""Batches in flight or being uploaded, until each of their calls has ended, waits again or is lost.

States of a batch:

    choosing ──load known──▶ uploading ──uploaded──▶ sent ──its task ended──▶ (gone)
        │                       │ └──a function is on its way there──▶ blocked ──it is there──▶ uploading
        │                       │                     │  └──ended, outcomes missing──▶ gathering ──gathered──▶ (gone)
        └───────────────────────┴──the connection is cut: its calls wait again (nothing has gone out)

A batch without large values is sent at once; `placement.py` does all that comes before. A sent batch has the epoch of
the connection that follows its task. When another connection replaces that one, the scheduler's answer decides about
each batch of an earlier epoch: its task is known, it never came, or it is lost (`losses.py`). A batch that has not gone
out when its connection ends was never begun: its calls wait again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable
from skyward_core.engine.connection_state import ConnectionState
from skyward_core.engine.function_files import FunctionsOnNodes
from skyward_core.engine.kept_calls import KeptCalls
from skyward_core.engine.outbox import Queue, Shipment
from skyward_core.errors import NodeLost
from skyward_core.worker.wire import Batch, Outcome, OutcomeKind, Parcel


class Phase(Enum):
    """The state of a batch."""

    CHOOSING = "choosing"
    BLOCKED = "blocked"
    UPLOADING = "uploading"
    SENT = "sent"
    GATHERING = "gathering"


@dataclass(slots=True)
class Out:
    """A batch from the queue.

    `worker` and `address`: its destination, unless the scheduler chooses. `instance_id`: the node of its large values.
    """

    shipment: Shipment
    phase: Phase
    epoch: int
    worker: str | None = None
    address: str | None = None
    instance_id: str | None = None
    functions: dict[str, Parcel] = field(default_factory=dict[str, Parcel])
    """Large functions, as parcels on the node."""
    heard: dict[str, int] = field(default_factory=dict[str, int])
    """The number of its last report, by origin."""

    @property
    def number(self) -> int:
        """The unique number of the batch."""
        return self.shipment.number

    @property
    def is_out(self) -> bool:
        """Whether the batch has gone out: its calls may have begun."""
        return self.phase in (Phase.SENT, Phase.GATHERING)


class Shipments:
    """The batches in flight, and those that are being uploaded, by number. `act` takes the actions."""

    def __init__(
        self,
        topic: str,
        connection: ConnectionState,
        queue: Queue,
        calls: CallTable,
        functions: FunctionsOnNodes,
        kept: KeptCalls,
        act: Callable[[do.Action], object],
    ) -> None:
        self.outs: dict[int, Out] = {}
        self.key_end = f"-{topic[-8:]}"
        """The end of the keys of this client's tasks."""
        self._connection = connection
        self._queue = queue
        self._calls = calls
        self._functions = functions
        self._kept = kept
        self._do = act

    def add(self, out: Out) -> None:
        """Take in a batch from the queue."""
        self.outs[out.number] = out

    def clear(self) -> None:
        """Forget all batches: the pool begins no calls any more."""
        self.outs.clear()

    def key(self, number: int) -> str:
        """Return the key of a batch's task."""
        return f"skyward-{number}{self.key_end}"

    def ours(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of this client's batches. Other clients count theirs from 0 too."""
        return [key for key in keys if key.endswith(self.key_end)]

    def in_phase(self, phase: Phase) -> list[Out]:
        """Return the batches in this state."""
        return [out for out in self.outs.values() if out.phase is phase]

    def count_for(self, names: Collection[str]) -> int:
        """Return how many batches have one of these workers as their destination, by this client's choice. The
        scheduler may not know them yet.
        """
        return sum(out.worker in names for out in self.outs.values())

    def forget(self, out: Out) -> list[str]:
        """A batch is no longer in flight; return its calls that have not ended."""
        if out.instance_id is not None:
            self._functions.at(out.instance_id).done(out.number)
            self._functions.evict(out.instance_id)
        return self.forget_with_head(out)

    def forget_with_head(self, out: Out) -> list[str]:
        """The head of a batch is lost; return its calls that have not ended. A worker may go on with them, and their
        functions stay until the batch has ended (`KeptCalls`).
        """
        self.outs.pop(out.number, None)
        unended = self._queue.unended(out.shipment)
        if out.is_out and unended:
            self._kept.lose(out.number, unended)
        return unended

    def withdraw(self) -> Iterator[list[str]]:
        """Forget the batches that have not gone out; yield the calls of each."""
        for out in [out for out in self.outs.values() if not out.is_out]:
            yield self.forget(out)

    # ── sent batches, and how they end ───────────────────────────────────────────────────────────────────────────────

    def send(self, out: Out, batch: Batch) -> None:
        """Send a batch, in the form in which its large values are parcels on the node."""
        out.phase, out.epoch = Phase.SENT, self._connection.epoch
        self._do(do.Send(out.epoch, out.number, self.key(out.number), batch, out.address))

    def unsent(self, epoch: int, number: int, error: Exception, *, is_its_fault: bool) -> None:
        """A batch was not sent. It waits again, unless the batch itself is the cause."""
        out = self.outs.get(number)
        if out is None or out.epoch != epoch:
            return
        ids = self.forget(out)
        if not is_its_fault:
            self._calls.rest(ids)
            return
        failure = NodeLost(f"the call could not be sent: {error}")
        failure.__cause__ = error
        for call_id in ids:
            self._queue.ended(call_id)
        self._calls.fail(ids, failure)

    def task_ended(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None:
        """The task of a batch has ended: outcomes that were not reported are in its result, or were lost with its
        worker.
        """
        out = self._at(epoch, number, Phase.SENT)
        if out is None:
            return
        if is_finished and out.shipment.unended:
            out.phase = Phase.GATHERING
            self._do(do.Gather(epoch, number, self.key(number)))
            return
        self._do(do.Release(epoch, (self.key(number),)))
        self._calls.lose(self.forget(out), reason)

    def gathered(
        self, epoch: int, number: int, outcomes: Mapping[str, Outcome], node: int, instance_id: str, now: float
    ) -> None:
        """The result of a batch's task is here."""
        out = self._at(epoch, number, Phase.GATHERING)
        if out is None:
            return
        self._do(do.Release(epoch, (self.key(number),)))
        ids = self.forget(out)
        ended = [
            outcomes[call_id]
            for call_id in ids
            if call_id in outcomes and outcomes[call_id].kind is not OutcomeKind.RETURNED
        ]
        if seconds := seconds_by_use(ended):
            self._do(do.MeterCalls(instance_id, seconds))
        self._calls.take_back(
            [call_id for call_id in ids if call_id in outcomes and outcomes[call_id].kind is OutcomeKind.RETURNED]
        )
        for outcome in ended:
            self._calls.ended(outcome, node, instance_id, now)
        self._calls.lose(
            [call_id for call_id in ids if call_id not in outcomes], "the call ended, but its result was not there"
        )

    def not_gathered(self, epoch: int, number: int, error: Exception) -> None:
        """The result of a batch's task is out of reach."""
        if (out := self._at(epoch, number, Phase.GATHERING)) is not None:
            self._do(do.Release(epoch, (self.key(number),)))
            self._calls.lose(self.forget(out), f"the call ended, but its result could not be fetched: {error}", error)

    def taken_back(self, epoch: int, number: int) -> None:
        """A batch whose worker is gone had not ended, and its task is released: its calls are lost."""
        if (out := self._at(epoch, number, Phase.SENT)) is not None:
            self._calls.lose(self.forget(out), "its worker is gone")

    def follow(self, out: Out) -> None:
        """A batch that an earlier connection has sent belongs to the present one."""
        out.phase, out.epoch = Phase.SENT, self._connection.epoch
        self._do(do.Follow(out.epoch, out.number, self.key(out.number)))

    def worker_left(self, address: str) -> None:
        """A worker has left: its batches wait again if they have not gone out, and are taken back if they have."""
        for out in [out for out in self.outs.values() if out.address == address]:
            if not out.is_out:
                self._calls.take_back(self.forget(out))
            elif out.epoch == self._connection.epoch:
                self._do(do.TakeBack(out.epoch, out.number, self.key(out.number)))

    def _at(self, epoch: int, number: int, phase: Phase) -> Out | None:
        """Return the batch of a message; None if the message comes too late: the batch has another epoch or is in
        another phase.
        """
        out = self.outs.get(number)
        return (
            out
            if self._connection.is_live_in(epoch) and out is not None and out.epoch == epoch and out.phase is phase
            else None
        )


def seconds_by_use(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return for how long ended calls have kept slots busy, by their uses."""
    sums = dict[str, float]()
    for outcome in outcomes:
        if outcome.seconds:
            sums[outcome.use] = sums.get(outcome.use, 0.0) + outcome.seconds
    return sums
