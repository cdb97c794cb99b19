"""The executor of a pool where it differs from CPython's executors; tests/nightly/pool/test_executor_cpython.py has the rest."""

import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed, wait
from pathlib import Path

import pytest

import skyward_core as sky
from tests.waiting import wait_until


def square(x: int) -> int:
    return x * x


def count(n: int) -> Iterator[int]:
    yield from range(n)


def note_and_wait(begun: str, end: str) -> str:
    Path(begun).touch()
    while not Path(end).exists():
        time.sleep(0.01)
    return begun


def test_chunks_errors_and_crashes(pool: sky.ComputePool) -> None:
    """Generators are lists. A process that dies takes one call; CPython's executor would be broken."""
    with pool.executor() as executor:
        assert list(executor.map(square, range(20), chunksize=7)) == [x * x for x in range(20)]
        assert list(executor.map(count, range(3), chunksize=2)) == [[], [0], [0, 1]]
        with pytest.raises(ZeroDivisionError) as caught:
            executor.submit(lambda: 1 / 0).result()
        assert caught.value.__cause__ is not None
        assert "1 / 0" in "".join(traceback.format_exception(caught.value))
        dies, lives = executor.submit(os._exit, 3), executor.submit(square, 3)
        with pytest.raises(sky.CallCrashed):
            dies.result()
        assert lives.result() == 9
        executor.submit(int).cancel()  # it does not hold up the shutdown: CPython's test_hang_gh94440


def test_calls_that_run_and_calls_that_wait_are_cancelled(pool: sky.ComputePool, tmp_path: Path) -> None:
    begun = [tmp_path / str(i) for i in range(6)]
    with pool.executor() as executor:
        futures = [executor.submit(note_and_wait, str(path), str(tmp_path / "never")) for path in begun]
        wait_until(lambda: sum(path.exists() for path in begun) == 2, "both slots to be busy")
        assert all(future.cancel() for future in futures)
        assert len(list(as_completed(futures))) == 6
        with pytest.raises(CancelledError):
            futures[0].result()
        assert executor.submit(square, 5).result() == 25
    assert sum(path.exists() for path in begun) < 6


def test_a_shutdown_that_cancels_lets_running_calls_end(pool: sky.ComputePool, tmp_path: Path) -> None:
    executor, end = pool.executor(), tmp_path / "end"
    begun = [tmp_path / str(i) for i in range(8)]
    futures = [executor.submit(note_and_wait, str(path), str(end)) for path in begun]
    wait_until(lambda: sum(path.exists() for path in begun) == 2, "both slots to be busy")
    executor.shutdown(wait=False, cancel_futures=True)
    ran = [future for future in futures if not future.cancelled()]
    assert 2 <= len(ran) < 8
    end.touch()
    assert wait(ran).not_done == set()
    assert {Path(future.result()) for future in ran} >= {path for path in begun if path.exists()}
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(square, 1)
    assert pool.map(square, [3]) == [9]
