"""The pools of one process that runs steps: one for each set of settings that its steps ask for."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import dagster as dg

import skyward_core as sky
from dagster_skyward.backfills import OF_BACKFILL, group_of, runs_to_come
from dagster_skyward.final_errors import refuse_retries
from dagster_skyward.lifecycle import OF_RUNS, Lifecycle, spec_of_run, spec_of_step
from dagster_skyward.metadata import StepContext, Usage, assets_of, is_alone, record, step_key, tags_of, work_of
from dagster_skyward.plain_values import PLAIN
from dagster_skyward.run_steps import ended_steps, failed_steps, note_pool, release_pools, steps_to_come
from dagster_skyward.settlement import made_by, note_open, settle
from dagster_skyward.step_events import Listener, StepEvents
from dagster_skyward.step_log import Log
from dagster_skyward.step_report import savings
from dagster_skyward.watch import RunWatch, interrupt_step, step_of_process

SHARE_SECONDS = 20.0
"""How long the end of a process waits until the costs of its steps are in events. The sensors of `upkeep` write what is
missing then.
"""

_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a resource says of its pools: their settings, when they end, who shares them, and the provider with its
    credentials (None: those of this process). `keep_warm` is that of pools which get their names from runs, in seconds.
    """

    spec: sky.PoolSpec
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    sharing: str = "step"
    credentials: sky.Provider | None = field(default=None, repr=False)
    keep_warm: float = 0.0


