"""The bill is price times time, by a clock that the test sets; and each second has one bucket."""

import pickle
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from math import ceil

import pytest

from skyward_core import CostFinal
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.metering import PHASES, Meter, metered_of
from skyward_core.ledger.rows import Bucket, Intent, Price, ResourceKind
from skyward_core.machines.offers import by_month
from skyward_core.wire.messages import Outcome, OutcomeKind
from skyward_core.wire.streams import ReportedOutcomes
from tests.ledger.fixtures import NOON, MeterClock, machine

NOTHING = dict.fromkeys(Bucket, 0.0)


@pytest.fixture
def clock() -> MeterClock:
    return MeterClock()


@pytest.fixture
def meter(clock: MeterClock) -> Meter:
    return Meter(clock)


def end_all(meter: Meter) -> None:
    for instance_id in meter.rented():
        meter.end(instance_id)


def test_a_machine_costs_its_price_for_each_hour_from_its_request(clock: MeterClock, meter: Meter) -> None:
    """With its extras, also if only a listing shows it later. The rate is that of the machines rented now."""
    asked_at = meter.now()
    clock.go(3600)
    disk = by_month("disk", 72.0, "a price page", "2026-11-22")  # 0.1 USD an hour
    meter.start(machine("a", 2.0).model_copy(update={"extras_per_hour": (disk,)}), asked_at)
    clock.go(1800)
    update = meter.update()
    assert (update.accumulated_cost, update.hourly_rate, update.elapsed_seconds) == (3.15, 2.1, 5400.0)
    assert (update.spot_count, update.ondemand_count) == (0, 1)


