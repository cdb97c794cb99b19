"""The ledger: writes are committed, dead pools spend nothing, and no limit is overdrawn. On both databases."""

import gc
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from skyward_core.errors import BadRequest, BudgetExceeded, LeaseLost, LedgerConflict, LedgerError
from skyward_core.ledger import accounts
from skyward_core.ledger.database import Database
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.pools import account_of_run
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    Account,
    Attempt,
    Bucket,
    CallState,
    CostBy,
    Period,
    Price,
    SlotUse,
)
from skyward_core.shown_text import visible_lines
from skyward_core.work import Work
from tests.hostile_texts import HOSTILE_TEXTS, refuse_hidden
from tests.ledger.fixtures import (
    LATER,
    NOON,
    OWNER,
    PROVIDER,
    TRAIN,
    USD,
    Clock,
    bill,
    intend,
    open_pool,
    pay,
    record_shares,
    resource_request,
    run_on,
    run_script,
)


def test_an_intent_goes_from_requested_to_gone(ledger: Ledger, url: str, clock: Clock) -> None:
    """It is committed before it returns: another process sees it with all that is needed to find the machine."""
    price = Price(USD("1.5"), USD(3), is_spot=True)
    intent = intend(ledger, price=price)
    with Ledger(url) as other:
        assert other.open_intents() == [intent]
    assert intent.tags == {"skyward-pool": "p", "skyward-rank": "0"}
    assert (intent.intended_at, intent.expires_at, intent.cloud_id, intent.price) == (NOON, LATER, None, price)
    for step in (
        lambda: ledger.bind(intent, "i-1"),
        lambda: ledger.ask_end_all([intent.id]),
        lambda: ledger.close_all([intent.id], "404"),
    ):
        clock.go(60)
        step()
    clock.time = LATER
    (again,) = ledger.close_all([intent.id], "another story")
    assert ledger.bind(intent, "i-1") == ledger.ask_end_all([intent.id])[0] == again
    times = [NOON + timedelta(minutes=minutes) for minutes in (1, 2, 3)]
    assert [again.bound_at, again.end_asked_at, again.gone_at] == times
    assert (again.cloud_id, again.evidence) == ("i-1", "404")
    assert ledger.open_intents() == []
    assert ledger.intents(pool_id="p") == [again]


def test_a_known_token_returns_its_entry(ledger: Ledger) -> None:
    """The same token for another resource is refused, and another id for a bound entry."""
    intent = ledger.bind(intend(ledger), "i-1")
    assert intend(ledger) == intent
    open_pool(ledger, "q")
    with pytest.raises(LedgerConflict, match="belongs to instance 'skyward-t1' of pool 'p'"):
        intend(ledger, pool_id="q")
    for of in ("provider", "region", "name"):
        with pytest.raises(LedgerConflict, match="Use a new token"):
            ledger.intend("p", replace(resource_request(), **{of: "other"}))
    with pytest.raises(LedgerConflict, match="terminate i-2"):
        ledger.bind(intent, "i-2")
    assert ledger.intents() == [intent]


def test_a_late_answer_opens_the_intent_again(ledger: Ledger) -> None:
    """It was closed because a listing did not show it. Now it has an id, and a machine must be terminated."""
    intent = intend(ledger)
    ledger.close_all([intent.id], "not listed")
    bound = ledger.bind(intent, "i-1")
    assert (bound.cloud_id, bound.gone_at, bound.evidence) == ("i-1", None, None)
    assert ledger.open_intents() == [bound]


def test_many_intents_are_recorded_at_once_in_their_order(ledger: Ledger) -> None:
    """The ledger writes all of them, in several statements, or none. Entries with known tokens do not change."""
    known = ledger.bind(intend(ledger, "t7"), "i-7")
    intents = ledger.intend_all("p", [resource_request(f"t{number}") for number in range(1100)])
    assert [intent.token for intent in intents] == [f"t{number}" for number in range(1100)]
    assert intents[7] == known
    again = ledger.intend_all("p", [resource_request(token) for token in ("t7", "t3", "new", "new")])
    assert again == [known, intents[3], *[ledger.intents()[-1]] * 2]
    numbers = [intent.id for intent in reversed(intents)]
    bound = ledger.bind_all({number: f"i-{number}" if number != known.id else "i-7" for number in numbers})
    assert [intent.id for intent in bound] == numbers
    before = ledger.intents()
    elsewhere = [replace(resource_request(token), region="ICE-01") for token in ("t1", "twice")]
    with pytest.raises(LedgerConflict, match="Token 't1' belongs to"):
        ledger.intend_all("p", [resource_request("another"), elsewhere[0]])
    with pytest.raises(LedgerConflict, match="no entry 99999"):
        ledger.close_all([numbers[0], 99999], "404")
    with pytest.raises(LedgerConflict, match="Token 'twice' belongs to"):
        ledger.intend_all("p", [resource_request("twice"), elsewhere[1]])
    assert ledger.intents() == before
    assert {intent.end_asked_at for intent in ledger.ask_end_all(numbers)} == {NOON}
    assert {intent.evidence for intent in ledger.close_all(iter(numbers), "404")} == {"404"}
    assert [intent.token for intent in ledger.open_intents()] == ["new"]
    empty = [ledger.intend_all("p", []), ledger.bind_all({}), ledger.ask_end_all([]), ledger.close_all([], "404")]
    assert empty == [[]] * 4


