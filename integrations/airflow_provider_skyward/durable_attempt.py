"""One execution of a task whose call outlives its worker: the next try adopts it.

The pool has a name, the call is detached and has an id; both are written into Airflow's task state store before
anything is rented (`generations.py`, docs/decisions/0033). As in `TaskAttempt`, only the main thread talks to Airflow,
with the one exception that is named there.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowRuntimeError

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import known_level
from airflow_provider_skyward.bills import costs_of
from airflow_provider_skyward.generations import STATE_KEY, Generation, Phase, begun, may_adopt, pool_name_of
from airflow_provider_skyward.pool_keywords import PLACEHOLDER
from airflow_provider_skyward.retry import fails_for_good
from airflow_provider_skyward.stop_order import order_stop
from airflow_provider_skyward.task_attempt import Killed, TaskAttempt
from airflow_provider_skyward.task_log import alarm_waits, lines_for_log

if TYPE_CHECKING:
    from airflow.sdk import Context

LOOK_SECONDS = 0.5
"""The pause between two looks at the calls."""
CURSOR_SECONDS = 2.0
"""The pause between two writes of the cursors: a try that adopts the call repeats the lines of this time, at most."""
RESULT_SECONDS = 600.0
LONGEST_LEASE_SECONDS = 3600.0
HEARTBEAT_SECONDS = 300.0
"""Airflow's `task_instance_heartbeat_timeout`, after which it counts a silent worker as dead."""
ORPHAN_SECONDS = 0.5
CANCEL_SECONDS = 3.0
"""Less than the five seconds that Airflow gives a task between SIGTERM and SIGKILL."""
ENDED = frozenset({"ended", "cancelled", "lost", "forgotten"})


