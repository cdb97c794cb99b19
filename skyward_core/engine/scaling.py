"""How many nodes an elastic pool should have: a pure policy, facts in and a number out.

    least nodes ──calls wait for a slot, for `scale_up_after` seconds──▶ as many nodes as the queue fills, or `most`
        ▲                                                                  │
        └──────────── no call at all for `scale_down_after` seconds ───────┘

While the pool grows, the wait of the queue does not count: it begins again when the new nodes are there. After a
machine could not be had, the pool goes on with what it has, and rests before it grows again. A number that the user
has set (`fix`) replaces both rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skyward_core.concurrency.backoff import Backoff

RESTS = Backoff(30.0, 600.0)
"""How long the pool does not grow, in seconds, after a machine could not be had."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the policy knows, at one moment: how many calls wait because all slots are taken, and whether any call of
    any client runs or waits.
    """

    waiting: int
    is_busy: bool


class ScalingPolicy:
    """Decides how many nodes there should be. One thread uses it; times are in seconds, on one clock.

    `slots` is how many calls one node runs at once; `nodes` is how many there are at first, by default the least.
    """

    def __init__(
        self,
        least: int,
        most: int,
        slots: int,
        scale_up_after: float = 30.0,
        scale_down_after: float = 300.0,
        nodes: int | None = None,
    ) -> None:
        self.least = least
        self.most = most
        self._slots = slots
        self._scale_up_after = scale_up_after
        self._scale_down_after = scale_down_after
        self._target = least if nodes is None else max(least, min(nodes, most))
        self._fixed: int | None = None
        self._waiting_since: float | None = None
        self._idle_since: float | None = None
        self._rest_until = -math.inf
        self._failures = 0
        self.reason = ""
        """Why the number has changed last."""

    @property
    def target(self) -> int:
        """How many nodes there should be, by the last decision."""
        return self._target if self._fixed is None else self._fixed

    @property
    def is_fixed(self) -> bool:
        """Whether the user has set the number."""
        return self._fixed is not None

    def fix(self, nodes: int | None) -> None:
        """Keep the pool at this number of nodes; None: decide again, from the present number on."""
        self._target = self.target
        self._fixed = nodes
        self._waiting_since = self._idle_since = None
        if nodes is not None:
            self.reason = "pool.scale()"

    def decide(self, now: float, nodes: int, load: Load) -> int:
        """Return how many nodes there should be; `nodes` take calls now."""
        is_waiting = load.waiting > 0 and nodes >= self._target
        self._waiting_since = None if not is_waiting else now if self._waiting_since is None else self._waiting_since
        self._idle_since = None if load.is_busy else now if self._idle_since is None else self._idle_since
        if self._fixed is not None:
            return self._fixed
        if self._waiting_since is not None and self._may_grow(now, self._waiting_since):
            wanted = min(self.most, self._target + math.ceil(load.waiting / self._slots))
            if wanted > self._target:
                self._change(wanted, f"{load.waiting} calls wait for a slot")
        elif self._target > self.least and self._may_shrink(now):
            self._change(self.least, f"no call for {self._scale_down_after:.0f} s")
        return self._target

    def not_grown(self, now: float) -> float | None:
        """A machine could not be had: go on with one less. Return how long the pool rests, in seconds; None if it rests
        already, because another one of the same growth could not be had.
        """
        if self._target > self.least:
            self._change(self._target - 1, "no machine was to be had")
        if now < self._rest_until:
            return None
        self._failures += 1
        seconds = RESTS.seconds(self._failures)
        self._rest_until = now + seconds
        return seconds

    def grown(self) -> None:
        """A new node takes calls: a later failure is the first one again."""
        self._failures = 0

    def _may_grow(self, now: float, waiting_since: float) -> bool:
        return now - waiting_since >= self._scale_up_after and now >= self._rest_until

    def _may_shrink(self, now: float) -> bool:
        return self._idle_since is not None and now - self._idle_since >= self._scale_down_after

    def _change(self, nodes: int, reason: str) -> None:
        self._target, self.reason = nodes, reason
        self._waiting_since = None
