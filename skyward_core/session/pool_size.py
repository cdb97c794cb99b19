"""The size of one session's pool, if it is elastic: what is measured for `engine.elastic`, and what the user sets.

The clock's thread calls `look`; any thread may call `scale`. It has no state: recovery decides and acts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from skyward_core.engine.elastic import Load, ScalingPolicy
from skyward_core.engine.recovery import Recovery
from skyward_core.errors import BadRequest, SkywardError
from skyward_core.machines.instances import Lease
from skyward_core.spec import PoolSpec

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster

POLL_SECONDS = 0.05
SETTLE_SECONDS = 60.0
"""How long a pool that is detached waits for a machine that is just being rented."""


def policy_of(spec: PoolSpec, nodes: int | None = None) -> ScalingPolicy | None:
    """Return the policy of an elastic pool, which has so many nodes now (None: the least); None for a pool of one
    size.
    """
    if not spec.is_elastic:
        return None
    slots = spec.workers_per_node * spec.concurrency
    return ScalingPolicy(spec.least_nodes, spec.most_nodes, slots, spec.scale_up_after, spec.scale_down_after, nodes)


def ranks_of(spec: PoolSpec, lease: Lease) -> set[int]:
    """Return the ranks that a pool should have, from the lease that another process has left."""
    return {*range(spec.least_nodes), *(node.rank for node in lease.nodes)}


def free_all(cluster: Cluster, ranks: Iterable[int]) -> None:
    """Give nodes calls again that another process was about to take out of the pool. Raises nothing."""
    for rank in ranks:
        with contextlib.suppress(SkywardError, OSError):  # then the scheduler is lost, and a new one holds no node
            cluster.draining.free(rank)


class PoolSize:
    """How many nodes a pool has, and should have. `is_busy` returns whether any call of any client runs or waits."""

    def __init__(self, spec: PoolSpec, cluster: Cluster, recovery: Recovery, is_busy: Callable[[], bool]) -> None:
        self._spec = spec
        self._cluster = cluster
        self._recovery = recovery
        self._is_busy = is_busy

    def look(self) -> None:
        """Measure the load, and let the pool grow or shrink. Does nothing once another process keeps the pool: the
        ranks known here may be old.
        """
        if self._spec.is_elastic and not self._recovery.is_stopped:
            self._cluster.draining.announce()
            is_busy = self._is_busy() or not self._cluster.is_idle
            self._recovery.observe(Load(self._cluster.draining.backlog() if is_busy else 0, is_busy))

    def scale(self, nodes: int | None, wait_seconds: float) -> int:
        """Keep the pool at this number of nodes; with None it grows and shrinks by itself. Return how many nodes take
        calls: once that number is reached, or after `wait_seconds`. Raises BadRequest, also if this process no longer
        keeps the pool.
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
        while nodes is not None and self._cluster.draining.size != nodes and time.monotonic() < deadline:
            if self._recovery.is_stopped:
                break
            time.sleep(POLL_SECONDS)
        if self._recovery.is_stopped:
            raise BadRequest("the pool was closed, or another process keeps it now: call scale() there")
        return self._cluster.draining.size
