"""Pools of MIG partitions on real machines with fake GPUs: one worker for each partition, and restored GPUs."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.events.events import InstanceLost
from tests.conftest import RecordedEvents, members, wait_until
from tests.system.accelerators.test_mig_hosts import (  # noqa: F401 - fixtures
    PLACE,
    as_before,
    gpus,
    machines,
    pool_on,
    run_on,
    seen,
    used,
)
from tests.testbed import Host
from tests.testbed.fakegpu import install
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

MIXED = sky.Accelerator.NVIDIA.H100(count=2, mig=["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"])
LEASE_SECONDS = 5
TRY_LOCK = "flock --nonblock /proc"
PROBE = f"until [ -e /root/enough ]; do {TRY_LOCK} true || touch /root/was-held; sleep 0.1; done; rm /root/enough"

pytestmark = [pytest.mark.timeout(300)]


@sky.compute
def crash() -> None:
    """Kill the process of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_large_partitions_are_created_before_small_ones(machines, gpus, tmp_path):
    """Eight workers on one machine: four kinds of partitions on each of two GPUs.

    They are created in an order that fits, and each runs a call at the same time.
    """
    with pool_on(machines[:1], tmp_path, accelerator=MIXED) as pool:
        assert gpus[0].partitions == [["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]] * 2
        assert [visible for visible, _ in seen() @ pool] == gpus[0].uuids
        assert set(pool.map(used, range(8))) == set(gpus[0].uuids)
    assert as_before(gpus)


def test_a_worker_that_dies_comes_back_with_its_own_partition(machines, gpus, tmp_path):
    """The process of a call is killed, then the worker process: both start again, with the same partition.

    The node is not replaced.
    """
    recorded = RecordedEvents()
    with pool_on(machines[:1], tmp_path, recorded) as pool:
        before = [visible for visible, _ in seen() @ pool]
        for _ in range(2):
            with pytest.raises(sky.CallCrashed):
                crash() >> pool
        assert [visible for visible, _ in seen() @ pool] == before
        client = pool.dask_client()
        pids = client.run(os.getpid)
        names = {worker["name"]: address for address, worker in members(client).items()}
        machines[0].run(f"kill -KILL {pids[names['0-1']]}")
        wait_until(lambda: names["0-1"] not in members(client), "the worker to be missed")
        wait_until(lambda: len(members(client)) == 2, "the worker to be back")
        wait_until(lambda: [visible for visible, _ in seen() @ pool] == before, "both workers to take part")
        assert recorded.of(InstanceLost) == []
    assert as_before(gpus)


def test_hosts_that_cannot_reach_each_other_run_partitions(fleet, mirror, tmp_path):
    """Each of the two workers of a node has its own forwarded port.

    It works again after a node was lost and its host became another node.
    """
    hosts = [fleet.create(isolated=True) for _ in range(2)]
    for host in hosts:
        mirror.configure(host)
    gpus = [install(host.root / PLACE, count=2) for host in hosts]
    recorded = RecordedEvents()
    with pool_on(hosts, tmp_path, recorded) as pool:
        first = [visible for visible, _ in seen() @ pool]
        assert first == [uuid for one in gpus for uuid in one.uuids]
        client = pool.dask_client()
        names = {worker["name"]: address for address, worker in members(client).items()}
        parents = client.run(os.getppid)
        assert len({address.rpartition(":")[2] for address in names.values()}) == 4
        assert {address.rpartition(":")[0] for address in names.values()} == {"tls://127.0.0.1"}
        hosts[1].run(f"kill -KILL {parents[names['1-0']]}")
        wait_until(lambda: recorded.of(InstanceLost), "the node to be lost", seconds=60)
        wait_until(
            lambda: (
                len(pool.lease.nodes) == 2
                and pool.lease.nodes[1].instance.id != recorded.of(InstanceLost)[0].instance_id
            ),
            "another node",
            seconds=60,
        )
        wait_until(lambda: len(members(client)) == 4, "its workers", seconds=60)
        again = [visible for visible, _ in seen() @ pool]
        assert again == [uuid for one in gpus for uuid in one.uuids]
        assert again[:2] == first[:2]
        assert not set(again[2:]) & set(first[2:])
    assert as_before(gpus)
    for host in hosts:
        host.crash()


# ── GPUs are restored ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_guard_restores_the_gpus(machines, gpus, tmp_path):
    """The client is gone, and the node ends itself at the end of its lease.

    Its GPUs are as before, also a mode that was enabled before.
    """
    gpus[1].set(1, current="Enabled", pending="Enabled")
    pool = pool_on(machines, tmp_path, accelerator=MIXED, lease_seconds=LEASE_SECONDS).open()
    assert len({visible for visible, _ in seen() @ pool}) == 16
    pool.detach(lease_seconds=LEASE_SECONDS)
    assert gpus[1].partitions == [["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]] * 2
    wait_until(lambda: all(one.partitions == [[], []] for one in gpus), "the GPUs to be whole", seconds=60)
    wait_until(
        lambda: [one.modes for one in gpus] == [["Disabled", "Disabled"], ["Disabled", "Enabled"]],
        "their modes to be as before",
    )


def test_a_slow_driver_is_waited_for(machines, gpus, tmp_path):
    """The close waits while the guard restores the GPUs. Nothing is killed or repeated meanwhile."""
    with pool_on(machines[:1], tmp_path):
        before = len(gpus[0].changes)
        gpus[0].set(seconds=1.0)
    assert [change.split()[-1] for change in gpus[0].changes[before:]] == ["-dci", "-dgi", "0"]
    assert as_before(gpus)


def test_without_a_guard_the_provider_restores_the_gpus(machines, gpus, tmp_path):
    """Guard and supervisor are killed. `terminate` restores them, and no other pool can begin meanwhile."""
    pool = pool_on(machines[:1], tmp_path).open()
    provider = pool.spec.provider
    (node,) = pool.detach().nodes
    machines[0].run(f"kill -KILL $(cat {node.instance.directory}/guard) $(cat {node.instance.directory}/supervisor)")
    wait_until(lambda: machines[0].run(f"{TRY_LOCK} true").returncode == 0, "the host to be free")
    assert not as_before(gpus)
    machines[0].run(f"setsid sh -c '{PROBE}' </dev/null >/dev/null 2>&1 &")
    gpus[0].set(seconds=0.4)
    try:
        provider.terminate([node.instance.id])
    finally:
        machines[0].run("touch /root/enough")
    assert as_before(gpus)
    wait_until(
        lambda: machines[0].run("test -e /root/enough").returncode == 1, "the probe to end: it takes the lock itself"
    )
    assert run_on(machines[0], "rm /root/was-held && echo held") == "held"


@pytest.mark.parametrize(("stops_at", "stops_when"), [(1, "after"), (2, "before"), (2, "after"), (3, "after")])
def test_gpus_are_restored_after_a_killed_bootstrap(machines, gpus, tmp_path, stops_at, stops_when):
    """The script is killed between two commands on one of two hosts.

    The pool does not open, and all GPUs are as before.
    """
    gpus[1].set(stops_at=stops_at, stops_when=stops_when, stops_by="pkill -KILL -f '^bash ./bootstrap.sh'")
    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(machines, tmp_path, accelerator=MIXED):
        pass
    assert (caught.value.node, caught.value.phase, caught.value.exit_code) == (1, "mig", 128 + signal.SIGKILL)
    assert gpus[1].changes[:stops_at] != []
    assert as_before(gpus)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def failure(machines: Sequence[Host], folder: Path) -> sky.BootstrapFailed:
    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(machines, folder):
        pass
    assert caught.value.phase == "mig"
    return caught.value


def test_partitions_of_another_user_are_left_alone(machines, gpus, tmp_path):
    """The error names the GPU and the commands that free it; nothing is changed."""
    gpus[0].set(0, current="Enabled", pending="Enabled")
    gpus[0].run("mig", "-i", "0", "-cgi", "4g.40gb", "-C")
    error = failure(machines[:1], tmp_path)
    assert "GPU 0 is partitioned already" in str(error)
    assert "nvidia-smi mig -i 0 -dci" in str(error)
    assert (gpus[0].modes, gpus[0].partitions) == (["Enabled", "Disabled"], [["4g.40gb"], []])
    assert len(gpus[0].changes) == 1


def test_a_refused_reset_fails_the_pool_with_advice(machines, gpus, tmp_path):
    """An A100 in a virtual machine: the error has the manual steps, and the pending MIG mode is removed."""
    gpus[0].set(needs_reset=True, refuses_reset=True)
    error = failure(machines[:1], tmp_path)
    assert "could not be reset" in str(error)
    assert "reboot the machine, and open the pool again" in str(error)
    assert as_before(gpus)


def test_the_error_names_the_processes_of_a_busy_gpu(machines, gpus, tmp_path):
    """It names all processes that use the GPU."""
    gpus[0].set(0, processes=[(4711, "/usr/bin/train")])
    assert "while processes use it: 4711, /usr/bin/train" in str(failure(machines[:1], tmp_path))
    assert as_before(gpus)


def test_a_gpu_that_cannot_be_restored_causes_a_warning(machines, gpus, tmp_path, caplog):
    """Another process uses a partition of the pool at its end. Everything else is cleaned up."""
    with pool_on(machines[:1], tmp_path) as pool:
        directory = pool.lease.nodes[0].instance.directory
        machines[0].run(f"kill -KILL $(cat {directory}/guard)")
        gpus[0].set(0, processes=[(4711, "somebody")])
    assert f"{machines[0].ip}: GPU 0 is not as it was before" in caplog.text
    assert gpus[0].partitions == [["3g.40gb", "3g.40gb"], []]
