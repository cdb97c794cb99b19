"""`skyward calls`: what detached calls have cost, after everything is gone."""

import json
from datetime import timedelta

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import CallState, SlotUse
from tests.unit.cli.test_commands import (  # noqa: F401 - fixtures
    HERE,
    Clock,
    FolderProvider,
    Skyward,
    clock,
    folder,
    ledger,
    open_pool,
    skyward,
    url,
)


def test_the_table_has_states_costs_and_their_sum(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """A call whose end no process has seen says when its pool has ended. Filters narrow the list and the sum."""
    assert "no such detached calls" in skyward("calls")
    open_pool(ledger, clock, folder, "sky-1", owner=HERE)
    (machine,) = folder.instances()
    price = float(ledger.intents(pool_id="sky-1")[0].price.per_hour)
    hour = SlotUse(machine.id, 1, 3600.0)
    started = clock.now - timedelta(days=2)
    ledger.note_calls("sky-1", [CallState("a", "train", "dag/run", 2, "ended", clock.now, clock.now, (hour, hour))])
    ledger.note_calls("sky-1", [CallState("b", "score", "other", 1, "running", started, used=(hour,))])
    skyward("stop sky-1")
    oldest, newest, total = (line.split() for line in skyward("calls").splitlines()[1:])
    assert [oldest[0], newest[0], total[:2]] == ["b", "a", ["2", "calls"]]
    assert "unknown end (pool ended " in skyward("calls --owner other")
    assert [float(line[-1]) for line in (oldest, newest, total)] == [price, 2 * price, 3 * price]
    found = json.loads(skyward("calls --json --owner dag"))
    assert ([call["call"] for call in found["calls"]], found["cost_usd"]) == (["a"], 2 * price)
    assert json.loads(skyward("calls --json --pool sky-2")) == {"calls": [], "cost_usd": 0.0}
    since = (clock.now - timedelta(days=1)).date()
    assert [call["call"] for call in json.loads(skyward(f"calls --json --since {since}"))["calls"]] == ["a"]
    assert len(skyward("calls --limit 1").splitlines()) == 3
