"""The ledger: writes are committed, a killed writer leaves a readable file, and no limit is overdrawn."""

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from skyward_core.errors import BadRequest, BudgetExceeded, LeaseLost, LedgerConflict, LedgerError
from skyward_core.ledger.database import Database
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Attempt, Bucket, CostBy, Period, Price, ResourceKind, ResourceRequest
from skyward_core.ledger.tables import POOLS, RESOURCES, milliseconds_of
from skyward_core.work import Work
from tests.conftest import examples
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    LATER,
    NOON,
    OWNER,
    PROVIDER,
    USD,
    Clock,
    clock,
    file_ledger,
    intend,
    ledger,
    open_pool,
    postgresql_server,
    postgresql_url,
    resource_request,
    run_on,
    sqlite_url,
    url,
)


def test_an_intent_goes_from_requested_to_gone(ledger: Ledger, clock: Clock) -> None:
    intent = intend(ledger)
    for minutes, step in enumerate(
        (
            lambda: ledger.bind(intent, "i-1"),
            lambda: ledger.ask_end_all([intent.id])[0],
            lambda: ledger.close_all([intent.id], "404"),
        ),
        1,
    ):
        clock.time = NOON + timedelta(minutes=minutes)
        step()
    clock.time = LATER
    (again,) = ledger.close_all([intent.id], "another story")
    assert ledger.bind(intent, "i-1") == ledger.ask_end_all([intent.id])[0] == again
    assert [again.bound_at, again.end_asked_at, again.gone_at] == [
        NOON + timedelta(minutes=minutes) for minutes in (1, 2, 3)
    ]
    assert (again.cloud_id, again.evidence) == ("i-1", "404")
    assert ledger.open_intents() == []
    assert ledger.intents(pool_id="p") == [again]


def test_a_known_token_returns_its_entry(ledger: Ledger) -> None:
    intent = ledger.bind(intend(ledger), "i-1")
    assert intend(ledger) == intent
    open_pool(ledger, "q")
    with pytest.raises(LedgerConflict, match="belongs to instance 'skyward-t1' of pool 'p'"):
        intend(ledger, pool_id="q")
    assert ledger.intents() == [intent]


def test_two_resources_of_one_request_are_a_conflict(ledger: Ledger) -> None:
    bound = ledger.bind(intend(ledger), "i-1")
    with pytest.raises(LedgerConflict, match="terminate i-2"):
        ledger.bind(bound, "i-2")
    assert ledger.open_intents() == [bound]


def test_a_late_answer_opens_the_intent_again(ledger: Ledger) -> None:
    """It was closed because a listing did not show it. Now it has an id, and a machine must be terminated."""
    intent = intend(ledger)
    ledger.close_all([intent.id], "not listed")
    bound = ledger.bind(intent, "i-1")
    assert (bound.cloud_id, bound.gone_at, bound.evidence) == ("i-1", None, None)
    assert ledger.open_intents() == [bound]


def test_open_intents_can_be_filtered(ledger: Ledger) -> None:
    open_pool(ledger, "q")
    ours, theirs = intend(ledger, "a"), intend(ledger, "b", "q")
    assert ledger.open_intents(pool_id="q") == [theirs]
    assert ledger.open_intents(provider="aws") == []
    assert ledger.open_intents(provider="verda") == [ours, theirs]


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
    assert (pool.owner, pool.provider, pool.ended_at, pool.spec_json) == (OWNER, PROVIDER, NOON, "{}")
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


def spending_verbs(ledger: Ledger) -> list[Callable[[], object]]:
    return [
        lambda: ledger.renew("p", LATER),
        lambda: ledger.live_by_lease("p", LATER),
        lambda: ledger.intend("p", resource_request("new")),
        lambda: ledger.intend("p", resource_request("old")),
        lambda: ledger.reserve("team", "p", USD(1)),
        lambda: ledger.roll("team", "p", USD(1), USD(1)),
    ]


