"""Pools with a name on machines that are reached over SSH: joined, adopted after a kill, kept warm, and ended.

Run as a program, this file is a process on another machine: it has an empty home, the ledger and the secret.
"""

import base64
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
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NameState
from tests.conftest import processes_by_tag, wait_until
from tests.pool.named import await_steward, machines_of, row_of
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

REPOSITORY = Path(__file__).parents[3]
NAME = "over-ssh"
SECRET = base64.b64encode(b"n" * 32).decode()

pytestmark = [pytest.mark.timeout(400)]


@sky.compute
def machine(number: int) -> tuple[str, int]:
    return os.environ["SKYWARD_INSTANCE_ID"], 2 * number


def pool_of(hosts: dict[str, Any]) -> sky.ComputePool:
    """Return a pool of two of these hosts with the name, not yet open."""
    provider = sky.Hosts(*hosts["addresses"], user="root", config="/dev/null", **hosts["keys"])
    terms = {"nodes": 2, "keep_warm": 120, "lease_seconds": 10, "provision_timeout": 150}
    return sky.ComputePool(name=NAME, provider=provider, display="quiet", **terms)


@pytest.fixture
def hosts(fleet: Fleet, mirror: Mirror, tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts for the pool, and a spare one. No process of a node is left on them."""
    hosts = [fleet.create() for _ in range(3)]
    for host in hosts:
        mirror.configure(host)
    yield hosts
    wait_until(lambda: not any(nodes_on(host) for host in hosts), "the end of all nodes", 30)
    for host in hosts:
        host.crash()


def nodes_on(host: Host) -> list[int]:
    """Return the processes of nodes on a host."""
    there = set(host._processes())
    return [pid for pid, _ in processes_by_tag("SKYWARD_INSTANCE_ID") if pid in there]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process on another machine. It opens or joins the pool, prints a line of JSON, and leaves at the end of
    its input.
    """
    started: list[subprocess.Popen[str]] = []

    def start(settings: dict[str, Any]) -> subprocess.Popen[str]:
        home = tmp_path / f"home-{len(started)}"
        home.mkdir()
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "SKYWARD_LEDGER": default_url(),
            "SKYWARD_SECRET_KEY": SECRET,
        }
        argv = [sys.executable, "-m", "tests.nightly.pool.test_named_hosts", json.dumps(settings)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(argv, cwd=REPOSITORY, env=environ, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_a_pool_over_ssh_is_joined_adopted_kept_warm_and_ended(
    hosts: list[Host],
    elsewhere: Callable[[dict[str, Any]], subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SKYWARD_SECRET_KEY", SECRET)
    known = tmp_path / "known_hosts"
    known.write_text("".join(f"{host.known_hosts_line}\n" for host in hosts))
    settings = {
        "addresses": [host.ip for host in hosts],
        "keys": {"key": str(hosts[0].key_path), "known_hosts": str(known)},
    }
    opener = elsewhere(settings)
    opened = answer(opener)
    with pool_of(settings) as pool:
        assert (pool.id, machines_of(pool)) == (opened["id"], set(opened["machines"]))
        assert {result for _, result in machine(3) @ pool} == {6}

        opener.kill()
        opener.wait()
        await_steward(NAME, 2)
        lost = pool.lease.nodes[1].instance.id
        for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID"):
            if tag == lost:
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: lost not in machines_of(pool) and pool.instance_count == 2, "another machine", 120)
        left = machines_of(pool)
        assert {found for found, _ in machine(4) @ pool} == left
    assert row_of(NAME).state is NameState.WARM

    later = elsewhere(settings)
    joined = answer(later)
    assert (joined["id"], set(joined["machines"])) == (opened["id"], left)
    later.communicate("")
    assert later.returncode == 0
    assert row_of(NAME).state is NameState.WARM
    sky.release(pool.id)
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool.id)
        assert ledger.open_intents(pool_id=pool.id) == []
    assert entry is not None
    assert entry.ended_at is not None


def main(hosts: dict[str, Any]) -> None:
    with pool_of(hosts) as pool:
        assert (machine(5) >> pool)[1] == 10
        print(json.dumps({"id": pool.id, "machines": sorted(machines_of(pool))}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
