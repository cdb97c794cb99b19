"""Broken dispatchers, in each of which the simulation must find the fault: one broken part, a Dispatcher that puts its
parts together wrongly, or a Dispatcher that leaves one kind of action out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable, Items
from skyward_core.engine.connection_state import ConnectionState
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.kept_calls import KeptCalls
from skyward_core.engine.losses import Losses
from skyward_core.engine.outbox import Queue, Shipment
from skyward_core.engine.shipments import FunctionFiles, FunctionsOnNodes, Out, Phase, Placement, Shipments
from skyward_core.errors import SkywardError
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.wire import SHARED, Item, Parcel

HISTORIES = 2_000
"""As many as the gate runs; each fault must be found in them."""


class QueuesWhileDraining(CallTable):
    """Calls that come back wait again, although the pool begins no calls."""

    def _refuse(self, call_ids: Sequence[str]) -> None:
        pass


class LosesWhatHasEnded(Shipments):
    """A batch whose task has ended is lost, also if its calls have ended or its result is there."""

    def task_ended(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None:
        out = self._at(epoch, number, Phase.SENT)
        if out is not None:
            self._do(do.Release(epoch, (self.key(number),)))
            self._calls.lose(
                [call.call_id for call in out.shipment.batch.calls if call.call_id in self._calls.entries], reason
            )
            self.forget(out)


class MiscountsLosses(CallTable):
    """A call may run once more than `retries` allows."""

    def _may_run_again(self, entry: Any) -> bool:
        return super()._may_run_again(entry) or (
            entry.losses == self._retries + 1 and self._drained is None and self._ended is None
        )


class LeavesArguments(CallTable):
    """Arguments stay in the memory of a node."""

    def clear_remote_args(self, entry: Any) -> None:
        entry.remote_args = None


class LeavesOutcomes(CallTable):
    """Outcomes without a caller stay in the memory of a node."""

    def discard(self, parcel: Parcel) -> None:
        pass


class LeavesFunctions(FunctionsOnNodes):
    """Functions are never evicted."""

    def evict(self, instance_id: str) -> None:
        pass


class EvictsWhatIsUsed(FunctionsOnNodes):
    """A function is evicted although a batch in flight refers to it."""

    def evict(self, instance_id: str) -> None:
        for file in self.at(instance_id)._files.values():
            file.users.clear()
        super().evict(instance_id)


class KeepsUploads(Dispatcher):
    """A batch that is being uploaded when the pool drains is sent."""

    def drain(self, error: Any) -> None:
        self._calls.drain(error)


class LosesUnheardAtOnce(Losses):
    """A batch that the scheduler does not have any more is lost before the messages that were missed are heard."""

    def decide(self) -> None:
        self._unheard_until = 0
        super().decide()


class TakesReturnedForLost(CallTable):
    """Calls that were handed back, and not begun, count as lost."""

    def take_back(self, call_ids: Sequence[str]) -> None:
        self.lose(call_ids, "it was handed back")


class ForgetsFetches(Dispatcher):
    """A fetch that has lost its connection is not repeated."""

    def tick(self, now: float, is_reachable: Callable[[str], bool]) -> None:
        super().tick(now, lambda _: False)


class FinishesBeforeLines(Dispatcher):
    """The outcomes of a report come before its lines."""

    def report(self, epoch: int, report: Any, now: float) -> None:
        news = sorted(report.news, key=lambda item: hasattr(item, "lines")) if report is not None else ()
        super().report(epoch, report and report._replace(news=tuple(news)), now)


class DeafWhileAsking(ConnectionState):
    """A connection that is cut before the scheduler has answered is not noticed."""

    def cut(self, epoch: int) -> None:
        if self.is_live:
            super().cut(epoch)


class MiscountsProgress(CallTable):
    """Calls that fail are not counted."""

    def fail(self, call_ids: Iterable[str], error: Any) -> None:
        done = self._done
        super().fail(call_ids, error)
        self._done = done


class UploadsTwice(Placement):
    """A function that is being uploaded to a node is uploaded once more, and the first file forgotten."""

    def uploaded(
        self, number: int, instance_id: str, arguments: Mapping[str, Parcel], functions: Mapping[str, Parcel | None]
    ) -> None:
        for name in functions:
            self._functions.at(instance_id)._files.pop(name, None)
        super().uploaded(number, instance_id, arguments, functions)

    def _upload(self, out: Out, instance_id: str) -> None:
        self._functions.at(instance_id)._coming.clear()
        super()._upload(out, instance_id)


class ForgetsFailedUploads(Placement):
    """A function that could not be uploaded counts as being uploaded for ever."""

    def upload_failed(
        self, number: int, instance_id: str, functions: Collection[str], error: Exception, *, is_its_fault: bool
    ) -> None:
        super().upload_failed(number, instance_id, (), error, is_its_fault=is_its_fault)


class HearsOldConnections(Dispatcher):
    """An answer of an earlier connection counts as that of the present one."""

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        super().resumed(self.epoch, resumed, now)


class CountsWhatWasNotSent(Dispatcher):
    """A batch that has not gone out when the connection ends counts as lost."""

    def disconnected(self) -> None:
        for call_ids in self._shipments.withdraw():
            self._calls.lose(call_ids, "the head of the pool was lost")
        super().disconnected()


class ForgetsToStop(CallTable):
    """Calls that are cancelled run on."""

    def take_to_stop(self) -> set[str]:
        self._to_stop.clear()
        return set()


class ForgetsToStopAfterACut(Dispatcher):
    """Calls that were cancelled during a cut are not stopped on the next connection."""

    def cut(self, epoch: int) -> None:
        super().cut(epoch)
        self._calls._to_stop.clear()

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        before = set(self._calls._to_stop)
        super().resumed(epoch, resumed, now)
        self._calls._to_stop &= before


class HearsTwice(Losses):
    """Reports that a worker repeats to the next scheduler count as new."""

    def is_repeated(self, report: Any) -> bool:
        super().is_repeated(report)
        return False


class LosesKept(Dispatcher):
    """Calls that workers keep through a change of head are lost."""

    def restarted(self, nodes: Any, is_there: Callable[[Parcel], bool], now: float) -> None:
        super().restarted(nodes, is_there, now)
        self._kept.awaited.clear()
        self._losses.lose_unkept(now)


class KeepsLostFetches(CallTable):
    """An outcome that is not fetched any more stays in the memory of its node."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.fetches.forget = lambda call_id: self.fetches._pop(call_id)  # type: ignore[method-assign, assignment]


