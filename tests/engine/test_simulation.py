"""The simulation of the dispatcher: histories that must hold all invariants, and broken dispatchers in which it must find the fault."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.shipments import Out, Phase
from skyward_core.worker.news import Resumed
from skyward_core.worker.wire import Parcel
from tests.engine import simulation
from tests.engine.simulation import World, explore

HISTORIES = 2_000


@pytest.mark.parametrize("first", range(0, HISTORIES, 500))
def test_histories(first: int) -> None:
    """What fails is told again with `python -m tests.engine.simulation --seed N`."""
    assert [failure for seed in range(first, first + 500) if (failure := explore(seed))] == []


def test_a_history_is_told_the_same_way_twice() -> None:
    """Else a seed would be worth nothing."""
    for seed in range(20):
        lines: tuple[list[str], list[str]] = ([], [])
        for told in lines:
            World(seed, trace=told.append).run()
        assert [_without_addresses(line) for line in lines[0]] == [_without_addresses(line) for line in lines[1]]


def _without_addresses(line: str) -> str:
    return line.partition(" object at 0x")[0]


def test_histories_are_full_of_events() -> None:
    """Each kind of action and each way to end occurs often: histories in which nothing happens hold all invariants."""
    seen: dict[type, int] = {}

    class Watched(Dispatcher):
        def _do(self, action: do.Action) -> None:
            seen[type(action)] = seen.get(type(action), 0) + 1
            super()._do(action)

    assert [failure for seed in range(1000) if (failure := explore(seed, Watched))] == []
    rare = {kind.__name__: seen.get(kind, 0) for kind in do.Action.__value__.__args__ if seen.get(kind, 0) < 10}
    assert rare == {}


# ── broken dispatchers ───────────────────────────────────────────────────────────────────────────────────────────────


class QueuesWhileDraining(Dispatcher):
    """What comes back waits again, although the pool begins no calls."""

    def _refuse(self, call_ids: Sequence[str]) -> None:
        pass


class LosesWhatHasEnded(Dispatcher):
    """A batch whose task has ended is lost, without a look at whether its calls have ended, or at its result."""

    def task_ended(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None:
        out = self._at(epoch, number, Phase.SENT)
        if out is not None:
            self._do(do.Release(epoch, (self.key(number),)))
            self._lose([call.call_id for call in out.shipment.batch.calls if call.call_id in self.entries], reason)
            self._forget(out)


class HearsOldConnections(Dispatcher):
    """An answer of an earlier connection counts as that of the present one."""

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        super().resumed(self.epoch, resumed, now)


class MiscountsLosses(Dispatcher):
    """A call may run once more than was asked for."""

    def _may_run_again(self, entry: Any) -> bool:
        return super()._may_run_again(entry) or (entry.losses == self._retries + 1 and self._drained is None and self._ended is None)


class CountsWhatWasNotSent(Dispatcher):
    """A batch that has not gone out when the connection ends counts as lost (fault 1 of the issue)."""

    def disconnected(self) -> None:
        for out in [out for out in self.outs.values() if not out.is_out]:
            self._lose(self._forget(out), "the head of the pool was lost")
        super().disconnected()


class ForgetsToStop(Dispatcher):
    """Calls that are cancelled run on."""

    def _stop_cancelled(self) -> None:
        self._to_stop.clear()


class ForgetsToStopAfterACut(Dispatcher):
    """What was cancelled on a connection that is cut is not stopped on the next one."""

    def cut(self, epoch: int) -> None:
        super().cut(epoch)
        self._to_stop.clear()

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        before = set(self._to_stop)
        super().resumed(epoch, resumed, now)
        self._to_stop &= before


class LeavesArguments(Dispatcher):
    """Arguments stay in the memory of a node."""

    def _clear_aside(self, entry: Any) -> None:
        entry.aside = None


class LeavesOutcomes(Dispatcher):
    """Outcomes that are not wanted any more stay in the memory of a node."""

    def _discard(self, parcel: Parcel) -> None:
        pass


class LeavesFunctions(Dispatcher):
    """Functions are never evicted (fault 10 of the issue)."""

    def _evict(self, instance_id: str) -> None:
        pass


class EvictsWhatIsUsed(Dispatcher):
    """A function is removed although a batch that is out refers to it."""

    def _evict(self, instance_id: str) -> None:
        for file in self._files_at(instance_id)._files.values():
            file.users.clear()
        super()._evict(instance_id)


class KeepsUploads(Dispatcher):
    """A batch that is being uploaded when the pool drains goes out nevertheless."""

    def drain(self, error: Any) -> None:
        self._drained = error
        if error is not None:
            self._fail_all(self._queue.withdraw(), error)


class LosesUnheardAtOnce(Dispatcher):
    """What the scheduler does not have any more is lost before all is heard that was reported of it."""

    def _lose_unheard(self) -> None:
        self._unheard_until = 0
        super()._lose_unheard()


class TakesReturnedForLost(Dispatcher):
    """Calls that were handed back, and not begun, count as lost."""

    def _take_back(self, call_ids: Sequence[str]) -> None:
        self._lose(call_ids, "it was handed back")


class ForgetsFetches(Dispatcher):
    """An outcome whose wire was cut is not asked for again."""

    def tick(self, now: float, is_reachable: Callable[[str], bool]) -> None:
        super().tick(now, lambda _: False)


class FinishesBeforeLines(Dispatcher):
    """The outcomes of a report come before its lines."""

    def report(self, epoch: int, report: Any, now: float) -> None:
        news = sorted(report.news, key=lambda item: hasattr(item, "lines")) if report is not None else ()
        super().report(epoch, report and report._replace(news=tuple(news)), now)


class HearsTwice(Dispatcher):
    """What a worker tells again, to the scheduler that has come in the place of a lost one, counts as new."""

    def _is_retold(self, report: Any) -> bool:
        super()._is_retold(report)
        return False


class LosesKept(Dispatcher):
    """What workers keep through a change of head is lost."""

    def restarted(self, nodes: Any, is_there: Callable[[Parcel], bool], now: float) -> None:
        super().restarted(nodes, is_there, now)
        self._kept.awaited.clear()
        self._lose_unkept(now)


class DeafWhileAsking(Dispatcher):
    """A connection that is cut before the scheduler has answered is not noticed."""

    def cut(self, epoch: int) -> None:
        if self.is_live:
            super().cut(epoch)


class MiscountsProgress(Dispatcher):
    """Calls that fail are not counted."""

    def _fail_all(self, call_ids: Iterable[str], error: Any) -> None:
        done = self._done
        super()._fail_all(call_ids, error)
        self._done = done


class UploadsTwice(Dispatcher):
    """A function that is on its way to a node is put there once more, and the first one forgotten."""

    def uploaded(self, number: int, instance_id: str, arguments: Mapping[str, Parcel], functions: Mapping[str, Parcel | None]) -> None:
        for name in functions:
            self._files_at(instance_id)._files.pop(name, None)
        super().uploaded(number, instance_id, arguments, functions)

    def _upload(self, out: Out, instance_id: str) -> None:
        self._files_at(instance_id)._coming.clear()
        super()._upload(out, instance_id)


class ForgetsFailedUploads(Dispatcher):
    """A function that did not arrive counts as on its way for ever."""

    def upload_failed(self, number: int, instance_id: str, functions: Collection[str], error: Exception, *, is_its_fault: bool) -> None:
        super().upload_failed(number, instance_id, (), error, is_its_fault=is_its_fault)


BROKEN = [kind for kind in Dispatcher.__subclasses__() if kind.__module__ == __name__ and kind.__doc__ and kind.__name__ != "Watched"]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_it_finds(broken: type[Dispatcher]) -> None:
    """Within as many histories as the quick part goes through."""
    assert next((seed for seed in range(HISTORIES) if explore(seed, broken)), None) is not None


def test_the_command_tells_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the seed, and a code for `make`."""
    monkeypatch.setattr(simulation, "explore", lambda seed: f"seed {seed}: Violation: it broke" if seed == 7 else None)
    monkeypatch.setattr(simulation, "multiprocessing", None)
    assert simulation.main(["--histories", "10", "--processes", "1"]) == 1
    assert "seed 7: Violation: it broke" in capsys.readouterr().out
