"""The executor of a pool, where CPython's tests say nothing, and where it differs from CPython's executors."""

import gc
import os
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, as_completed, wait
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.pool.executor import PoolExecutor
from tests.conftest import wait_until
from tests.unit.pool.test_executor import (  # noqa: F401 - fixtures
    Recorded,
    engine,
    executor,
    square,
)


def note_and_wait(begun: str, end: str) -> str:
    Path(begun).touch()
    while not Path(end).exists():
        time.sleep(0.01)
    return begun


def test_a_forgotten_executor_is_collected(engine: Recorded) -> None:
    """Its futures do not hold it, and it has no thread."""
    threads = threading.enumerate()
    executor = PoolExecutor(engine.submit_all, engine.cancel_waiting)
    future = executor.submit(square, 1)
    known = weakref.ref(executor)
    del executor
    gc.collect()
    assert known() is None
    assert not future.done()
    assert threading.enumerate() == threads


# ── on a pool ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def on_pool(pool: sky.ComputePool) -> Iterator[Executor]:
    with pool.executor() as executor:
        yield executor


def test_chunks_run_on_a_pool(on_pool: Executor) -> None:
    """Generators are lists there too."""

    def count(n: int) -> Iterator[int]:
        yield from range(n)

    assert list(on_pool.map(square, range(20), chunksize=7)) == [x * x for x in range(20)]
    assert list(on_pool.map(count, range(3), chunksize=2)) == [[], [0], [0, 1]]


def test_an_error_has_its_class_and_its_remote_traceback(on_pool: Executor) -> None:
    """CPython's test_traceback: the cause shows the line that has failed."""
    future = on_pool.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        future.result()
    assert caught.value.__cause__ is not None
    assert "1 / 0" in "".join(traceback.format_exception(caught.value))


def test_a_process_that_dies_takes_one_call(on_pool: Executor) -> None:
    """CPython's executor would be broken."""
    dies, lives = on_pool.submit(os._exit, 3), on_pool.submit(square, 3)
    with pytest.raises(sky.CallCrashed):
        dies.result()
    assert lives.result() == 9
    assert on_pool.submit(square, 4).result() == 16


def test_calls_that_run_and_calls_that_wait_are_cancelled(on_pool: Executor, tmp_path: Path) -> None:
    """By their futures; other calls go on."""
    begun = [tmp_path / str(i) for i in range(6)]
    futures = [on_pool.submit(note_and_wait, str(path), str(tmp_path / "never")) for path in begun]
    wait_until(lambda: sum(path.exists() for path in begun) == 2, "both slots to be busy")
    assert all(future.cancel() for future in futures)
    assert len(list(as_completed(futures))) == 6
    with pytest.raises(CancelledError):
        futures[0].result()
    assert on_pool.submit(square, 5).result() == 25
    assert sum(path.exists() for path in begun) < 6


def test_a_shutdown_that_cancels_lets_running_calls_end(pool: sky.ComputePool, tmp_path: Path) -> None:
    """What waits here is cancelled, what runs gives its result, the pool stays open."""
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


def test_a_call_that_is_cancelled_at_once_does_not_hold_up_the_shutdown(pool: sky.ComputePool) -> None:
    """CPython's test_hang_gh94440."""
    with pool.executor() as executor:
        executor.submit(int).cancel()


def test_an_executor_of_a_closed_pool_says_so() -> None:
    """The pool's own error."""
    executor = sky.ComputePool(provider=sky.Local()).executor()
    with pytest.raises(sky.PoolClosed):
        executor.submit(square, 1)
