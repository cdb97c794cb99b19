"""Finds a live pool and its nodes: by the lease in the ledger, or by the listing of its provider.

The ledger has the lease of a pool with a name, one that was detached, and one with a detached call. Nodes of any other
pool are found where its provider lists them, if this machine can log in to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward_core.errors import BadRequest, NodeLost
from skyward_core.machines.instances import Instance, Lease
from skyward_core.providers.base import load
from skyward_core.session.sealed_lease import PoolKeys, find_lease

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class PoolNodes:
    """The nodes of a live pool, in the order of their ranks. `lease` and `keys` are there if the ledger has them."""

    pool_id: str
    instances: tuple[Instance, ...]
    lease: Lease | None = None
    keys: PoolKeys | None = None

    def instance(self, rank: int) -> Instance:
        """Return the node of a rank. Raises BadRequest."""
        for instance in self.instances:
            if instance.rank == rank:
                return instance
        known = ", ".join(str(instance.rank) for instance in self.instances)
        raise BadRequest(f"pool {self.pool_id} has no node {rank}; its nodes are {known}")


def find_nodes(ledger: Ledger, name: str) -> PoolNodes:
    """Return the nodes of the live pool with an id or a name.

    Raises BadRequest for an unknown pool, NodeLost for one that has ended, or whose nodes are not there; errors of the
    provider, of the lease's keys, and LedgerError.
    """
    named = ledger.names.named(name)
    pool_id = named.pool_id if named is not None and named.pool_id else name
    entry = ledger.pool(pool_id)
    if entry is None:
        raise BadRequest(f"the ledger has no pool {name!r}: look with `skyward ps --all`")
    if entry.ended_at is not None:
        raise NodeLost(
            f"pool {pool_id} ended at {entry.ended_at:%Y-%m-%d %H:%M:%S} UTC, and its nodes are gone with their logs."
            " What is kept: `skyward receipt`, `skyward why` and `skyward calls`"
        )
    if ledger.sealed_lease(pool_id) is not None:
        lease, keys = find_lease(pool_id, ledger=ledger)
        return PoolNodes(pool_id, _by_rank(node.instance for node in lease.nodes), lease, keys)
    provider = load(entry.provider)
    found = _by_rank(provider.instances(pool_id))
    if not found:
        raise NodeLost(
            f"{provider.name} lists no node of pool {pool_id}: it has none yet, or it runs on another machine"
        )
    return PoolNodes(pool_id, found)


def _by_rank(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    return tuple(sorted(instances, key=lambda instance: instance.rank))


def names_of_pools(ledger: Ledger) -> list[tuple[str, str]]:
    """Return the names and the ids of all open pools, each with its provider. Raises LedgerError."""
    pools = {entry.id: str(entry.provider.get("name", "")) for entry in ledger.pools(unreadable=[])}
    named = [(one.name, pools[one.pool_id]) for one in ledger.names.all_named(unreadable=[]) if one.pool_id in pools]
    return [*named, *pools.items()]
