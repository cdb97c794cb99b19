"""Losses of nodes with running calls. The nodes are processes of this machine."""

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from tests.conftest import RecordedEvents, processes_by_tag, slowness
from tests.system.engine.test_losses import (
    await_replacement,
    double,
    kill,
    node_pid,
    open_pool,
    supervisor_of,
    wait_for_go,
)
from tests.waiting import WAIT_SECONDS, wait_until


def signal_all(instance_id: str, number: signal.Signals) -> int:
    """Send a signal to every process of an instance; return how many got it.

    Some may end meanwhile, and one may fork.
    """
    pids = [pid for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID") if tag == instance_id]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)


def test_the_only_node_of_a_pool_is_replaced(tmp_path: Path) -> None:
    """A pool that loses its only node rents another, and the call runs again there; the bill has both, each for its own
    time.
    """
    recorded = RecordedEvents()
    with open_pool(recorded, nodes=1, provider=sky.Local(price_per_hour=36.0)) as pool:
        future = pool.submit(wait_for_go(str(tmp_path)))
        kill(supervisor_of(tmp_path, 0))
        (tmp_path / "node-0").unlink()
        supervisor_of(tmp_path, 0)
        wait_until(lambda: len(recorded.of(sky.PoolReady)) == 2, "the cluster to be up")
        assert pool.instance_count == 1
        spent, at = pool.cost, time.monotonic()
        wait_until(lambda: pool.cost > spent + 0.05, "some seconds' cost")
        begun = 0.01  # the bill grows by whole seconds
        assert (pool.cost - spent - begun) / (time.monotonic() - at) < 0.015, (
            "one machine is 0.01 USD per second: the lost one must not be counted any more"
        )
        (tmp_path / "go").touch()
        assert future.result(timeout=WAIT_SECONDS) == 0
    (final,) = recorded.of(sky.CostFinal)
    assert final.ondemand_count == 2
    assert 0.0 < final.total_cost < 0.015 * final.total_seconds + 0.02
    assert pool.cost == final.total_cost


def test_a_use_pays_for_a_slot_of_each_worker_and_for_an_attempt_that_is_lost(tmp_path: Path) -> None:
    """A broadcast of a second has held a second of both workers. A call that was lost with its node has its time until
    then, and that of its second attempt.
    """
    provider = sky.Local(price_per_hour=3600.0)
    with open_pool(RecordedEvents(), provider=provider) as pool, sky.PoolUse(pool, is_alone=False) as use:
        for future in use.submit_broadcast(sky.PendingCompute(time.sleep, (1.0,), {})):
            future.result(WAIT_SECONDS)
        both = use.bill().slot_seconds
        assert both >= 2.0
        call = use.submit(wait_for_go(str(tmp_path)))
        wait_until(lambda: use.bill().slot_seconds > both + 1.0, "a second of the call to be counted")
        before_the_loss = use.bill().slot_seconds
        (node,) = tmp_path.glob("node-*")
        kill(int(node.read_text()))
        (tmp_path / "go").touch()
        assert call.result(WAIT_SECONDS) in {0, 1}
        assert use.bill().slot_seconds >= before_the_loss
    assert use.bill().cost_usd == pytest.approx(use.bill().slot_seconds, rel=1e-6), "a second of a slot is a dollar"


class Scarce(sky.Local):
    """This machine as two types; the cheaper type is sold only once."""

    def offers(self, want: sky.Requirements) -> list[sky.Offer]:
        (offer,) = super().offers(want)
        return [
            offer.model_copy(update={"instance_type": name, "price_per_hour": price})
            for name, price in (("rare", 1.0), ("common", 2.0))
        ]

    def launch(self, offer: sky.Offer, count: int, tags: Mapping[str, str], startup: str) -> list[sky.Instance]:
        if offer.instance_type == "rare" and sold.get("rare"):
            raise sky.NoCapacity("there are no more of these")
        sold[offer.instance_type] += 1
        return super().launch(offer, count, tags, startup)


sold = Counter[str]()


def test_the_only_node_of_a_pool_is_replaced_by_another_type_if_its_own_is_sold_out(tmp_path: Path) -> None:
    """The only node may be replaced with any type, like any other node: spot machines of one type and zone end all at
    once.
    """
    recorded = RecordedEvents()
    sold.clear()
    with open_pool(recorded, nodes=1, provider=Scarce()) as pool:
        future = pool.submit(wait_for_go(str(tmp_path)))
        kill(supervisor_of(tmp_path, 0))
        wait_until(lambda: len(recorded.of(sky.PoolReady)) == 2, "the cluster to be up")
        (tmp_path / "go").touch()
        assert future.result(timeout=WAIT_SECONDS) == 0
    assert sold == {"rare": 1, "common": 1}


# ── broadcasts ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("retries", "options"), [(0, {}), (1, {}), (1, {"provider": sky.Local(price_per_hour=3.6), "max_cost": 50.0})]
)
def test_a_broadcast_waits_for_the_replacement_of_a_lost_node(
    tmp_path: Path, retries: int, options: dict[str, Any]
) -> None:
    """A broadcast whose node is lost runs again on its replacement, or raises NodeLost without retries; also with a
    cost limit.
    """
    recorded = RecordedEvents()
    with open_pool(recorded, retries=retries, **options) as pool:
        results = list[object]()

        def broadcast() -> None:
            try:
                results.append(wait_for_go(str(tmp_path)) @ pool)
            except sky.NodeLost as error:
                results.append(error)

        thread = threading.Thread(target=broadcast)
        thread.start()
        supervisors = [supervisor_of(tmp_path, node) for node in range(2)]
        (tmp_path / "node-1").unlink()
        kill(supervisors[1])
        if retries:
            assert supervisor_of(tmp_path, 1) != supervisors[1]
            (tmp_path / "go").touch()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        (result,) = results
        assert result == (0, 1) if retries else isinstance(result, sky.NodeLost)