class QueuesAfterTheEnd(CallTable):
    """A pool that was given up takes calls in."""

    def end(self, error: SkywardError) -> None:
        super().end(error)
        self._ended = None


class LosesReturned(Queue):
    """A call that is handed back does not wait again."""

    def returned(self, call_ids: Sequence[str]) -> None:
        super().returned(call_ids[1:])


class KeepsDropped(Queue):
    """A call that is dropped waits on."""

    def drop(self, call_ids: Collection[str]) -> set[str]:
        return set()


class KeepsWithdrawn(Queue):
    """Not all calls that are withdrawn are known."""

    def withdraw(self) -> list[str]:
        return super().withdraw()[1:]


class ForgetsBound(Queue):
    """Calls that wait for one worker are not known."""

    def pinned_to(self, worker: str) -> list[str]:
        return []


class ForgetsUnended(Queue):
    """Not all calls of a batch that have not ended are known."""

    def unended(self, shipment: Shipment) -> list[str]:
        return super().unended(shipment)[1:]


class SendsToAbsent(Queue):
    """Calls go out for workers that are not there."""

    def ship(self) -> list[Shipment]:
        there, self.workers = self.workers, None
        shipments = super().ship()
        self.workers = there
        return shipments


class StrandsBatches(Shipments):
    """The batches of a worker that leaves are not taken back."""

    def worker_left(self, address: str) -> None:
        pass


