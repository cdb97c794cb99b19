"""What the parts of a bill are when a process of a pool with a name is stopped, or cut off from the ledger, and another
one works on.

Run as a program, this file is a process that uses the pool of a name until it is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.ledger import Ledger, default_url
from skyward_core.ledger.receipt import users_of
from skyward_core.ledger.rows import CostBy
from tests.pool.named import name  # noqa: F401 - a fixture
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
PRICE = 3600.0
"""USD per hour: a second of a machine is a dollar."""
LEASE_SECONDS = 6
FIRST, SECOND = (sky.Work(system="test", run="1", task=task) for task in ("stopped", "works"))

pytestmark = [pytest.mark.timeout(240)]


def use_of(name: str, work: sky.Work) -> sky.PoolUse:
    provider = sky.Local(price_per_hour=PRICE)
    return sky.PoolUse(
        sky.ComputePool(name=name, provider=provider, display="quiet", work=work, lease_seconds=LEASE_SECONDS)
    )


@sky.compute
def hold(go: str) -> None:
    Path(f"{go}-begun").touch()
    while not Path(go).exists():
        time.sleep(0.01)


@contextlib.contextmanager
def process(name: str, go: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.nightly.pool.test_money_of_silent_processes", name, str(go), way]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def agree(pool_id: str) -> dict[str, Decimal]:
    """The parts, which add up to the bill, to the micro-dollar: users, owners and tasks."""
    with Ledger(default_url()) as ledger, ledger.snapshot():
        (whole,) = ledger.cost_rows(CostBy.POOL, pool_id=pool_id)
        rows = {by: ledger.cost_rows(by, pool_id=pool_id) for by in (CostBy.TASK, CostBy.OWNER, CostBy.BUCKET)}
        users = {user.work.task: user.cost_usd for user in users_of(ledger, pool_id)}
    for its in rows.values():
        assert sum(row.cost_usd for row in its) == whole.cost_usd
        assert all(row.cost_usd >= 0 for row in its)
    assert sum(users.values()) <= whole.cost_usd
    return {**users, "all": whole.cost_usd}


@pytest.mark.parametrize("way", ["stopped", "without the ledger"])
def test_a_silent_process_has_what_its_calls_have_held_and_others_have_the_rest(
    way: str, name: str, tmp_path: Path
) -> None:
    """Its call ends soon after it fell silent; then the other process has the only slot. The head says so at the end."""
    first, second = tmp_path / "first", tmp_path / "second"
    with use_of(name, SECOND) as works, process(name, first, way) as silent:
        assert silent.stdout is not None
        assert json.loads(silent.stdout.readline()) == works.pool.id
        wait_until(Path(f"{first}-begun").exists, "the call of the other process")
        began = time.monotonic()
        wait_until(lambda: agree(works.pool.id).get("stopped", 0) > 0, "a note of it")
        if way == "stopped":
            os.kill(silent.pid, signal.SIGSTOP)
        first.touch()
        held_at_most = time.monotonic() - began + 1.0
        call = works.submit(hold(str(second)))
        wait_until(Path(f"{second}-begun").exists, "the slot to be free")
        took = time.monotonic()
        while time.monotonic() - took < 3 * LEASE_SECONDS:  # until the lease of the silent process has run out
            agree(works.pool.id)
            time.sleep(0.2)
        second.touch()
        call.result(60)
        held = time.monotonic() - took
    parts = agree(works.pool.id)
    assert float(parts["stopped"]) <= held_at_most
    assert float(parts["works"]) >= held - 1.0
    assert parts["works"] == Decimal(repr(works.cost))


def be_a_process(name: str, go: str, way: str) -> None:
    with use_of(name, FIRST) as use:
        use.submit(hold(go))
        print(json.dumps(use.pool.id), flush=True)
        if way == "without the ledger":
            wait_until(Path(f"{go}-begun").exists, "the call")
            wait_until(lambda: agree(use.pool.id).get("stopped", 0) > 0, "a note of this process")
            from skyward_core.ledger.database import Database

            def refuse(_: object) -> None:
                raise sky.LedgerError("it does not answer")

            Database.write = Database.read = contextlib.contextmanager(refuse)  # type: ignore[assignment, method-assign]
        time.sleep(600)


if __name__ == "__main__":
    be_a_process(*sys.argv[1:])
