"""The simulation of the dispatcher: histories that must hold all invariants, and broken dispatchers in which it must
find the fault.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable
from skyward_core.engine.connection_state import ConnectionState
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.function_files import FunctionFiles, FunctionsOnNodes
from skyward_core.engine.items import Items
from skyward_core.engine.losses import Losses
from skyward_core.engine.placement import Placement
from skyward_core.engine.shipments import Out, Phase, Shipments
from skyward_core.worker.wire import SHARED, Item, Parcel
from tests.engine import simulation
from tests.engine.simulation import World, explore

HISTORIES = 2_000


@pytest.mark.parametrize(
    "first",
    [*range(0, 500, 100), *(first for first in range(500, HISTORIES, 100))],
)
def test_histories(first: int) -> None:
    """`python -m tests.engine.simulation --seed N` prints a failure step by step."""
    assert [failure for seed in range(first, first + 100) if (failure := explore(seed))] == []


def test_a_seed_gives_the_same_history_twice() -> None:
    """Otherwise a seed could not reproduce a failure."""
    for seed in range(20):
        lines: tuple[list[str], list[str]] = ([], [])
        for trace in lines:
            World(seed, trace=trace.append).run()
        assert [_without_addresses(line) for line in lines[0]] == [_without_addresses(line) for line in lines[1]]


def _without_addresses(line: str) -> str:
    return line.partition(" object at 0x")[0]


# ── broken dispatchers: each is one broken part, or a Dispatcher that puts its parts together wrongly ────────────────


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
    """Functions are never evicted (fault 10 of the issue)."""

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


PARTS = (CallTable, ConnectionState, FunctionsOnNodes, Items, Losses, Placement, Shipments)
BROKEN = [
    kind
    for part in (*PARTS, Dispatcher)
    for kind in part.__subclasses__()
    if kind.__module__ == __name__ and kind.__doc__
]


def test_each_part_can_be_broken() -> None:
    """Each part that the dispatcher makes has a broken version here."""
    assert {broken.__base__ for broken in BROKEN} == {*PARTS, Dispatcher}
    dispatcher = Dispatcher((), "skyward-topic")
    assert {type(part) for part in vars(dispatcher).values()}.issuperset(PARTS)


def test_the_command_prints_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the seed, and with exit code 1 for `make`."""
    monkeypatch.setattr(simulation, "explore", lambda seed: f"seed {seed}: Violation: it broke" if seed == 7 else None)
    monkeypatch.setattr(simulation, "multiprocessing", None)
    assert simulation.main(["--histories", "10", "--processes", "1"]) == 1
    assert "seed 7: Violation: it broke" in capsys.readouterr().out
