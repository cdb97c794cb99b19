"""Broken dispatchers, in each of which the simulation must find the fault: one broken record of the state, a Dispatcher
with one wrong transition, or a Dispatcher that leaves one kind of action out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.calls import Calls
from skyward_core.engine.dispatcher import Dispatcher, Losses
from skyward_core.engine.outbox import Queue, Shipment
from skyward_core.engine.shipments import Shipments
from skyward_core.engine.state import FunctionFiles, FunctionsOnNodes, KeptCalls, Out, Phase
from skyward_core.errors import SkywardError
from skyward_core.wire.messages import SHARED, Item, Parcel
from skyward_core.wire.protocol import Resumed

HISTORIES = 2_000
"""As many as the gate runs; each fault must be found in them."""


class QueuesWhileDraining(Dispatcher):
    """Calls that come back wait again, although the pool begins no calls."""

    def _refuse(self, call_ids: Sequence[str]) -> None:
        pass


class LosesWhatHasEnded(Dispatcher):
    """A batch whose task has ended is lost, also if its calls have ended or its result is there."""

    def task_ended(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None:
        out = self._batch_at(epoch, number, Phase.SENT)
        if out is not None:
            self._do(do.Release(epoch, (self.key(number),)))
            self._lose([call.call_id for call in out.shipment.batch.calls if call.call_id in self.entries], reason)
            self._forget_batch(out)


class MiscountsLosses(Dispatcher):
    """A call may run once more than `retries` allows."""

    def _may_run_again(self, entry: Any) -> bool:
        return super()._may_run_again(entry) or (
            entry.losses == self._retries + 1 and self._drained is None and self._ended is None
        )


class LeavesArguments(Dispatcher):
    """Arguments stay in the memory of a node."""

    def _clear_remote_args(self, entry: Any) -> None:
        entry.remote_args = None


class LeavesOutcomes(Dispatcher):
    """Outcomes without a caller stay in the memory of a node."""

    def _discard(self, parcel: Parcel) -> None:
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
        self._begin_no_calls(error)


class LosesUnheardAtOnce(Dispatcher):
    """A batch that the scheduler does not have any more is lost before the messages that were missed are heard."""

    def _decide(self) -> None:
        self._unheard_until = 0
        super()._decide()


class TakesReturnedForLost(Dispatcher):
    """Calls that were handed back, and not begun, count as lost."""

    def _take_back(self, call_ids: Sequence[str]) -> None:
        self._lose(call_ids, "it was handed back")


class ForgetsFetches(Dispatcher):
    """A fetch that has lost its connection is not repeated."""

    def tick(self, now: float, is_reachable: Callable[[str], bool]) -> None:
        super().tick(now, lambda _: False)


class FinishesBeforeLines(Dispatcher):
    """The outcomes of a report come before its lines."""

    def report(self, epoch: int, report: Any, now: float) -> None:
        news = sorted(report.news, key=lambda item: hasattr(item, "lines")) if report is not None else ()
        super().report(epoch, report and report._replace(news=tuple(news)), now)


class DeafWhileAsking(Dispatcher):
    """A connection that is cut before the scheduler has answered is not noticed."""

    def cut(self, epoch: int) -> None:
        if self.is_live:
            super().cut(epoch)


class MiscountsProgress(Dispatcher):
    """Calls that fail are not counted."""

    def _fail(self, call_ids: Iterable[str], error: Any) -> None:
        done = self._done
        super()._fail(call_ids, error)
        self._done = done


class UploadsTwice(Dispatcher):
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


class ForgetsFailedUploads(Dispatcher):
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
        for call_ids in self._withdraw():
            self._lose(call_ids, "the head of the pool was lost")
        super().disconnected()


class ForgetsToStop(Dispatcher):
    """Calls that are cancelled run on."""

    def _take_to_stop(self) -> set[str]:
        self._to_stop.clear()
        return set()


class ForgetsToStopAfterACut(Dispatcher):
    """Calls that were cancelled during a cut are not stopped on the next connection."""

    def cut(self, epoch: int) -> None:
        super().cut(epoch)
        self._to_stop.clear()

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        before = set(self._to_stop)
        super().resumed(epoch, resumed, now)
        self._to_stop &= before


class HearsTwice(Dispatcher):
    """Reports that a worker repeats to the next scheduler count as new."""

    def _is_repeated(self, report: Any) -> bool:
        super()._is_repeated(report)
        return False


class LosesKept(Dispatcher):
    """Calls that workers keep through a change of head are lost."""

    def restarted(self, nodes: Any, is_there: Callable[[Parcel], bool], now: float) -> None:
        super().restarted(nodes, is_there, now)
        self._kept.awaited.clear()
        self._lose_unkept(now)


class KeepsLostFetches(Dispatcher):
    """An outcome that is not fetched any more stays in the memory of its node."""

    def _forget_fetch(self, call_id: str) -> None:
        self._end_fetch(call_id)


class QueuesAfterTheEnd(Dispatcher):
    """A pool that was given up takes calls in."""

    def _end(self, error: SkywardError) -> None:
        super()._end(error)
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


class StrandsBatches(Dispatcher):
    """The batches of a worker that leaves are not taken back."""

    def _take_back_from(self, address: str) -> None:
        pass


class AwaitsKeptCallsForEver(KeptCalls):
    """Calls that no worker announces are never lost."""

    def take_lost(self, now: float, *, is_live: bool) -> list[str]:
        return []


# ── of streams and scattered values ──────────────────────────────────────────────────────────────────────────────────


class DeliversTwice(Dispatcher):
    """An item is delivered once more after it was fetched."""

    def _item_arrived(self, item: Item, node: int) -> None:
        super()._item_arrived(item, node)
        if item.call_id in self.entries and item.parcel.path is None:
            self._do(do.DeliverItem(item.call_id, item.number, node, item.parcel))


class LosesItems(Dispatcher):
    """Some items do not reach their consumer."""

    def _item_arrived(self, item: Item, node: int) -> None:
        if item.number == 1 and (entry := self.entries.get(item.call_id)) is not None:
            entry.items += 1
        else:
            super()._item_arrived(item, node)


class MiscountsItems(Dispatcher):
    """Some items are not counted."""

    def _item_arrived(self, item: Item, node: int) -> None:
        if item.number != 1:
            super()._item_arrived(item, node)


class LeavesItems(Dispatcher):
    """Items without a consumer stay in the memory of a node."""

    def _item_arrived(self, item: Item, node: int) -> None:
        if item.call_id in self.entries:
            super()._item_arrived(item, node)


class GivesTooMuchCredit(Dispatcher):
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


class UploadsValuesTwice(Dispatcher):
    """A scattered value is uploaded to a node that has it already or will have it."""

    def _upload(self, out: Out, instance_id: str) -> None:
        files = self._functions.at(instance_id)
        files._coming = {name for name in files._coming if not name.startswith(SHARED)}
        super()._upload(out, instance_id)


class ForgetsCredit(Dispatcher):
    """Credit that was lost with a connection or a worker is not given again."""

    def _repeat_credit(self) -> None:
        pass


class WaitsForLostItems(Dispatcher):
    """Calls go on whose items may have been lost with messages."""

    def _lose_streams(self) -> None:
        pass


class RunsAgainAfterItems(Dispatcher):
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

PARTS = (FunctionsOnNodes, KeptCalls, Queue)
"""Records of the state."""
TRANSITIONS = (Calls, Shipments, Losses, Dispatcher)
BROKEN = [
    *(kind for part in (*PARTS, Dispatcher) for kind in part.__subclasses__() if kind.__doc__ and kind is not _Without),
    *(
        type(f"Without{kind.__name__}", (_Without,), {"kind": kind})
        for kind in do.Action.__value__.__args__
        if kind not in UNNOTICED
    ),
]