def test_wrong_arguments_are_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerConflict, match="no pool 'unknown'"):
        intend(ledger, pool_id="unknown")
    with pytest.raises(LedgerConflict, match="already has a pool 'p'"):
        open_pool(ledger, "p")
    with pytest.raises(LedgerConflict, match="no pool 'x'"):
        ledger.renew("x", LATER)
    with pytest.raises(BadRequest, match="no time zone"):
        ledger.renew("p", datetime(2026, 1, 1))
    with pytest.raises(BadRequest, match="evidence"):
        ledger.close_all([intend(ledger).id], " ")
    with pytest.raises(BadRequest, match="only add up"):
        ledger.note_all({intend(ledger).id: {Bucket.IDLE: -1}})
    with pytest.raises(LedgerConflict, match="no entry 99"):
        ledger.bind(99, "i-1")
    assert len(ledger.intents()) == 1


def test_a_pool_ends_once_and_its_open_intents_stay(ledger: Ledger, clock: Clock) -> None:
    left = intend(ledger)
    ledger.end_pool("p")
    clock.time = LATER
    ledger.end_pool("p")
    assert ledger.pools() == []
    (pool,) = ledger.pools(include_ended=True)
    assert (pool.owner, pool.written_provider, pool.ended_at, pool.spec_json) == (OWNER, PROVIDER, NOON, "{}")
    assert ledger.open_intents() == [left]


def test_a_lease_is_renewed_and_never_shortened(ledger: Ledger) -> None:
    ledger.renew("p", LATER + timedelta(minutes=5))
    ledger.renew("p", LATER)
    pool = ledger.pool("p")
    assert pool is not None
    assert (pool.lease_expires_at, pool.lives_by_lease) == (LATER + timedelta(minutes=5), False)
    ledger.live_by_lease("p", LATER)
    ledger.renew("p", LATER + timedelta(minutes=6))
    assert ledger.pool("p") == replace(pool, lease_expires_at=LATER + timedelta(minutes=6), lives_by_lease=True)
    assert ledger.pool("unknown") is None


@pytest.mark.parametrize("how", ["condemned", "stopped", "stopped and ended", "ended"])
def test_nothing_is_requested_for_a_dead_pool(ledger: Ledger, how: str) -> None:
    """Every method that spends raises LeaseLost, and its provider cannot change. Facts are still recorded."""
    ledger.set_account(Account("team", USD(10), Period.RUN))
    intent = intend(ledger, "old")
    is_stopped = how.startswith("stopped")
    if how != "ended":
        assert ledger.condemn("p", seen=LATER, stopped_by="ada@lab with `skyward stop`" if is_stopped else "")
    if how.endswith("ended"):
        ledger.end_pool("p")
    words = {"condemned": "was judged dead at", "ended": "has ended, at"}.get(how, "was stopped by ada@lab with .* at")
    for spend in (
        lambda: ledger.renew("p", LATER),
        lambda: ledger.live_by_lease("p", LATER),
        lambda: ledger.intend("p", resource_request("new")),
        lambda: ledger.intend("p", resource_request("old")),
        lambda: ledger.reserve("team", "p", USD(1)),
        lambda: ledger.roll("team", "p", USD(1), USD(1)),
        lambda: ledger.turn_to("p", {"name": "aws"}, "1234"),
    ):
        with pytest.raises(LeaseLost, match=f"{words} 2026-11-21 12:00:00") as refused:
            spend()
        assert refused.value.is_final == is_stopped, "no orchestrator tries again what somebody has stopped"
    assert ledger.left_usd("team", "p") == 10
    assert ledger.bind(intent, "i-1").cloud_id == "i-1"
    ledger.note_all({intent.id: {Bucket.IDLE: 1}})
    assert ledger.ask_end_all([intent.id])[0].end_asked_at == NOON
    assert ledger.close_all([intent.id], "404")[0].gone_at == NOON
    found = ledger.adopt("p", resource_request("found"), "i-2")
    assert ledger.adopt("p", resource_request("found"), "i-2") == found
    assert ledger.open_intents() == [found]
    assert (found.cloud_id, found.bound_at, found.token) == ("i-2", NOON, "found")


def test_a_pool_is_condemned_unless_its_lease_was_renewed(ledger: Ledger, clock: Clock) -> None:
    ledger.renew("p", LATER + timedelta(minutes=1))
    assert not ledger.condemn("p", seen=LATER)
    assert ledger.pool("p").condemned_at is None  # type: ignore[union-attr]
    assert ledger.condemn("p", seen=LATER + timedelta(minutes=1))
    clock.time = LATER
    assert ledger.condemn("p", seen=LATER)
    assert ledger.pool("p").condemned_at == NOON  # type: ignore[union-attr]
    open_pool(ledger, "q")
    ledger.end_pool("q")
    assert ledger.condemn("q", seen=NOON)
    assert ledger.pool("q").condemned_at is None  # type: ignore[union-attr]
    with pytest.raises(LedgerConflict, match="no pool 'x'"):
        ledger.condemn("x", seen=NOON)


