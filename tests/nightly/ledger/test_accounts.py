"""Accounts are never overdrawn: not in any order of events, not by crashes, not by a hundred reservations at once."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from skyward_core.errors import BudgetExceeded, LeaseLost
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period
from tests.conftest import examples
from tests.ledger.fixtures import open_pool
from tests.waiting import wait_until

START = datetime(2026, 11, 30, 22, tzinfo=UTC)  # two hours before a midnight that ends a month too
# a ledger syncs each commit, and thousands of histories do not need the disk
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
POOL, ACCOUNT = st.integers(0, 2), st.integers(0, 2)  # indexes within a history
CENTS = st.integers(1, 600)
HISTORIES = examples(2000)


@dataclass
class Reserved:
    """The model's record of a reservation; sums are cents."""

    pool: str
    account: str
    scope: str
    reserved: int
    spent: int | None = None


@dataclass
class Money:
    """The model: written from the rules of the money alone, independent of the ledger's code."""

    now: datetime = START
    limits: dict[str, tuple[int, Period]] = field(default_factory=dict)
    made: dict[int, Reserved] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    def scope(self, account: str, pool: str) -> str:
        period = self.limits[account][1]
        if period is Period.RUN:
            return f"pool {pool}"
        return f"{self.now:%Y-%m-%d}" if period is Period.DAY else f"{self.now:%Y-%m}"

    def committed(self, account: str, scope: str) -> int:
        its = [made for made in self.made.values() if (made.account, made.scope) == (account, scope)]
        return sum(made.reserved if made.spent is None else made.spent for made in its)

    def left(self, account: str, pool: str) -> int:
        return self.limits[account][0] - self.committed(account, self.scope(account, pool))

    def open_of(self, pool: str, account: str | None = None) -> list[int]:
        return [
            number
            for number, made in self.made.items()
            if made.spent is None and made.pool == pool and account in (None, made.account)
        ]

    def paid(self, pool: str, account: str) -> int:
        return sum(made.spent or 0 for made in self.made.values() if (made.pool, made.account) == (pool, account))

    def share_out(self, numbers: list[int], spent: int) -> None:
        for number in numbers:
            share = spent if number == numbers[-1] else min(spent, self.made[number].reserved)
            self.made[number].spent = share
            spent -= share


