"""Nodes that go away under running calls."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward_core as sky
from tests.conftest import Told


@sky.compute
def wait_for_go(folder: str) -> int:
    """Note where this runs, wait for the file `go`, return the node."""
    node = sky.instance_info().node
    Path(folder, f"node-{node}").write_text(str(os.getppid()))
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return node


@sky.compute
def double(x: int) -> int:
    return 2 * x


def supervisor_of(folder: Path, node: int, wait_until: Callable[..., None]) -> int:
    """The pid of the node's first process, once a call runs there."""
    note = folder / f"node-{node}"
    wait_until(lambda: note.exists() and note.read_text(), f"a call on node {node}")
    return int(note.read_text())


def open_pool(told: Told) -> sky.ComputePool:
    return sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", on_event=told, collect_metrics=False)


def test_a_lost_node_takes_its_calls_and_no_others(tmp_path: Path) -> None:
    """When a node dies, its running call raises NodeLost, those of other nodes go on, and later calls run where there is still a node."""
    from tests.conftest import wait_until

    told = Told()
    with open_pool(told) as pool:
        futures = [pool.submit(wait_for_go(str(tmp_path))) for _ in range(2)]
        supervisors = [supervisor_of(tmp_path, node, wait_until) for node in range(2)]
        os.kill(supervisors[1], signal.SIGKILL)
        wait_until(lambda: any(future.done() for future in futures), "the loss to be noticed", 20)
        (lost,) = [future for future in futures if future.done()]
        with pytest.raises(sky.NodeLost):
            lost.result()
        (tmp_path / "go").touch()
        (kept,) = [future for future in futures if future is not lost]
        assert kept.result(timeout=20) == 0
        assert pool.map(double, range(20)) == [2 * x for x in range(20)]
        assert [event.node for event in told.of(sky.InstanceLost)] == [1]
    assert len(told.of(sky.CostFinal)) == 1


def test_a_lost_head_ends_all_calls_with_the_reason(tmp_path: Path) -> None:
    """When the head dies, no call waits for ever: each raises NodeLost, later ones too, and the pool closes in order."""
    from tests.conftest import wait_until

    told = Told()
    with open_pool(told) as pool:
        futures = [pool.submit(wait_for_go(str(tmp_path))) for _ in range(5)]
        supervisors = [supervisor_of(tmp_path, node, wait_until) for node in range(2)]
        os.kill(supervisors[0], signal.SIGKILL)
        for future in futures:
            with pytest.raises(sky.NodeLost):
                future.result(timeout=30)
        with pytest.raises(sky.NodeLost):
            double(1) >> pool
    assert len(told.of(sky.CostFinal)) == 1
