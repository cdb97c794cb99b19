"""Nodes with MIG partitions die, on real machines with fake GPUs: the GPUs are restored."""

import os
import signal

import pytest

import skyward_core as sky
from skyward_core.events.events import InstanceLost
from tests.conftest import RecordedEvents, members
from tests.system.accelerators.test_mig_hosts import (  # noqa: F401 - fixtures
    as_before,
    gpus,
    machines,
    pool_on,
    run_on,
    seen,
)
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.waiting import wait_until

MIXED = sky.Accelerator.NVIDIA.H100(count=2, mig=["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"])
LEASE_SECONDS = 5
TRY_LOCK = "flock --nonblock /proc"
PROBE = f"until [ -e /root/enough ]; do {TRY_LOCK} true || touch /root/was-held; sleep 0.1; done; rm /root/enough"

pytestmark = [pytest.mark.timeout(300)]


@sky.compute
def crash() -> None:
    """Kill the process of the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_comes_back_with_its_own_partition(machines, gpus, tmp_path):
    """The process of a call is killed, then the worker process. The node is not replaced."""
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


def test_the_guard_restores_the_gpus(machines, gpus, tmp_path):
    """The client is gone, and the node ends itself at the end of its lease. Large partitions were made before small
    ones, so that all fit; a mode that was on stays on.
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


@pytest.mark.parametrize(("stops_at", "stops_when"), [(1, "after"), (2, "before"), (3, "after")])
def test_gpus_are_restored_after_a_killed_bootstrap(machines, gpus, tmp_path, stops_at, stops_when):
    """The script is killed between two commands on one of two hosts. The pool does not open."""
    gpus[1].set(stops_at=stops_at, stops_when=stops_when, stops_by="pkill -KILL -f '^bash ./bootstrap.sh'")
    with pytest.raises(sky.BootstrapFailed) as caught, pool_on(machines, tmp_path, accelerator=MIXED):
        pass
    assert (caught.value.node, caught.value.phase, caught.value.exit_code) == (1, "mig", 128 + signal.SIGKILL)
    assert gpus[1].changes[:stops_at] != []
    assert as_before(gpus)


def test_a_gpu_that_cannot_be_restored_causes_a_warning(machines, gpus, tmp_path, caplog):
    """Another process uses a partition of the pool at its end. Everything else is cleaned up."""
    with pool_on(machines[:1], tmp_path) as pool:
        directory = pool.lease.nodes[0].instance.directory
        machines[0].run(f"kill -KILL $(cat {directory}/guard)")
        gpus[0].set(0, processes=[(4711, "somebody")])
    assert f"{machines[0].ip}: GPU 0 is not as it was before" in caplog.text
    assert gpus[0].partitions == [["3g.40gb", "3g.40gb"], []]
