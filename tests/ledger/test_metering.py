"""The bill is price times time, by a clock that the test sets; and each second has one bucket."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core import CostFinal, Instance, InstanceState
from skyward_core.engine.futures import CallFuture
from skyward_core.ledger.metering import PHASES, Meter, cost_by_bucket
from skyward_core.ledger.rows import BILLING_ROUNDING, Bucket, Price
from skyward_core.machines.offers import by_month
from skyward_core.worker.streams import ReportedOutcomes
from skyward_core.worker.wire import Outcome, OutcomeKind
from tests.conftest import RecordedEvents, shared, wait_until

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


# ── the bill ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_machine_costs_its_price_for_each_hour() -> None:
    """90 minutes at 2 USD an hour are 3 USD; the rate is that of the machines rented now."""
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 2.0), at=clock())
    clock.seconds += 5400
    update = meter.update()
    assert update.accumulated_cost == 3.0
    assert (update.elapsed_seconds, update.hourly_rate, update.spot_count, update.ondemand_count) == (5400.0, 2.0, 0, 1)


def test_extras_are_counted_with_their_machine() -> None:
    """This also holds if only a listing shows the machine. The on-demand cost includes them."""
    clock = Clock()
    meter = Meter(clock)
    disk = by_month("disk", 72.0, "a price page", "2026-11-22")  # 0.1 USD an hour
    spot = machine("a", 2.0, on_demand=5.0, is_spot=True).model_copy(update={"extras_per_hour": (disk,)})
    meter.start(spot, at=clock())
    clock.seconds += 3600
    assert meter.update().accumulated_cost == 2.1
    assert meter.update().hourly_rate == 2.1


def test_a_machine_is_billed_from_its_request() -> None:
    """This also holds if the meter learns of it later."""
    clock = Clock()
    meter = Meter(clock)
    asked_at = meter.now()
    clock.seconds += 1800
    meter.start(machine("a", 2.0), asked_at)
    assert meter.update().accumulated_cost == 1.0


def test_a_machine_that_is_gone_costs_nothing_more() -> None:
    """After `end` its cost does not change, also after a second `end`."""
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
    """`final` returns the bill over all machines ever rented, with the savings of spot, and never a second one."""
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
    """Its bill is zero."""
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
    """At 3.60 USD an hour, which is 0.001 a second: begun seconds or minutes are billed in full, and at least the
    minimum.
    """
    clock = Clock()
    meter = Meter(clock, increment, minimum)
    meter.start(machine("a", 3.6), clock())
    clock.seconds += seconds
    assert meter.total() == Decimal(usd)
    final = meter.final()
    assert final is not None
    assert final.total_cost == float(usd)


def test_a_price_may_be_given() -> None:
    """The price in the ledger counts, not that of the machine. A counted machine is not counted again."""
    clock = Clock()
    meter = Meter(clock)
    meter.start(machine("a", 2.0), clock(), Price(Decimal(5)))
    clock.seconds += 3600
    meter.start(machine("a", 7.0), clock())
    assert meter.total() == Decimal(5)


def test_a_machine_that_is_rented_again_is_billed_twice() -> None:
    """A host keeps its name: both rentals count, and its buckets are those of the second."""
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


# ── projections ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_committed_cost_counts_each_machine_to_its_hard_end() -> None:
    """A machine that is gone counts with its cost; one without a hard end, or past it, until now."""
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
    """It includes the billing minimum and begun increments at that time. A time in the past counts as now."""
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


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_second_falls_into_the_bucket_of_its_phase() -> None:
    """From the request until it is known to be gone, a machine is launching, bootstrapping, ready, lost or
    terminating.
    """
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
    """Late reports change nothing: a lost or terminating machine is not ready again, and `gone` is final."""
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
    """The reported time counts, but never before the previous phase or after now."""
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
    """The error names the right method."""
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
    """A call of 40 s on one of four slots makes 10 s of running calls, and costs the price of one slot for 40 s. The
    shares are that bucket's cost.
    """
    _, meter = ready()
    shares = meter.ran("a", 40.0) + meter.ran("a", 60.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 25.0, Bucket.IDLE: 75.0}}
    assert shares == pytest.approx(0.025)
    assert meter.ran("unheard of", 1.0) == 0.0
    final = meter.final()
    assert final is not None
    assert final.buckets["running calls"] == 0.025


def test_running_time_never_exceeds_ready_time() -> None:
    """Calls may report more than that."""
    _, meter = ready()
    meter.ran("a", 1000.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 100.0}}


def test_the_time_of_running_calls_is_not_idle() -> None:
    """The node's count is visible before the end of a call. It is not added to the call's own report, and does not
    shrink.
    """
    clock, meter = ready(slots=2)
    meter.seen_running("a", 90.0)
    meter.seen_running("a", 0.0)
    meter.seen_running("unheard of", 90.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 45.0, Bucket.IDLE: 55.0}}
    clock.seconds += 10
    meter.ran("a", 100.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 50.0, Bucket.IDLE: 60.0}}


def test_calls_before_the_loss_of_a_node_count_as_running() -> None:
    """A late report of a call counts as running; the time since the loss is lost."""
    clock, meter = ready(slots=1)
    meter.enter("a", Bucket.LOST)
    clock.seconds += 20
    meter.ran("a", 70.0)
    assert meter.buckets() == {"a": NOTHING | {Bucket.RUNNING_CALLS: 70.0, Bucket.IDLE: 30.0, Bucket.LOST: 20.0}}


# ── any history ──────────────────────────────────────────────────────────────────────────────────────────────────────

type Step = Callable[[Clock, Meter, str], object]

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


def bill(price: Decimal, increment: int, minimum: int, milliseconds: int) -> int:
    """Return whole micro-dollars, computed with fractions; `Price.cost` computes them in another way."""
    seconds = max(ceil(Fraction(milliseconds, 1000 * increment)) * increment, minimum)
    return ceil(Fraction(price) * 1_000_000 * seconds / 3600)


@pytest.mark.slow
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
    """In any history, buckets add up to the life and their costs to the bill. The bill only grows, and equals the
    ledger's bill of rounded milliseconds.
    """
    clock = Clock()
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
    """Calls that end in many threads at once are all counted."""
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


# ── a call's share, on real nodes ────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error"), [(sleep, type(None)), (fail, KeyError), (leave, sky.CallCrashed), (crash, sky.CallCrashed)]
)
def test_a_call_has_its_time_and_its_share(bought: Bought, call: Any, error: type[BaseException]) -> None:
    """After its end of any kind: the time in its slot, and its cost, which is in the bucket of running calls."""
    before = bought.running_seconds()
    future = bought.submit(call(0.3))
    assert (future.seconds, future.cost) == (None, None)
    assert isinstance(future.exception(60), error)
    assert future.seconds is not None
    assert 0.3 <= future.seconds < 60
    assert future.cost == pytest.approx(future.seconds)
    # the node counts a running call from a little earlier on
    assert bought.running_seconds() - before == pytest.approx(future.seconds, abs=0.2)


@pytest.mark.slow
def test_shares_add_up_to_the_cost_of_running_calls(bought: Bought) -> None:
    """Of two hundred calls, sent in batches, each has its own time; together their shares are the bucket's growth."""
    before = bought.running_seconds()
    futures = [bought.submit(sleep(index / 10_000)) for index in range(200)]
    costs = [future.cost or 0.0 for future in futures if future.result(60) is None]
    assert all(cost >= index / 10_000 for index, cost in enumerate(costs))
    # the node counts a running call from a little earlier on
    assert sum(costs) == pytest.approx(bought.running_seconds() - before, abs=0.2)


