"""Another client of a named pool keeps it when the opener is gone: it replaces nodes, pays, and ends the pool.

Run as a program, this file is another process that uses the pool of a name.
"""

import json
import os
import sys
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger import budgets
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NamedPool
from skyward_core.worker.watchdog import INSTANCE_TAG, kill_instance, members
from tests.conftest import wait_until

LEASE_SECONDS = 10

pytestmark = [pytest.mark.timeout(300)]


@sky.compute
def double(number: int) -> int:
    return 2 * number


@sky.compute
def machine() -> str:
    return os.environ[INSTANCE_TAG]


def pool_of(name: str, *, price: float = 0.0, **changes: Any) -> sky.ComputePool:
    """Return a pool of two local nodes with this name, not yet open."""
    settings = {"nodes": 2, "display": "quiet", "lease_seconds": LEASE_SECONDS, **changes}
    return sky.ComputePool(name=name, provider=sky.Local(price_per_hour=price), **settings)


def row_of(name: str) -> NamedPool:
    with Ledger(default_url()) as ledger:
        row = ledger.names.named(name)
    assert row is not None
    return row


def machines_of(pool: sky.ComputePool) -> set[str]:
    return {node.instance.id for node in pool.lease.nodes}


def await_steward(name: str, epoch: int) -> None:
    """Wait until the pool has this steward, and it has adopted the pool: it has written what the machines cost."""
    wait_until(lambda: row_of(name).epoch >= epoch and row_of(name).steward != "", f"steward {epoch}")


def assert_nothing_left(pool: sky.ComputePool, ids: set[str]) -> None:
    assert not any(members(instance_id) for instance_id in ids)
    with Ledger(default_url()) as ledger:
        assert ledger.open_intents(pool_id=pool.id) == []
        entry = ledger.pool(pool.id)
    assert entry is not None
    assert entry.ended_at is not None


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for each test."""
    return request.node.name[:100].replace("[", "-").replace("]", "")


def replaced(pool: sky.ComputePool, rank: int) -> None:
    """Kill a node of the pool, and wait until another machine has its rank."""
    lost = pool.lease.nodes[rank].instance.id
    kill_instance(lost)
    wait_until(lambda: lost not in machines_of(pool) and len(machines_of(pool)) == 2, "another node", 60)


def test_a_client_goes_on_when_the_opener_has_left(name: str) -> None:
    first, second = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(first)
    first.close()
    await_steward(name, 2)
    replaced(second, 1)
    ids |= machines_of(second)
    assert sorted(machine() @ second) == sorted(machines_of(second))
    second.close()
    assert_nothing_left(second, ids)


def main() -> None:
    """Use the pool of a name until the input ends or says "leave"; make a call for each other line."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    budgets.FIRST_MINUTE_SECONDS = settings.pop("first_seconds", budgets.FIRST_MINUTE_SECONDS)
    with pool_of(name, **settings) as pool:
        print(json.dumps({"id": pool.id, "result": double(21) >> pool}), flush=True)
        for line in sys.stdin:
            if line.strip() == "leave":
                break
            print(json.dumps({"result": double(22) >> pool}), flush=True)