def test_machines_cost_money_and_use_up_their_time_while_this_computer_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stands still then (Linux): a sleep of 20 s was missing in the bill, and in `max_cost`."""
    real, slept_seconds = time.clock_gettime, 0.0

    def clock_gettime(clock: int) -> float:
        return real(clock) + (slept_seconds if clock == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    meter = Meter()
    limit = SpendingLimit("sky-1", meter, max_cost=100.0)
    commitment = limit.commit(1, Price(Decimal(3600)))
    meter.start(machine("a", 3600.0), meter.now())
    limit.launched(["a"], commitment)
    before = limit.paid_seconds()
    slept_seconds = 20.0
    assert 20 <= meter.total() < 21
    after = limit.paid_seconds()
    assert before is not None
    assert after is not None
    assert 20 <= before - after < 21


def test_a_machine_that_is_gone_costs_nothing_more(clock: MeterClock, meter: Meter) -> None:
    meter.start(machine("a", 1.0), clock())
    meter.start(machine("b", 10.0), clock())
    clock.go(3600)
    meter.end("b")
    clock.go(3600)
    meter.end("b")
    meter.end("unheard of")
    assert meter.update().accumulated_cost == 12.0
    assert meter.update().hourly_rate == 1.0
    assert (meter.rate(), meter.rented()) == (Decimal(1), {"a"})
    end_all(meter)
    clock.go(3600)
    assert (meter.total(), meter.rate(), meter.rented()) == (Decimal(12), 0, set())


def test_the_final_bill_is_returned_once(clock: MeterClock, meter: Meter) -> None:
    """It is over all machines ever rented, with the savings of spot. A pool without machines costs nothing."""
    meter.start(machine("a", 3.0, on_demand=9.0, is_spot=True), clock())
    meter.start(machine("b", 2.0), clock())
    meter.start(machine("c", 2.0), clock())
    clock.go(1800)
    meter.end("b")
    clock.go(1800)
    end_all(meter)
    clock.go(60)
    assert meter.final() == CostFinal(6.0, 3660.0, 7.0, 1, 2, 6.0, {"launching": 6.0})
    assert meter.final() is None
    assert meter.final() is None
    assert Meter(clock).final() == CostFinal(0.0, 0.0, 0.0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("increment", "minimum", "seconds", "usd"),
    [
        (1, 0, 0.001, "0.001"),
        (60, 0, 60.001, "0.12"),
        (1, 3600, 5.0, "3.6"),
        (60, 120, 130.0, "0.18"),
        (60, 120, 1.0, "0.12"),
    ],
)
def test_time_is_billed_as_the_provider_counts(
    clock: MeterClock, increment: int, minimum: int, seconds: float, usd: str
) -> None:
    """At 0.001 USD a second: begun seconds or minutes are billed in full, and at least the minimum."""
    meter = Meter(clock, increment, minimum)
    meter.start(machine("a", 3.6), clock())
    clock.go(seconds)
    assert meter.total() == Decimal(usd)
    final = meter.final()
    assert final is not None
    assert final.total_cost == float(usd)


def test_a_price_may_be_given_and_a_machine_is_counted_once(clock: MeterClock, meter: Meter) -> None:
    """The price in the ledger counts, not that of the machine."""
    meter.start(machine("a", 2.0), clock(), Price(Decimal(5)))
    clock.go(3600)
    meter.start(machine("a", 7.0), clock())
    assert meter.total() == Decimal(5)


def test_a_machine_that_is_rented_again_is_billed_twice(clock: MeterClock, meter: Meter) -> None:
    """A host keeps its name: both rentals count, and its buckets are those of the second."""
    meter.start(machine("a", 1.0), clock())
    clock.go(3600)
    meter.end("a")
    meter.start(machine("a", 1.0), clock())
    clock.go(1800)
    assert meter.total() == Decimal("1.5")
    assert meter.buckets() == {"a": NOTHING | {Bucket.LAUNCHING: 1800.0}}
    final = meter.final()
    assert final is not None
    assert final.buckets == {"launching": 1.5}


def test_an_id_that_comes_again_has_the_calls_of_its_own_rental(clock: MeterClock, meter: Meter) -> None:
    """The engine counts by id, also what the machine of before has counted: a provider may give the id again."""
    for seen, ran in ((500.0, 500.0), (505.0, 5.0), (512.0, 7.0)):
        meter.start(machine("a", 1.0), clock())
        meter.enter("a", Bucket.IDLE)
        clock.go(1000)
        meter.seen_running("a", seen)
        meter.seen_running("a", seen - 1)
        assert meter.buckets()["a"][Bucket.RUNNING_CALLS] == ran
        meter.end("a")
    final = meter.final()
    assert final is not None
    assert final.buckets["running calls"] == pytest.approx(512 / 3600, abs=1e-5)


def test_the_committed_cost_counts_each_machine_to_its_hard_end(clock: MeterClock) -> None:
    """A machine that is gone counts with its cost; one without a hard end, or past it, until now."""
    meter = Meter(clock, increment_seconds=3600)
    for name in "abcd":
        meter.start(machine(name, 1.0), clock())
    clock.go(5400)
    meter.end("a")
    clock.go(3600)
    hard_ends = {"a": 1000.0 + 100 * 3600, "b": 1000.0 + 7 * 3600 + 1, "c": 1001.0}
    assert meter.committed(hard_ends) == 2 + 8 + 3 + 3
    assert meter.committed({}) == meter.total() == 2 + 3 + 3 + 3


def test_a_projected_bill_counts_the_machines_that_are_rented_now(clock: MeterClock) -> None:
    """With the billing minimum and begun increments at that time. A time in the past counts as now."""
    meter = Meter(clock, increment_seconds=60, minimum_seconds=600)
    meter.start(machine("a", 3.6), clock())
    meter.start(machine("b", 3.6), clock())
    clock.go(700)
    meter.end("b")
    assert meter.projected(1000.0) == meter.total() == Decimal("1.44")
    assert meter.projected(1000.0 + 901) == Decimal("0.72") + Decimal("0.96")
    meter.start(machine("c", 3.6), clock())
    assert meter.projected(clock() + 1) == meter.total() == Decimal("1.44") + Decimal("0.6")


def test_each_second_falls_into_the_bucket_of_its_phase(clock: MeterClock, meter: Meter) -> None:
    """Late reports change nothing: a lost or terminating machine is not ready again, and `gone` is final."""
    meter.start(machine("a", 1.0), clock())
    for seconds, phase in enumerate(PHASES[1:], 1):
        clock.go(seconds)
        meter.enter("a", phase)
    clock.go(4)
    for phase in PHASES:
        meter.enter("a", phase)
    clock.go(1)
    meter.end("a")
    clock.go(100)
    meter.enter("a", Bucket.LOST, at=1001.0)
    meter.enter("unheard of", Bucket.IDLE)
    phases = (*PHASES, Bucket.RUNNING_CALLS, Bucket.WARM)
    assert meter.buckets() == {"a": dict(zip(phases, (1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0), strict=True))}
    with pytest.raises(ValueError, match="`ran`"):
        meter.enter("a", Bucket.RUNNING_CALLS)


def test_a_phase_may_have_begun_before_it_is_reported(clock: MeterClock, meter: Meter) -> None:
    """The reported time counts, but never before the previous phase or after now."""
    meter.start(machine("a", 1.0), clock())
    clock.go(10)
    meter.enter("a", Bucket.BOOTSTRAPPING, at=1004.0)
    meter.enter("a", Bucket.IDLE, at=1002.0)
    meter.enter("a", Bucket.LOST, at=5000.0)
    clock.go(1)
    assert meter.buckets() == {"a": NOTHING | {Bucket.LAUNCHING: 4.0, Bucket.IDLE: 6.0, Bucket.LOST: 1.0}}


def ready(slots: int = 4) -> tuple[MeterClock, Meter]:
    """A meter with one machine at 3.6 USD an hour that has been ready for 100 s."""
    clock = MeterClock()
    meter = Meter(clock)
    meter.start(machine("a", 3.6), clock())
    meter.slots("a", slots)
    meter.enter("a", Bucket.IDLE)
    clock.go(100)
    return clock, meter


def test_calls_take_one_slots_share_of_the_ready_time() -> None:
    """A call costs the price of one slot for its time. The shares are the cost of the bucket, which never exceeds the
    ready time.
    """
    _, meter = ready()
    shares = meter.ran("a", 40.0) + meter.ran("a", 60.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 25.0, Bucket.IDLE: 75.0}}
    assert shares == pytest.approx(0.025)
    assert meter.ran("unheard of", 1.0) == 0.0
    final = meter.final()
    assert final is not None
    assert final.buckets["running calls"] == 0.025
    meter.ran("a", 1000.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 100.0}}


def test_the_time_of_running_calls_is_not_idle() -> None:
    """The node's count is visible before the end of a call, is not added to the call's own report, and does not shrink."""
    clock, meter = ready(slots=2)
    meter.seen_running("a", 90.0)
    meter.seen_running("a", 0.0)
    meter.seen_running("unheard of", 90.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 45.0, Bucket.IDLE: 55.0}}
    clock.go(10)
    meter.ran("a", 100.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 50.0, Bucket.IDLE: 60.0}}


def test_calls_before_the_loss_of_a_node_count_as_running() -> None:
    """A late report of a call counts as running; the time since the loss is lost."""
    clock, meter = ready(slots=1)
    meter.enter("a", Bucket.LOST)
    clock.go(20)
    meter.ran("a", 70.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 70.0, Bucket.IDLE: 30.0, Bucket.LOST: 20.0}}


def bill(price: Decimal, increment: int, minimum: int, milliseconds: int) -> int:
    """Return whole micro-dollars, computed with fractions; `Price.cost` computes them in another way."""
    seconds = max(ceil(Fraction(milliseconds, 1000 * increment)) * increment, minimum)
    return ceil(Fraction(price) * 1_000_000 * seconds / 3600)


RECORDED = {Bucket.LAUNCHING: 10.0, Bucket.BOOTSTRAPPING: 20.0, Bucket.RUNNING_CALLS: 30.0, Bucket.IDLE: 40.0}
"""What another process has recorded of the first 100 s of a machine at a cent a second."""


def recorded(seconds: Mapping[Bucket, float], gone_at: datetime | None = None) -> Intent:
    request = ("fake", "r", "sky-1-0", "t", {}, Price(Decimal(36)), NOON, NOON)
    return Intent(1, "sky-1", ResourceKind.INSTANCE, *request, "m", NOON, None, gone_at, None, seconds)


def adopted(entry: Intent, after: float) -> tuple[MeterClock, Meter]:
    """A meter that goes on with an entry so many seconds after noon, as a new steward does."""
    clock = MeterClock()
    meter = Meter(clock)
    meter.adopt(metered_of(entry, NOON + timedelta(seconds=after), clock(), 2))
    return clock, meter


def test_adopted_time_goes_on_in_the_phase_of_the_last_record() -> None:
    """With the calls of all processes: the node's own count includes those of before."""
    clock, meter = adopted(recorded(RECORDED), 107)
    meter.adopt(metered_of(recorded(RECORDED), NOON + timedelta(seconds=107), clock(), 2))  # it is counted already
    assert meter.buckets()["m"] == {**NOTHING, **RECORDED, Bucket.IDLE: 47.0}
    clock.go(3)
    assert meter.total() == Decimal("1.10")
    meter.seen_running("m", 70.0)
    spent = meter.buckets()["m"]
    assert (spent[Bucket.RUNNING_CALLS], spent[Bucket.IDLE]) == (35.0, 45.0)


