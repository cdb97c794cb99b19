"""The types that a type checker finds in the API.

It never runs: pyright in strict mode checks `assert_type` (see test_compute.py and CI).
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable, Generator
from typing import assert_type

import skyward_core as sky
from skyward_core import PendingBatch, PendingCompute


class Model:
    @sky.compute
    def predict(self, x: float) -> str:
        return str(x)


@sky.compute
def train(rows: int, *, rate: float = 0.1) -> float:
    return rows * rate


@sky.compute
def label(score: float) -> str:
    return str(score)


@sky.compute
def pair[T](value: T) -> tuple[T, T]:
    return value, value


@sky.compute
async def fetch(url: str) -> bytes:
    return url.encode()


@sky.compute
def count(n: int) -> Generator[int]:
    yield from range(n)


def calls_keep_their_types(pool: sky.ComputePool) -> None:
    assert_type(train(1, rate=0.5), PendingCompute[float])
    assert_type(train(1) >> pool, float)
    assert_type(train(1) @ pool, tuple[float, ...])
    assert_type(train.local(1), float)
    assert_type(pool.run(train(1)), float)
    assert_type(pool.broadcast(train(1)), tuple[float, ...])


def batches_keep_their_types(pool: sky.ComputePool) -> None:
    assert_type(train(1) & label(0.1), PendingBatch[float, str])
    assert_type((train(1) & label(0.1)) >> pool, tuple[float, str])
    assert_type((train(1) & label(0.1) & train(2)) >> pool, tuple[float, str, float])
    assert_type(sky.gather(train(1), label(0.1)) >> pool, tuple[float, str])
    assert_type(sky.gather(train(1), label(0.1), train(2), label(0.2)) >> pool, tuple[float, str, float, str])
    assert_type(sky.gather(*(train(n) for n in range(9))) >> pool, tuple[float, ...])


def futures_and_maps_keep_their_types(pool: sky.ComputePool) -> None:
    assert_type(pool.submit(train(1)), sky.CallFuture[float])
    assert_type(pool.submit(train(1)).result(), float)
    assert_type(pool.map(train, [1, 2]), list[float])
    plain: Callable[[int, int], str] = lambda a, b: str(a + b)
    assert_type(pool.map(plain, [1], [2]), list[str])


def deadlines_and_executors_keep_types(pool: sky.ComputePool) -> None:
    assert_type(train(1).timeout(30) >> pool, float)
    assert_type((train(1) & label(0.1)).timeout(30) >> pool, tuple[float, str])
    assert_type(pool.submit(train(1), timeout=30), sky.CallFuture[float])
    assert_type(pool.executor().submit(pow, 2, 3), sky.CallFuture[int])
    assert_type(list(pool.executor().map(str, [1])), list[str])


async def coroutines_keep_their_types() -> None:
    async with sky.ComputePool() as pool:
        assert_type(pool, sky.ComputePool)
        assert_type(await pool.arun(train(1)), float)
        assert_type(await pool.arun(train(1) & label(0.1)), tuple[float, str])
        assert_type(await (train(1) >> pool.aio), float)
        assert_type(await (train(1) @ pool.aio), tuple[float, ...])
        assert_type(await ((train(1) & label(0.1)) >> pool.aio), tuple[float, str])
        assert_type(await pool.aio.map(train, [1, 2]), list[float])
    async with sky.MultiPool(sky.ComputePool(), sky.ComputePool()) as pools:
        assert_type(pools, tuple[sky.ComputePool, ...])


def pools_keep_their_types() -> None:
    with sky.ComputePool(accelerator="A100", nodes=2) as pool, sky.MultiPool(pool, pool) as pools:
        assert_type(pool, sky.ComputePool)
        assert_type(pools, tuple[sky.ComputePool, ...])


def editors_know_the_keywords_of_a_pool() -> None:
    sky.ComputePool(
        provider=["aws", sky.Local()],
        accelerator="A100",
        spot=0.8,
        nodes=2,
        volume=sky.S3Volume(mount_path="/data", bucket="abc"),
        work=sky.Work(),
    )
    sky.PoolSpec.of(
        image=sky.Image(pip=["torch"]), accelerator=sky.accelerators.H100(count=4), spot=sky.Spot.Never
    ).with_(max_cost=3, env={"A": "b"})
    sky.ComputePool(acclerator="A100")  # pyright: ignore[reportCallIssue]
    sky.ComputePool(nodes="two")  # pyright: ignore[reportArgumentType]
    sky.Image(pipp=["torch"])  # pyright: ignore[reportCallIssue]
    sky.AWS(regio="us-east-1")  # pyright: ignore[reportCallIssue]


def methods_and_generic_functions(pool: sky.ComputePool, model: Model) -> None:
    assert_type(model.predict(0.5), PendingCompute[str])
    assert_type(model.predict(0.5) >> pool, str)
    assert_type(pair(1) >> pool, tuple[int, int])


def coroutines_and_generators(pool: sky.ComputePool) -> None:
    assert_type(fetch("x") >> pool, bytes)
    assert_type(count(3) >> pool, sky.ItemStream[int])
    assert_type(count(3).timeout(1) >> pool, sky.ItemStream[int])
    assert_type(pool.run(count(3)), list[int])
    assert_type(count(3) @ pool, tuple[list[int], ...])
    assert_type(pool.stream(count(3), ahead=4), sky.ItemStream[int])
    assert_type(sky.scatter([1]), list[int])


def wrong_uses_are_refused(pool: sky.ComputePool) -> None:
    _ = train("1") >> pool  # pyright: ignore[reportArgumentType]
    _ = train() >> pool  # pyright: ignore[reportCallIssue]
    text: str = train(1) >> pool  # pyright: ignore[reportAssignmentType]
    _ = train(1) >> 3  # pyright: ignore[reportOperatorIssue]
    _ = train >> pool  # pyright: ignore[reportOperatorIssue]
    first: int = (label(0.1) & train(1)) >> pool  # pyright: ignore[reportAssignmentType]
    both: tuple[float, str] = (label(0.1) & train(1)) >> pool  # pyright: ignore[reportAssignmentType]
    _ = train(1) & 5  # pyright: ignore[reportOperatorIssue]
    everywhere: list[float] = train(1) @ pool  # pyright: ignore[reportAssignmentType]
    words: str = pool.submit(train(1)).result()  # pyright: ignore[reportAssignmentType]
    assert_type(pool.map(train, [1]), list[str])  # pyright: ignore[reportAssertTypeFailure]
    print(text, first, both, everywhere, words)
