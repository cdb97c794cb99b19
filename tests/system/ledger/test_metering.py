"""The bill is price times time, by a clock that the test sets; and each second has one bucket."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.engine.futures import CallFuture
from skyward_core.ledger.metering import PHASES, Meter, cost_by_bucket
from skyward_core.ledger.rows import BILLING_ROUNDING, Bucket, Price
from tests.conftest import RecordedEvents, shared
from tests.ledger.fixtures import MeterClock, machine
from tests.unit.ledger.test_metering import bill, ready
from tests.waiting import wait_until

type Step = Callable[[MeterClock, Meter, str], object]

NAMES = st.sampled_from("ab")
SECONDS = st.floats(0, 5000, allow_nan=False)
STEPS: st.SearchStrategy[Step] = st.one_of(
    SECONDS.map(lambda seconds: lambda clock, _meter, _name: setattr(clock, "seconds", clock.seconds + seconds)),
    st.tuples(st.sampled_from(PHASES), st.none() | SECONDS).map(
        lambda what: lambda _clock, meter, name: meter.enter(name, *what)
    ),
    SECONDS.map(lambda seconds: lambda _clock, meter, name: meter.ran(name, seconds)),
    SECONDS.map(lambda seconds: lambda _clock, meter, name: meter.seen_running(name, seconds)),
    st.integers(0, 8).map(lambda slots: lambda _clock, meter, name: meter.slots(name, slots)),
    st.just(lambda _clock, meter, name: meter.end(name)),
)
PRICES = st.decimals(0, 100, places=6)


@given(
    st.lists(st.tuples(NAMES, STEPS), max_size=30),
    PRICES,
    PRICES,
    st.sampled_from([1, 60, 3600]),
    st.sampled_from([0, 60, 3600]),
)
def test_every_second_is_in_one_bucket_and_billed(
    steps: list[tuple[str, Step]], price: Decimal, on_demand: Decimal, increment: int, minimum: int
) -> None:
    clock = MeterClock()
    meter = Meter(clock)
    paid = Price(price, on_demand, increment_seconds=increment, minimum_seconds=minimum)
    lives: dict[str, tuple[float, float | None]] = {"a": (1000.0, None), "b": (1003.0005, None)}
    for name, (started, _) in lives.items():
        meter.start(machine(name, 0.0), started, paid)
    clock.seconds = 1003.0005
    before, milliseconds = Decimal(0), dict[str, int]()
    for name, step in [("a", lambda *_: None), *steps]:
        step(clock, meter, name)
        if name not in meter.rented() and lives[name][1] is None:
            lives[name] = (lives[name][0], clock.seconds)
        milliseconds = {
            key: round(((clock.seconds if end is None else end) - start) * 1000) for key, (start, end) in lives.items()
        }
        buckets = meter.buckets()
        assert {key: sum(round(spent * 1000) for spent in its.values()) for key, its in buckets.items()} == milliseconds
        assert all(spent >= 0 for its in buckets.values() for spent in its.values())
        assert meter.total() * 1_000_000 == sum(
            bill(price, increment, minimum, spent) for spent in milliseconds.values()
        )
        costs = [
            cost_by_bucket(paid, {bucket: round(spent * 1000) for bucket, spent in its.items()})
            for its in buckets.values()
        ]
        assert all(list(its) == [*Bucket, BILLING_ROUNDING] and min(its.values()) >= 0 for its in costs)
        assert sum(sum(its.values()) for its in costs) == meter.total() >= before
        assert meter.projected(clock.seconds + 100) >= meter.total()
        before = meter.total()
    final = meter.final()
    assert final is not None
    assert final.total_cost == float(before)
    saved = sum(
        bill(on_demand, increment, minimum, spent) - bill(price, increment, minimum, spent)
        for spent in milliseconds.values()
    )
    assert final.savings_vs_ondemand == float(Decimal(saved) / 1_000_000)
    assert sum(final.buckets.values()) == pytest.approx(final.total_cost)


def test_many_threads_lose_no_second() -> None:
    _, meter = ready(slots=1000)

    def end_calls() -> None:
        for _ in range(2000):
            meter.ran("a", 1.0)
            meter.total()

    threads = [threading.Thread(target=end_calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.buckets()["a"][Bucket.RUNNING_CALLS] == 8.0


@sky.compute
def sleep(seconds: float) -> None:
    """Keep a slot busy."""
    print("begun")
    time.sleep(seconds)


@sky.compute
def crash(seconds: float) -> None:
    """Keep a slot busy, and kill its process."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@sky.compute