@pytest.mark.parametrize("is_condemned", [True, False])
def test_nothing_is_requested_for_a_dead_pool(ledger: Ledger, is_condemned: bool) -> None:
    ledger.set_account(Account("team", USD(10), Period.RUN))
    intent = intend(ledger, "old")
    if is_condemned:
        assert ledger.condemn("p", seen=LATER)
    else:
        ledger.end_pool("p")
    for spend in spending_verbs(ledger):
        with pytest.raises(
            LeaseLost,
            match="was judged dead at 2026-11-21 12:00:00" if is_condemned else "has ended, at 2026-11-21 12:00:00",
        ):
            spend()
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
    one, other = ledger.intend_all("p", [resource_request("a"), resource_request("b")])
    ledger.note_all({one.id: {Bucket.LAUNCHING: 12.3456, Bucket.IDLE: 5}, other.id: {Bucket.IDLE: 1}})
    ledger.note_all({one.id: {Bucket.IDLE: 7.25}, other.id: {Bucket.IDLE: 0.5}})
    ledger.note_all({})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 12.346, Bucket.IDLE: 7.25}, {Bucket.IDLE: 1}]


def test_a_second_may_move_to_another_bucket(ledger: Ledger) -> None:
    """The buckets of a resource are replaced together, because their sum is its life."""
    intent = intend(ledger)
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 1, Bucket.IDLE: 5}})
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 1, Bucket.IDLE: 1, Bucket.RUNNING_CALLS: 6}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 1, Bucket.IDLE: 1, Bucket.RUNNING_CALLS: 6}]
    # an older note that comes late
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 1, Bucket.IDLE: 4, Bucket.RUNNING_CALLS: 2.9}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 1, Bucket.IDLE: 1, Bucket.RUNNING_CALLS: 6}]


def test_seconds_that_were_never_noted_are_filled_in_at_the_close(ledger: Ledger, clock: Clock) -> None:
    noted, unnoted, unbound, unfilled = ledger.intend_all("p", [resource_request(token) for token in "abcd"])
    ledger.bind_all({noted.id: "i-1", unnoted.id: "i-2", unfilled.id: "i-4"})
    ledger.note_all({noted.id: {Bucket.LAUNCHING: 60, Bucket.IDLE: 30}, unfilled.id: {Bucket.LAUNCHING: 60}})
    clock.time = NOON + timedelta(seconds=600.5)
    ledger.close_all([noted.id, unnoted.id, unbound.id], "not listed", fill=Bucket.IDLE)
    ledger.close_all([unfilled.id], "404")
    clock.time = LATER
    ledger.close_all([noted.id, unnoted.id, unbound.id, unfilled.id], "again", fill=Bucket.LOST)
    assert seconds_of(ledger) == [
        {Bucket.LAUNCHING: 60, Bucket.IDLE: 540.5},
        {Bucket.IDLE: 600.5},
        {},
        {Bucket.LAUNCHING: 60},
    ]


def test_a_machine_that_was_gone_long_before_is_filled_in_until_then(ledger: Ledger, clock: Clock) -> None:
    early, late, short = ledger.intend_all("p", [resource_request(token) for token in "abc"])
    ledger.bind_all({early.id: "i-1", late.id: "i-2", short.id: "i-3"})
    ledger.note_all({short.id: {Bucket.IDLE: 90}})
    clock.time = NOON + timedelta(seconds=600)
    ends = {early.id: NOON + timedelta(seconds=240), late.id: LATER, short.id: NOON + timedelta(seconds=60)}
    closed = ledger.close_all([early.id, late.id, short.id], "not listed", fill=Bucket.IDLE, paid_until=ends)
    assert seconds_of(ledger) == [{Bucket.IDLE: 240}, {Bucket.IDLE: 600}, {Bucket.IDLE: 90}]
    assert {its.gone_at for its in closed} == {clock.time}


def test_late_notes_replace_filled_in_seconds(ledger: Ledger, clock: Clock) -> None:
    intent = ledger.bind(intend(ledger), "i-1")
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.IDLE: 10}})
    clock.time = NOON + timedelta(seconds=600)
    ledger.close_all([intent.id], "not listed", fill=Bucket.IDLE)
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 20}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 140}]
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 20}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 140}]
    for _ in range(2):
        ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: 500, Bucket.IDLE: 9000, Bucket.TERMINATING: 9000}})
        assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 500, Bucket.IDLE: 40}]


def test_a_resource_that_was_never_created_costs_nothing(ledger: Ledger) -> None:
    intend(ledger, price=Price(USD(6), minimum_seconds=3600, minimum_usd=USD(1)))
    (row,) = ledger.cost_rows()
    assert row.cost_usd == 0


