"""The steps of a run as calls on pools: the part of `skyward_executor` that Dagster's `StepDelegatingExecutor` asks.

Each step is a call that runs `dagster api execute_step` on a node. The events of a step go from there to Dagster's
storage; here is only known whether its call still runs (docs/decisions/0041).
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import dagster as dg

# no public name has what a step handler needs
from dagster._core.events import DagsterEvent, EngineEventData
from dagster._core.executor.step_delegating import CheckStepHealthResult, StepHandler, StepHandlerContext
from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager

import skyward_core as sky
from dagster_skyward.lifecycle import spec_of_step
from dagster_skyward.on_node import function_on_node
from dagster_skyward.settlement import note_open, settle
from dagster_skyward.step_log import LogWriter

TERMINATION_SECONDS = 4.0
"""For how long the ends of stopped steps are waited for; after two seconds their processes are killed."""
TEARDOWN_SECONDS = 60.0
"""For how long the processes of steps that have ended are waited for."""
LOOK_SECONDS = 0.1
LAST_LINES = 15
ENDS = {
    dg.DagsterEventType.STEP_SUCCESS,
    dg.DagsterEventType.STEP_FAILURE,
    dg.DagsterEventType.STEP_UP_FOR_RETRY,
    dg.DagsterEventType.STEP_SKIPPED,
}

_log = logging.getLogger("skyward")

type Started = Future[sky.CallFuture[None]]
"""The future of the call, as soon as there is a pool for it."""


@dataclass(slots=True)
class StepCall:
    """The newest call of a step. `attempt` counts the calls that this process has made for the step."""

    started: Started
    attempt: int

    @property
    def _has_call(self) -> bool:
        """Whether there was a pool for it."""
        return self.started.done() and not self.started.cancelled() and self.started.exception() is None

    @property
    def is_done(self) -> bool:
        """Whether it is not waited for any more."""
        return self.started.done() and (not self._has_call or self.started.result().done())

    @property
    def may_run(self) -> bool:
        """Whether its step's process may still run: the call has begun, and has not ended by itself."""
        return self._has_call and (not self.started.result().done() or self.started.result().cancelled())

    @property
    def id(self) -> str:
        """The id of the call; "" for one that has not begun."""
        return self.started.result().call_id if self._has_call else ""

    @property
    def error(self) -> BaseException | None:
        """Why it has ended, unless its step's process has ended properly. For one that is done."""
        if self.started.cancelled():
            return sky.PoolClosed("the call was stopped before it began")
        if (error := self.started.exception()) is not None:
            return error
        call = self.started.result()
        return sky.PoolClosed("the call was stopped") if call.cancelled() else call.exception()

    def stop(self) -> None:
        """Stop the call, or do not begin it."""
        if not self.started.cancel() and self._has_call:
            self.started.result().cancel()


class StepPool:
    """One pool for all steps that want the same settings. It opens in its own thread, when the first step comes, so
    that a run can be terminated meanwhile.
    """

    def __init__(self, spec: sky.PoolSpec, work: sky.Work, on_event: sky.Callback) -> None:
        self._spec = spec
        self._work = work
        self._on_event = on_event
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skyward-dagster-steps")
        self._lock = threading.Lock()
        self._is_stopped = False
        self._pool: sky.ComputePool | None = None

    def start(self, pending: sky.PendingCompute[None], work: sky.Work) -> Started:
        """Submit the call of a step as soon as the pool is open."""
        return self._thread.submit(self._started, pending, work)

    def stop(self) -> None:
        """Rent no more machines; hand the end of a pool without a name to its reaper: this process may be killed."""
        with self._lock:
            self._is_stopped = True
            pool = self._pool
        if pool is not None and (pool.spec.name is None or not pool.is_active):
            pool.terminate_now()

    def close(self) -> None:
        """End the pool, or leave it if it has a name, and so the uses of its steps.

        Unconfirmed machines are reported and left to the reaper.
        """
        self._thread.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.hand_over()

    def _started(self, pending: sky.PendingCompute[None], work: sky.Work) -> sky.CallFuture[None]:
        pool = self._pool
        if pool is None or not pool.is_active:  # it has ended itself, idle or at a limit
            if pool is not None:
                pool.hand_over()
            with self._lock:
                if self._is_stopped:
                    raise sky.PoolClosed("the run has ended")
                pool = self._pool = sky.ComputePool.from_spec(self._spec, on_event=self._on_event, work=self._work)
            pool.open()
            if self._is_stopped:
                raise sky.PoolClosed("the run has ended")
        return sky.PoolUse(pool, work, is_alone=False).open().submit(pending)


