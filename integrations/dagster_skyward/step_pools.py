"""The pools of one process that runs steps, one for each set of settings that its steps ask for, and the steps' uses of
them (`sky.PoolUse`).

A step's cost is the bill of its uses. A pool that several steps use belongs to their run: what no call has held of it
is for the run, and for no step.
"""

import functools
import logging
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward.backfills import OF_BACKFILL, group_of, runs_to_come
from dagster_skyward.final_errors import not_tried_again, refuse_retries
from dagster_skyward.lifecycle import OF_RUNS, Lifecycle, spec_of_run, spec_of_use
from dagster_skyward.metadata import StepContext, Usage, is_alone, is_of_step, record, step_key, work_of
from dagster_skyward.plain_values import PLAIN
from dagster_skyward.run_plan import planned_users, strangers
from dagster_skyward.run_steps import (
    KEEP_TAG,
    ended_steps,
    failed_steps,
    family,
    note_pool,
    pools_of,
    release_each,
    release_pools,
    steps_to_come,
)
from dagster_skyward.settlement import forget_parent, note_open, report_rests, settle
from dagster_skyward.step import Step, Use
from dagster_skyward.step_events import StepEvents
from dagster_skyward.step_log import Log
from dagster_skyward.step_report import savings
from dagster_skyward.watch import RunWatch, interrupt_step, step_of_process

SETTLE_SECONDS = 20.0
"""How long the end of a process waits until the costs of its steps are in events. The sensors of `upkeep` write what is
missing then.
"""

