"""Pools of flow runs that have another task runner: kept for the flow run, and ended by a thread that reads its state.

States of a kept run: open -> ending -> ended, as its `FlowPools`. The thread is no daemon: the interpreter waits until
the machines are gone.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.context import FlowRunContext

import skyward_core as sky
from prefect_skyward.cancellation import Cancellation
from prefect_skyward.flow_pools import FlowPools
from prefect_skyward.report.settlement import begin_bill, settle_flow_run
from prefect_skyward.run_calls import RunCalls, facts_of, is_detached, work_of_flow

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

IDLE_SECONDS = 300.0
WATCH_SECONDS = 0.25


class KeptRuns:
    """The flow runs of this process that have pools and another runner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[UUID, _KeptRun] = {}

    def calls_of(self, context: FlowRunContext) -> RunCalls:
        """Return the calls of this flow run. Another attempt of a flow run is another one."""
        assert context.flow_run is not None
        with self._lock:
            run = self._runs.get(context.flow_run.id)
            if run is None or run.flow_run is not context.flow_run or (run.is_ending and not run.is_cancelled):
                run = _KeptRun(context, context.flow_run)
                try:
                    sky.LoopThread("skyward-kept", partial(self._watch, run), is_daemon=False).start()
                except RuntimeError:  # nobody would end its pools
                    run.end()
                    raise
                self._runs[context.flow_run.id] = run
            return run.calls

    def _watch(self, run: _KeptRun) -> None:
        run.bill(begin_bill)
        while not run.has_ended():
            run.calls.pools.end_idle()
            time.sleep(WATCH_SECONDS)
        run.end()
        run.bill(settle_flow_run)
        while run.is_cancelled and not run.is_left():  # its next calls get no new pools
            time.sleep(WATCH_SECONDS)
        run.settle()
        with self._lock:
            if self._runs.get(run.flow_run.id) is run:
                del self._runs[run.flow_run.id]


class _KeptRun:
    def __init__(self, context: FlowRunContext, flow_run: FlowRun) -> None:
        self.flow_run = flow_run
        self.is_ending = False
        self._is_detached = is_detached(context)
        self._runner: Any = context.task_runner
        base = sky.PoolSpec()
        facts = facts_of(context, None)
        self.calls = RunCalls(FlowPools(facts, IDLE_SECONDS), base, work_of_flow(context))
        self._cancellation = Cancellation(flow_run.id, facts.log, self.calls.stop)

    @property
    def is_cancelled(self) -> bool:
        """Whether the flow run was cancelled, and no process has stopped it."""
        return self._cancellation.is_seen

    def is_left(self) -> bool:
        """Whether Prefect has left the runner, which is the last thing that it does with an attempt."""
        return not self._runner._started or not threading.main_thread().is_alive()

    def has_ended(self) -> bool:
        """Whether no more calls will come: Prefect has left the runner; the flow run is cancelled, or has failed while
        its runner waits for its task runs; or the process ends.
        """
        state = self.flow_run.state
        if self.is_cancelled or not threading.main_thread().is_alive():
            return True
        if state is not None and (state.is_scheduled() or (state.is_final() and not state.is_completed())):
            return True
        return not self._runner._started and not self.calls.pools.is_held

    def end(self) -> None:
        self.is_ending = True
        self._cancellation.end()
        if self.flow_run.state is None or not self.flow_run.state.is_completed():
            self.calls.stop()
        try:
            self.calls.pools.end()
        except Exception as failure:  # no caller is left that could take it; the reapers go on
            self.calls.pools.facts.log.say(logging.CRITICAL, f"a pool could not be closed: {failure}")
        self.calls.nested.end()

    def bill(self, step: Callable[[UUID], None]) -> None:
        """Do a step of the bill if this process has no report of the run. What it cannot do is done by the next run of
        the flow: also when the interpreter ends, and starts no thread any more.
        """
        if self._is_detached and threading.main_thread().is_alive():
            log = self.calls.pools.facts.log
            do = functools.partial(log.run, step, self.flow_run.id)
            sky.after_the_work("the cost of the flow run", do, functools.partial(log.say, logging.WARNING))

    def settle(self) -> None:
        self._cancellation.settle()
