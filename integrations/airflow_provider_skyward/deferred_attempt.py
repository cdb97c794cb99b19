"""One execution of a deferrable task: it begins the call for the trigger, or comes back for the result.

The pool has no name: it is detached, and the trigger and the last execution attach to it by its id. Nodes live by their
lease, which the trigger renews.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import skyward_core as sky
from airflow_provider_skyward.bills import costs_of, usd
from airflow_provider_skyward.durable_attempt import ENDED, DurableAttempt
from airflow_provider_skyward.generations import Generation, pool_name_of

UNATTENDED_SECONDS = 600.0
"""For how long nodes live without a trigger: while a triggerer is restarted, or the task waits for a worker."""
REACH_SECONDS = 60.0
"""For how long nodes that are out of reach are tried again, before the pool counts as lost."""
NEARLY_ALL = 0.9
"""A pool that has ended after this share of `max_cost` was ended by it: its nodes end a moment before."""


class DeferredAttempt(DurableAttempt):
    """The pool and the detached calls of one execution of a deferrable task."""

    _is_attached = False
    _ended_calls: Sequence[sky.DetachedCall[Any]] = ()

    def start(self, spec: sky.PoolSpec, calls: Sequence[sky.PendingCompute[Any]]) -> Generation:
        """Begin the calls, or adopt those of an earlier try, and leave the pool; return the generation to follow.

        If all adopted calls have ended, the pool is not left, and `results` comes next (`has_ended`). A pool that
        cannot be adopted is ended before another one is rented. After an exception the pool is ended.
        """
        self._wanted_calls = len(calls)
        mine, adopted = self._begin(pool_name_of(self._work))
        try:
            if adopted is not None and not self._attach(adopted.pool_id):
                self._end_lost(adopted)
                adopted = None
            if adopted is None:
                self._open(self._pool_of(spec.with_(name=None, keep_warm=0.0)).open)
                self._generation = replace(mine, pool_id=self._pool_id())
            started = self._started(calls, adopted)
            if self._has_adopted and self._have_ended(started):
                self._ended_calls = started
            else:
                self._leave_to_trigger()
        except BaseException as error:
            self._end_after(error)
            raise
        assert self._generation is not None
        return self._generation

    @property
    def has_ended(self) -> bool:
        """Whether all adopted calls have ended, so that there is nothing to follow."""
        return bool(self._ended_calls)

    def _have_ended(self, calls: Sequence[sky.DetachedCall[Any]]) -> bool:
        """Whether all calls have ended. If the pool does not answer just now, the trigger follows them."""
        try:
            return all(self._asked(lambda call=call: call.state) in ENDED for call in calls)
        except sky.SkywardError:
            return False

    def results(self) -> list[Any]:
        """Return the results of adopted calls that have ended, write their last lines, and end the pool."""
        return self._fetched(lambda: self._ended_calls)

    def was_cleared(self) -> bool:
        """Ask Airflow whether a user has cleared the task since its call began: then this try makes another one."""
        generation = self._stored()
        return generation is not None and generation.is_cleared(getattr(self._task_instance, "max_tries", None))

    def finish(self, count: int, max_cost: float | None, why_unpaid: str) -> list[Any]:
        """Return the results of the calls, write their last lines, and end the pool.

        `why_unpaid`: why the money of the pool was about to end when the trigger saw it last. Raises BudgetExceeded if
        the pool has ended for that reason, or by `max_cost`.
        """
        generation = self._generation = self._stored()
        if generation is None or not generation.pool_id:
            raise sky.NodeLost("the state of the task is gone, and with it the id of its pool: it begins again")
        self._announced = generation.pool_id
        self._calls = count
        return self._fetched(lambda: self._calls_of(generation, count, max_cost, why_unpaid))

    def _fetched(self, calls: Callable[[], Sequence[sky.DetachedCall[Any]]]) -> list[Any]:
        try:
            results = self._results(calls())
        except BaseException as error:
            self._end_after(error)
            raise
        self._end_pool()
        return results

    def _calls_of(
        self, generation: Generation, count: int, max_cost: float | None, why_unpaid: str
    ) -> list[sky.DetachedCall[Any]]:
        if not self._attach(generation.pool_id):
            raise self._why_gone(generation.pool_id, max_cost, why_unpaid)
        assert self._pool is not None
        with self._interruptible():
            return [self._pool.detached_call(call_id) for call_id in generation.call_ids(count)]

    def note_cursors(self, cursors: Sequence[int]) -> None:
        """Store which lines the trigger has written."""
        generation = self._stored()
        if generation is not None and len(cursors) == len(generation.cursors):
            self._remember(replace(generation, cursors=tuple(cursors)))

    def end_unfollowed(self) -> None:
        """End the pool of a task that is not followed any more, such as after its deferral has timed out."""
        generation = self._generation = self._stored()
        if generation is not None:
            self._announced = generation.pool_id
        self._end_pool()
        self.push_bill()
        self.end_generation()

    def _attach(self, pool_id: str) -> bool:
        """Attach to a pool; return whether it is there. Nodes that are out of reach are tried again for a while."""
        deadline = time.monotonic() + REACH_SECONDS
        while True:
            try:
                with self._interruptible(), self._events_written_at_once():
                    self._pool = sky.ComputePool.attach(
                        pool_id,
                        on_event=self._receive,
                        retries=0,
                        lease_seconds=UNATTENDED_SECONDS,
                        pays=True,
                        work=self._work,
                    )
            except (sky.Unreachable, sky.LedgerError) as error:
                self._log.warning("the pool %s is out of reach: %s", pool_id, error)
                if time.monotonic() > deadline:
                    if isinstance(error, sky.LedgerError):  # nothing is known of the pool then
                        raise
                    return False
                self._drain()
            except sky.PoolStopped:
                raise
            except (sky.NodeLost, sky.LeaseLost, sky.BadRequest) as error:
                self._log.warning("the pool %s is gone: %s", pool_id, error)
                return False
            else:
                self._is_attached = True
                self._announce(pool_id)
                return True

    def _why_gone(self, pool_id: str, max_cost: float | None, why_unpaid: str) -> sky.SkywardError:
        costs = costs_of(self._work, self._log) or ()
        cost = usd(one for one in costs if one.pool_id == pool_id)
        if max_cost is not None and cost >= NEARLY_ALL * max_cost:
            return sky.BudgetExceeded(f"the pool {pool_id} has cost {cost:.6f} USD of max_cost={max_cost:g}, and ended")
        if why_unpaid:
            return sky.BudgetExceeded(why_unpaid)
        return sky.NodeLost(f"the pool {pool_id} is gone, and so is the call: it begins again")

    def _leave_to_trigger(self) -> None:
        assert self._pool is not None
        with self._interruptible(), self._events_written_at_once():
            if self._is_attached:
                self._pool.close()
            else:
                self._pool.detach(max(UNATTENDED_SECONDS, self._pool.spec.lease_seconds))

    def _end_after(self, error: BaseException) -> None:
        """End the machines, unless the next try adopts the call: then they live by their lease."""
        self._note_orphaned(error)
        if not self.is_orphan:
            self._end_pool()

    def _end_pool(self) -> None:
        """End the machines, from whichever process has rented them."""
        self._end(None if self._pool is None else self._pool.hand_over, self._stop_order())

    def _stop_order(self) -> str:
        """Return what `skyward stop` is to end: also a pool to which this process has not attached yet."""
        return self._pool_id() or (self._generation.pool_id if self._generation is not None else "")