@pytest.mark.parametrize(
    ("more", "after", "expected"),
    [
        ({Bucket.WARM: 100.0, Bucket.LOST: 5.0}, 215, {Bucket.IDLE: 140.0, Bucket.LOST: 15.0}),
        ({Bucket.LOST: 5.0}, 115, {Bucket.LOST: 15.0}),
        ({Bucket.TERMINATING: 5.0}, 115, {Bucket.TERMINATING: 15.0}),
        ({}, 90, {Bucket.IDLE: 40.0}),
    ],
    ids=["warm time is idle here", "lost", "terminating", "a clock that is behind makes no time shorter"],
)
def test_what_adopted_time_is(more: dict[Bucket, float], after: float, expected: dict[Bucket, float]) -> None:
    _, meter = adopted(recorded(RECORDED | more), after)
    spent = meter.buckets()["m"]
    assert {bucket: spent[bucket] for bucket in expected} == expected
    assert sum(spent.values()) == max(100.0, after)


def test_an_adopted_machine_that_is_gone_costs_what_was_recorded() -> None:
    clock, meter = adopted(recorded(RECORDED, gone_at=NOON + timedelta(seconds=100)), 500)
    clock.go(100)
    assert (meter.total(), meter.rented()) == (Decimal("1.00"), set())


def test_the_result_of_a_batch_replaces_lost_reports() -> None:
    """It has the same outcomes, and the duration of each call."""
    returned = ReportedOutcomes({"c": Outcome("c", OutcomeKind.RESULT, seconds=2.0)}, 0, "i-1")
    back = pickle.loads(pickle.dumps(returned))
    assert (back.node, back.instance_id, back["c"].seconds) == (0, "i-1", 2.0)
