"""The money of a named pool goes on with another process: within the same limit, and in silence while that is unsure."""

from datetime import timedelta
from decimal import Decimal

import pytest

from skyward_core.ledger.budgets import Fill
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.ledger.rows import Account, Period
from skyward_core.ledger.steward_limit import StewardAccounts, StewardLimit
from skyward_core.machines.owner import Owner
from tests.system.ledger.test_names import claim, opened
from tests.unit.ledger.test_budgets import LEASE_SECONDS, TEAM, Clock, machine, usd

PRICE = usd("36")  # a cent a second


def limit_of(clock: Clock, max_cost: float | None, keeps: bool = True) -> tuple[Meter, StewardLimit]:
    meter = Meter(clock)
    return meter, StewardLimit(lambda: keeps, "sky-1", meter, max_cost=max_cost, lease_seconds=LEASE_SECONDS)


def adopted(clock: Clock, horizon: float, machines: int = 1, max_cost: float = 10.0) -> tuple[Meter, StewardLimit]:
    """A limit that goes on with machines which were requested at 1000 s."""
    meter, limit = limit_of(clock, max_cost)
    ids = [f"m-{number}" for number in range(machines)]
    for name in ids:
        meter.start(machine(name), 1000.0, PRICE)
    limit.adopt(dict.fromkeys(ids, horizon), [], Decimal(0), Decimal(0), 1.0)
    return meter, limit


def test_machines_live_as_long_as_with_the_steward_before() -> None:
    clock = Clock()
    meter, first = limit_of(clock, 10.0)
    commitment = first.commit(1, PRICE, ending_seconds=1.0)
    meter.start(machine("m-0"), clock(), PRICE)
    first.launched(["m-0"], commitment)
    assert commitment.latest_end is not None
    clock.seconds += 400
    _, limit = adopted(clock, commitment.latest_end)
    assert limit.paid_seconds() == first.paid_seconds() == 599.0


def test_the_limit_covers_the_machines_that_are_gone() -> None:
    clock = Clock()
    clock.seconds += 400
    meter, limit = limit_of(clock, 10.0)
    for name in ("m-0", "m-1"):
        meter.start(machine(name), 1000.0, PRICE)
    meter.end("m-1")
    limit.adopt({"m-0": 2000.0}, [], Decimal(0), Decimal(0), 1.0)
    assert limit.paid_seconds() == 199.0


def test_machines_live_no_longer_than_their_tags_say() -> None:
    clock = Clock()
    _, limit = adopted(clock, 1300.0)
    assert limit.paid_seconds() == 299.0


def test_a_launch_without_an_answer_keeps_its_money() -> None:
    clock = Clock()
    meter, limit = limit_of(clock, 10.0)
    meter.start(machine("m-0"), 1000.0, PRICE)
    limit.adopt({"m-0": 1600.0}, [(1000.0, PRICE)], Decimal(0), Decimal(0), 1.0)
    assert limit.paid_seconds() == 399.0


def test_a_limit_that_is_used_up_ends_the_pool() -> None:
    clock = Clock()
    clock.seconds += 995
    _, limit = adopted(clock, 2000.0)
    assert limit.check()[0] is Fill.USED_UP


def test_machines_without_a_limit_have_no_end() -> None:
    clock = Clock()
    meter, limit = limit_of(clock, None)
    meter.start(machine("m-0"), 1000.0, PRICE)
    limit.adopt({}, [], Decimal(0), Decimal(0), 1.0)
    assert (limit.paid_seconds(), limit.check()[0]) == (None, Fill.FULL)


def test_a_steward_that_is_not_certain_says_nothing_to_nodes() -> None:
    clock = Clock()
    meter, limit = limit_of(clock, 1.0, keeps=False)
    commitment = limit.commit(1, PRICE)
    meter.start(machine("m-0"), clock(), PRICE)
    limit.launched(["m-0"], commitment)
    clock.seconds += 1000
    assert (limit.paid_seconds(), limit.check()) == (None, (Fill.FULL, ""))


@pytest.fixture
def ledger(tmp_path: object) -> Ledger:
    return Ledger(f"sqlite:///{tmp_path}/ledger.db")


def test_the_account_pays_by_what_is_reserved_and_then_more(ledger: Ledger) -> None:
    clock = Clock()
    with ledger:
        ledger.set_account(Account(TEAM, Decimal(100), Period.RUN))
        ledger.open_pool(
            "sky-1",
            owner=Owner.here(),
            provider={"name": "fake"},
            spec_json="{}",
            lease_expires_at=clock.date() + timedelta(days=9999),
            account=TEAM,
        )
        ledger.roll(TEAM, "sky-1", Decimal(0), Decimal(1))
        ledger.roll(TEAM, "sky-1", Decimal("0.5"), Decimal(2))  # 50 s were paid, and 200 s are reserved
        clock.seconds += 100
        meter = Meter(clock)
        limit = StewardLimit(lambda: True, "sky-1", meter, account=TEAM, accounts=ledger, lease_seconds=LEASE_SECONDS)
        meter.start(machine("m-0"), 1000.0, PRICE)
        settled = ledger.settled_usd("sky-1", TEAM)
        assert settled == Decimal("0.5")
        assert ledger.settled_usd("sky-1", "another") == 0
        limit.adopt({}, [], settled, Decimal(2), 1.0)
        assert limit.paid_seconds() == pytest.approx(150, abs=1)
        limit.check()
        assert limit.paid_seconds() == 2 * LEASE_SECONDS
        assert ledger.settled_usd("sky-1", TEAM) == Decimal(1)
        meter.end("m-0")
        ledger.settle_pool("sky-1", meter.total())
        assert ledger.settled_usd("sky-1", TEAM) == meter.total() == Decimal(1)


def test_an_interval_is_paid_once_although_the_steward_was_stopped_before_it_wrote(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with ledger:
        ledger.set_account(Account(TEAM, Decimal(100), Period.RUN))
        epoch = opened(ledger)
        claim(ledger, "b")
        is_stopped = False

        def total() -> Decimal:
            bill = Meter.total(meter)
            if is_stopped and (row := ledger.names.named("nightly")) and row.steward == "a":
                ledger.stewards.resign("nightly", "a", epoch)
                new = ledger.stewards.take("nightly", "b")
                ledger.roll(TEAM, "sky-a", bill, Decimal(0), epoch=new)
            return bill

        meter = Meter(clock)
        accounts = StewardAccounts(ledger, epoch)
        limit = StewardLimit(lambda: True, "sky-a", meter, account=TEAM, accounts=accounts, lease_seconds=LEASE_SECONDS)
        limit.launched(["m-0"], limit.commit(1, PRICE))
        meter.start(machine("m-0"), clock(), PRICE)
        monkeypatch.setattr(meter, "total", total)
        clock.seconds += 1000
        is_stopped = True
        with pytest.raises(NotSteward):
            limit.pay_for(60)
        assert ledger.settled_usd("sky-a", TEAM) == meter.total() == Decimal(10)