class AwaitsKeptCallsForEver(KeptCalls):
    """Calls that no worker announces are never lost."""

    def take_lost(self, now: float, *, is_live: bool) -> list[str]:
        return []


# ── of streams and scattered values ──────────────────────────────────────────────────────────────────────────────────


class DeliversTwice(Items):
    """An item is delivered once more after it was fetched."""

    def arrived(self, item: Item, node: int) -> None:
        super().arrived(item, node)
        if item.call_id in self._calls.entries and item.parcel.path is None:
            self._do(do.DeliverItem(item.call_id, item.number, node, item.parcel))


class LosesItems(Items):
    """Some items do not reach their consumer."""

    def arrived(self, item: Item, node: int) -> None:
        if item.number == 1 and (entry := self._calls.entries.get(item.call_id)) is not None:
            entry.items += 1
        else:
            super().arrived(item, node)


class MiscountsItems(Items):
    """Some items are not counted."""

    def arrived(self, item: Item, node: int) -> None:
        if item.number != 1:
            super().arrived(item, node)


class LeavesItems(Items):
    """Items without a consumer stay in the memory of a node."""

    def arrived(self, item: Item, node: int) -> None:
        if item.call_id in self._calls.entries:
            super().arrived(item, node)


class GivesTooMuchCredit(Items):
    """A call may yield more than its consumer has allowed."""

    def give_credit(self, call_id: str, below: int) -> None:
        super().give_credit(call_id, below + 1)


class KeepsValues(FunctionsOnNodes):
    """Scattered values that the client has released stay in the memory of nodes."""

    def release(self, name: str) -> None:
        pass


class RemovesUsedValues(FunctionsOnNodes):
    """Scattered values are removed from a node although a call there uses them."""

    def evict(self, instance_id: str) -> None:
        for name, file in self.at(instance_id)._files.items():
            if name.startswith(SHARED):
                file.users.clear()
                file.is_released = True
        super().evict(instance_id)


class TakesNodesForOne(FunctionsOnNodes):
    """A scattered value that one node has counts as the value of all nodes."""

    def at(self, instance_id: str) -> FunctionFiles:
        return super().at("")


class UploadsValuesTwice(Placement):
    """A scattered value is uploaded to a node that has it already or will have it."""

    def _upload(self, out: Out, instance_id: str) -> None:
        files = self._functions.at(instance_id)
        files._coming = {name for name in files._coming if not name.startswith(SHARED)}
        super()._upload(out, instance_id)


class ForgetsCredit(Items):
    """Credit that was lost with a connection or a worker is not given again."""

    def repeat_credit(self) -> None:
        pass


class WaitsForLostItems(Items):
    """Calls go on whose items may have been lost with messages."""

    def lose_all(self) -> None:
        pass


class RunsAgainAfterItems(CallTable):
    """A call runs again although its consumer has items of it."""

    def _may_run_again(self, entry: Any) -> bool:
        entry.items = 0
        return super()._may_run_again(entry)


# ── actions that are left out ────────────────────────────────────────────────────────────────────────────────────────


class _Without(Dispatcher):
    """Actions of one kind are not done."""

    kind: type

    def take_actions(self) -> list[do.Action]:
        return [action for action in super().take_actions() if not isinstance(action, self.kind)]


UNNOTICED = {do.Acknowledge, do.Joined, do.Left, do.UseRanks, do.Answered, do.MeterCalls}
"""Actions without an effect in the simulation: its scheduler has room, and its pool a fixed size and no owner's thread.
It notices only that too much is metered.
"""

PARTS = (CallTable, ConnectionState, FunctionsOnNodes, Items, KeptCalls, Losses, Placement, Queue, Shipments)
BROKEN = [
    *(kind for part in (*PARTS, Dispatcher) for kind in part.__subclasses__() if kind.__doc__ and kind is not _Without),
    *(
        type(f"Without{kind.__name__}", (_Without,), {"kind": kind})
        for kind in do.Action.__value__.__args__
        if kind not in UNNOTICED
    ),
]
