"""One task run: Prefect's engine in a thread of this process, and the call on the pool that takes the place of the
task's function in it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.logging.loggers import task_run_logger
from prefect.states import Cancelled, Completed, Crashed
from prefect.task_engine import run_task_async, run_task_sync
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.node_objects import raise_if_prefect_s_api_was_used
from prefect_skyward.run_calls import RunCalls, Step
from prefect_skyward.waiting_state import waiting_for_machines

if TYPE_CHECKING:
    from prefect.client.schemas.objects import RunInput, State, TaskRun

SLICE_SECONDS = 0.25
"""How long a thread waits at a stretch for which Prefect has a timeout: it interrupts the thread only between two
waits.
"""

IS_GUARDED = "__skyward_is_guarded__"


@dataclass(frozen=True, slots=True)
class TaskRunOnPool:
    """One run of Prefect's task engine, in a separate thread."""

    task: Task[Any, Any]
    task_run_id: UUID
    parameters: dict[str, Any]
    wait_for: Iterable[PrefectFuture[Any]] | None
    dependencies: dict[str, set[RunInput]] | None

    def __call__(self) -> Any:
        """Run the engine; return the task run's state.

        It waits for inputs and for slots of concurrency limits, and looks for a cached result. Only then it calls the
        function, and a pool is opened: a run that is cached, waits or fails before costs nothing.
        """
        words: dict[str, Any] = {
            "task": self.task,
            "task_run_id": self.task_run_id,
            "parameters": self.parameters,
            "wait_for": self.wait_for,
            "return_type": "state",
            "dependencies": self.dependencies,
        }
        try:
            return asyncio.run(run_task_async(**words)) if self.task.isasync else run_task_sync(**words)
        except (Exception, GeneratorExit):
            raise
        except BaseException as error:  # the engine has reported the crash; the thread goes on with other task runs
            return Crashed(message=f"the task's function was interrupted: {error!r}", data=error)


class RemoteCall:
    """Takes the place of a task's function in the engine, which reads its signature, name and code (for cache keys)
    from it.
    """

    def __init__(self, calls: RunCalls, step: Step, like: Callable[..., Any], timeout_seconds: float | None) -> None:
        functools.update_wrapper(cast(Any, self), like)
        self._calls = calls
        self._step = step
        self._timeout_seconds = timeout_seconds
        self._failures_before: int | None = len(calls.pools.failures(step.spec))
        if code := getattr(step.fn, "__code__", None):
            self.__code__ = code

    def _raise_if_an_opening_failed(self) -> None:
        """The first attempt fails with an opening that has failed since the task was submitted, also for another one;
        each later attempt opens a pool again.
        """
        before, self._failures_before = self._failures_before, None
        if before is not None and len(failures := self._calls.pools.failures(self._step.spec)) > before:
            raise failures[-1]


class SyncCall(RemoteCall):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return called(self._calls, lambda: self._result(args, kwargs), self._step.spec)

    def _result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._raise_if_an_opening_failed()
        self._calls.refuse_what_cannot_travel(self._step, args, kwargs)
        with self._calls.pools.holding(self._step.spec) as life:
            with waiting_for_machines(life):
                life.opened.result()
            return waited(self._calls.call(life, self._step, args, kwargs), self._timeout_seconds)


class AsyncCall(RemoteCall):
    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls.is_stopping:
            return cancelled()
        try:
            self._raise_if_an_opening_failed()
            return await awaited(self._calls, self._step, args, kwargs, self._timeout_seconds)
        except BaseException as error:
            return state_of(self._calls, error, self._step.spec)


def called(calls: RunCalls, call: Callable[[], Any], spec: sky.PoolSpec) -> Any:
    """Return the result of a call on the pool of a spec, or the state Cancelled if the flow run ends before the call
    does.
    """
    if calls.is_stopping:
        return cancelled()
    try:
        return call()
    except BaseException as error:
        return state_of(calls, error, spec)


