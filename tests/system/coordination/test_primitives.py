"""Locks, events, queues, semaphores and variables in calls on two nodes, and in the program."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from tests.conftest import shared, wait_until

SOON_SECONDS = 5.0
"""Within this time a lock of a process that has died is free (docs/decisions/0027)."""


@dataclass
class Reading:
    """A class of a module that nodes do not have."""

    sensor: str
    value: float


def add(path: str, times: int) -> None:
    """Add to the number in a file, so that two at the same time would lose some."""
    lock = sky.Lock("counter")
    for _ in range(times):
        with lock:
            number = int(Path(path).read_text())
            os.sched_yield()
            Path(path).write_text(str(number + 1))


def test_a_lock_makes_sums_exact(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Over nodes, threads of a call, processes that it forks or starts, and the program."""
    path = tmp_path / "number"
    path.write_text("0")

    @sky.compute
    def work() -> None:
        child = os.fork()
        add(str(path), 20)
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        threads = [threading.Thread(target=add, args=(str(path), 10)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        code = "import sys, skyward_core as sky\nwith sky.Lock('counter'): open(sys.argv[1], 'r+').write(str(int(open(sys.argv[1]).read()) + 1))"
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)

    lock = sky.Lock("counter", pool=pool)
    futures = pool.submit_broadcast(work())
    for _ in range(20):
        with lock:
            path.write_text(str(int(path.read_text()) + 1))
    assert [future.result() for future in futures] == [None, None]
    assert int(path.read_text()) == 2 * (2 * 20 + 2 * 10 + 1) + 20


def requests_that_wait(pool: sky.ComputePool, event: str) -> int:
    """Return how many requests wait for an event."""
    client: Any = pool.dask_client()

    def count(dask_scheduler: Any) -> int:
        shared = dask_scheduler.plugins["skyward-coordination"]._state._objects.get(("event", event))
        return 0 if shared is None else len(shared.waiting.get("wait", ()))

    return client.run_on_scheduler(count)


def test_an_event_wakes_all_who_wait(pool: sky.ComputePool) -> None:
    """Calls on both nodes wait, and then the program sets it.

    Looks inside: only the scheduler knows that both requests wait.
    """
    go = sky.Event("go", pool=pool)

    @sky.compute
    def wait() -> bool:
        return go.wait(timeout=60)

    futures = pool.submit_broadcast(wait())
    wait_until(lambda: requests_that_wait(pool, "go") == 2, "both requests")
    assert not go.is_set()
    go.set()
    assert [future.result() for future in futures] == [True, True]
    go.clear()


def test_a_queue_takes_values_from_one_node_to_the_other(pool: sky.ComputePool) -> None:
    """In their order, and never more than `maxsize` at a time."""
    readings = sky.Queue[Reading | None]("readings", maxsize=3)

    @sky.compute
    def produce_or_consume() -> list[tuple[int, float]]:
        if sky.instance_info().rank == 0:
            for number in range(20):
                readings.put(Reading("s", float(number)), timeout=60)
            readings.put(None, timeout=60)
            return []
        got: list[tuple[int, float]] = []
        while (reading := readings.get(timeout=60)) is not None:
            got.append((readings.qsize(), reading.value))
        return got

    nothing, got = produce_or_consume() @ pool
    assert nothing == []
    assert [value for _, value in got] == [float(number) for number in range(20)]
    assert max(size for size, _ in got) <= 3


def test_a_semaphore_limits_how_many_run_at_a_time(pool: sky.ComputePool) -> None:
    """Three threads on each of two nodes; a third lease comes only when one is released."""
    inside, go = sky.Queue[str]("inside", pool=pool), sky.Event("leave", pool=pool)

    def enter() -> None:
        with sky.Semaphore(2, "two"):
            inside.put("in")
            assert go.wait(timeout=60)

    @sky.compute
    def work() -> None:
        threads = [threading.Thread(target=enter) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    futures = pool.submit_broadcast(work())
    assert [inside.get(timeout=60) for _ in range(2)] == ["in", "in"]
    assert sky.Semaphore(2, "two", pool=pool).get_value() == 2
    with pytest.raises(TimeoutError):
        inside.get(timeout=0.3)
    go.set()
    for future in futures:
        future.result()
    assert [inside.get(timeout=60) for _ in range(4)] == ["in"] * 4
    go.clear()


def test_a_variable_has_what_was_set_last(pool: sky.ComputePool) -> None:
    """In the program, and in calls, which wait for a value."""
    best, settings = sky.Variable[Reading]("best", pool=pool), sky.Variable[np.ndarray]("settings", pool=pool)

    @sky.compute
    def improve() -> float:
        weights = settings.get(timeout=60)
        weights += 1  # its own copy
        with sky.Lock("best"):
            reading = best.get(timeout=60)
            best.set(Reading(reading.sensor, reading.value + float(weights.sum())))
        return float(weights.sum())

    futures = pool.submit_broadcast(improve())
    best.set(Reading("s", 1.0))
    settings.set(np.ones(3))
    assert [future.result() for future in futures] == [6.0, 6.0]
    assert best.get() == Reading("s", 13.0)
    best.delete()
    settings.delete()


# ── holders that end without a release ───────────────────────────────────────────────────────────────────────────────


def returns(held: sky.Queue[int]) -> None:
    sky.Lock("dead").acquire()
    held.put(os.getpid())


def raises(held: sky.Queue[int]) -> None:
    returns(held)
    raise ZeroDivisionError


def is_killed(held: sky.Queue[int]) -> None:
    returns(held)
    os.kill(os.getpid(), signal.SIGKILL)


def runs_on(held: sky.Queue[int]) -> None:
    """Until it is stopped, with a child that has its descriptors."""
    sky.Lock("dead").acquire()
    if os.fork():
        held.put(os.getpid())
    signal.pause()


def leaves_a_process(held: sky.Queue[int]) -> None:
    """The process has the lock, and outlives the call. After the call's end it could not say that it has the lock."""
    reading, writing = os.pipe()
    if not os.fork():
        os.setsid()
        returns(held)
        os.write(writing, b"x")
        signal.pause()
    assert os.read(reading, 1)
    os.close(reading)
    os.close(writing)


def forks_a_holder(held: sky.Queue[int]) -> None:
    """The process that has the lock dies, and the call goes on."""
    child = os.fork()
    if not child:
        is_killed(held)
    os.waitpid(child, 0)
    assert sky.Lock("dead").acquire(timeout=SOON_SECONDS)


def ends_early(future: sky.CallFuture[None]) -> None:
    future.cancel()


def ends_itself(future: sky.CallFuture[None]) -> None:
    future.exception(timeout=60)


@pytest.mark.parametrize(
    ("function", "end", "seconds"),
    [
        (returns, ends_itself, None),
        (raises, ends_itself, None),
        (is_killed, ends_itself, None),
        (leaves_a_process, ends_itself, None),
        (forks_a_holder, ends_itself, None),
        (runs_on, ends_early, None),
        (runs_on, ends_itself, 4.0),
    ],
    ids=["returns", "raises", "killed", "process left behind", "forked holder killed", "cancelled", "deadline"],
)
def test_the_lock_of_a_call_that_has_ended_is_free(
    pool: sky.ComputePool,
    function: Callable[[sky.Queue[int]], None],
    end: Callable[[sky.CallFuture[None]], None],
    seconds: float | None,
) -> None:
    """Another call has it within SOON_SECONDS, however the first one ended."""
    held = sky.Queue[int]("held", pool=pool)

    @sky.compute
    def hold() -> None:
        function(held)

    @sky.compute
    def take() -> bool:
        return sky.Lock("dead").acquire(timeout=SOON_SECONDS)

    future = pool.submit(hold(), timeout=seconds)
    held.get(timeout=60)
    end(future)
    assert take() >> pool
    lock = sky.Lock("dead", pool=pool)
    assert lock.acquire(timeout=SOON_SECONDS)  # the second call has ended too
    lock.release()


def test_a_fork_does_not_have_the_lock_of_its_parent(pool: sky.ComputePool) -> None:
    """Leaving the `with` block there would release it for both."""

    @sky.compute
    def work() -> tuple[int, bool]:
        lock = sky.Lock("parent")
        with lock:
            child = os.fork()
            if not child:
                try:
                    lock.release()
                except RuntimeError:
                    os._exit(3)
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.locked()

    assert work() >> pool == (3, True)


@pytest.fixture(scope="module")
def own_pool() -> Iterator[sky.ComputePool]:
    """A pool whose nodes may be lost, and that may be attached to."""
    with shared(sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", retries=0)) as pool:
        yield pool


def worker_of_this_call() -> int:
    """Return the pid of the worker that this call belongs to: it listens on the socket."""
    path = os.environ["SKYWARD_COORDINATION"].split()[1]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def test_the_lock_of_a_lost_worker_is_free(own_pool: sky.ComputePool) -> None:
    """The scheduler notices the end of its connection."""
    held, lock = sky.Queue[int]("held", pool=own_pool), sky.Lock("lost", pool=own_pool)

    @sky.compute
    def hold() -> None:
        with sky.Lock("lost"):
            held.put(worker_of_this_call())
            signal.pause()

    future = own_pool.submit(hold())
    os.kill(held.get(timeout=60), signal.SIGKILL)
    assert lock.acquire(timeout=SOON_SECONDS)
    lock.release()
    assert isinstance(future.exception(timeout=60), sky.NodeLost)


def test_the_lock_of_a_silent_node_is_free(own_pool: sky.ComputePool) -> None:
    """The processes of the node are stopped, and its connections stay: the scheduler removes it after 14 seconds.

    Until then no other call has the lock. When the node goes on, the call's release has no effect on the next holder.
    """
    held, lock = sky.Queue[tuple[int, int]]("held", pool=own_pool), sky.Lock("silent", pool=own_pool)

    @sky.compute
    def hold() -> None:
        with sky.Lock("silent"):
            held.put((worker_of_this_call(), os.getpid()))
            signal.pause()

    future = own_pool.submit(hold())
    pids = held.get(timeout=60)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert not lock.acquire(timeout=0.5)
        assert lock.acquire(timeout=60)
        assert isinstance(future.exception(timeout=60), sky.NodeLost)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # its supervisor may have ended it
                os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the node's processes")
    assert lock.locked()
    lock.release()


@pytest.mark.nightly
def test_the_lock_of_a_program_that_is_killed_is_free(own_pool: sky.ComputePool) -> None:
    """Another program attaches to the pool, takes the lock, and dies."""
    code = (
        "import os, signal, sys, skyward_core as sky\n"
        "pool = sky.ComputePool.attach(sys.argv[1])\n"
        "sky.Lock('attached', pool=pool).acquire()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    lock = sky.Lock("attached", pool=own_pool)
    done = subprocess.run([sys.executable, "-c", code, own_pool.lease.model_dump_json()], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert lock.acquire(timeout=SOON_SECONDS)
    lock.release()