def test_a_bill_can_be_filtered(ledger: Ledger, clock: Clock) -> None:
    open_pool(ledger, "q")
    intend(ledger, "a")
    clock.time = LATER
    intend(ledger, "b", pool_id="q")
    assert [row.key for row in ledger.cost_rows(pool_id="q")] == ["q"]
    assert [row.key for row in ledger.cost_rows(since=LATER)] == ["q"]
    assert [row.key for row in ledger.cost_rows(until=LATER)] == ["p"]
    assert sum(row.resources for row in ledger.cost_rows(CostBy.BUCKET, since=LATER + timedelta(1))) == 0


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
    assert (q.open_resources, q.resources, q.seconds, q.cost_usd, q.on_demand_usd) == (
        2,
        3,
        3600.5,
        USD("1.000278"),
        USD("4.001112"),
    )
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


def test_overspending_is_recorded(ledger: Ledger) -> None:
    ledger.set_account(Account("team", USD(10), Period.RUN))
    ledger.settle(ledger.reserve("team", "p", USD(9)), USD(11))
    assert ledger.left_usd("team", "p") == -1
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
    empty = ledger.roll("team", "p", USD(4), USD(0))
    assert (empty.reserved_usd, empty.scope, ledger.left_usd("team", "p")) == (0, "2026-11-22", 10)
    ledger.settle(empty, USD(0))
    ledger.roll("team", "p", USD(2), USD(1))
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


def run_script(script: str, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=250, check=False, **options
    )  # type: ignore[call-overload]


def test_threads_share_a_ledger(ledger: Ledger) -> None:
    """Calls from many threads lose nothing. (Warm time would change the idle time.)"""
    intent = intend(ledger)
    buckets = [bucket for bucket in Bucket if bucket is not Bucket.WARM]
    threads = [
        threading.Thread(
            target=lambda bucket=bucket: [ledger.note_all({intent.id: {bucket: seconds}}) for seconds in range(1, 11)]
        )
        for bucket in buckets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.intents()[0].seconds == {**dict.fromkeys(buckets, 10), Bucket.WARM: 0}


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
    done = run_script(FILL, sqlite_url, str(200_000))
    assert done.returncode == 0, done.stderr
    written, _, message = done.stdout.partition(" ")
    assert "disk" in message
    assert len(file_ledger.intents()) == int(written) > 0


def test_attempts_are_kept_in_their_order(ledger: Ledger, clock: Clock) -> None:
    intend(ledger)
    (pool,) = ledger.pools()
    moments = [clock() + timedelta(seconds=seconds) for seconds in (5, 0)]
    later, sooner = (
        Attempt(
            pool.id,
            at,
            "aws",
            "us-east-1",
            "p5.48xlarge",
            is_spot=True,
            seconds=1.25,
            error="NoCapacity",
            code="I" * 200,
        )
        for at in moments
    )
    ledger.note_attempts([later, sooner])
    ledger.note_attempts([])
    assert ledger.attempts() == ledger.attempts(pool_id=pool.id) == [sooner, later]
    assert ledger.attempts(since=moments[0]) == [later]
    assert ledger.attempts(pool_id="sky-other") == []


def test_the_provider_of_a_dead_pool_cannot_change(ledger: Ledger) -> None:
    intend(ledger)
    (pool,) = ledger.pools()
    ledger.condemn(pool.id, seen=pool.lease_expires_at)
    with pytest.raises(LeaseLost):
        ledger.turn_to(pool.id, {"name": "aws"}, "1234")
    with pytest.raises(LedgerConflict):
        ledger.turn_to("sky-unknown", {"name": "aws"}, "1234")


TRAIN = Work(system="airflow", workflow="nightly", run="manual__2026-11-22T07:00:00+00:00", task="train", attempt="1")


def pay(ledger: Ledger, pool_id: str, work: Work, usd: int) -> None:
    """Open a pool for this work, with two machines of this total cost."""
    ledger.open_pool(
        pool_id, owner=OWNER, provider={"name": "verda"}, spec_json="{}", lease_expires_at=LATER, work=work
    )
    price = Price(Decimal(usd) / 2)
    requests = [
        ResourceRequest(ResourceKind.INSTANCE, "verda", "FIN-01", f"{pool_id}-{n}", f"{pool_id}-{n}", {}, LATER, price)
        for n in range(2)
    ]
    intents = ledger.intend_all(pool_id, requests)
    ledger.bind_all({intent.id: f"{pool_id}-i-{intent.id}" for intent in intents})
    ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: 3600.0} for intent in intents})


def bill(ledger: Ledger, by: CostBy, **which: object) -> dict[str, tuple[int, Decimal]]:
    return {row.key: (row.resources, row.cost_usd) for row in ledger.cost_rows(by, **which)}


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
    ledger.set_shares("shared", {Work(task="before"): Decimal(1)})
    ledger.set_shares("shared", shares)
    assert ledger.shares("shared") == shares
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