def test_many_pools_are_condemned_and_ended_at_once(ledger: Ledger) -> None:
    for pool_id in "abc":
        open_pool(ledger, pool_id)
    ledger.renew("b", LATER + timedelta(minutes=1))
    ledger.end_pool("c")
    assert ledger.condemn_all(dict.fromkeys("abc", LATER)) == {"a", "c"}
    assert {pool.id for pool in ledger.pools() if pool.condemned_at} == {"a"}
    for verb in (lambda: ledger.end_pools(["a", "x", "p"]), lambda: ledger.condemn_all({"p": LATER, "x": LATER})):
        with pytest.raises(LedgerConflict, match="no pool 'x'"):
            verb()
    assert [pool.id for pool in ledger.pools() if not pool.condemned_at] == ["b", "p"]
    ledger.end_pools(iter(["a", "p"]))
    assert [pool.id for pool in ledger.pools()] == ["b"]


def test_a_conflicting_id_does_not_stop_the_binding_of_others(ledger: Ledger) -> None:
    first, second, third = ledger.intend_all("p", [resource_request("a"), resource_request("b"), resource_request("c")])
    ledger.bind_all({first.id: "i-1", second.id: "i-2"})
    with pytest.raises(LedgerConflict, match=r"terminate i-8.*terminate i-9"):
        ledger.bind_all({first.id: "i-8", third.id: "i-3", second.id: "i-9"})
    assert [intent.cloud_id for intent in ledger.intents()] == ["i-1", "i-2", "i-3"]


def seconds_of(ledger: Ledger) -> list[dict[Bucket, float]]:
    return [{bucket: seconds for bucket, seconds in intent.seconds.items() if seconds} for intent in ledger.intents()]


def test_noted_totals_replace_each_other_and_never_shrink(ledger: Ledger) -> None:
    """The buckets of a resource are replaced together, because their sum is its life. Milliseconds are exact."""
    one, other = ledger.intend_all("p", [resource_request("a"), resource_request("b")])
    ledger.note_all({one.id: {Bucket.LAUNCHING: 12.3456, Bucket.IDLE: 5}, other.id: {Bucket.IDLE: 1}})
    ledger.note_all({one.id: {Bucket.IDLE: 7.25}, other.id: {Bucket.IDLE: 0.5}})
    ledger.note_all({})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 12.346, Bucket.IDLE: 7.25}, {Bucket.IDLE: 1}]
    moved = {Bucket.LAUNCHING: 12.346, Bucket.IDLE: 1, Bucket.RUNNING_CALLS: 8}
    ledger.note_all({one.id: moved})
    late = {Bucket.LAUNCHING: 12.346, Bucket.IDLE: 4, Bucket.RUNNING_CALLS: 4.9}
    for _ in range(2):
        assert seconds_of(ledger)[0] == moved
        ledger.note_all({one.id: late})


def test_seconds_that_were_never_noted_are_filled_in_at_the_close(ledger: Ledger, clock: Clock) -> None:
    """A bound resource gets them from its intent on, an unbound one gets none. A second close changes nothing. One that
    was gone long before gets them until then.
    """
    names = ["noted", "unnoted", "unbound", "unfilled", "early", "late", "short"]
    its = dict(zip(names, (intent.id for intent in ledger.intend_all("p", map(resource_request, names))), strict=True))
    ledger.bind_all({number: f"i-{number}" for name, number in its.items() if name != "unbound"})
    ledger.note_all({its["noted"]: {Bucket.LAUNCHING: 60, Bucket.IDLE: 30}, its["unfilled"]: {Bucket.LAUNCHING: 60}})
    ledger.note_all({its["short"]: {Bucket.IDLE: 90}})
    clock.go(600.5)
    ends = {its["early"]: NOON + timedelta(seconds=240), its["late"]: LATER, its["short"]: NOON + timedelta(seconds=60)}
    ledger.close_all([its[name] for name in names[:3]], "not listed", fill=Bucket.IDLE)
    ledger.close_all([its["unfilled"]], "404")
    ledger.close_all([its[name] for name in names[4:]], "not listed", fill=Bucket.IDLE, paid_until=ends)
    clock.time = LATER
    closed = ledger.close_all(list(its.values()), "again", fill=Bucket.LOST)
    assert seconds_of(ledger) == [
        {Bucket.LAUNCHING: 60, Bucket.IDLE: 540.5},
        {Bucket.IDLE: 600.5},
        {},
        {Bucket.LAUNCHING: 60},
        {Bucket.IDLE: 240},
        {Bucket.IDLE: 600.5},
        {Bucket.IDLE: 90},
    ]
    assert {each.gone_at for each in closed} == {NOON + timedelta(seconds=600.5)}


def test_late_notes_replace_filled_in_seconds(ledger: Ledger, clock: Clock) -> None:
    """An owner that was believed dead knows the buckets better, but the sum does not grow."""
    intent = ledger.bind(intend(ledger), "i-1")
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.IDLE: 10}})
    clock.go(600)
    ledger.close_all([intent.id], "not listed", fill=Bucket.IDLE)
    for _ in range(2):
        ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 20}})
        assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 140}]
    for _ in range(2):
        ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: 500, Bucket.IDLE: 9000, Bucket.TERMINATING: 9000}})
        assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 500, Bucket.IDLE: 40}]


