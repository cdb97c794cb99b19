"""One step of a process: its uses of pools, what they have cost, and for how long it has worked and waited."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import skyward_core as sky
from dagster_skyward.metadata import NODES, POOL_ID, RUNNING_COST_USD, RUNNING_SECONDS, Usage, numbers_of
from dagster_skyward.step_events import Listener

UNSEEN_SECONDS = 2.0
"""For how long calls have waited for slots, at least, before that is known (`skyward_core.session.pool_uses`)."""


@dataclass(slots=True)
class Use:
    """One block in which a step uses a pool. When it has ended, `usage` is what it has cost."""

    pool: sky.ComputePool
    listeners: list[Listener]
    usage: Usage | None = None


class StepTime:
    """For how long a step has used pools, in seconds. Blocks of several threads count once while they overlap."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._blocks = 0
        self._since = self._used = self._opening = self._waited = 0.0
        self._waits_since: float | None = None

    @property
    def since_began(self) -> float:
        """Since its first use."""
        return time.monotonic() - self.began

    @property
    def used(self) -> float:
        """In which a block has used a pool, or waited for one."""
        with self._lock:
            return self._used + (time.monotonic() - self._since if self._blocks else 0.0)

    @property
    def queued(self) -> float:
        """The part of it in which the step has waited: until its pool was open, and for slots that others held."""
        with self._lock:
            waits = 0.0 if self._waits_since is None else time.monotonic() - self._waits_since
            return self._opening + self._waited + waits

    @contextmanager
    def block(self) -> Generator[None]:
        """Count the block."""
        with self._lock:
            self._since = self._since if self._blocks else time.monotonic()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    self._used += time.monotonic() - self._since
            if not self._blocks:
                self.note_waiting(is_waiting=False)

    @contextmanager
    def opening(self) -> Generator[None]:
        """Count the block as waiting, if the step does nothing else meanwhile."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                if self._blocks == 1:
                    self._opening += time.monotonic() - began

    def note_waiting(self, *, is_waiting: bool) -> bool:
        """Note whether its calls wait for slots that others hold; return whether that is new."""
        with self._lock:
            if is_waiting == (self._waits_since is not None):
                return False
            now = time.monotonic()
            if self._waits_since is None:
                self._waits_since = max(now - UNSEEN_SECONDS, self._since)
            else:
                self._waited += now - self._waits_since
                self._waits_since = None
            return True


@dataclass(slots=True)
class Step:
    """A step, and its uses of pools so far. They end with the pools."""

    work: sky.Work
    uses: dict[sky.ComputePool, sky.PoolUse] = field(default_factory=dict[sky.ComputePool, sky.PoolUse])
    time: StepTime = field(default_factory=StepTime)

    def use_of(self, pool: sky.ComputePool) -> sky.PoolUse:
        """Return its use of a pool. The pool is for this step alone if it is opened for nothing else."""
        if pool not in self.uses:
            alone = pool.work == self.work and bool(pool.work.task or not pool.work.run)
            self.uses[pool] = sky.PoolUse(pool, self.work, is_alone=alone)
        return self.uses[pool]

    @property
    def _uses(self) -> tuple[sky.PoolUse, ...]:
        """Those of this moment: other threads may begin more."""
        return tuple(self.uses.values())

    @property
    def pool(self) -> sky.ComputePool | None:
        """The pool that it has begun to use last."""
        return next(reversed(tuple(self.uses)), None)

    @property
    def cost_usd(self) -> float:
        """USD of all its uses so far."""
        return float(sum(use.cost for use in self._uses))

    @property
    def utilisation(self) -> sky.Utilisation:
        """That of the pool which it has used last; of an earlier one if nothing was measured there."""
        found = [use.utilisation for use in reversed(self._uses)]
        return next((one for one in found if one.measured), found[0])

    def numbers(self) -> dict[str, float | str]:
        """Return what was measured and reported as metadata; what a later pool has too replaces an earlier one's."""
        return {name: value for use in self._uses for name, value in numbers_of(use.utilisation).items()}

    def running(self, pool: sky.ComputePool) -> dict[str, Any]:
        """Return the metadata of an observation while it uses a pool."""
        return {
            RUNNING_COST_USD: round(self.cost_usd, 6),
            RUNNING_SECONDS: round(self.time.since_began, 1),
            NODES: pool.instance_count,
            POOL_ID: pool.id,
            **self.numbers(),
        }

    @property
    def is_waiting(self) -> bool:
        """Whether its calls on the newest pool wait for slots that others hold."""
        return bool(uses := self._uses) and uses[-1].is_waiting
