"""Spending limits: no history of launches and losses costs more than `max_cost`, and no interval begins unreserved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from skyward_core.errors import BudgetExceeded, LeaseLost, LedgerError
from skyward_core.ledger.budgets import Commitment, Fill, SpendingLimit
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import Account, Period, Price, Reservation
from skyward_core.machines.owner import Owner
from tests.conftest import examples
from tests.ledger.fixtures import LEASE_SECONDS, NOON, MeterClock, machine, open_pool
from tests.ledger.fixtures import MeterClock as Clock  # noqa: F401 - tests/unit/provisioning takes it from here

HOUR = 3600.0
TEAM = "team"


def end_all(meter: Meter) -> None:
    for instance_id in meter.rented():
        meter.end(instance_id)


def usd(price: str, increment: int = 1, minimum: int = 0) -> Price:
    return Price(Decimal(price), increment_seconds=increment, minimum_seconds=minimum)


@dataclass
class Pool:
    """A pool with a spending limit, on a clock that the test sets."""

    clock: MeterClock
    meter: Meter
    limit: SpendingLimit
    names: list[str] = field(default_factory=list)

    def launch(self, machines: int, price: Price) -> Commitment:
        """Request machines and get them at once."""
        commitment = self.limit.commit(machines, price)
        self.came(machines, price, commitment)
        return commitment

    def came(self, machines: int, price: Price, commitment: Commitment) -> None:
        ids = [f"m-{len(self.names) + index}" for index in range(machines)]
        for name in ids:
            self.meter.start(machine(name), self.clock(), price)
        self.limit.launched(ids, commitment)
        self.names += ids

    @property
    def paid(self) -> float:
        paid = self.limit.paid_seconds()
        assert paid is not None
        return paid

    def go_until(self, fill: Fill, longest: float = 2 * HOUR) -> list[Fill]:
        """Check each second until the limit is reached; return the states on the way, each once."""
        seen: list[Fill] = []
        for _ in range(int(longest)):
            now, reason = self.limit.check()
            assert (reason != "") == (now > Fill.FULL)
            if not seen or seen[-1] != now:
                seen.append(now)
            if now >= fill:
                return seen
            self.clock.go(1)
        pytest.fail(f"{fill} did not come in {longest} s; seen {seen}")


CENT = usd("36")
"""A cent a second."""


def limited(clock: MeterClock, pool_id: str = "sky-1", **settings: Any) -> Pool:
    meter = Meter(clock)
    return Pool(clock, meter, SpendingLimit(pool_id, meter, lease_seconds=LEASE_SECONDS, **settings))


def pool(max_cost: float | None) -> Pool:
    return limited(MeterClock(), max_cost=max_cost)


@pytest.mark.parametrize(("max_cost", "price"), [(None, "1000"), (0.01, "0")], ids=["no limit", "free machines"])
def test_without_a_limit_or_a_price_nothing_ends(max_cost: float | None, price: str) -> None:
    it = pool(max_cost)
    commitment = it.launch(100, usd(price))
    assert (commitment.lifetime_seconds, commitment.hard_end) == (None, None)
    it.clock.go(1e6)
    assert it.limit.check() == (Fill.FULL, "")
    assert it.limit.paid_seconds() is None
    assert it.limit.commit(1, usd(price), least_seconds=1e9).hard_end is None


FIRST_MINUTE = "in their first minute; .* of max_cost"


@pytest.mark.parametrize(
    ("max_cost", "machines", "price", "ending", "words"),
    [
        (0.9999, 1, usd("60"), 0.0, FIRST_MINUTE),  # a minute at 60 USD an hour is 1 USD
        (1.99, 2, usd("60"), 0.0, FIRST_MINUTE),
        (0.5, 1, usd("60", minimum=60), 0.0, FIRST_MINUTE),
        (
            1.0,
            1,
            usd("3.6", minimum=3600),
            0.0,
            "in their first minute, of which they are billed 3600 s at least; .* of",
        ),
        (1.0, 1, usd("3.6", increment=3600), 0.0, "in their first minute"),  # a begun hour is billed in full
        (1.9, 1, usd("60"), 60.0, "in their first minute and the 60 s that their termination may take"),
    ],
)
def test_a_launch_whose_first_minute_is_not_covered_is_refused(
    max_cost: float, machines: int, price: Price, ending: float, words: str
) -> None:
    """Before the request. The error has the computation, a recommendation and the remaining money."""
    with pytest.raises(BudgetExceeded, match=rf"{words}.*Raise max_cost") as caught:
        pool(max_cost).limit.commit(machines, price, ending_seconds=ending)
    assert (caught.value.account, caught.value.left_usd) == ("", Decimal(repr(max_cost)))


@pytest.mark.parametrize(
    ("max_cost", "machines", "price", "ending", "hard_end", "lifetime"),
    [
        (1.0, 1, usd("60"), 0.0, 60, 54.0),  # a tenth is for the boot
        (2.0, 2, usd("60"), 0.0, 60, 54.0),
        (10.0, 2, usd("0.5"), 0.0, 10 * HOUR, 10 * HOUR - 120),  # 120 s at most
        (2.9, 1, usd("1", increment=3600), 0.0, 2 * HOUR, 2 * HOUR - 120),  # the last hour that is covered
        (2.0, 1, usd("60"), 60.0, 120, 54.0),
    ],
)
def test_a_hard_end_is_when_the_money_is_used_up(
    max_cost: float, machines: int, price: Price, ending: float, hard_end: float, lifetime: float
) -> None:
    it = pool(max_cost)
    commitment = it.limit.commit(machines, price, ending_seconds=ending)
    it.came(machines, price, commitment)
    assert commitment.hard_end == it.clock() + hard_end
    assert commitment.lifetime_seconds == pytest.approx(lifetime)
    assert it.paid == hard_end - ending


def test_committed_money_cannot_be_committed_again() -> None:
    """Neither while the first call is in flight, nor if its answer is lost; nor when its machines are there, until they
    are known to be gone.
    """
    it = pool(14.4)
    first = it.limit.commit(2, usd("7.2"))  # for an hour
    for step in (lambda: it.came(2, usd("7.2"), first), lambda: it.clock.go(600), lambda: it.meter.end("m-0")):
        with pytest.raises(BudgetExceeded) as caught:
            it.limit.commit(1, usd("7.2"))
        assert caught.value.left_usd == 0
        step()
    assert it.limit.commit(1, usd("7.2")).hard_end == it.clock() + 3000  # after 1.20 USD of 7.20
    lost = pool(10.0)
    lost.limit.commit(1, usd("10"))
    lost.clock.go(1800)
    with pytest.raises(BudgetExceeded):
        lost.limit.commit(1, usd("1"))


def test_the_money_of_a_refused_launch_is_free_again() -> None:
    """All of it, once. If fewer machines come than were requested, the rest is free too."""
    it = pool(10.0)
    commitment = it.limit.commit(2, usd("5"))
    it.limit.returned(commitment)
    it.limit.returned(commitment)
    again = it.limit.commit(2, usd("5"))
    assert again.hard_end == it.clock() + HOUR
    it.came(1, usd("5"), again)
    assert it.limit.commit(1, usd("5")).hard_end == it.clock() + HOUR


def test_the_money_of_a_launch_whose_answer_was_lost_is_free_when_its_machines_are_gone() -> None:
    """Other launches keep theirs."""
    it = pool(10.0)
    lost = it.limit.commit(1, usd("10"))
    it.meter.start(machine("found"), it.clock(), usd("10"))
    it.clock.go(1800)
    it.meter.end("found")
    it.limit.returned(lost)
    assert it.limit.commit(1, usd("10")).hard_end == it.clock() + 1800
    with pytest.raises(BudgetExceeded):
        it.limit.commit(1, usd("10"))


@pytest.mark.parametrize(("max_cost", "price"), [(1e6, "0.000001"), (float("inf"), "1")])
def test_money_for_longer_than_there_are_dates(max_cost: float, price: str) -> None:
    """Nothing overflows, because the ends of a commitment are recorded as dates."""
    commitment = pool(max_cost).limit.commit(1, usd(price))
    assert commitment.hard_end is None or NOON + timedelta(seconds=commitment.hard_end) < datetime(
        2037, 1, 1, tzinfo=UTC
    )


SPOT, ON_DEMAND = usd("1"), usd("3")


def granted(it: Pool, price: Price = ON_DEMAND, heard: set[str] | None = None, **words: Any) -> Commitment:
    """Launch one machine; `heard` are the machines that confirm their paid time, all by default."""
    commitment = it.limit.commit(1, price, notify=lambda: it.meter.rented() if heard is None else heard, **words)
    it.came(1, price, commitment)
    return commitment


@pytest.mark.parametrize("is_answered", [True, False])
def test_the_parts_of_a_pool_get_the_same_hard_end(is_answered: bool) -> None:
    """An on-demand and a spot machine at 3 and 1 USD last for 25 hours of 100 USD, both until the same time; the second
    is requested a little later, maybe before the first has come: the tags of that one have its end already.
    """
    it = pool(100.0)
    hard_end = it.clock() + 25 * HOUR
    first = it.limit.commit(1, ON_DEMAND, along=[(1, SPOT)])
    if is_answered:
        it.came(1, ON_DEMAND, first)
    it.clock.go(30)
    second = it.limit.commit(1, SPOT, notify=it.meter.rented)
    assert first.hard_end == second.hard_end == second.latest_end == hard_end


def test_parts_that_are_too_expensive_together_are_refused_before_the_first() -> None:
    it = pool(5.0)
    with pytest.raises(
        BudgetExceeded, match=r"1 x 3 USD per hour and 2 x 200 cost 6\.7166.. USD in their first minute"
    ):
        it.limit.commit(1, ON_DEMAND, along=[(2, usd("200"))])
    granted(it)


def test_another_machine_shortens_the_others_until_one_is_gone() -> None:
    it = pool(3.0)
    granted(it)
    horizon = it.clock() + HOUR
    commitment = granted(it)
    assert (commitment.hard_end, commitment.latest_end) == (it.clock() + HOUR / 2, horizon)
    assert it.limit.paid_seconds() == HOUR / 2
    it.clock.go(60)
    it.limit.check()
    assert it.limit.paid_seconds() == HOUR / 2 - 60
    it.meter.end("m-0")
    assert it.limit.check() == (Fill.FULL, "")
    assert it.limit.paid_seconds() == HOUR - 120  # both have cost a minute
    it.go_until(Fill.USED_UP)
    assert HOUR - 120 < it.clock() - 1000.0 <= HOUR - 60, "not when the second one would have ended at first"


def test_a_machine_that_does_not_confirm_an_earlier_end_keeps_its_end_and_its_money() -> None:
    it = pool(6.0)
    it.launch(2, ON_DEMAND)
    commitment = granted(it, heard={"m-1"})
    assert commitment.hard_end == it.clock() + HOUR / 2  # 3 USD are committed to the lost one
    assert it.limit.paid_seconds() == HOUR / 2
    it.clock.go(600)
    it.meter.end("m-2")  # half a USD
    it.limit.check()
    assert it.limit.paid_seconds() == 3000 - 600, "of 6 USD 3 are the lost one's to its own end"
    alone = pool(6.0)
    alone.launch(1, ON_DEMAND)
    with pytest.raises(BudgetExceeded):
        granted(alone, heard=set())
    alone.limit.check()
    assert alone.limit.paid_seconds() == 2 * HOUR, "it had an earlier end for a launch that failed"
    alone.meter.end("m-0")
    granted(alone)


def test_machines_that_confirm_too_late_are_committed_until_they_are_gone() -> None:
    it = pool(0.3)  # 300 s of one machine
    price = usd("3.6")
    it.came(1, price, it.limit.commit(1, price, ending_seconds=60))

    def notify() -> set[str]:
        it.clock.go(100)
        assert it.limit.paid_seconds() == 0
        return {"m-0"}

    commitment = it.limit.commit(1, price, ending_seconds=60, notify=notify)
    assert commitment.hard_end == it.clock() + 140  # of 300 s the first one has 100, and 60 for its end


def test_no_machine_lives_longer_than_its_tags_say() -> None:
    it = pool(10.0)
    it.launch(2, usd("5"))
    horizon = it.clock() + HOUR
    it.clock.go(600)
    it.meter.end("m-0")
    commitment = granted(it, SPOT)
    assert commitment.hard_end == commitment.latest_end == horizon
    it.clock.go(HOUR - 630)
    with pytest.raises(BudgetExceeded, match=r"end in 30 s"):
        granted(it, SPOT)
    end_all(it.meter)
    assert granted(it, SPOT).hard_end > horizon  # type: ignore[operator]


@pytest.mark.parametrize(("max_cost", "machines", "per_hour"), [(1.0, 1, "1"), (2.0, 3, "1.7"), (0.65, 1, "18")])
def test_the_time_of_a_termination_is_committed(max_cost: float, machines: int, per_hour: str) -> None:
    it = pool(max_cost)
    price, ending = usd(per_hour), 45.0
    it.came(machines, price, commitment := it.limit.commit(machines, price, ending_seconds=ending))
    assert commitment.hard_end is not None
    assert commitment.lifetime_seconds is not None
    assert 0 < commitment.lifetime_seconds < it.paid == commitment.hard_end - it.clock() - ending
    it.meter.start(machine("found"), it.clock(), usd("0.000001"))  # without a commitment
    it.go_until(Fill.USED_UP, 3 * HOUR)
    assert it.paid > 0
    it.clock.go(1 + ending)
    end_all(it.meter)
    assert it.meter.total() <= Decimal(repr(max_cost))


@pytest.mark.parametrize(
    ("max_cost", "machines", "per_hour"),
    [(0.1, 1, "1"), (1.0, 1, "1"), (2.0, 3, "1.7"), (50.0, 4, "8"), (0.5, 5, "0.9")],
)
@pytest.mark.parametrize("boot_seconds", [0.0, 20.0])
def test_it_warns_drains_and_is_used_up_in_time(
    max_cost: float, machines: int, per_hour: str, boot_seconds: float
) -> None:
    it = pool(max_cost)
    price = usd(per_hour)
    began = it.clock()
    commitment = it.launch(machines, price)
    assert commitment.lifetime_seconds is not None
    seen: dict[Fill, tuple[float, Decimal]] = {}
    while Fill.USED_UP not in seen:
        fill, reason = it.limit.check()
        if fill not in seen:
            assert not seen or fill > max(seen), "it goes one way only"
            seen[fill] = (it.clock(), it.meter.total())
            assert reason == "" if fill is Fill.FULL else "max_cost" in reason
        assert it.clock() - began < commitment.lifetime_seconds + boot_seconds, (
            "a node has ended itself before the pool has closed"
        )
        it.clock.go(1.0)
    assert list(seen) == [Fill.FULL, Fill.WARNED, Fill.DRAINED, Fill.USED_UP]
    limit = Decimal(repr(max_cost))
    assert Decimal("0.8") * limit <= seen[Fill.WARNED][1] < Decimal("0.81") * limit
    it.clock.seconds = seen[Fill.USED_UP][0] + 1.0 + 5.0  # the check was a second late; the teardown takes five
    assert it.meter.total() <= limit
    assert it.meter.total() > Decimal("0.85") * limit  # and not much too early


@pytest.mark.generated
@pytest.mark.parametrize("seed", range(examples(200)))
def test_a_client_that_sleeps_pays_no_more(seed: int) -> None:
    """A laptop sleeps at random, for seconds or hours. Its machines live on until their lease or their paid time is over, by
    their own clocks (the hard end in their tags would end them too). What they really cost stays below `max_cost`, and
    the bill is at least that.
    """
    chance = Random(seed)
    machines, max_cost, lease_seconds = chance.randint(1, 4), chance.choice([2.0, 10.0, 40.0]), chance.choice([12, 120])
    it = pool(max_cost)
    price = usd(chance.choice(["1", "3.6", "8"]))
    began = it.clock()
    it.launch(machines, price)
    ends_at = began + min(lease_seconds, it.paid)
    for _ in range(20_000):
        # most sleeps are shorter than the lease: machines outlive them, and each costs money that no process counts
        (seconds,) = chance.choices([1.0, 5.0, 25.0, 7200.0], [90, 5, 5, 0.01])
        it.clock.go(seconds)
        now = it.clock()
        if now >= ends_at:
            break  # they have ended themselves
        if it.limit.check()[0] is Fill.USED_UP:
            ends_at = now + 5.0  # the teardown takes so long
            break
        ends_at = now + min(lease_seconds, it.paid)
    real_seconds = ends_at - began
    real_usd = Decimal(real_seconds) * price.per_hour * machines / 3600
    assert real_usd <= Decimal(repr(max_cost))
    it.clock.seconds = max(it.clock(), began + real_seconds)
    end_all(it.meter)
    assert it.meter.total() >= real_usd


def test_an_hour_that_is_billed_is_used() -> None:
    it = pool(1.0)
    it.launch(1, usd("1", increment=3600))
    it.clock.go(1.0)
    assert it.meter.total() == 1
    assert it.go_until(Fill.USED_UP) == [Fill.WARNED, Fill.DRAINED, Fill.USED_UP]
    assert 3300 < it.clock() - 1000.0 < 3600


def test_the_first_machine_that_ends_counts() -> None:
    it = pool(3.0)
    it.launch(1, usd("1", increment=3600))  # all three hours
    it.clock.go(1.0)
    it.meter.end("m-0")
    commitment = it.limit.commit(1, usd("0.8", increment=3600))
    it.came(1, usd("0.8", increment=3600), commitment)
    assert commitment.hard_end == it.clock() + 2 * HOUR
    assert it.go_until(Fill.USED_UP, 3 * HOUR)[-1] is Fill.USED_UP
    assert it.clock() < commitment.hard_end


def test_a_drained_pool_is_full_again_when_a_machine_is_gone() -> None:
    it = pool(3.0)
    it.launch(1, usd("1.5", increment=3600))
    assert it.go_until(Fill.DRAINED, 3 * HOUR)[-1] is Fill.DRAINED
    it.meter.end("m-0")
    assert it.limit.check()[0] is Fill.WARNED


def test_machines_that_only_a_listing_shows_count_too() -> None:
    it = pool(1.0)
    it.meter.start(machine("found"), it.clock(), usd("1"))
    assert it.go_until(Fill.USED_UP) == [Fill.FULL, Fill.WARNED, Fill.DRAINED, Fill.USED_UP]
    assert it.meter.total() < 1


@pytest.fixture
def clock() -> MeterClock:
    return MeterClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: MeterClock) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=clock.date, busy_timeout_seconds=0.05) as ledger:
        yield ledger


def opened(
    ledger: Ledger,
    clock: MeterClock,
    limit: str,
    pool_id: str = "sky-1",
    *,
    max_cost: float | None = None,
    period: Period = Period.MONTH,
) -> Pool:
    """Open a pool whose machines an account pays."""
    if TEAM not in [account.name for account in ledger.accounts()]:
        ledger.set_account(Account(TEAM, Decimal(limit), period))
    open_pool(ledger, pool_id, Owner.here(), provider={"name": "fake"}, lease_expires_at=NOON, account=TEAM)
    return limited(clock, pool_id, max_cost=max_cost, account=TEAM, accounts=ledger)


def reserved(ledger: Ledger, pool_id: str = "sky-1") -> Decimal:
    return sum((reservation.reserved_usd for reservation in ledger.open_reservations(pool_id=pool_id)), Decimal(0))


def committed(ledger: Ledger, limit: str, pool_id: str = "sky-1") -> Decimal:
    """Return the spent and reserved money of the account."""
    return Decimal(limit) - ledger.left_usd(TEAM, pool_id)


def test_the_money_of_an_account_is_reserved_before_the_launch(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "10")
    it.limit.commit(2, CENT)  # a cent a second
    assert reserved(ledger) == 2 * (120 + 2 * 120) * Decimal("0.01")
    with pytest.raises(BudgetExceeded):
        it.limit.commit(1, CENT)  # the first call is not answered, and its machines may run
    assert reserved(ledger) == Decimal("7.2")
    other = opened(ledger, clock, "10", "sky-2")
    with pytest.raises(BudgetExceeded, match=r"pay for 360 s of 1 x 36 USD per hour .* lower max_cost") as caught:
        other.limit.commit(1, CENT)
    assert (caught.value.account, caught.value.left_usd) == (TEAM, Decimal("2.8"))
    assert reserved(ledger, "sky-2") == 0
    assert other.limit.paid_seconds() is None


def test_another_machine_is_reserved_up_to_the_paid_time_of_the_others(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "1000")
    it.launch(1, CENT)
    clock.go(100)
    it.launch(1, usd("72"))
    assert committed(ledger, "1000") == 360 * Decimal("0.01") + 260 * Decimal("0.02")
    clock.go(100)
    it.limit.check()
    assert it.paid == 2 * LEASE_SECONDS
    assert committed(ledger, "1000") == it.meter.total() + Decimal("0.03") * 240


def test_a_pending_launch_stays_reserved_through_a_renewal(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "1000")
    it.launch(1, CENT)
    clock.go(150)
    asked_at, commitment = clock(), it.limit.commit(1, usd("72"))
    clock.go(60)
    it.limit.check()
    it.meter.start(machine("slow"), asked_at, usd("72"))
    it.limit.launched(["slow"], commitment)
    assert it.meter.projected(clock() + it.paid) <= committed(ledger, "1000")


@pytest.mark.parametrize("has_come", [False, True])
def test_failed_launches_leave_the_account_to_the_next_candidate(
    ledger: Ledger, clock: MeterClock, has_come: bool
) -> None:
    it = opened(ledger, clock, "5")
    for number in range(20):
        asked_at, lost = clock(), it.limit.commit(1, CENT)
        assert reserved(ledger) <= Decimal("3.6")
        clock.go(2)
        if has_come:
            it.meter.start(machine(f"found-{number}"), asked_at, CENT)
            it.meter.end(f"found-{number}")
        it.limit.returned(lost)
    it.launch(1, CENT)
    assert it.meter.projected(clock() + it.paid) <= committed(ledger, "5") <= 5


def test_a_launch_at_the_end_of_the_paid_time_renews_first(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "1000")
    it.launch(1, CENT)
    clock.go(355)
    it.launch(1, CENT)
    assert it.limit.paid_seconds() == 2 * LEASE_SECONDS
    poor = opened(ledger, clock, "1000", "sky-2")
    poor.launch(1, CENT)
    ledger.set_account(Account(TEAM, Decimal("1"), Period.MONTH))
    clock.go(365)  # the paid time is over
    with pytest.raises(BudgetExceeded):
        poor.limit.commit(1, CENT)


class Failing:
    """Accounts whose methods raise errors while `is_out`."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.is_out = False
        self.loses_answers = False
        self.asked = 0
        self.meanwhile = lambda: None

    def roll(self, account: str, pool_id: str, total_usd: Decimal, next_usd: Decimal) -> Reservation:
        self.asked += 1
        self.meanwhile()
        if self.is_out:
            raise LedgerError("the disk is full")
        made = self.ledger.roll(account, pool_id, total_usd, next_usd)
        if self.loses_answers:
            raise LedgerError("the connection was lost after COMMIT")
        return made