class DurableAttempt(TaskAttempt):
    """The pool and the detached calls of one execution.

    `retry_seconds` is when the next try may begin, None if this is the last one. `has_policy`: the task has its own
    policy for retries.
    """

    def __init__(self, log: Any, context: Context, retry_seconds: float | None, *, has_policy: bool = False) -> None:
        super().__init__(log, context)
        self._has_policy = has_policy
        self._states: Any = context["task_state_store"]  # type: ignore[typeddict-item] - Airflow 3.3
        self._retry_seconds = retry_seconds
        self._generation: Generation | None = None
        self._supervisor = os.getppid()
        self._has_adopted = False
        self._cleared: Generation | None = None
        """The generation that a user has cleared, if its calls may run still."""

    # ── run ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, spec: sky.PoolSpec, calls: Sequence[sky.PendingCompute[Any]]) -> list[Any]:
        """Return the results of the calls, which an earlier try may have begun. Raises what `TaskAttempt.run` does."""
        if not calls:
            return []
        self._owns_pool = spec.name is None or spec.name == PLACEHOLDER
        self._wanted_calls = len(calls)
        name = pool_name_of(self._work) if self._owns_pool else str(spec.name)
        mine, adopted = self._begin(name)
        spec = spec.with_(name=name, lease_seconds=self._lease_seconds(spec))
        if not self._owns_pool:
            self.progress.live_cost = self._cost_so_far
        is_to_stay_warm = has_results = False
        try:
            self._open_or_adopt(spec, adopted)
            if self._cleared is not None and self._pool is not None:  # on a pool that goes on
                self._cancel(self._pool, self._cleared)
            if adopted is None or self._pool_id() != adopted.pool_id:
                if adopted is not None:
                    self._log.warning("the pool of try %d is gone, and so is its call: it begins again", adopted.number)
                adopted = None
                self._generation = replace(mine, pool_id=self._pool_id())
            with self._phases.phase("call", pool_id=self._pool_id()), self._calls_running(len(calls)):
                results = self._results(self._started(calls, adopted))
                has_results = True
                return results
        except Exception as error:
            self._note_orphaned(error)
            may_retry = self._retry_seconds is not None
            is_to_stay_warm = may_retry and not fails_for_good(error, has_policy=self._has_policy)
            raise
        finally:
            # an orphan leaves the pool to its lease, as a process that is killed, and the next try adopts it
            if not self.is_orphan or self._retry_seconds is None:
                self._leave(is_to_stay_warm=is_to_stay_warm, has_results=has_results)

    @contextmanager
    def _calls_running(self, count: int) -> Generator[None]:
        """Count the samples of the nodes meanwhile as those of calls: a pool says nothing of detached calls itself."""
        with self._writing:
            self.progress.calls_run(count)
        try:
            yield
        finally:
            with self._writing:
                self.progress.calls_run(0)

    def _begin(self, pool_name: str) -> tuple[Generation, Generation | None]:
        """Return the generation that this try would begin, and the one of an earlier try whose call may be adopted."""
        before = self._stored()
        mine = self._new_generation(pool_name)
        adopted = before if may_adopt(before, self._work, pool_name) else None
        if adopted is not None and adopted.is_cleared(mine.max_tries):
            self._log.info("the task was cleared while try %d ran: it begins again", adopted.number)
            if self._owns_pool:
                self._end_lost(adopted)
            self._cleared, adopted = adopted, None
        self._remember(adopted or mine)
        self._log.info("pool %s, call %s", pool_name, (adopted or mine).call_id)
        return mine, adopted

    def _new_generation(self, pool_name: str) -> Generation:
        max_tries = getattr(self._task_instance, "max_tries", None)
        return begun(self._work, int(self._task_instance.try_number), pool_name, max_tries)

    def _end_lost(self, before: Generation) -> None:
        """End what may be left of a pool that is not adopted: its call must not run beside the next one.

        Raises what `sky.release` raises, and Unreachable if the machines are elsewhere. Then nothing is rented, and the
        next try does the same again.
        """
        try:
            with self._interruptible():
                sky.release(before.pool_id, credentials=self.credentials)
        except sky.BadRequest as error:
            costs = costs_of(self._work, self._log)
            if costs is None or before.pool_id in {one.pool_id for one in costs}:
                raise sky.Unreachable(f"the machines of try {before.number} are elsewhere: {error}") from error
            self._log.warning("nothing is known of the pool of try %d: %s", before.number, error)
        self._log.warning("the pool of try %d is ended, and so is its call: it begins again", before.number)

    def _lease_seconds(self, spec: sky.PoolSpec) -> float:
        """Return for how long the nodes live without a worker: until the next try can have adopted the call."""
        if self._retry_seconds is None or "lease_seconds" in spec.model_fields_set:
            return spec.lease_seconds
        return min(LONGEST_LEASE_SECONDS, spec.lease_seconds + HEARTBEAT_SECONDS + self._retry_seconds)

    def _open_or_adopt(self, spec: sky.PoolSpec, adopted: Generation | None) -> None:
        belongs_to = self._work if self._owns_pool else self.pool_work
        try:
            self._open(self._pool_of(spec, belongs_to).open)
        except sky.BadRequest as error:
            if adopted is None or not self._owns_pool:
                raise
            self._log.warning("the settings have changed since try %d; its pool is ended: %s", adopted.number, error)
            sky.release(adopted.pool_id, credentials=self.credentials)
            self._open(self._pool_of(spec, belongs_to).open)

    def _started(
        self, calls: Sequence[sky.PendingCompute[Any]], adopted: Generation | None
    ) -> list[sky.DetachedCall[Any]]:
        """Begin the calls, or adopt those of an earlier try. The state says so before and after it."""
        pool, generation = self._pool, self._generation
        assert pool is not None
        assert generation is not None
        if len(generation.cursors) != len(calls):
            generation = replace(generation, cursors=(0,) * len(calls))
        ids = generation.call_ids(len(calls))
        if adopted is not None and adopted.phase is Phase.STARTED:
            try:
                with self._interruptible():
                    started = [pool.detached_call(call_id) for call_id in ids]
            except sky.BadRequest:  # the head was lost with its records, or a template gave another number of items
                self._log.warning(
                    "the pool does not know the calls of try %d any more: they begin again", adopted.number
                )
                generation = replace(self._new_generation(generation.pool_name), pool_id=pool.id)
                generation = replace(generation, cursors=(0,) * len(calls))
                ids = generation.call_ids(len(calls))
            else:
                self._note_adoption(adopted)
                self._calls = len(started)
                return started
        self._remember(replace(generation, phase=Phase.STARTING))
        with self._interruptible():
            started = [
                pool.start_detached(call, call_id=call_id, owner=str(self._work)[:500])
                for call, call_id in zip(calls, ids, strict=True)
            ]
        self._remember(replace(generation, phase=Phase.STARTED))
        if adopted is not None and not all(call.is_new for call in started):
            self._note_adoption(adopted)
        self._calls = len(started)
        return started

    def _note_adoption(self, adopted: Generation) -> None:
        self._has_adopted = True
        lines = sum(adopted.cursors)
        self._log.info("adopted the call that try %d has begun; its log goes on after line %d", adopted.number, lines)

    # ── follow ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _results(self, calls: Sequence[sky.DetachedCall[Any]]) -> list[Any]:
        assert self._generation is not None
        cursors = list(self._generation.cursors)
        if len(cursors) != len(calls):
            cursors = [0] * len(calls)
        results: dict[int, Any] = {}
        saved_at = time.monotonic()
        while len(results) < len(calls):
            for number, call in enumerate(calls):
                if number in results:
                    continue
                if self._write_lines(number, call, cursors).has_ended:
                    results[number] = self._result(number, call, cursors)
            if time.monotonic() - saved_at > CURSOR_SECONDS and tuple(cursors) != self._generation.cursors:
                self._note_lines(replace(self._generation, cursors=tuple(cursors)))
                saved_at = time.monotonic()
            if len(results) < len(calls):
                self._drain()
        return [results[number] for number in range(len(calls))]

    def _result(self, number: int, call: sky.DetachedCall[Any], cursors: list[int]) -> Any:
        try:
            return self._asked(lambda: call.result(RESULT_SECONDS))
        except Exception as error:
            if len(cursors) > 1:
                error.add_note(f"in call {number + 1} of {len(cursors)} (map_over)")
            raise
        finally:
            if not self._is_killed:
                with suppress(sky.SkywardError):
                    self._write_lines(number, call, cursors)

    def _write_lines(self, number: int, call: sky.DetachedCall[Any], cursors: list[int]) -> sky.CallNews:
        news = self._asked(lambda: call.follow(cursors[number]))
        cursors[number] = news.cursor
        for level, line in lines_for_log(news):
            self._log.log(known_level(level), "%s", line)
        return news

    def _asked[R](self, ask: Callable[[], R]) -> R:
        """Return an answer of the pool; a kill interrupts the wait for it."""
        try:
            with self._interruptible():
                return ask()
        except sky.SkywardError:
            if self._is_killed:  # the error is the end of the machines, which the kill has ordered
                raise Killed from None
            raise

    def _drain(self) -> None:
        """Write the events of the next moment to the task log. Raises Killed and SupervisorGone."""
        self._refuse_without_supervisor()
        deadline = time.monotonic() + LOOK_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if self._is_killed:
                raise Killed
            try:
                message = self._inbox.get(timeout=left)
            except queue.Empty:
                return
            with self._writing:
                self._write(message)
            self.progress.tick()

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """As `TaskAttempt.kill`. The reaper of a pool with a name does not end it, so another process gets the order;
        a SIGKILL to this process group does not end that one.
        """
        self._is_killed = True
        if self._pool is not None:
            self._pool.terminate_now()
        if self._owns_pool and (order := self._stop_order()):
            order_stop(order, self.credentials)
        self._inbox.put(None)
        if self._is_interruptible:
            raise Killed

    def _stop_order(self) -> str:
        """Return what `skyward stop` is to end."""
        return "" if self._pool is None else str(self._pool.spec.name)

    def end_generation(self) -> None:
        """Write that the generation has ended: no later try adopts its call. The last thing that an execution does."""
        if self._generation is not None and self._generation.phase is not Phase.ENDED:
            try:
                self._remember(replace(self._generation, phase=Phase.ENDED))
            except Exception:  # the pool is closed, so no later try can adopt the call
                self._log.exception("the end of the generation could not be stored")

    def _leave(self, *, is_to_stay_warm: bool, has_results: bool) -> None:
        pool = self._pool
        if pool is None:
            return
        goes_on = not self._owns_pool or bool(is_to_stay_warm and pool.spec.keep_warm)
        if goes_on and not has_results:  # the next try begins its own call
            self._cancel(pool, self._generation)
        is_left = pool.spec.keep_warm or self._has_adopted or self._is_killed
        self._end(pool.hand_over, pool.id if is_left and not goes_on else "")

    def _note_orphaned(self, error: BaseException) -> None:
        """Note whether the supervisor of this process is dead. Then Airflow starts the next try, which adopts the call:
        this process must end neither call nor pool.

        Its requests and its log fail a moment before it has another parent.
        """
        deadline = time.monotonic() + (ORPHAN_SECONDS if isinstance(error, (OSError, EOFError)) else 0.0)
        while os.getppid() == self._supervisor and time.monotonic() < deadline:
            time.sleep(0.01)
        self.is_orphan = os.getppid() != self._supervisor

    def _first_try(self) -> int:
        """Return the number of the try that has begun the generation: its calls outlive it."""
        mine = super()._first_try()
        return mine if self._generation is None else min(mine, self._generation.number)

    def _cost_so_far(self) -> float | None:
        """Return what the calls have cost so far, in USD, by the ledger; None if that is not known."""
        with self._interruptible():
            costs = costs_of(self._work, self._log)
        return None if costs is None else self._bill(costs)["cost_usd"]

    def _cancel(self, pool: sky.ComputePool, generation: Generation | None) -> None:
        """End the calls, and wait for a moment until they have ended: then the ledger has what they have cost."""
        calls: list[sky.DetachedCall[Any]] = []
        if generation is not None and generation.phase in {Phase.STARTING, Phase.STARTED}:
            for call_id in generation.call_ids(len(generation.cursors)):
                with suppress(sky.SkywardError):
                    calls.append(pool.detached_call(call_id))
                    calls[-1].cancel()
        deadline = time.monotonic() + CANCEL_SECONDS
        with suppress(sky.SkywardError):
            while any(call.state not in ENDED for call in calls) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _pool_id(self) -> str:
        return "" if self._pool is None else self._pool.id

    def _note_lines(self, generation: Generation) -> None:
        """Store which lines are in the log. The call goes on if that fails: a try that adopts it repeats lines."""
        try:
            self._remember(generation)
        except AirflowRuntimeError as error:
            if not _is_away(error):
                raise
            self._log.warning("Airflow's api-server is away; the call goes on: %s", error)

    def _stored(self) -> Generation | None:
        with alarm_waits():
            return Generation.of(self._states.get(STATE_KEY))

    def _remember(self, generation: Generation) -> None:
        """Write the state. A kill waits until it is written."""
        with alarm_waits():
            self._states.set(STATE_KEY, generation.to_json())
            self._generation = generation
        if self._is_killed and generation.phase is not Phase.ENDED:
            raise Killed


def _is_away(error: AirflowRuntimeError) -> bool:
    """Return whether the api-server could not be reached, or has failed, as while it is restarted."""
    status = (error.error.detail or {}).get("status_code")
    return error.error.error.value == "API_SERVER_ERROR" and (status is None or status >= 500)


def can_store(context: Context) -> bool:
    """Return whether Airflow can store the state of this task: from 3.3 on."""
    return context.get("task_state_store") is not None