def leave(seconds: float) -> None:
    """Keep a slot busy, and exit as a program would."""
    time.sleep(seconds)
    raise SystemExit(3)


@sky.compute
def fail(seconds: float) -> None:
    """Keep a slot busy, and raise."""
    time.sleep(seconds)
    raise KeyError


@dataclass
class Bought:
    """A local node with two slots at 7200 USD an hour, which is one for each second of a slot; its meter, and the
    node's name in it.
    """

    pool: sky.ComputePool
    recorded: RecordedEvents
    meter: Meter
    instance_id: str

    def submit(self, pending: sky.PendingCompute[Any]) -> CallFuture[Any]:
        return cast("CallFuture[Any]", self.pool.submit(pending))

    def begin(self, seconds: float) -> CallFuture[Any]:
        """A call that has begun to sleep."""
        future = self.submit(sleep(seconds))
        wait_until(lambda: self.recorded.lines(future.call_id), "the call to begin", 30)
        return future

    def running_seconds(self) -> float:
        """Slot seconds in which calls ran, by the meter."""
        return self.meter.buckets()[self.instance_id][Bucket.RUNNING_CALLS] * 2


@pytest.fixture(scope="module")
def bought() -> Iterator[Bought]:
    """One node for all tests of this file."""
    recorded = RecordedEvents()
    with shared(
        sky.ComputePool(provider=sky.Local(price_per_hour=7200.0), concurrency=2, display="quiet", on_event=recorded)
    ) as pool:
        meter = cast(Any, pool)._session._opened.meter
        (instance_id,) = meter.rented()
        yield Bought(pool, recorded, meter, instance_id)


@pytest.mark.parametrize(
    ("call", "error"), [(sleep, type(None)), (fail, KeyError), (leave, sky.CallCrashed), (crash, sky.CallCrashed)]
)
def test_a_call_has_its_time_and_its_share(bought: Bought, call: Any, error: type[BaseException]) -> None:
    before = bought.running_seconds()
    future = bought.submit(call(0.3))
    assert (future.seconds, future.cost) == (None, None)
    assert isinstance(future.exception(60), error)
    assert future.seconds is not None
    assert 0.3 <= future.seconds < 60
    assert future.cost == pytest.approx(future.seconds)
    # the node counts a running call from a little earlier on
    assert bought.running_seconds() - before == pytest.approx(future.seconds, abs=0.2)


def test_shares_add_up_to_the_cost_of_running_calls(bought: Bought) -> None:
    before = bought.running_seconds()
    futures = [bought.submit(sleep(index / 10_000)) for index in range(200)]
    costs = [future.cost or 0.0 for future in futures if future.result(60) is None]
    assert all(cost >= index / 10_000 for index, cost in enumerate(costs))
    # the node counts a running call from a little earlier on
    assert sum(costs) == pytest.approx(bought.running_seconds() - before, abs=0.2)


def test_a_cancelled_call_is_billed(bought: Bought) -> None:
    before = bought.running_seconds()
    future = bought.begin(60.0)
    future.cancel()
    assert (future.seconds, future.cost) == (None, None)
    wait_until(lambda: bought.running_seconds() > before, "the cancelled call to be counted", 30)


def test_a_long_call_is_metered_before_its_end(bought: Bought) -> None:
    before = bought.running_seconds()
    future = bought.begin(60.0)
    wait_until(lambda: bought.running_seconds() > before + 1.0, "the running call to be counted", 30)
    assert not future.done()
    counted = bought.running_seconds()
    future.cancel()
    wait_until(lambda: bought.running_seconds() > counted, "the rest of it to be counted", 30)
    assert bought.running_seconds() < counted + 30
