"""`skyward ledger prune` deletes the details of old pools and keeps their costs, on both databases."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from skyward_core import cli
from skyward_core.errors import LeaseLost, LedgerConflict, LedgerError
from skyward_core.ledger import migrations
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import (
    Account,
    Attempt,
    Bucket,
    CostBy,
    Period,
    Price,
    Pruned,
    ResourceKind,
    ResourceRequest,
    SealedLease,
)
from skyward_core.providers.base import LAUNCH_TAG, OWNER_TAG, RANK_TAG, TYPE_TAG
from tests.ledger.fixtures import LATER, NOON, Clock, open_pool, run_on
from tests.ledger.next_release import ADDED

ROOT = Path(__file__).parents[3]
SPEC = json.dumps({"nodes": 2, "env": {"TEXT": "x" * 2000}})
TAGS = {LAUNCH_TAG: "l", RANK_TAG: "0", TYPE_TAG: "t4.large", OWNER_TAG: "ada@laptop", "much": "x" * 500}


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    """Old pools that ended, that ended and left a machine, and that lives; and one that ended today."""
    with Ledger(url, clock=clock, busy_timeout_seconds=10) as opened:
        opened.set_account(Account("team", Decimal(500), Period.MONTH))
        clock.time = NOON - timedelta(days=100)
        for pool_id in ("old", "left", "lives"):
            use(opened, pool_id, closes=pool_id == "old")
        for pool_id in ("old", "left"):
            opened.end_pool(pool_id)
        clock.time = NOON
        use(opened, "new", closes=True)
        opened.end_pool("new")
        yield opened


def use(ledger: Ledger, pool_id: str, *, closes: bool) -> None:
    open_pool(ledger, pool_id, spec_json=SPEC, account="team")
    price = Price(Decimal("1.5"), Decimal(4))
    request = ResourceRequest(ResourceKind.INSTANCE, "local", "here", f"{pool_id}-0", pool_id, TAGS, LATER, price)
    (intent,) = ledger.intend_all(pool_id, [request])
    ledger.bind(intent, f"i-{pool_id}")
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60.0, Bucket.RUNNING_CALLS: 3600.5}})
    rest: dict[str, Any] = {"is_spot": False, "seconds": 1.0, "message": "x" * 300}
    ledger.note_attempts([Attempt(pool_id, ledger._database.clock(), "local", "here", "t4.large", **rest)] * 3)
    ledger.settle(ledger.reserve("team", pool_id, Decimal(5)), Decimal("1.6"))
    if closes:
        ledger.close_all([intent.id], "it is not listed")


def money(ledger: Ledger, clock: Clock) -> object:
    """Bills, receipts and budgets, of this month and of the month of the old pools."""
    bills = {by: ledger.cost_rows(by) for by in CostBy}
    receipts = [receipt(ledger, pool_id) for pool_id in ("old", "left", "lives", "new")]
    left = [ledger.left_usd("team", "any")]
    now, clock.time = clock.time, NOON - timedelta(days=100)
    left.append(ledger.left_usd("team", "any"))
    clock.time = now
    return bills, receipts, left, ledger.pool_rows(include_ended=True)[-1].cost_usd


def test_prune_deletes_details_and_keeps_money(ledger: Ledger, clock: Clock) -> None:
    before, since = money(ledger, clock), NOON - timedelta(days=90)
    assert ledger.prune(since) == Pruned(1, 3, 1)
    assert len(ledger.attempts()) == 12
    assert ledger.prune(since, is_dry_run=False) == Pruned(1, 3, 1)
    ledger.vacuum()
    assert money(ledger, clock) == before
    assert {attempt.pool_id for attempt in ledger.attempts()} == {"left", "lives", "new"}
    (intent,) = ledger.intents(pool_id="old")
    assert dict(intent.tags) == {LAUNCH_TAG: "l", RANK_TAG: "0", TYPE_TAG: "t4.large"}
    assert ledger.prune(since, is_dry_run=False) == Pruned(0, 0, 0)
    ledger.settle_pool("old", Decimal("1.6"))  # as a late sweep does
    assert money(ledger, clock) == before
    ledger.reserve("team", "lives", Decimal(400))


def test_the_command_is_a_dry_run_by_default(
    ledger: Ledger, clock: Clock, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    days = "1d"
    made_smaller = list[str]()
    really = Ledger.vacuum
    monkeypatch.setattr(Ledger, "vacuum", lambda self: (made_smaller.append(str(self.url)), really(self))[1])
    ledger.prune(NOON - timedelta(days=3650))
    assert cli.main(["ledger", "prune", "--older-than", days]) == cli.TO_DO
    printed = capsys.readouterr().out
    assert re.match(
        r"to be taken away: details of \d pools, \d tries to rent machines, \d settled reservations, \d detached calls\nnothing was touched; --yes does it\n",
        printed,
    )
    assert made_smaller == []
    assert cli.main(["ledger", "prune", "--older-than", days, "--yes", "--json"]) == 0
    assert len(made_smaller) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["is_dry_run"], printed["attempts"], printed["reservations"]) == (
        False,
        3 * printed["pools"],
        printed["pools"],
    )
    assert cli.main(["ledger", "prune", "--older-than", days]) == 0
    assert "has details left" in capsys.readouterr().out
    assert cli.main(["why", "old"]) == 0
    assert "`skyward ledger prune` deleted them" in capsys.readouterr().out
    for wrong in ("90", "0d", "-1d", "nand", "1e9d", "99999999d", "²d"):
        with pytest.raises(SystemExit):
            cli.main(["ledger", "prune", f"--older-than={wrong}"])
        capsys.readouterr()


def test_a_minimal_role_is_enough(
    postgresql_server: str, postgresql_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/ledger.md").read_text()
    (grants,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    with Ledger(postgresql_url):
        pass
    engine = create_engine(postgresql_url)
    try:
        with engine.begin() as connection:
            connection.execute(text(grants.replace("'...'", "'secret'")))
        theirs = postgresql_url.replace("//ada@", "//skyward_user@")
        with Ledger(theirs, clock=clock) as ledger:
            ledger.set_account(Account("team", Decimal(500), Period.MONTH))
            use(ledger, "p", closes=True)
            ledger.condemn("p", seen=LATER)
            ledger.end_pool("p")
            assert ledger.prune(NOON + timedelta(days=1), is_dry_run=False).pools == 1
            ledger.vacuum()
        other = create_engine(theirs)
        for statement in (
            "CREATE TABLE mine (a int)",
            "DROP TABLE skyward_pools",
            "DELETE FROM skyward_resources",
            "ALTER TABLE skyward_meta ADD b int",
        ):
            with pytest.raises(Exception, match=r"permission denied|must be owner"), other.begin() as connection:
                connection.execute(text(statement))
        other.dispose()
        monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))  # only the owner may migrate
        with pytest.raises(LedgerError, match=r"SQLSTATE 42501\).*the owner of the database"):
            Ledger(theirs, may_migrate=True)
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP OWNED BY skyward_user; DROP ROLE skyward_user"))
        engine.dispose()


def test_a_newer_lease_replaces_the_one_before_and_is_deleted_with_its_pool(ledger: Ledger, clock: Clock) -> None:
    """Not when the pool is condemned, for its machines may still be there. None is written for such a pool."""
    for pool_id in ("p", "q"):
        open_pool(ledger, pool_id)
        assert ledger.sealed_lease(pool_id) is None
        ledger.seal_lease(pool_id, "first lease", "first keys")
    clock.go(60)
    ledger.seal_lease("p", "second lease", "second keys")
    found = ledger.sealed_lease("p")
    assert found == SealedLease("p", "second lease", "second keys", NOON + timedelta(minutes=1))
    assert repr(found) == "SealedLease('p', updated_at=2026-11-21T12:01:00Z)"
    ledger.condemn("p", seen=LATER)
    with pytest.raises(LeaseLost, match="judged dead"):
        ledger.seal_lease("p", "newer lease", "keys")
    assert ledger.sealed_lease("p") == found
    ledger.end_pool("p")
    assert ledger.sealed_lease("p") is None
    with pytest.raises(LeaseLost, match="has ended"):
        ledger.seal_lease("p", "newer lease", "keys")
    with pytest.raises(LedgerConflict, match="no pool"):
        ledger.seal_lease("unknown", "lease", "keys")
    assert ledger.sealed_lease("q") == SealedLease("q", "first lease", "first keys", NOON)


def test_a_sealed_lease_that_is_no_text_is_an_error_of_the_ledger(file_ledger: Ledger, sqlite_url: str) -> None:
    """SQLite stores any value in any column."""
    file_ledger.seal_lease("p", "lease", "keys")
    run_on(sqlite_url, "UPDATE skyward_sealed_leases SET sealed = x'00ff'")
    with pytest.raises(LedgerError, match="skyward_sealed_leases"):
        file_ledger.sealed_lease("p")
