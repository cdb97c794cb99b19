"""The bill is price times time, by a clock that the test sets; and each second has one bucket."""

from decimal import Decimal
from fractions import Fraction
from math import ceil

import pytest

from skyward_core import CostFinal, Instance, InstanceState
from skyward_core.ledger.metering import PHASES, Meter
from skyward_core.ledger.rows import Bucket, Price
from skyward_core.machines.offers import by_month

NOTHING = dict.fromkeys(Bucket, 0.0)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def machine(name: str, price: float, *, on_demand: float | None = None, is_spot: bool = False) -> Instance:
    return Instance(
        id=name,
        provider="fake",
        pool_id="sky-1",
        rank=0,
        state=InstanceState.RUNNING,
        region="r",
        instance_type="t",
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=on_demand,
    )


def end_all(meter: Meter) -> None:
    for instance_id in meter.rented():
        meter.end(instance_id)


def test_a_machine_costs_its_price_for_each_hour() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 2.0), at=clock())
    clock.seconds += 5400
    update = meter.update()
    assert update.accumulated_cost == 3.0
    assert (update.elapsed_seconds, update.hourly_rate, update.spot_count, update.ondemand_count) == (5400.0, 2.0, 0, 1)


def test_extras_are_counted_with_their_machine() -> None:
    clock = Clock()
    meter = Meter(clock)
    disk = by_month("disk", 72.0, "a price page", "2026-11-22")  # 0.1 USD an hour
    spot = machine("a", 2.0, on_demand=5.0, is_spot=True).model_copy(update={"extras_per_hour": (disk,)})
    meter.start(spot, at=clock())
    clock.seconds += 3600
    assert meter.update().accumulated_cost == 2.1
    assert meter.update().hourly_rate == 2.1


def test_a_machine_is_billed_from_its_request() -> None:
    clock = Clock()
    meter = Meter(clock)
    asked_at = meter.now()
    clock.seconds += 1800
    meter.start(machine("a", 2.0), asked_at)
    assert meter.update().accumulated_cost == 1.0


def test_a_machine_that_is_gone_costs_nothing_more() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 1.0), clock())
    meter.start(machine("b", 10.0), clock())
    clock.seconds += 3600
    meter.end("b")
    clock.seconds += 3600
    meter.end("b")
    meter.end("unheard of")
    assert meter.update().accumulated_cost == 12.0
    assert meter.update().hourly_rate == 1.0
    assert meter.rate() == Decimal(1)
    assert meter.rented() == {"a"}
    end_all(meter)
    clock.seconds += 3600
    assert meter.total() == Decimal(12)
    assert meter.rate() == 0
    assert meter.rented() == set()


def test_the_final_bill_is_returned_once() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 3.0, on_demand=9.0, is_spot=True), clock())
    meter.start(machine("b", 2.0), clock())
    clock.seconds += 1800
    meter.end("b")
    clock.seconds += 1800
    end_all(meter)
    clock.seconds += 60
    assert meter.final() == CostFinal(4.0, 3660.0, 5.0, 1, 1, 6.0, {"launching": 4.0})
    assert meter.final() is None
    assert meter.final() is None


def test_a_pool_without_machines_costs_nothing() -> None:
    assert Meter(Clock()).final() == CostFinal(0.0, 0.0, 0.0, 0, 0, 0.0)


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
def test_time_is_billed_as_the_provider_counts(increment: int, minimum: int, seconds: float, usd: str) -> None:
    clock = Clock()
    meter = Meter(clock, increment, minimum)
    meter.start(machine("a", 3.6), clock())
    clock.seconds += seconds
    assert meter.total() == Decimal(usd)
    final = meter.final()
    assert final is not None
    assert final.total_cost == float(usd)


def test_a_price_may_be_given() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 2.0), clock(), Price(Decimal(5)))
    clock.seconds += 3600
    meter.start(machine("a", 7.0), clock())
    assert meter.total() == Decimal(5)


def test_a_machine_that_is_rented_again_is_billed_twice() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 1.0), clock())
    clock.seconds += 3600
    meter.end("a")
    meter.start(machine("a", 1.0), clock())
    clock.seconds += 1800
    assert meter.total() == Decimal("1.5")
    assert meter.buckets() == {"a": NOTHING | {Bucket.LAUNCHING: 1800.0}}
    final = meter.final()
    assert final is not None
    assert final.buckets == {"launching": 1.5}


def test_the_committed_cost_counts_each_machine_to_its_hard_end() -> None:
    clock = Clock()
    meter = Meter(clock, increment_seconds=3600)
    for name in "abcd":
        meter.start(machine(name, 1.0), clock())
    clock.seconds += 5400
    meter.end("a")
    clock.seconds += 3600
    hard_ends = {"a": 1000.0 + 100 * 3600, "b": 1000.0 + 7 * 3600 + 1, "c": 1001.0}
    assert meter.committed(hard_ends) == 2 + 8 + 3 + 3
    assert meter.committed({}) == meter.total() == 2 + 3 + 3 + 3


