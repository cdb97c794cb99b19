"""`SkywardTaskRunner`: the engine of a task stays in the flow's process, its function runs on the pool.

So retries, caching, results, hooks and states are Prefect's own and happen here; the nodes need neither Prefect nor
access to its API.

States of a runner: idle -> started -> open -> idle. `__enter__` only starts threads, because Prefect enters a runner
before there is a flow run. The first `submit` opens the pool in a thread, and returns at once. `__exit__` ends
everything, in whatever way the flow ends.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from uuid import UUID, uuid4

from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.logging import get_run_logger
from prefect.logging.loggers import task_run_logger
from prefect.settings import get_current_settings
from prefect.states import Cancelled
from prefect.task_engine import run_task_async, run_task_sync
from prefect.task_runners import TaskRunner
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.secrets import values_of, with_references
from prefect_skyward.ui import CostArtifact, RunLog, RunLogs

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, RunInput, State, TaskRun

SLICE_SECONDS = 0.25
"""How long a thread waits at a stretch: Prefect's timeouts interrupt it only between two waits."""
NO_API_SCHEME = "skyward-node:"
NO_API = f"{NO_API_SCHEME}//a-node-has-no-way-to-prefects-api"
WATCH_SECONDS = 0.25
"""How often the runner reads a flow run's state."""


class SkywardTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs the tasks that a flow submits or maps on a pool of machines that lives as long as the flow run.

    Takes the keywords of `ComputePool`, or `spec`, a `PoolSpec`; wrong keywords raise BadRequest here. The pool
    opens at the first `.submit` or `.map` and closes with the flow. `display` is "quiet" unless you set it, because the
    output of the nodes is in the logs of the task runs anyway.

    A task that is called directly, `train(x)`, never reaches a task runner: it runs in the flow's own process.

        @flow(task_runner=SkywardTaskRunner(accelerator="A100", nodes=2))
        def sweep() -> list[float]:
            return train.map([1e-2, 1e-3, 1e-4]).result()
    """

    def __init__(
        self, *, spec: sky.PoolSpec | None = None, on_event: sky.Callback | None = None, **keywords: Any
    ) -> None:
        super().__init__()
        if spec is not None and keywords:
            raise sky.BadRequest(
                f"give spec=... or keywords, not both: {', '.join(keywords)} stand beside a spec; write"
                " spec=spec.with_(...)"
            )
        self._spec = spec if spec is not None else sky.PoolSpec.of(**with_references(keywords))
        self._spec.refuse_what_cannot_be()
        # else the settings of the machine that runs the flow name one; it may be another machine than this
        if self._spec.provider is not None:
            sky.ComputePool.from_spec(self._spec)
        self._on_event = on_event
        self._live: _LiveRunner | None = None

    @property
    def spec(self) -> sky.PoolSpec:
        """The spec of the pool."""
        return self._spec

    @property
    def pool(self) -> sky.ComputePool | None:
        """The pool of the current flow run; None before the first submit and after the end."""
        return self._live.pool if self._live is not None else None

    def duplicate(self) -> Self:
        """Return a runner of the same spec and without a pool; Prefect makes one for each flow run."""
        return type(self)(spec=self._spec, on_event=self._on_event)

    def __eq__(self, other: object) -> bool:
        return self._spec == other._spec if isinstance(other, SkywardTaskRunner) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as Prefect's own runners

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a runner as its spec: the pool stays with the process that opened it."""
        return functools.partial(type(self), spec=self._spec, on_event=self._on_event), ()

    def __enter__(self) -> Self:
        super().__enter__()
        self._live = _LiveRunner(self._spec, self._on_event)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool.

        Raises the errors of closing; if the flow is being stopped, its own error goes on with a note. Unconfirmed
        machines raise nothing: the run's log and artifact name them, and the pool's reaper goes on.
        """
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
        """Run the task with its function on the pool; opens the pool if this is the first.

        Raises TypeError for an asynchronous generator.
        """
        if self._live is None:
            raise RuntimeError(
                "the task runner is not started: name it in @flow(task_runner=...), or submit inside a `with` block"
                " of it"
            )
        if inspect.isasyncgenfunction(task.fn):
            raise TypeError(
                f"task {task.name!r} is an asynchronous generator, whose values cannot travel one by one: return a"
                " list, or use a plain generator"
            )
        return self._live.submit(task, parameters, wait_for, dependencies)


def cost_so_far() -> float:
    """Return the cost of the current flow run's pool so far, in USD; 0.0 before its first submit.

    Call it in the flow.
    """
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    if isinstance(runner, SkywardTaskRunner):
        return runner.pool.cost if runner.pool is not None else 0.0
    raise MissingContextError("cost_so_far() is for the body of a flow whose task_runner is a SkywardTaskRunner")


class _LiveRunner:
    """The threads, the pool and the calls of a runner. There is a new one for each flow run, and for each attempt of
    one.

    States of the pool: none -> opening -> open -> released, or opening -> failed -> opening (a task that is retried
    opens it again). The thread of `_open` leads from opening to open or failed. `_release` ends every state, in the
    thread that comes first: the runner's exit, or the watch of the flow run.
    """

    def __init__(self, spec: sky.PoolSpec, on_event: sky.Callback | None) -> None:
        self.pool: sky.ComputePool | None = None
        self.is_stopping = False
        self._spec = _without_prefect_s_api(spec if "display" in spec.model_fields_set else spec.with_(display="quiet"))
        self._on_event = on_event
        self._lock = threading.Lock()
        self._releasing = threading.Lock()
        self._opening: Future[sky.ComputePool] | None = None
        self._calls: set[Future[Any]] = set()
        self._flow_run: FlowRun | None = None
        self._work = sky.Work(system="prefect")
        self._shares: defaultdict[sky.Work, float] = defaultdict(float)
        self._is_the_flows_runner = False
        self._flow_log = RunLog.of_flow()
        self._logs = RunLogs(self._flow_log)
        self._artifact: CostArtifact | None = None
        self._is_closed = threading.Event()
        self._engines = ThreadPoolExecutor(
            get_current_settings().tasks.runner.thread_pool_max_workers or sys.maxsize,
            thread_name_prefix="skyward-task",
        )

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None,
        dependencies: dict[str, set[RunInput]] | None,
    ) -> PrefectConcurrentFuture[Any]:
        opening = self.opening()
        remote = copy.copy(task)  # not with_options, which would make a new task key
        remote.fn = (_AsyncCall if task.isasync else _SyncCall)(self, task, opening)
        remote.retry_condition_fn = _unless_the_work_is_done(task.retry_condition_fn)
        run = _TaskRun(remote, uuid4(), parameters, wait_for, dependencies)
        # The engine starts once the pool has opened: a task's timeout_seconds are for its work, not for the renting.
        future = self._engines.submit(copy_context().run, run.after, opening)
        return PrefectConcurrentFuture(task_run_id=run.task_run_id, wrapped_future=future)

    def opening(self) -> Future[sky.ComputePool]:
        """Return the opening that goes on or has succeeded; start one at first, or after a failure."""
        with self._lock:
            if self._opening is None:
                self._know_the_flow_run()
            if self._opening is None or (
                self._opening.done() and self._opening.exception() is not None and not self.is_stopping
            ):
                self._opening = Future()
                self._opening.set_running_or_notify_cancel()  # so that a task which stops waiting cannot cancel it
                threading.Thread(
                    target=copy_context().run, args=(self._open, self._opening), name="skyward-open", daemon=True
                ).start()
            return self._opening

    def _know_the_flow_run(self) -> None:
        """Keep the data of the flow run: `close` runs after its context has ended."""
        context = FlowRunContext.get()
        if context is None:
            return
        self._flow_run = context.flow_run
        self._is_the_flows_runner = (
            isinstance(context.task_runner, SkywardTaskRunner) and context.task_runner._live is self
        )
        self._flow_log = RunLog.of_flow()
        self._logs = RunLogs(self._flow_log)
        self._work = _work_of_flow(context)
        if self._is_the_flows_runner:
            threading.Thread(target=self._watch, name="skyward-flow", daemon=True).start()

    def _watch(self) -> None:
        """Terminate the machines as soon as Prefect is about to try the flow run again: it sleeps through
        `retry_delay_seconds` before it leaves the runner.
        """
        while not self._is_closed.wait(WATCH_SECONDS):
            if self._is_tried_again():
                self._release_for_another_try()
                return

    def _release_for_another_try(self) -> None:
        self._flow_log.say(logging.INFO, "the flow run is tried again: the machines of this attempt are given back")
        try:
            self._release(is_failure=True)
        except Exception as failure:
            # `close` tries again when Prefect leaves the runner
            self._flow_log.say(logging.CRITICAL, f"the pool could not be closed: {failure}")

    def _open(self, opening: Future[sky.ComputePool]) -> None:
        sinks: list[sky.Callback] = [self._logs]
        try:
            with ExitStack() as undo:
                if self._flow_run is not None:
                    self._artifact = CostArtifact(self._flow_run.id, self._flow_log)
                    undo.callback(self._artifact.close)
                    sinks.append(self._artifact)
                if self._on_event is not None:
                    sinks.append(self._on_event)
                pool = sky.ComputePool.from_spec(
                    self._spec,
                    on_event=sky.compose(*sinks),
                    secrets=values_of(self._spec),
                    replace_object=_portable,
                    work=self._work,
                )
                self.pool = pool  # before it is open: a stopped flow must be able to end the opening
                if not self.is_stopping:
                    pool.open()
                undo.pop_all()  # from now on `_release` closes both
        except BaseException as error:
            if not self.is_stopping:
                self._flow_log.say(logging.ERROR, f"the pool could not be opened: {error}")
            opening.set_exception(error)
        else:
            opening.set_result(pool)

    def call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pool: sky.ComputePool
    ) -> Future[Any]:
        """Submit the function, for the task run of this thread."""
        work = _work_of_task(self._work)
        future = self._logs.follow(lambda: pool.submit(sky.PendingCompute(fn, args, kwargs)))
        future.add_done_callback(functools.partial(self._add_cost, work))
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        if self.is_stopping:  # `_stop_calls` may have missed this one
            future.cancel()
        return future

    def _add_cost(self, work: sky.Work, future: Future[Any]) -> None:
        """Add the cost of a call to its task run. Called in the one thread in which calls end."""
        if cost := getattr(future, "cost", None):
            self._shares[work] += cost

    def _share_cost(self, pool: sky.ComputePool) -> None:
        """Write each task run's cost into the ledger, once; the other costs belong to the flow run."""
        shares, self._shares = self._shares, defaultdict(float)
        if shares:
            try:
                pool.share_cost(shares)
            except sky.SkywardError as error:  # the ledger still has the bill, as the flow run's
                self._flow_log.say(logging.WARNING, f"what each task run has cost is not in the ledger: {error}")

    def close(self, error: BaseException | None) -> None:
        """Close everything. If the flow ended well, wait for its calls, as Prefect's own runner does; else stop them
        first, because they cost money.

        A flow that is being stopped by a signal (which is no Exception) may be killed before the provider has answered,
        after 30 s if it was cancelled. So its reaper gets the machines first.
        """
        self._is_closed.set()
        if self.pool is not None and error is not None and not isinstance(error, Exception):
            self.is_stopping = True  # calls that lose their machines now are cancelled, not failed
            self.pool.terminate_now()
        try:
            self._release(is_failure=error is not None or self._has_failed())
        except Exception as failure:
            self._flow_log.say(logging.CRITICAL, f"the pool could not be closed: {failure}")
            if error is None:
                raise
            error.add_note(f"besides, the pool could not be closed: {failure!r}")

    def _release(self, *, is_failure: bool) -> None:
        """End the pool and the threads, in any state.

        May be called again: then it ends the parts that the call before could not end.
        """
        if is_failure:
            self._stop_calls()
            self._break_off_opening()
        else:
            self._end_engines()  # each of them has waited for the opening
        with self._releasing, ExitStack() as undo:
            if is_failure:  # last: a task may sleep before its next attempt, and the machines need not wait for it
                undo.callback(self._end_engines)
            if self._artifact is not None:
                undo.callback(self._artifact.close)
            if self.pool is not None:
                undo.callback(self._share_cost, self.pool)  # after its end: then no more calls come
                # an unconfirmed machine is in the run's log and on its artifact, and fails no flow that has done its
                # work
                undo.callback(self.pool.hand_over)

    def _is_tried_again(self) -> bool:
        """Whether Prefect tries the flow run again: it sets this state, sleeps, sets Running, and leaves the runner
        last.
        """
        state = self._flow_run.state if self._flow_run is not None else None
        return state is not None and state.is_scheduled()

    def _has_failed(self) -> bool:
        """Whether the flow has failed.

        Prefect enters the state of a flow run before it leaves the flow's runner, and passes a runner no failure except
        a signal. So if the flow run still runs, it has failed and is tried again. A runner that the flow's body enters
        itself is left while the flow runs.
        """
        state = self._flow_run.state if self._flow_run is not None else None
        if state is None or state.is_completed():
            return False
        return self._is_the_flows_runner or not state.is_running()

    def _stop_calls(self) -> None:
        self.is_stopping = True
        for future in tuple(self._calls):
            future.cancel()

    def _break_off_opening(self) -> None:
        """Cancel an opening that goes on, and wait until its machines and threads have ended."""
        while (opening := self._opening) is not None and not opening.done():
            if self.pool is not None:
                # repeatedly: `pool.open()` does not see a request that comes before it has begun
                self.pool.terminate_now()
            wait([opening], timeout=SLICE_SECONDS)

    def _end_engines(self) -> None:
        try:
            self._engines.shutdown(cancel_futures=True)
        except BaseException:
            self._stop_calls()
            raise


