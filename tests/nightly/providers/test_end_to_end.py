"""Pools on hosted clouds: a preemption with a notice, a fleet, and machines that end themselves without a client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.providers.base import CREATED_TAG
from skyward_core.provisioning.bootstrap import guard_script
from tests.conftest import RecordedEvents
from tests.providers import fake_metadata
from tests.providers.contract import cheapest, tags
from tests.providers.fake_aws import HostedAWS
from tests.providers.fake_metadata import instance_action
from tests.providers.hosted import Hosting, Rented
from tests.system.providers.test_end_to_end import rented  # noqa: F401 - a fixture
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

METADATA = "169.254.169.254"
NOTICES = "root/notices"
SECONDS_LEFT = 90

pytestmark = [pytest.mark.timeout(180)]


@sky.compute
def work(folder: str, mark: str) -> int:
    """Begin, wait for the file `go-MARK` on the host, and return the node's number."""
    node = sky.instance_info().node
    Path(folder, f"{mark}-on-{node}").touch()
    while not Path(folder, f"go-{mark}").exists():
        time.sleep(0.01)
    return node


@sky.compute
def where() -> int:
    """Return the node's number."""
    return sky.instance_info().node


def serve_metadata(host: Host) -> None:
    """Start a metadata service on a host, at EC2's address. It serves the files of /root/notices."""
    (host.root / NOTICES).mkdir()
    (host.root / "root/metadata.py").write_text(Path(fake_metadata.__file__).read_text())
    done = host.run(
        f"ip addr add {METADATA}/32 dev lo && (setsid python3 /root/metadata.py /{NOTICES} {METADATA} 80 </dev/null >/var/log/metadata.log 2>&1 &)"
        f" && for i in $(seq 100); do ss -ltn | grep -q {METADATA}:80 && exit 0; sleep 0.1; done; cat /var/log/metadata.log; exit 1"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def cloud(
    fleet: Fleet, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[HostedAWS, Hosting]]:
    """Yield an AWS that sells spot machines. Each machine is a host with its own metadata service."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")

    def prepare(host: Host) -> None:
        mirror.configure(host)
        serve_metadata(host)

    hosting = Hosting(fleet, prepare)
    try:
        with HostedAWS(hosting) as aws:
            aws.spot = {("c7i.xlarge", "us-east-1a"): 0.07}
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
            monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
            yield aws, hosting
    finally:
        hosting.close()


def test_a_preemption_notice_loses_no_call(cloud: tuple[HostedAWS, Hosting]) -> None:
    """With retries=0 no call may be lost. Running calls end on the machine, and new calls run on other machines."""
    aws, hosting = cloud
    recorded = RecordedEvents()
    provider = sky.AWS(ssh_cidr="203.0.113.0/24")
    with sky.ComputePool(
        provider=provider,
        nodes=2,
        cpu=4,
        image=sky.Image(),
        spot="always",
        retries=0,
        on_event=recorded,
        display="quiet",
        lease_seconds=30,
    ) as pool:
        machines = {node.rank: node.instance for node in pool.lease.nodes}
        assert all(machine.is_spot for machine in machines.values())
        roots = {rank: hosting.hosts[machine.id].root for rank, machine in machines.items()}
        running = [pool.submit(work("/root", mark)) for mark in "ab"]
        wait_until(lambda: all(begun_on(root) for root in roots.values()), "a call on each node", seconds=60)
        begun = {rank: begun_on(root) for rank, root in roots.items()}

        (roots[1] / NOTICES / "instance-action").write_text(instance_action(SECONDS_LEFT))
        wait_until(lambda: recorded.of(sky.PreemptionNoticed), "the notice")
        (noticed,) = recorded.of(sky.PreemptionNoticed)
        assert (noticed.instance_id, noticed.node, noticed.action) == (machines[1].id, 1, "terminate")
        assert SECONDS_LEFT - 30 < noticed.seconds_left <= SECONDS_LEFT
        wait_until(lambda: stands_by(recorded), "a standby machine", seconds=90)
        (roots[0] / "root" / f"go-{begun[0][0]}").touch()
        assert [future.result(60) for future in pool.submit_all([where() for _ in range(10)])] == [0] * 10

        (roots[1] / "root" / f"go-{begun[1][0]}").touch()
        assert sorted(future.result(60) for future in running) == [0, 1]
        wait_until(lambda: machines[1].id not in aws.alive(), "the machine to be given back", seconds=60)
        wait_until(lambda: prepared(recorded) == 3, "another machine", seconds=60)
        assert list(where() @ pool) == [0, 1]
        assert aws.alive() == {node.instance.id for node in pool.lease.nodes}

        last = pool.lease.nodes[1].instance.id
        (hosting.hosts[last].root / NOTICES / "instance-action").write_text(instance_action(SECONDS_LEFT))
        wait_until(lambda: len(recorded.of(sky.PreemptionNoticed)) == 2, "the next notice")
        aws.preempt(last)  # earlier than announced
        wait_until(lambda: prepared(recorded) == 4, "one more machine", seconds=90)
        assert list(where() @ pool) == [0, 1]
    assert recorded.of(sky.CallRetrying) == []
    assert [event.node for event in recorded.of(sky.InstanceLost)] == [1, 1]
    assert all("announced" in event.reason for event in recorded.of(sky.InstanceLost))
    assert aws.alive() == set()
    assert pool.receipt["left"] == []
    assert len(pool.receipt["resources"]) == 4


def begun_on(root: Path) -> list[str]:
    """Return the marks of the calls that began on a machine."""
    return [path.name[0] for path in (root / "root").glob("?-on-?")]


def prepared(recorded: RecordedEvents) -> int:
    """Return how many machines were prepared."""
    return len({event.instance_id for event in recorded.of(sky.BootstrapCompleted)})


def stands_by(recorded: RecordedEvents) -> bool:
    """Return whether there is a prepared machine without a node."""
    first = {event.instance_id for event in recorded.of(sky.BootstrapCompleted)}
    return any(
        event.step == "server" and event.instance_id not in first for event in recorded.of(sky.BootstrapProgress)
    )


def test_a_pool_runs_on_a_fleet(cloud: tuple[HostedAWS, Hosting]) -> None:
    """The spot machines have an equivalent type and come from separate calls. No machine and no template is left."""
    aws, _ = cloud
    aws.fleets.is_split = True
    aws.spot = {("c7i.xlarge", "us-east-1a"): 0.05, ("c7i.2xlarge", "us-east-1b"): 0.049}
    provider = sky.AWS(ssh_cidr="203.0.113.0/24")
    with sky.ComputePool(provider=provider, nodes=2, cpu=4, spot="always", image=sky.Image(), display="log") as pool:
        nodes = pool.lease.nodes
        assert [(node.rank, node.instance.instance_type, node.instance.price_per_hour) for node in nodes] == [
            (0, "c7i.2xlarge", 0.049),
            (1, "c7i.2xlarge", 0.049),
        ]
        assert {node.instance.id for node in nodes} == aws.alive()
        assert list(where() @ pool) == [0, 1]
    assert aws.alive() == set()
    assert aws.fleets.templates == {}
    assert pool.receipt["left"] == []


def test_a_machine_ends_itself_without_its_client(rented: Rented, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease expires and its guard runs the end command."""
    provider = rented.provider
    offer = cheapest(provider, sky.Requirements(vcpus=4))
    (instance,) = provider.launch(
        offer,
        1,
        {**tags(), CREATED_TAG: str(int(time.time()))},
        guard_script(15, None, type(provider).end_command),
    )
    host = rented.hosting.hosts[instance.id]
    wait_until(lambda: not host.is_up, "the machine to end itself", seconds=120)
    states = {found.id: found.state for found in provider.instances(instance.pool_id)}
    assert states.get(instance.id) in (None, sky.InstanceState.STOPPING)
    provider.terminate([instance.id])
    assert rented.alive() == set()
