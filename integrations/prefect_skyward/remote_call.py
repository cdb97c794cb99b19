"""One task run: Prefect's engine in a thread of this process, and the call on the pool that takes the place of the
task's function in it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast
from uuid import UUID

from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.logging.loggers import task_run_logger
from prefect.states import Cancelled
from prefect.task_engine import run_task_async, run_task_sync
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.node_objects import raise_if_prefect_s_api_was_used

if TYPE_CHECKING:
    from prefect.client.schemas.objects import RunInput, State, TaskRun

SLICE_SECONDS = 0.25
"""How long a thread waits at a stretch: Prefect's timeouts interrupt it only between two waits."""


class Caller(Protocol):
    """What makes the calls of one flow run: `LiveRunner`."""

    is_stopping: bool

    def opening(self) -> Future[sky.ComputePool]: ...
    def call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pool: sky.ComputePool
    ) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class TaskRunOnPool:
    """One run of Prefect's task engine, in a separate thread."""

    task: Task[Any, Any]
    task_run_id: UUID
    parameters: dict[str, Any]
    wait_for: Iterable[PrefectFuture[Any]] | None
    dependencies: dict[str, set[RunInput]] | None

    def after(self, opening: Future[sky.ComputePool]) -> Any:
        """Wait until the pool is open, or has failed to open, and run the engine; return the task run's state."""
        opening.exception()
        words: dict[str, Any] = {
            "task": self.task,
            "task_run_id": self.task_run_id,
            "parameters": self.parameters,
            "wait_for": self.wait_for,
            "return_type": "state",
            "dependencies": self.dependencies,
        }
        return asyncio.run(run_task_async(**words)) if self.task.isasync else run_task_sync(**words)


class RemoteCall:
    """Takes the place of a task's function in the engine, which reads its signature, name and code (for cache keys)
    from it.
    """

    def __init__(self, live: Caller, task: Task[Any, Any], opening: Future[sky.ComputePool]) -> None:
        functools.update_wrapper(cast(Any, self), task.fn)
        self._live = live
        self._opening: Future[sky.ComputePool] | None = opening
        self._fn = task.fn.local if isinstance(task.fn, sky.ComputeFunction) else task.fn
        self._slice_seconds = SLICE_SECONDS if task.timeout_seconds is not None else None
        if code := getattr(task.fn, "__code__", None):
            self.__code__ = code

    def _next_opening(self) -> Future[sky.ComputePool]:
        """The first attempt fails with the opening that it has waited for; each later one opens a pool again."""
        opening, self._opening = self._opening, None
        return opening if opening is not None else self._live.opening()


class SyncCall(RemoteCall):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._live.is_stopping:
            return _cancelled()
        try:
            pool = self._wait(self._next_opening())
            return self._wait(self._live.call(self._fn, args, kwargs, pool))
        except (CancelledError, sky.PoolClosed):
            if self._live.is_stopping:
                return _cancelled()
            raise
        except Exception as error:
            raise_if_prefect_s_api_was_used(error)
            raise

    def _wait[T](self, future: Future[T]) -> T:
        # A timeout is an exception thrown into this thread at any point. A SimpleQueue is written in C and has no lock
        # that could stay locked.
        ended = queue.SimpleQueue[Future[T]]()
        try:
            future.add_done_callback(ended.put)
            while True:
                try:
                    ended.get(timeout=self._slice_seconds)
                    return future.result()
                except queue.Empty:
                    continue
        except BaseException:
            future.cancel()
            raise


class AsyncCall(RemoteCall):
    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._live.is_stopping:
            return _cancelled()
        try:
            pool = await asyncio.wrap_future(self._next_opening())
            return await asyncio.wrap_future(self._live.call(self._fn, args, kwargs, pool))
        except (asyncio.CancelledError, sky.PoolClosed):
            if self._live.is_stopping:
                return _cancelled()
            raise
        except Exception as error:
            raise_if_prefect_s_api_was_used(error)
            raise


def unless_the_work_is_done(condition: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a task's retry condition for all failures but one: if the work has succeeded and its result cannot be
    loaded here, it is not done again.
    """

    def may_be_tried_again(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> Any:
        if isinstance(state.data, sky.ResultNotLoaded):
            task_run_logger(task_run, task).error(
                "%s. The task is not tried again: that would do its work a second time", state.data
            )
            return False
        return condition is None or condition(task, task_run, state)

    async def may_be_tried_again_async(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> Any:
        return await answer if inspect.isawaitable(answer := may_be_tried_again(task, task_run, state)) else answer

    return may_be_tried_again_async if inspect.iscoroutinefunction(condition) else may_be_tried_again


def work_of_task(work: sky.Work) -> sky.Work:
    """The work of this thread's task run, or of the flow run if there is none."""
    context = TaskRunContext.get()
    if context is None:
        return work
    return replace(
        work, task=context.task.name, task_run=str(context.task_run.id), attempt=str(context.task_run.run_count)
    )


def _cancelled() -> State[Any]:
    return Cancelled(message="the flow run ended before this call did")
