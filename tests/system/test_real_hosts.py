"""Real machines: three hosts that you own and a spare one, and machines that a cloud preempts.

Each test opens its own pool on the same hosts, which are bare in the first one only. With `-s` it prints measurements.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward_core as sky
from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    CallProgress,
    CallRetrying,
    ClusterRestarting,
    ContactLost,
    ContactRegained,
    InstanceLost,
)
from skyward_core.providers import host_connections
from skyward_core.provisioning import rental
from tests.conftest import RecordedEvents, slowness, wait_until
from tests.real_hosts import (  # noqa: F401 - fixtures
    CALLS,
    GUARD_SECONDS,
    LEASE_SECONDS,
    RAN,
    Clocked,
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
    timings,
    where,
)
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.rental import Cloud

FEWER_CALLS = 90
NOTICE_SECONDS = 20
NOTICE_OF_DEATH_SECONDS = 3
FIRST_CALL_SECONDS = 15

pytestmark = [pytest.mark.timeout(300)]


def squares(calls: int) -> list[int]:
    return [number * number for number in range(calls)]


@sky.compute
def solved(matrix: Any, vector: Any) -> Any:
    """A numpy computation, with the node's own numpy."""
    import numpy as np

    return np.linalg.solve(matrix, vector)


def test_three_bare_hosts_become_a_pool(hosts, owned, timings):
    """Broadcast, map, numpy and logs. A second opening installs nothing, and at the end nothing runs on them."""
    np = pytest.importorskip("numpy")
    assert [(host.root / "root/.cache/skyward").exists() for host in hosts] == [False] * 4
    recorded = RecordedEvents()
    pool = pool_on(owned, recorded)
    everywhere = tuple((host.name, rank) for rank, host in enumerate(hosts[:3]))
    with timings.of("open three bare hosts, numpy installed"):
        pool.open()
    with pool:
        assert where() @ pool == everywhere
        assert pool.map(square, range(60)) == squares(60)
        ran = [executions([host]) for host in hosts]
        assert sum(ran, Counter()) == Counter(range(60))
        assert [bool(of_one) for of_one in ran] == [True, True, True, False]
        matrix, vector = np.random.default_rng(0).random((300, 300)), np.arange(300.0)
        found = pool.map(solved, [matrix, matrix.T], [vector, vector])
        assert all(np.allclose(one @ answer, vector) for one, answer in zip((matrix, matrix.T), found, strict=True))
        call = pool.submit(square(7))
        assert call.result() == 49
        assert recorded.lines(call.call_id) == ["square of 7"]  # emitted before the result arrives
        lines = Counter(event.line for event in recorded.of(sky.LogLine))
        assert lines == Counter([f"square of {number}" for number in (*range(60), 7)])
        assert {event.node for event in recorded.of(sky.LogLine)} == {0, 1, 2}
    assert Counter(event.step for event in recorded.of(BootstrapProgress))["deps"] == 3
    executions(hosts)
    recorded.events.clear()
    with timings.of("open three hosts, environment cached"):
        pool.open()
    with pool:
        assert where() @ pool == everywhere
        with timings.of("map of 200 calls of 0.1 s on three hosts"):
            assert pool.map(square, range(CALLS)) == squares(CALLS)
    assert executions(hosts) == Counter(range(CALLS))
    assert "deps" not in [event.step for event in recorded.of(BootstrapProgress)]


def test_a_host_with_a_wrong_key_is_refused(hosts, owned):
    """Another machine answers at the address of one of the hosts: nothing was started on the others."""
    recorded = RecordedEvents()
    hosts[1].change_host_key()
    with pytest.raises(sky.HostKeyChanged, match=hosts[1].ip):
        pool_on(owned, recorded).open()
    assert recorded.of(sky.InstanceProvisioned) == []
    assert [names_of(tagged(host)) for host in hosts] == [[]] * 4


@pytest.fixture
def cloud(fleet: Fleet, mirror: Mirror) -> Iterator[Cloud]:
    """A cloud whose bare machines install from the mirror."""
    cloud = Cloud(fleet, prepare=mirror.configure)
    yield cloud
    cloud.close()


