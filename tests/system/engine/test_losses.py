"""Losses of nodes with running calls. The nodes are processes of this machine."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.worker.node_clocks import kill_instance
from tests.conftest import RecordedEvents
from tests.waiting import WAIT_SECONDS, wait_until

"""How long the recovery from a loss may take on a busy machine, in tests that do not measure it."""


@sky.compute
def wait_for_go(folder: str) -> int:
    """Note the node, wait for the file `go`, return the node."""
    node = sky.instance_info().node
    note = Path(folder, f".node-{node}")
    note.write_text(str(os.getppid()))
    note.rename(Path(folder, f"node-{node}"))
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return node


@sky.compute
def note(folder: str, number: int) -> int:
    """Write a file that names this execution."""
    Path(folder, f"{number}-{time.monotonic_ns()}-{sky.instance_info().node}").touch()
    return number


FREE_CALLS = 40


@sky.compute
def held_note(folder: str, number: int) -> int:
    """Write a file that names this execution. Later calls than the first FREE_CALLS wait until the test lets them end."""
    Path(folder, f"{number}-{time.monotonic_ns()}-{sky.instance_info().node}").touch()
    while number >= FREE_CALLS and not Path(folder, "go").exists():
        time.sleep(0.01)
    return number


@sky.compute
def node_pid() -> tuple[int, int]:
    """Return the node, and the pid of its first process."""
    return sky.instance_info().node, os.getppid()


@sky.compute
def double(x: int) -> int:
    return 2 * x


def supervisor_of(folder: Path, node: int) -> int:
    """Return the pid of the node's first process, once a call runs there."""
    path = folder / f"node-{node}"
    wait_until(lambda: path.exists() and path.read_text(), f"a call on node {node}")
    return int(path.read_text())


def executions(folder: Path) -> Counter[int]:
    """Return how often each call has run, by its files."""
    return Counter(int(path.name.partition("-")[0]) for path in folder.iterdir() if path.name[0].isdigit())


@contextlib.contextmanager
def open_pool(recorded: RecordedEvents, nodes: int = 2, **options: Any) -> Generator[sky.ComputePool]:
    provider = options.pop("provider", sky.Local())
    with sky.ComputePool(
        provider=provider, nodes=nodes, display="quiet", on_event=recorded, collect_metrics=False, **options
    ) as pool:
        yield pool


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_with_a_held_call(pid: int, folder: Path, node: int, futures: Sequence[Future[int]]) -> set[int]:
    """Kill a node that runs a call which waits, then let the other calls end. Return the numbers of the calls that had
    results before: all others may have been in flight, more of them on a fast machine.
    """

    def holds() -> bool:
        its = [path.name.split("-") for path in folder.iterdir() if path.name[0].isdigit()]
        return any(int(number) >= FREE_CALLS and int(where) == node for number, _, where in its)

    wait_until(holds, f"a call that waits on node {node}")
    ended = {number for number, future in enumerate(futures) if future.done()}
    kill(pid)
    (folder / "go").touch()
    return ended


def await_replacement(recorded: RecordedEvents, count: int = 1) -> None:
    """Wait until this many machines have joined beyond the first two."""
    first = len(recorded.of(sky.InstanceProvisioned)) - len(recorded.of(sky.InstanceLost))

    def replaced() -> bool:
        ids = {event.instance_id for event in recorded.of(sky.InstanceProvisioned)[first:]}
        return len(ids & {event.instance_id for event in recorded.of(sky.BootstrapCompleted)}) >= count

    wait_until(lambda: len(recorded.of(sky.InstanceLost)) >= count, "the event of the loss")
    wait_until(replaced, "the replacement")


@sky.compute
def own_pid(folder: str) -> int:
    """Write the pid of the call's process when it first runs, and wait; return the pid when it runs again."""
    path = Path(folder, "pid")
    if path.exists():
        return os.getpid()
    part = path.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(path)
    time.sleep(600)
    return 0


def test_a_call_whose_process_is_killed_first_is_lost_with_its_node(tmp_path: Path) -> None:
    """Whoever ends a node kills its processes one after the other: that of the call did not crash."""
    recorded = RecordedEvents()
    with open_pool(recorded, nodes=1, retries=1) as pool:
        running = pool.submit(own_pid(str(tmp_path)))
        path = tmp_path / "pid"
        wait_until(path.exists, "the call to run")
        pid = int(path.read_text())
        kill(pid)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the node to know it")
        kill_instance(pool.lease.nodes[0].instance.id)
        assert running.result(WAIT_SECONDS) not in {0, pid}
    assert len(recorded.of(sky.InstanceLost)) == 1