_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a resource says of its pools: their settings, when they end, who shares them, and the provider with its
    credentials (None: those of this process). `keep_warm` is that of pools which get their names from runs, in seconds.
    `sharing` is None if the plan of the run decides.
    """

    spec: sky.PoolSpec
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    sharing: str | None = None
    credentials: sky.Provider | None = field(default=None, repr=False)
    keep_warm: float = 0.0


class StepPools:
    """The pools of a resource's lifetime, and the receiver of their events: the step that used one last, and before and
    after all steps the resource. `run` is None outside of a run.
    """

    def __init__(
        self,
        terms: Terms,
        log: Log | None,
        instance: dg.DagsterInstance | None = None,
        run: dg.DagsterRun | None = None,
    ) -> None:
        self._terms = terms
        self._instance = instance if run is not None else None
        self._run = run
        self._watch: RunWatch | None = None
        self.events = StepEvents(log, self._instance, self._run)
        self._lock = threading.RLock()
        self._current: list[tuple[sky.PoolSpec, sky.ComputePool]] = []
        """The newest pool of each spec."""
        self._steps: dict[object, Step] = {}
        """By their works; those that are made by hand, by their contexts."""
        self._has_released = False
        """Whether this process has ended the pools of the run."""
        self._sharing = terms.sharing
        """None until the first step tells who shares the pools."""
        self._strangers: frozenset[str] | None = None
        """The families of steps that are known to use no resource of ours."""
        self._strangers_to: dict[str, frozenset[str]] = {}
        """The same for each pool that is named by the run, by its name."""
        self._running: dict[StepContext, Step] = {}
        """Those that use a pool now."""
        self._is_stopped = False
        self._has_failed = False
        if self._instance is not None and run is not None and run.parent_run_id is not None:
            forget_parent(self._instance, run)

    def open_eagerly(self) -> None:
        """Open the pool of the resource's own settings before the first step."""
        step = "" if self._run is None or self._instance is None else step_of_process(self._instance, self._run.run_id)
        with self._lock:
            self._sharing = self._sharing or "step"  # no step has begun that could tell more
            spec = self._of_run(self._terms.spec)
            self._open(spec, self._new_pool(spec, replace(self._run_work, task=step)))

    @contextmanager
    def used_by(self, context: StepContext | None, settings: Mapping[str, Any] | None = None) -> Generator[Use]:
        """Open the step's pool if it is not open; let the step pay for the calls of the block, and record its cost.

        With `settings` it is another pool, of this process, unless they change nothing.
        A step that is being stopped hands the machines' end to the pool's reaper, because its process may be killed
        before the provider has answered.
        """
        step = self._step_of(context)
        if context is not None:
            self.events.begin(context)
            context = context if is_of_step(context) else None
        with not_tried_again():
            spec = self._spec_for(context, settings or {})
        before, use = (step.cost_usd, step.time.used, step.time.queued), None
        try:
            with step.time.block():
                with step.time.opening():
                    its = self._joined(spec, step, context)
                use = Use(its.pool, self.events.listeners)
                if context is not None:
                    self._running[context] = step
                    self.events.opened()
                with its.paying():
                    yield use
        except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as error:
            self._is_stopped = True
            if (pool := self._pool_of(spec)) is not None:
                pool.terminate_now()
            self.events.failed(error)
            raise
        except Exception as error:
            if not isinstance(error, sky.Skip):
                self._has_failed = True
                self.events.failed(error)
            if context is not None:
                refuse_retries(error)
            raise
        finally:
            if context is not None:
                self._running.pop(context, None)
                self.events.waits(context, is_waiting=False)
            try:
                usage = self._note(context, step, *before)
                if use is not None:
                    use.usage = usage
                if context is not None:
                    self.events.used(context)
                self.events.flush()
            except Exception:  # the step's result, or its own error, is more important
                _log.exception("what the step has cost could not all be noted")

    def close(self) -> None:
        """End or leave the pools, and with them the uses; report what is in no metadata yet.

        Unconfirmed machines are in the run's log, and the reaper asks again: they fail no step.
        """
        self.events.resource_only()
        if self._watch is not None:
            self._watch.close()
        with self._lock:
            try:
                self._end_all()
            finally:
                if self._current:
                    sky.after_the_work("the costs of the steps", self._settle, _log.warning, seconds=SETTLE_SECONDS)
                self.events.close()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_all(self) -> None:
        has_failed = self._has_failed or self._has_failed_steps()
        errors: list[BaseException] = []
        for spec, pool in self._current:
            try:
                self._end(spec, pool, has_failed=has_failed)
            except BaseException as error:
                errors.append(error)
        # a step that has used no pool may be the last one that could have
        may_release = self._sharing is None or self._sharing in OF_RUNS
        if may_release and self._instance is not None and self._run is not None:
            self._release_after_last_step(self._instance, self._run.run_id, has_failed=has_failed)
        if errors:
            raise errors[0]

    def _end(self, spec: sky.PoolSpec, pool: sky.ComputePool, *, has_failed: bool) -> None:
        kept = self._terms.lifecycle.kept_seconds(spec.timeout, has_failed=has_failed)
        if self._is_stopped or spec.name is not None or not kept or not pool.is_active:
            pool.hand_over()  # leaves a pool with a name
            return
        try:
            pool.detach(kept)
        except sky.SkywardError as error:
            _log.warning("the pool %s cannot stay (%s): it is ended", pool.id, error)
            pool.hand_over()
        else:
            self.events.say(f"the machines of {pool.id} stay for {kept:g} s: `skyward stop {pool.id}` ends them")

    def _release_after_last_step(self, instance: dg.DagsterInstance, run_id: str, *, has_failed: bool) -> None:
        """End each shared pool that no step to come may use, after this process has left it.

        If no step to come uses any, those of processes that were killed end too.
        """
        try:
            run = instance.get_run_by_id(run_id)
            keeps = self._terms.lifecycle.kept_seconds(1.0, has_failed=has_failed) and not self._is_stopped
            if run is None or keeps or not pools_of(run):
                return
            to_come = set[str]() if self._is_stopped else {family(key) for key in steps_to_come(instance, run_id)}
            left = [pool.id for spec, pool in self._current if pool.id and self._is_left(instance, spec, to_come)]
            released = release_each([one for one in left if one in pools_of(run)], self._provider)
            # another resource of the run may keep its pools after a failure
            are_all_ours = self._is_stopped or self._terms.sharing in OF_RUNS or KEEP_TAG not in run.tags
            if are_all_ours and not self._is_needed(instance, to_come, self._strangers or frozenset()):
                released += release_pools(run, self._provider)
            for pool_id in dict.fromkeys(released):
                self._has_released = True
                self.events.say(f"the last step that needs the pool {pool_id} has ended: it is released")
        except Exception:  # Dagster's storage fails: the pools end by their clocks, and no step fails
            _log.exception("it is not known whether other steps need the pools of the run: they end after keep_warm")

    def _is_left(self, instance: dg.DagsterInstance, spec: sky.PoolSpec, to_come: set[str]) -> bool:
        """Whether no step is to come that may use a pool that the run has named."""
        others = self._strangers_to.get(spec.name or "")
        return others is not None and not self._is_needed(instance, to_come, others)

    def _is_needed(self, instance: dg.DagsterInstance, to_come: set[str], others: frozenset[str]) -> bool:
        """Whether a step is to come that is none of the others: of this run, or of another one of its backfill."""
        if to_come - others:
            return True
        return self._sharing == "backfill" and self._run is not None and runs_to_come(instance, self._run, others)

    @property
    def _provider(self) -> sky.Provider | None:
        providers = self._terms.spec.providers
        if self._terms.credentials is not None:
            return self._terms.credentials
        return providers[0] if len(providers) == 1 else None

    def _has_failed_steps(self) -> bool:
        if self._instance is None or self._run is None:
            return False
        try:
            failed = failed_steps(self._instance, self._run.run_id)
        except Exception:
            _log.exception("it could not be read whether a step has failed")
            return False
        return any(step.work.task in failed for step in self._steps.values())

    def _settle(self) -> None:
        """Report what is in no metadata yet: the end of the machines, steps without outputs, the rest of the run.

        The machines are gone: an error here is only logged. The sensors of `upkeep` report what is missing then.
        """
        instance, run = self._instance, self._run
        if instance is None or run is None:
            return
        try:
            own = {step.work.task for step in self._steps.values() if step.work.task}
            settle(instance, run, own | ended_steps(instance, run.run_id) if self._has_released else own)
            report_rests(instance, [pool.id for spec, pool in self._current if spec.name is not None and pool.id])
        except Exception:  # Dagster's storage or the ledger fails; the ledger still has the whole bill
            _log.exception("the costs of the steps could not all be reported")

    # ── use ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _spec_for(self, context: StepContext | None, settings: Mapping[str, Any]) -> sky.PoolSpec:
        """The spec of the pool for a use: the resource's, with the tag of the step, then with the settings of the call.

        Raises BadRequest.
        """
        spec, own = (spec_of_use(self._terms.spec, context, its) for its in ({}, settings))
        if own != spec:
            return own
        self._decide(context, spec)
        return self._of_run(spec)

    def _decide(self, context: StepContext | None, spec: sky.PoolSpec) -> None:
        """Look, once for each spec, which steps of the run use its pool: so it is known who shares it, and until when.

        Several steps, each in a process of its own, share one; so does a run that goes on with another one's pools.
        """
        instance, run = self._instance, self._run
        if instance is None or run is None or context is None or step_key(context) is None:
            return
        with self._lock:
            if self._sharing is None:
                shares = is_alone(context) and (
                    planned_users(context, instance, strangers(context, spec)) > 1 or self._goes_on(instance, run)
                )
                self._sharing = "run" if shares else "step"
            if self._sharing not in OF_RUNS or spec.name is not None:
                return
            if (name := self._of_run(spec).name or "") not in self._strangers_to:
                self._strangers_to[name] = strangers(context, spec)
                self._strangers = strangers(context) if self._strangers is None else self._strangers

    @staticmethod
    def _goes_on(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
        """Whether the run is a re-execution of one whose steps have shared pools."""
        return run.parent_run_id is not None and bool(pools_of(instance.get_run_by_id(run.parent_run_id)))

    def _of_run(self, spec: sky.PoolSpec) -> sky.PoolSpec:
        if self._sharing not in OF_RUNS or self._run is None or spec.name is not None:
            return spec
        terms = self._terms
        group = group_of(self._run, self._sharing)
        return spec_of_run(spec, group, terms.keep_warm, terms.lifecycle.keep_on_failure)

    def _belongs_to(self, spec: sky.PoolSpec) -> sky.Work | None:
        """The run or backfill for which a pool got its name here; None for any other pool."""
        if self._run is None or self._sharing not in OF_RUNS:
            return None
        group = group_of(self._run, self._sharing)
        if not (spec.name or "").startswith(f"dagster/{group}/"):
            return None
        run = group if group.startswith(OF_BACKFILL) else self._run.run_id
        return sky.Work(system="dagster", workflow=self._run.job_name, run=run)

    def _pool_of(self, spec: sky.PoolSpec) -> sky.ComputePool | None:
        return next((pool for its, pool in tuple(self._current) if its == spec), None)

    @property
    def _run_work(self) -> sky.Work:
        run = self._run
        return sky.Work("dagster") if run is None else sky.Work("dagster", run.job_name, run.run_id)

    def _step_of(self, context: StepContext | None) -> Step:
        """The step of a context; None and contexts that were made by hand are no steps, and are for the run."""
        if context is None or step_key(context) is None:
            return self._steps.setdefault(context, Step(self._run_work))
        work = work_of(context)
        return self._steps.setdefault(work, Step(work))

    def _joined(self, spec: sky.PoolSpec, step: Step, context: StepContext | None) -> sky.PoolUse:
        """The step's use of the open pool of a spec.

        If the pool has closed itself, idle between two steps, a new one is opened: new machines, a new bill. It is
        opened or joined for the step if that is the only one of this process: then the calls of an earlier attempt end.
        """
        with self._lock:
            pool = self._pool_of(spec)
            if pool is not None and pool.is_active:
                use = step.use_of(pool)
            else:
                if pool is not None:
                    pool.hand_over()
                work = step.work if context is not None and is_alone(context) else self._run_work
                use = step.use_of(self._new_pool(spec, work))
                self._open(spec, use.pool)
            return use.open()

    def _new_pool(self, spec: sky.PoolSpec, work: sky.Work) -> sky.ComputePool:
        pool = sky.ComputePool.from_spec(
            spec,
            on_event=self.events.take,
            credentials=self._terms.credentials,
            replace_object=PLAIN.replace,
            work=work,
            belongs_to=self._belongs_to(spec),
        )
        self._current = [(its, one) for its, one in self._current if its != spec] + [(spec, pool)]
        return pool

    def _open(self, spec: sky.PoolSpec, pool: sky.ComputePool) -> None:
        self._watch_run()
        self._note_open()
        pool.open()
        self._tag_run(spec, pool)

    def _note(
        self, context: StepContext | None, step: Step, cost_before: float, used_before: float, queued_before: float
    ) -> Usage | None:
        """Set the step's metadata; return what this block has cost. None if nothing was rented."""
        pool, cost, used, queued = step.pool, step.cost_usd, step.time.used, step.time.queued
        if pool is None or not pool.id:
            return None
        block = Usage(
            cost - cost_before,
            _worked(used - used_before, queued - queued_before),
            pool.spec.most_nodes,
            pool.spec.accelerator_words or "none",
            (pool.id,),
            savings(pool, cost - cost_before),
            queue_seconds=queued - queued_before,
        )
        if context is None:
            return block
        block = replace(block, measured=step.numbers())
        whole = replace(
            block,
            cost_usd=cost,
            seconds=_worked(used, queued),
            queue_seconds=queued,
            pool_ids=tuple(one.id for one in tuple(step.uses) if one.id),
            savings_usd=savings(pool, cost),
            details=self.events.details(pool, step.utilisation),
        )
        record(context, self, whole)
        return block

    def _tag_run(self, spec: sky.PoolSpec, pool: sky.ComputePool) -> None:
        """Write on the run which pool its end releases."""
        if self._belongs_to(spec) is not None and spec.name and self._instance is not None and self._run is not None:
            keeps = bool(self._terms.lifecycle.kept_seconds(1.0, has_failed=True))
            settings = spec.name.rpartition("/")[2]
            is_of_backfill = group_of(self._run, self._sharing or "step").startswith(OF_BACKFILL)
            note_pool(
                self._instance,
                self._run.run_id,
                f"{OF_BACKFILL if is_of_backfill else ''}{settings}",
                pool.id,
                keeps=keeps,
            )

    def _note_open(self) -> None:
        """Before anything is rented: let the sensors of `upkeep` report what this process cannot, if it is killed."""
        if self._instance is not None and self._run is not None and not self._instance.is_ephemeral:
            try:
                note_open(self._instance, self._run.run_id)
            except Exception:  # Dagster's storage fails: the run will report that
                _log.exception("the run has no tag for its costs: no sensor reports them if this process is killed")

    def _watch_run(self) -> None:
        """Before anything is rented: watch the run, and end the pool when the run is over, or when the process that has
        started this step's process is gone.
        """
        if (
            self._watch is None
            and self._instance is not None
            and self._run is not None
            and not self._instance.is_ephemeral
        ):
            self._watch = RunWatch(self._instance, self._run.run_id, self._stop, self._observe_running)
            self._watch.start()

    def _observe_running(self) -> None:
        """Called in the watch's thread, every second."""
        for context, step in tuple(self._running.items()):
            if (pool := step.pool) is not None:
                if step.time.note_waiting(is_waiting=(is_waiting := step.is_waiting)):
                    self.events.waits(context, is_waiting=is_waiting)
                self.events.live(context, functools.partial(step.running, pool))

    def _stop(self, why: str) -> None:
        """Called in the watch's thread: hands the machines' end to the reaper first, in case this process is killed."""
        _log.warning("%s: the pool is ended, and the step with it", why)
        self._is_stopped = True
        for _, pool in tuple(self._current):
            pool.terminate_now()
        interrupt_step()


def _worked(used: float, queued: float) -> float:
    return max(0.0, used - queued)