def test_notes_of_many_threads_lose_no_second(ledger: Ledger) -> None:
    """Each has a part of the whole. (Warm time would change the idle time.)"""
    intent, buckets = intend(ledger), [bucket for bucket in Bucket if bucket is not Bucket.WARM]

    def note(bucket: Bucket) -> None:
        for total in range(1, 11):
            ledger.note_all({intent.id: {bucket: total}})

    with ThreadPoolExecutor(len(buckets)) as threads:
        list(threads.map(note, buckets))
    assert seconds_of(ledger) == [dict.fromkeys(buckets, 10)]


@pytest.mark.parametrize(
    ("seconds", "price", "expected_usd"),
    [
        (3600, Price(USD("2.5")), "2.5"),  # an hour costs the price of an hour
        (10, Price(USD("3.6")), "0.01"),
        (10.001, Price(USD("3.6")), "0.011"),  # a begun second
        (61, Price(USD(6), increment_seconds=60), "0.2"),  # a begun minute: two of them
        (61, Price(USD(6), minimum_seconds=3600), "6"),  # a minimum hour
        (3601, Price(USD(6), increment_seconds=3600), "12"),
        (0, Price(USD(6), minimum_seconds=60), "0.1"),  # bound, and gone at once
        (1, Price(USD(6), minimum_seconds=60, minimum_usd=USD("0.01")), "0.1"),  # the greater of two minimums
        (1, Price(USD("0.03"), minimum_seconds=60, minimum_usd=USD("0.01")), "0.01"),
        (0, Price(USD("0.03"), minimum_usd=USD("0.01")), "0.01"),
        (3600, Price(USD("1.2345671")), "1.234568"),  # a price has six places, rounded up
        (1, Price(USD("0.000001")), "0.000001"),  # never rounded down to nothing
    ],
)
def test_a_resource_is_billed_as_its_provider_counts(
    ledger: Ledger, seconds: float, price: Price, expected_usd: str
) -> None:
    intent = intend(ledger, price=price)
    assert [row.cost_usd for row in ledger.cost_rows()] == [0], "it was never created, and has no minimum"
    ledger.bind(intent, "i-1")
    ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: seconds}})
    (row,) = ledger.cost_rows()
    assert (row.key, row.resources, row.cost_usd) == ("p", 1, USD(expected_usd))
    assert price.cost(seconds) == USD(expected_usd)


def test_the_sum_of_a_bill_does_not_depend_on_the_key(ledger: Ledger, clock: Clock) -> None:
    open_pool(ledger, "q", replace(OWNER, user="bob"))
    counted: dict[int, tuple[Decimal, Decimal]] = {}
    for number in range(60):
        clock.time = NOON + timedelta(hours=7 * number)
        price = Price(
            USD("1.234567") + number,
            USD("3.987653") + number,
            is_spot=True,
            increment_seconds=(1, 60, 3600)[number % 3],
            minimum_seconds=(0, 60, 600)[number % 3],
            minimum_usd=USD((number % 5) / 100),
        )
        intent = ledger.bind(intend(ledger, f"t{number}", "pq"[number % 2], price), f"i-{number}")
        seconds = {bucket: round((number * 13.377 * (place + 1)) % 1000, 3) for place, bucket in enumerate(Bucket)}
        ledger.note_all({intent.id: seconds})
        counted[number] = (price.cost(sum(seconds.values())), price.on_demand_cost(sum(seconds.values())))
    rows = {by: ledger.cost_rows(by) for by in CostBy}
    for one, other in itertools.pairwise(rows.values()):
        for of in ("cost_usd", "on_demand_usd", "saved_usd"):
            assert sum(getattr(row, of) for row in one) == sum(getattr(row, of) for row in other)
        assert sum(row.seconds for row in one) == pytest.approx(sum(row.seconds for row in other), abs=1e-6)
    # SQL and Python compute the same sums
    assert [(row.cost_usd, row.on_demand_usd) for row in rows[CostBy.RESOURCE]] == list(counted.values())
    assert [row.key for row in rows[CostBy.OWNER]] == ["ada@laptop", "bob@laptop"]
    assert [row.key for row in rows[CostBy.BUCKET]] == [*map(str, Bucket), BILLING_ROUNDING]
    assert [row.key for row in rows[CostBy.DAY]][:2] == ["2026-11-21", "2026-11-22"]
    assert all(row.cost_usd >= 0 for row in rows[CostBy.BUCKET])
    assert sum(row.cost_usd for row in rows[CostBy.RESOURCE]) > 60


def test_a_list_of_pools_has_the_cost_of_each(ledger: Ledger, clock: Clock) -> None:
    for minutes, pool_id in enumerate("qrs", 1):
        clock.time = NOON + timedelta(minutes=minutes)
        open_pool(ledger, pool_id)
    spot = Price(USD(1), USD(4), is_spot=True)
    one, other, unbound = ledger.intend_all(
        "q", [resource_request("a", "q", spot), resource_request("b", "q"), resource_request("c", "q", spot)]
    )
    ledger.bind_all({one.id: "i-1", other.id: "i-2"})
    ledger.note_all({one.id: {Bucket.LAUNCHING: 1800, Bucket.IDLE: 1800.5}})
    ledger.close_all([unbound.id], "fewer came")
    ledger.end_pool("r")
    rows = ledger.pool_rows()
    assert [row.entry for row in rows] == ledger.pools()
    assert [row.entry.id for row in rows] == ["p", "q", "s"]
    q = rows[1]
    assert (q.open_resources, q.resources, q.seconds) == (2, 3, 3600.5)
    assert (q.cost_usd, q.on_demand_usd) == (USD("1.000278"), USD("4.001112"))
    assert (rows[0].resources, rows[0].cost_usd) == (0, 0)
    assert [row.entry.id for row in ledger.pool_rows(include_ended=True)] == ["p", "q", "r", "s"]
    assert ledger.pool_rows(include_ended=True)[1] == q
    assert ledger.pool_rows(limit=2) == rows[1:]
    assert [row.entry.id for row in ledger.pool_rows(include_ended=True, limit=2)] == ["r", "s"]


