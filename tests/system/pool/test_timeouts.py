"""Deadlines of calls on a real pool: `timeout` of calls, batches, `submit`, `map` and `@`."""

import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from tests.waiting import wait_until


@sky.compute
def endless(runs: str) -> int:
    """Note the run and its process, and never return."""
    with Path(runs).open("a") as file:
        file.write(f"{os.getpid()}\n")
    print("begun", flush=True)
    while True:
        time.sleep(60)


@sky.compute
def quick(value: int) -> int:
    return value


def living(runs: Path) -> list[str]:
    pids = runs.read_text().split() if runs.exists() else []  # on a busy machine the time may end before it has begun
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_call_beyond_its_deadline_is_ended_on_its_node(pool: sky.ComputePool, runs: Path) -> None:
    """The error names node, time and last lines; the process is gone, the call is not run again though the pool has
    retries, and the pool goes on.
    """
    assert pool.spec.retries
    with pytest.raises(sky.CallTimedOut, match=r"the call had 3 s to run on node [01]") as caught:
        endless(str(runs)).timeout(3) >> pool
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert error.node in {0, 1}
    assert (error.timeout_seconds, error.output) == (3.0, ("begun",))
    assert quick(3) >> pool == 3
    assert len(runs.read_text().split()) == 1
    wait_until(lambda: not living(runs), "the process to end")


@pytest.mark.parametrize(
    "make",
    [
        lambda pool, runs: pool.submit(endless(runs), timeout=1).result(),
        lambda pool, runs: pool.map(endless, [runs], timeout=1),
        lambda pool, runs: (quick(1) & endless(runs)).timeout(1) >> pool,
        lambda pool, runs: sky.gather(quick(1), endless(runs).timeout(1)) >> pool,
        lambda pool, runs: endless(runs).timeout(1) @ pool,
        lambda pool, runs: pool.start_detached(endless(runs).timeout(1)).result(),
    ],
    ids=["submit", "map", "and", "gather", "broadcast", "detached"],
)
def test_every_way_to_make_calls_takes_a_deadline(
    pool: sky.ComputePool, runs: Path, make: Callable[[sky.ComputePool, str], Any]
) -> None:
    """Each raises the same error, and leaves no process of the call."""
    with pytest.raises(sky.CallTimedOut):
        make(pool, str(runs))
    wait_until(lambda: not living(runs), "the processes to end")


def test_a_deadline_that_is_not_reached_changes_nothing(pool: sky.ComputePool) -> None:
    assert pool.map(quick, range(500), timeout=60) == list(range(500))
    futures = [pool.submit(quick(value), timeout=60) for value in range(100)]
    wait(futures)
    assert [future.result() for future in futures] == list(range(100))


def test_a_time_out_of_the_functions_own_is_not_that_of_the_call(pool: sky.ComputePool) -> None:
    @sky.compute
    def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own") as caught:
        fails().timeout(60) >> pool
    assert not isinstance(caught.value, sky.CallTimedOut)
