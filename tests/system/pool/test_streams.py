"""Generators that stream, on a real pool: `for item in fn() >> pool`, `async for`, and how they end."""

import asyncio
import collections
import os
import signal
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from skyward_core.wire.settings import memory_directory
from tests.waiting import wait_until


@sky.compute
def count(n: int, log: str = os.devnull) -> Generator[int]:
    """Note the process, each item before it is yielded, and the end of the generator."""
    with Path(log).open("a", buffering=1) as file:
        try:
            for number in range(n):
                file.write(f"{os.getpid()} {number}\n")
                yield number
        finally:
            file.write("closed\n")


@sky.compute
async def ticks(n: int) -> AsyncGenerator[int]:
    for number in range(n):
        await asyncio.sleep(0)
        yield number


@sky.compute
def arrays(n: int) -> Generator[Any]:
    for number in range(n):
        yield np.full(20_000, number)


@sky.compute
def breaks(n: int, how: str) -> Generator[int]:
    yield from range(n)
    print("about to go")
    if how == "raise":
        raise LookupError("no more")
    os.kill(os.getpid(), signal.SIGKILL)


@sky.compute
def plain(x: int) -> int:
    return x


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_items_come_while_the_generator_runs(pool: sky.ComputePool, log: Path) -> None:
    taken = list[int]()
    for number in count(10**9, str(log)) >> pool:
        taken.append(number)
        if number == 40:
            break
    assert taken == list(range(41))
    wait_until(lambda: log.read_text().endswith("closed\n"), "the generator to be closed")
    assert len(log.read_text().splitlines()) - 1 <= 41 + 16
    assert pool.map(plain, range(4)) == [0, 1, 2, 3]


def test_the_number_of_items_ahead(pool: sky.ComputePool, log: Path) -> None:
    with pool.stream(count(10**9, str(log)), ahead=1) as items:
        for number in range(5):
            assert next(items) == number
            assert len(log.read_text().splitlines()) <= number + 2
    with pytest.raises(sky.BadRequest, match="at least 1"):
        pool.stream(count(3), ahead=0)


def test_a_list_of_all_items(pool: sky.ComputePool) -> None:
    assert list(count(100) >> pool) == list(range(100))
    assert list(ticks(20) >> pool) == list(range(20))
    assert list(pool.stream(sky.compute(lambda: "abc")())) == ["a", "b", "c"]
    assert pool.submit(ticks(3)).result() == [0, 1, 2]
    assert list(count(0) >> pool) == []


def test_large_items(pool: sky.ComputePool) -> None:
    """They travel through memory, writable, and leave none of it behind."""
    folders = [Path(memory_directory(node.instance.id)) for node in pool.lease.nodes]
    files = lambda: sum(len(list(folder.iterdir())) for folder in folders if folder.exists())
    before = files()
    for number, array in enumerate(arrays(30) >> pool):
        array += 1
        assert array.sum() == 20_000 * (number + 1)
        if number == 20:
            break
    wait_until(lambda: files() <= before, "the items to be removed")


@pytest.mark.parametrize(("how", "error"), [("raise", LookupError), ("die", sky.CallCrashed)])
def test_the_error_comes_after_the_items_before_it(pool: sky.ComputePool, how: str, error: type[Exception]) -> None:
    taken = list[int]()
    with pytest.raises(error) as caught:
        taken.extend(item for item in breaks(20, how) >> pool if taken.append(item))
    assert taken == list(range(20))
    if isinstance(caught.value, sky.CallCrashed):
        assert caught.value.output == ("about to go",)


def test_a_deadline_of_a_stream_comes_after_the_items_before_it(pool: sky.ComputePool, log: Path) -> None:
    items = count(10**9, str(log)).timeout(1) >> pool
    assert next(items) == 0
    with pytest.raises(sky.CallTimedOut):
        collections.deque(items, maxlen=0)


def test_asynchronous_consumers(pool: sky.ComputePool, log: Path) -> None:
    async def total(n: int) -> int:
        return sum([item async for item in count(n) >> pool])

    async def consume_endless(has_begun: asyncio.Event) -> None:
        async for _ in count(10**9, str(log)) >> pool:
            has_begun.set()
            await asyncio.sleep(0)

    async def main() -> int:
        has_begun = asyncio.Event()
        endless = asyncio.create_task(consume_endless(has_begun))
        found = await total(30)
        await has_begun.wait()
        endless.cancel()
        await asyncio.wait([endless])
        return found

    assert asyncio.run(main()) == 435
    wait_until(lambda: log.read_text().endswith("closed\n"), "the generator to be closed")


def test_a_stream_of_a_pool_that_closes_gives_what_has_come() -> None:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        items = count(10**9) >> pool
        assert next(items) == 0
    with pytest.raises(sky.PoolClosed):
        list(items)
