"""A limit for all pools of a run: in every order of reservations they never exceed it, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal

import pytest

from skyward_core.cleanup.pool_record import end_entries
from skyward_core.errors import BadRequest, BudgetExceeded, LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period, PoolEntry
from skyward_core.ledger.run_accounts import account_of_run
from skyward_core.work import Work
from tests.system.ledger.test_schema import VERSION_8, make_old
from tests.unit.ledger.test_ledger import LATER, OWNER, Clock, clock, postgresql_server, postgresql_url, sqlite_url, url  # noqa: F401 - fixtures

FLOW = Work(system="prefect", workflow="sweep", run="run-1")
USD = Decimal


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    with Ledger(url, clock=clock, busy_timeout_seconds=10) as opened:
        yield opened


def open_pool(
    ledger: Ledger, pool_id: str, limit: str | None = "5", work: Work = FLOW, account: str | None = None
) -> PoolEntry:
    return ledger.open_pool(
        pool_id,
        owner=OWNER,
        provider={},
        spec_json="{}",
        lease_expires_at=LATER,
        account=account,
        work=work,
        run_limit_usd=None if limit is None else USD(limit),
    )


def left(ledger: Ledger, work: Work = FLOW) -> Decimal:
    return ledger.left_usd(account_of_run(work), "")


def test_a_pool_draws_on_its_budget_and_on_its_run(ledger: Ledger) -> None:
    ledger.set_account(Account("team", USD(4), Period.MONTH))
    entry = open_pool(ledger, "a", account="team")
    assert (entry.account, entry.run_account) == ("team", account_of_run(FLOW))
    open_pool(ledger, "b", account="team")
    assert ledger.reserve("team", "a", USD(3)).account == "team"
    with pytest.raises(BudgetExceeded, match="Account 'team'"):
        ledger.reserve("team", "b", USD("1.5"))
    assert (ledger.left_usd("team", "a"), left(ledger)) == (USD(1), USD(2))
    ledger.set_account(Account("team", USD(10), Period.MONTH))
    with pytest.raises(BudgetExceeded, match="max_cost"):
        ledger.reserve("team", "b", USD("2.5"))
    assert (ledger.left_usd("team", "a"), left(ledger)) == (USD(7), USD(2))
    ledger.roll("team", "a", USD(1), USD("0.5"))
    assert (ledger.left_usd("team", "a"), left(ledger)) == (USD("8.5"), USD("3.5"))
    assert ledger.committed_usd("a") == USD("1.5")
    ledger.settle_pool("a", USD("1.2"))
    assert (ledger.left_usd("team", "a"), left(ledger)) == (USD("8.8"), USD("3.8"))
    assert ledger.settled_usd("a", "team") == USD("1.2")
    assert ledger.open_reservations() == []


def test_a_sweep_settles_what_a_dead_pool_has_reserved_from_its_run(ledger: Ledger) -> None:
    entry = open_pool(ledger, "a")
    ledger.reserve(None, "a", USD(4))
    end_entries(ledger, [entry])
    assert left(ledger) == USD(5)
    assert ledger.open_reservations() == []


def test_the_newest_limit_of_a_run_counts(ledger: Ledger) -> None:
    open_pool(ledger, "a", limit="1")
    open_pool(ledger, "b", limit="2")
    assert ledger.reserve(None, "a", USD(2)).reserved_usd == USD(2)


def test_accounts_of_runs_are_no_users_accounts(ledger: Ledger) -> None:
    open_pool(ledger, "a")
    assert ledger.accounts() == []
    with pytest.raises(LedgerError):
        ledger.set_account(Account(account_of_run(FLOW), USD(100), Period.RUN))
    assert left(ledger) == USD(5)
    with pytest.raises(BadRequest, match="needs the run"):
        open_pool(ledger, "b", work=Work(system="cron"))
    assert ledger.pool("b") is None
    long = Work(system="prefect", workflow="w" * 300, run="1"), Work(system="prefect", workflow="w" * 300, run="2")
    assert len({account_of_run(work) for work in long}) == 2
    assert max(len(account_of_run(work)) for work in long) <= 255


def test_a_ledger_of_version_8_is_migrated(ledger: Ledger) -> None:
    ledger.set_account(Account("team", USD(4), Period.MONTH))
    before = open_pool(ledger, "a", limit=None, account="team")
    ledger.reserve("team", "a", USD(1))
    with Ledger(make_old(ledger, VERSION_8)) as newer:
        assert newer.pools() == [before]
        assert newer.accounts() == [Account("team", USD(4), Period.MONTH)]
        newer.roll("team", "a", USD(1), USD(2))
        open_pool(newer, "b")
        assert newer.reserve(None, "b", USD(5)).reserved_usd == USD(5)


def test_a_day_and_a_run_settle_apart_over_midnight(ledger: Ledger, clock: Clock) -> None:
    ledger.set_account(Account("team", USD(2), Period.DAY))
    open_pool(ledger, "a", account="team")
    ledger.reserve("team", "a", USD(2))
    clock.time = datetime(2026, 11, 22, 1, tzinfo=clock.time.tzinfo)
    ledger.reserve("team", "a", USD(2))
    ledger.settle_pool("a", USD(3))
    assert (ledger.left_usd("team", "a"), left(ledger)) == (USD(1), USD(2))
