"""A pool in a coroutine, with a pool that does what the test says: who opens, who undoes, and what becomes of calls."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine.futures import CallFuture
from skyward_core.pool.aio import AsyncPool, Broadcast
from skyward_core.pool.calls import group_results
from tests.waiting import wait_until

LEFT = sky.InstancesLeft("i-1 may still be running", ["i-1"])


class ScriptedPool(AsyncPool):
    """Opens and closes when the test says so, and notes what happens to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_open, self.may_close = threading.Event(), threading.Event()
        self.open_error: BaseException | None = None
        self.close_error: sky.InstancesLeft | None = None
        self.futures: list[CallFuture[Any]] = []
        self.stopped: list[str] = []
        self.names: list[str] = []

    def open(self) -> object:
        self.done.append("open")
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


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


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


# ── opening and closing ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_left", [True, False], ids=["machines are left", "all are gone"])
@pytest.mark.parametrize("is_opened", [True, False], ids=["it opens all the same", "it does not open"])
@in_a_loop
async def test_a_task_that_is_cancelled_while_the_pool_opens_undoes_that(
    pool: ScriptedPool, is_opened: bool, is_left: bool
) -> None:
    """No more is rented; the task ends when all is undone, however often it is cancelled. A note names what is left."""
    pool.close_error = LEFT if is_left else None
    if not is_opened:
        pool.open_error = LEFT if is_left else sky.PoolClosed("terminate_now() was called")
    task = asyncio.create_task(use(pool))
    await until(lambda: pool.done == ["open"])
    task.cancel()
    await until(lambda: pool.done == ["open", "terminate"])
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    pool.may_open.set()
    if is_opened:
        await until(lambda: "hand over" in pool.done)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    pool.may_close.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert ["i-1" in note for note in getattr(caught.value, "__notes__", [])] == [True] * is_left
    assert pool.done == ["open", "terminate"] + ["opened", "hand over", "closed"] * is_opened


@in_a_loop
async def test_a_task_that_is_cancelled_when_the_pool_has_just_opened_closes_it(pool: ScriptedPool) -> None:
    """The thread has handed the pool over, and the task has not gone on. One that is cancelled before opens nothing."""
    pool.may_close.set()
    task = asyncio.create_task(use(pool))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.done == []
    task = asyncio.create_task(use(pool))
    await until(lambda: pool.done == ["open"])
    pool.may_open.set()
    wait_until(lambda: not changing(), "the thread to end")  # the loop does not turn
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.done == ["open", "opened", "hand over", "closed"]


def test_a_loop_that_ends_while_the_pool_opens_leaves_the_undoing_to_the_thread(pool: ScriptedPool) -> None:
    async def begin() -> Coroutine[Any, Any, str]:
        using = use(pool)
        using.send(None)  # it lets the loop turn once
        using.send(None)
        await until(lambda: pool.done == ["open"])
        return using

    asyncio.run(begin()).close()
    assert pool.done == ["open", "terminate"]
    pool.may_open.set()
    pool.may_close.set()
    wait_until(lambda: not changing(), "the thread to end")
    assert pool.done == ["open", "terminate", "opened", "hand over", "closed"]


@in_a_loop
async def test_a_task_that_is_cancelled_in_the_block_waits_for_the_close(pool: ScriptedPool) -> None:
    """A second cancellation does not end the wait; unconfirmed machines are in a note."""
    pool.may_open.set()
    pool.close_error = LEFT
    task = asyncio.create_task(use(pool, asyncio.Event().wait))
    await until(lambda: "block" in pool.done)
    task.cancel()
    await until(lambda: "hand over" in pool.done)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    pool.may_close.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert "i-1" in caught.value.__notes__[0]
    assert pool.done == ["open", "opened", "block", "hand over", "closed"]


@pytest.mark.parametrize("is_left", [True, False], ids=["machines are left", "all are gone"])
@in_a_loop
async def test_a_task_that_is_cancelled_while_the_pool_closes_is_cancelled_after_it(
    pool: ScriptedPool, is_left: bool
) -> None:
    """An error of the close is raised instead: it is about money."""
    pool.may_open.set()
    pool.close_error = LEFT if is_left else None
    task = asyncio.create_task(use(pool))
    await until(lambda: "close" in pool.done)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    pool.may_close.set()
    with pytest.raises(sky.InstancesLeft if is_left else asyncio.CancelledError):
        await task


# ── several pools ────────────────────────────────────────────────────────────────────────────────────────────────────


class ScriptedPools(sky.MultiPool):
    """Two scripted pools, which may close."""

    def __init__(self) -> None:
        self.first, self.second = ScriptedPool(), ScriptedPool()
        super().__init__(self.first, self.second)  # type: ignore[arg-type]
        for each in (self.first, self.second):
            each.may_close.set()

    def let_open(self) -> None:
        self.first.may_open.set()
        self.second.may_open.set()


@in_a_loop
async def test_several_pools_open_and_close_at_the_same_time() -> None:
    pools = ScriptedPools()
    entering = asyncio.ensure_future(pools.__aenter__())
    await until(lambda: pools.first.done == pools.second.done == ["open"])
    pools.let_open()
    assert await entering == (pools.first, pools.second)
    await pools.__aexit__(None, None, None)
    assert pools.first.done == pools.second.done == ["open", "opened", "close", "closed"]
    pools.second.close_error = LEFT
    with pytest.raises(ZeroDivisionError) as caught:
        async with pools:
            _ = 1 / 0
    assert [str(LEFT) in note for note in caught.value.__notes__] == [True]
    assert [pool.done[-1] for pool in (pools.first, pools.second)] == ["closed", "closed"]


