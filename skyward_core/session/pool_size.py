"""The size of one session's pool, if it is elastic: what is measured for `engine.scaling`, and what the user sets.

The clock's thread calls `look`; any thread may call `scale`. It has no state: recovery decides and acts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward_core.engine.recovery import Recovery
from skyward_core.engine.scaling import Load, ScalingPolicy
from skyward_core.errors import BadRequest
from skyward_core.spec import PoolSpec

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster

POLL_SECONDS = 0.05
SETTLE_SECONDS = 60.0
"""How long a pool that is detached waits for a machine that is just being rented."""


def policy_of(spec: PoolSpec) -> ScalingPolicy | None:
    """Return the policy of an elastic pool; None for a pool of one size."""
    if not spec.is_elastic:
        return None
    slots = spec.workers_per_node * spec.concurrency
    return ScalingPolicy(spec.least_nodes, spec.most_nodes, slots, spec.scale_up_after, spec.scale_down_after)


class PoolSize:
    """How many nodes a pool has, and should have. `is_busy` returns whether any call of any client runs or waits."""

    def __init__(self, spec: PoolSpec, cluster: Cluster, recovery: Recovery, is_busy: Callable[[], bool]) -> None:
        self._spec = spec
        self._cluster = cluster
        self._recovery = recovery
        self._is_busy = is_busy

    def look(self) -> None:
        """Measure the load, and let the pool grow or shrink."""
        if self._spec.is_elastic:
            is_busy = self._is_busy() or not self._cluster.is_idle
            self._recovery.observe(Load(self._cluster.backlog() if is_busy else 0, is_busy))

    def scale(self, nodes: int | None, wait_seconds: float) -> int:
        """Keep the pool at this number of nodes; None: let it grow and shrink by itself. Return how many take calls, as
        soon as they are so many, or after `wait_seconds`. Raises BadRequest.
        """
        least, most = self._spec.least_nodes, self._spec.most_nodes
        if not self._spec.is_elastic:
            raise BadRequest(
                f"the pool has a fixed number of nodes, {least}: open it with nodes=(least, most), as in (1, 8)"
            )
        if nodes is not None and (type(nodes) is not int or not least <= nodes <= most):
            raise BadRequest(
                f"scale({nodes!r}): the pool has nodes={self._spec.nodes}, write a number from {least} to {most}"
            )
        self._recovery.fix_size(nodes)
        deadline = time.monotonic() + wait_seconds
        while nodes is not None and self._cluster.size != nodes and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self._cluster.size