@pytest.mark.nightly
def test_a_host_is_preempted_under_a_running_map(cloud, timings):
    """Each result is counted once, the host's running calls run again, and another host replaces it."""
    recorded = Clocked()
    with pool_on(cloud.provider(), recorded, image=sky.Image()) as pool, ThreadPoolExecutor(1) as threads:
        lost = pool.lease.nodes[2].instance
        others = [cloud.host(node.instance.id) for node in pool.lease.nodes[:2]]
        results = threads.submit(pool.map, square, range(CALLS))
        wait_until(lambda: (cloud.host(lost.id).root / RAN).exists(), "the host to be at work")
        cloud.preempt(lost.id)
        preempted_at = time.monotonic()
        lost_at = recorded.when(lambda event: isinstance(event, InstanceLost))
        assert results.result(120) == squares(CALLS)
        wait_until(lambda: len(recorded.of(BootstrapCompleted)) == 4, "another one to take its place", 120)
        assert lost_at - preempted_at < NOTICE_SECONDS * slowness()
        timings.rows.append(("a host preempted, until its event", lost_at - preempted_at))
        assert [(event.node, event.instance_id) for event in recorded.of(InstanceLost)] == [(2, lost.id)]
        wait_until(lambda: recorded.of(CallProgress)[-1] == CallProgress(CALLS, CALLS, 0), "all calls to be counted")
        numbers = {event.call_id: int(event.line.split()[-1]) for event in recorded.of(sky.LogLine)}
        again = {numbers[event.call_id] for event in recorded.of(CallRetrying)}
        new = cloud.host(pool.lease.nodes[2].instance.id)
        there = {numbers[event.call_id] for event in recorded.of(sky.LogLine) if event.instance_id == lost.id}
        # each of them once; and those that ended on the lost host on no other
        assert executions([*others, new]) == Counter(set(range(CALLS)) - (there - again))
        assert again
        assert where() @ pool == tuple((cloud.host(node.instance.id).name, node.rank) for node in pool.lease.nodes)
    assert cloud.machines == {}


@pytest.mark.nightly
def test_a_call_without_retries_never_begins_twice(cloud, timings):
    """The calls of a host whose processes die raise NodeLost soon, and all others return."""
    recorded = Clocked()
    with pool_on(cloud.provider(), recorded, nodes=2, retries=0, image=sky.Image()) as pool:
        instance = pool.lease.nodes[1].instance
        kept, lost = (cloud.host(node.instance.id) for node in pool.lease.nodes)
        futures = pool.submit_all([square(number) for number in range(FEWER_CALLS)])
        wait_until(lambda: (lost.root / RAN).exists(), "the host to be at work")
        lost.crash()
        crashed_at = time.monotonic()
        wait_until(lambda: any(one.done() and one.exception() is not None for one in futures), "a call to be lost")
        seconds = time.monotonic() - crashed_at
        assert seconds < NOTICE_OF_DEATH_SECONDS * slowness()
        timings.rows.append(("all processes of a host killed, until its calls raise NodeLost", seconds))
        errors = {number: future.exception(120) for number, future in enumerate(futures)}
        raised = {number for number, error in errors.items() if error is not None}
        assert {type(errors[number]) for number in raised} == {sky.NodeLost}
        assert all(future.result() == number * number for number, future in enumerate(futures) if number not in raised)
        lines = [event.line for event in recorded.of(sky.LogLine) if event.instance_id == instance.id]
        ended_there = {int(line.split()[-1]) for line in lines} - raised
        new = [machine.host for machine in cloud.machines.values() if machine.host not in (kept, lost)]
        assert executions([kept, *new]) == Counter(set(range(FEWER_CALLS)) - raised - ended_there)
        assert recorded.of(CallRetrying) == []


@pytest.mark.nightly
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
        wait_until(lambda: len(recorded.of(ContactRegained)) == len(recorded.of(ContactLost)), "contact to all hosts")
        assert where() @ pool == tuple((host.name, rank) for rank, host in enumerate(three))