class Budgets(RuleBasedStateMachine):
    """Several pools and accounts, with any order of reservations, settlements, renewals, deaths and sweeps, over
    midnight and the end of a month.

    All histories share one ledger, each with its own pools and accounts, so that thousands of them take seconds.
    """

    numbers = count()

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.ledger, self.number = shared, shared.drivers, next(self.numbers)
        self.model = shared.model = Money()
        self.pools = [f"{name}{self.number}" for name in "abc"]
        self.accounts = [f"{name}{self.number}" for name in ("runs", "days", "months")]
        for pool in self.pools:
            open_pool(self.ledger, pool, lease_expires_at=START)

    @initialize(limits=st.tuples(*[st.integers(0, 1500)] * 3))
    def set_accounts(self, limits: tuple[int, ...]) -> None:
        for name, period, limit in zip(self.accounts, Period, limits, strict=True):
            self.limit(name, limit, period)

    @rule(name=ACCOUNT, limit=st.integers(0, 1500), is_other_period=st.booleans(), period=st.sampled_from(Period))
    def change_limit(self, name: int, limit: int, is_other_period: bool, period: Period) -> None:
        account = self.accounts[name]
        self.limit(account, limit, period if is_other_period else self.model.limits[account][1])

    def limit(self, name: str, limit: int, period: Period) -> None:
        self.ledger.set_account(Account(name, usd(limit), period))
        self.model.limits[name] = (limit, period)

    @rule(number=POOL, payer=ACCOUNT, cents=CENTS)
    def reserve(self, number: int, payer: int, cents: int) -> None:
        pool, account = self.pools[number], self.accounts[payer]
        left, scope = self.model.left(account, pool), self.model.scope(account, pool)
        if pool in self.model.dead:
            with pytest.raises(LeaseLost):
                self.ledger.reserve(account, pool, usd(cents))
        elif cents > left:
            with pytest.raises(BudgetExceeded) as refused:
                self.ledger.reserve(account, pool, usd(cents))
            assert (refused.value.account, refused.value.left_usd) == (account, usd(left))
        else:
            made = self.ledger.reserve(account, pool, usd(cents))
            assert (made.scope, made.reserved_usd) == (scope, usd(cents))
            self.model.made[made.id] = Reserved(pool, account, scope, cents)
            assert self.model.left(account, pool) >= 0

    @precondition(lambda self: self.open_numbers())
    @rule(data=st.data(), cents=st.integers(0, 700))
    def settle(self, data: st.DataObject, cents: int) -> None:
        number = data.draw(st.sampled_from(self.open_numbers()))
        self.model.made[number].spent = cents
        for _ in range(2):
            assert self.ledger.settle(number, usd(cents)).spent_usd == usd(cents)

    @precondition(lambda self: self.open_numbers())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.open_numbers()))
        self.model.made[number].spent = 0
        self.ledger.release(number)

    @rule(number=POOL, payer=ACCOUNT, share=st.integers(0, 130), cents=st.integers(0, 600))
    def roll(self, number: int, payer: int, share: int, cents: int) -> None:
        pool, account = self.pools[number], self.accounts[payer]
        its = self.model.open_of(pool, account)
        spent = sum(self.model.made[number].reserved for number in its) * share // 100
        total = usd(self.model.paid(pool, account) + spent)
        if pool in self.model.dead:
            with pytest.raises(LeaseLost):
                self.ledger.roll(account, pool, total, usd(cents))
            return
        before = {number: self.model.made[number].spent for number in its}
        self.model.share_out(its, spent)
        if cents and cents > self.model.left(account, pool):
            with pytest.raises(BudgetExceeded):
                self.ledger.roll(account, pool, total, usd(cents))
            for made_number, was in before.items():
                self.model.made[made_number].spent = was
        else:
            scope = self.model.scope(account, pool)
            made = self.ledger.roll(account, pool, total, usd(cents))
            self.model.made[made.id] = Reserved(pool, account, scope, cents)

    @rule(pool=POOL, share=st.integers(0, 100))
    def end(self, pool: int, share: int) -> None:
        """A pool closes, with the cost of its settled reservations, and of the open ones at most their sum."""
        self.settle_pool(self.pools[pool], share, self.ledger)
        self.ledger.end_pool(self.pools[pool])
        self.model.dead.add(self.pools[pool])

    @rule(pool=POOL)
    def crash(self, pool: int) -> None:
        """A driver is killed with open reservations, and a sweep has found the pool dead."""
        assert self.shared.sweep.condemn(self.pools[pool], seen=START)
        self.model.dead.add(self.pools[pool])

    @precondition(lambda self: self.model.dead)
    @rule(data=st.data(), share=st.integers(0, 100))
    def sweep(self, data: st.DataObject, share: int) -> None:
        """Another process, with its own ledger object, settles a dead pool with the real cost of its machines; a second
        settlement changes nothing.
        """
        pool = data.draw(st.sampled_from(sorted(self.model.dead)))
        self.settle_pool(pool, share, self.shared.sweep)

    def settle_pool(self, pool: str, share: int, ledger: Ledger) -> None:
        its = self.model.open_of(pool)
        of_open = sum(self.model.made[number].reserved for number in its) * share // 100
        total = of_open + sum(made.spent or 0 for made in self.model.made.values() if made.pool == pool)
        before = {scope: self.model.committed(*scope) for scope in self.scopes()}
        self.model.share_out(its, of_open)
        for _ in range(2):
            ledger.settle_pool(pool, usd(total))
        # a death never costs any account more than its reservations
        assert all(self.model.committed(*scope) <= was for scope, was in before.items())

    @rule(hours=st.sampled_from([0.5, 1, 3, 30]))
    def wait(self, hours: float) -> None:
        self.model.now += timedelta(hours=hours)

    @invariant()
    def agrees(self) -> None:
        """Every balance, every open reservation and the free money in the ledger agree with the model."""
        committed, reserved = self.shared.look(self.accounts)
        assert committed == {scope: self.model.committed(*scope) for scope in self.scopes()}
        assert reserved == {number: self.model.made[number].reserved for number in self.open_numbers()}
        if self.model.limits:
            account, pool = self.accounts[len(self.model.made) % 3], self.pools[self.model.now.hour % 3]
            assert self.ledger.left_usd(account, pool) == usd(self.model.left(account, pool))

    def open_numbers(self) -> list[int]:
        return [number for number, made in self.model.made.items() if made.spent is None]

    def scopes(self) -> set[tuple[str, str]]:
        return {(made.account, made.scope) for made in self.model.made.values()}


def usd(cents: int) -> Decimal:
    return Decimal(cents) / 100