@dataclass(frozen=True, slots=True)
class _TaskRun:
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


class _RemoteCall:
    """Takes the place of a task's function in the engine, which reads its signature, name and code (for cache keys)
    from it.
    """

    def __init__(self, live: _LiveRunner, task: Task[Any, Any], opening: Future[sky.ComputePool]) -> None:
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


class _SyncCall(_RemoteCall):
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
            _raise_if_prefect_s_api_was_used(error)
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


class _AsyncCall(_RemoteCall):
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
            _raise_if_prefect_s_api_was_used(error)
            raise


def _unless_the_work_is_done(condition: Callable[..., Any] | None) -> Callable[..., Any]:
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


def _without_prefect_s_api(spec: sky.PoolSpec) -> sky.PoolSpec:
    """Give nodes an address at which each use of Prefect's API fails at once; an address of the user has precedence.

    Without an address Prefect's client starts a server on the node, with a database in the home directory. If it may
    not do that, its concurrency limits wait for ever (3.6 to 3.7).
    """
    return spec.with_(env={"PREFECT_API_URL": NO_API} | spec.image.env | (spec.env or {}))


def _raise_if_prefect_s_api_was_used(error: Exception) -> None:
    if NO_API_SCHEME in f"{error} {error.__cause__}":  # the cause is the traceback of the node
        raise sky.BadRequest(
            "the task's function asks Prefect's API (for a variable, a concurrency limit, an artifact, a block), which"
            " nodes have no way to: do it in the flow and hand the value to the task, or give the nodes an API that"
            " they reach: SkywardTaskRunner(env={'PREFECT_API_URL': ...})"
        ) from error


