"""A limit for all pools of a run: in every order of reservations they never exceed it, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from decimal import Decimal

import pytest

from skyward_core.cleanup.pool_record import end_entries
from skyward_core.errors import BadRequest, BudgetExceeded, LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.pools import account_of_run
from skyward_core.ledger.rows import Account, Period, PoolEntry
from skyward_core.work import Work
from tests.ledger import fixtures
from tests.ledger.fixtures import USD, Clock

FLOW = Work(system="prefect", workflow="sweep", run="run-1")


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    with Ledger(url, clock=clock, busy_timeout_seconds=10) as opened:
        yield opened


def open_pool(
    ledger: Ledger, pool_id: str, limit: str | None = "5", work: Work = FLOW, account: str | None = None
) -> PoolEntry:
    run_limit = None if limit is None else USD(limit)
    return fixtures.open_pool(ledger, pool_id, account=account, work=work, run_limit_usd=run_limit)


def left(ledger: Ledger, work: Work = FLOW) -> Decimal:
    return ledger.left_usd(account_of_run(work), "")


def test_pools_of_one_run_share_its_limit(ledger: Ledger) -> None:
    """Two pools at once, and a third one after the first has ended: what it has spent is gone, the rest is free again.

    A run of another workflow with the same id has another limit, and a pool without a limit draws on nothing.
    """
    for name in ("a", "b"):
        open_pool(ledger, name, work=Work(**FLOW.labels(), task=name))
    open_pool(ledger, "other", work=Work(system="prefect", workflow="train", run="run-1"))
    made = ledger.reserve(None, "a", USD(3))
    assert (made.pool_id, made.reserved_usd) == ("a", USD(3))
    with pytest.raises(BudgetExceeded, match=r"max_cost=5 .* 2 USD are left") as refused:
        ledger.reserve(None, "b", USD("2.5"))
    assert (refused.value.account, refused.value.left_usd) == ("", USD(2))
    ledger.reserve(None, "b", USD(2))
    ledger.reserve(None, "other", USD(5))
    ledger.roll(None, "a", USD(1), USD(2))
    with pytest.raises(BudgetExceeded):
        ledger.roll(None, "b", USD(1), USD("1.1"))
    assert left(ledger) == 0, "nothing has changed"
    for _ in range(2):
        ledger.settle_pool("a", USD("1.5"))
    ledger.end_pool("a")
    assert left(ledger) == USD("1.5")
    open_pool(ledger, "c")  # a later attempt of the run
    with pytest.raises(BudgetExceeded):
        ledger.reserve(None, "c", USD("1.6"))
    ledger.reserve(None, "c", USD("1.5"))
    open_pool(ledger, "free", limit=None)
    with pytest.raises(BadRequest, match="draws on no account"):
        ledger.reserve(None, "free", USD(1))


def test_many_pools_may_open_and_reserve_at_once(ledger: Ledger) -> None:
    """Together they get the limit, and no more."""
    ledger.set_account(Account("team", USD(100), Period.DAY))

    def spend(number: int) -> int:
        name, account = f"p{number}", "team" if number % 2 else None
        open_pool(ledger, name, account=account)
        got = 0
        try:
            ledger.reserve(account, name, USD("0.1"))
            while got := got + 1:
                ledger.roll(account, name, got * USD("0.1"), USD("0.1"))
        except BudgetExceeded:
            ledger.settle_pool(name, got * USD("0.1"))
        return got

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(spend, range(6))) == 50
    assert left(ledger) == 0


def test_a_pool_draws_on_its_budget_and_on_its_run(ledger: Ledger) -> None:
    """Both or neither; each of them pays all that the pool has cost."""
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
    """Also if the pool has no budget. The newest limit of a run counts."""
    open_pool(ledger, "a", limit="1")
    entry = open_pool(ledger, "b", limit="4")
    ledger.reserve(None, "b", USD(4))
    end_entries(ledger, [entry])
    assert left(ledger) == USD(4)
    assert ledger.open_reservations() == []


def test_accounts_of_runs_are_no_users_accounts(ledger: Ledger) -> None:
    """They are in no list, and cannot be set by their names. A limit needs a run."""
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


def test_a_day_and_a_run_settle_apart_over_midnight(ledger: Ledger, clock: Clock) -> None:
    """The account of a day has two scopes then, that of the run one."""
    ledger.set_account(Account("team", USD(2), Period.DAY))
    open_pool(ledger, "a", account="team")
    ledger.reserve("team", "a", USD(2))
    clock.time = datetime(2026, 11, 22, 1, tzinfo=clock.time.tzinfo)
    ledger.reserve("team", "a", USD(2))
    ledger.settle_pool("a", USD(3))
    assert (ledger.left_usd("team", "a"), left(ledger)) == (USD(1), USD(2))