def test_a_limit_counts_reservations_and_spending(ledger: Ledger) -> None:
    ledger.set_account(Account("team", USD(10), Period.MONTH))
    first, second = ledger.reserve("team", "p", USD(6)), ledger.reserve("team", "p", USD(4))
    with pytest.raises(BudgetExceeded, match=r"0\.000000 USD left") as refused:
        ledger.reserve("team", "p", USD("0.000001"))
    assert (refused.value.account, refused.value.left_usd) == ("team", 0)
    assert ledger.open_reservations() == [first, second]
    settled = ledger.settle(first, USD("1.25"))
    assert (settled.spent_usd, settled.settled_at) == (USD("1.25"), NOON)
    assert ledger.settle(first, USD("1.25")) == settled
    with pytest.raises(LedgerConflict, match=r"was settled with 1\.25"):
        ledger.settle(first, USD(2))
    ledger.release(second)
    assert ledger.left_usd("team", "p") == USD("8.75")
    assert ledger.open_reservations(pool_id="p") == []
    ledger.settle(ledger.reserve("team", "p", USD(8)), USD(11))
    assert ledger.left_usd("team", "p") == USD("-2.25"), "overspending is recorded"
    with pytest.raises(BudgetExceeded):
        ledger.reserve("team", "p", USD("0.01"))


def test_the_end_of_a_pool_settles_all_its_reservations(ledger: Ledger, clock: Clock) -> None:
    open_pool(ledger, "q")
    ledger.set_account(Account("team", USD(10), Period.DAY))
    ledger.settle(ledger.reserve("team", "p", USD(2)), USD(1))
    ledger.reserve("team", "p", USD(3))
    other = ledger.reserve("team", "q", USD(5))
    clock.time = NOON + timedelta(days=1)
    ledger.reserve("team", "p", USD(4))
    for _ in range(2):
        ledger.settle_pool("p", USD("4.5"))
        assert ledger.open_reservations() == [other]
        assert ledger.left_usd("team", "p") == USD("9.5")
        clock.time = NOON
        assert ledger.left_usd("team", "p") == USD("1")
        clock.time = NOON + timedelta(days=1)
    ledger.settle_pool("unknown", USD(1))


@pytest.mark.parametrize(("spent", "left"), [("0.5", "9"), ("11", "-1")])
def test_a_pool_that_spent_less_than_settled_or_more_than_reserved(ledger: Ledger, spent: str, left: str) -> None:
    ledger.set_account(Account("team", USD(10), Period.RUN))
    ledger.settle(ledger.reserve("team", "p", USD(2)), USD(1))
    for _ in range(3):
        ledger.reserve("team", "p", USD(1))
    ledger.settle_pool("p", USD(spent))
    assert ledger.left_usd("team", "p") == USD(left)
    with pytest.raises(BadRequest, match="not negative"):
        ledger.settle_pool("p", USD(-1))


def test_a_renewal_of_reservations_is_atomic(ledger: Ledger, clock: Clock) -> None:
    ledger.set_account(Account("team", USD(10), Period.DAY))
    ledger.set_account(Account("other", USD(10), Period.DAY))
    elsewhere = ledger.reserve("other", "p", USD(10))
    open_before = [elsewhere, ledger.reserve("team", "p", USD(3)), ledger.reserve("team", "p", USD(3))]
    with pytest.raises(BudgetExceeded, match=r"5\.000000 USD left.*5\.000001 requested"):
        ledger.roll("team", "p", USD(5), USD("5.000001"))
    assert ledger.open_reservations() == open_before
    assert ledger.left_usd("team", "p") == 4
    following = ledger.roll("team", "p", USD(5), USD(5))
    assert ledger.open_reservations() == [elsewhere, following]
    assert (following.reserved_usd, ledger.left_usd("team", "p")) == (5, 0)
    clock.time = NOON + timedelta(days=1)
    empty = ledger.roll("team", "p", USD(5 + 4), USD(0))
    assert (empty.reserved_usd, empty.scope, ledger.left_usd("team", "p")) == (0, "2026-11-22", 10)
    ledger.settle(empty, USD(0))
    for _ in range(2):  # the answer to the first one may have been lost
        ledger.roll("team", "p", USD(9 + 2), USD(1))
        assert ledger.left_usd("team", "p") == 7
    for spent, following in ((-1, 1), (1, -1)):
        with pytest.raises(BadRequest, match="not negative"):
            ledger.roll("team", "p", USD(spent), USD(following))
    assert ledger.left_usd("team", "p") == 7


