"""Pools of one run: together they spend its limit and no more, also if their owners die; a small rest is no waste."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import pytest

from skyward_core.errors import BudgetExceeded
from skyward_core.ledger.budgets import Commitment, Fill
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import Account, Period
from skyward_core.ledger.run_accounts import account_of_run
from skyward_core.ledger.run_limit import RunLimit
from skyward_core.ledger.steward_limit import StewardAccounts
from skyward_core.machines.owner import Owner
from skyward_core.work import Work
from tests.unit.ledger.test_budgets import HOUR, LEASE_SECONDS, START, Clock, end_all, machine, usd

CENT = usd("36")  # a cent a second
FLOW = Work(system="prefect", run="run-1")
OWNER = Owner("ada", "laptop", "boot", "4026531836", 4711, "1234")


@dataclass
class Run:
    """A run with a limit in USD, and its pools."""

    clock: Clock
    ledger: Ledger
    usd: str
    pools: list[RunPool] = field(default_factory=list)

    def pool(self, max_cost: float | None = None, account: str | None = None) -> RunPool:
        name, meter = f"sky-{len(self.pools)}", Meter(self.clock)
        self.ledger.open_pool(
            name,
            owner=OWNER,
            provider={},
            spec_json="{}",
            lease_expires_at=START,
            account=account,
            work=FLOW,
            run_limit_usd=Decimal(self.usd),
        )
        limit = RunLimit(
            Decimal(self.usd),
            name,
            meter,
            max_cost=max_cost,
            account=account,
            accounts=StewardAccounts(self.ledger, None),
            lease_seconds=LEASE_SECONDS,
        )
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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock, tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=clock.date) as opened:
        yield opened


def test_two_pools_at_once_end_when_the_run_has_spent_its_limit(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "10")
    for _ in range(2):
        run.pool(max_cost=10.0).launch()
    first, last = run.go_until_used_up()
    assert 400 < first <= 500 < last
    assert Decimal("9.7") < run.cost <= 10
    assert run.left == 10 - run.cost
    with pytest.raises(BudgetExceeded, match="max_cost=10 is for all pools of the run"):
        run.pool(max_cost=10.0).launch()


def test_a_pool_gets_the_rest_if_it_is_less_than_usual(clock: Clock, ledger: Ledger) -> None:
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


def test_too_little_for_a_minute_is_refused_and_nothing_has_changed(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "4.2")
    run.pool().launch()
    assert run.left == Decimal("0.6")
    with pytest.raises(BudgetExceeded, match=r"0\.6 USD are left"):
        run.pool().launch(ending_seconds=1.0)
    assert run.left == Decimal("0.6")
    assert run.pool().launch().lifetime_seconds == pytest.approx(54.0)


def test_machines_begin_to_end_early_enough(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "2")
    pool = run.pool()
    assert pool.launch(ending_seconds=60.0).lifetime_seconds == pytest.approx(126.0)
    assert pool.limit.paid_seconds() == pytest.approx(140.0)
    assert run.go_until_used_up()[0] < 140


def test_an_open_pool_gets_no_machine_that_the_run_does_not_pay_for(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "5")
    pool = run.pool()
    pool.launch()
    with pytest.raises(BudgetExceeded):
        pool.launch(2)
    assert pool.limit.paid_seconds() == pytest.approx(360.0)
    assert run.left == Decimal("1.4")


def test_the_parts_of_a_launch_share_the_rest(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "2")
    pool = run.pool()
    first = pool.limit.commit(1, CENT, along=[(1, CENT)])
    with pytest.raises(BudgetExceeded):
        run.pool().launch()
    second = pool.limit.commit(1, CENT)
    assert first.lifetime_seconds == second.lifetime_seconds == pytest.approx(90.0)


def test_a_pool_draws_on_its_budget_too(clock: Clock, ledger: Ledger) -> None:
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


def test_machines_that_cost_nothing_reserve_nothing(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "0.01")
    pool = run.pool()
    assert pool.limit.commit(1, usd("0")).lifetime_seconds is None
    assert pool.limit.paid_seconds() is None
    assert pool.limit.check() == (Fill.FULL, "")


def test_a_pool_may_be_detached_within_the_limit_of_its_run(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "40")
    pool = run.pool()
    pool.launch()
    with pytest.raises(BudgetExceeded):
        pool.limit.pay_for(2 * HOUR)
    pool.limit.pay_for(HOUR)
    assert run.left == 4
    assert pool.limit.paid_seconds() == pytest.approx(HOUR)


def test_a_small_hard_end_keeps_no_more_than_that(clock: Clock, ledger: Ledger) -> None:
    run = Run(clock, ledger, "5")
    step = run.pool(max_cost=1.0)
    step.launch()
    assert run.left == 4
    assert run.go_until_used_up()[0] <= 100
    assert run.left >= 4