# ── without retries ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lost_head_loses_only_its_calls(tmp_path: Path) -> None:
    """With retries=0 the call on the head raises NodeLost.

    The other node's call goes on, begun once; waiting calls run on the next cluster.
    """
    recorded = RecordedEvents()
    with open_pool(recorded, retries=0) as pool:
        out = [pool.submit(wait_for_go(str(tmp_path))) for _ in range(2)]
        supervisors = [supervisor_of(tmp_path, node) for node in range(2)]
        waiting = [pool.submit(note(str(tmp_path), number)) for number in range(20)]
        kill(supervisors[0])
        wait_until(lambda: any(future.done() for future in out), "the loss to be noticed")
        (lost,) = [future for future in out if future.done()]
        with pytest.raises(sky.NodeLost):
            lost.result()
        wait_until(lambda: len(recorded.of(sky.PoolReady)) == 2, "the next cluster")
        (kept,) = [future for future in out if future is not lost]
        assert not kept.done()
        (tmp_path / "go").touch()
        assert kept.result(timeout=WAIT_SECONDS) == 1
        assert [future.result(timeout=WAIT_SECONDS) for future in waiting] == list(range(20))
        assert double(1) >> pool == 2
        assert supervisor_of(tmp_path, 1) == supervisors[1]
    assert executions(tmp_path) == Counter(range(20))
    assert [event.node for event in recorded.of(sky.InstanceLost)] == [0]
    assert recorded.of(sky.CallRetrying) == []
    assert len(recorded.of(sky.ClusterRestarting)) == 1
    assert len(recorded.of(sky.PoolReady)) == 2
    assert len(recorded.of(sky.CostFinal)) == 1


def test_without_retries_nothing_runs_twice(tmp_path: Path) -> None:
    """Calls in flight on a lost node raise, all others have results, and no call has begun more than once. The node is
    replaced.
    """
    recorded = RecordedEvents()
    with open_pool(recorded, retries=0) as pool:
        pids = dict(node_pid() @ pool)
        futures = pool.submit_all([held_note(str(tmp_path), number) for number in range(200)])
        ended = kill_with_a_held_call(pids[1], tmp_path, 1, futures)
        errors = [future.exception(timeout=WAIT_SECONDS) for future in futures]
        await_replacement(recorded)
        assert [node for node, _ in node_pid() @ pool] == [0, 1]
    lost = {number for number, error in enumerate(errors) if error is not None}
    assert all(isinstance(errors[number], sky.NodeLost) and "retries=1" in str(errors[number]) for number in lost)
    assert lost, "at least the call that waited"
    assert not lost & ended, "only those in flight"
    assert set(executions(tmp_path).values()) == {1}
    assert all(executions(tmp_path)[number] == 1 for number, error in enumerate(errors) if error is None)
    assert [event.node for event in recorded.of(sky.InstanceLost)] == [1]
    assert (recorded.of(sky.CallRetrying), len(recorded.of(sky.CostFinal))) == ([], 1)


# ── with retries ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_with_retries_a_loss_loses_no_result(tmp_path: Path, victim: int) -> None:
    """By default a map goes on when a node is lost, even the head: all results are right, and only calls in flight have
    run twice.
    """
    recorded = RecordedEvents()
    with open_pool(recorded) as pool:
        pids = dict(node_pid() @ pool)
        futures = pool.submit_all([held_note(str(tmp_path), number) for number in range(200)])
        ended = kill_with_a_held_call(pids[victim], tmp_path, victim, futures)
        assert [future.result(timeout=WAIT_SECONDS) for future in futures] == list(range(200))
        retried = {event.call_id: event for event in recorded.of(sky.CallRetrying)}
        assert retried, "at least the call that waited"
        assert not retried.keys() & {futures[number].call_id for number in ended}, "only those in flight"
        assert {(event.attempt, event.attempts) for event in retried.values()} == {(2, 4)}
        counts = executions(tmp_path)
        assert set(counts) == set(range(200))
        again = {futures[number].call_id for number, count in counts.items() if count > 1}
        assert again <= retried.keys()
        assert max(counts.values()) <= 2
        await_replacement(recorded)
        assert [node for node, _ in node_pid() @ pool] == [0, 1]
    assert [event.node for event in recorded.of(sky.InstanceLost)] == [victim]
    progress = recorded.of(sky.CallProgress)[-1]
    assert (progress.done, progress.failed) == (progress.submitted, 0)