# ── closing, freezing, last lines ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", ["lost", "stopping", "rented", "joined"])
def test_closing_in_the_middle_of_a_replacement_leaves_nothing(tmp_path: Path, victim: int, moment: str) -> None:
    """When the pool is closed during a replacement, its calls end, no machine is left, and the bill is emitted once."""
    recorded = RecordedEvents()
    kinds: dict[str, Callable[[], bool]] = {
        "lost": lambda: bool(recorded.of(sky.InstanceLost)),
        "stopping": lambda: bool(recorded.of(sky.InstanceStopping)),
        "rented": lambda: len(recorded.of(sky.InstanceProvisioned)) == 3,
        "joined": lambda: (
            len(recorded.of(sky.InstanceProvisioned)) == 3 and len(recorded.of(sky.BootstrapStarting)) == 3
        ),
    }
    with open_pool(recorded) as pool:
        futures = [pool.submit(wait_for_go(str(tmp_path))) for _ in range(4)]
        supervisors = [supervisor_of(tmp_path, node) for node in range(2)]
        pool_id = pool.lease.pool_id
        kill(supervisors[victim])
        wait_until(kinds[moment], f"the moment ({moment})")
    for future in futures:
        assert isinstance(future.exception(timeout=0), sky.PoolClosed)
    assert [tag for _, tag in processes_by_tag("SKYWARD_POOL_ID") if tag == pool_id] == []
    assert len(recorded.of(sky.CostFinal)) == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_node_is_noticed(tmp_path: Path, victim: int) -> None:
    """A frozen node (a machine that is moved or starved) is lost within twenty seconds, and its call runs again."""
    recorded = RecordedEvents()
    with open_pool(recorded, lease_seconds=40) as pool:
        futures = [pool.submit(wait_for_go(str(tmp_path))) for _ in range(2)]
        for node in range(2):
            supervisor_of(tmp_path, node)
        frozen = pool.lease.nodes[victim].instance.id
        for _ in range(2):  # a process may have forked while the others were stopped
            signal_all(frozen, signal.SIGSTOP)
        # A head has half the lease in addition: it may only be slow, and losing it loses all calls in flight.
        wait_until(lambda: recorded.of(sky.CallRetrying), "the loss to be noticed", (20 if victim else 55) * slowness())
        (tmp_path / "go").touch()
        assert {future.result(timeout=WAIT_SECONDS) for future in futures} <= {0, 1}
        await_replacement(recorded)
    assert [event.node for event in recorded.of(sky.InstanceLost)] == [victim]


