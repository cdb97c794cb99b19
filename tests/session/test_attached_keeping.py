"""What an attached process has after it was the steward of its pool for a while (`Attached.keep`, `keep_no_more`)."""

from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.compute import PendingCompute
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.cluster import Cluster
from skyward_core.errors import PoolClosed
from skyward_core.events.queue import EventQueue
from skyward_core.machines.instances import Instance, InstanceState, Lease, Node
from skyward_core.session.attached import Attached

RANKS = [0, 1, 2]


def lease() -> Lease:
    nodes = tuple(
        Node(
            instance=Instance(
                id=f"i-{rank}",
                provider="local",
                pool_id="p",
                rank=rank,
                state=InstanceState.RUNNING,
                region="here",
                instance_type="process",
            ),
            rank=rank,
        )
        for rank in RANKS
    )
    return Lease(pool_id="p", provider={"name": "local"}, nodes=nodes, created_at=datetime.now(UTC))


@pytest.fixture
def attached() -> Iterator[Attached]:
    """An attachment that has no connection to its three nodes."""
    it = Attached(lease(), None, None, 60.0, 0, EventQueue(lambda _: None))
    it.cluster = Cluster(it.lease, PoolCertificate("", ""), it.transports, it.emit)
    yield it
    it.events.close()
    it.cluster.close(PoolClosed("the test has ended"))


def test_broadcasts_use_all_nodes_after_another_process_has_taken_the_pool(attached: Attached) -> None:
    """They would return no result at all, and no error, if they had no ranks."""
    watcher: Any = SimpleNamespace(cut=lambda: None)
    cluster = attached.cluster
    assert cluster is not None
    cluster.keep(None, None, RANKS)
    attached.keep(watcher)
    attached.keep_no_more()
    assert len(cluster.broadcast(PendingCompute(abs, (1,)))) == len(RANKS)