def with_outage(ledger: Ledger, clock: MeterClock) -> tuple[Pool, Failing]:
    it, accounts = opened(ledger, clock, "1000"), Failing(ledger)
    it.limit = SpendingLimit("sky-1", it.meter, account=TEAM, accounts=accounts, lease_seconds=LEASE_SECONDS)
    it.launch(1, CENT)
    return it, accounts


def test_an_outage_of_the_ledger_does_not_end_a_pool_whose_time_is_paid(ledger: Ledger, clock: MeterClock) -> None:
    it, accounts = with_outage(ledger, clock)
    accounts.is_out = True
    for _ in range(360 - 31):
        assert it.limit.check() == (Fill.FULL, "")
        clock.go(1.0)
    assert 140 <= accounts.asked <= 160
    accounts.is_out = False
    assert it.limit.check() == (Fill.FULL, "")
    assert it.limit.paid_seconds() == 2 * LEASE_SECONDS


def test_an_outage_longer_than_the_paid_time_ends_the_pool_in_time(ledger: Ledger, clock: MeterClock) -> None:
    """The reason says that nothing more could be reserved."""
    it, accounts = with_outage(ledger, clock)
    accounts.is_out = True
    assert it.go_until(Fill.USED_UP) == [Fill.FULL, Fill.DRAINED, Fill.USED_UP]
    assert clock() < 1000 + 360 - 10
    assert f"nothing more could be reserved from account '{TEAM}'" in it.limit.check()[1]