@pytest.mark.nightly
def test_a_permanent_partition_ends_the_node_and_it_is_replaced(hosts, owned, timings, monkeypatch):
    """The host ends its node with its lease, and the spare host replaces it. It is reported, and raises no error."""
    recorded = Clocked()
    pool = pool_on(owned, recorded, lease_seconds=LEASE_SECONDS).open()
    cut, instance = hosts[2], pool.lease.nodes[2].instance
    try:
        with ThreadPoolExecutor(1) as threads:
            results = threads.submit(pool.map, square, range(CALLS))
            wait_until(lambda: (cut.root / RAN).exists(), "the host to be at work")
            cut.partition()
            cut_at = time.monotonic()
            seconds = (LEASE_SECONDS + GUARD_SECONDS) * slowness()
            wait_until(lambda: not tagged(cut), "the guard to end the node", seconds)
            timings.rows.append((f"a host cut off (lease {LEASE_SECONDS} s), until its end", time.monotonic() - cut_at))
            lost_at = recorded.when(lambda event: isinstance(event, InstanceLost))
            assert lost_at - cut_at < NOTICE_SECONDS * slowness()
            assert results.result(120) == squares(CALLS)
        wait_until(lambda: len(recorded.of(BootstrapCompleted)) == 4, "the spare host to take its place", 120)
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


@pytest.mark.nightly
def test_all_processes_of_all_hosts_die_at_once(six, timings, tmp_path):
    """The pool starts again on the same hosts at once, and no call is lost."""
    recorded = RecordedEvents()
    with pool_on(owned_by(six, tmp_path / "known_hosts"), recorded, nodes=6) as pool:
        before = pool.lease.nodes
        futures = pool.submit_all([square(number) for number in range(60)])
        wait_until(lambda: all((host.root / RAN).exists() for host in six), "all hosts to be at work")
        for pid in [pid for host in six for pid in tagged(host)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        pool.submit(where()).result(120)
        seconds = time.monotonic() - killed_at
        timings.rows.append(("all processes of six hosts killed, until the first call has run", seconds))
        assert [future.result(120) for future in futures] == squares(60)
        wait_until(lambda: len(recorded.of(BootstrapCompleted)) == 12, "all nodes to be there", 120)
        assert sorted(where() @ pool) == sorted((host.name, rank) for rank, host in enumerate(six))
        lost = [(event.instance_id, event.node, event.reason) for event in recorded.of(InstanceLost)]
        assert sorted(lost) == sorted((node.instance.id, node.rank, "its processes have died") for node in before)
        assert len(recorded.of(ClusterRestarting)) == 1
        assert seconds < FIRST_CALL_SECONDS * slowness()
    receipt = pool.receipt or {}
    provisioned = {event.instance_id for event in recorded.of(sky.InstanceProvisioned)}
    assert ({entry["cloud_id"] for entry in receipt["resources"]}, receipt["left"]) == (provisioned, [])
    assert [names_of(tagged(host)) for host in six] == [[]] * 6
    assert [list((host.root / "dev/shm").iterdir()) for host in six] == [[]] * 6
    executions(six)


@pytest.mark.nightly
@pytest.mark.parametrize("has_reaper", [True, False])
def test_the_client_is_killed_and_the_nodes_end(hosts, owned, timings, tmp_path: Path, has_reaper: bool) -> None:
    """Its reaper ends them at once; with a lease of ten minutes no other safeguard could have. Without the reaper they
    end with their lease, and the hosts serve another pool.
    """
    lease_seconds = 600 if has_reaper else LEASE_SECONDS
    addresses = [host.ip for host in hosts]
    with client(str(lease_seconds), *addresses, str(hosts[0].key_path), str(tmp_path / "known")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert all(tagged(host) for host in hosts[:3])
        if not has_reaper:
            children = psutil.Process(process.pid).children()
            (reaper,) = [one for one in children if any("reaper_process.py" in word for word in one.cmdline())]
            reaper.kill()
        process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        seconds = 60 if has_reaper else (LEASE_SECONDS + GUARD_SECONDS) * slowness()
        wait_until(lambda: not any(tagged(host) for host in hosts), "the end of the nodes", seconds)
        what = f"client killed, until nothing runs on the hosts (lease {lease_seconds} s)"
        timings.rows.append((what, time.monotonic() - killed_at))
    with pool_on(owned, RecordedEvents()) as pool:
        assert pool.map(square, range(10)) == squares(10)
    assert executions(hosts) == Counter(range(10))
