"""The pools of one flow run, one for each spec that its steps ask for (docs/decisions/0032-prefect-pools.md).

Each opens when a call first needs it, is shared by equal specs, and ends after a time without calls, or with the flow
run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import skyward_core as sky
from prefect_skyward.pool_life import FlowFacts, PoolLife, end_all


class FlowPools:
    """The pools of one flow run. States: open -> ending -> ended.

    One lock guards which pools there are, who holds them, and whether there may be more. It is held for moments only.
    """

    def __init__(self, facts: FlowFacts, idle_timeout: float | None, max_cost: float | None = None) -> None:
        """`max_cost` is the most that all pools of the flow run may cost in all of its attempts, in USD."""
        self.facts = facts
        self._max_cost = max_cost
        self._idle_timeout = idle_timeout
        self._lock = threading.Lock()
        self._is_open = True
        self._lives: list[PoolLife] = []
        """In the order of their opening, also those that have failed or ended: their costs count."""
        self._current: list[PoolLife] = []
        """Those that take calls."""
        self._idle_ends = sky.Threads(is_daemon=False)

    @property
    def cost(self) -> float:
        """USD spent so far."""
        return sum(life.cost for life in tuple(self._lives))

    def pool_of(self, spec: sky.PoolSpec) -> sky.ComputePool | None:
        """Return the newest pool of a spec; None before there was one."""
        return next((life.pool for life in reversed(tuple(self._lives)) if life.spec == spec), None)

    def failures(self, spec: sky.PoolSpec) -> list[BaseException]:
        """Return the errors of the openings of a spec that have failed so far, in their order."""
        errors = (life.opened.exception() for life in tuple(self._lives) if life.has_failed and life.spec == spec)
        return [error for error in errors if error is not None]

    def request(self, spec: sky.PoolSpec) -> PoolLife:
        """Return the pool that is open, or opens, for this spec; a new one at first, after a failure, and after a pool
        has ended by itself.

        Raises PoolClosed after the end of the flow run.
        """
        with self._lock:
            return self._request(spec)

    @contextmanager
    def holding(self, spec: sky.PoolSpec) -> Generator[PoolLife]:
        """Request a pool that is not idle as long as it is held."""
        with self._lock:
            life = self._request(spec)
            life.holders += 1
        try:
            yield life
        finally:
            with self._lock:
                life.holders -= 1
                life.idle_since = time.monotonic()

    @property
    def is_held(self) -> bool:
        """Whether a call uses or awaits a pool."""
        with self._lock:
            return any(life.holders for life in self._lives)

    def end_idle(self) -> None:
        """Begin to end the pools that have had no calls for `idle_timeout` seconds.

        Notes those whose money is used up, and tells those who wait for machines why.
        """
        for life in tuple(self._current):
            life.note_its_end()
            life.update_waiting_messages()
        if self._idle_timeout is None:
            return
        oldest = time.monotonic() - self._idle_timeout
        with self._lock:
            idle = [
                life
                for life in self._current
                if not life.holders and life.opened.done() and not life.has_failed and life.idle_since < oldest
            ]
            for life in idle:
                self._current.remove(life)
        for life in idle:
            self.facts.log.say(
                logging.INFO, f"no calls for {self._idle_timeout:g} s: the machines of {life.spec_text} are given back"
            )
            self._idle_ends.run("skyward-idle", partial(self._end_idle, life))

    def terminate_now(self) -> None:
        """Leave all machines to their reapers and return at once."""
        with self._lock:
            self._is_open = False
            lives = tuple(self._lives)
        for life in lives:
            life.terminate_now()

    def end(self) -> None:
        """End all pools, in any state. Raises the first error; may be called again, and ends what is left."""
        with self._lock:
            self._is_open = False
            lives = tuple(self._lives)
            self._current.clear()
        try:
            end_all(lives)
            self._idle_ends.join()
        finally:
            if self.facts.report is not None:
                self.facts.report.close()

    def _request(self, spec: sky.PoolSpec) -> PoolLife:
        if not self._is_open:
            raise sky.PoolClosed("the flow run has ended, and its pools with it")
        self._current = [life for life in self._current if not life.has_failed and not life.has_ended_by_itself]
        for life in self._current:
            if life.spec is spec or life.spec == spec:
                life.idle_since = time.monotonic()
                return life
        name = f"pool {len(self._lives) + 1}" if self._lives else ""
        life = PoolLife(spec, self.facts, name, self._max_cost)
        spent_usd = sum(earlier.cost for earlier in self._lives if earlier.spec == spec)
        self._lives.append(life)
        self._current.append(life)
        life.start(spent_usd)
        return life

    def _end_idle(self, life: PoolLife) -> None:
        try:
            life.end()
        except Exception as failure:  # `end` tries again at the end of the flow run
            self.facts.log.say(logging.CRITICAL, f"an idle pool could not be closed: {failure}")