def test_a_refused_renewal_is_repeated_after_a_second(ledger: Ledger, clock: MeterClock) -> None:
    """Not with each check, because each asks the ledger."""
    it, accounts = with_outage(ledger, clock)
    ledger.set_account(Account(TEAM, Decimal(1), Period.MONTH))
    clock.go(200)
    asked = []
    for _ in range(3):
        assert it.limit.check()[0] is Fill.WARNED
        asked.append(accounts.asked)
        clock.go(0.5)
    assert asked == [2, 2, 3], "the launch has asked too"


def test_a_payment_whose_answer_was_lost_is_paid_once(ledger: Ledger, clock: MeterClock) -> None:
    """It is done again, by this process or by the next one that keeps the pool; 4.26 of 4.00 USD were paid."""
    it, accounts = with_outage(ledger, clock)
    accounts.loses_answers = True
    for _ in range(5):
        clock.go(100)
        it.limit.check()
        assert ledger.settled_usd("sky-1", TEAM) <= it.meter.total()
    with pytest.raises(LedgerError):
        it.limit.commit(1, CENT)
    accounts.loses_answers = False
    it.launch(1, CENT)
    clock.go(10)
    ledger.settle_pool("sky-1", it.meter.total())
    assert committed(ledger, "1000") == it.meter.total()


