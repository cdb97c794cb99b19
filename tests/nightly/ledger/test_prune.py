"""`skyward ledger prune` deletes the details of old pools and keeps their costs, on both databases."""

from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import Account, CostBy, Period, Pruned
from skyward_core.providers.base import LAUNCH_TAG, RANK_TAG, TYPE_TAG
from tests.system.ledger.test_prune import ledger, use  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    LATER,
    NOON,
    OWNER,
    PROVIDER,
    Clock,
    clock,
    postgresql_server,
    postgresql_url,
    run_on,
    sqlite_url,
    url,
)


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


def test_a_pruned_file_becomes_smaller(sqlite_url: str, clock: Clock) -> None:
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    with Ledger(sqlite_url, clock=clock) as ledger:
        ledger.set_account(Account("team", Decimal(5000), Period.MONTH))
        for number in range(100):
            use(ledger, f"p{number}", closes=True)
            ledger.end_pool(f"p{number}")
        ledger.vacuum()
        before = file.stat().st_size
        ledger.prune(clock.time + timedelta(days=1), is_dry_run=False)
        ledger.vacuum()
        assert file.stat().st_size < 0.4 * before
