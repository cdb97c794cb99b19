"""Bills: damaged rows, lists of pools with a limit, shares of a cost, and what a prune leaves."""

from datetime import timedelta
from decimal import Decimal

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Bucket, CostBy, Price, Pruned, UnreadableRow
from skyward_core.work import Work
from tests.unit.ledger.test_ledger import LATER, NOON, Clock, clock, file_ledger, intend, open_pool, run_on, sqlite_url  # noqa: F401 - fixtures

USD = Decimal
HOURLY = Price(USD(3600), USD(7200))  # a dollar a second


def spend(ledger: Ledger, pool_id: str, token: str, seconds: float = 1) -> int:
    """Record a machine that has cost a dollar for each second."""
    number = ledger.bind(intend(ledger, token, pool_id, HOURLY), f"i-{token}").id
    ledger.note_all({number: {Bucket.IDLE: seconds}})
    return number


def test_a_row_without_numbers_is_left_out_of_its_own_bill_only(file_ledger: Ledger, sqlite_url: str) -> None:
    """It is named in the bills that would have it, with its pool. All other rows are billed."""
    open_pool(file_ledger, "q")
    spend(file_ledger, "p", "a", 2)
    damaged = spend(file_ledger, "q", "b", 3)
    run_on(sqlite_url, f"UPDATE skyward_resources SET price_micro_usd_per_hour = '3600000000 USD' WHERE id = {damaged}")
    for by in (CostBy.POOL, CostBy.RESOURCE, CostBy.BUCKET, CostBy.TASK):
        unreadable: list[UnreadableRow] = []
        assert sum(row.cost_usd for row in file_ledger.cost_rows(by, unreadable=unreadable)) == 2
        (error,) = unreadable
        assert (error.pool_id, error.is_pool) == ("q", False)
        assert f"row {damaged} of skyward_resources in the ledger cannot be read (pool 'q')" in str(error)
    unreadable = []
    assert [row.key for row in file_ledger.cost_rows(pool_id="p", unreadable=unreadable)] == ["p"]
    assert unreadable == []


def test_a_list_of_pools_survives_a_damaged_sum(file_ledger: Ledger, sqlite_url: str) -> None:
    damaged = spend(file_ledger, "p", "a")
    run_on(sqlite_url, f"UPDATE skyward_resources SET idle_milliseconds = 1e999 WHERE id = {damaged}")
    (row,) = file_ledger.pool_rows()
    assert (row.open_resources, row.resources, row.seconds) == (1, 1, 0)


def test_a_day_that_no_calendar_has_is_named_by_its_number(file_ledger: Ledger, sqlite_url: str) -> None:
    spend(file_ledger, "p", "a")
    run_on(sqlite_url, f"UPDATE skyward_resources SET intended_microseconds = {5_000_000 * 86_400_000_000 + 1}")
    (row,) = file_ledger.cost_rows(CostBy.DAY)
    assert (row.key, row.cost_usd) == ("day 5000000 after 1970-01-01", 1)


def test_the_newest_pools_of_one_moment_are_chosen_by_their_ids(file_ledger: Ledger) -> None:
    for pool_id in ("a", "z"):
        open_pool(file_ledger, pool_id)
        spend(file_ledger, pool_id, pool_id)
    assert [row.entry.id for row in file_ledger.pool_rows()] == ["a", "p", "z"]
    assert [(row.entry.id, row.cost_usd) for row in file_ledger.pool_rows(limit=2)] == [("p", 0), ("z", 1)]


def test_shares_replace_earlier_shares_of_the_same_pool_only(file_ledger: Ledger) -> None:
    open_pool(file_ledger, "q")
    one, other = Work(task="one"), Work(task="other")
    file_ledger.set_shares("q", {one: USD(5)})
    file_ledger.set_shares("p", {one: USD(1)})
    file_ledger.set_shares("p", {other: USD("0.0000016"), one: USD(0)})
    assert list(file_ledger.shares("p").items()) == [(other, USD("0.000002")), (one, USD(0))]
    file_ledger.set_shares("p", {})
    assert (file_ledger.shares("p"), file_ledger.shares("q")) == ({}, {one: USD(5)})


def test_a_bill_has_the_intents_of_its_time_only(file_ledger: Ledger, clock: Clock) -> None:
    for minutes in range(3):
        clock.time = NOON + timedelta(minutes=minutes)
        spend(file_ledger, "p", f"t{minutes}", 10**minutes)
    minute = timedelta(minutes=1)
    (row,) = file_ledger.cost_rows(since=NOON + minute, until=NOON + 2 * minute)
    assert (row.resources, row.seconds, row.cost_usd, row.on_demand_usd, row.saved_usd) == (1, 10, 10, 20, 10)


def test_a_pool_that_ended_at_the_given_time_is_not_pruned(file_ledger: Ledger, sqlite_url: str, clock: Clock) -> None:
    number = spend(file_ledger, "p", "a")
    file_ledger.close_all([number], "404")
    file_ledger.end_pool("p")
    run_on(sqlite_url, "UPDATE skyward_resources SET tags_json = '[damaged'")
    clock.time = LATER
    assert file_ledger.prune(NOON, is_dry_run=False) == Pruned(0, 0, 0)
    assert file_ledger.prune(LATER, is_dry_run=False) == Pruned(1, 0, 0)
    unreadable: list[UnreadableRow] = []
    assert file_ledger.intents(unreadable=unreadable) == []
    assert "JSONDecodeError" in str(unreadable[0])
    assert [row.cost_usd for row in file_ledger.cost_rows()] == [1]
