"""The simulation of the dispatcher must find the fault of each broken dispatcher, and must be full of events."""

from collections import Counter

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine import state
from skyward_core.engine.dispatcher import Dispatcher
from tests.engine.broken import BROKEN, HISTORIES, PARTS, TRANSITIONS
from tests.engine.simulation import explore


def test_histories_are_full_of_events() -> None:
    """Histories without events would hold all invariants. The pool has a fixed size: no ranks are announced."""
    seen = Counter[type]()

    class Watched(Dispatcher):
        def take_actions(self) -> list[do.Action]:
            actions = super().take_actions()
            seen.update(map(type, actions))
            return actions

    assert [failure for seed in range(1000) if (failure := explore(seed, Watched))] == []
    assert [kind for kind in set(do.Action.__value__.__args__) - {do.UseRanks} if seen[kind] < 10] == []


def test_each_part_of_the_dispatcher_has_a_broken_version() -> None:
    assert {broken.__base__ for broken in BROKEN}.issuperset({*PARTS, Dispatcher})
    assert {type(part) for part in vars(Dispatcher((), "skyward-topic")).values()}.issuperset(PARTS)
    changed = {name for broken in BROKEN for name in vars(broken)}
    assert [kind for kind in TRANSITIONS if not {name for name in vars(kind) if name[:2] != "__"} & changed] == []


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_it_finds(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many histories as the gate runs."""
    is_part = not issubclass(broken, Dispatcher)
    if is_part:
        monkeypatch.setattr(state, broken.__base__.__name__, broken)
    assert any(explore(seed, Dispatcher if is_part else broken) for seed in range(HISTORIES))
