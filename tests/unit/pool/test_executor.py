"""The executor of a pool, where CPython's tests say nothing, and where it differs from CPython's executors."""

import pytest

import skyward_core as sky
from skyward_core.engine.futures import CallFuture
from skyward_core.pool.calls import PoolExecutor


def square(x: int) -> int:
    return x * x


class Recorded:
    """Stands for the pool: keeps the calls that are submitted."""

    def __init__(self) -> None:
        self.calls: list[sky.PendingCompute[object]] = []
        self.futures: list[CallFuture[object]] = []
        self.stopped: list[str] = []

    def submit_all(self, calls: object) -> list[CallFuture[object]]:
        new = [*calls]  # type: ignore[call-overload]
        futures = [CallFuture[object](str(len(self.calls) + i), self.stopped.append) for i in range(len(new))]
        self.calls += new
        self.futures += futures
        return futures

    def cancel_waiting(self, futures: object) -> None:
        for future in futures:  # type: ignore[attr-defined]
            future.cancel()


@pytest.fixture
def engine() -> Recorded:
    return Recorded()


@pytest.fixture
def executor(engine: Recorded) -> PoolExecutor:
    return PoolExecutor(engine.submit_all, engine.cancel_waiting)


def test_map_makes_a_call_for_each_chunk_as_far_as_the_shortest(engine: Recorded, executor: PoolExecutor) -> None:
    results = executor.map(square, range(7), chunksize=3)
    assert len(engine.calls) == 3
    for call, future in zip(engine.calls, engine.futures, strict=True):
        future.set_result(call.fn(*call.args))
    assert list(results) == [0, 1, 4, 9, 16, 25, 36]
    executor.map(pow, [1, 2, 3], [4, 5])
    assert [call.args for call in engine.calls[3:]] == [(1, 4), (2, 5)]
    for chunksize in (0, -1):
        with pytest.raises(ValueError, match="chunksize must be >= 1"):
            executor.map(square, [1], chunksize=chunksize)


@pytest.mark.parametrize("chunksize", [1, 2])
def test_an_iterator_that_is_closed_stops_what_is_left(
    engine: Recorded, executor: PoolExecutor, chunksize: int
) -> None:
    results = executor.map(square, range(6), chunksize=chunksize)
    engine.futures[0].set_result(0 if chunksize == 1 else [0, 1])
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert [future.cancelled() for future in engine.futures] == [False] + [True] * (len(engine.futures) - 1)


def test_a_result_that_is_late_stops_all(engine: Recorded, executor: PoolExecutor) -> None:
    results = executor.map(square, range(3), timeout=0)
    with pytest.raises(TimeoutError):
        next(results)
    assert all(future.cancelled() for future in engine.futures)


def test_decorated_functions_are_taken_and_calls_are_not(engine: Recorded, executor: PoolExecutor) -> None:
    executor.submit(sky.compute(square), 3)
    assert engine.calls[0].fn is square
    with pytest.raises(TypeError, match=r"pool\.submit"):
        executor.submit(sky.compute(square)(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no function"):
        executor.submit(3)  # type: ignore[arg-type]


def test_a_call_that_is_submitted_while_the_executor_is_shut_down_is_not_lost(engine: Recorded) -> None:
    """`shutdown` does not know of it and does not wait for it: it is cancelled, and `submit` raises."""

    def submit_all(calls: object) -> list[CallFuture[object]]:
        executor.shutdown()
        return engine.submit_all(calls)

    executor = PoolExecutor(submit_all, engine.cancel_waiting)
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(square, 1)
    assert engine.futures[0].cancelled()
