"""The pool of one flow run: opened at the first submit, and ended in whatever way the flow ends.

`__enter__` of the runner only makes a `LiveRunner`, because Prefect enters a runner before there is a flow run. The
first `submit` opens the pool in a thread, and returns at once. `__exit__` ends everything.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from prefect.context import FlowRunContext
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.settings import get_current_settings
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.node_objects import portable, without_prefect_s_api
from prefect_skyward.remote_call import (
    SLICE_SECONDS,
    AsyncCall,
    SyncCall,
    TaskRunOnPool,
    unless_the_work_is_done,
    work_of_task,
)
from prefect_skyward.report.run_report import RunReport
from prefect_skyward.secrets import values_of
from prefect_skyward.ui import RunLog, RunLogs

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, RunInput

WATCH_SECONDS = 0.25
"""How often the runner reads a flow run's state."""


class LiveRunner:
    """The threads, the pool and the calls of a runner. There is a new one for each flow run, and for each attempt of
    one.

    States of the pool: none -> opening -> open -> released, or opening -> failed -> opening (a task that is retried
    opens it again). The thread of `_open` leads from opening to open or failed. `_release` ends every state, in the
    thread that comes first: the runner's exit, or the watch of the flow run.
    """

    def __init__(self, spec: sky.PoolSpec, on_event: sky.Callback | None) -> None:
        self.pool: sky.ComputePool | None = None
        self.is_stopping = False
        self._spec = without_prefect_s_api(spec if "display" in spec.model_fields_set else spec.with_(display="quiet"))
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
        self._report: RunReport | None = None
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
        remote.fn = (AsyncCall if task.isasync else SyncCall)(self, task, opening)
        remote.retry_condition_fn = unless_the_work_is_done(task.retry_condition_fn)
        run = TaskRunOnPool(remote, uuid4(), parameters, wait_for, dependencies)
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
        self._is_the_flows_runner = getattr(context.task_runner, "_live", None) is self
        self._flow_log = RunLog.of_flow()
        self._logs = RunLogs(self._flow_log)
        self._work = work_of_flow(context)
        if self._flow_run is not None:
            self._report = RunReport(self._flow_run.id, self._flow_log, self._work)
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
            if self._report is not None:
                sinks.append(self._report.sink())
            if self._on_event is not None:
                sinks.append(self._on_event)
            pool = sky.ComputePool.from_spec(
                self._spec,
                on_event=sky.compose(*sinks),
                secrets=values_of(self._spec),
                replace_object=portable,
                work=self._work,
            )
            self.pool = pool  # before it is open: a stopped flow must be able to end the opening
            if not self.is_stopping:
                pool.open()
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
        work = work_of_task(self._work)
        future = self._logs.follow(lambda: pool.submit(sky.PendingCompute(fn, args, kwargs)))
        if self._report is not None:
            self._report.call(cast("Any", future).call_id, work.task_run, work.task)
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
            if self._report is not None:
                self._report.task_cost(work.task_run, cost)

    def _settle(self, pool: sky.ComputePool) -> None:
        """Write each task run's cost into the ledger, once; the other costs belong to the flow run."""
        if self._report is not None:
            self._report.settle(pool.id, pool.receipt)
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
            if self._report is not None:
                undo.callback(self._report.close)
            if self.pool is not None:
                undo.callback(self._settle, self.pool)  # after its end: then no more calls come
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


def work_of_flow(context: FlowRunContext | None) -> sky.Work:
    run = context.flow_run if context is not None else None
    flow = context.flow if context is not None else None
    return sky.Work(
        system="prefect", workflow=flow.name if flow is not None else "", run=str(run.id) if run is not None else ""
    )
