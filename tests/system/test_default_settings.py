"""The promises about lost clients, with the default settings of a pool: its lease of 120 s, its image and its retries.

Other tests choose short leases, so that many fit into a run. Here all clients are killed at once, with their reapers,
and one wait is for all their machines. Run as a program, this file is one of the clients.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward_core as sky
from skyward_core.ledger import Ledger, default_url
from skyward_core.ledger.receipt import receipt
from tests.conftest import processes_by_tag
from tests.real_hosts import forever, owned_by
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import WAIT_SECONDS, wait_until

REPOSITORY = Path(__file__).parents[2]
LEASE_SECONDS = sky.PoolSpec.model_fields["lease_seconds"].default
NAMED = {"name": "test-default-settings"}
PRICE = 3.6
"""USD per hour: a thousandth of a dollar is a second."""

pytestmark = [pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Killed:
    """A pool whose clients were killed, its machine, and for how long that was seen to live after the kill, or after
    its pool was detached.
    """

    pool: str
    instance: str
    seconds: float


def be_client(provider: str, settings: str, then: str) -> None:
    """Open a pool, give it a call that does not end, and wait to be killed."""
    pool = sky.ComputePool(provider=json.loads(provider), display="quiet", **json.loads(settings)).open()
    pool.submit(forever())
    found = [pool.id, pool.lease.nodes[0].instance.id]
    if then == "detach":
        pool.detach()
    print(json.dumps(found), flush=True)
    time.sleep(600)


class Client:
    """One of the clients, as a process of its own."""

    def __init__(self, provider: dict[str, object], settings: dict[str, object] | None = None, then: str = "") -> None:
        program = [sys.executable, "-m", "tests.system.test_default_settings"]
        argv = [*program, json.dumps({**provider, "price_per_hour": PRICE}), json.dumps(settings or {}), then]
        self._process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def machine(self) -> tuple[str, str]:
        """Wait until its pool is open; return the ids of pool and machine."""
        assert self._process.stdout is not None
        pool, instance = json.loads(self._process.stdout.readline())
        return pool, instance

    def kill(self) -> None:
        """Kill its reaper, then itself, so that neither ends anything."""
        for child in psutil.Process(self._process.pid).children() if self._process.poll() is None else ():
            if any("reaper_process" in word for word in child.cmdline()):
                child.kill()
        self._process.kill()
        self._process.communicate(timeout=60)


def living(machines: dict[str, tuple[str, str]]) -> set[str]:
    there = {instance for _, instance in processes_by_tag("SKYWARD_INSTANCE_ID")}
    return {kind for kind, (_, instance) in machines.items() if instance in there}


def command(*words: str) -> dict[str, Any]:
    """Return what a command of `skyward` prints as JSON."""
    program = [sys.executable, "-m", "skyward_core.cli", *words, "--json"]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def assert_calls_are_shown_from_another_process(pool: str, pid: int) -> None:
    """Of a pool on a host, over SSH: `skyward calls POOL --stacks`."""
    (call,) = command("calls", pool, "--stacks")["calls"]
    assert (call["function"], call["state"], call["node"], call["client_pid"]) == ("forever", "running", 0, pid)
    assert "real_hosts.py" in call["stacks"]


@pytest.fixture(scope="module")
def killed(fleet: Fleet, mirror: Mirror, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Killed]]:
    """Yield the pools of clients that were killed, after the machines have ended."""
    bare = fleet.create()
    mirror.configure(bare)
    hosts = owned_by([bare], tmp_path_factory.mktemp("default") / "known_hosts").to_json()
    local = sky.Local().to_json()
    with ExitStack() as stack:
        stack.callback(bare.crash)

        def client(*arguments: object, **more: object) -> Client:
            found = Client(*arguments, **more)
            stack.callback(found.kill)
            return found

        clients = {"host": client(hosts), "plain": client(local), "opener": client(local, NAMED)}
        machines = {"opener": clients["opener"].machine()}
        clients["joiner"] = client(local, NAMED)
        machines |= {kind: one.machine() for kind, one in clients.items() if kind not in machines}
        detached, began = client(local, then="detach"), dict[str, float]()
        machines["detached"], began["detached"] = detached.machine(), time.monotonic()
        assert machines["joiner"] == machines["opener"]
        assert living(machines) == set(machines)
        assert_calls_are_shown_from_another_process(machines["host"][0], clients["host"].pid)
        for one in clients.values():
            one.kill()
        detached.kill()
        began |= dict.fromkeys(clients, time.monotonic())
        ended = dict[str, float]()

        def all_have_ended() -> bool:
            now = time.monotonic()
            ended.update({kind: now - began[kind] for kind in {*machines} - living(machines) - {*ended}})
            return len(ended) == len(machines)

        wait_until(all_have_ended, "the leases to run out", LEASE_SECONDS + WAIT_SECONDS)
        yield {kind: Killed(*machines[kind], ended[kind]) for kind in machines}


def test_a_machine_ends_when_the_lease_of_its_last_client_is_over(killed: dict[str, Killed]) -> None:
    """On a host, on this computer, with a name and two users, and detached. Before that it lives: a client that is
    silent for less than its lease finds it.
    """
    renewal = 20  # the last sign of life was at most so long before the kill
    early = {kind for kind, one in killed.items() if one.seconds < LEASE_SECONDS - renewal}
    assert early == {"plain"}, killed  # its owner was seen to be dead


def test_the_next_sweep_closes_the_bills(killed: dict[str, Killed]) -> None:
    """With the seconds for which each machine has lived, and not those after the sweep; and the names are free. The
    ledger's lease of a pool may end some seconds after those of its machines.
    """
    left = {one.pool for one in killed.values()}

    def are_closed() -> bool:
        left.difference_update(finding["pool"] for finding in command("sweep", "--yes")["closed"])
        return not left

    wait_until(are_closed, "the leases of the pools to run out")
    with Ledger(default_url()) as ledger:
        receipts = {kind: receipt(ledger, one.pool) for kind, one in killed.items()}
    for kind, found in receipts.items():
        (machine,) = found["resources"]
        began, ended = (datetime.fromisoformat(machine[field]) for field in ("intended_at", "gone_at"))
        assert killed[kind].seconds <= sum(machine["seconds"].values()) <= (ended - began).total_seconds(), kind
        assert found["left"] == []
        buckets = sum(bucket["cost_usd"] for bucket in found["buckets"].values())
        assert buckets == pytest.approx(found["total_cost_usd"], abs=1e-6)
    users = receipts["opener"]["users"]
    running = receipts["opener"]["buckets"]["running calls"]["cost_usd"]
    assert sorted(user["cost_usd"] > 0 for user in users) == [False, True], "one has waited for the slot of the other"
    assert sum(user["cost_usd"] for user in users) <= running + 1e-6


if __name__ == "__main__":
    be_client(*sys.argv[1:])
