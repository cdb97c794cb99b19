"""Pools with a name: many processes, one rental; no process is special after the opening.

Run as a program, this file is another process that opens a pool by its name.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Period
from tests.conftest import signal_members, wait_until
from tests.system.pool.test_named_pools import (  # noqa: F401 - fixtures
    double,
    is_gone,
    machines_of,
    main,
    name,
    pool_of,
)

REPOSITORY = Path(__file__).parents[3]

pytestmark = [pytest.mark.timeout(240)]


def rentals() -> list[str]:
    """The ids of all pools that the ledger of this test has."""
    with Ledger(default_url()) as ledger:
        return [entry.id for entry in ledger.pools(include_ended=True)]


@pytest.fixture
def program() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another process that opens the pool of a name, calls, prints a line of JSON, and closes at the end of its
    input.
    """
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *steps: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, name, *steps],
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


def test_the_second_opener_uses_the_pool_of_the_first(name: str) -> None:
    """The first leaves, the second goes on; the last one ends the machines."""
    first, second = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(first)
    assert second.id == first.id
    assert (double(1) >> first, double(2) >> second) == (2, 4)
    first.close()
    assert double(3) >> second == 6
    second.close()
    assert is_gone(second, ids)
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(first.id)
        assert entry is not None
        assert entry.ended_at is not None
        assert ledger.open_intents(pool_id=first.id) == []


def test_a_call_of_one_process_is_found_by_another(name: str) -> None:
    """By its id: the retry of a step takes the result of the step that died."""
    with pool_of(name) as first, pool_of(name) as second:
        call = second.start_detached(double(5), call_id="train/1")
        assert first.detached_call("train/1").result(60) == 10
        assert first.start_detached(double(5), call_id="train/1").result(60) == 10
        assert not first.start_detached(double(5), call_id="train/1").is_new
        assert call.is_new


def test_the_opener_that_leaves_last_ends_the_machines(name: str) -> None:
    first, second = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(first)
    second.close()
    assert double(1) >> first == 2
    first.close()
    assert is_gone(first, ids)
    assert first.receipt is not None


def test_a_warm_pool_whose_nodes_have_died_is_opened_anew(name: str) -> None:
    """The ledger says that it is warm; no node answers."""
    with pool_of(name, keep_warm=3600) as pool:
        first, ids = pool.id, machines_of(pool)
    for instance_id in ids:
        signal_members(instance_id, signal.SIGKILL)
    wait_until(lambda: is_gone(pool, ids), "the nodes to be gone")
    with pool_of(name, keep_warm=3600) as again:
        assert again.id != first
        assert double(5) >> again == 10
        ids = machines_of(again)
    sky.release(name)
    assert is_gone(again, ids)


def test_a_pool_whose_account_does_not_pay_for_the_warm_time_is_ended(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The block ends without an error, and nothing costs more."""
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(name, Decimal(3), Period.RUN))
    provider = sky.Local(price_per_hour=36)
    with pool_of(name, provider=provider, budget=name, keep_warm=3600, lease_seconds=5) as pool:
        ids = machines_of(pool)
    assert "is not kept warm, and is ended" in caplog.text
    assert is_gone(pool, ids)
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool.id)
        assert entry is not None
        assert entry.ended_at is not None


def test_other_settings_are_refused_with_the_fields(name: str) -> None:
    """Nothing is rented for them."""
    with pool_of(name, nodes=1):
        before = rentals()
        with pytest.raises(sky.BadRequest, match=r"nodes: it has 1, here 2") as refused:
            pool_of(name, nodes=2).open()
        assert name in str(refused.value)
        assert rentals() == before


def test_settings_of_one_process_may_differ(name: str) -> None:
    with pool_of(name) as pool, pool_of(name, retries=0, lease_seconds=20, provision_timeout=60) as other:
        assert other.id == pool.id


def test_of_many_that_open_a_name_at_once_one_rents(name: str) -> None:
    """All calls are right, and nothing is left."""
    before = rentals()
    results: list[tuple[str, int]] = []
    done = threading.Barrier(6)

    def use(number: int) -> None:
        with pool_of(name) as pool:
            results.append((pool.id, double(number) >> pool))
            done.wait(120)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pool_id for pool_id, _ in results}) == 1
    assert sorted(result for _, result in results) == [0, 2, 4, 6, 8, 10]
    assert len(rentals()) == len(before) + 1


def test_an_opener_that_is_killed_does_not_end_the_pool_of_the_others(
    name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """And a process that comes after it finds the same pool."""
    opener = program(name)
    known = answer(opener)
    with pool_of(name) as mine:
        assert mine.id == known["id"]
        opener.kill()
        opener.wait()
        assert double(6) >> mine == 12
        with pool_of(name) as late:
            assert (late.id, double(7) >> late) == (known["id"], 14)
        assert double(8) >> mine == 16
        ids = machines_of(mine)
    assert is_gone(mine, ids)


def test_an_opener_that_is_killed_while_it_opens_is_not_waited_for(
    name: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """The next process condemns its pool at once and rents; the reaper of the dead one, which is stopped until then,
    ends the machines.
    """
    opener = program(name, "die at InstanceProvisioned")
    reapers = answer(opener)["reapers"]
    try:
        assert opener.wait(120) == -signal.SIGKILL
        dead = rentals()[-1]
        with pool_of(name, provision_timeout=60) as pool:
            assert pool.id != dead
            assert double(9) >> pool == 18
    finally:
        assert len(reapers) == 1
        os.kill(reapers[0], signal.SIGCONT)
    with Ledger(default_url()) as ledger:
        wait_until(lambda: ledger.open_intents(pool_id=dead) == [], "the machines of the dead opener to be gone")


if __name__ == "__main__":
    main()