def test_a_pool_may_pay_for_exactly_so_many_seconds(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "20")
    it.limit.pay_for(1000)
    assert it.limit.paid_seconds() is None, "there is no machine yet"
    it.launch(1, CENT)
    clock.go(100)
    for seconds in (1000, 60):
        it.limit.pay_for(seconds)
        assert it.limit.paid_seconds() == seconds
        assert committed(ledger, "20") == 1 + seconds * Decimal("0.01")
    with pytest.raises(BudgetExceeded):
        it.limit.pay_for(1901)
    assert (it.limit.paid_seconds(), committed(ledger, "20")) == (60, Decimal("1.6"))
    without_account = pool(10.0)
    without_account.launch(1, usd("10"))
    without_account.limit.pay_for(60)
    assert without_account.limit.paid_seconds() == HOUR


def test_a_condemned_pool_reserves_nothing_more(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "1000")
    it.launch(1, CENT)
    assert ledger.condemn("sky-1", seen=NOON)
    clock.go(200)
    with pytest.raises(LeaseLost):
        it.limit.check()
    with pytest.raises(LeaseLost):
        it.limit.commit(1, CENT)


def test_max_cost_and_an_account_hold_together(ledger: Ledger, clock: MeterClock) -> None:
    it = opened(ledger, clock, "1000", max_cost=5.0)
    it.launch(1, CENT)  # 500 s
    assert it.limit.paid_seconds() == 360
    assert it.go_until(Fill.USED_UP)[-1] is Fill.USED_UP
    assert "max_cost" in it.limit.check()[1]
    assert it.meter.total() < 5


