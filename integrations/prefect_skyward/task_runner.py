"""`SkywardTaskRunner`: the engine of a task stays in the flow's process, its function runs on the pool.

So retries, caching, results, hooks and states are Prefect's own and happen here; the nodes need neither Prefect nor a way to its API.

States of a runner: idle -> started -> open -> idle. `__enter__` starts threads alone: Prefect enters a runner before there is a flow run to tell anything
to. The first `submit` opens the pool; `__exit__` undoes both, whatever way the flow ends.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.ui import CostArtifact, RunLog, RunLogs

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, RunInput, State

SLICE_SECONDS = 0.25
"""How long a thread waits at a stretch: Prefect's timeouts interrupt it between two stretches only."""


class SkywardTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs the tasks that a flow submits or maps on a pool of machines that lives as long as the flow run.

    Takes the keywords of `ComputePool`, or `spec`, a `PoolSpec`; wrong wishes raise BadRequest right here. The pool opens at the first `.submit` or `.map`
    and closes with the flow. `display` is "quiet" unless you ask for another: what the nodes write is in the logs of the task runs anyway.

    A task that is called directly, `train(x)`, never reaches a task runner: it runs in the flow's own process.

        @flow(task_runner=SkywardTaskRunner(accelerator="A100", nodes=2))
        def sweep() -> list[float]:
            return train.map([1e-2, 1e-3, 1e-4]).result()
    """

    def __init__(self, *, spec: sky.PoolSpec | None = None, on_event: sky.Callback | None = None, **wishes: Any) -> None:
        super().__init__()
        if spec is not None and wishes:
            raise sky.BadRequest(f"give spec=... or keywords, not both: {', '.join(wishes)} stand beside a spec; write spec=spec.with_(...)")
        self._spec = spec if spec is not None else sky.PoolSpec.of(**wishes)
        self._spec.refuse_what_cannot_be()
        if self._spec.provider is not None:  # else the settings of the machine that runs the flow will name one, which need not be this machine
            sky.ComputePool.from_spec(self._spec)
        self._on_event = on_event
        self._live: _Live | None = None

    @property
    def spec(self) -> sky.PoolSpec:
        """What the pool is asked for."""
        return self._spec

    @property
    def pool(self) -> sky.ComputePool | None:
        """The pool of the flow run that goes on; None before the first submit and after the end."""
        return self._live.pool if self._live is not None else None

    def duplicate(self) -> Self:
        """Return a runner of the same spec and without a pool; Prefect makes one for each flow run."""
        return type(self)(spec=self._spec, on_event=self._on_event)

    def __eq__(self, other: object) -> bool:
        return self._spec == other._spec if isinstance(other, SkywardTaskRunner) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as Prefect's own runners

    def __reduce__(self) -> tuple[Any, ...]:
        """A runner travels as its spec: the pool stays with the process that opened it."""
        return functools.partial(type(self), spec=self._spec, on_event=self._on_event), ()

    def __enter__(self) -> Self:
        super().__enter__()
        self._live = _Live(self._spec, self._on_event)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None) -> None:
        """Close the pool. Raises what goes wrong with that, InstancesLeft above all; if the flow is being stopped, its own error goes on with a note."""
        live, self._live = self._live, None
        super().__exit__(exc_type, exc_value, traceback)
        if live is not None:
            live.close(exc_value)

    def submit(  # pyright: ignore[reportIncompatibleMethodOverride] - the overloads of the base say the same
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Run the task with its function on the pool; opens the pool if this is the first. Raises TypeError for an asynchronous generator."""
        if self._live is None:
            raise RuntimeError("the task runner is not started: name it in @flow(task_runner=...), or submit inside a `with` block of it")
        if inspect.isasyncgenfunction(task.fn):
            raise TypeError(f"task {task.name!r} is an asynchronous generator, whose values cannot travel one by one: return a list, or use a plain generator")
        return self._live.submit(task, parameters, wait_for, dependencies)