@pytest.mark.parametrize(
    ("period", "same_day", "next_day", "next_month", "other_pool"),
    [("run", 0, 0, 0, 1), ("day", 0, 1, 1, 0), ("month", 0, 0, 1, 0)],
)
def test_a_limit_holds_for_its_period(
    ledger: Ledger, clock: Clock, period: str, same_day: int, next_day: int, next_month: int, other_pool: int
) -> None:
    open_pool(ledger, "q")
    ledger.set_account(Account("team", USD(1), Period(period)))
    ledger.reserve("team", "p", USD(1))
    assert ledger.left_usd("team", "q") == other_pool
    for moment, left in (
        (NOON.replace(hour=23), same_day),
        (NOON + timedelta(days=1), next_day),
        (NOON + timedelta(days=30), next_month),
    ):
        clock.time = moment
        assert ledger.left_usd("team", "p") == left


def test_an_account_can_be_changed_and_must_exist(ledger: Ledger) -> None:
    ledger.set_account(Account("team", USD(1), Period.DAY))
    ledger.set_account(Account("team", USD("2.5"), Period.DAY))
    assert ledger.accounts() == [Account("team", USD("2.5"), Period.DAY)]
    ledger.reserve("team", "p", USD("2.5"))
    with pytest.raises(BadRequest, match="no account 'taem'; it has: team"):
        ledger.reserve("taem", "p", USD(1))
    with pytest.raises(BadRequest, match="positive"):
        ledger.reserve("team", "p", USD(0))


@pytest.mark.parametrize("most", [1, 10_000])
def test_an_account_that_no_open_pool_uses_is_removed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """In several transactions, or in one. The other account, the cost of pools and a late settlement stay."""
    monkeypatch.setattr(accounts, "RESERVATIONS_PER_REMOVAL", most)
    for name in ("team", "other"):
        ledger.set_account(Account(name, USD(9), Period.MONTH))
        pay(ledger, name, TRAIN, 3)
        for _ in range(3):
            ledger.settle(ledger.reserve(name, name, USD(1)), USD(1))
    ledger.end_pool("team")
    rows = ledger.cost_rows(CostBy.POOL)
    ledger.remove_account("team")
    assert [account.name for account in ledger.accounts()] == ["other"]
    assert (ledger.left_usd("other", "other"), ledger.settled_usd("other", "other")) == (USD(6), USD(3))
    assert ledger.cost_rows(CostBy.POOL) == rows
    ledger.settle_pool("team", USD(3))  # as a late sweep does
    for name in ("team", "run nonesuch"):
        with pytest.raises(BadRequest, match=f"no account '{name}'; it has: other"):
            ledger.remove_account(name)
    open_pool(ledger, "late", account="team")
    with pytest.raises(BadRequest, match=r"no account 'team'.*budget set team"):
        ledger.reserve("team", "late", USD(1))
    ledger.set_account(Account("team", USD(9), Period.MONTH))
    assert ledger.left_usd("team", "late") == USD(9)


def test_an_account_that_an_open_pool_may_draw_on_is_not_removed(ledger: Ledger) -> None:
    """Whether it names the account only, has drawn on it, or has ended without a settlement. Accounts of runs are none
    that a user removes.
    """
    ledger.set_account(Account("team", USD(9), Period.MONTH))
    open_pool(ledger, "names", account="team")
    open_pool(ledger, "drew")
    ledger.settle(ledger.reserve("team", "drew", USD(1)), USD(1))
    open_pool(ledger, "ended", account="team")
    ledger.reserve("team", "ended", USD(2))
    ledger.end_pool("ended")
    for ends, users in ((None, "drew, ended, names"), ("drew", "ended, names"), ("names", "ended")):
        if ends is not None:
            ledger.end_pool(ends)
        with pytest.raises(LedgerConflict, match=f"'team' is not removed: {users} may still draw on it"):
            ledger.remove_account("team")
        assert ledger.left_usd("team", "any") == USD(6)
    ledger.settle_pool("ended", USD(1))
    ledger.remove_account("team")
    open_pool(ledger, "of-run", work=TRAIN, run_limit_usd=USD(5))
    with pytest.raises(BadRequest, match="no account"):
        ledger.remove_account(account_of_run(TRAIN))


def test_a_pool_that_opens_during_a_removal_has_its_money_or_is_refused(ledger: Ledger) -> None:
    """Nothing is reserved from an account that is not there, and no account goes that a pool has reserved from."""
    outcomes = set[tuple[bool, bool]]()
    for number in range(20):
        ledger.set_account(Account("team", USD(9), Period.MONTH))
        start = threading.Barrier(2)

        def opens(pool_id: str = f"p{number}", start: threading.Barrier = start) -> bool:
            start.wait(10)
            open_pool(ledger, pool_id, account="team")
            try:
                return ledger.reserve("team", pool_id, USD(1)).reserved_usd == USD(1)
            except BadRequest:
                return False

        def removes(start: threading.Barrier = start) -> bool:
            start.wait(10)
            try:
                ledger.remove_account("team")
            except LedgerConflict:
                return False
            return True

        with ThreadPoolExecutor(2) as threads:
            opened, removed = threads.submit(opens), threads.submit(removes)
        outcomes.add((opened.result(), removed.result()))
        assert len(ledger.accounts()) == (not removed.result())
        assert len(ledger.open_reservations()) == opened.result()
        ledger.settle_pool(f"p{number}", USD(0))
        ledger.end_pool(f"p{number}")
    assert outcomes <= {(True, False), (False, True)}


