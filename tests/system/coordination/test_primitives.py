"""Locks, events, queues, semaphores and variables, in calls on two nodes and in the program."""

import os
from pathlib import Path

import pytest

import skyward_core as sky


def add(path: Path, times: int, lock: sky.Lock) -> None:
    """Add to the number in a file, so that two at the same time would lose some."""
    for _ in range(times):
        with lock:
            number = int(path.read_text())
            os.sched_yield()
            path.write_text(str(number + 1))


def test_a_lock_makes_sums_exact(pool: sky.ComputePool, tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("0")
    futures = pool.submit_broadcast(sky.compute(lambda: add(path, 20, sky.Lock("counter")))())
    add(path, 20, sky.Lock("counter", pool=pool))
    assert [future.result() for future in futures] == [None, None]
    assert int(path.read_text()) == 60


def test_an_event_wakes_all_who_wait(pool: sky.ComputePool) -> None:
    go = sky.Event("go", pool=pool)
    futures = pool.submit_broadcast(sky.compute(lambda: go.wait(timeout=60))())
    assert not go.is_set()
    go.set()
    assert [future.result() for future in futures] == [True, True]
    go.clear()


def test_a_queue_takes_values_in_their_order(pool: sky.ComputePool) -> None:
    numbers = sky.Queue[int]("numbers", maxsize=3)

    @sky.compute
    def produce_or_consume() -> list[int]:
        if sky.instance_info().rank == 0:
            for number in range(20):
                numbers.put(number, timeout=60)
            return []
        return [numbers.get(timeout=60) for _ in range(20)]

    assert produce_or_consume() @ pool == ([], list(range(20)))


def test_a_semaphore_limits_how_many_have_it(pool: sky.ComputePool) -> None:
    inside, go = sky.Queue[str]("inside", pool=pool), sky.Event("leave", pool=pool)

    @sky.compute
    def enter() -> bool:
        with sky.Semaphore(2, "two"):
            inside.put("in")
            return go.wait(timeout=60)

    futures = pool.submit_broadcast(enter())
    assert [inside.get(timeout=60) for _ in range(2)] == ["in", "in"]
    third = sky.Semaphore(2, "two", pool=pool)
    assert not third.acquire(timeout=0)
    go.set()
    assert [future.result() for future in futures] == [True, True]
    assert third.acquire(timeout=60)
    third.release()
    go.clear()


def test_a_variable_has_what_was_set_last(pool: sky.ComputePool) -> None:
    best = sky.Variable[float]("best", pool=pool)
    futures = pool.submit_broadcast(sky.compute(lambda: best.get(timeout=60))())
    best.set(1.0)
    assert [future.result() for future in futures] == [1.0, 1.0]
    best.set(2.0)
    assert best.get() == 2.0
    best.delete()
    with pytest.raises(TimeoutError):
        best.get(timeout=0)
