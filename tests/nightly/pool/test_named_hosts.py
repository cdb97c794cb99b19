"""Pools with a name on machines that are reached over SSH."""

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NameState
from tests.conftest import processes_by_tag
from tests.pool.named import Program, Start, await_steward, machine, machines_of, pool_of, program, row_of  # noqa: F401 - a fixture
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

NAME = "over-ssh"
SECRET = base64.b64encode(b"n" * 32).decode()

pytestmark = [pytest.mark.timeout(400)]


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


def test_a_pool_over_ssh_is_joined_adopted_kept_warm_and_ended(
    hosts: list[Host], program: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines have an empty home, the ledger and the secret."""
    monkeypatch.setenv("SKYWARD_SECRET_KEY", SECRET)
    known = tmp_path / "known_hosts"
    known.write_text("".join(f"{host.known_hosts_line}\n" for host in hosts))
    reach = {"key": str(hosts[0].key_path), "known_hosts": str(known)}
    settings = {"hosts": {"addresses": [host.ip for host in hosts], **reach}, "nodes": 2, "keep_warm": 120}
    settings |= {"lease_seconds": 30, "provision_timeout": 150}

    def elsewhere(home: str) -> Program:
        (tmp_path / home).mkdir()
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / home), "SKYWARD_SECRET_KEY": SECRET}
        return program(NAME, environ={**environ, "SKYWARD_LEDGER": default_url()}, **settings)

    opener = elsewhere("first")
    opened = opener.answer()
    with pool_of(NAME, **settings) as pool:
        assert (pool.id, machines_of(pool)) == (opened["id"], set(opened["machines"]))
        opener.kill()
        await_steward(NAME, 2)
        lost = pool.lease.nodes[1].instance.id
        for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID"):
            if tag == lost:
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: lost not in machines_of(pool) and pool.instance_count == 2, "another machine", 120)
        left = machines_of(pool)
        assert {*(machine() @ pool)} == left
    assert row_of(NAME).state is NameState.WARM
    later = elsewhere("second")
    joined = later.answer()
    assert (joined["id"], set(joined["machines"]), joined["result"]) == (opened["id"], left, 42)
    later.leave()
    assert row_of(NAME).state is NameState.WARM
    sky.release(pool.id)
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool.id)
        assert ledger.open_intents(pool_id=pool.id) == []
    assert entry is not None
    assert entry.ended_at is not None


def test_warm_nodes_over_ssh_end_when_they_were_said_to_end(hosts: list[Host], tmp_path: Path) -> None:
    """Before their lease does. The next process that opens the name settles the pool with the time that the guards have
    written, and rents anew.
    """
    known = tmp_path / "known_hosts"
    known.write_text("".join(f"{host.known_hosts_line}\n" for host in hosts))
    reach = {"key": str(hosts[0].key_path), "known_hosts": str(known), "price_per_hour": 36}
    settings = {"hosts": {"addresses": [host.ip for host in hosts], **reach}, "nodes": 2, "keep_warm": 5}
    settings |= {"lease_seconds": 120, "provision_timeout": 150}
    with pool_of(NAME, **settings) as pool:
        ids, provider = (
            machines_of(pool),
            sky.Hosts(*settings["hosts"]["addresses"], user="root", config="/dev/null", **reach),
        )
    assert "stays warm until" in pool.still_running
    assert ", 72.00 USD/h" in pool.still_running
    wait_until(lambda: not any(nodes_on(host) for host in hosts), "the end of the warm nodes", 60)
    ends = provider.ends(sorted(ids))
    assert {instance_id: end.reason for instance_id, end in ends.items()} == dict.fromkeys(
        ids, "its warm time is over (keep_warm)"
    )
    with pool_of(NAME, **settings) as again, Ledger(default_url()) as ledger:
        assert again.id != pool.id
        wait_until(lambda: ledger.open_intents(pool_id=pool.id) == [], "the old pool to be settled", 60)
        for its in ledger.intents(pool_id=pool.id):
            assert its.cloud_id is not None
            lived = (ends[its.cloud_id].at - its.intended_at).total_seconds()
            assert sum(its.seconds.values()) == pytest.approx(lived, abs=3)
            assert ends[its.cloud_id].reason in str(its.evidence)
    sky.release(NAME)