@pytest.mark.timeout(300)
def test_a_frozen_worker_of_the_head_is_restarted(tmp_path: Path) -> None:
    """The scheduler answers, so the head is not lost.

    An event says so within twenty seconds, and the call runs on the worker's successor.
    """
    recorded = RecordedEvents()
    with open_pool(recorded, nodes=1) as pool:
        supervisor = dict(node_pid() @ pool)[0]
        address = next(iter(pool.dask_client().scheduler_info()["workers"]))
        os.kill(listener(supervisor, int(address.rpartition(":")[2])), signal.SIGSTOP)
        future = pool.submit(double(4))
        wait_until(lambda: recorded.of(sky.Error), "the event", 20 * slowness())
        assert future.result(timeout=WAIT_SECONDS) == 8
    assert (recorded.of(sky.InstanceLost), recorded.of(sky.ClusterRestarting)) == ([], [])


def listener(supervisor: int, port: int) -> int:
    """Return the pid of the supervisor's child that listens on this port."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    sockets = {
        f"socket:[{fields[9]}]"
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        if fields[1].endswith(f":{port:04X}")
    }
    (found,) = [
        pid for pid in children if any(os.readlink(link) in sockets for link in Path(f"/proc/{pid}/fd").iterdir())
    ]
    return int(found)


def test_all_nodes_lost_at_once_are_replaced(tmp_path: Path) -> None:
    """When the head and the node after it die together, both losses are emitted, both nodes replaced, and the calls run
    again.
    """
    recorded = RecordedEvents()
    with open_pool(recorded) as pool:
        futures = [pool.submit(wait_for_go(str(tmp_path))) for _ in range(2)]
        for pid in [supervisor_of(tmp_path, node) for node in range(2)]:
            kill(pid)
        (tmp_path / "go").touch()
        assert {future.result(timeout=60) for future in futures} <= {0, 1}
        wait_until(lambda: len(recorded.of(sky.InstanceLost)) == 2, "the events of both losses")
        wait_until(lambda: pool.instance_count == 2 and len(node_pid() @ pool) == 2, "both replacements", 60)
    ids = [event.instance_id for event in recorded.of(sky.InstanceLost)]
    assert len(ids) == len(set(ids))


def test_a_replacement_that_dies_before_it_joins_is_replaced(tmp_path: Path) -> None:
    """The loss of a machine that has not joined is noticed at once, not at the deadline of provisioning."""
    recorded = RecordedEvents()
    with open_pool(recorded) as pool:
        pids = dict(node_pid() @ pool)
        kill(pids[1])
        wait_until(lambda: len(recorded.of(sky.InstanceProvisioned)) == 3, "the replacement to be rented")
        second = recorded.of(sky.InstanceProvisioned)[2].instance_id
        wait_until(lambda: not signal_all(second, signal.SIGKILL), "all of it to be killed")
        wait_until(lambda: len(recorded.of(sky.InstanceProvisioned)) == 4, "another replacement")
        wait_until(lambda: len(node_pid() @ pool) == 2, "the node to join")
    assert len(recorded.of(sky.Error)) == 1
    assert len(recorded.of(sky.InstanceLost)) == 1
