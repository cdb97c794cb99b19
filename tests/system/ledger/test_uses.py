"""The uses of pools in the ledger: what each step has cost, also if its process was killed."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.receipt import users_of
from skyward_core.ledger.rows import Bucket, CostBy, UnreadableRow
from skyward_core.ledger.tables import stamp
from skyward_core.ledger.uses import (
    NewUse,
    UseCount,
    UseEntry,
    begin_warm_time,
    cover_held,
    end_warm_time,
    note_uses,
)
from skyward_core.machines.offers import MOST_USD_PER_HOUR
from skyward_core.work import NO_WORK, Work
from tests.ledger.fixtures import USD, Clock, open_pool, url_of
from tests.system.ledger.test_shared_costs import rented
from tests.waiting import wait_until

RUN = Work(system="prefect", workflow="train", run="1")
FIT, SCORE = (Work(system="prefect", workflow="train", run="1", task=task) for task in ("fit", "score"))


def begun(ledger: Ledger) -> int:
    """A pool of the run at 3.6 USD an hour, with a use of each task; return its machine."""
    open_pool(ledger, "sky-a", work=RUN)
    machine = rented(ledger, "3.6")
    ledger.uses.write([NewUse("1", "sky-a", FIT), NewUse("2", "sky-a", SCORE, "client")])
    return machine


def use(ledger: Ledger, use_id: str) -> UseEntry:
    found = ledger.uses.use(use_id)
    assert found is not None
    return found


def cost(ledger: Ledger, by: CostBy = CostBy.TASK, work: Work = NO_WORK) -> dict[str, Any]:
    return {row.key: row.cost_usd for row in ledger.cost_rows(by, work=work)}


def test_what_a_use_has_had_only_grows_until_its_end_which_stays(ledger: Ledger, clock: Clock) -> None:
    begun(ledger)
    assert (use(ledger, "1").cost_usd, use(ledger, "1").ended_at) == (0, None)
    assert (use(ledger, "2").client_id, use(ledger, "2").work) == ("client", SCORE)
    ledger.uses.write(counts={"1": UseCount(10.0, 0.01), "2": UseCount(5.0, 0.005)})
    ledger.uses.write(counts={"1": UseCount(9.0, 0.009)}, ended={"2": UseCount(6.0, 0.006)})
    assert (use(ledger, "1").slot_seconds, use(ledger, "1").cost_usd) == (10.0, USD("0.01"))
    ended_at = clock.time
    assert use(ledger, "2").ended_at == ended_at
    clock.go(60)
    ledger.uses.write(ended={"2": UseCount(7.0, 0.007)})
    assert (use(ledger, "2").cost_usd, use(ledger, "2").ended_at) == (USD("0.006"), ended_at)
    assert [entry.id for entry in ledger.uses.of_pool("sky-a")] == ["1", "2"]
    assert ledger.uses.use("3") is None


def test_the_use_of_a_dead_process_has_the_time_until_its_calls_have_ended(ledger: Ledger, clock: Clock) -> None:
    """From when its slots were counted last; one that has ended, or held none, has no more."""
    begun(ledger)
    held = UseCount(10.0, 0.01, held_slots=2, usd_per_hour=7.2, age_seconds=3.0)
    ledger.uses.write([NewUse("3", "sky-a", RUN)], counts={"1": held, "3": UseCount(1.0, 0.001)})
    ledger.uses.write(ended={"2": held})
    clock.go(7)
    ledger.uses.settle(["1", "2", "3"])
    assert [(use(ledger, name).slot_seconds, use(ledger, name).cost_usd) for name in "123"] == [
        (10.0 + 2 * 10.0, USD("0.03")),
        (10.0, USD("0.01")),
        (1.0, USD("0.001")),
    ]
    assert use(ledger, "1").ended_at == clock.time
    clock.go(60)
    ledger.uses.settle(["1"])
    assert use(ledger, "1").cost_usd == USD("0.03")


@pytest.mark.parametrize("late_seconds", [0, 86_400])
def test_the_end_of_a_pool_settles_its_uses(ledger: Ledger, clock: Clock, late_seconds: int) -> None:
    """Until its machines ended, also if that is recorded late, by a sweep of the next day."""
    machine = begun(ledger)
    ledger.uses.write(counts={"1": UseCount(0.0, 0.0, held_slots=1, usd_per_hour=3.6)})
    clock.go(10)
    ended_at = clock.time
    clock.go(late_seconds)
    ledger.close_all([machine], "it is gone", fill=Bucket.IDLE, paid_until={machine: ended_at})
    ledger.end_pool("sky-a")
    assert use(ledger, "1").cost_usd == USD("0.01")
    assert all(use(ledger, name).ended_at is not None for name in "12")


def test_a_machine_that_is_open_at_the_end_of_its_pool_is_held_until_then(ledger: Ledger, clock: Clock) -> None:
    begun(ledger)
    ledger.uses.write(counts={"1": UseCount(0.0, 0.0, held_slots=1, usd_per_hour=3.6)})
    clock.go(10)
    ledger.end_pool("sky-a")
    assert use(ledger, "1").cost_usd == USD("0.01")


def test_a_use_of_an_expensive_machine_for_weeks_does_not_overflow(ledger: Ledger, clock: Clock) -> None:
    begun(ledger)
    ledger.uses.write(counts={"1": UseCount(0.0, 0.0, held_slots=8, usd_per_hour=1000.0)})
    clock.go(60 * 86_400)
    ledger.uses.settle(["1"])
    assert use(ledger, "1").cost_usd == 1000 * 24 * 60


def noted(ledger: Ledger, machine: int, seconds: float) -> None:
    ledger.note_all({machine: {Bucket.RUNNING_CALLS: seconds}})


def parts(ledger: Ledger) -> dict[str, Any]:
    """The parts of the bill, which are the whole of it, to the micro-dollar; users and buckets agree with them."""
    by_task = cost(ledger)
    (whole,) = ledger.cost_rows(CostBy.POOL, pool_id="sky-a")
    assert sum(by_task.values()) == whole.cost_usd
    assert all(usd >= 0 for usd in by_task.values())
    users = users_of(ledger, "sky-a")
    assert [user.cost_usd for user in users] == [by_task["prefect:train/fit"], by_task["prefect:train/score"]]
    buckets = {row.key: row for row in ledger.cost_rows(CostBy.BUCKET, pool_id="sky-a")}
    assert sum(row.cost_usd for row in buckets.values()) == whole.cost_usd
    assert buckets[Bucket.RUNNING_CALLS].cost_usd >= sum(user.cost_usd for user in users)
    return by_task


@pytest.mark.parametrize("is_first", [True, False], ids=["settled first", "settled last"])
def test_what_nobody_has_measured_of_a_stopped_process_is_at_most_what_others_have_left(
    ledger: Ledger, clock: Clock, is_first: bool
) -> None:
    """A process was stopped while it held a slot: its call ended, and others had the slot. The order is no matter."""
    machine = begun(ledger)
    ledger.uses.write(counts={"1": UseCount(1.0, 0.001, held_slots=1, usd_per_hour=3.6)})
    clock.go(99)
    if is_first:
        ledger.uses.settle(["1"])
    noted(ledger, machine, 99.0)
    ledger.uses.write(ended={"2": UseCount(90.0, 0.09)})
    if not is_first:
        ledger.uses.settle(["1"])
    assert parts(ledger) == {"prefect:train/fit": USD("0.009"), "prefect:train/score": USD("0.09"), "(no task)": USD(0)}
    first, _ = users_of(ledger, "sky-a")
    assert first.slot_seconds == pytest.approx(9.0)
    assert not next(part for part in ledger.cost_parts(FIT)).is_final, "others may have had more of the slots"
    ledger.close_all([machine], "it is gone")
    ledger.end_pool("sky-a")
    assert next(part for part in ledger.cost_parts(FIT)).is_final
    before = parts(ledger)
    ledger.prune(clock.time + timedelta(days=1), is_dry_run=False)
    assert cost(ledger) == before


def test_what_a_process_measured_before_its_use_was_settled_replaces_the_estimate(ledger: Ledger, clock: Clock) -> None:
    """It was stopped, and goes on: its call has ended long ago. The figure of an ended use never grows."""
    machine = begun(ledger)
    ledger.uses.write(counts={"1": UseCount(1.0, 0.001, held_slots=1, usd_per_hour=3.6)})
    clock.go(99)
    noted(ledger, machine, 99.0)
    ledger.uses.settle(["1"])
    assert parts(ledger)["prefect:train/fit"] == USD("0.1") - USD("0.001")
    ledger.uses.write(ended={"1": UseCount(4.0, 0.004)})
    assert parts(ledger)["prefect:train/fit"] == USD("0.004")
    ledger.uses.write(counts={"1": UseCount(70.0, 0.07, held_slots=1, usd_per_hour=3.6)})
    clock.go(10)
    assert parts(ledger)["prefect:train/fit"] == USD("0.004")


def test_calls_that_were_measured_count_in_full_from_the_same_transaction_on(ledger: Ledger, clock: Clock) -> None:
    """The time of their machine is at least theirs, also before the process that keeps the pool notes it."""
    machine = begun(ledger)
    clock.go(20)
    ledger.uses.write(ended={"1": UseCount(10.0, 0.01), "2": UseCount(5.0, 0.005)})
    assert parts(ledger) == {"prefect:train/fit": USD("0.01"), "prefect:train/score": USD("0.005"), "(no task)": USD(0)}
    assert {part.work: part.cost_usd for part in ledger.cost_parts(SCORE)} == {SCORE: USD("0.005")}
    noted(ledger, machine, 19.0)
    assert parts(ledger)["(no task)"] == USD("0.004")


def test_the_bill_of_each_task_is_that_of_its_uses(ledger: Ledger, clock: Clock) -> None:
    """Attempts add up; the rest is for the work of the pool. All is the same after pruning."""
    machine = begun(ledger)
    ledger.uses.write([NewUse("3", "sky-a", FIT)])
    ledger.uses.write(ended={"1": UseCount(100.0, 0.1), "2": UseCount(50.0, 0.05), "3": UseCount(25.0, 0.025)})
    ledger.note_all({machine: {Bucket.RUNNING_CALLS: 150, Bucket.IDLE: 850}})
    by_task = {
        "prefect:train/fit": USD("0.125"),
        "prefect:train/score": USD("0.05"),
        "(no task)": USD("0.825"),
    }
    assert cost(ledger) == by_task
    assert cost(ledger, CostBy.POOL, SCORE) == {"sky-a": USD("0.05")}
    parts = {part.work: part.cost_usd for part in ledger.cost_parts(RUN)}
    assert parts == {FIT: USD("0.125"), SCORE: USD("0.05"), RUN: USD("0.825")}
    ledger.close_all([machine], "it is gone")
    ledger.end_pool("sky-a")
    before = cost(ledger), cost(ledger, CostBy.POOL, SCORE)
    assert ledger.prune(clock.time + timedelta(days=1), is_dry_run=False).pools == 1
    assert ledger.uses.of_pool("sky-a") == []
    assert (cost(ledger), cost(ledger, CostBy.POOL, SCORE)) == before


def test_the_users_of_a_pool_are_its_steps(ledger: Ledger, clock: Clock) -> None:
    """Also without a name; the costs are those of the bills."""
    begun(ledger)
    clock.go(150)
    ledger.uses.write(counts={"1": UseCount(100.0, 0.1)}, ended={"2": UseCount(50.0, 0.05)})
    first, second = users_of(ledger, "sky-a")
    assert [(user.work, user.slot_seconds, user.cost_usd) for user in (first, second)] == [
        (FIT, 100.0, USD("0.1")),
        (SCORE, 50.0, USD("0.05")),
    ]
    assert (first.left_at, second.lives) == (None, False)
    assert second.left_at is not None


DAMAGES = {
    "an increment of zero": "increment_seconds = 0",
    "a negative price": "price_micro_usd_per_hour = -1",
    "more than 64 bits": "price_micro_usd_per_hour = 4611686018427387904, idle_milliseconds = 4611686018427387904",
    "a sum of more than 64 bits": "idle_milliseconds = 9000000000000000000, warm_milliseconds = 9000000000000000000",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_machine_of_a_pool_stops_neither_bills_nor_who_joins_and_leaves(
    what: str, ledger: Ledger, clock: Clock
) -> None:
    """Whoever may write to the ledger may write any number. The other machines are billed, and the row is named."""
    begun(ledger)
    damaged = rented(ledger, "1", "2")
    with written(url_of(ledger)) as connection:
        connection.execute(text(f"UPDATE skyward_resources SET {DAMAGES[what]} WHERE id = {damaged}"))
        begin_warm_time(connection, "sky-a", stamp(clock.time))
    clock.go(10)
    with written(url_of(ledger)) as connection:
        end_warm_time(connection, "sky-a", stamp(clock.time))
    clock.go(10)
    ledger.uses.write(counts={"1": UseCount(5.0, 0.015)})
    assert {row.entry.id: row.cost_usd for row in ledger.pool_rows()} == {"p": 0, "sky-a": USD("0.015")}
    assert ledger.pool_cost_usd("sky-a") == USD("0.015")
    assert [part.cost_usd for part in ledger.held_parts("sky-a")] == [USD("0.015"), 0]
    assert sum(part.cost_usd for part in ledger.cost_parts(RUN)) == USD("0.015")
    for by in CostBy:
        unreadable: list[UnreadableRow] = []
        rows = ledger.cost_rows(by, unreadable=unreadable)
        assert sum(row.cost_usd for row in rows) == USD("0.015"), by
        assert [str(error).startswith(f"row {damaged} of skyward_resources") for error in unreadable] == [True]
    with pytest.raises(UnreadableRow, match=f"row {damaged} of"):
        ledger.cost_rows()


@pytest.mark.parametrize(("usd_per_hour", "years"), [(MOST_USD_PER_HOUR, 1), (9001, 4), (36, 10)])
def test_a_machine_of_any_price_and_life_that_a_pool_may_have_is_billed(
    usd_per_hour: float, years: int, ledger: Ledger
) -> None:
    open_pool(ledger, "sky-a", work=RUN)
    machine = rented(ledger, str(usd_per_hour))
    hours = years * 365 * 24
    ledger.note_all({machine: {Bucket.IDLE: hours * 3600}})
    assert ledger.pool_cost_usd("sky-a") == USD(str(usd_per_hour)) * hours
    assert [row.cost_usd for row in ledger.cost_rows()] == [USD(str(usd_per_hour)) * hours]


def test_of_two_processes_that_note_at_once_one_adds_the_time_of_their_calls(postgresql_url: str, clock: Clock) -> None:
    """The second one waits for the lock of the first one, and then looks again at what is missing."""
    with Ledger(postgresql_url, clock=clock) as ledger, ThreadPoolExecutor(1) as other:
        machine = begun(ledger)
        clock.go(20)
        now = stamp(clock.time)
        with written(postgresql_url) as connection:
            note_uses(connection, {"1": UseCount(5.0, 0.005)}, now, is_final=False)
        with written(postgresql_url) as connection:
            cover_held(connection, "sky-a", now)
            second = other.submit(cover_now, postgresql_url, now)
            wait_until(lambda: waits_for_a_lock(postgresql_url), "the second one to wait for the lock")
        second.result(30)
        (intent,) = (intent for intent in ledger.intents() if intent.id == machine)
        assert intent.seconds[Bucket.RUNNING_CALLS] == 5.0


def test_uses_are_locked_in_the_order_of_their_ids(postgresql_url: str, clock: Clock) -> None:
    """Two processes that note the same uses in other orders would wait for each other."""
    with Ledger(postgresql_url, clock=clock) as ledger, ThreadPoolExecutor(1) as other:
        begun(ledger)
        counts = {"2": UseCount(1.0, 0.001), "1": UseCount(1.0, 0.001)}
        with written(postgresql_url) as connection:
            connection.execute(text("SELECT id FROM skyward_uses WHERE id = '1' FOR UPDATE"))
            noting = other.submit(ledger.uses.write, counts=counts)
            wait_until(lambda: waits_for_a_lock(postgresql_url), "the other one to wait for the first use")
            connection.execute(text("SELECT id FROM skyward_uses WHERE id = '2' FOR UPDATE NOWAIT"))
        noting.result(30)
        assert [entry.slot_seconds for entry in ledger.uses.of_pool("sky-a")] == [1.0, 1.0]


@contextmanager
def written(url: str) -> Generator[Connection]:
    """A transaction of another process."""
    engine = create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def cover_now(url: str, now: int) -> None:
    with written(url) as connection:
        cover_held(connection, "sky-a", now)


def waits_for_a_lock(url: str) -> bool:
    with written(url) as connection:
        return connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one() > 0
