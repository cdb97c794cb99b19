"""The calls of one flow run on its pools."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prefect.context import FlowRunContext, TaskRunContext

import skyward_core as sky
from prefect_skyward.flow_pools import FlowPools
from prefect_skyward.money import MoneyEnd
from prefect_skyward.nested_runs import NestedRuns
from prefect_skyward.node_objects import PLAIN, packing, portable
from prefect_skyward.options import StepSpecs, target_of
from prefect_skyward.pool_life import FlowFacts, PoolLife
from prefect_skyward.prefect_context import env_of_calls, facts_of_call, in_prefect_s_context, with_prefect_s_api
from prefect_skyward.report.run_report import RunReport
from prefect_skyward.ui import RunLog, RunLogs


@dataclass(frozen=True, slots=True)
class Step:
    """What a call runs, and on which pool. `broadcast`: on each worker; the result is a tuple."""

    fn: Callable[..., Any]
    spec: sky.PoolSpec
    broadcast: bool = False
    prefect_context: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def pending(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> sky.PendingCompute[Any]:
        """Return the call of the task run of this thread."""
        args, kwargs = PLAIN.plain((args, kwargs))
        if not self.prefect_context:
            return sky.PendingCompute(self.fn, args, kwargs)
        return sky.PendingCompute(in_prefect_s_context(self.fn), (facts_of_call(), args, kwargs))


class BroadcastFuture(Future[tuple[Any, ...]]):
    """The results of a call on all workers. A thread waits for them, because a group that has lost a node runs again as
    a whole (docs/decisions/0023-training-groups.md).

    `run` gets a function to which it gives the ranks' futures of each attempt, so that `cancel` can stop them.
    """

    def __init__(self, run: Callable[[Callable[[list[Any]], list[Any]]], tuple[Any, ...]]) -> None:
        super().__init__()
        self._ranks: list[Any] = []
        self._is_stopped = False
        sky.in_thread("skyward-broadcast", partial(self._wait, run), is_daemon=False)

    def cancel(self) -> bool:
        """Stop the ranks. The future is cancelled when they have ended."""
        self._is_stopped = True
        for rank in self._ranks:
            rank.cancel()
        return not self.done()

    def _attempt(self, ranks: list[Any]) -> list[Any]:
        self._ranks = ranks
        if self._is_stopped:  # `cancel` may have missed these
            self.cancel()
        return ranks

    def _wait(self, run: Callable[[Callable[[list[Any]], list[Any]]], tuple[Any, ...]]) -> None:
        try:
            results = run(self._attempt)
        except CancelledError:
            super().cancel()
            self.set_running_or_notify_cancel()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(results)


class RunCalls:
    """Makes the calls of one flow run, and stops them.

    A subflow that uses the pools of the flow run around it has its own object, with that one's as `parent`.
    """

    def __init__(
        self,
        pools: FlowPools,
        base: sky.PoolSpec,
        work: sky.Work,
        parent: RunCalls | None = None,
        *,
        prefect_context: bool = False,
    ) -> None:
        self.pools = pools
        self.base = base
        self.prefect_context = prefect_context
        """Whether calls run in Prefect's context, if their options do not say it. Then the base is for that."""
        self.nested = NestedRuns(pools.facts.log)
        self._specs = StepSpecs(base)
        self._work = work
        self._parent = parent
        self._is_stopping = False
        self._futures: set[Future[Any]] = set()
        self._envs: dict[tuple[str, bool], Mapping[str, str]] = {}
        flow = FlowRunContext.get()
        run = flow.flow_run if flow is not None else None
        # once for all calls: they may be long, and each of a thousand calls would look through them
        self._parameters = sky.RunContext(parameters=run.parameters if run is not None else {}).parameters

    @property
    def is_stopping(self) -> bool:
        """Whether calls that end without a result were ended by the flow run."""
        return self._is_stopping or (self._parent is not None and self._parent.is_stopping)

    def step_of(self, fn: Callable[..., Any]) -> Step:
        """Return what a call of a task's function is, made now. Raises BadRequest for hardware that cannot be."""
        target = target_of(fn)
        spec, wish = self._specs.of(target.options), target.options.prefect_context
        in_context = self.prefect_context if wish is None else wish
        if in_context and (not self.prefect_context or spec is not self.base):
            spec = with_prefect_s_api(spec)
        return Step(target.fn, spec, bool(target.options.broadcast), in_context, self._env_of(spec, in_context))

    def _env_of(self, spec: sky.PoolSpec, in_context: bool) -> Mapping[str, str]:
        """Once for all calls on a pool with a name, because it reads the settings of this machine."""
        if spec.name is None:
            return {}
        if (found := self._envs.get((spec.name, in_context))) is None:
            found = self._envs[spec.name, in_context] = env_of_calls(spec, in_prefect_s_context=in_context)
        return found

    def refuse_what_cannot_travel(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise NotPicklable before a pool is opened for a call. An open one says the same of the call itself."""
        if self.pools.pool_of(step.spec) is None:
            with packing(in_prefect_s_context=step.prefect_context):
                sky.plain_call(sky.PendingCompute(step.fn, args, kwargs), PLAIN, replace=portable)

    def call(self, life: PoolLife, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Submit the call for the task run of this thread."""
        use = life.use_of(work_of_task(self._work))
        pending = step.pending(args, kwargs)
        with (
            sky.running_for(context_of_run(self._parameters, step.env)),
            packing(in_prefect_s_context=step.prefect_context),
        ):
            if step.broadcast:
                return self._broadcast(life, use, step, pending)
            return self._note(life, use, self._follow(step, lambda: [use.submit(pending)])[0])

    @contextmanager
    def stream(self, life: PoolLife, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[Any]:
        """Submit the call of a generator; its items come as the node yields them. Leaving the block stops it.

        Raises BadRequest for a broadcast.
        """
        if step.broadcast:
            raise sky.BadRequest("broadcast=True: the items of a generator on each worker: submit it, for their lists")
        use = life.use_of(work_of_task(self._work))
        with (
            sky.running_for(context_of_run(self._parameters, step.env)),
            packing(in_prefect_s_context=step.prefect_context),
        ):
            items = use.stream(step.pending(args, kwargs))
        with items:
            self._note(life, use, self._follow(step, lambda: [items.future])[0])
            yield items

    def stop(self) -> None:
        """Stop the calls that run, and those that come."""
        self._is_stopping = True
        for future in tuple(self._futures):
            future.cancel()

    def expect_losses(self) -> None:
        """From now on calls lose their machines because the flow run ends: they are cancelled, not failed."""
        self._is_stopping = True

    def _note(self, life: PoolLife, use: sky.PoolUse, future: Future[Any]) -> Future[Any]:
        report = self.pools.facts.report
        if report is not None:
            report.call(use)
        self._futures.add(future)

        def ended(_: Future[Any]) -> None:
            self._futures.discard(future)
            life.report_cost(use)

        future.add_done_callback(ended)
        if self.is_stopping:  # `stop` may have missed this one
            future.cancel()
        return future

    def _follow(self, step: Step, submit: Callable[[], list[Any]]) -> list[Any]:
        futures = self.pools.facts.logs.follow_all(submit, has_nested_runs=step.prefect_context)
        if step.prefect_context:
            self.nested.follow(futures)
        return futures

    def _broadcast(
        self, life: PoolLife, use: sky.PoolUse, step: Step, pending: sky.PendingCompute[Any]
    ) -> Future[tuple[Any, ...]]:
        def submit(call: sky.PendingCompute[Any]) -> list[Any]:
            ranks = self._follow(step, lambda: use.submit_broadcast(call))
            for future in ranks:
                self._note(life, use, future)
            return ranks

        return BroadcastFuture(
            lambda stoppable: use.pool.broadcast(pending, submit=lambda call: stoppable(submit(call)))
        )


def context_of_run(parameters: Mapping[str, Any], env: Mapping[str, str]) -> sky.RunContext:
    """Return what travels with a call of this thread's task run. `parameters`: the plain ones of the flow run."""
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    run = flow.flow_run if flow is not None else None
    task_run = task.task_run if task is not None else None
    tags = {*(run.tags if run is not None else ()), *(task_run.tags if task_run is not None else ())}
    return sky.RunContext(
        system="prefect",
        workflow=flow.flow.name if flow is not None and flow.flow is not None else "",
        run_id=str(run.id) if run is not None else "",
        run_name=run.name if run is not None else "",
        task=task.task.name if task is not None else "",
        task_run_id=str(task_run.id) if task_run is not None else "",
        task_run_name=task_run.name if task_run is not None else "",
        tags=tuple(tags),
        parameters=parameters,
        deployment=str(run.deployment_id or "") if run is not None else "",
        run_count=task_run.run_count if task_run is not None else 0,
        log_level=RunLog.of_task().logger.getEffectiveLevel(),
        env=env,
    )


def work_of_flow(context: FlowRunContext | None) -> sky.Work:
    """Return the work of a flow run."""
    run = context.flow_run if context is not None else None
    flow = context.flow if context is not None else None
    return sky.Work(
        system="prefect", workflow=flow.name if flow is not None else "", run=str(run.id) if run is not None else ""
    )


def work_of_task(work: sky.Work) -> sky.Work:
    """The work of this thread's task run, or of the flow run if there is none."""
    context = TaskRunContext.get()
    if context is None:
        return work
    return replace(
        work, task=context.task.name, task_run=str(context.task_run.id), attempt=str(context.task_run.run_count)
    )


def is_detached(context: FlowRunContext | None) -> bool:
    """Whether this process is not that of the flow, but one of its task runner's, or a task worker."""
    return context is not None and context.detached


def facts_of(context: FlowRunContext | None, on_event: sky.Callback | None) -> FlowFacts:
    """Return what the pools of the current flow run need to know of it."""
    log = RunLog.of_flow()
    run = context.flow_run if context is not None else None
    work = work_of_flow(context)
    # another process than the flow's has a part of the run only: the ledger has the whole (kept_runs.py)
    report = RunReport(run.id, log, work, run.flow_id) if run is not None and not is_detached(context) else None
    return FlowFacts(work, log, RunLogs(log), report, MoneyEnd(run, log, report), on_event)
