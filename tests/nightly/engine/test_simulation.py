"""The simulation of the dispatcher: histories that must hold all invariants, and broken dispatchers in which it must
find the fault.
"""

from collections.abc import Callable
from typing import Any

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine import dispatcher as dispatching
from skyward_core.engine.calls import CallTable
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.items import Items
from skyward_core.engine.losses import Losses
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.wire import Parcel
from tests.engine.simulation import explore
from tests.system.engine.test_simulation import (
    BROKEN,
    HISTORIES,
)


def test_histories_are_full_of_events() -> None:
    """Each kind of action occurs often: histories without events would hold all invariants. The simulated pool has a
    fixed size, so that no ranks are announced (`test_roster.py`).
    """
    seen: dict[type, int] = {}

    class Watched(Dispatcher):
        def take_actions(self) -> list[do.Action]:
            actions = super().take_actions()
            for action in actions:
                seen[type(action)] = seen.get(type(action), 0) + 1
            return actions

    assert [failure for seed in range(1000) if (failure := explore(seed, Watched))] == []
    kinds = set(do.Action.__value__.__args__) - {do.UseRanks}
    rare = {kind.__name__: seen.get(kind, 0) for kind in kinds if seen.get(kind, 0) < 10}
    assert rare == {}


class HearsOldConnections(Dispatcher):
    """An answer of an earlier connection counts as that of the present one."""

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        super().resumed(self.epoch, resumed, now)


class CountsWhatWasNotSent(Dispatcher):
    """A batch that has not gone out when the connection ends counts as lost (fault 1 of the issue)."""

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


FOUND_LATE = {
    CountsWhatWasNotSent,
    ForgetsCredit,
    ForgetsToStop,
    ForgetsToStopAfterACut,
    HearsOldConnections,
    HearsTwice,
    LosesKept,
    RunsAgainAfterItems,
    WaitsForLostItems,
}
"""Faults that only many histories find: more than 0.5 s of processor time."""


def first_found(broken: type, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Return the first seed that finds the fault."""
    is_part = not issubclass(broken, Dispatcher)
    if is_part:
        monkeypatch.setattr(dispatching, broken.__base__.__name__, broken)
    return next((seed for seed in range(HISTORIES) if explore(seed, Dispatcher if is_part else broken)), None)


@pytest.mark.parametrize(
    "broken",
    BROKEN,
    ids=lambda broken: broken.__name__,
)
def test_it_finds(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many histories as `make test` runs."""
    assert first_found(broken, monkeypatch) is not None
