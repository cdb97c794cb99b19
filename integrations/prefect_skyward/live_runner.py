"""A task runner from the moment in which Prefect enters it until Prefect leaves it: threads for the engines, the calls
and the pools of the flow run, and the thread that watches the flow run.

Prefect enters a runner before there is a flow run. So the first `submit` makes the pools' set, in the flow's context.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.settings import get_current_settings
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.cancellation import Cancellation
from prefect_skyward.flow_pools import FlowPools
from prefect_skyward.options import changed
from prefect_skyward.prefect_context import with_prefect_s_api
from prefect_skyward.remote_call import AsyncCall, SyncCall, TaskRunOnPool, unless_the_work_is_done
from prefect_skyward.report.run_report import wait_for_late_reports
from prefect_skyward.run_calls import RunCalls, facts_of, work_of_flow
from prefect_skyward.ui import send_lines

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, RunInput

WATCH_SECONDS = 0.25
"""How often the runner reads a flow run's state."""

type OnUnfinished = Literal["cancel", "wait"]


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What a runner has beside the spec of its pool."""

    idle_timeout: float | None = 300.0
    max_workers: int | None = None
    on_unfinished: OnUnfinished | None = None
    inherit: bool = False
    prefect_context: bool = False

    def __post_init__(self) -> None:
        if self.idle_timeout is not None and self.idle_timeout <= 0:
            raise sky.BadRequest(
                f"idle_timeout={self.idle_timeout!r}: write the seconds without calls after which a pool is closed, or"
                " None: it is kept until the flow ends"
            )
        if self.max_workers is not None and self.max_workers < 1:
            raise sky.BadRequest(f"max_workers={self.max_workers!r}: write how many task runs may run at once, or None")
        if self.on_unfinished not in ("cancel", "wait", None):
            raise sky.BadRequest(
                f'on_unfinished={self.on_unfinished!r}: write "cancel" or "wait", or None: wait if the flow has'
                " returned, cancel if it has failed"
            )


class LiveRunner:
    """There is a new one for each flow run, and for each attempt of one.

    States: entered -> submitting -> released. `_release` ends every state, in the thread that comes first: the runner's
    exit, or the watch of the flow run.
    """

    def __init__(
        self,
        spec: sky.PoolSpec,
        settings: RunnerSettings,
        on_event: sky.Callback | None,
        parent: RunCalls | None,
        is_current: Callable[[object], bool],
    ) -> None:
        self.spec = spec if parent is None else changed(parent.base, _given(spec))
        self._settings = settings
        self._on_event = on_event
        self._parent = parent
        self._is_current = is_current
        self._lock = threading.Lock()
        self._releasing = threading.Lock()
        self._calls: RunCalls | None = None
        self._flow_run: FlowRun | None = None
        self._is_the_flows_runner = False
        self._cancellation: Cancellation | None = None
        self._is_closed = threading.Event()
        self._engines = ThreadPoolExecutor(
            settings.max_workers or get_current_settings().tasks.runner.thread_pool_max_workers or sys.maxsize,
            thread_name_prefix="skyward-task",
        )

    @property
    def pool(self) -> sky.ComputePool | None:
        """The pool of the runner's own spec; None before it was needed."""
        return self._calls.pools.pool_of(self.spec) if self._calls is not None else None

    @property
    def cost(self) -> float:
        """USD that the flow run's pools have cost so far."""
        return self._calls.pools.cost if self._calls is not None else 0.0

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None,
        dependencies: dict[str, set[RunInput]] | None,
    ) -> PrefectConcurrentFuture[Any]:
        calls = self.calls()
        if self._cancellation is not None and self._cancellation.is_seen:
            raise sky.PoolClosed("the flow run is cancelled: it takes no more tasks")
        step = calls.step_of(task.fn)
        remote = copy.copy(task)  # not with_options, which would make a new task key
        # Prefect's own timeout would count the renting; the call's begins on the pool, and stops the work on the node
        remote.fn = (AsyncCall if task.isasync else SyncCall)(calls, step, task.fn, task.timeout_seconds)
        remote.timeout_seconds = None
        remote.retry_condition_fn = unless_the_work_is_done(task.retry_condition_fn)
        run = TaskRunOnPool(remote, uuid4(), parameters, wait_for, dependencies)
        future = self._engines.submit(copy_context().run, run)
        return PrefectConcurrentFuture(task_run_id=run.task_run_id, wrapped_future=future)

    def calls(self) -> RunCalls:
        """Return the calls of the flow run of this context."""
        with self._lock:
            if self._calls is None:
                self._begin()
            assert self._calls is not None
            return self._calls

    def _begin(self) -> None:
        """Keep the data of the flow run: `close` runs after its context has ended.

        Raises BadRequest if there is no way to Prefect's API for nodes that need one.
        """
        in_context = self._settings.prefect_context or (self._parent is not None and self._parent.prefect_context)
        if in_context:
            self.spec = with_prefect_s_api(self.spec)
        context = FlowRunContext.get()
        if context is not None:
            self._flow_run = context.flow_run
            self._is_the_flows_runner = self._is_current(context.task_runner)
        pools = (
            self._parent.pools
            if self._parent is not None
            else FlowPools(facts_of(context, self._on_event), self._settings.idle_timeout, self.spec.max_cost)
        )
        self._calls = RunCalls(pools, self.spec, work_of_flow(context), self._parent, prefect_context=in_context)
        if self._parent is not None and self._flow_run is not None:
            pools.facts.money.covers(self._flow_run)
        if self._parent is None:
            # a pool with a name has the limit for itself
            if pools.facts.report is not None and self.spec.max_cost is not None and self.spec.name is None:
                pools.facts.report.limit(self.spec.max_cost)
            try:
                sky.LoopThread("skyward-flow", partial(self._watch, pools)).start()
            except RuntimeError:  # nobody would end idle pools
                pools.end()
                raise
            if self._flow_run is not None:
                self._cancellation = Cancellation(
                    self._flow_run.id, pools.facts.log, lambda: self._release_early(pools, is_stopped=True)
                )

    def _watch(self, pools: FlowPools) -> None:
        """End idle pools. Terminate all machines as soon as Prefect is about to try the flow run again: it sleeps
        through `retry_delay_seconds` before it leaves the runner.
        """
        while not self._is_closed.wait(WATCH_SECONDS):
            pools.end_idle()
            if self._is_the_flows_runner and self._is_tried_again():
                text = "the flow run is tried again: the machines of this attempt are given back"
                pools.facts.log.say(logging.INFO, text)
                self._release_early(pools, is_stopped=False)
                return

    def _release_early(self, pools: FlowPools, *, is_stopped: bool) -> None:
        """End the calls and the pools before Prefect leaves the runner."""
        try:
            self._release(is_failure=True, is_stopped=is_stopped)
        except Exception as failure:
            # `close` tries again when Prefect leaves the runner
            pools.facts.log.say(logging.CRITICAL, f"the pool could not be closed: {failure}")

    def close(self, error: BaseException | None) -> None:
        """Close everything. If the flow ended well, wait for its calls, as Prefect's own runner does; else stop them
        first, because they cost money. `on_unfinished` decides otherwise.

        A flow that is being stopped by a signal (which is no Exception) may be killed before the provider has answered,
        after 30 s if it was cancelled. So the reapers get the machines first.
        """
        self._is_closed.set()
        if self._cancellation is not None:
            self._cancellation.end()
        is_stopped = error is not None and not isinstance(error, Exception)
        if is_stopped and self._calls is not None and self._parent is None:
            self._calls.expect_losses()
            self._calls.pools.terminate_now()
            if (report := self._calls.pools.facts.report) is not None:
                report.expect_exit()
        try:
            self._release(is_failure=error is not None or self._has_failed(), is_stopped=is_stopped)
        except Exception as failure:
            if self._calls is not None:
                self._calls.pools.facts.log.say(logging.CRITICAL, f"the pool could not be closed: {failure}")
            if error is None:
                raise
            error.add_note(f"besides, the pool could not be closed: {failure!r}")
        finally:
            if self._cancellation is not None and self._is_the_flows_runner and not is_stopped:
                self._cancellation.settle()
            if isinstance(error, TerminationSignal):  # Prefect sends the signal again, and nothing runs after that
                wait_for_late_reports()
                send_lines()

    def _release(self, *, is_failure: bool, is_stopped: bool = False) -> None:
        """End the pools and the threads, in any state.

        May be called again: then it ends the parts that the call before could not end.
        """
        wish = self._settings.on_unfinished
        if stops := is_stopped or (is_failure if wish is None else wish == "cancel"):
            if self._calls is not None:
                self._calls.stop()
        else:
            self._end_engines(cancels=False)  # each of them has waited for its pool
        with self._releasing, ExitStack() as undo:
            if stops:  # last: a task may sleep before its next attempt, and the machines need not wait for it
                undo.callback(self._end_engines)
            if self._calls is not None:
                undo.callback(self._calls.nested.end)
                if self._parent is None:
                    undo.callback(self._calls.pools.end)

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

    def _end_engines(self, *, cancels: bool = True) -> None:
        """End the threads. `cancels`: task runs that wait for one do not begin."""
        try:
            self._engines.shutdown(cancel_futures=cancels)
        except BaseException:
            if self._calls is not None:
                self._calls.stop()
            raise


def _given(spec: sky.PoolSpec) -> dict[str, Any]:
    """The fields that were written."""
    return {name: getattr(spec, name) for name in spec.model_fields_set}