def test_an_account_pays_no_more_than_max_cost_before_the_launch(ledger: Ledger, clock: MeterClock) -> None:
    """A pool that costs a dollar at most opens with an account that has a dollar, and max_cost ends it."""
    it, accounts = opened(ledger, clock, "1", max_cost=1.0), Failing(ledger)
    it.limit = SpendingLimit(
        "sky-1", it.meter, max_cost=1.0, account=TEAM, accounts=accounts, lease_seconds=LEASE_SECONDS
    )
    it.launch(1, CENT)  # 100 s
    assert reserved(ledger) == 1
    assert it.go_until(Fill.USED_UP)[-1] is Fill.USED_UP
    assert "max_cost" in it.limit.check()[1]
    assert Decimal("0.8") < it.meter.total() < 1
    assert ledger.left_usd(TEAM, "sky-1") == 0
    assert accounts.asked == 1, "after the launch there is nothing more to reserve, so no check asks the ledger"


def grow(it: Pool, received: list[float], heard: set[str] | None = None, **words: Any) -> Commitment:
    """Commit one more machine. `received` gets the paid time that the others receive; all confirm it, or those `heard`."""

    def notify() -> set[str]:
        received.append(it.paid)
        return it.meter.rented() if heard is None else heard

    return it.limit.commit(1, CENT, least_seconds=600.0, notify=notify, **words)


