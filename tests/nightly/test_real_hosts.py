"""Faults of real machines: hosts that you own, and machines that a cloud preempts."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import skyward_core as sky
from skyward_core.events.events import (
    BootstrapCompleted,
    CallProgress,
    CallRetrying,
    ClusterRestarting,
    ContactLost,
    ContactRegained,
    InstanceLost,
)
from skyward_core.providers import host_connections
from skyward_core.provisioning import rental
from tests.conftest import RecordedEvents, slowness
from tests.real_hosts import (  # noqa: F401 - fixtures
    RAN,
    client,
    executions,
    from_everybody,
    from_the_client,
    hosts,
    names_of,
    owned,
    owned_by,
    pool_on,
    square,
    tagged,
    where,
)
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.rental import Cloud
from tests.waiting import wait_until

CALLS, FEWER_CALLS = 200, 90
LEASE_SECONDS, GUARD_SECONDS = 8, 10
NOTICE_SECONDS = 20
NOTICE_OF_DEATH_SECONDS = 3
FIRST_CALL_SECONDS = 15

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def cloud(fleet: Fleet, mirror: Mirror) -> Iterator[Cloud]:
    """A cloud whose bare machines install from the mirror."""
    cloud = Cloud(fleet, prepare=mirror.configure)
    yield cloud
    cloud.close()


def squares(count: int) -> list[int]:
    return [number * number for number in range(count)]


def test_a_host_is_preempted_under_a_running_map(cloud):
    """Each result is right and counted once, the host's running calls run again, and another host replaces it."""
    recorded = RecordedEvents()
    with pool_on(cloud.provider(), recorded, image=sky.Image()) as pool, ThreadPoolExecutor(1) as threads:
        lost = pool.lease.nodes[2].instance
        others = [cloud.host(node.instance.id) for node in pool.lease.nodes[:2]]
        results = threads.submit(pool.map, square, range(CALLS))
        wait_until(lambda: (cloud.host(lost.id).root / RAN).exists(), "the host to be at work")
        cloud.preempt(lost.id)
        limit = NOTICE_SECONDS * slowness()
        wait_until(lambda: recorded.of(InstanceLost), "the host to be lost", limit)
        assert results.result(90) == squares(CALLS)
        wait_until(lambda: len(recorded.of(BootstrapCompleted)) == 4, "another host", 90)
        assert [(event.node, event.instance_id) for event in recorded.of(InstanceLost)] == [(2, lost.id)]
        wait_until(lambda: recorded.of(CallProgress)[-1] == CallProgress(CALLS, CALLS, 0), "all calls to be counted")
        numbers = {event.call_id: int(event.line.split()[-1]) for event in recorded.of(sky.LogLine)}
        again = {numbers[event.call_id] for event in recorded.of(CallRetrying)}
        ran = executions([*others, cloud.host(pool.lease.nodes[2].instance.id)])
        elsewhere = {
            numbers[event.call_id] for event in recorded.of(sky.LogLine) if event.instance_id == lost.id
        } - again
        # each of them once; and those that ended on the lost host on no other
        assert ran == Counter(set(range(CALLS)) - elsewhere)
        assert again
        assert where() @ pool == tuple((cloud.host(node.instance.id).name, node.rank) for node in pool.lease.nodes)
    assert cloud.machines == {}


def test_a_call_without_retries_never_begins_twice(cloud):
    """With retries=0 the calls of a host whose processes die raise NodeLost soon. All others return."""
    recorded = RecordedEvents()
    with pool_on(cloud.provider(), recorded, nodes=2, retries=0, image=sky.Image()) as pool:
        instance = pool.lease.nodes[1].instance
        kept, lost = (cloud.host(node.instance.id) for node in pool.lease.nodes)
        futures = pool.submit_all([square(number) for number in range(FEWER_CALLS)])
        wait_until(lambda: (lost.root / RAN).exists(), "the host to be at work")
        lost.crash()
        limit = NOTICE_OF_DEATH_SECONDS * slowness()
        wait_until(lambda: any(one.done() and one.exception() for one in futures), "a call to fail as lost", limit)
        errors = {number: future.exception(60) for number, future in enumerate(futures)}
        raised = {number for number, error in errors.items() if error is not None}
        assert {type(errors[number]) for number in raised} == {sky.NodeLost}
        assert all(future.result() == number * number for number, future in enumerate(futures) if number not in raised)
        ended_there = {
            int(event.line.split()[-1]) for event in recorded.of(sky.LogLine) if event.instance_id == instance.id
        } - raised
        new = [machine.host for machine in cloud.machines.values() if machine.host not in (kept, lost)]
        assert executions([kept, *new]) == Counter(set(range(FEWER_CALLS)) - raised - ended_there)
        assert recorded.of(CallRetrying) == []


def test_short_partitions_lose_no_node_and_no_result(hosts, owned):
    """During maps every host is cut off from all others, then the client alone from all. No call runs twice."""
    recorded, three = RecordedEvents(), hosts[:3]
    with pool_on(owned, recorded, retries=0) as pool, ThreadPoolExecutor(1) as threads:
        for cut, seconds in ((from_everybody, 8), (from_the_client, 20)):
            results = threads.submit(pool.map, square, range(FEWER_CALLS))
            wait_until(lambda: all((host.root / RAN).exists() for host in three), "all hosts to be at work")
            with cut(three):
                time.sleep(seconds)
                assert not results.done()
            assert results.result(60) == squares(FEWER_CALLS)
            assert executions(hosts) == Counter(range(FEWER_CALLS))
        assert recorded.of(InstanceLost) == []
        assert {event.node for event in recorded.of(ContactLost)} == {0, 1, 2}
        wait_until(
            lambda: len(recorded.of(ContactRegained)) == len(recorded.of(ContactLost)), "all hosts to be in contact"
        )
        assert where() @ pool == tuple((host.name, rank) for rank, host in enumerate(three))