def state_of(calls: RunCalls, error: BaseException, spec: sky.PoolSpec) -> State[Any]:
    """Return Cancelled if the flow run has ended the call, and Skipped if the function has asked for it; else raise the
    error, in words if nodes asked the API.

    An interrupt of the function is raised as one: the task run has crashed.
    """
    if isinstance(error, (CancelledError, asyncio.CancelledError, sky.PoolClosed)) and calls.is_stopping:
        return cancelled()
    if isinstance(error, sky.Skip) and TaskRunContext.get() is not None:
        return Completed(name="Skipped", message=str(error))
    pool = calls.pools.pool_of(spec)
    calls.pools.facts.money.after(error, spec.max_cost, "" if pool is None else pool.id)
    if isinstance(error, sky.RemoteError) and error.type_name == KeyboardInterrupt.__name__:
        raise KeyboardInterrupt(str(error)) from error  # the core does not raise it here; Prefect's engine reports it
    if isinstance(error, Exception):
        raise_if_prefect_s_api_was_used(error)
    raise error


async def awaited(
    calls: RunCalls,
    step: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_seconds: float | None = None,
) -> Any:
    """Make a call in a coroutine, and return its result. Raises TimeoutError after the timeout, and stops the call."""
    calls.refuse_what_cannot_travel(step, args, kwargs)
    with calls.pools.holding(step.spec) as life:
        with waiting_for_machines(life):
            await asyncio.wrap_future(life.opened)
        limit = asyncio.timeout(timeout_seconds)
        try:
            async with limit:
                return await asyncio.wrap_future(calls.call(life, step, args, kwargs))
        except TimeoutError:
            if limit.expired():
                raise _timed_out(timeout_seconds) from None
            raise


def waited[T](future: Future[T], timeout_seconds: float | None, slice_seconds: float | None = None) -> T:
    """Return the result of a call. Raises TimeoutError after the timeout; then, and after any interruption, the call
    is stopped on its node.

    `slice_seconds`: a timeout of Prefect's may interrupt this thread, by an exception at any point. A SimpleQueue is
    written in C and has no lock that could stay locked.
    """
    ended = queue.SimpleQueue[Future[T]]()
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    try:
        future.add_done_callback(ended.put)
        while True:
            left = slice_seconds if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                ended.get(timeout=left)
                return future.result()
            except queue.Empty:
                if deadline is not None:
                    raise _timed_out(timeout_seconds) from None
    except BaseException:
        future.cancel()
        raise


def _timed_out(seconds: float | None) -> TimeoutError:
    return TimeoutError(f"it exceeded timeout_seconds={seconds or 0:g}, and was stopped on its node")


def unless_the_work_is_done(condition: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a task's retry condition for all failures but the final ones: another try would meet the same error, or do
    work a second time that is done. Bad input and credentials are left to the user's own condition.

    A condition that this function has made is returned as it is.
    """
    if getattr(condition, IS_GUARDED, False):
        return cast("Callable[..., Any]", condition)

    def may_be_tried_again(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> Any:
        error = state.data
        if isinstance(error, sky.SkywardError) and (error.is_final or (error.needs_change and condition is None)):
            is_done = isinstance(error, sky.ResultNotLoaded)
            why = ": that would do its work a second time" if is_done else ""
            task_run_logger(task_run, task).error("%s. The task is not tried again%s", str(error).rstrip("."), why)
            return False
        return condition is None or condition(task, task_run, state)

    async def may_be_tried_again_async(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> Any:
        return await answer if inspect.isawaitable(answer := may_be_tried_again(task, task_run, state)) else answer

    guarded = may_be_tried_again_async if inspect.iscoroutinefunction(condition) else may_be_tried_again
    setattr(guarded, IS_GUARDED, True)
    return guarded


def cancelled() -> State[Any]:
    """Return the state of a call that its flow run has ended."""
    return Cancelled(message="the flow run ended before this call did")
