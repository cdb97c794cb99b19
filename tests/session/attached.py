"""A lease of three nodes that are nowhere."""

from datetime import UTC, datetime

from skyward_core.machines.instances import Instance, InstanceState, Lease, Node

RANKS = [0, 1, 2]


def lease() -> Lease:
    more = {"state": InstanceState.RUNNING, "region": "here", "instance_type": "process"}
    nodes = [
        Node(instance=Instance(id=f"i-{rank}", provider="local", pool_id="p", rank=rank, **more), rank=rank)
        for rank in RANKS
    ]
    return Lease(pool_id="p", provider={"name": "local"}, nodes=tuple(nodes), created_at=datetime.now(UTC))