class StepCalls(StepHandler):
    """Starts, watches and stops the calls of one run's steps. It owns their pools until `close`."""

    def __init__(self, spec: sky.PoolSpec) -> None:
        self._spec = spec
        self._pools: dict[str, StepPool] = {}
        self._calls: dict[str, StepCall] = {}
        self._narrator = sky.Narrator()
        self._log_writer = LogWriter()
        self._instance: dg.DagsterInstance | None = None
        self._run_id = ""
        self._run_log: dg.DagsterLogManager | None = None
        self._last_lines: dict[str, deque[str]] = {}
        """What each call has printed last, by its id: a process that fails early has written it nowhere else."""
        self._has_output = False
        """Whether what a step prints on a node is in its own logs."""

    @property
    def name(self) -> str:
        """What Dagster's log calls it."""
        return "SkywardStepHandler"

    def begin(self, instance: dg.DagsterInstance, run_id: str, log: dg.DagsterLogManager) -> None:
        """Take the run's log for what happens to the pools, and its events for the ends of its steps."""
        self._instance, self._run_id, self._run_log = instance, run_id, log
        note_open(instance, run_id)
        is_seen_by_nodes = not isinstance(instance.compute_log_manager, LocalComputeLogManager)
        providers = self._spec.providers
        self._has_output = is_seen_by_nodes or (bool(providers) and all(provider.is_local for provider in providers))

    def launch_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        """Start the call of one step, and return at once."""
        key = _step_key(step_handler_context)
        before = self._calls.get(key)
        args = step_handler_context.execute_step_args
        env = {one["name"]: one["value"] for one in args.get_command_env()}
        pending = sky.PendingCompute(function_on_node("step_node", "run_step"), (key, env, os.getcwd()), {})
        attempt = 1 if before is None else before.attempt + 1
        try:
            started = self._pool_of(step_handler_context, key).start(pending, _work(step_handler_context, key, attempt))
        except sky.BadRequest as error:  # the tag `skyward/config` of the step
            started = Future()
            started.set_exception(error)
        self._calls[key] = StepCall(started, attempt)
        yield DagsterEvent.step_worker_starting(
            step_handler_context.get_step_context(key), f'The step "{key}" is a call on a pool.', metadata={}
        )

    def check_step_health(self, step_handler_context: StepHandlerContext) -> CheckStepHealthResult:
        """Return whether the step's call runs, or its end is in the log."""
        key = _step_key(step_handler_context)
        call = self._calls.get(key)
        if call is None:
            return CheckStepHealthResult.unhealthy(
                "it was started by an earlier process of the run, whose pool is gone"
            )
        if not call.is_done or self._ends(key) >= call.attempt:
            return CheckStepHealthResult.healthy()
        why = "its process has ended, and has written no end of the step"
        if (error := call.error) is not None:
            why = f"{type(error).__name__}: {error}"
        return CheckStepHealthResult.unhealthy("\n".join([why, *self._last_lines.get(call.id, ())]))

    def terminate_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        """Stop the step's call: its process is interrupted, and killed after two seconds."""
        key = _step_key(step_handler_context)
        yield DagsterEvent.engine_event(
            step_handler_context.get_step_context(key), "The call of the step is stopped.", EngineEventData()
        )
        if (call := self._calls.get(key)) is not None:
            call.stop()

    def stop(self) -> None:
        """Stop all calls, and rent no more machines."""
        running = {key: call.attempt for key, call in tuple(self._calls.items()) if call.may_run}
        for call in tuple(self._calls.values()):
            call.stop()
        self._wait_for_ends(running)
        for pool in tuple(self._pools.values()):
            pool.stop()

    def close(self) -> None:
        """End the pools; raise the first error after all have been asked.

        A step writes its end before its resources are torn down: so its process is waited for, for some seconds.
        """
        running = [call.started.result() for call in tuple(self._calls.values()) if call.id and not call.is_done]
        wait(running, TEARDOWN_SECONDS)
        errors: list[BaseException] = []
        for pool in self._pools.values():
            try:
                pool.close()
            except BaseException as error:
                errors.append(error)
        self._log_writer.close()
        self._report_costs()
        if errors:
            raise errors[0]

    def _report_costs(self) -> None:
        """Write each step's cost as observations. The sensor of `upkeep` writes what is missing then."""
        try:
            if self._instance is not None and (run := self._instance.get_run_by_id(self._run_id)) is not None:
                settle(self._instance, run)
        except Exception:
            _log.exception("the costs of the steps could not all be reported")

    def _pool_of(self, context: StepHandlerContext, key: str) -> StepPool:
        # Dagster's retry policy decides whether a step runs again; the engine runs no call twice
        spec = spec_of_step(self._spec, context.step_tags[key]).with_(retries=0)
        settings = spec.model_dump_json()
        if settings not in self._pools:
            self._pools[settings] = StepPool(spec, _work(context), self._log_event)
        return self._pools[settings]

    def _ends(self, key: str) -> int:
        """Return how often the step has ended, by the run's events."""
        assert self._instance is not None
        ends = self._instance.all_logs(self._run_id, of_type=ENDS)
        return sum(entry.step_key == key for entry in ends)

    def _wait_for_ends(self, running: Mapping[str, int]) -> None:
        """Wait until the stopped steps have written that they were interrupted, for some seconds at most."""
        deadline = time.monotonic() + TERMINATION_SECONDS
        try:
            while any(self._ends(key) < attempt for key, attempt in running.items()) and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
        except Exception:  # Dagster's storage fails: the machines must end all the same
            _log.exception("it could not be read whether the steps have ended")

    def _log_event(self, event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.LogLine) and event.call_id is not None:
            self._last_lines.setdefault(event.call_id, deque(maxlen=LAST_LINES)).append(event.line)
            if self._has_output:
                return
        line = self._narrator.tell(event)
        if line is not None and self._run_log is not None:
            self._log_writer.write(self._run_log, *line)


def _step_key(context: StepHandlerContext) -> str:
    keys = context.execute_step_args.step_keys_to_execute
    assert keys is not None  # Dagster's loop gives one
    return keys[0]


def _work(context: StepHandlerContext, key: str = "", attempt: int = 0) -> sky.Work:
    """Return what the ledger calls the run, or one try of a step."""
    run = context.dagster_run
    if not key:
        return sky.Work("dagster", workflow=run.job_name, run=run.run_id)
    outputs = context.get_step_context(key).step.step_outputs
    assets = sorted({one.asset_key.to_user_string() for one in outputs if one.asset_key is not None})
    return sky.Work(
        "dagster",
        workflow=run.job_name,
        run=run.run_id,
        task=key,
        attempt=str(attempt),
        asset=", ".join(assets),
        partition=run.tags.get("dagster/partition", ""),
    )