def test_a_projected_bill_counts_the_machines_that_are_rented_now() -> None:
    clock = Clock()
    meter = Meter(clock, increment_seconds=60, minimum_seconds=600)
    meter.start(machine("a", 3.6), clock())
    meter.start(machine("b", 3.6), clock())
    clock.seconds += 700
    meter.end("b")
    assert meter.projected(1000.0) == meter.total() == Decimal("1.44")
    assert meter.projected(1000.0 + 901) == Decimal("0.72") + Decimal("0.96")
    meter.start(machine("c", 3.6), clock())
    assert meter.projected(clock() + 1) == meter.total() == Decimal("1.44") + Decimal("0.6")


def test_each_second_falls_into_the_bucket_of_its_phase() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 1.0), clock())
    for seconds, phase in enumerate(PHASES[1:], 1):
        clock.seconds += seconds
        meter.enter("a", phase)
    clock.seconds += 5
    meter.end("a")
    clock.seconds += 100
    assert meter.buckets() == {
        "a": dict(zip((*PHASES, Bucket.RUNNING_CALLS, Bucket.WARM), (1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0), strict=True))
    }


def test_a_machine_never_goes_back_to_an_earlier_phase() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 1.0), clock())
    meter.enter("a", Bucket.TERMINATING)
    clock.seconds += 10
    for phase in PHASES:
        meter.enter("a", phase)
    meter.end("a")
    meter.enter("a", Bucket.TERMINATING)
    meter.enter("unheard of", Bucket.IDLE)
    meter.start(machine("b", 1.0), clock())
    clock.seconds += 10
    meter.end("b")
    meter.enter("b", Bucket.LOST, at=1012.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.TERMINATING: 10.0}, "b": NOTHING | {Bucket.LAUNCHING: 10.0}}


def test_a_phase_may_have_begun_before_it_is_reported() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 1.0), clock())
    clock.seconds += 10
    meter.enter("a", Bucket.BOOTSTRAPPING, at=1004.0)
    meter.enter("a", Bucket.IDLE, at=1002.0)
    meter.enter("a", Bucket.LOST, at=5000.0)
    clock.seconds += 1
    assert meter.buckets() == {"a": NOTHING | {Bucket.LAUNCHING: 4.0, Bucket.IDLE: 6.0, Bucket.LOST: 1.0}}


def test_running_is_not_a_phase() -> None:
    with pytest.raises(ValueError, match="`ran`"):
        Meter(Clock()).enter("a", Bucket.RUNNING_CALLS)


def ready(slots: int = 4, price: float = 3.6) -> tuple[Clock, Meter]:
    """A meter with one machine that has been ready for 100 s."""
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", price), clock())
    meter.slots("a", slots)
    meter.enter("a", Bucket.IDLE)
    clock.seconds += 100
    return clock, meter


def test_calls_take_one_slots_share_of_the_ready_time() -> None:
    _, meter = ready()
    shares = meter.ran("a", 40.0) + meter.ran("a", 60.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 25.0, Bucket.IDLE: 75.0}}
    assert shares == pytest.approx(0.025)
    assert meter.ran("unheard of", 1.0) == 0.0
    final = meter.final()
    assert final is not None
    assert final.buckets["running calls"] == 0.025


def test_running_time_never_exceeds_ready_time() -> None:
    _, meter = ready()
    meter.ran("a", 1000.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 100.0}}


def test_the_time_of_running_calls_is_not_idle() -> None:
    clock, meter = ready(slots=2)
    meter.seen_running("a", 90.0)
    meter.seen_running("a", 0.0)
    meter.seen_running("unheard of", 90.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 45.0, Bucket.IDLE: 55.0}}
    clock.seconds += 10
    meter.ran("a", 100.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 50.0, Bucket.IDLE: 60.0}}


def test_calls_before_the_loss_of_a_node_count_as_running() -> None:
    clock, meter = ready(slots=1)
    meter.enter("a", Bucket.LOST)
    clock.seconds += 20
    meter.ran("a", 70.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 70.0, Bucket.IDLE: 30.0, Bucket.LOST: 20.0}}


def bill(price: Decimal, increment: int, minimum: int, milliseconds: int) -> int:
    """Return whole micro-dollars, computed with fractions; `Price.cost` computes them in another way."""
    seconds = max(ceil(Fraction(milliseconds, 1000 * increment)) * increment, minimum)
    return ceil(Fraction(price) * 1_000_000 * seconds / 3600)
