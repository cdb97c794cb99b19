"""Detached calls in the ledger: who wins, what stays, and what a call has cost. On both databases."""

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from skyward_core.errors import LedgerConflict
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import CallState, Price, ResourceKind, ResourceRequest
from skyward_core.work import Work
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    LATER,
    NOON,
    OWNER,
    PROVIDER,
    Clock,
    clock,
    postgresql_server,
    postgresql_url,
    sqlite_url,
    url,
)

MINUTE = timedelta(minutes=1)


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    """A ledger with one pool, `p`, and one machine, `i-1`, for 3.60 USD an hour."""
    with Ledger(url, clock=clock, busy_timeout_seconds=10) as opened:
        work = Work(system="cron", workflow="nightly", task="train")
        opened.open_pool("p", owner=OWNER, provider=PROVIDER, spec_json="{}", lease_expires_at=LATER, work=work)
        request = ResourceRequest(ResourceKind.INSTANCE, "x", "r", "n", "t", {}, LATER, Price(Decimal("3.6")))
        opened.bind(opened.intend("p", request), "i-1")
        yield opened


def state(name: str, generation: int = 1, **fields: Any) -> CallState:
    values: dict[str, Any] = {"call_id": "c", "name": "train", "owner": "", "started_at": NOON, **fields}
    return CallState(generation=generation, state=name, **values)


def test_later_attempts_and_states_win_and_an_end_stays(ledger: Ledger) -> None:
    steps = [
        (state("waiting", 0, owner="dag/run"), "waiting", 0),
        (state("running", 1), "running", 1),
        (state("waiting", 1), "running", 1),
        (state("waiting", 2), "waiting", 2),
        (state("running", 1), "waiting", 2),
        (state("failed", 2, ended_at=NOON + MINUTE), "failed", 2),
        (state("running", 3), "failed", 2),
        (state("ended", 2, ended_at=NOON), "failed", 2),
    ]
    for written, name, generation in steps:
        ledger.note_calls("p", [written, written])
        (call,) = ledger.calls()
        assert (call.state, call.generation, call.owner) == (name, generation, "dag/run")
    assert call.ended_at == NOON + MINUTE


def test_calls_are_found_by_pool_owner_and_time(ledger: Ledger) -> None:
    ledger.open_pool("q", owner=OWNER, provider=PROVIDER, spec_json="{}", lease_expires_at=LATER)
    ledger.note_calls("p", [state("running", owner="a%b"), state("ended", call_id="d", owner="axb", ended_at=NOON)])
    ledger.note_calls("q", [state("running", started_at=NOON + MINUTE)])
    assert [(call.pool_id, call.call_id) for call in ledger.calls()] == [("p", "c"), ("p", "d"), ("q", "c")]
    assert [call.call_id for call in ledger.calls(owner="%")] == ["c"]
    assert [call.pool_id for call in ledger.calls(since=NOON + MINUTE)] == ["q"]
    assert [call.has_unknown_end for call in ledger.calls()] == [False] * 3
    ledger.end_pool("p")
    assert [call.has_unknown_end for call in ledger.calls()] == [True, False, False]
    with pytest.raises(LedgerConflict, match="no pool 'nowhere'"):
        ledger.note_calls("nowhere", [state("running")])


def test_calls_of_old_pools_are_pruned(ledger: Ledger, clock: Clock) -> None:
    ledger.note_calls("p", [state("running"), state("running", call_id="d")])
    ledger.close_all([1], "gone")
    ledger.end_pool("p")
    clock.time = NOON + timedelta(days=9)
    for is_dry_run in (True, False):
        assert len(ledger.calls()) == 2
        assert ledger.prune(NOON + timedelta(days=1), is_dry_run=is_dry_run).calls == 2
    assert ledger.calls() == []
