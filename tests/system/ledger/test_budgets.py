"""Spending limits: no history of launches and losses costs more than `max_cost`, and no interval begins unreserved."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core.errors import BudgetExceeded
from skyward_core.ledger.budgets import Commitment, Fill
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period, Price
from tests.conftest import examples
from tests.ledger.fixtures import LEASE_SECONDS, MeterClock, machine
from tests.unit.ledger.test_budgets import (  # noqa: F401 - fixtures
    CENT,
    TEAM,
    Pool,
    clock,
    committed,
    end_all,
    ledger,
    opened,
    pool,
    reserved,
    usd,
    with_outage,
)


def test_of_many_threads_one_gets_the_money() -> None:
    it = pool(1.0)
    got: list[Commitment] = []
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        try:
            got.append(it.limit.commit(1, usd("1")))
        except BudgetExceeded:
            pass

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


prices = st.builds(
    lambda micro, increment, minimum: Price(
        Decimal(micro) / 1_000_000, increment_seconds=increment, minimum_seconds=minimum
    ),
    st.integers(1, 400_000_000) | st.integers(1, 2_000_000),
    st.sampled_from([1, 1, 7, 60, 3600]),
    st.sampled_from([0, 0, 60, 3600]),
)


@dataclass
class World:
    """The real machines: each ends at the end that it has received. The client may be dead."""

    it: Pool
    limit: Decimal
    ending: float
    began: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    price: dict[str, Price] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    asked: list[tuple[Commitment, int, float, Price]] = field(default_factory=list)
    lost: list[tuple[Commitment, int, float, Price]] = field(default_factory=list)
    """Launches whose answer was lost: their machines may live until their hard end."""
    pauses: int = 0

    def notify(self) -> set[str]:
        """Send the paid time to all machines that answer, one after the other; each message takes time."""
        heard = set[str]()
        for name in sorted(self.there - self.deaf):
            self.it.clock.seconds += self.pauses
            self._end_what_is_due()
            if name in self.gone or self.ends[name] - self.ending <= self.it.clock():
                continue  # it is ending, and receives no messages
            paid = self.it.limit.paid_seconds()
            if paid is not None:
                self.ends[name] = self.it.clock() + paid + self.ending
            heard.add(name)
            self.check()
        return heard

    @property
    def there(self) -> set[str]:
        return self.began.keys() - self.gone

    def launch(self, count: int, price: Price, along: Sequence[tuple[int, Price]] = ()) -> Commitment:
        return self.it.limit.commit(count, price, along=along, ending_seconds=self.ending, notify=self.notify)

    def came(self, count: int, began: float, price: Price, commitment: Commitment) -> None:
        ids = [f"m-{len(self.began) + index}" for index in range(count)]
        for name in ids:
            self.it.meter.start(machine(name), began, price)
            self.began[name], self.price[name], self.ends[name] = began, price, commitment.hard_end or 0.0
            assert (commitment.hard_end or 0.0) <= (commitment.latest_end or 0.0)
        self.it.limit.launched(ids, commitment)

    def end(self, name: str, at: float) -> None:
        self.ends[name] = at
        self.it.meter.end(name)
        self.gone.add(name)

    def pass_time(self, seconds: int) -> None:
        """Let time pass; each machine ends at the end that it has received."""
        moments = [self.ends[name] for name in self.there] + [
            commitment.hard_end or 0.0 for commitment, *_ in self.asked
        ]
        self.it.clock.seconds = min(
            [self.it.clock.seconds + seconds, *(at for at in moments if at >= self.it.clock.seconds)]
        )
        self._end_what_is_due()

    def _end_what_is_due(self) -> None:
        for name in [name for name in self.there if self.ends[name] <= self.it.clock.seconds]:
            self.end(name, self.ends[name])

    def check(self) -> None:
        now = self.it.clock()
        bill = sum(
            (
                self.price[name].cost((end if name in self.gone else max(end, now)) - self.began[name])
                for name, end in self.ends.items()
            ),
            Decimal(0),
        )
        for commitment, count, began, its in self.asked + self.lost:
            bill += count * its.cost((commitment.hard_end or 0.0) - began)
        assert bill <= self.limit


world_steps = st.lists(
    st.one_of(
        st.tuples(st.just("stand by"), st.integers(1, 2) | st.integers(1, 7)),
        st.tuples(st.just("stand by"), st.integers(1, 2) | st.integers(1, 7)),
        st.tuples(st.just("slow"), st.integers(1, 7)),
        st.tuples(st.just("lost"), st.integers(1, 3)),
        st.tuples(st.just("answer"), st.integers(0, 7)),
        st.tuples(st.just("refusal"), st.just(0)),
        st.tuples(st.just("gone"), st.integers(0, 20)),
        st.tuples(st.just("deaf"), st.integers(0, 20)),
        st.tuples(st.just("hears"), st.integers(0, 20)),
        st.tuples(st.just("turn"), st.just(0)),
        st.tuples(st.just("beat"), st.just(0)),
        st.tuples(st.just("pass"), st.sampled_from([1, 59, 600, 4000]) | st.integers(0, 20_000)),
    ),
    max_size=25,
)


@pytest.mark.generated
@settings(max_examples=examples(400), deadline=None)
@given(
    limit=st.integers(1, 50_000_000) | st.integers(1, 3_000_000),
    price=prices,
    other=prices,
    ending=st.sampled_from([0.0, 0.0, 1.0, 60.0]),
    pauses=st.sampled_from([0, 0, 1, 40]),
    steps=world_steps,
)
def test_no_history_of_parts_and_replacements_can_cost_more(
    limit: int, price: Price, other: Price, ending: float, pauses: int, steps: list[tuple[str, int]]
) -> None:
    """At no moment could the machines cost more if they all ended by their own clocks."""
    it = pool(limit / 1_000_000)
    world = World(it, Decimal(limit) / 1_000_000, ending)
    try:
        first = world.launch(2, price, [(1, other)])
    except BudgetExceeded:
        return
    world.came(2, it.clock(), price, first)
    world.check()
    second = world.launch(1, other)
    assert second.hard_end == first.hard_end
    world.came(1, it.clock(), other, second)
    world.check()
    world.pauses = pauses
    for step, (what, number) in enumerate(steps):
        its = price if step % 3 else other
        names = sorted(world.there)
        try:
            if what == "stand by":
                commitment = world.launch(number, its)
                world.came(number, it.clock(), its, commitment)
            elif what == "slow":
                world.asked.append((world.launch(number, its), number, it.clock(), its))
            elif what == "lost":
                world.lost.append((world.launch(number, its), number, it.clock(), its))
        except BudgetExceeded:
            pass
        if what == "answer" and world.asked:
            commitment, wanted, began, its = world.asked.pop(0)
            world.came(min(number, wanted), began, its, commitment)
        elif what == "refusal" and world.asked:
            it.limit.returned(world.asked.pop()[0])
        elif what == "gone" and names:
            world.end(names[number % len(names)], it.clock())
        elif what == "deaf" and names:
            world.deaf.add(names[number % len(names)])
        elif what == "hears":
            world.deaf.clear()
        elif what == "turn":
            it.limit.check()
        elif what == "beat":
            world.pauses = 0
            world.notify()
            world.pauses = pauses
        elif what == "pass":
            world.pass_time(number)
        world.check()


def test_a_launch_that_was_never_answered_is_not_reserved_forever(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "1000")
    it.limit.commit(1, CENT)
    for _ in range(3600):
        it.limit.check()
        clock.seconds += 1.0
    assert reserved(ledger) == 360 * Decimal("0.01")


def test_reservations_are_renewed_while_time_passes(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "1000")
    it.launch(2, CENT)
    for _ in range(1200):
        assert it.limit.check() == (Fill.FULL, "")
        assert it.paid >= LEASE_SECONDS
        held = committed(ledger, "1000")
        assert it.meter.projected(clock() + it.paid) <= held <= it.meter.total() + 2 * (120 + 2 * 120) * Decimal("0.01")
        clock.go(1)


def test_an_empty_account_warns_drains_and_ends_the_pool_in_its_paid_time(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "20")
    it.launch(1, CENT)
    assert it.go_until(Fill.USED_UP) == [Fill.FULL, Fill.WARNED, Fill.DRAINED, Fill.USED_UP]
    fill, reason = it.limit.check()
    assert (fill, TEAM in reason, "left of 20" in reason) == (Fill.USED_UP, True, True)
    assert 13.0 <= it.paid <= 15.0
    clock.go(it.paid)
    assert it.meter.total() <= committed(ledger, "20") <= 20


def test_new_money_in_the_account_ends_the_warning(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "20")
    it.launch(1, CENT)
    it.go_until(Fill.DRAINED)
    ledger.set_account(Account(TEAM, Decimal("50"), Period.MONTH))
    clock.seconds += 1.0
    assert it.limit.check() == (Fill.FULL, "")
    assert it.limit.paid_seconds() == 2 * LEASE_SECONDS


def test_paid_seconds_does_not_wait_for_the_ledger(ledger: Ledger, clock: MeterClock) -> None:
    it, accounts = with_outage(ledger, clock)
    seen: list[float | None] = []
    thread = threading.Thread(target=lambda: seen.append(it.limit.paid_seconds()))

    def look_meanwhile() -> None:
        thread.start()
        thread.join(10.0)

    accounts.meanwhile = look_meanwhile
    clock.seconds += 200
    it.limit.check()
    assert seen == [160.0]


def test_a_check_does_not_wait_for_messages_to_nodes() -> None:
    it = pool(10.0)
    it.launch(1, usd("1"))
    seen: list[tuple[Fill, str]] = []
    thread = threading.Thread(target=lambda: seen.append(it.limit.check()))

    def notify() -> set[str]:
        thread.start()
        thread.join(10.0)
        assert seen == [(Fill.FULL, "")]
        return it.meter.rented()

    it.limit.commit(1, usd("1"), notify=notify)
    assert thread.ident is not None


pool_steps = st.lists(
    st.tuples(
        st.sampled_from(["launch", "launch", "slow launch", "answer", "refusal", "gone", "pass", "pass", "pass"]),
        st.integers(0, 1),
        st.integers(1, 3),
        st.sampled_from([1.0, 30.0, 90.0]),
    ),
    max_size=30,
)


@pytest.mark.generated
@settings(max_examples=examples(200), deadline=None)
@given(
    limit=st.integers(1, 60),
    price=st.sampled_from([CENT, usd("7.2"), usd("12", increment=60), usd("3.6", minimum=600)]),
    steps=pool_steps,
)
def test_two_pools_on_one_account_never_overdraw_it(
    tmp_path_factory: pytest.TempPathFactory, limit: int, price: Price, steps: Sequence[tuple[str, int, int, float]]
) -> None:
    """Each pool's machines could run for the time that they have received without overspending."""
    clock = MeterClock()
    with Ledger(f"sqlite:///{tmp_path_factory.mktemp('ledger')}/l.db", clock=clock.date) as ledger:
        pools = [opened(ledger, clock, str(limit), f"sky-{index}") for index in (0, 1)]
        asked: tuple[list[tuple[Commitment, int, float]], ...] = ([], [])
        for what, index, number, seconds in steps:
            it = pools[index]
            try:
                if what == "launch":
                    it.launch(number, price)
                elif what == "slow launch":
                    asked[index].append((it.limit.commit(number, price), number, clock()))
            except BudgetExceeded:
                pass
            if what == "answer" and asked[index]:
                commitment, count, began = asked[index].pop()
                ids = [f"m-{len(it.names) + one}" for one in range(count)]
                for name in ids:
                    it.meter.start(machine(name), began, price)
                it.limit.launched(ids, commitment)
                it.names += ids
            elif what == "refusal" and asked[index]:
                it.limit.returned(asked[index].pop()[0])
            elif what == "gone" and it.names:
                it.meter.end(it.names[number % len(it.names)])
            elif what == "pass":
                for _ in range(int(seconds)):
                    clock.seconds += 1.0
                    for one in pools:
                        one.limit.check()
                        if not one.limit.paid_seconds():
                            end_all(one.meter)
            assert ledger.left_usd(TEAM, "sky-0") >= 0
            spent = sum((one.meter.total() for one in pools), Decimal(0))
            could = sum((one.meter.projected(clock() + (one.limit.paid_seconds() or 0.0)) for one in pools), Decimal(0))
            assert spent <= could <= committed(ledger, str(limit), "sky-0")
        for it, pool_id in zip(pools, ("sky-0", "sky-1"), strict=True):
            end_all(it.meter)
            ledger.settle_pool(pool_id, it.meter.total())
        assert committed(ledger, str(limit), "sky-0") == sum((one.meter.total() for one in pools), Decimal(0))
