"""Follows the nodes of an elastic pool that another process keeps: adds those that join, removes those that left.

    a worker joins from a machine that is not known ──the newest lease names it──▶ reached ──▶ a node, which gets calls
    the scheduler says that a rank leaves, and its workers are gone ──▶ forgotten

The scheduler only says that something has changed. Data about the machine and its transport comes from the sealed lease
in the ledger, which is verified. Without such a lease this process uses only the nodes that it attached to, until they
leave.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import NodeLost, PoolClosed, SkywardError
from skyward_core.machines.instances import Lease, Node
from skyward_core.session.sealed_lease import PoolKeys, find_lease

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster

LOOK_SECONDS = 1.0
PAUSES = Backoff(0.5, 30.0)
"""The pause before a lease is read again that lacks a node which has joined."""

_log = logging.getLogger("skyward")


class Follower:
    """Follows the nodes of one pool. `look` is called every LOOK_SECONDS, by one thread.

    `lease` returns the present lease of this process. `reach` connects to nodes of a newer one and returns those that
    answer. `use` takes the changed lease, with the nodes that are not used any more.
    """

    def __init__(
        self,
        lease: Callable[[], Lease],
        reach: Callable[[Lease, PoolKeys], list[Node]],
        use: Callable[[Lease, list[Node]], object],
        find: Callable[[str], tuple[Lease, PoolKeys]] = find_lease,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease = lease
        self._reach = reach
        self._use = use
        self._find = find
        self._clock = clock
        self._wanted: dict[int, str] = {}
        self._tries = 0
        self._try_at = 0.0

    def look(self, cluster: Cluster) -> None:
        """Compare the workers of the scheduler with the known nodes, once. Raises nothing."""
        try:
            self._forget(cluster, cluster.draining.left_nodes())
            self._learn(cluster, cluster.draining.strange_nodes())
        except (PoolClosed, TimeoutError):
            pass  # the pool is left, or the engine is busy: the next look sees the same
        except (SkywardError, OSError) as error:
            _log.debug("the nodes that have joined are not known yet: %s", error)

    def _forget(self, cluster: Cluster, ranks: list[int]) -> None:
        for rank in ranks:
            lease = self._lease()
            gone = [node for node in lease.nodes if node.rank == rank]
            self._use(_with_nodes(lease, [node for node in lease.nodes if node.rank != rank]), gone)
            cluster.give_up(NodeLost(f"node {rank} has left the pool, because the pool has shrunk"), rank)
            cluster.remove_node(rank)

    def _learn(self, cluster: Cluster, wanted: dict[int, str]) -> None:
        now = self._clock()
        if wanted != self._wanted:
            self._wanted, self._tries, self._try_at = wanted, 0, now
        if not wanted or now < self._try_at:
            return
        self._tries += 1
        self._try_at = now + PAUSES.seconds(self._tries)
        newest, keys = self._find(self._lease().pool_id)
        come = [node for node in newest.nodes if node.rank in wanted and wanted[node.rank] in ("", node.instance.id)]
        if not come:
            return
        ids = {node.instance.id for node in come}
        known = [node for node in self._lease().nodes if node.instance.id in ids]
        there = {node.instance.id for node in known}
        new = self._reach(_with_nodes(newest, [node for node in come if node.instance.id not in there]), keys)
        if not known and not new:
            return
        lease, ranks = self._lease(), {node.rank for node in (*known, *new)}
        gone = [node for node in lease.nodes if node.rank in ranks and node not in known]
        stays = [node for node in lease.nodes if node.rank not in ranks]
        lease = _with_nodes(lease, sorted([*stays, *known, *new], key=lambda node: node.rank))
        self._use(lease, gone)
        cluster.update_nodes(lease)


def _with_nodes(lease: Lease, nodes: list[Node]) -> Lease:
    return lease.model_copy(update={"nodes": tuple(nodes)})