def cost_so_far() -> float:
    """Return what the pool of the current flow run has cost so far, in USD; 0.0 before its first submit. Call it in the flow."""
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    if isinstance(runner, SkywardTaskRunner):
        return runner.pool.cost if runner.pool is not None else 0.0
    raise MissingContextError("cost_so_far() is for the body of a flow whose task_runner is a SkywardTaskRunner")


class _Live:
    """All of a runner that is alive: threads, the pool and its calls. Made anew for each flow run."""

    def __init__(self, spec: sky.PoolSpec, on_event: sky.Callback | None) -> None:
        self.pool: sky.ComputePool | None = None
        self.is_stopping = False
        self._spec = spec if "display" in spec.model_fields_set else spec.with_(display="quiet")
        self._on_event = on_event
        self._opening = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._flow_run: FlowRun | None = None
        self._work = sky.Work(system="prefect")
        self._shares: defaultdict[sky.Work, float] = defaultdict(float)
        self._flow_log = RunLog.of_flow()
        self._logs = RunLogs(self._flow_log)
        self._undo = ExitStack()
        self._threads = ThreadPoolTaskRunner[Any]()
        self._threads.__enter__()

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None,
        dependencies: dict[str, set[RunInput]] | None,
    ) -> PrefectConcurrentFuture[Any]:
        with self._opening:
            if self.pool is None:
                self._open()
        remote = copy.copy(task)  # not with_options, which would make a new task key
        remote.fn = (_AsyncCall if task.isasync else _SyncCall)(self, task)
        return self._threads.submit(remote, parameters, wait_for, dependencies)

    def _open(self) -> None:
        """Open the pool while there is a flow run to tell about it; `close` runs after that has gone, so what it needs is kept."""
        context = FlowRunContext.get()
        self._flow_run = context.flow_run if context is not None else None
        self._flow_log = RunLog.of_flow()
        self._logs = RunLogs(self._flow_log)
        sinks: list[sky.Callback] = [self._logs]
        with ExitStack() as undo:
            if self._flow_run is not None:
                artifact = CostArtifact(self._flow_run.id, self._flow_log)
                undo.callback(artifact.close)
                sinks.append(artifact)
            if self._on_event is not None:
                sinks.append(self._on_event)
            self._work = _work_of_flow(context)
            pool = sky.ComputePool.from_spec(self._spec, on_event=sky.compose(*sinks), replace_object=_portable, work=self._work)
            undo.callback(self._share_cost, pool)  # after its end: then no call comes any more
            pool.open()
            undo.callback(pool.close)
            self._undo = undo.pop_all()
            self.pool = pool

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Hand the function over, for the task run of this thread."""
        pool = self.pool
        assert pool is not None
        work = _work_of_task(self._work)
        future = self._logs.follow(lambda: pool.submit(sky.PendingCompute(fn, args, kwargs)))
        future.add_done_callback(functools.partial(self._add_cost, work))
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        if self.is_stopping:  # `_stop_calls` may not have seen this one
            future.cancel()
        return future

    def _add_cost(self, work: sky.Work, future: Future[Any]) -> None:
        """Called in the one thread in which calls end."""
        if cost := getattr(future, "cost", None):
            self._shares[work] += cost

    def _share_cost(self, pool: sky.ComputePool) -> None:
        """Tell the ledger what each task run has cost; what machines have cost beside is the flow run's."""
        if self._shares:
            try:
                pool.share_cost(self._shares)
            except sky.SkywardError as error:  # the bill is written all the same, as the flow run's
                self._flow_log.say(logging.WARNING, f"what each task run has cost is not in the ledger: {error}")

    def close(self, error: BaseException | None) -> None:
        """Close everything. Calls of a flow that ended well are waited for, as Prefect's own runner does; else they are stopped first: they cost money.

        A flow that is being stopped (a signal, which is no Exception) may be killed before the provider has answered, after 30 s if it was cancelled: its
        machines are the reaper's first.
        """
        stops = error is not None or self._has_failed()
        if self.pool is not None and error is not None and not isinstance(error, Exception):
            self.is_stopping = True  # calls whose machines go are cancelled, not failed
            self.pool.terminate_now()
        try:
            with ExitStack() as undo:
                if stops:  # last: a task may be asleep before its next attempt, and the machines need not wait for it
                    undo.callback(self._end_threads)
                undo.push(self._undo)
                undo.callback(self._stop_calls if stops else self._end_threads)
        except Exception as failure:
            self._flow_log.say(logging.CRITICAL, f"the pool could not be closed: {failure}")
            if error is None:
                raise
            error.add_note(f"besides, the pool could not be closed: {failure!r}")

    def _has_failed(self) -> bool:
        """Prefect enters the state of a flow run before it leaves the runner, and tells a runner of no failure but a signal."""
        state = self._flow_run.state if self._flow_run is not None else None
        return state is not None and not (state.is_completed() or state.is_running())

    def _stop_calls(self) -> None:
        self.is_stopping = True
        for future in tuple(self._calls):
            future.cancel()

    def _end_threads(self) -> None:
        try:
            self._threads.__exit__(None, None, None)
        except BaseException:
            self._stop_calls()
            raise