@in_a_loop
async def test_if_one_of_several_pools_fails_to_open_the_others_are_closed() -> None:
    pools = ScriptedPools()
    pools.first.open_error = sky.NoCapacity("none")
    pools.let_open()
    with pytest.raises(sky.NoCapacity):
        async with pools:
            raise AssertionError
    assert pools.first.done == ["open"]
    assert pools.second.done == ["open", "opened", "hand over", "closed"]


@in_a_loop
async def test_a_task_that_is_cancelled_while_several_pools_open_closes_all() -> None:
    pools = ScriptedPools()
    entering = asyncio.ensure_future(pools.__aenter__())
    pools.first.may_open.set()
    await until(lambda: pools.first.done[-1:] == ["opened"] and len(asyncio.all_tasks()) == 3)
    entering.cancel()
    await until(lambda: "terminate" in pools.second.done)
    pools.second.may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert [pool.done[-1] for pool in (pools.first, pools.second)] == ["closed", "closed"]


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


async def with_futures(pool: ScriptedPool, call: Coroutine[Any, Any, Any], end: Callable[[], object]) -> Any:
    """Run a coroutine; when it has submitted its calls, end them in another thread."""
    task = asyncio.create_task(call)
    await until(lambda: pool.futures)
    await asyncio.to_thread(end)
    return await task


@in_a_loop
async def test_every_spelling_gives_results(pool: ScriptedPool) -> None:
    def end() -> None:
        for future in reversed(pool.futures):
            future.set_result(int(future.call_id))

    for call, expected in [
        (pool.arun(add(1, 2)), 0),
        (pool.arun(add(1, 2) & add(3, 4)), (0, 1)),
        (add(1, 2) >> pool.aio, 0),
        (sky.gather(add(1, 2), add(1, 2), add(1, 2)) >> pool.aio, (0, 1, 2)),
        (add(1, 2) @ pool.aio, (0, 1)),
        (pool.aio.map(add, [1, 2], [3, 4]), [0, 1]),
    ]:
        pool.futures = []
        assert await with_futures(pool, call, end) == expected
    assert await pool.arun(sky.gather()) == ()


@in_a_loop
async def test_the_first_error_stops_the_others(pool: ScriptedPool) -> None:
    """At once. Results that cannot be loaded here are no such error: the others are waited for, and kept in it."""
    with pytest.raises(ZeroDivisionError):
        call = pool.arun(add(1, 2) & add(3, 4))
        await with_futures(pool, call, lambda: pool.futures[1].set_exception(ZeroDivisionError()))
    assert pool.stopped == ["0"]

    def end() -> None:
        pool.futures[0].set_exception(sky.ResultNotLoaded("no torch", data=b"N."))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # the loop turns until all are there
        pool.futures[1].set_result(7)

    loop, pool.futures = asyncio.get_running_loop(), []
    with pytest.raises(sky.ResultNotLoaded, match="1 of 2 results") as caught:
        await with_futures(pool, pool.arun(add(1, 2) & add(3, 4)), end)
    assert caught.value.load() == (None, 7)


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
@sky.distributed.torch()
def train() -> int:
    return 1


@in_a_loop
async def test_a_group_that_has_lost_a_node_runs_again(pool: ScriptedPool) -> None:
    """As a whole, when all workers are there, as with `@ pool`."""

    def end() -> None:
        first = pool.futures
        first[1].set_exception(sky.NodeLost("node 1"))
        wait_until(lambda: pool.names[-1] == "_be_there" and pool.futures is not first, "the workers to be asked")
        second = pool.futures
        for future in second:
            future.set_result(None)
        wait_until(lambda: pool.names[2:] == ["train"] and pool.futures is not second, "the group to run again")
        for future in pool.futures:
            future.set_result(int(future.call_id))

    assert await with_futures(pool, train() @ pool.aio, end) == (0, 1)
    assert pool.done == ["attempt 2"]


@pytest.mark.parametrize("is_submitted", [True, False], ids=["while it runs", "while it is submitted"])
@in_a_loop
async def test_a_cancelled_task_stops_the_ranks_of_its_group(pool: ScriptedPool, is_submitted: bool) -> None:
    really, may_submit, begun = pool.submit_broadcast, threading.Event(), threading.Event()

    def submit(pending: sky.PendingCompute[Any]) -> list[CallFuture[Any]]:
        begun.set()
        assert may_submit.wait(60)
        futures = really(pending)
        for future in futures:
            future.add_done_callback(lambda future: future.set_running_or_notify_cancel())  # the engine does that
        return futures

    pool.submit_broadcast = submit  # type: ignore[method-assign]
    task = asyncio.create_task(train() @ pool.aio)
    await until(begun.is_set)
    if is_submitted:
        may_submit.set()
        await until(lambda: pool.futures)
    task.cancel()
    await asyncio.sleep(0)
    may_submit.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not changing()
    assert set(pool.stopped) == {"0", "1"}


@in_a_loop
async def test_a_cancelled_task_stops_its_calls(pool: ScriptedPool) -> None:
    """Those that have not ended."""
    task = asyncio.create_task(pool.arun(add(1, 2) & add(3, 4)))
    await until(lambda: pool.futures)
    pool.futures[0].set_result(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.stopped == ["1"]
