"""A pool in a coroutine, with a pool that does what the test says: who opens, who undoes, and what becomes of calls."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine.futures import CallFuture
from skyward_core.pool.aio import AsyncPool, Broadcast
from skyward_core.pool.groups import group_results
from tests.conftest import wait_until

CONTEXT = contextvars.ContextVar("CONTEXT", default="unset")


class ScriptedPool(AsyncPool):
    """Opens and closes when the test says so, and notes what happens to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_open, self.may_close = threading.Event(), threading.Event()
        self.open_error: BaseException | None = None
        self.close_error: sky.InstancesLeft | None = None
        self.context = ""
        self.futures: list[CallFuture[Any]] = []
        self.stopped: list[str] = []
        self.names: list[str] = []

    def open(self) -> object:
        self.done.append("open")
        self.context = CONTEXT.get()
        assert self.may_open.wait(60)
        if self.open_error is not None:
            raise self.open_error
        self.done.append("opened")
        return self

    def close(self) -> None:
        self.done.append("close")
        assert self.may_close.wait(60)
        if self.close_error is not None:
            raise self.close_error
        self.done.append("closed")

    def hand_over(self) -> sky.InstancesLeft | None:
        self.done.append("hand over")
        assert self.may_close.wait(60)
        self.done.append("closed")
        return self.close_error

    def terminate_now(self) -> None:
        self.done.append("terminate")

    def submit_all(self, calls: Iterable[sky.PendingCompute[Any]]) -> list[CallFuture[Any]]:
        self.futures = [CallFuture[Any](str(number), self.stopped.append) for number, _ in enumerate(calls)]
        return self.futures

    def submit_broadcast(self, pending: sky.PendingCompute[Any]) -> list[CallFuture[Any]]:
        self.names.append(pending.fn.__name__)
        return self.submit_all([pending, pending])

    def broadcast[R](self, pending: sky.PendingCompute[R], *, submit: Broadcast | None = None) -> tuple[R, ...]:
        assert submit is not None
        return group_results(submit, pending, 1, lambda _, attempt, loss: self.done.append(f"attempt {attempt}"))


@pytest.fixture
def pool() -> Iterator[ScriptedPool]:
    pool = ScriptedPool()
    yield pool
    pool.may_open.set()
    pool.may_close.set()
    wait_until(lambda: not changing(), "the threads of the pool to end")


def changing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "skyward-async"]


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something has happened in another thread."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it waits for a thread
            await asyncio.sleep(0.001)


async def use(pool: ScriptedPool, body: Callable[[], Coroutine[Any, Any, object]] | None = None) -> str:
    async with pool as same:
        assert same is pool
        pool.done.append("block")
        if body is not None:
            await body()
    return "used"


def test_a_task_that_is_cancelled_before_opens_nothing(pool: ScriptedPool) -> None:
    """Also if the cancellation comes in the step that would open the pool."""

    async def cancelled_already() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await use(pool)

    async def program() -> None:
        task = asyncio.create_task(cancelled_already())
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(program())
    assert pool.done == []


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


def test_results_that_cannot_be_loaded_do_not_end_the_wait(pool: ScriptedPool) -> None:
    """All results are kept in the error, as with `>> pool`. The loop turns until they are there."""

    async def program() -> None:
        task = asyncio.create_task(pool.arun(add(1, 2) & add(3, 4)))
        await until(lambda: pool.futures)
        pool.futures[0].set_exception(sky.ResultNotLoaded("no torch", data=b"N."))
        asyncio.get_running_loop().call_later(0.01, pool.futures[1].set_result, 7)
        with pytest.raises(sky.ResultNotLoaded, match="1 of 2 results") as caught:
            await task
        assert caught.value.load() == (None, 7)

    asyncio.run(program())


def test_a_cancelled_task_stops_its_calls(pool: ScriptedPool) -> None:
    """Those that have not ended."""

    async def program() -> None:
        task = asyncio.create_task(pool.arun(add(1, 2) & add(3, 4)))
        await until(lambda: pool.futures)
        pool.futures[0].set_result(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(program())
    assert pool.stopped == ["1"]


def test_a_call_that_ends_after_its_loop_disturbs_no_other(
    pool: ScriptedPool, caplog: pytest.LogCaptureFixture
) -> None:
    """The callback finds the loop closed."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(pool.arun(add(1, 2)))
    loop.run_until_complete(asyncio.wait_for(until_submitted(pool), 60))
    (future,) = pool.futures
    future.claim()
    with contextlib.suppress(asyncio.CancelledError):
        task.cancel()
        loop.run_until_complete(task)
    loop.close()
    future.set_result(3)
    assert not caplog.records


async def until_submitted(pool: ScriptedPool) -> None:
    await until(lambda: pool.futures)
