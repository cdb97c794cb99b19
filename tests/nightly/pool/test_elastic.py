"""Pools of `nodes=(least, most)` that grow and shrink while calls run, nodes die, money ends, or clients leave."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine.draining import NodeDraining
from tests.conftest import RecordedEvents, processes_by_tag, signal_members
from tests.system.pool.test_elastic import (  # noqa: F401 - fixtures
    _nodes_have_ended,
    held_back,
    noted,
    pool_of,
    recorded,
    runs,
    scaled,
    wide_pool,
)
from tests.waiting import WAIT_SECONDS, wait_until

pytestmark = [pytest.mark.timeout(300)]

MEGABYTE = 1 << 20


@sky.compute
def place(numbers: list[int]) -> tuple[int, int, list[int]]:
    info = sky.instance_info()
    return info.node, info.total_nodes, sky.shard(numbers)


@sky.compute
def large(size: int) -> bytes:
    time.sleep(1)
    return b"x" * size


class Stored:
    """A value that is loaded when the test lets it: a file "load" in the folder."""

    def __init__(self, folder: str, content: bytes) -> None:
        self.folder, self.content = folder, content

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.folder, self.content)


def _loaded(folder: str, content: bytes) -> int:
    Path(folder, "loading").touch()
    until = time.monotonic() + WAIT_SECONDS
    while not Path(folder, "load").exists() and time.monotonic() < until:
        time.sleep(0.02)
    return len(content)


@sky.compute
def stored(folder: str, size: int) -> Stored:
    time.sleep(1)
    Path(folder, f"stored-{uuid.uuid4().hex}").touch()
    return Stored(folder, b"x" * size)


def shrunk(pool: sky.ComputePool) -> None:
    wait_until(lambda: pool.instance_count == 1, "the others have left")


def test_scaling_loses_and_repeats_no_call_and_broadcasts_use_the_nodes_that_are_there(
    wide_pool: sky.ComputePool, tmp_path: Path
) -> None:
    calls, notes = [wide_pool.submit(noted(number, str(tmp_path))) for number in range(100)], list(range(7))
    assert place(notes) @ wide_pool == ((0, 1, notes),)
    assert wide_pool.scale(3, wait_seconds=WAIT_SECONDS) == 3
    assert place(notes) @ wide_pool == ((0, 3, [0, 3, 6]), (1, 3, [1, 4]), (2, 3, [2, 5]))
    calls += [wide_pool.submit(noted(number, str(tmp_path))) for number in range(100, 200)]
    assert [call.result() for call in calls] == list(range(200))
    assert runs(tmp_path) == list(range(200))
    held = tmp_path / "held"
    held.mkdir()
    broadcast = wide_pool.submit_broadcast(held_back(0, str(held)))
    wait_until(lambda: len(runs(held)) == 3, "the broadcast runs")
    assert wide_pool.scale(1, wait_seconds=WAIT_SECONDS) == 1
    assert wide_pool.instance_count == 3
    (held / "go").touch()
    assert [call.result() for call in broadcast] == [(0, 0), (0, 1), (0, 2)]
    shrunk(wide_pool)
    assert place(notes) @ wide_pool == ((0, 1, notes),)


def test_a_node_keeps_a_large_result_until_it_is_forgotten(wide_pool: sky.ComputePool) -> None:
    """A detached call's result in a file of its node: the node leaves when no client can ask for it any more."""
    assert wide_pool.scale(2, wait_seconds=WAIT_SECONDS) == 2
    calls = [wide_pool.start_detached(large(MEGABYTE)) for _ in range(2)]
    assert [len(call.result()) for call in calls] == [MEGABYTE] * 2
    assert {call.attempts[-1].node for call in calls} == {0, 1}
    assert wide_pool.scale(1, wait_seconds=WAIT_SECONDS) == 1
    assert wide_pool.scale(2, wait_seconds=WAIT_SECONDS) == 2, "it is freed, because it has not left"
    assert [len(call.result()) for call in calls] == [MEGABYTE] * 2
    for call in calls:
        call.forget()
    wide_pool.scale(1)
    shrunk(wide_pool)


def test_a_node_that_is_killed_while_it_drains_is_not_replaced(wide_pool: sky.ComputePool, tmp_path: Path) -> None:
    assert wide_pool.scale(2, wait_seconds=WAIT_SECONDS) == 2
    calls = wide_pool.submit_all([held_back(number, str(tmp_path)) for number in range(2)])
    wait_until(lambda: len(runs(tmp_path)) == 2, "both run")
    assert wide_pool.scale(1, wait_seconds=WAIT_SECONDS) == 1
    signal_members(wide_pool.lease.nodes[1].instance.id, signal.SIGKILL)
    shrunk(wide_pool)
    (tmp_path / "go").touch()
    assert sorted(call.result() for call in calls) == [(0, 0), (1, 0)]
    assert wide_pool.scale(1, wait_seconds=WAIT_SECONDS) == 1


