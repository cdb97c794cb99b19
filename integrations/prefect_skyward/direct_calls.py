"""`@on_skyward`: a function that runs on a pool wherever it is called: by `train(x)` in a flow, by any task runner, or
without a flow.

It uses the pools of the flow's `SkywardTaskRunner`; else pools that are kept for the flow run; else one that lives as
long as the call. That runner takes the function beneath, and does not call this one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, cast

from prefect.context import FlowRunContext, TaskRunContext
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.flow_pools import FlowPools
from prefect_skyward.kept_runs import KeptRuns
from prefect_skyward.options import TARGET, StepOptions, Target
from prefect_skyward.remote_call import SLICE_SECONDS, awaited, called, state_of, unless_the_work_is_done, waited
from prefect_skyward.run_calls import RunCalls, facts_of, work_of_flow
from prefect_skyward.task_runner import calls_around
from prefect_skyward.waiting_state import waiting_for_machines

_kept_runs = KeptRuns()


def on_skyward[F: Callable[..., Any]](
    *, broadcast: bool = False, prefect_context: bool | None = None, **keywords: Any
) -> Callable[[F], F]:
    """Run a function on a pool, wherever it is called from. Stands beneath `@task` or `@materialize`.

    Takes the keywords of `ComputePool`; they replace those of the flow's `SkywardTaskRunner`, if it has one. Equal
    keywords share a pool. `broadcast=True` runs the function on each worker: the result is a tuple.
    `prefect_context=True` is as that of `SkywardTaskRunner`. Raises BadRequest for a wrong keyword, TypeError above
    `@task`.

        @task(retries=2)
        @on_skyward(accelerator="T4")
        def score(model): ...
    """
    options = StepOptions.of(broadcast or None, keywords, prefect_context)

    def decorate(fn: F) -> F:
        if isinstance(fn, Task):
            raise TypeError("on_skyward stands beneath @task: write @task above @on_skyward(...)")
        wrapper = functools.wraps(fn)(_wrapper(fn))
        setattr(wrapper, TARGET, Target(fn, options))
        return cast(F, wrapper)

    return decorate


def _wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same kind, which makes the call: Prefect asks for the kind."""
    inner = fn.local if isinstance(fn, sky.ComputeFunction) else fn
    if inspect.isasyncgenfunction(inner):
        return _asynchronous_items()
    if inspect.isgeneratorfunction(inner):
        return _items()
    return _coroutine() if inspect.iscoroutinefunction(inner) else _plain()


def _plain() -> Callable[..., Any]:
    def on_pool(*args: Any, **kwargs: Any) -> Any:
        with _PresentCalls() as calls:
            step = calls.step_of(on_pool)

            def result() -> Any:
                calls.refuse_what_cannot_travel(step, args, kwargs)
                with calls.pools.holding(step.spec) as life:
                    with waiting_for_machines(life):
                        waited(life.opened, None, _slice_seconds())
                    return waited(calls.call(life, step, args, kwargs), None, _slice_seconds())

            return called(calls, result, step.spec)

    return on_pool


def _coroutine() -> Callable[..., Any]:
    async def on_pool(*args: Any, **kwargs: Any) -> Any:
        async with _PresentCalls() as calls:
            step = calls.step_of(on_pool)
            try:
                return await awaited(calls, step, args, kwargs)
            except BaseException as error:
                return state_of(calls, error, step.spec)

    return on_pool


def _items() -> Callable[..., Any]:
    def on_pool(*args: Any, **kwargs: Any) -> Generator[Any]:
        with _PresentCalls() as calls:
            step = calls.step_of(on_pool)
            try:
                calls.refuse_what_cannot_travel(step, args, kwargs)
                with calls.pools.holding(step.spec) as life:
                    with waiting_for_machines(life):
                        waited(life.opened, None, _slice_seconds())
                    with calls.stream(life, step, args, kwargs) as items:
                        yield from items
            except BaseException as error:
                state_of(calls, error, step.spec)  # a generator cannot return the state
                raise

    return on_pool


def _asynchronous_items() -> Callable[..., Any]:
    async def on_pool(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        async with _PresentCalls() as calls:
            step = calls.step_of(on_pool)
            try:
                calls.refuse_what_cannot_travel(step, args, kwargs)
                with calls.pools.holding(step.spec) as life:
                    with waiting_for_machines(life):
                        await asyncio.wrap_future(life.opened)
                    with calls.stream(life, step, args, kwargs) as items:
                        async for item in items:
                            yield item
            except BaseException as error:
                state_of(calls, error, step.spec)
                raise

    return on_pool


class _PresentCalls:
    """A block with the calls of the flow run; without one, with those of a pool that ends with the block. In
    `async with` the event loop goes on while that pool ends.
    """

    def __init__(self) -> None:
        self._own: RunCalls | None = None

    def __enter__(self) -> RunCalls:
        _guard_retries()
        if (calls := _calls_of_flow()) is not None:
            return calls
        self._own = _calls_of_no_flow()
        return self._own

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            _end(self._own)

    async def __aenter__(self) -> RunCalls:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        if self._own is not None:
            await asyncio.shield(asyncio.to_thread(_end, self._own))


def _end(calls: RunCalls) -> None:
    try:
        calls.pools.end()
    finally:
        calls.nested.end()


def _guard_retries() -> None:
    """Change the task whose function this is: Prefect reads its condition after each failure."""
    if (context := TaskRunContext.get()) is not None:
        context.task.retry_condition_fn = unless_the_work_is_done(context.task.retry_condition_fn)


def _calls_of_flow() -> RunCalls | None:
    if (calls := calls_around()) is not None:
        return calls
    context = FlowRunContext.get()
    return _kept_runs.calls_of(context) if context is not None and context.flow_run is not None else None


def _calls_of_no_flow() -> RunCalls:
    return RunCalls(FlowPools(facts_of(None, None), None), sky.PoolSpec(), work_of_flow(None))


def _slice_seconds() -> float | None:
    """Prefect interrupts this thread, if the task has a timeout, only between two waits."""
    context = TaskRunContext.get()
    return SLICE_SECONDS if context is not None and context.task.timeout_seconds is not None else None
