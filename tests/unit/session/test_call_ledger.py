"""What clients write of detached calls: new states only, and never at the cost of a call."""

import logging
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from skyward_core.errors import PoolStopped
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import SlotUse
from skyward_core.machines.owner import Owner
from skyward_core.session import detached_call
from skyward_core.session.detached_call import CallLedger, state_of
from skyward_core.wire.messages import OutcomeKind
from skyward_core.work import NO_WORK


def record(state: str, *attempts: tuple[float, float | None], **fields: Any) -> dict[str, Any]:
    its = [(f"{node}-0", f"i-{node}", began, ended, "") for node, (began, ended) in enumerate(attempts)]
    known = {
        "call_id": "c",
        "name": "train",
        "owner": "dag/run",
        "state": state,
        "outcome": "",
        "seconds": None,
        "work": {},
    }
    return {**known, "submitted_at": 1000.0, "ended_at": None, "attempts": its, **fields}


def used(known: dict[str, Any]) -> list[float]:
    return [use.seconds for use in state_of(known, lambda _: 2, 1100.0).used]


def test_a_call_had_its_slot_as_long_as_its_outcome_says() -> None:
    """Lost and running attempts count from when a node got the call; one that waits in a node has no slot."""
    ended = record("ended", (1001.0, 1010.0), (1020.0, 1060.0), seconds=30.0, ended_at=1060.0, outcome="result")
    assert used(ended) == [9.0, 30.0]
    assert used(record("running", (1001.0, 1010.0), (1020.0, None))) == [9.0, 80.0]
    assert used(record("waiting", (1001.0, None))) == [0.0]
    assert used(record("lost", (1001.0, 1010.0), ended_at=1010.0)) == [9.0]
    found = state_of(ended, {0: 2, 1: 4}.__getitem__, 1100.0)
    assert found.used == (SlotUse("i-0", 2, 9.0), SlotUse("i-1", 4, 30.0))
    assert found.ended_at == datetime.fromtimestamp(1060, UTC)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (OutcomeKind.RESULT, "ended"),
        ("", "ended"),
        (OutcomeKind.CANCELLED, "cancelled"),
        (OutcomeKind.CRASH, "failed"),
        (OutcomeKind.TIMED_OUT, "failed"),
    ],
)
def test_failed_and_cancelled_calls_are_told_apart(outcome: str, state: str) -> None:
    assert state_of(record("ended", (1.0, 2.0), outcome=str(outcome)), lambda _: 1, 3.0).state == state


def test_a_ledger_that_is_away_is_logged_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised. A ledger that does not know the pool is that of another machine, and gets nothing."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/a file/ledger.db")
    monkeypatch.setattr(detached_call, "PAUSE_SECONDS", 0.0)
    (tmp_path / "a file").touch()
    logged = list[int]()
    calls = CallLedger("p", lambda _: 1, lambda level, *_: logged.append(level))
    calls.starts("c", "train", "dag/run", NO_WORK)
    calls.note(record("running", (1001.0, None)))
    assert logged == [logging.WARNING, logging.DEBUG]
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    elsewhere = CallLedger("elsewhere", lambda _: 1, lambda level, *_: logged.append(level))
    with Ledger(url) as ledger:
        expires_at = datetime.now(UTC) + timedelta(hours=1)
        ledger.open_pool("p", owner=Owner.here(), provider={}, spec_json="{}", lease_expires_at=expires_at)
        for _ in range(2):
            elsewhere.note(record("ended", (1001.0, 1002.0)))
            calls.note(record("running", (1001.0, None)))
        (call,) = ledger.calls()
        assert (call.state, call.owner, call.generation, call.cost_usd) == ("running", "dag/run", 1, Decimal(0))
    calls.close()
    elsewhere.close()
    assert len(logged) == 2


def test_only_the_ledger_says_that_a_pool_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is away says nothing, and neither does that of another machine."""
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/a file/ledger.db")
    (tmp_path / "a file").touch()
    calls = CallLedger("p", lambda _: 1, lambda *_: None)
    calls.raise_if_stopped()
    url = f"sqlite:///{tmp_path}/ledger.db"
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    calls.raise_if_stopped()
    with Ledger(url) as ledger:
        expires_at = datetime.now(UTC) + timedelta(hours=1)
        ledger.open_pool("p", owner=Owner.here(), provider={}, spec_json="{}", lease_expires_at=expires_at)
        calls.raise_if_stopped()
        (pool,) = ledger.pools()
        assert ledger.condemn("p", seen=pool.written_lease, stopped_by="ada@lab")
    with pytest.raises(PoolStopped, match="was stopped by ada@lab"):
        calls.raise_if_stopped()
    calls.close()
