"""The engine of one session: cluster, recovery and the user's Dask clients. They begin and end together.

Dask is imported, and the pool's certificate is made, in the thread "skyward-import" while machines start: both take
most of a second.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

from skyward_core.concurrency.loading import load
from skyward_core.engine.certificates import PoolCertificate, make_certificate
from skyward_core.engine.recovery import Recovery
from skyward_core.errors import PoolClosed
from skyward_core.machines.instances import Lease
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.session.detached_call import note_all
from skyward_core.session.event_emitter import EventEmitter
from skyward_core.session.pool_size import SETTLE_SECONDS, PoolSize, policy_of
from skyward_core.spec import PoolSpec
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.engine.connection import UserClient
    from skyward_core.wire.masking import SecretValues


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
        self._import = threading.Thread(target=self._import_all, name="skyward-import", daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether there was a connection to the nodes."""
        return self.recovery is not None

    def start_import(self) -> None:
        """Start the thread that imports Dask and sets `certificate`."""
        self._import.start()

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
        """End all of it, the cluster by `end_cluster`; no thread waits for a machine any more."""
        assert self.cluster is not None
        assert self.recovery is not None
        self.recovery.stop()
        note_all(self.cluster, self._pool_id, self._emitter.queue.log)
        if self.user_client is not None:
            self.user_client.close()
        end_cluster(self.cluster)
        machines.stop()
        self.recovery.join()
