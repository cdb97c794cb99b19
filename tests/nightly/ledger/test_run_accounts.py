"""A limit for all pools of a run: in every order of reservations they never exceed it, on both databases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from skyward_core.errors import BadRequest, BudgetExceeded
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period
from skyward_core.work import Work
from tests.system.ledger.test_run_accounts import FLOW, USD, ledger, left, open_pool  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import LATER, OWNER, Clock, clock, postgresql_server, postgresql_url, sqlite_url, url  # noqa: F401 - fixtures


def test_pools_of_one_run_share_its_limit(ledger: Ledger) -> None:
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
    ledger.set_account(Account("team", USD(100), Period.DAY))

    def spend(number: int) -> int:
        name, account = f"p{number}", "team" if number % 2 else None
        open_pool(ledger, name, account=account)
        got = 0
        try:
            ledger.reserve(account, name, USD("0.1"))
            while got := got + 1:
                ledger.roll(account, name, USD("0.1"), USD("0.1"))
        except BudgetExceeded:
            ledger.settle_pool(name, got * USD("0.1"))
        return got

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(spend, range(6))) == 50
    assert left(ledger) == 0