def test_money_for_one_node_alone_lets_nothing_grow(recorded: RecordedEvents) -> None:
    with pool_of(recorded, provider=sky.Local(price_per_hour=1.0), max_cost=0.25) as pool:
        assert pool.scale(3) == 1
        wait_until(lambda: recorded.of(sky.Error), "the warning")
        message = recorded.of(sky.Error)[0].message
        assert "max_cost=0.25 would not last for" in message
        assert "goes on with 1 node" in message
        assert len(recorded.of(sky.InstanceProvisioned)) == 1
        assert place([1]) >> pool == (0, 3, [1])


@pytest.mark.parametrize("is_detached", [False, True], ids=["closed", "detached"])
def test_a_pool_that_is_left_while_it_grows_leaves_no_machine_behind(
    is_detached: bool, recorded: RecordedEvents
) -> None:
    pool = pool_of(recorded, lease_seconds=60).open()
    pool.scale(3)
    wait_until(lambda: recorded.of(sky.InstanceLaunching)[1:], "it grows")
    if not is_detached:
        pool.close()
        assert pool.receipt is not None
        assert all(one["gone_at"] is not None for one in pool.receipt["resources"])
        return
    lease = pool.detach()
    try:
        with sky.ComputePool.attach(lease, on_event=recorded) as attached:
            assert len(place([1]) @ attached) == len(lease.nodes)
            with pytest.raises(sky.BadRequest, match="only the process that has opened the pool"):
                attached.scale(2)
    finally:
        sky.release(lease.pool_id)


GROWING = """
import skyward_core as sky

def show(event):
    if isinstance(event, sky.InstanceProvisioned):
        print(event.instance_id, flush=True)

with sky.ComputePool(provider=sky.Local(), nodes=(1, 3), display="quiet", on_event=show) as pool:
    pool.scale(3)
    input()
"""


def test_a_client_that_is_killed_while_its_pool_grows_leaves_nothing(tmp_path: Path) -> None:
    argv, pipe = [sys.executable, "-c", GROWING], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path) as process:
        timer = threading.Timer(WAIT_SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        machines = {process.stdout.readline().strip() for _ in range(2)}
        process.kill()
        timer.cancel()
    assert "" not in machines, "the program has ended"
    ours = lambda: {tag for _, tag in processes_by_tag("SKYWARD_INSTANCE_ID")} & machines
    wait_until(lambda: not ours(), "all are gone")


def followed(on_event: RecordedEvents | None) -> sky.ComputePool:
    """Return a pool with a name that grows and does not shrink by itself; two in this process are as two processes."""
    times = {"scale_up_after": 0.5, "scale_down_after": 3600, "lease_seconds": 30}
    provider = sky.Local()
    return sky.ComputePool(
        name="followed", provider=provider, nodes=(1, 3), display="quiet", on_event=on_event, **times
    )


def is_scaled(pool: sky.ComputePool, nodes: int) -> bool:
    """Set the number of nodes, if this process may; return whether they are so many."""
    try:
        return pool.scale(nodes) == nodes
    except sky.BadRequest:
        return False


def test_a_process_that_joined_follows_the_nodes_and_its_queue_makes_the_pool_grow(
    recorded: RecordedEvents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    drain = NodeDraining.drain

    def noting(draining: NodeDraining, rank: int) -> tuple[int, int]:
        left, bound = drain(draining, rank)
        seen.append(left)
        return left, bound

    monkeypatch.setattr(NodeDraining, "drain", noting)
    numbers = list(range(7))
    with followed(recorded) as keeper, followed(None) as joiner:
        calls = joiner.submit_all([held_back(number, str(tmp_path)) for number in range(3)])
        wait_until(lambda: runs(tmp_path) == [0, 1, 2], "three nodes run the calls of the other process")
        assert scaled(recorded) == [(1, 3)]
        wait_until(lambda: joiner.instance_count == 3, "it knows them")
        (tmp_path / "go").touch()
        assert sorted(call.result()[1] for call in calls) == [0, 1, 2]
        wait_until(lambda: len(place(numbers) @ joiner) == 3, "its broadcasts use them")
        with pytest.raises(sky.BadRequest, match=f"process {os.getpid()} of .* keeps the pool 'followed'"):
            joiner.scale(2)
        keeper.scale(1)
        shrunk(joiner)
        assert place(numbers) @ joiner == ((0, 1, numbers),)
        keeper.scale(2, wait_seconds=WAIT_SECONDS)
        wait_until(lambda: len(place(numbers) @ joiner) == 2, "another machine has the rank")
        results = joiner.submit_all([stored(str(tmp_path), MEGABYTE) for _ in range(2)])
        wait_until(lambda: (tmp_path / "loading").exists(), "one result is being loaded")
        wait_until(lambda: len(list(tmp_path.glob("stored-*"))) == 2, "both calls have ended")
        seen.clear()
        keeper.scale(1)
        wait_until(lambda: len(seen) >= 5, "the node was to leave")
        (tmp_path / "load").touch()
        assert 0 not in seen
        assert [call.result() for call in results] == [MEGABYTE] * 2
        shrunk(keeper)
        keeper.close()
        wait_until(lambda: is_scaled(joiner, 2), "it has taken the pool over, and scales it")
        assert place(numbers) @ joiner == ((0, 2, [0, 2, 4, 6]), (1, 2, [1, 3, 5]))
        assert joiner.scale(1, wait_seconds=WAIT_SECONDS) == 1
        shrunk(joiner)