class _RemoteCall:
    """Stands in for a task's function in the engine, which reads its signature, name and code (for cache keys) off it."""

    def __init__(self, live: _Live, task: Task[Any, Any]) -> None:
        functools.update_wrapper(cast(Any, self), task.fn)
        self._live = live
        self._fn = task.fn.local if isinstance(task.fn, sky.ComputeFunction) else task.fn
        self._slice_seconds = SLICE_SECONDS if task.timeout_seconds is not None else None
        if code := getattr(task.fn, "__code__", None):
            self.__code__ = code


class _SyncCall(_RemoteCall):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._live.is_stopping:
            return _cancelled()
        try:
            return self._wait(self._live.call(self._fn, args, kwargs))
        except (CancelledError, sky.PoolClosed):
            if self._live.is_stopping:
                return _cancelled()
            raise

    def _wait(self, future: Future[Any]) -> Any:
        # A timeout is an exception thrown into this thread wherever it is: a SimpleQueue, being C, has no lock that it could leave locked.
        ended = queue.SimpleQueue[Future[Any]]()
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


class _AsyncCall(_RemoteCall):
    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._live.is_stopping:
            return _cancelled()
        try:
            return await asyncio.wrap_future(self._live.call(self._fn, args, kwargs))
        except (asyncio.CancelledError, sky.PoolClosed):
            if self._live.is_stopping:
                return _cancelled()
            raise


def _work_of_flow(context: FlowRunContext | None) -> sky.Work:
    run = context.flow_run if context is not None else None
    flow = context.flow if context is not None else None
    return sky.Work(system="prefect", workflow=flow.name if flow is not None else "", run=str(run.id) if run is not None else "")


def _work_of_task(work: sky.Work) -> sky.Work:
    """The task run of this thread; the flow run where there is none."""
    context = TaskRunContext.get()
    if context is None:
        return work
    return replace(work, task=context.task.name, task_run=str(context.task_run.id), attempt=str(context.task_run.run_count))


def _cancelled() -> State[Any]:
    return Cancelled(message="the flow run ended before this call did")


def _portable(obj: Any) -> Any:
    """What travels in the place of Prefect's own things: a task as its function, the run's logger as one that prints."""
    if isinstance(obj, Task):
        with suppress(AttributeError):  # a callable that takes no attributes
            cast(Any, obj.fn).fn = obj.fn  # so that `other_task.fn(x)` in a task's body works on a node as it does here
        return obj.fn
    if obj is get_run_logger:
        return _node_run_logger
    return NotImplemented


def _node_run_logger(context: object = None, **kwargs: Any) -> logging.Logger:
    """`get_run_logger` on a node: what is logged is printed, and so arrives in the log of the task run."""
    import logging
    import sys

    logger = logging.getLogger("skyward.run")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


# Nodes have no prefect_skyward to import it from: a module that does not exist makes it travel by value.
_node_run_logger.__module__ = "skyward_node"
