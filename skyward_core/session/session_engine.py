"""The engine of one session: cluster, recovery, the user's Dask clients, and the size of the pool. They begin and end
together.

Dask is imported, and the pool's certificate is made, in the thread "skyward-import" while machines start: both take
most of a second.

`PoolSize` has no state. It measures the load for `engine.elastic`, and takes what the user sets; recovery decides and
acts. The clock's thread calls `look`; any thread may call `scale`.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

from skyward_core.concurrency.loading import load
from skyward_core.concurrency.threads import Threads
from skyward_core.engine.certificates import PoolCertificate, make_certificate
from skyward_core.engine.elastic import Load, ScalingPolicy
from skyward_core.engine.recovery import Recovery
from skyward_core.errors import BadRequest, PoolClosed, SkywardError
from skyward_core.machines.instances import Lease
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.session.bookkeeping import EventEmitter
from skyward_core.session.detached_call import note_all
from skyward_core.spec import PoolSpec
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.engine.connection import UserClient
    from skyward_core.wire.masking import SecretValues

POLL_SECONDS = 0.05
SETTLE_SECONDS = 60.0
"""How long a pool that is detached waits for a machine that is just being rented."""


class SessionEngine:
    """Owns what connects one session with its nodes."""

    def __init__(
        self, pool_id: str, spec: PoolSpec, emitter: EventEmitter, secrets: SecretValues | None, work: Work
    ) -> None:
        self._pool_id = pool_id
        self._spec = spec
        self._emitter = emitter
        self._secrets = secrets
        self._work = work
        self.certificate: Future[PoolCertificate] = Future()
        self.cluster: Cluster | None = None
        self.recovery: Recovery | None = None
        self.user_client: UserClient | None = None
        self._import = Threads()

    @property
    def is_connected(self) -> bool:
        """Whether there was a connection to the nodes."""
        return self.recovery is not None

    def start_import(self) -> None:
        """Start the thread that imports Dask and sets `certificate`; without a thread, do that here."""
        self._import.run("skyward-import", self._import_all)

    def _import_all(self) -> None:
        try:
            self.certificate.set_result(make_certificate(self._pool_id))
        except BaseException as error:
            self.certificate.set_exception(error)
            return
        load("skyward_core.engine.cluster")

    def connect(self, undo: ExitStack, machines: PoolMachines, lease: Lease, deadline: float) -> Cluster:
        """Connect to the nodes of a lease; `deadline` is on time.monotonic's clock."""
        self._import.join()
        cluster_type = cast("type[Cluster]", importlib.import_module("skyward_core.engine.cluster").Cluster)
        certificate = self.certificate.result()
        emitter, spec = self._emitter, self._spec
        self.cluster = cluster = cluster_type(
            lease,
            certificate,
            machines.transports,
            emitter.emit,
            spec.retries,
            emitter.meter,
            self._secrets,
            lambda: emitter.queue.delivered,
            self._work,
        )
        cluster.owner.pool = spec.name or lease.pool_id
        undo.callback(cluster.close, PoolClosed("the pool could not be opened"))
        cluster.start(machines.scheduler, deadline, machines.check)
        self.recovery = recovery = Recovery(
            machines, cluster, spec.least_nodes, spec.lease_seconds, emitter.emit, scaling=policy_of(spec)
        )
        cluster.watch(recovery)
        self.user_client = cluster.user_client(lambda: machines.scheduler)
        return cluster

    @contextmanager
    def settled(self) -> Generator[None]:
        """Let no node come or leave; from then on, if the block ends without an error."""
        if not self._spec.is_elastic:
            yield
            return
        assert self.recovery is not None
        self.recovery.settle(SETTLE_SECONDS)
        try:
            yield
        except BaseException:
            self.recovery.unsettle()
            raise

    def start_recovery(self, is_busy: Callable[[], bool]) -> PoolSize:
        """From now on replace nodes that are lost; return the number of nodes, which may be changed.

        `is_busy` returns whether any call of any client runs or waits.
        """
        assert self.cluster is not None
        assert self.recovery is not None
        self.recovery.start()
        return PoolSize(self._spec, self.cluster, self.recovery, is_busy)

    def end(self, machines: PoolMachines, end_cluster: Callable[[Cluster], object]) -> None:
        """End all of it, the cluster by `end_cluster`; no thread waits for a machine any more.

        Each step is taken even if the one before it has failed: calls that nobody ends would wait for ever.
        """
        assert self.cluster is not None
        assert self.recovery is not None
        with ExitStack() as last_step_first:
            last_step_first.callback(self.recovery.join)
            last_step_first.callback(machines.stop)
            last_step_first.callback(end_cluster, self.cluster)
            if self.user_client is not None:
                last_step_first.callback(self.user_client.close)
            last_step_first.callback(note_all, self.cluster, self._pool_id, self._emitter.queue.log)
            last_step_first.callback(self.cluster.take_sample)
            self.recovery.stop()


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