def test_a_ledger_that_is_damaged_later_is_an_error(file_ledger: Ledger, tmp_path: Path) -> None:
    for number in range(200):
        intend(file_ledger, f"t{number}")
    file_ledger.close()
    path = tmp_path / "state/ledger.db"
    path.write_bytes(path.read_bytes()[:8192] + b"\xa5" * (path.stat().st_size - 8192))
    with pytest.raises(LedgerError, match="damaged"), Ledger(f"sqlite:///{path}") as damaged:
        damaged.intents()


FILL = """
import resource, signal, sys
from datetime import UTC, datetime
from skyward_core.ledger.rows import ResourceKind, ResourceRequest
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
with Ledger(sys.argv[1]) as ledger:
    for number in range(100_000):
        try:
            ledger.intend("p", ResourceRequest(ResourceKind.INSTANCE, "x", "y", "n", str(number), {}, NOON))
        except LedgerError as error:
            print(number, error)
            break
"""


def test_a_full_disk_is_an_error_and_loses_nothing(file_ledger: Ledger, sqlite_url: str) -> None:
    done = run_script(FILL, sqlite_url, str(300_000))
    assert done.returncode == 0, done.stderr
    written, _, message = done.stdout.partition(" ")
    assert "disk" in message
    assert len(file_ledger.intents()) == int(written) > 0


def test_attempts_are_kept_in_their_order(ledger: Ledger, clock: Clock) -> None:
    intend(ledger)
    (pool,) = ledger.pools()
    moments = [clock() + timedelta(seconds=seconds) for seconds in (5, 0)]
    rest: dict[str, Any] = {"is_spot": True, "seconds": 1.25, "error": "NoCapacity", "code": "I" * 200}
    later, sooner = (Attempt(pool.id, at, "aws", "us-east-1", "p5.48xlarge", **rest) for at in moments)
    ledger.note_attempts([later, sooner])
    ledger.note_attempts([])
    assert ledger.attempts() == ledger.attempts(pool_id=pool.id) == [sooner, later]
    assert ledger.attempts(since=moments[0]) == [later]
    assert ledger.attempts(pool_id="sky-other") == []


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_a_hostile_text_is_stored_by_both_databases(ledger: Ledger, clock: Clock, text: str) -> None:
    """What providers, nodes and clients say: PostgreSQL takes no NUL, and none takes half of a surrogate pair. A text
    that is longer then keeps to the length of its column.
    """
    long = (text * 300)[:255]
    ledger.note_attempts(
        [Attempt("p", clock(), "aws", "r", long, is_spot=False, seconds=1.0, error="E", code=long, message=text * 300)]
    )
    ledger.note_calls("p", [CallState("c", long, text, 1, "running", clock(), None, (SlotUse("i", 1, 5.0),))])
    (attempt,), (call,) = ledger.attempts(), ledger.calls()
    for stored in (attempt.instance_type, attempt.code, call.name, call.owner):
        refuse_hidden(stored)
        assert len(stored) <= 500
    assert attempt.message == visible_lines(text * 300)


def test_a_pool_is_recorded_with_its_work(ledger: Ledger) -> None:
    pay(ledger, "q", TRAIN, 2)
    assert {pool.id: pool.work for pool in ledger.pools()} == {"p": Work(), "q": TRAIN}
    assert bill(ledger, CostBy.POOL, work=Work(run=TRAIN.run, task="train")) == {"q": (2, Decimal(2))}
    assert bill(ledger, CostBy.POOL, work=Work(run=TRAIN.run, task="other")) == {}


def test_costs_add_up_by_run_task_and_asset(ledger: Ledger) -> None:
    dagster = Work(system="dagster", workflow="job", run="r1")
    pay(ledger, "one", TRAIN, 2)
    pay(ledger, "two", replace(TRAIN, attempt="2"), 4)
    pay(ledger, "other-run", replace(TRAIN, run="r2"), 8)
    pay(ledger, "shared", dagster, 16)
    pay(ledger, "plain", Work(), 32)
    shares = {
        replace(dagster, task="a", asset="a"): Decimal("5.000001"),
        replace(dagster, task="b", asset="b"): Decimal(3),
    }
    record_shares(ledger, "shared", shares)
    assert bill(ledger, CostBy.RUN) == {
        "airflow:nightly/manual__2026-11-22T07:00:00+00:00": (4, Decimal(6)),
        "airflow:nightly/r2": (2, Decimal(8)),
        "dagster:job/r1": (2, Decimal(16)),
        "(no run)": (2, Decimal(32)),
    }
    assert bill(ledger, CostBy.TASK) == {
        "airflow:nightly/train": (6, Decimal(14)),
        "dagster:job/a": (0, Decimal("5.000001")),
        "dagster:job/b": (0, Decimal(3)),
        "(no task)": (4, Decimal("39.999999")),
    }
    assert bill(ledger, CostBy.ASSET) == {
        "a": (0, Decimal("5.000001")),
        "b": (0, Decimal(3)),
        "(no asset)": (10, Decimal("53.999999")),
    }
    assert sum(row.seconds for row in ledger.cost_rows(CostBy.ASSET)) == pytest.approx(10 * 3600)