def test_a_permanent_partition_ends_the_node_and_it_is_replaced(hosts, owned, monkeypatch):
    """The host ends its node when the lease has expired, and the spare host replaces it.

    The unreachable host is reported, and raises no error.
    """
    recorded = RecordedEvents()
    pool = pool_on(owned, recorded, lease_seconds=LEASE_SECONDS).open()
    cut, instance = hosts[2], pool.lease.nodes[2].instance
    try:
        with ThreadPoolExecutor(1) as threads:
            results = threads.submit(pool.map, square, range(CALLS))
            wait_until(lambda: (cut.root / RAN).exists(), "the host to be at work")
            cut.partition()
            limit = (LEASE_SECONDS + GUARD_SECONDS) * slowness()
            wait_until(lambda: not tagged(cut), "the guard to end the node", limit)
            assert results.result(90) == squares(CALLS)
        wait_until(lambda: len(recorded.of(BootstrapCompleted)) == 4, "the spare host to take its place", 90)
        assert [event.instance_id for event in recorded.of(InstanceLost)] == [instance.id]
        assert where() @ pool == ((hosts[0].name, 0), (hosts[1].name, 1), (hosts[3].name, 2))
        monkeypatch.setattr(host_connections, "CONNECT_SECONDS", 3.0)
        monkeypatch.setattr(sky.Hosts, "gone_deadline_seconds", 1.0)
        # however long all this took here: its guard has not ended the node yet
        monkeypatch.setattr(rental, "GUARD_GRACE_SECONDS", 600.0)
        pool.close()  # the work is done, and hosts cost nothing
        assert pool.unconfirmed is not None
        assert pool.unconfirmed.ids == (instance.id,)
        assert [entry["cloud_id"] for entry in (pool.receipt or {})["left"]] == [instance.id]
        assert [names_of(tagged(host)) for host in hosts] == [[]] * 4
    finally:
        cut.heal()
        pool.close()
    executions(hosts)


@pytest.fixture
def six(hosts: list[Host], fleet: Fleet, mirror: Mirror) -> Iterator[list[Host]]:
    """Two more hosts for the pool."""
    more = [fleet.create() for _ in range(2)]
    for host in more:
        mirror.configure(host)
    yield [*hosts, *more]
    for host in more:
        host.crash()


def test_all_processes_of_all_hosts_die_at_once(six, tmp_path):
    """Six nodes, each with its guard, are killed while their hosts answer: the pool starts again on the same hosts at
    once, and no call is lost.
    """
    recorded = RecordedEvents()
    with pool_on(owned_by(six, tmp_path / "known_hosts"), recorded, nodes=6) as pool:
        before = pool.lease.nodes
        futures = pool.submit_all([square(number) for number in range(60)])
        wait_until(lambda: all((host.root / RAN).exists() for host in six), "all hosts to be at work")
        killed = [pid for host in six for pid in tagged(host)]
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        pool.submit(where()).result(90)
        assert time.monotonic() - killed_at < FIRST_CALL_SECONDS * slowness()
        assert [future.result(90) for future in futures] == squares(60)
        wait_until(lambda: len(recorded.of(BootstrapCompleted)) == 12, "all nodes to be there", 60)
        assert sorted(where() @ pool) == sorted((host.name, rank) for rank, host in enumerate(six))
        lost = [(event.instance_id, event.node, event.reason) for event in recorded.of(InstanceLost)]
        assert sorted(lost) == sorted((node.instance.id, node.rank, "its processes have died") for node in before)
        assert len(recorded.of(ClusterRestarting)) == 1
    provisioned = {event.instance_id for event in recorded.of(sky.InstanceProvisioned)}
    assert {entry["cloud_id"] for entry in (pool.receipt or {})["resources"]} == provisioned
    assert (pool.receipt or {})["left"] == []
    assert [names_of(tagged(host)) for host in six] == [[]] * 6
    assert [list((host.root / "dev/shm").iterdir()) for host in six] == [[]] * 6
    executions(six)


@pytest.mark.parametrize("moment", ["deps", "ready"])
def test_the_client_and_its_reaper_are_killed_and_the_hosts_end_by_themselves(fleet, mirror, tmp_path, moment):
    """While the hosts install packages, and while calls run: no process of a node outlives its lease by more than ten
    seconds. Then the hosts serve another pool.
    """
    bare = [fleet.create() for _ in range(2)]
    for host in bare:
        mirror.configure(host)
    owned = owned_by(bare, tmp_path / "known_hosts")
    with client(bare, tmp_path / "known_hosts", LEASE_SECONDS) as process:
        process.says(moment)
        assert all(tagged(host) for host in bare)
        process.kill(with_reaper=True)
        limit = (LEASE_SECONDS + GUARD_SECONDS) * slowness()
        wait_until(lambda: not any(tagged(host) for host in bare), "the hosts to end their nodes", limit)
    with pool_on(owned, RecordedEvents(), nodes=2) as pool:
        assert pool.map(square, range(10)) == squares(10)
    for host in bare:
        host.crash()


def test_the_client_is_killed_and_its_reaper_ends_the_nodes(hosts, owned, tmp_path):
    """At once: with a lease of ten minutes no other safeguard could have."""
    with client(hosts, tmp_path / "known_hosts", 600) as process:
        process.says("ready")
        assert all(tagged(host) for host in hosts[:3])
        process.kill(with_reaper=False)
        wait_until(lambda: not any(tagged(host) for host in hosts), "the reaper to end the nodes", 60)