class Shared:
    """One ledger as drivers and the sweep of another process use it, and the bare tables, which check the methods
    independently.
    """

    def __init__(self, url: str, path: str) -> None:
        self.model = Money()
        self.drivers, self.sweep = (Ledger(url, clock=lambda: self.model.now) for _ in range(2))
        self.tables = sqlite3.connect(path)

    def close(self) -> None:
        self.drivers.close()
        self.sweep.close()
        self.tables.close()

    def look(self, accounts: list[str]) -> tuple[dict[tuple[str, str], int], dict[int, int]]:
        """Return in cents what is committed, by account and scope, and what is reserved and open, by number."""
        its = "account IN (?, ?, ?)"
        balances = self.tables.execute(
            f"SELECT account, scope, committed_micro_usd FROM skyward_balances WHERE {its}", accounts
        )
        made = self.tables.execute(
            f"SELECT id, reserved_micro_usd FROM skyward_reservations WHERE {its} AND settled_microseconds IS NULL",
            accounts,
        )
        committed = {(account, scope): cents(micro) for account, scope, micro in balances}
        return committed, {number: cents(micro) for number, micro in made}


def cents(micro_usd: int) -> int:
    whole, rest = divmod(micro_usd, 10_000)
    assert not rest
    return whole


@pytest.fixture
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        both = Shared(f"sqlite:///{folder}/ledger.db", f"{folder}/ledger.db")
        yield both
        both.close()


@pytest.mark.generated
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(4))
def test_no_history_overdraws_an_account(shared: Shared, part: int) -> None:
    """Two thousand of them in `make long`, of twelve steps, in four parts that can run side by side."""
    many = settings(max_examples=HISTORIES // 4, stateful_step_count=12, deadline=None, database=None)
    many = settings(many, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(lambda: Budgets(shared), settings=many)


DRIVERS = """
import os, random, sys, threading
from decimal import Decimal
from skyward_core.errors import BudgetExceeded
from skyward_core.ledger.ledger import Ledger

url, first = sys.argv[1], int(sys.argv[2])

def drive(ledger, pool_id):
    chance = random.Random(pool_id)
    while True:
        try:
            made = ledger.reserve("team", pool_id, Decimal(chance.randrange(1, 60)) / 100)
            if chance.random() < 0.7:
                ledger.settle(made, made.reserved_usd * chance.randrange(0, 101) / 100)
            elif chance.random() < 0.5:
                ledger.roll("team", pool_id, ledger.settled_usd(pool_id, "team") + made.reserved_usd / 2, Decimal(chance.randrange(1, 60)) / 100)
        except BudgetExceeded:
            return

with Ledger(url, busy_timeout_seconds=60) as ledger:
    threads = [threading.Thread(target=drive, args=(ledger, f"p{first + number}")) for number in range(13)]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.timeout(300)
def test_concurrent_reservations_and_kills_overdraw_nothing(tmp_path: Path) -> None:
    url, limit = f"sqlite:///{tmp_path}/ledger.db", Decimal(150)
    with Ledger(url) as ledger:
        ledger.set_account(Account("team", limit, Period.MONTH))
        pools = [f"p{number}" for number in range(8 * 13)]
        for pool in pools:
            open_pool(ledger, pool, lease_expires_at=START)
        with ExitStack() as ended:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            drivers: list[subprocess.Popen[bytes]] = []
            for number in range(8):
                command = [sys.executable, "-c", DRIVERS, url, str(13 * number)]
                drivers.append(ended.enter_context(subprocess.Popen(command, **pipes)))
                ended.callback(drivers[-1].kill)
            for each in drivers:
                assert each.stdin is not None
                assert each.stdout is not None
                assert each.stdout.readline() == b"ready\n"
            for each in drivers:
                each.stdin.close()  # type: ignore[union-attr]
            for place, killed in enumerate(drivers[:3], 1):
                wait_until(lambda place=place: ledger.left_usd("team", "p0") < limit - 10 * place, "money to be spent")
                killed.send_signal(signal.SIGKILL)
            assert [each.wait(100) for each in drivers] == [-signal.SIGKILL] * 3 + [0] * 5
        assert 0 <= ledger.left_usd("team", "p0") == limit - written_down(tmp_path)
        assert (left := ledger.left_usd("team", "p0")) < Decimal("0.6")
        killed_pools = set(pools[: 3 * 13])
        unsettled = [made for made in ledger.open_reservations() if made.pool_id in killed_pools]
        assert unsettled
        for pool in killed_pools:
            assert ledger.condemn(pool, seen=START)
            ledger.settle_pool(pool, Decimal(0))
        assert ledger.left_usd("team", "p0") == left + sum(made.reserved_usd for made in unsettled)
        assert ledger.left_usd("team", "p0") == limit - written_down(tmp_path)


def written_down(folder: Path) -> Decimal:
    """The sum of the reservations, added one by one."""
    columns = "reserved_micro_usd, settled_microseconds, spent_micro_usd"
    with closing(sqlite3.connect(folder / "ledger.db")) as tables:
        rows = tables.execute(f"SELECT {columns} FROM skyward_reservations").fetchall()
    return Decimal(sum(reserved if settled is None else spent for reserved, settled, spent in rows)) / 1_000_000
