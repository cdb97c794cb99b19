"""Pools with a name on this machine, and other processes that use them.

Run as a program, this file is another process that uses the pool of a name.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger import budgets
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NamedPool
from skyward_core.worker.node_clocks import INSTANCE_TAG, kill_instance, members
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]


@sky.compute
def double(number: int) -> int:
    return 2 * number


@sky.compute
def machine() -> str:
    return os.environ[INSTANCE_TAG]


def pool_of(name: str, *, price: float = 0.0, hosts: dict[str, Any] | None = None, **changes: Any) -> sky.ComputePool:
    """Return a pool of one node with this name, not yet open; two of them are as two processes.

    The node is on this machine, or on one of the hosts: their "addresses" and further settings of `sky.Hosts`.
    """
    settings = {"display": "quiet", "lease_seconds": 60, **changes}
    provider: sky.Provider = sky.Local(price_per_hour=price)
    if hosts is not None:
        others = {key: value for key, value in hosts.items() if key != "addresses"}
        provider = sky.Hosts(*hosts["addresses"], user="root", config="/dev/null", **others)
    return sky.ComputePool(name=name, provider=provider, **settings)


def machines_of(pool: sky.ComputePool) -> set[str]:
    return {node.instance.id for node in pool.lease.nodes}


def is_gone(ids: set[str]) -> bool:
    """Return whether no process of these machines is left."""
    return not any(members(instance_id) for instance_id in ids)


def row_of(name: str) -> NamedPool:
    with Ledger(default_url()) as ledger:
        row = ledger.names.named(name)
    assert row is not None
    return row


def rentals() -> list[str]:
    """The ids of all pools that the ledger of this test has."""
    with Ledger(default_url()) as ledger:
        return [entry.id for entry in ledger.pools(include_ended=True)]


def await_steward(name: str, epoch: int) -> None:
    wait_until(lambda: row_of(name).epoch >= epoch and row_of(name).steward != "", f"steward {epoch}")


def replaced(pool: sky.ComputePool, rank: int) -> None:
    """Kill a node of a pool of two, and wait until another machine has its rank."""
    lost = pool.lease.nodes[rank].instance.id
    kill_instance(lost)
    wait_until(lambda: lost not in machines_of(pool) and len(machines_of(pool)) == 2, "another node")


def assert_nothing_left(pool: sky.ComputePool, ids: set[str]) -> None:
    assert is_gone(ids)
    with Ledger(default_url()) as ledger:
        assert ledger.open_intents(pool_id=pool.id) == []
        entry = ledger.pool(pool.id)
    assert entry is not None
    assert entry.ended_at is not None


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for each test."""
    return request.node.name[:100].replace("[", "-").replace("]", "")


class Program:
    """Another process: it opens the pool, calls, and answers each line of its input with the result of a call."""

    def __init__(self, name: str, settings: dict[str, Any], environ: dict[str, str] | None) -> None:
        argv, pipe = [sys.executable, "-m", "tests.pool.named", name, json.dumps(settings)], subprocess.PIPE
        self.process = subprocess.Popen(argv, cwd=REPOSITORY, env=environ, stdin=pipe, stdout=pipe, text=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def call(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("call\n")
        self.process.stdin.flush()
        return self.answer()["result"]

    def leave(self) -> None:
        self.process.communicate("")
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


type Start = Callable[..., Program]


@pytest.fixture
def program() -> Iterator[Start]:
    """Starts another process that uses the pool of a name, with these settings and this environment."""
    started: list[Program] = []

    def start(name: str, *, environ: dict[str, str] | None = None, **settings: Any) -> Program:
        started.append(Program(name, settings, environ))
        return started[-1]

    yield start
    for its in started:
        its.kill()


def _reapers() -> list[int]:
    """Return the reapers that this process has started."""
    children = [
        int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return [pid for pid in children if b"reaper_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _die(_: object) -> None:
    """Stop the reaper, and kill this process."""
    reapers = _reapers()
    for pid in reapers:
        os.kill(pid, signal.SIGSTOP)
    print(json.dumps({"reapers": reapers}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main(name: str, settings: dict[str, Any]) -> None:
    budgets.FIRST_MINUTE_SECONDS = settings.pop("first_seconds", budgets.FIRST_MINUTE_SECONDS)
    dies_at = settings.pop("dies_at", "")
    on_event = lambda event: _die(event) if type(event).__name__ == dies_at else None
    with pool_of(name, on_event=on_event, **settings) as pool:
        found = {"id": pool.id, "machines": sorted(machines_of(pool)), "result": double(21) >> pool}
        print(json.dumps(found), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"result": double(22) >> pool}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
