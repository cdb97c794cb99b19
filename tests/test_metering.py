"""The bill: price times time, by a clock that the test turns."""

import pytest

from skyward_core import CostFinal, Instance, InstanceState
from skyward_core.provisioning.metering import Meter


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


def test_a_machine_costs_its_price_for_each_hour() -> None:
    """90 minutes at 2 USD an hour are 3 USD; the rate is that of the machines rented now."""
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 2.0), at=clock())
    clock.seconds += 5400
    update = meter.update()
    assert update.accumulated_cost == pytest.approx(3.0)
    assert (update.elapsed_seconds, update.hourly_rate, update.spot_count, update.ondemand_count) == (5400.0, 2.0, 0, 1)


def test_the_time_counts_from_the_asking() -> None:
    """A machine that is noted late is billed from when it was asked for."""
    clock = Clock()
    meter = Meter(clock)
    asked_at = meter.now()
    clock.seconds += 1800
    meter.start(machine("a", 2.0), asked_at)
    assert meter.update().accumulated_cost == pytest.approx(1.0)


def test_a_machine_that_is_gone_costs_no_more() -> None:
    """After `end` a machine's share of the bill stands still, also when it is ended again."""
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 1.0), clock())
    meter.start(machine("b", 10.0), clock())
    clock.seconds += 3600
    meter.end("b")
    clock.seconds += 3600
    meter.end("b")
    meter.end("unheard of")
    assert meter.update().accumulated_cost == pytest.approx(12.0)
    assert meter.update().hourly_rate == 1.0
    assert meter.rented() == {"a"}
    meter.end_all()
    clock.seconds += 3600
    assert meter.update().accumulated_cost == pytest.approx(12.0)
    assert meter.rented() == set()


def test_the_whole_bill_comes_once() -> None:
    """`final` gives the bill over all machines there were, with what spot has saved, and never a second one."""
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 3.0, on_demand=9.0, is_spot=True), clock())
    meter.start(machine("b", 2.0), clock())
    clock.seconds += 1800
    meter.end("b")
    clock.seconds += 1800
    meter.end_all()
    clock.seconds += 60
    assert meter.final() == CostFinal(
        total_cost=pytest.approx(4.0), total_seconds=3660.0, hourly_rate=5.0, spot_count=1, ondemand_count=1, savings_vs_ondemand=pytest.approx(6.0)
    )
    assert meter.final() is None
    assert meter.final() is None


def test_nothing_rented_costs_nothing() -> None:
    """A pool that got no machine has a bill too: zero."""
    assert Meter(Clock()).final() == CostFinal(0.0, 0.0, 0.0, 0, 0, 0.0)
