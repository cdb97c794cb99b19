"""Another client of a named pool keeps it when the opener is gone: it replaces nodes, pays, and ends the pool.

Run as a program, this file is another process that uses the pool of a name.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger import budgets
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names import Names
from skyward_core.ledger.names_policy import Claim, NameState, Wait
from skyward_core.ledger.rows import Account, CostBy, Period
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.session import limits, renewal
from skyward_core.session.sealed_lease import find_lease
from skyward_core.worker.watchdog import kill_instance, read_lease
from tests.conftest import wait_until
from tests.system.pool.test_stewards import (  # noqa: F401 - fixtures
    assert_nothing_left,
    await_steward,
    double,
    machine,
    machines_of,
    main,
    name,
    pool_of,
    replaced,
    row_of,
)

REPOSITORY = Path(__file__).parents[3]

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def program() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another process that uses the pool of a name, prints a line of JSON, and closes at the end of its input."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, **settings: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_a_client_replaces_lost_nodes_when_the_opener_was_killed(
    name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """It has adopted the pool; at the end nothing is left, and the cost covers the machines of both."""
    opener = program(name, price=36)
    known = answer(opener)
    with pool_of(name, price=36) as mine:
        assert mine.id == known["id"]
        ids = machines_of(mine)
        kill(opener)
        await_steward(name, 2)
        replaced(mine, 1)
        ids |= machines_of(mine)
        assert len(ids) == 3
        assert set(machine() @ mine) == machines_of(mine)
    assert_nothing_left(mine, ids)
    with Ledger(default_url()) as ledger:
        intents = ledger.intents(pool_id=mine.id)
        entry = ledger.pool(mine.id)
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=mine.id)
    assert entry is not None
    assert len(intents) == 3
    for intent in intents:
        assert intent.gone_at is not None
        lived = (intent.gone_at - intent.intended_at).total_seconds()
        assert sum(intent.seconds.values()) == pytest.approx(lived, abs=2.0)
    assert row.cost_usd >= Decimal("0.01") * int(row.seconds)


def test_a_node_that_is_put_in_place_has_a_lease_before_the_next_renewal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it ends with its steward, if that leaves before the renewal."""
    monkeypatch.setattr(renewal, "MOST_BEAT_SECONDS", 3600.0)
    with pool_of(name, lease_seconds=21600) as pool:
        replaced(pool, 1)
        assert set(machine() @ pool) == machines_of(pool)
        assert all(read_lease(Path(str(node.instance.directory))) for node in pool.lease.nodes)