def _work_of_flow(context: FlowRunContext | None) -> sky.Work:
    run = context.flow_run if context is not None else None
    flow = context.flow if context is not None else None
    return sky.Work(
        system="prefect", workflow=flow.name if flow is not None else "", run=str(run.id) if run is not None else ""
    )


def _work_of_task(work: sky.Work) -> sky.Work:
    """The work of this thread's task run, or of the flow run if there is none."""
    context = TaskRunContext.get()
    if context is None:
        return work
    return replace(
        work, task=context.task.name, task_run=str(context.task_run.id), attempt=str(context.task_run.run_count)
    )


def _cancelled() -> State[Any]:
    return Cancelled(message="the flow run ended before this call did")


def _portable(obj: Any) -> Any:
    """Return the replacement of Prefect's own objects: a task's function, and a logger that prints."""
    if isinstance(obj, Task):
        with suppress(AttributeError):  # a callable that takes no attributes
            cast(Any, obj.fn).fn = obj.fn  # so that `other_task.fn(x)` in a task's body works on a node as it does here
        return obj.fn
    if obj is get_run_logger:
        return _node_run_logger
    return NotImplemented


def _node_run_logger(context: object = None, **kwargs: Any) -> logging.Logger:
    """`get_run_logger` on a node: it prints each record, which so arrives in the log of the task run."""
    import logging
    import sys

    logger = logging.getLogger("skyward.run")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))  # the level travels separately
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)  # the task run's logger filters by level
        logger.propagate = False
    return logger


# Nodes have no prefect_skyward to import it from: the name of a missing module makes it travel by value.
_node_run_logger.__module__ = "skyward_node"