def test_shares_above_the_cost_are_reduced_in_proportion(ledger: Ledger) -> None:
    pay(ledger, "q", TRAIN, 2)
    ledger.set_shares("q", {Work(asset="a"): Decimal(3), Work(asset="b"): Decimal(1)})
    assert bill(ledger, CostBy.ASSET) == {
        "a": (0, Decimal("1.5")),
        "b": (0, Decimal("0.5")),
        "(no asset)": (2, Decimal(0)),
    }


def test_a_share_is_not_negative_and_needs_its_pool(ledger: Ledger) -> None:
    with pytest.raises(BadRequest, match="zero or more"):
        ledger.set_shares("p", {Work(): Decimal("-0.1")})
    with pytest.raises(LedgerConflict):
        ledger.set_shares("nonesuch", {})


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


MANY = examples(100_000)
"""Number of resources; they repeat every 5,000."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A ledger of 5,000 pools, 200 of them open, with `MANY` resources, a twenty-fifth of them open."""
    server = request.getfixturevalue("postgresql_server") if request.param == "postgresql" else ""
    if server:
        run_on(server, "CREATE DATABASE large")
    url = server.replace("/postgres?", "/large?") or f"sqlite:///{tmp_path_factory.mktemp('large')}/ledger.db"
    with Ledger(url, clock=Clock()) as ledger:
        open_pool(ledger, "0")
        intent = ledger.bind(
            intend(ledger, pool_id="0", price=Price(USD("2.345678"), USD("7.5"), increment_seconds=60)), "i-1"
        )
        ledger.note_all({intent.id: dict.fromkeys(Bucket, 0.1)})
        with ledger._database.write() as connection:
            pool = connection.exec_driver_sql("SELECT * FROM skyward_pools").mappings().one()
            if server:  # on a busy machine the rows take longer to make than the server waits for a transaction
                connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            connection.execute(POOLS.insert(), [another_pool(pool, number) for number in range(1, 5000)])
            resource = connection.exec_driver_sql("SELECT * FROM skyward_resources").mappings().one()
            for numbers in itertools.batched(range(2, MANY + 1), 5000):
                connection.execute(RESOURCES.insert(), [another_resource(resource, number) for number in numbers])
        yield ledger
    if server:
        run_on(server, "DROP DATABASE large WITH (FORCE)")


def another_pool(pool: Mapping[str, Any], number: int) -> dict[str, Any]:
    is_ended = number >= 200
    return {
        **pool,
        "id": str(number),
        "owner_user": f"user{number % 40}",
        "created_microseconds": pool["created_microseconds"] + number,
        "ended_microseconds": 1 if is_ended else None,
    }


def another_resource(resource: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {
        **resource,
        "id": number,
        "pool_id": str(number % 5000),
        "token": str(number),
        "intended_microseconds": resource["intended_microseconds"] + number * 20_000_000,
        "gone_microseconds": None if number % 5000 < 200 else 1,
        **{milliseconds_of(bucket): 1000 * (number % 1000) + 100 for bucket in Bucket},
    }


@pytest.mark.generated
@pytest.mark.parametrize(
    ("include_ended", "limit", "pools", "resources"),
    [(False, None, 200, MANY // 25), (True, None, 5000, MANY), (True, 50, 50, MANY // 100)],
)
def test_a_list_of_five_thousand_pools_is_right(
    large: Ledger, include_ended: bool, limit: int | None, pools: int, resources: int
) -> None:
    rows = large.pool_rows(include_ended=include_ended, limit=limit)
    assert (len(rows), sum(row.resources for row in rows)) == (pools, resources)
    assert sum(row.open_resources for row in rows) == (0 if limit else MANY // 25)


@pytest.mark.generated
def test_all_open_intents_are_found(large: Ledger) -> None:
    intents = large.open_intents()
    assert len(intents) == MANY // 25


def test_the_locks_of_an_open_ledger_survive_another_open(tmp_path: Path) -> None:
    """A check of the file's mode must not open it, because a close drops all its locks (fcntl(2))."""
    path = tmp_path / "ledger.db"
    with closing(Database(f"sqlite:///{path}", lambda: NOON, 1.0)) as database, database.write():
        Ledger(f"sqlite:///{path}").close()
        code = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
        done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=False)
    assert "database is locked" in done.stderr