def test_a_launch_that_would_leave_too_short_a_life_shortens_nothing() -> None:
    received = list[float]()
    it = pool(11.99)
    it.launch(1, CENT)
    with pytest.raises(BudgetExceeded, match=r"max_cost=11.99 would not last for 600 s with 1 x 36 USD per hour more"):
        grow(it, received)
    assert (received, it.limit.paid_seconds()) == ([], 1199.0)
    it = pool(12.0)
    it.launch(1, CENT)
    assert grow(it, received).hard_end == it.clock() + 600


def test_a_machine_that_is_not_there_yet_counts() -> None:
    received = list[float]()
    it = pool(15.0)
    it.launch(1, CENT)
    grow(it, received)
    with pytest.raises(BudgetExceeded):
        grow(it, received)
    assert received == [750.0]


def test_a_machine_that_keeps_its_end_does_not_make_the_life_of_the_new_one_shorter() -> None:
    it = pool(20.0)
    it.launch(2, CENT)
    with pytest.raises(BudgetExceeded):
        grow(it, [], heard={"m-0"})
    it.limit.check()
    assert it.limit.paid_seconds() == 1000.0
    assert it.limit.commit(1, CENT, notify=lambda: {"m-0"}).hard_end == it.clock() + 500


def test_the_seconds_in_which_a_machine_ends_do_not_count() -> None:
    received = list[float]()
    it = pool(12.6)
    it.launch(1, CENT)
    with pytest.raises(BudgetExceeded):
        grow(it, received, ending_seconds=60.0)
    assert grow(it, received, ending_seconds=30.0).hard_end == it.clock() + 630
    assert received == [600.0]


def test_no_machine_is_launched_for_the_last_minutes_before_the_end_in_the_tags() -> None:
    it = pool(20.0)
    it.launch(2, CENT)
    it.clock.go(401)
    it.meter.end("m-0")
    with pytest.raises(BudgetExceeded, match=r"end in 599 s"):
        grow(it, [])
