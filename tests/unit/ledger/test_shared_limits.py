"""Limits of a run and of a named pool: together its pools, or its stewards one after the other, spend no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from skyward_core.errors import BudgetExceeded, LedgerError
from skyward_core.ledger.budgets import Commitment, Fill
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.ledger.pools import account_of_run
from skyward_core.ledger.rows import Account, Period, Price
from skyward_core.ledger.shared_limits import RunLimit, StewardAccounts, StewardLimit
from skyward_core.work import Work
from tests.ledger.fixtures import LEASE_SECONDS, NOON, MeterClock, claim, machine, open_pool
from tests.ledger.fixtures import opened as opened_by_name
from tests.unit.ledger.test_budgets import CENT, HOUR, TEAM, clock, end_all, ledger, usd  # noqa: F401 - fixtures

FLOW = Work(system="prefect", run="run-1")


@dataclass
class Run:
    """A run with a limit in USD, and its pools."""

    clock: MeterClock
    ledger: Ledger
    usd: str
    pools: list[RunPool] = field(default_factory=list)

    def pool(self, max_cost: float | None = None, account: str | None = None) -> RunPool:
        name, meter = f"sky-{len(self.pools)}", Meter(self.clock)
        run_limit_usd = Decimal(self.usd)
        open_pool(self.ledger, name, lease_expires_at=NOON, account=account, work=FLOW, run_limit_usd=run_limit_usd)
        accounts: dict[str, Any] = {"account": account, "accounts": StewardAccounts(self.ledger, None)}
        limit = RunLimit(run_limit_usd, name, meter, max_cost=max_cost, lease_seconds=LEASE_SECONDS, **accounts)
        self.pools.append(RunPool(name, meter, limit))
        return self.pools[-1]

    def close(self, pool: RunPool) -> None:
        """End its machines and settle, as the journal does."""
        end_all(pool.meter)
        self.ledger.settle_pool(pool.name, pool.meter.total())
        self.ledger.end_pool(pool.name)

    @property
    def cost(self) -> Decimal:
        return sum((pool.meter.total() for pool in self.pools), Decimal(0))

    @property
    def left(self) -> Decimal:
        return self.ledger.left_usd(account_of_run(FLOW), "")

    def go_until_used_up(self, longest: int = 3600) -> list[int]:
        """Check all open pools each second, and close those whose money is used up. Return after how many seconds."""
        ends: list[int] = []
        for second in range(longest):
            for pool in self.pools:
                if pool.meter.rented() and pool.limit.check()[0] is Fill.USED_UP:
                    self.close(pool)
                    ends.append(second)
            if not any(pool.meter.rented() for pool in self.pools):
                return ends
            self.clock.seconds += 1
        pytest.fail(f"the money was not used up in {longest} s")


@dataclass
class RunPool:
    name: str
    meter: Meter
    limit: RunLimit

    def launch(self, machines: int = 1, ending_seconds: float = 0.0) -> Commitment:
        commitment = self.limit.commit(machines, CENT, ending_seconds=ending_seconds)
        ids = [f"{self.name}-{len(self.meter.rented()) + number}" for number in range(machines)]
        for name in ids:
            self.meter.start(machine(name), self.meter.now(), CENT)
        self.limit.launched(ids, commitment)
        return commitment


def test_two_pools_at_once_end_when_the_run_has_spent_its_limit(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "10")
    for _ in range(2):
        run.pool(max_cost=10.0).launch()
    first, last = run.go_until_used_up()
    assert 400 < first <= 500 < last
    assert Decimal("9.7") < run.cost <= 10
    assert run.left == 10 - run.cost
    with pytest.raises(BudgetExceeded, match="max_cost=10 is for all pools of the run"):
        run.pool(max_cost=10.0).launch()


def test_a_pool_gets_the_rest_if_it_is_less_than_usual(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "5")
    first, second = run.pool(max_cost=5.0), run.pool(max_cost=5.0)
    assert first.launch().lifetime_seconds == pytest.approx(324.0)
    commitment = second.launch()
    assert run.left == 0
    assert commitment.lifetime_seconds == pytest.approx(126.0)
    assert second.limit.paid_seconds() == pytest.approx(140.0)
    assert (first.limit.paid_seconds(), second.limit.check()[0]) == (pytest.approx(360.0), Fill.FULL)
    clock.seconds += 50
    fill, reason = second.limit.check()
    assert (fill, "max_cost=5 is for all pools of the run" in reason) == (Fill.WARNED, True)
    run.close(first)
    clock.seconds += 1
    assert second.limit.check() == (Fill.FULL, "")
    assert second.limit.paid_seconds() == pytest.approx(240.0)


def test_the_reason_names_max_cost_also_while_the_ledger_does_not_answer(
    clock: MeterClock, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(clock, ledger, "10")
    pool = run.pool()
    pool.launch()

    def away(*_: object, **__: object) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(pool.limit._accounts, "roll", away)
    while pool.limit.check()[0] is Fill.FULL:
        clock.seconds += 1
    assert pool.limit.check()[1] == (
        "nothing more could be reserved from max_cost=10, which is for all pools of the run"
    )


def test_too_little_for_a_minute_is_refused_and_nothing_has_changed(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "4.2")
    run.pool().launch()
    assert run.left == Decimal("0.6")
    with pytest.raises(BudgetExceeded, match=r"0\.6 USD are left"):
        run.pool().launch(ending_seconds=1.0)
    assert run.left == Decimal("0.6")
    assert run.pool().launch().lifetime_seconds == pytest.approx(54.0)


def test_machines_begin_to_end_early_enough(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "2")
    pool = run.pool()
    assert pool.launch(ending_seconds=60.0).lifetime_seconds == pytest.approx(126.0)
    assert pool.limit.paid_seconds() == pytest.approx(140.0)
    assert run.go_until_used_up()[0] < 140


def test_an_open_pool_gets_no_machine_that_the_run_does_not_pay_for(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "5")
    pool = run.pool()
    pool.launch()
    with pytest.raises(BudgetExceeded):
        pool.launch(2)
    assert pool.limit.paid_seconds() == pytest.approx(360.0)
    assert run.left == Decimal("1.4")


def test_the_parts_of_a_launch_share_the_rest(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "2")
    pool = run.pool()
    first = pool.limit.commit(1, CENT, along=[(1, CENT)])
    with pytest.raises(BudgetExceeded):
        run.pool().launch()
    second = pool.limit.commit(1, CENT)
    assert first.lifetime_seconds == second.lifetime_seconds == pytest.approx(90.0)


def test_a_pool_draws_on_its_budget_too(clock: MeterClock, ledger: Ledger) -> None:
    ledger.set_account(Account("team", Decimal(4), Period.MONTH))
    run = Run(clock, ledger, "5")
    run.pool(account="team").launch()
    with pytest.raises(BudgetExceeded) as refused:
        run.pool(account="team").launch()
    assert refused.value.account == "team"
    assert run.left == Decimal("1.4")
    ledger.set_account(Account("team", Decimal(40), Period.MONTH))
    (first, *_) = run.pools
    assert first.limit.account == "team"
    run.pool(account="team").launch()
    clock.seconds += 200
    first.limit.check()
    assert first.limit.account == "", "the limit of the run refuses"


def test_machines_that_cost_nothing_reserve_nothing(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "0.01")
    pool = run.pool()
    assert pool.limit.commit(1, usd("0")).lifetime_seconds is None
    assert pool.limit.paid_seconds() is None
    assert pool.limit.check() == (Fill.FULL, "")


def test_a_pool_may_be_detached_within_the_limit_of_its_run(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "40")
    pool = run.pool()
    pool.launch()
    with pytest.raises(BudgetExceeded):
        pool.limit.pay_for(2 * HOUR)
    pool.limit.pay_for(HOUR)
    assert run.left == 4
    assert pool.limit.paid_seconds() == pytest.approx(HOUR)


def test_a_small_hard_end_keeps_no_more_than_that(clock: MeterClock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "5")
    step = run.pool(max_cost=1.0)
    step.launch()
    assert run.left == 4
    assert run.go_until_used_up()[0] <= 100
    assert run.left >= 4


def steward(clock: MeterClock, max_cost: float | None, keeps: bool = True) -> tuple[Meter, StewardLimit]:
    meter = Meter(clock)
    return meter, StewardLimit(lambda: keeps, "sky-1", meter, max_cost=max_cost, lease_seconds=LEASE_SECONDS)


def test_machines_live_as_long_as_with_the_steward_before(clock: MeterClock) -> None:
    """Ten dollars are a thousand seconds of one machine, less the second for its end."""
    meter, first = steward(clock, 10.0)
    commitment = first.commit(1, CENT, ending_seconds=1.0)
    meter.start(machine("m-0"), clock(), CENT)
    first.launched(["m-0"], commitment)
    assert commitment.latest_end is not None
    clock.go(400)
    meter, limit = steward(clock, 10.0)
    meter.start(machine("m-0"), 1000.0, CENT)
    limit.adopt({"m-0": commitment.latest_end}, [], Decimal(0), Decimal(0), 1.0)
    assert limit.paid_seconds() == first.paid_seconds() == 599.0
    clock.go(595)
    assert limit.check()[0] is Fill.USED_UP


@pytest.mark.parametrize(
    ("horizon", "launches", "gone", "passed", "expected"),
    [(2000.0, [], ["m-1"], 400, 199.0), (1300.0, [], [], 0, 299.0), (1600.0, [(1000.0, CENT)], [], 0, 399.0)],
    ids=["machines that are gone cost", "no longer than the tags say", "a launch without an answer keeps its money"],
)
def test_what_a_new_steward_may_spend(
    clock: MeterClock,
    horizon: float,
    launches: list[tuple[float, Price]],
    gone: list[str],
    passed: int,
    expected: float,
) -> None:
    clock.go(passed)
    meter, limit = steward(clock, 10.0)
    for name in ("m-0", *gone):
        meter.start(machine(name), 1000.0, CENT)
    for name in gone:
        meter.end(name)
    limit.adopt({"m-0": horizon}, launches, Decimal(0), Decimal(0), 1.0)
    assert limit.paid_seconds() == expected


def test_a_steward_says_nothing_to_nodes_without_a_limit_or_while_it_is_not_certain(clock: MeterClock) -> None:
    """Its own money has run out; another process may have paid."""
    meter, limit = steward(clock, None)
    meter.start(machine("m-0"), 1000.0, CENT)
    limit.adopt({}, [], Decimal(0), Decimal(0), 1.0)
    assert (limit.paid_seconds(), limit.check()[0]) == (None, Fill.FULL)
    meter, limit = steward(clock, 1.0, keeps=False)
    commitment = limit.commit(1, CENT)
    meter.start(machine("m-0"), clock(), CENT)
    limit.launched(["m-0"], commitment)
    clock.go(1000)
    assert (limit.paid_seconds(), limit.check()) == (None, (Fill.FULL, ""))


def test_the_account_pays_by_what_is_reserved_and_then_more(clock: MeterClock, ledger: Ledger) -> None:
    """At the end it has paid the cost, once."""
    ledger.set_account(Account(TEAM, Decimal(100), Period.RUN))
    open_pool(ledger, "sky-1", lease_expires_at=clock.date(), account=TEAM)
    ledger.roll(TEAM, "sky-1", Decimal(0), Decimal(1))
    ledger.roll(TEAM, "sky-1", Decimal("0.5"), Decimal(2))  # 50 s were paid, and 200 s are reserved
    clock.go(100)
    meter = Meter(clock)
    limit = StewardLimit(lambda: True, "sky-1", meter, account=TEAM, accounts=ledger, lease_seconds=LEASE_SECONDS)
    meter.start(machine("m-0"), 1000.0, CENT)
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
    clock: MeterClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has become the steward between the bill and its payment."""
    ledger = Ledger(f"sqlite:///{tmp_path}/named.db")
    ledger.set_account(Account(TEAM, Decimal(100), Period.RUN))
    epoch = opened_by_name(ledger)
    claim(ledger, "b")
    is_stopped = False

    def total() -> Decimal:
        bill = Meter.total(meter)
        if is_stopped and (row := ledger.names.named("nightly")) and row.steward == "a":
            ledger.stewards.release("nightly", "a", epoch)
            new = ledger.stewards.take("nightly", "b")
            ledger.roll(TEAM, "sky-a", bill, Decimal(0), epoch=new)
        return bill

    meter = Meter(clock)
    accounts = StewardAccounts(ledger, epoch)
    limit = StewardLimit(lambda: True, "sky-a", meter, account=TEAM, accounts=accounts, lease_seconds=LEASE_SECONDS)
    limit.launched(["m-0"], limit.commit(1, CENT))
    meter.start(machine("m-0"), clock(), CENT)
    monkeypatch.setattr(meter, "total", total)
    clock.go(1000)
    is_stopped = True
    with pytest.raises(NotSteward):
        limit.pay_for(60)
    assert ledger.settled_usd("sky-a", TEAM) == meter.total() == Decimal(10)
    ledger.close()