@dataclass(slots=True)
class Use:
    """One use of a pool by a step. When it has ended, `usage` is what it has cost."""

    pool: sky.ComputePool
    listeners: list[Listener]
    usage: Usage | None = None


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
        self._began: WeakKeyDictionary[StepContext, float] = WeakKeyDictionary()
        """When each step began to use pools, on the monotonic clock."""
        self._uses: dict[str, dict[StepContext, tuple[float, float]]] = {}
        """The cost of each pool at a step's first use and at its last one, by the pools' ids."""
        self._pools: dict[str, sky.ComputePool] = {}
        """All pools that were opened, by their ids."""
        self._has_released = False
        """Whether this process has ended the pools of the run."""
        self._strangers: set[str] = set()
        """The steps of the run that are known not to use the resource."""
        self._running: WeakKeyDictionary[StepContext, tuple[sky.ComputePool, float]] = WeakKeyDictionary()
        """The pool that each step uses now, and its cost before this use."""
        self._is_stopped = False
        self._has_failed = False

    def open_eagerly(self) -> None:
        """Open the pool of the resource's own settings before the first step."""
        run = self._run
        step = "" if run is None or self._instance is None else step_of_process(self._instance, run.run_id)
        work = sky.Work("dagster", *(("", "") if run is None else (run.job_name, run.run_id)), task=step)
        self._opened(self._of_run(self._terms.spec), work, None)

    @contextmanager
    def used_by(self, context: StepContext | None) -> Generator[Use]:
        """Open the step's pool if it is not open, and record the cost of this use.

        A step that is being stopped hands the machines' end to the pool's reaper, because its process may be killed
        before the provider has answered.
        """
        began = time.monotonic()
        if context is not None:
            self.events.begin(context)
            self._began.setdefault(context, began)
        tags = {} if context is None else tags_of(context)
        spec = self._of_run(spec_of_step(self._terms.spec, tags))
        known = self._pool_of(spec)
        before = known.id if known is not None and known.is_active else ""
        cost = self._cost(known) if known is not None and before else 0.0
        use: Use | None = None
        try:
            use = Use(self._opened(spec, self._work(spec, context), context), self.events.listeners)
            if use.pool.id != before:  # the cost of an opening is that of the step that has opened it
                cost = 0.0
            if context is not None:
                self._running[context] = (use.pool, cost)
                self.events.opened()
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
            pool = self._pool_of(spec)
            try:
                if pool is not None and pool.id:
                    usage = self._note(context, pool, cost if use is not None else 0.0, began)
                    if use is not None:
                        use.usage = usage
                if context is not None:
                    self.events.used(context)
                self.events.flush()
            except Exception:  # the step's result, or its own error, is more important
                _log.exception("what the step has cost could not all be noted")

    def close(self) -> None:
        """End or leave the pools, and divide the bill among the steps.

        Unconfirmed machines are in the run's log, and the reaper asks again: they fail no step.
        """
        self.events.resource_only()
        if self._watch is not None:
            self._watch.close()
        with self._lock:
            try:
                self._end_all()
            finally:
                sky.after_the_work("the costs of the steps", self._share_out, _log.warning, seconds=SHARE_SECONDS)
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
        if self._terms.sharing in OF_RUNS and self._instance is not None and self._run is not None:
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
        """End the shared pools if no step comes that may use them, after this process has left them."""
        try:
            keeps = self._terms.lifecycle.kept_seconds(1.0, has_failed=has_failed) and not self._is_stopped
            if not keeps and not self._is_needed(instance, run_id):
                self._has_released = True
                for pool_id in release_pools(instance.get_run_by_id(run_id), self._provider):
                    self.events.say(f"the last step that needs the pool {pool_id} has ended: it is released")
        except Exception:  # Dagster's storage fails: the pools end by their clocks, and no step fails
            _log.exception("it is not known whether other steps need the pools of the run: they end after keep_warm")

    def _is_needed(self, instance: dg.DagsterInstance, run_id: str) -> bool:
        """Whether a step is to come that may use the shared pools: of this run, or of another one of its backfill."""
        if not self._is_stopped and steps_to_come(instance, run_id) - self._strangers:
            return True
        return (
            self._terms.sharing == "backfill"
            and self._run is not None
            and runs_to_come(instance, self._run, self._strangers)
        )

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
        return any(step_key(step) in failed for uses in self._uses.values() for step in uses)

    def _share_out(self) -> None:
        """Write the shares of the steps of this process into the ledger, and report what is in no metadata yet.

        The machines are gone: an error here is only logged. The sensors of `upkeep` report what is missing then.
        """
        instance, run = self._instance, self._run
        if instance is None or run is None or not self._uses:
            return
        try:
            made = made_by(instance, run.run_id)
            for pool in self._pools.values():
                if shares := self._shares(pool, made):
                    pool.share_cost(shares)
            own = {key for uses in self._uses.values() for step in uses if (key := step_key(step)) is not None}
            settle(instance, run, own | ended_steps(instance, run.run_id) if self._has_released else own)
        # Dagster's storage or the ledger fails; the ledger still has the whole bill
        except Exception:
            _log.exception("the shares of the bill could not all be recorded")

    def _shares(self, pool: sky.ComputePool, made: Mapping[str, set[dg.AssetKey]]) -> dict[sky.Work, float]:
        """Each step's part of a pool's bill, for the ledger: the growth of the cost while the step used the pool, and
        of a pool without a name a proportional part of the rest. It goes equally to the assets of the step.

        The one step of a process needs none for a pool with a name: it has joined the pool with its own work.
        """
        costs = {
            step: last - first
            for step, (first, last) in self._uses.get(pool.id, {}).items()
            if step_key(step) is not None
        }
        if not costs or (pool.spec.name is not None and pool.work.task):
            return {}
        used = sum(costs.values())
        rest = 0.0 if pool.spec.name is not None else max(0.0, pool.cost - used)
        shares: defaultdict[sky.Work, float] = defaultdict(float)
        for step, cost in costs.items():
            due = cost + rest * (cost / used if used else 1 / len(costs))
            assets = sorted(made.get(step_key(step) or "", ())) or assets_of(step)
            for name in [asset.to_user_string() for asset in assets] or [""]:
                shares[sky.Work.of({**work_of(step).labels(), "asset": name})] += due / (len(assets) or 1)
        return dict(shares)

    # ── use ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _of_run(self, spec: sky.PoolSpec) -> sky.PoolSpec:
        if self._terms.sharing not in OF_RUNS or self._run is None or spec.name is not None:
            return spec
        terms = self._terms
        group = group_of(self._run, terms.sharing)
        return spec_of_run(spec, group, terms.keep_warm, terms.lifecycle.keep_on_failure)

    def _belongs_to(self, spec: sky.PoolSpec) -> sky.Work | None:
        """The run or backfill for which a pool got its name here; None for any other pool."""
        if self._run is None or self._terms.sharing not in OF_RUNS:
            return None
        group = group_of(self._run, self._terms.sharing)
        if not (spec.name or "").startswith(f"dagster/{group}/"):
            return None
        run = group if group.startswith(OF_BACKFILL) else self._run.run_id
        return sky.Work(system="dagster", workflow=self._run.job_name, run=run)

    def _pool_of(self, spec: sky.PoolSpec) -> sky.ComputePool | None:
        return next((pool for its, pool in tuple(self._current) if its == spec), None)

    def _work(self, spec: sky.PoolSpec, context: StepContext | None) -> sky.Work:
        """The work for which a pool is opened or joined.

        The ledger splits the cost of a pool with a name among processes. So one that runs several steps has the run as
        its work, and writes the shares of the steps at the end.
        """
        work = work_of(context)
        if spec.name is None or (context is not None and is_alone(context)):
            return work
        return sky.Work(system=work.system, workflow=work.workflow, run=work.run)

    def _cost(self, pool: sky.ComputePool) -> float:
        """Return what this process pays for a pool so far, in USD: of a pool with a name, its part by the ledger."""
        if pool.spec.name is None:
            return pool.cost
        try:
            if pool.is_active:
                pool.note_cost()
            own = [part for part in sky.cost_parts(pool.work) if (part.pool_id, part.work) == (pool.id, pool.work)]
        except sky.SkywardError as error:
            _log.warning("the cost of the pool %s could not be read: %s", pool.id, error)
            return 0.0
        return float(sum(part.cost_usd for part in own))

    def _note(self, context: StepContext | None, pool: sky.ComputePool, cost_before: float, began: float) -> Usage:
        spec = pool.spec
        cost = sky.after_the_work("the cost of the step", lambda: self._cost(pool), _log.warning) or 0.0
        accelerator = str(spec.accelerator or "none")
        grown = max(0.0, cost - cost_before)
        seconds = time.monotonic() - began
        usage = Usage(grown, seconds, spec.most_nodes, accelerator, (pool.id,), savings(pool, grown))
        if context is None:
            return usage
        report = self.events.of_step(context)
        usage = replace(usage, measured=report.numbers())
        self._pools[pool.id] = pool
        its = self._uses.setdefault(pool.id, {})
        its[context] = (its.get(context, (cost_before, 0.0))[0], max(cost, cost_before))
        used = {
            pool_id: last - first
            for pool_id, uses in self._uses.items()
            for step, (first, last) in uses.items()
            if step is context
        }
        total = replace(
            usage,
            cost_usd=sum(used.values()),
            seconds=time.monotonic() - self._began[context],
            pool_ids=tuple(used),
            savings_usd=savings(pool, sum(used.values())),
            details=self.events.details(context, pool),
        )
        record(context, self, total)
        return usage

    def _opened(self, spec: sky.PoolSpec, work: sky.Work, context: StepContext | None) -> sky.ComputePool:
        """The open pool of a spec.

        If it has closed itself, idle between two steps, a new one is opened: new machines, a new bill.
        """
        with self._lock:
            pool = self._pool_of(spec)
            if pool is None or not pool.is_active:
                if pool is not None:
                    pool.hand_over()
                pool = sky.ComputePool.from_spec(
                    spec,
                    on_event=self.events.take,
                    credentials=self._terms.credentials,
                    replace_object=PLAIN.replace,
                    work=work,
                    belongs_to=self._belongs_to(spec),
                )
                self._current = [(its, one) for its, one in self._current if its != spec] + [(spec, pool)]
                self._watch_run()
                self._note_open()
                pool.open()
                self._tag_run(spec, pool)
            if context is not None and not self._strangers:
                self._strangers = _strangers(context)
            return pool

    def _tag_run(self, spec: sky.PoolSpec, pool: sky.ComputePool) -> None:
        """Write on the run which pool its end releases."""
        if self._terms.sharing in OF_RUNS and spec.name and self._instance is not None and self._run is not None:
            keeps = bool(self._terms.lifecycle.kept_seconds(1.0, has_failed=True))
            settings = spec.name.rpartition("/")[2]
            is_of_backfill = group_of(self._run, self._terms.sharing).startswith(OF_BACKFILL)
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
        for context, (pool, cost_before) in tuple(self._running.items()):
            seconds = time.monotonic() - self._began[context]
            self.events.live(context, pool, seconds, lambda pool=pool, before=cost_before: self._cost(pool) - before)

    def _stop(self, why: str) -> None:
        """Called in the watch's thread: hands the machines' end to the reaper first, in case this process is killed."""
        _log.warning("%s: the pool is ended, and the step with it", why)
        self._is_stopped = True
        for _, pool in tuple(self._current):
            pool.terminate_now()
        interrupt_step()


def _strangers(context: StepContext) -> set[str]:
    """Return the keys of the steps of the run that list no `SkywardResource`."""
    try:
        step: Any = getattr(context, "op_execution_context", context).get_step_execution_context()
        job = step.job_def
        ours = {
            name
            for name, definition in job.resource_defs.items()
            if getattr(getattr(definition, "configurable_resource_cls", None), "is_skyward", False)
        }
        return {
            one.key
            for one in step.execution_plan.step_dict_by_key.values()
            if not ours & set(job.get_op(one.node_handle).definition.required_resource_keys)
        }
    except (dg.DagsterError, AttributeError):  # a context that was made by hand
        return set()
