"""Pools with a name: many processes, one rental; no process is special after the opening.

Run as a program, this file is another process that opens a pool by its name.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NameState
from skyward_core.worker.watchdog import members
from tests.conftest import wait_until

LEASE_SECONDS = 10

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def double(number: int) -> int:
    return 2 * number


def pool_of(name: str, **changes: Any) -> sky.ComputePool:
    """Return a pool of one local node with this name, not yet open."""
    settings = {"provider": sky.Local(), "display": "quiet", "lease_seconds": LEASE_SECONDS, **changes}
    return sky.ComputePool(name=name, **settings)


def is_gone(pool: sky.ComputePool, ids: set[str]) -> bool:
    """Return whether no process of these machines is left."""
    return not any(members(instance_id) for instance_id in ids)


def machines_of(pool: sky.ComputePool) -> set[str]:
    return {node.instance.id for node in pool.lease.nodes}


def state_of(name: str) -> NameState:
    with Ledger(default_url()) as ledger:
        row = ledger.names.named(name)
    assert row is not None
    return row.state


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for each test."""
    return request.node.name[:100].replace("[", "-").replace("]", "")


def test_a_name_that_was_closed_is_opened_anew(name: str) -> None:
    with pool_of(name) as pool:
        first = pool.id
    with pool_of(name) as pool:
        assert pool.id != first
        assert double(1) >> pool == 2


def test_a_warm_pool_is_found_by_the_next(name: str) -> None:
    """It is the same pool, also for the third; then its nodes end by their own clocks."""
    pool = pool_of(name, keep_warm=LEASE_SECONDS)
    with pool:
        first, ids = pool.id, machines_of(pool)
    assert state_of(name) is NameState.WARM
    for _ in range(2):
        with pool_of(name, keep_warm=LEASE_SECONDS) as again:
            assert (again.id, double(4) >> again) == (first, 8)
    assert state_of(name) is NameState.WARM
    wait_until(lambda: is_gone(pool, ids), "the warm nodes to end")


def test_keep_warm_needs_a_name() -> None:
    with pytest.raises(sky.BadRequest, match="keep_warm needs a name"):
        sky.ComputePool(provider=sky.Local(), keep_warm=60)


def children() -> list[int]:
    """Return the processes that all threads of this process have started."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def main() -> None:
    """Open the pool of a name, call, and close when the input ends."""
    name, *steps = sys.argv[1:]

    def step(event: Any) -> None:
        if f"die at {type(event).__name__}" in steps:
            reapers = [pid for pid in children() if b"reaper_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            for pid in reapers:
                os.kill(pid, signal.SIGSTOP)
            print(json.dumps({"reapers": reapers}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    pool = sky.ComputePool(name=name, provider=sky.Local(), display="quiet", lease_seconds=LEASE_SECONDS, on_event=step)
    with pool:
        print(json.dumps({"id": pool.id, "result": double(21) >> pool}), flush=True)
        sys.stdin.read()