def test_a_client_gives_the_pool_another_head_when_the_opener_was_killed(
    name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """Both at once; the call that ran on the head runs again."""
    opener = program(name)
    answer(opener)
    with pool_of(name) as mine:
        ids = machines_of(mine)
        kill(opener)
        replaced(mine, 0)
        ids |= machines_of(mine)
        assert double(7) >> mine == 14
        wait_until(lambda: len(machines_of(mine)) == 2, "two nodes")
        assert sorted(machine() @ mine) == sorted(machines_of(mine))
        ids |= machines_of(mine)
    assert_nothing_left(mine, ids)


def test_a_third_process_keeps_the_pool_when_its_second_steward_was_killed(
    name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """It knows the nodes of both."""
    opener = program(name)
    answer(opener)
    second = program(name)
    answer(second)
    kill(opener)
    await_steward(name, 2)
    with pool_of(name) as mine:
        ids = machines_of(mine)
        kill(second)
        await_steward(name, 3)
        replaced(mine, 1)
        ids |= machines_of(mine)
        assert sorted(machine() @ mine) == sorted(machines_of(mine))
    assert_nothing_left(mine, ids)


def test_a_frozen_opener_is_no_steward_any_more(name: str, program: Callable[..., subprocess.Popen[str]]) -> None:
    """It comes back, ends nothing and replaces nothing, and its own calls go on; so does it when it leaves."""
    opener = program(name, price=36, max_cost=100)
    known = answer(opener)
    with pool_of(name, price=36, max_cost=100) as mine:
        ids = machines_of(mine)
        os.kill(opener.pid, signal.SIGSTOP)
        await_steward(name, 2)
        replaced(mine, 1)
        ids |= machines_of(mine)
        os.kill(opener.pid, signal.SIGCONT)
        ordered(opener, "call")
        assert answer(opener) == {"result": 44}
        assert row_of(name).epoch == 2
        ordered(opener, "leave")
        assert opener.wait(60) == 0
        assert mine.id == known["id"]
        assert sorted(machine() @ mine) == sorted(machines_of(mine))
        assert machines_of(mine) <= ids
        assert row_of(name).epoch == 2
    assert_nothing_left(mine, ids)


def ordered(process: subprocess.Popen[str], line: str) -> None:
    """Send a line to a program that uses the pool."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_an_opener_that_was_frozen_keeps_the_pool_again_when_it_has_no_other_steward(
    name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """It adopts the nodes of the one that had the pool meanwhile, replaces them, and pays; nothing is left at the end."""
    opener = program(name, price=36, max_cost=100)
    answer(opener)
    with pool_of(name, price=36, max_cost=100) as mine:
        ids = machines_of(mine)
        os.kill(opener.pid, signal.SIGSTOP)
        await_steward(name, 2)
        replaced(mine, 1)
        ids |= machines_of(mine)
        assert set(machine() @ mine) == machines_of(mine)  # the new node takes calls
        os.kill(opener.pid, signal.SIGCONT)
        ordered(opener, "call")
        assert answer(opener) == {"result": 44}
    await_steward(name, 3)

    def nodes() -> set[str]:
        lease, _ = find_lease(mine.id)
        return {node.instance.id for node in lease.nodes}

    (lost,) = [node.instance.id for node in find_lease(mine.id)[0].nodes if node.rank == 1]
    assert lost in ids
    kill_instance(lost)
    wait_until(lambda: lost not in nodes() and len(nodes()) == 2, "another node", 60)
    ids |= nodes()
    ordered(opener, "call")
    assert answer(opener) == {"result": 44}
    ordered(opener, "leave")
    assert opener.wait(60) == 0
    assert len(ids) == 4
    assert_nothing_left(mine, ids)


def test_max_cost_ends_a_pool_that_was_adopted(
    name: str, program: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts from the opening on, and calls raise that the money is used up."""
    monkeypatch.setattr(budgets, "FIRST_MINUTE_SECONDS", 5.0)
    settings = {"price": 36, "max_cost": 0.6, "nodes": 1}
    opener = program(name, **settings, first_seconds=5.0)
    answer(opener)
    mine = pool_of(name, **settings).open()
    ids = machines_of(mine)
    kill(opener)
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


def test_the_account_goes_on_paying_for_a_pool_that_was_adopted(
    name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """More is reserved when the opener's reservation runs out; at the end the account has paid the real cost."""
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(name, Decimal(1000), Period.RUN))
    settings = {"price": 36, "budget": name, "nodes": 1, "lease_seconds": 5}
    opener = program(name, **settings)
    answer(opener)
    with pool_of(name, **settings) as mine:
        ids = machines_of(mine)
        kill(opener)
        await_steward(name, 2)
        with Ledger(default_url()) as ledger:
            before = {one.id for one in ledger.open_reservations(pool_id=mine.id)}
            assert before

            def is_renewed() -> bool:
                after = {one.id for one in ledger.open_reservations(pool_id=mine.id)}
                return bool(after - before)

            wait_until(is_renewed, "another reservation", 180)
        assert double(4) >> mine == 8
    assert_nothing_left(mine, ids)
    with Ledger(default_url()) as ledger:
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=mine.id)
        assert ledger.open_reservations(pool_id=mine.id) == []
        assert ledger.settled_usd(mine.id, name) == row.cost_usd


@pytest.mark.parametrize("who", ["opener", "joined"])
def test_a_process_that_comes_while_the_pool_ends_at_a_limit_opens_another_one(
    who: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the end, and does not attach to a pool that is dying."""
    settings = {"nodes": 1, "max_lifetime": 3600, "keep_warm": 3600}
    later, may_end, waited = 0.0, threading.Event(), threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later)
    monkeypatch.setattr(limits, "time", clock)
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
    first = pool_of(name, **settings).open()
    if who == "joined":
        mine = pool_of(name, **settings).open()
        first.close()
        await_steward(name, 2)
    else:
        mine = first
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


def test_a_warm_pool_is_kept_by_the_process_that_comes(name: str) -> None:
    with pool_of(name, keep_warm=60) as first:
        ids = machines_of(first)
    with pool_of(name, keep_warm=60) as mine:
        await_steward(name, 2)
        replaced(mine, 1)
        ids |= machines_of(mine)
    assert row_of(name).state is NameState.WARM
    sky.release(mine.id)
    assert_nothing_left(mine, ids)


def test_a_process_that_cannot_adopt_leaves_it_to_others(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool goes on as before, without a steward until a process can be it."""
    first, second = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(first)
    monkeypatch.setattr(sky.Local, "instances", failing)
    first.close()
    wait_until(lambda: "this one cannot" in caplog.text, "an adoption that fails")
    wait_until(lambda: row_of(name).steward == "", "the steward to resign")
    assert double(5) >> second == 10
    monkeypatch.undo()
    second.close()
    assert_nothing_left(second, ids)


def failing(*_: object) -> list[sky.Instance]:
    raise sky.ProviderFailed("no answer")


if __name__ == "__main__":
    main()
