"""PyTorch and JAX themselves on three hosts of the test bed, one of which is preempted (`make frameworks`).

The hosts install what every node needs. The frameworks are those of this environment: its packages and the folder of
the checkpoints are shared with the hosts, as on a network file system.
"""

import sysconfig
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.events.events import CallReported, CallRetrying, InstanceLost
from tests.conftest import RecordedEvents
from tests.distributed.fixtures import ONE_THREAD
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.rental import Cloud
from tests.testbed.wheel import wheel_that_shows
from tests.waiting import wait_until

PACKAGES = Path(sysconfig.get_path("purelib"))
STEPS, INTERVAL, STOPPED_AT = 60, 10, 27
REPORT_INTERVAL = 3
"""A call may report 20 times at once, and keeps what it reports more often until it ends."""

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts have."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cloud(fleet: Fleet, mirror: Mirror, folder: Path) -> Iterator[Cloud]:
    """A cloud whose bare machines install from the mirror."""
    cloud = Cloud(fleet, prepare=mirror.configure, shared=(folder, PACKAGES))
    yield cloud
    cloud.close()


def pool_on(cloud: Cloud, folder: Path, nodes: int, recorded: RecordedEvents) -> sky.ComputePool:
    """Return a pool of hosts with this environment's packages; a broadcast may run twice."""
    image = sky.Image(pip=[f"packages-of-the-tests @ {wheel_that_shows([PACKAGES], folder).as_uri()}"])
    return sky.ComputePool(
        provider=cloud.provider(),
        nodes=nodes,
        retries=1,
        image=image,
        env=ONE_THREAD,
        on_event=recorded,
        display="quiet",
        provision_timeout=300,
    )


@sky.compute
@sky.distributed.torch(backend="gloo")
def train(folder: str, stopped: int | None = None) -> tuple[int, float]:
    """Train a network on the rows of all ranks; return the step at which this rank began, and the loss on all rows.

    The rank `stopped` does not begin step STOPPED_AT of a training without a checkpoint, so the others wait in it.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randn(96, 1)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    saved, begun_at, rank = sky.checkpoint(folder), 0, sky.instance_info().rank
    if (found := saved.load()) is not None:
        begun_at = found["step"]
        network.load_state_dict(found["network"])
        optimizer.load_state_dict(found["optimizer"])
    model, (rows, targets) = DistributedDataParallel(network), sky.shard(x, y)
    for step in range(begun_at, STEPS):
        if (step, begun_at, rank) == (STOPPED_AT, 0, stopped):
            threading.Event().wait()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(rows), targets).backward()
        optimizer.step()
        if (step + 1) % REPORT_INTERVAL == 0:
            sky.report(step=step + 1)
        if rank == 0 and (step + 1) % INTERVAL == 0:
            saved.save(
                step + 1, {"step": step + 1, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
            )
    with torch.no_grad():
        return begun_at, torch.nn.functional.mse_loss(network(x), y).item()


def steps_done(recorded: RecordedEvents) -> list[int]:
    """Return the last step that each rank has reported, in the order of the ranks."""
    last = {event.node: event.step for event in recorded.of(CallReported)}
    return [last[node] or 0 for node in sorted(last)]


def test_a_training_survives_the_loss_of_a_host(cloud: Cloud, folder: Path) -> None:
    """A host is preempted in the middle of a step and replaced, the group forms anew and goes on from the checkpoint.

    The network is that of an undisturbed training, and at most one interval of checkpoints is computed twice. The first
    lost host is the last rank; the second one is rank 0, which has the scheduler and saves the checkpoints.
    """
    recorded = RecordedEvents()
    with pool_on(cloud, folder, 3, recorded) as pool:
        undisturbed = train(str(folder / "undisturbed")) @ pool
        assert undisturbed == ((0, undisturbed[0][1]),) * 3
        wait_until(lambda: steps_done(recorded) == [STEPS] * 3, "all ranks to report the last step")
        for lost in (2, 0):
            recorded.events.clear()
            instance_id = pool.lease.nodes[lost].instance.id
            for begun_at, loss in trained_with_a_loss(pool, recorded, cloud, folder / f"without-{lost}", lost):
                assert 0 < STOPPED_AT - begun_at <= INTERVAL
                assert loss == pytest.approx(undisturbed[0][1], abs=1e-6)
            assert (lost, instance_id) in [(event.node, event.instance_id) for event in recorded.of(InstanceLost)]
            assert (2, 2) in [(event.attempt, event.attempts) for event in recorded.of(CallRetrying)]
            assert pool.lease.nodes[lost].instance.id != instance_id
            wait_until(lambda: steps_done(recorded) == [STEPS] * 3, "all ranks to report the last step again")


def trained_with_a_loss(
    pool: sky.ComputePool, recorded: RecordedEvents, cloud: Cloud, checkpoints: Path, lost: int
) -> tuple[tuple[int, float], ...]:
    """Train, preempt the host of one rank when all ranks have done STOPPED_AT steps, and return the ranks' results."""
    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(lambda: train(str(checkpoints), lost) @ pool)
        try:
            wait_until(
                lambda: training.done() or steps_done(recorded) == [STOPPED_AT] * 3,
                "all ranks to report the same step",
                180,
            )
            assert not training.done()
        finally:  # also after a failure: until then the training does not end
            cloud.preempt(pool.lease.nodes[lost].instance.id)
        return training.result(200)
