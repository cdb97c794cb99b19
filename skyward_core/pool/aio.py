"""A pool in an asyncio program: `pool.aio` and `pool.arun` make its calls, `async with` opens and closes it.

A coroutine waits for the futures of the engine, and no thread is started for a call. The exception is a broadcast whose
workers form a group, because it may run again as a whole (`calls.py`). Opening and closing each have a thread, which
is not a daemon: the interpreter waits for its end. States of `async with`:

    new ──▶ opening ──▶ open ──▶ closing ──▶ closed
     │         │         │          └──cancelled──▶ the task waits for the end of closing, and is cancelled then
     │         │         └──cancelled in the block──▶ closing, as after any other exception of the block
     │         └──cancelled──▶ abandoned: nothing more is rented; the thread undoes all, and the task waits for that
     └──cancelled──▶ closed: nothing was begun

Who undoes: while the pool is opening, the thread does, because it alone learns whether there is something to undo. Once
it has handed the pool over to the task, the task does. `_Opening` decides which of them it is, under a lock. If the
event loop ends without waiting for the task, the threads finish their work. If the process is killed, the pool's reaper
ends the machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, cast, overload

from skyward_core.compute import ComputeFunction, PendingBatch, PendingCompute
from skyward_core.concurrency.threads import Threads
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import InstancesLeft, ResultNotLoaded
from skyward_core.pool.calls import checked, mapped_calls, results_of
from skyward_core.pool.current_session import note_machines_left

type Broadcast = Callable[[PendingCompute[Any]], list[CallFuture[Any]]]
"""Submits a call on all workers, as `ComputePool.submit_broadcast` does."""


class Pool(Protocol):
    """What a pool must have for this: methods of `ComputePool`."""

    def open(self) -> object: ...
    def close(self) -> None: ...
    def hand_over(self) -> InstancesLeft | None: ...
    def terminate_now(self) -> None: ...
    def submit_all(self, calls: Iterable[PendingCompute[Any]]) -> list[CallFuture[Any]]: ...
    def submit_broadcast(self, pending: PendingCompute[Any]) -> list[CallFuture[Any]]: ...
    def broadcast[R](self, pending: PendingCompute[R], *, submit: Broadcast | None = None) -> tuple[R, ...]: ...


class AsyncPool:
    """The part of `ComputePool` for asyncio programs."""

    async def __aenter__(self) -> Self:
        """Open the pool in a thread, as `open` does.

        If the task is cancelled meanwhile, no more is rented, and what was is ended before the task goes on.
        """
        await _open(cast(Pool, self))
        return self

    async def __aexit__(
        self: Pool, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool in a thread, as `with` does. A task that is cancelled meanwhile waits for the end all the
        same.
        """
        await _close(self, error)

    @property
    def aio(self: Pool) -> AsyncCalls:
        """The right operand of `>>` and `@` in a coroutine: `await (fn(x) >> pool.aio)`.

        `await` binds stronger than `>>`, so it needs the parentheses; `await pool.arun(fn(x))` does not.
        """
        return AsyncCalls(self)

    @overload
    async def arun[R](self: Pool, pending: PendingCompute[R]) -> R: ...
    @overload
    async def arun[*Rs](self: Pool, pending: PendingBatch[*Rs]) -> tuple[*Rs]: ...
    async def arun(self: Pool, pending: PendingCompute[Any] | PendingBatch[*tuple[Any, ...]]) -> Any:
        """Run a call, or a batch of them, and return its result: `await pool.arun(fn(x))`.

        It is `pending >> pool.aio`. If the task is cancelled, the call is stopped on its node.
        """
        if isinstance(pending, PendingBatch):
            return await AsyncCalls(self).run_batch(pending)
        return await AsyncCalls(self).run(pending)


