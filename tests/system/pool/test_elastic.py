"""Pools of `nodes=(least, most)`: they grow with their queue and shrink when they are idle."""

import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from tests.conftest import RecordedEvents, shared
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(300)]


@sky.compute
def held_back(number: int, folder: str) -> tuple[int, int]:
    """Note that the call runs, and wait until the test lets it end."""
    open(os.path.join(folder, f"{number}-{uuid.uuid4().hex}"), "w").close()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.02)
    return number, sky.instance_info().node


@sky.compute
def noted(number: int, folder: str) -> int:
    """Note each time that the call runs."""
    open(os.path.join(folder, f"{number}-{uuid.uuid4().hex}"), "w").close()
    time.sleep(0.02)
    return number


def pool_of(recorded: RecordedEvents, **keywords: Any) -> sky.ComputePool:
    return sky.ComputePool(
        **{"provider": sky.Local(), "nodes": (1, 3), "display": "quiet", "on_event": recorded, **keywords}
    )


def runs(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[0]) for path in folder.iterdir() if path.name != "go")


def scaled(recorded: RecordedEvents) -> list[tuple[int, int]]:
    return [(event.before, event.nodes) for event in recorded.of(sky.NodesScaled)]


@pytest.fixture
def recorded() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture(autouse=True)
def _nodes_have_ended() -> Iterator[None]:
    """A node that has left a pool may end after the test on a busy machine."""
    yield
    wait_until(
        lambda: not any(thread.name.startswith("skyward-end-") for thread in threading.enumerate()),
        "the nodes that have left to end",
    )


@pytest.fixture(scope="module")
def wide_pool() -> Iterator[sky.ComputePool]:
    """A pool of one to three nodes, which grows and shrinks only by `scale`."""
    with shared(
        sky.ComputePool(provider=sky.Local(), nodes=(1, 3), scale_up_after=3600, scale_down_after=3600, display="quiet")
    ) as pool:
        yield pool


def test_a_queue_makes_the_pool_grow_and_idle_time_makes_it_shrink(recorded: RecordedEvents, tmp_path: Path) -> None:
    pool = pool_of(recorded, provider=sky.Local(price_per_hour=36.0), scale_up_after=0.5, scale_down_after=1)
    with pool:
        calls = pool.submit_all([held_back(number, str(tmp_path)) for number in range(3)])
        wait_until(lambda: runs(tmp_path) == [0, 1, 2], "three nodes run")
        assert pool.instance_count == 3
        (tmp_path / "go").touch()
        assert sorted(call.result()[0] for call in calls) == [0, 1, 2]
        assert sorted(call.result()[1] for call in calls) == [0, 1, 2]
        wait_until(lambda: pool.instance_count == 1, "one node is left")
        assert noted(7, str(tmp_path)) >> pool == 7
    assert runs(tmp_path) == [0, 1, 2, 7]
    assert scaled(recorded) == [(1, 3), (3, 1)]
    assert not recorded.of(sky.InstanceLost)
    assert pool.receipt is not None
    resources = pool.receipt["resources"]
    assert len(resources) == 3
    assert all(one["gone_at"] is not None and one["cost_usd"] > 0 for one in resources)


def test_the_work_begins_with_the_least_number_and_the_pool_grows_to_its_hourly_limit(
    recorded: RecordedEvents, tmp_path: Path
) -> None:
    """With nodes=(2, 4) the first calls run as soon as two nodes are there. A third would cost more than
    `max_hourly_cost`: the pool says so, and goes on with two.
    """
    local = sky.Local(price_per_hour=1.0)
    with pool_of(recorded, provider=local, nodes=(2, 4), max_hourly_cost=2.5, scale_up_after=0.5) as pool:
        calls = pool.submit_all([held_back(number, str(tmp_path)) for number in range(4)])
        wait_until(lambda: len(runs(tmp_path)) == 2, "two calls run")
        refused = wait_until(lambda: recorded.of(sky.Error), "the growth to be refused")
        assert pool.instance_count == 2
        (tmp_path / "go").touch()
        assert {call.result()[1] for call in calls} == {0, 1}
    assert "the pool cannot grow, and goes on with 2 nodes" in refused[0].message
    assert "with 1 x local/local local more the pool costs $3.00 per hour" in refused[0].message
    assert "max_hourly_cost=2.5 is less: write max_hourly_cost=3" in refused[0].message


def test_what_cannot_be_scaled_is_refused(wide_pool: sky.ComputePool) -> None:
    for nodes in (0, 4, "two", True):
        with pytest.raises(sky.BadRequest, match="write a number from 1 to 3"):
            wide_pool.scale(nodes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(sky.BadRequest, match="wait_seconds=-1"):
        wide_pool.scale(1, wait_seconds=-1)