def test_a_cancelled_call_is_billed(bought: Bought) -> None:
    """The call has no time, but the bill includes it."""
    before = bought.running_seconds()
    future = bought.begin(60.0)
    future.cancel()
    assert (future.seconds, future.cost) == (None, None)
    wait_until(lambda: bought.running_seconds() > before, "the cancelled call to be counted", 30)


@pytest.mark.slow
def test_a_long_call_is_metered_before_its_end(bought: Bought) -> None:
    """The node's count arrives every few seconds, so the running time of a killed client is recorded."""
    before = bought.running_seconds()
    future = bought.begin(60.0)
    wait_until(lambda: bought.running_seconds() > before + 1.0, "the running call to be counted", 30)
    assert not future.done()
    counted = bought.running_seconds()
    future.cancel()
    wait_until(lambda: bought.running_seconds() > counted, "the rest of it to be counted", 30)
    assert bought.running_seconds() < counted + 30


def test_the_result_of_a_batch_replaces_lost_reports(bought: Bought) -> None:
    """It has the same outcomes, and the duration of each call."""
    returned = ReportedOutcomes({"c": Outcome("c", OutcomeKind.RESULT, seconds=2.0)}, 0, bought.instance_id)
    back = pickle.loads(pickle.dumps(returned))
    assert (back.node, back.instance_id, back["c"].seconds) == (0, bought.instance_id, 2.0)