def test_the_assets_of_one_step_have_equal_parts_of_its_cost(ledger: Ledger) -> None:
    """As Dagster's pages have it; what cannot be divided is the first one's, so that the rows add up to the bill."""
    step = Work(system="dagster", workflow="job", run="r1", task="split")
    pay(ledger, "whole", replace(step, asset="left, right"), 1)
    pay(ledger, "shared", replace(step, task="", asset=""), 16)
    record_shares(ledger, "shared", {replace(step, asset="left, right, top"): Decimal("5.000001")})
    rows = {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.ASSET)}
    third = Decimal("1.666667")
    half = Decimal("0.5")
    assert rows == {"left": half + third, "right": half + third, "top": third, "(no asset)": Decimal("10.999999")}
    assert sum(row.resources for row in ledger.cost_rows(CostBy.ASSET)) == 4


TRY_TO_OPEN = """
import os, sys
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
Ledger(sys.argv[2]).close()  # everything is imported
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # root may write anywhere
try:
    with Ledger(sys.argv[1]) as ledger:
        ledger.end_pool("p")
except LedgerError as error:
    print(error)
"""


@pytest.mark.parametrize("is_made", [False, True])
def test_a_read_only_directory_is_an_error(tmp_path: Path, is_made: bool) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    if is_made:
        Ledger(f"sqlite:///{folder}/ledger.db").close()
    folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)  # so that the other user gets as far as the directory itself
    done = run_script(TRY_TO_OPEN, f"sqlite:///{folder}/ledger.db", f"sqlite:///{tmp_path}/other.db")
    folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "name another ledger (SKYWARD_LEDGER)" in done.stdout


LOOK_AND_WRITE = """
import sys
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
try:
    with Ledger(sys.argv[1]) as ledger:
        ledger.end_pool("p")
except LedgerError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("is_made", [False, True])
def test_a_read_only_file_system_is_named_as_such(tmp_path: Path, is_made: bool) -> None:
    """Permissions are not what is wrong there, and root is refused too."""
    folder = tmp_path / "folder"
    folder.mkdir()
    if is_made:
        Ledger(f"sqlite:///{folder}/ledger.db").close()
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" -c "$3" "$4"'
    words = ["sh", "-c", mount, "sh", str(folder), sys.executable, LOOK_AND_WRITE, f"sqlite:///{folder}/ledger.db"]
    done = subprocess.run(["unshare", "--mount", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "is on a file system that is read-only. Mount it with write access" in done.stdout


def test_a_database_without_an_encoding_works(postgresql_server: str) -> None:
    run_on(
        postgresql_server, "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    )
    try:
        with Ledger(postgresql_server.replace("/postgres?", "/ascii?")) as ledger:
            ledger.set_account(Account("Müller", Decimal(1), Period.DAY))
            assert [account.name for account in ledger.accounts()] == ["Müller"]
    finally:
        run_on(postgresql_server, "DROP DATABASE ascii WITH (FORCE)")


def test_a_row_that_stays_locked_is_an_error(postgresql_url: str, clock: Clock) -> None:
    with Ledger(postgresql_url, clock=clock, busy_timeout_seconds=0.05) as impatient:
        open_pool(impatient, "p")
        holder = create_engine(postgresql_url)
        with holder.connect() as connection:
            connection.exec_driver_sql("SELECT * FROM skyward_pools FOR UPDATE")
            with pytest.raises(LedgerError, match=r"refuses \(SQLSTATE 55P03\)"):
                impatient.renew("p", LATER + timedelta(hours=1))
            assert len(impatient.pools()) == 1
        holder.dispose()
        impatient.renew("p", LATER + timedelta(hours=1))


def test_a_connection_that_the_server_has_closed_is_replaced(
    postgresql_server: str, postgresql_url: str, clock: Clock
) -> None:
    with Ledger(postgresql_url, clock=clock) as ledger:
        open_pool(ledger, "p")
        run_on(
            postgresql_server,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE starts_with(datname, 'ledger')",
        )
        assert [pool.id for pool in ledger.pools()] == ["p"]


def test_the_locks_of_an_open_ledger_survive_another_open(tmp_path: Path) -> None:
    """A check of the file's mode must not open it, because a close drops all its locks (fcntl(2))."""
    path = tmp_path / "ledger.db"
    with closing(Database(f"sqlite:///{path}", lambda: NOON, 1.0)) as database, database.write():
        Ledger(f"sqlite:///{path}").close()
        code = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
        done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=False)
    assert "database is locked" in done.stderr


def test_ledgers_of_one_server_share_their_connections(postgresql_url: str) -> None:
    """A process opens the ledger of a pool with a name again and again, and keeps nothing of it: SQLAlchemy keeps
    some two hundred objects of each engine. The last ledger that is closed closes the connections.
    """

    def sessions() -> int:
        with Ledger(postgresql_url, busy_timeout_seconds=7) as looker, looker._database.read() as connection:
            words = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            return int(connection.exec_driver_sql(words).scalar_one()) - 1

    def objects_after(times: int) -> int:
        for _ in range(times):
            with Ledger(postgresql_url) as opened:
                opened.try_write()
        gc.collect()
        return len(gc.get_objects())

    first, second = Ledger(postgresql_url), Ledger(postgresql_url)
    with first._database.read(), first._database.read():  # more than one at once
        second.close()
        second.close()
        assert sessions() == 2
    assert first.try_write() > 0
    first.close()
    assert sessions() == 0
    assert second.try_write() > 0  # a ledger that is used after its end
    assert sessions() == 0
    before = objects_after(3)
    assert objects_after(10) - before < 10 * 60
