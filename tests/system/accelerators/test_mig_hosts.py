"""Pools of MIG partitions on real machines with fake GPUs: one worker for each partition, and restored GPUs."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from distributed.diagnostics import nvml

import skyward_core as sky
from skyward_core.events.events import BootstrapProgress
from tests.conftest import RecordedEvents
from tests.testbed import Fleet, Host
from tests.testbed.fakegpu import Gpus, install
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

HALVES = sky.Accelerator.NVIDIA.H100(mig="3g.40gb")
PLACE = "usr/local/bin"
PRICE_PER_HOUR = 7200.0
"""With this price one second of one of a host's two workers costs a dollar."""

pytestmark = [pytest.mark.timeout(300)]


@sky.compute
def seen() -> tuple[str | None, sky.InstanceInfo]:
    """Return the partition of this worker, and its instance."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), sky.instance_info()


@sky.compute
def seen_by_a_child() -> str:
    """Return the partition that a child process of the call sees."""
    argv = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@sky.compute
def used(number: int) -> str:
    """Run long enough that each worker gets a call. Return this worker's partition."""
    time.sleep(1.0)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture(scope="module")
def machines(fleet: Fleet, mirror: Mirror) -> Iterator[list[Host]]:
    """Yield two machines with two GPUs each; they keep their environments between tests."""
    hosts = [fleet.create() for _ in range(2)]
    for host in hosts:
        mirror.configure(host)
    yield hosts
    for host in hosts:
        host.crash()


@pytest.fixture
def gpus(machines: list[Host]) -> Iterator[list[Gpus]]:
    """Yield their GPUs in a new state. Afterwards all changes are undone, and no process of a node is left."""
    gpus = [install(host.root / PLACE, count=2) for host in machines]
    yield gpus
    wait_until(
        lambda: all(
            host.run('test -z "$(ls /root/.cache/skyward/instances 2>/dev/null)"').returncode == 0 for host in machines
        ),
        "the nodes to be gone",
    )
    # the guard ends last, after its directory is removed
    look = "grep -lsaz '^SKYWARD_INSTANCE_ID=' /proc/[0-9]*/environ; echo looked"
    wait_until(lambda: [run_on(host, look) for host in machines] == ["looked"] * 2, "their processes to be gone")


def run_on(host: Host, command: str) -> str:
    return host.run(command).stdout.strip()


def pool_on(
    machines: Sequence[Host], folder: Path, recorded: RecordedEvents | None = None, **options: Any
) -> sky.ComputePool:
    known_hosts = folder / "known_hosts"
    known_hosts.write_text("".join(f"{host.known_hosts_line}\n" for host in machines))
    provider = sky.Hosts(
        *(host.ip for host in machines),
        user="root",
        key=str(machines[0].key_path),
        known_hosts=str(known_hosts),
        config="/dev/null",
        price_per_hour=PRICE_PER_HOUR,
    )
    fields: dict[str, Any] = {
        "nodes": len(machines),
        "accelerator": HALVES,
        "display": "quiet",
        "provision_timeout": 120,
        **options,
    }
    return sky.ComputePool(provider=provider, on_event=recorded or RecordedEvents(), **fields)


def as_before(gpus: Sequence[Gpus]) -> bool:
    return all(one.modes == ["Disabled", "Disabled"] and one.partitions == [[], []] for one in gpus)


# ── one worker for each partition ────────────────────────────────────────────────────────────────────────────────────


def test_each_partition_is_a_worker(machines, gpus, tmp_path):
    """Broadcast has a result for each partition, in the order of nodes and workers.

    Single calls use all workers. Afterwards the GPUs are whole again.
    """
    recorded = RecordedEvents()
    with pool_on(machines, tmp_path, recorded, memory="256MB", env={"CUDA_VISIBLE_DEVICES": "all"}) as pool:
        found = seen() @ pool
        assert [visible for visible, _ in found] == [uuid for one in gpus for uuid in one.uuids]
        assert len({visible for visible, _ in found}) == 4
        infos = [info for _, info in found]
        assert [(info.node, info.worker, info.rank) for info in infos] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        assert {(info.total_nodes, info.workers_per_node, info.world_size, *info.accelerators) for info in infos} == {
            (2, 2, 4, "H100")
        }
        assert len({info.job_id for info in infos}) == 1
        assert seen_by_a_child() @ pool == tuple(visible for visible, _ in found)
        assert sorted(pool.map(used, range(4))) == sorted(visible for visible, _ in found)
        call = pool.submit(used(0))
        assert call.result() in {visible for visible, _ in found}
        assert call.cost == pytest.approx(call.seconds)
        assert [(node.workers, node.slots) for node in pool.lease.nodes] == [(2, 1), (2, 1)]
        assert [event.slots for event in recorded.of(sky.PoolReady)] == [4]
        # Dask's NVML queries are disabled, because NVML refuses them for partitions
        assert set(pool.dask_client().run(attrgetter("NVML_STATE.name"), nvml).values()) == {"DISABLED_CONFIG"}
        assert [one.partitions for one in gpus] == [[["3g.40gb", "3g.40gb"], []]] * 2  # the spec needs one of two GPUs
    assert "mig" in [event.step for event in recorded.of(BootstrapProgress)]
    assert as_before(gpus)
