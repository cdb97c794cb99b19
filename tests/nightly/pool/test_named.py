"""Pools with a name when a process is killed or frozen, at limits of money and time, and when ledger or node is away."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cleanup import release
from skyward_core.ledger import budgets
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names import Names
from skyward_core.ledger.names_policy import Claim, NameState, Wait
from skyward_core.ledger.receipt import users_of
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.session import bookkeeping, clock, named_use
from skyward_core.worker.node_clocks import read_lease, read_paid, uptime
from tests.conftest import signal_members
from tests.pool.named import (  # noqa: F401 - fixtures
    Start,
    assert_nothing_left,
    await_steward,
    double,
    is_gone,
    machine,
    machines_of,
    name,
    pool_of,
    program,
    rentals,
    replaced,
    row_of,
)
from tests.waiting import wait_until

LEASE_SECONDS = 10

pytestmark = [pytest.mark.timeout(300)]


# ── processes that are killed or frozen ──────────────────────────────────────────────────────────────────────────────


def test_a_third_process_replaces_nodes_when_the_opener_and_its_successor_were_killed(
    name: str, program: Start
) -> None:
    opener = program(name, price=36, nodes=2)
    known = opener.answer()["id"]
    second = program(name, price=36, nodes=2)
    second.answer()
    opener.kill()
    await_steward(name, 2)
    with pool_of(name, price=36, nodes=2) as mine:
        assert mine.id == known
        ids = machines_of(mine)
        second.kill()
        await_steward(name, 3)
        replaced(mine, 1)
        ids |= machines_of(mine)
        assert len(ids) == 3
        assert set(machine() @ mine) == machines_of(mine)
    assert_nothing_left(mine, ids)
    with Ledger(default_url()) as ledger:
        intents = ledger.intents(pool_id=mine.id)
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=mine.id)
    assert len(intents) == 3
    for intent in intents:
        assert intent.gone_at is not None
        lived = (intent.gone_at - intent.intended_at).total_seconds()
        assert sum(intent.seconds.values()) == pytest.approx(lived, abs=2.0)
    assert row.cost_usd >= Decimal("0.01") * int(row.seconds)


def test_a_client_gives_the_pool_another_head_when_the_opener_was_killed(name: str, program: Start) -> None:
    opener = program(name, nodes=2)
    opener.answer()
    with pool_of(name, nodes=2) as mine:
        ids = machines_of(mine)
        opener.kill()
        replaced(mine, 0)
        assert double(7) >> mine == 14
        wait_until(lambda: len(machines_of(mine)) == 2, "two nodes")
        assert sorted(machine() @ mine) == sorted(machines_of(mine))
        ids |= machines_of(mine)
    assert_nothing_left(mine, ids)


def test_a_frozen_opener_ends_nothing_and_goes_on_as_a_client(name: str, program: Start) -> None:
    """It does not keep the pool again, also when no other process does: the next one that opens the name does."""
    terms = {"price": 36, "max_cost": 100, "nodes": 2, "lease_seconds": LEASE_SECONDS}
    opener = program(name, **terms)
    opener.answer()
    with pool_of(name, **terms) as mine:
        ids = machines_of(mine)
        os.kill(opener.process.pid, signal.SIGSTOP)
        await_steward(name, 2)
        replaced(mine, 1)
        ids |= machines_of(mine)
        os.kill(opener.process.pid, signal.SIGCONT)
        assert opener.call() == 44
        assert row_of(name).epoch == 2
        assert set(machine() @ mine) == machines_of(mine) <= ids
    assert opener.call() == 44
    with pool_of(name, **terms) as next_one:
        await_steward(name, 3)
        assert next_one.id == mine.id
        replaced(next_one, 1)
        ids |= machines_of(next_one)
        assert opener.call() == 44
    opener.leave()
    assert len(ids) == 4
    assert_nothing_left(mine, ids)


def test_an_opener_that_is_killed_while_it_opens_is_not_waited_for(name: str, program: Start) -> None:
    opener = program(name, dies_at="InstanceProvisioned")
    (reaper,) = opener.answer()["reapers"]
    try:
        assert opener.process.wait(120) == -signal.SIGKILL
        dead = rentals()[-1]
        with pool_of(name, provision_timeout=60) as pool:
            assert pool.id != dead
            assert double(9) >> pool == 18
    finally:
        os.kill(reaper, signal.SIGCONT)
    with Ledger(default_url()) as ledger:
        wait_until(lambda: ledger.open_intents(pool_id=dead) == [], "the machines of the dead opener to be gone")


def test_a_process_that_cannot_adopt_leaves_it_to_others(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> list[sky.Instance]:
        raise sky.ProviderFailed("no answer")

    first, second = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(first)
    monkeypatch.setattr(sky.Local, "instances", failing)
    first.close()
    wait_until(lambda: "this one cannot" in caplog.text, "an adoption that fails")
    wait_until(lambda: row_of(name).steward == "", "the steward to release the pool")
    assert double(5) >> second == 10
    monkeypatch.undo()
    second.close()
    assert_nothing_left(second, ids)


def test_a_node_that_is_put_in_place_has_a_lease_before_the_next_renewal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it ends with its steward, if that leaves before the renewal."""
    monkeypatch.setattr(clock, "MOST_BEAT_SECONDS", 3600.0)
    with pool_of(name, nodes=2, lease_seconds=21600) as pool:
        replaced(pool, 1)
        assert set(machine() @ pool) == machines_of(pool)
        assert all(read_lease(Path(str(node.instance.directory))) for node in pool.lease.nodes)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_max_cost_ends_a_pool_that_was_adopted(name: str, program: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts from the opening on, and calls raise that the money is used up."""
    monkeypatch.setattr(budgets, "FIRST_MINUTE_SECONDS", 5.0)
    settings = {"price": 36, "max_cost": 0.6, "lease_seconds": LEASE_SECONDS}
    opener = program(name, **settings, first_seconds=5.0)
    opener.answer()
    mine = pool_of(name, **settings).open()
    ids = machines_of(mine)
    opener.kill()
    await_steward(name, 2)
    wait_until(lambda: not mine.is_active, "the end of the money", 90)
    with pytest.raises(sky.BudgetExceeded):
        double(1) >> mine
    mine.close()
    assert_nothing_left(mine, ids)
    with Ledger(default_url()) as ledger:
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=mine.id)
    # a cent is a second: on a busy machine the end takes longer than the time that is kept for it
    assert Decimal("0.3") < row.cost_usd <= Decimal("0.65")


def test_the_account_goes_on_paying_for_a_pool_that_was_adopted(name: str, program: Start) -> None:
    settings = {"price": 36, "budget": name, "lease_seconds": 5}
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(name, Decimal(1000), Period.RUN))
        opener = program(name, **settings)
        opener.answer()
        with pool_of(name, **settings) as mine:
            ids = machines_of(mine)
            opener.kill()
            await_steward(name, 2)

            def reserved() -> set[str]:
                return {str(one.id) for one in ledger.open_reservations(pool_id=mine.id)}

            before = reserved()
            assert before
            wait_until(lambda: reserved() - before, "another reservation", 180)
            assert double(4) >> mine == 8
        assert_nothing_left(mine, ids)
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=mine.id)
        assert ledger.open_reservations(pool_id=mine.id) == []
        assert ledger.settled_usd(mine.id, name) == row.cost_usd


@pytest.mark.parametrize("who", ["opener", "joined"])
def test_a_process_that_comes_while_the_pool_ends_at_a_limit_opens_another_one(
    who: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the end, and does not attach to a pool that is dying."""
    settings = {"max_lifetime": 3600, "keep_warm": 3600}
    later, may_end, waited = 0.0, threading.Event(), threading.Event()
    boot_seconds = clock.boot_seconds
    monkeypatch.setattr(clock, "boot_seconds", lambda: boot_seconds() + later)
    release, claim = PoolMachines.release, Names.claim

    def release_late(machines: PoolMachines) -> None:
        assert may_end.wait(60)
        release(machines)

    def claim_aloud(*values: Any, **more: Any) -> Claim:
        found = claim(*values, **more)
        if isinstance(found, Wait):
            waited.set()
        return found

    monkeypatch.setattr(PoolMachines, "release", release_late)
    mine = opened_by(who, name, **settings)
    if who == "joined":
        await_steward(name, 2)
    ids = machines_of(mine)
    later = 4000.0
    wait_until(lambda: row_of(name).state is NameState.CLOSING, "the limit")
    monkeypatch.setattr(Names, "claim", claim_aloud)
    with ThreadPoolExecutor(1) as pool:
        other = pool_of(name, **settings)
        opening = pool.submit(other.open)
        assert waited.wait(60)
        later = 0.0
        may_end.set()
        assert opening.result() is other
    assert other.id != mine.id
    assert double(3) >> other == 6
    with pytest.raises(sky.PoolClosed, match="max_lifetime"):
        double(1) >> mine
    mine.close()
    assert_nothing_left(mine, ids)
    ids = machines_of(other)
    other.close()
    sky.release(other.id)
    assert_nothing_left(other, ids)


def test_a_pool_whose_account_does_not_pay_for_the_warm_time_is_ended(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The block ends without an error, and nothing costs more."""
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(name, Decimal(3), Period.RUN))
    with pool_of(name, price=36, budget=name, keep_warm=3600, lease_seconds=5) as pool:
        ids = machines_of(pool)
    assert "is not kept warm, and is ended" in caplog.text
    assert_nothing_left(pool, ids)


def test_the_cost_so_far_is_in_the_ledger_when_it_is_wanted(name: str) -> None:
    """Without `note_cost` it is some seconds behind."""
    works = [sky.Work(system="test", run=name, task=task) for task in ("open", "join")]
    spec = pool_of(name, price=3600).spec
    opener, other = [sky.ComputePool.from_spec(spec, work=work).open() for work in works]
    nap = sky.compute(lambda: time.sleep(1.2))
    with Ledger(default_url()) as ledger:
        try:
            for pool in (other, opener):
                nap() >> pool
                pool.note_cost()
                (mine,) = (user for user in users_of(ledger, opener.id) if user.work == pool.work)
                assert mine.slot_seconds >= 1.2
            assert sum(part.cost_usd for part in sky.cost_parts(works[0])) >= Decimal("1.2")
        finally:
            other.close()
            opener.close()
    parts = sky.cost_parts(sky.Work(system="test", run=name))
    assert {part.work for part in parts} == {*works}
    assert all(part.cost_usd > 0 and part.is_final for part in parts)
    assert float(sum(part.cost_usd for part in parts)) == pytest.approx(opener.cost + other.cost, abs=2e-6)
    opener.note_cost()  # a closed pool has nothing to write


# ── warm pools ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_warm_pool_whose_nodes_have_died_is_opened_anew(name: str) -> None:
    with pool_of(name, keep_warm=3600) as pool:
        ids = machines_of(pool)
    signal_members(*ids, signal.SIGKILL)
    wait_until(lambda: is_gone(ids), "the node to be gone")
    with pool_of(name, keep_warm=3600) as again:
        assert again.id != pool.id
        assert double(5) >> again == 10
        ids = machines_of(again)
    sky.release(name)
    assert is_gone(ids)


def test_warm_nodes_end_by_their_own_clocks(name: str) -> None:
    with pool_of(name, keep_warm=LEASE_SECONDS, lease_seconds=LEASE_SECONDS) as pool:
        ids = machines_of(pool)
    assert row_of(name).state is NameState.WARM
    wait_until(lambda: is_gone(ids), "the warm node to end")


def test_skyward_warm_gives_nodes_and_ledger_a_longer_time(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"price": 36, "keep_warm": 30, "budget": name}
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(name, Decimal(100), Period.RUN))
    with pool_of(name, **settings) as pool:
        (folder,) = [Path(str(node.instance.directory)) for node in pool.lease.nodes]
        ids = machines_of(pool)
    assert cli.main(["warm", name, "--for", "10m"]) == 0
    assert "stays warm until" in capsys.readouterr().out
    assert min(read_lease(folder) or 0.0, read_paid(folder) or 0.0) > uptime() + 500
    until = row_of(name).warm_until
    assert until is not None
    assert timedelta(seconds=500) < until - datetime.now(UTC) < timedelta(seconds=601)
    with pool_of(name, **settings) as again:
        assert (again.id, double(4) >> again) == (pool.id, 8)
    assert cli.main(["stop", name]) == 0
    assert is_gone(ids)
    with Ledger(default_url()) as ledger:
        warm = next(row for row in ledger.cost_rows(CostBy.BUCKET, pool_id=pool.id) if row.key == Bucket.WARM)
        assert warm.seconds > 0
        assert ledger.open_reservations(pool_id=pool.id) == []


# ── a ledger or a node that does not answer a process that leaves ────────────────────────────────────────────────────


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process waits for a locked ledger for long."""
    for module in (named_use, bookkeeping):
        monkeypatch.setattr(module, "LEDGER_BUSY_SECONDS", 0.3)


@contextmanager
def locked_ledger() -> Generator[None]:
    """Keep the write lock of this test's ledger."""
    holder = sqlite3.connect(default_url().removeprefix("sqlite:///"), timeout=60, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.execute("ROLLBACK")
        holder.close()


def renewals() -> set[threading.Thread]:
    """The threads of this process that renew something, those of pools that tests share too."""
    names = {"skyward-client", "skyward-lease", "skyward-node-lease"}
    return {thread for thread in threading.enumerate() if thread.name in names}


def users(pool: sky.ComputePool) -> int:
    with Ledger(default_url()) as ledger:
        return ledger.names.activity([pool.id])[pool.id].users


def opened_by(who: str, name: str, **changes: Any) -> sky.ComputePool:
    """Return a pool that this process is the only one to use, as its opener or as one that has joined."""
    first = pool_of(name, **changes).open()
    if who == "opener":
        return first
    second = pool_of(name, **changes).open()
    first.close()
    return second


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("lease_seconds", "keep_warm"), [(LEASE_SECONDS, 0.0), (3600.0, 3600.0)])
@pytest.mark.parametrize("who", ["opener", "joined"])
def test_the_last_one_that_leaves_while_the_ledger_is_locked_keeps_nothing_alive(
    who: str, lease_seconds: float, keep_warm: float, name: str
) -> None:
    """The error says what is left, until when, and what to do. Closing again ends it before the lease does."""
    others = renewals()
    pool = opened_by(who, name, lease_seconds=lease_seconds, keep_warm=keep_warm)
    ids = machines_of(pool)
    with locked_ledger(), pytest.raises(sky.LedgerError, match="is locked") as refused:
        pool.close()
    for words in ("renews nothing", "UTC at the latest", "close the pool again", f"skyward stop {name}"):
        assert words in str(refused.value)
    wait_until(lambda: renewals() <= others, "the renewals to end")
    with pytest.raises(sky.PoolClosed, match="close it"):
        pool.open()
    if lease_seconds == LEASE_SECONDS:
        wait_until(lambda: is_gone(ids), "the nodes to end with their lease")
    pool.close()
    assert is_gone(ids)
    with pool_of(name) as again:
        assert again.id != pool.id


@pytest.mark.usefixtures("impatient")
def test_others_go_on_if_one_leaves_while_the_ledger_is_locked(name: str, program: Start) -> None:
    """The one that has left counts as a user no more when its lease has run out, and the last one ends the machines."""
    mine = pool_of(name, lease_seconds=LEASE_SECONDS).open()
    other = program(name, lease_seconds=LEASE_SECONDS)
    assert other.answer()["id"] == mine.id
    ids = machines_of(mine)
    with locked_ledger(), pytest.raises(sky.LedgerError, match="renews nothing"):
        mine.close()
    wait_until(lambda: users(mine) == 1, "the lease of the one that has left to run out")
    with pool_of(name, lease_seconds=LEASE_SECONDS) as late:
        assert (late.id, double(3) >> late) == (mine.id, 6)
    other.leave()
    assert is_gone(ids)
    mine.close()


@pytest.mark.parametrize(("who", "is_last"), [("opener", True), ("joined", False)])
def test_a_frozen_node_keeps_no_process_from_leaving(who: str, is_last: bool, name: str) -> None:
    leaver = opened_by(who, name)
    ids = machines_of(leaver)
    stayer = None if is_last else pool_of(name).open()
    signal_members(*ids, signal.SIGSTOP)
    leaver.close()
    if stayer is not None:
        assert users(leaver) == 1
        assert row_of(name).state is NameState.IN_USE
        stayer.close()
    assert is_gone(ids)


def test_a_closer_that_gives_up_is_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not confirm the end of the machines. The next process ends them, and rents at once."""

    def unconfirmed(*_: object, **__: object) -> None:
        raise sky.InstancesLeft("one machine may still run", ["local-1"])

    others = renewals()
    pool = opened_by("joined", name)
    ids = machines_of(pool)
    with monkeypatch.context() as patch:
        patch.setattr(release, "release", unconfirmed)
        with pytest.raises(sky.InstancesLeft):
            pool.close()
    assert row_of(name).state is NameState.CLOSING
    wait_until(lambda: renewals() <= others, "the renewals to end")  # one may run: to give up does not wait for it
    with pool_of(name, provision_timeout=60) as again:
        assert again.id != pool.id
        assert double(2) >> again == 4
    wait_until(lambda: is_gone(ids), "the machines that were left to be gone")
    pool.close()