class AsyncCalls:
    """Makes the calls of a pool in a coroutine: the right operand of `>>` and `@` there, as `pool.aio`.

    `>>`, `@` and the methods return coroutines: nothing runs before they are awaited, or are tasks. If the task is
    cancelled, its calls are stopped on their nodes. Function and arguments are pickled in the thread of the event loop,
    when the coroutine begins: what other tasks change later does not count.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def run[R](self, pending: PendingCompute[R]) -> R:
        """Run one call on the first free worker and return its result, or raise its exception."""
        return cast("R", (await _results(self._pool.submit_all([pending]), list))[0])

    async def run_batch(self, batch: PendingBatch[*tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run the calls in parallel; return their results in order.

        On the first error the others are cancelled and it is raised.
        """
        return cast("tuple[Any, ...]", await _results(self._pool.submit_all(batch.calls), tuple))

    async def broadcast[R](self, pending: PendingCompute[R]) -> tuple[R, ...]:
        """Run the call on all workers at once; return the results in the order of nodes and workers.

        If the workers form a group (`sky.distributed`) and a node is lost, the call runs again on all of them.
        """
        if checked(pending).forms_group:
            return cast("tuple[R, ...]", await _group_results(self._pool, pending))
        return cast("tuple[R, ...]", await _results(self._pool.submit_broadcast(pending), tuple))

    async def map[R](
        self,
        fn: Callable[..., R] | ComputeFunction[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,  # noqa: ASYNC109 - of each call on its node
    ) -> list[R]:
        """Run `fn(a, b, ...)` for the items of the iterables taken together; return the results in order.

        It takes and raises what `ComputePool.map` does: `timeout` is the deadline of each call on its node.
        """
        return cast("list[R]", await _results(self._pool.submit_all(mapped_calls(fn, iterables, timeout)), list))


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _results(futures: Sequence[Future[Any]], kind: type[list[Any] | tuple[Any, ...]]) -> Any:
    """Wait for all calls, or the first error; return what `results_of` does. If this is cancelled, so are the calls."""
    try:
        if futures:
            await _ended(futures)
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return results_of(futures, kind)


async def _ended(futures: Sequence[Future[Any]]) -> None:
    """Return when all calls have ended, or one has failed such that `results_of` raises without waiting.

    The event loop is woken once, however many calls there are.
    """
    loop = asyncio.get_running_loop()
    woken = loop.create_future()
    count = itertools.count(1)  # `next` is atomic: callbacks come in several threads

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def note(future: Future[Any]) -> None:
        if next(count) == len(futures) or _is_failed(future):
            with contextlib.suppress(RuntimeError):  # the loop was closed: no task waits
                loop.call_soon_threadsafe(wake)

    for future in futures:
        future.add_done_callback(note)
    await woken


def _is_failed(future: Future[Any]) -> bool:
    return not future.cancelled() and not isinstance(future.exception(), ResultNotLoaded | None)


async def _group_results(pool: Pool, pending: PendingCompute[Any]) -> object:
    """Broadcast to a group, in a thread. A cancelled task stops all ranks, and waits until the thread has ended."""
    ranks = _Ranks(pool.submit_broadcast)
    thread = _Thread(lambda: pool.broadcast(pending, submit=ranks.submit))
    try:
        await asyncio.shield(thread.ended)
    except BaseException as error:
        ranks.stop()
        if isinstance(error, asyncio.CancelledError):  # else the loop ends, and nothing can be awaited any more
            await _end_of(thread)
        raise
    return thread.result()


class _Ranks:
    """The calls of a group that run now. After `stop` none goes on, and none begins."""

    def __init__(self, submit: Broadcast) -> None:
        self._submit = submit
        self._changing = threading.Lock()
        self._futures: list[CallFuture[Any]] = []
        self._is_stopped = False

    def submit(self, call: PendingCompute[Any]) -> list[CallFuture[Any]]:
        futures = self._submit(call)
        with self._changing:
            self._futures, is_stopped = futures, self._is_stopped
        if is_stopped:
            self._cancel()
        return futures

    def stop(self) -> None:
        with self._changing:
            self._is_stopped = True
        self._cancel()

    def _cancel(self) -> None:
        for future in self._futures:
            future.cancel()


# ── opening and closing ──────────────────────────────────────────────────────────────────────────────────────────────


async def _open(pool: Pool) -> None:
    """Open a pool. If the task is cancelled, everything is undone first; a note of the exception names what is left."""
    await asyncio.sleep(0)  # a task that is cancelled already ends here, before anything is rented
    opening = _Opening(pool)
    try:
        await asyncio.shield(opening.thread.ended)
    except BaseException as error:
        undoing = opening.abandon()
        if isinstance(error, asyncio.CancelledError):  # else the loop ends, and nothing can be awaited any more
            await _end_of(undoing)
            _note(error, undoing)
        raise
    opening.thread.result()


async def _close(pool: Pool, error: BaseException | None) -> None:
    """Close a pool after its block, which has ended with this exception.

    Raises what `ComputePool.close` raises. After an error of the block it raises nothing: a note of that error names
    unconfirmed machines.
    """
    closing = _Thread(pool.close if error is None else pool.hand_over)
    cancelled = await _end_of(closing)
    if error is not None:
        _note(error, closing)
        return
    closing.result()
    if cancelled is not None:
        raise cancelled


async def _end_of(thread: _Thread) -> asyncio.CancelledError | None:
    """Wait for the end of a thread, however often the task is cancelled; return the last cancellation."""
    cancelled = None
    while not thread.ended.done():
        try:
            await asyncio.shield(thread.ended)
        except asyncio.CancelledError as error:
            cancelled = error
    thread.join()
    return cancelled


def _note(error: BaseException, thread: _Thread) -> None:
    """Name what a thread has left, or its own error, in a note of another exception."""
    try:
        left = thread.result()
    except Exception as failure:
        error.add_note(f"besides, the pool was not closed: {type(failure).__name__}: {failure}")
        return
    if isinstance(left, InstancesLeft):
        note_machines_left(error, left)


class _Thread:
    """Does something in a separate thread, which begins at once. `ended` is a future of the event loop."""

    def __init__(self, work: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._work = work
        self._outcome: Future[object] = Future()
        context = contextvars.copy_context()  # `use_callback` counts in the thread too
        self._threads = Threads(is_daemon=False)
        self._threads.run("skyward-async", partial(context.run, self._run))

    def result(self) -> object:
        """Return what the work has returned, or raise its exception. To be called after its end."""
        self.join()
        return self._outcome.result(0)

    def join(self) -> None:
        """Wait until the thread is gone: after `ended` that takes some microseconds."""
        self._threads.join()

    def _run(self) -> None:
        try:
            self._outcome.set_result(self._work())
        except BaseException as error:
            self._outcome.set_exception(error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop was closed: no task waits
                self.loop.call_soon_threadsafe(self.ended.set_result, None)


class _Opening:
    """Opens a pool in a thread, and decides whether that thread or the task undoes it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._changing = threading.Lock()
        self._is_abandoned = self._is_handed_over = False
        self.thread = _Thread(self._run)

    def abandon(self) -> _Thread:
        """Have the pool closed; return the thread that does it, and returns what is left."""
        with self._changing:
            self._is_abandoned = True
            is_handed_over = self._is_handed_over
        if is_handed_over:
            return _Thread(self._pool.hand_over, self.thread.loop)
        self._pool.terminate_now()
        return self.thread

    def _run(self) -> InstancesLeft | None:
        try:
            self._pool.open()
        except BaseException as error:
            if self._hand_over():
                raise
            return error if isinstance(error, InstancesLeft) else None
        return None if self._hand_over() else self._pool.hand_over()

    def _hand_over(self) -> bool:
        with self._changing:
            self._is_handed_over = not self._is_abandoned
            return self._is_handed_over
