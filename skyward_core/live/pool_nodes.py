"""Finds a live pool and its nodes: by the lease in the ledger, or by the listing of its provider.

The ledger has the lease of a pool with a name, one that was detached, and one with a detached call. Nodes of any other
pool are found where its provider lists them, if this machine can log in to them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyward_core.config.own_providers import provider_of
from skyward_core.errors import BadRequest, NodeLost
from skyward_core.machines.instances import Endpoint, Instance, Lease
from skyward_core.paths import first_private, state_places
from skyward_core.session.sealed_lease import PoolKeys, exists, find_lease

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
    provider = provider_of(entry)
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
    pools = {entry.id: entry.provider_name for entry in ledger.pools(unreadable=[])}
    named = [(one.name, pools[one.pool_id]) for one in ledger.names.all_named(unreadable=[]) if one.pool_id in pools]
    return [*named, *pools.items()]


def login_command(nodes: PoolNodes, rank: int) -> list[str]:
    """Return the words of the command. It trusts only the host key that the pool knows. For a node that is a process of
    this machine it is a shell in its folder.

    Raises BadRequest for an unknown node, and if this machine has no file of the pool's key.
    """
    instance = nodes.instance(rank)
    if instance.endpoint is None:
        return ["sh", "-c", f'cd {shlex.quote(instance.directory or "/")} && exec "${{SHELL:-sh}}"']
    return ["ssh", *_options(nodes, instance.endpoint, instance.id), *_place(instance.endpoint)]


def command_on(nodes: PoolNodes, rank: int, script: str, words: Sequence[str]) -> list[str]:
    """Return the command that runs a sh script on a node, with the node's directory and these words as its arguments.

    Raises as `login_command`, and NodeLost for a machine that has no address yet.
    """
    instance = nodes.instance(rank)
    if instance.directory is None:
        raise NodeLost(f"node {rank} of pool {nodes.pool_id} does not run: it has no address yet")
    command = ["sh", "-c", script, "skyward", instance.directory, *words]
    if instance.endpoint is None:
        return command
    options = _options(nodes, instance.endpoint, instance.id)
    # a node that falls silent is an error, and does not hold the command for ever
    patience = ["-T", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
    return ["ssh", *options, *patience, *_place(instance.endpoint), shlex.join(command)]


def _options(nodes: PoolNodes, endpoint: Endpoint, instance_id: str) -> list[str]:
    if endpoint.key is not None and not exists(endpoint.key):
        raise BadRequest(
            f"the SSH key of pool {nodes.pool_id}, {endpoint.key}, is not on this machine: run the command where the"
            " pool was opened, or with a copy of that file"
        )
    words: list[str] = []
    if endpoint.config is not None:
        words += ["-F", endpoint.config]
    if endpoint.key is not None:
        words += ["-i", os.path.expanduser(endpoint.key), "-o", "IdentitiesOnly=yes"]
    if endpoint.port is not None:
        words += ["-p", str(endpoint.port)]
    if endpoint.proxy_command is not None:
        words += ["-o", f"ProxyCommand={shlex.join(endpoint.proxy_command)}"]
    if endpoint.host_key is not None:
        place = _known_hosts(instance_id, endpoint.host_key)
        words += ["-o", f"UserKnownHostsFile={place}", "-o", f"HostKeyAlias={instance_id}"]
        words += ["-o", "StrictHostKeyChecking=yes"]
    elif endpoint.known_hosts is not None:
        words += ["-o", f"UserKnownHostsFile={os.path.expanduser(endpoint.known_hosts)}"]
    return words


def _place(endpoint: Endpoint) -> list[str]:
    return [endpoint.host if endpoint.user is None else f"{endpoint.user}@{endpoint.host}"]


def _known_hosts(instance_id: str, host_key: str) -> Path:
    """Return a private file with the key of one host."""
    folder = first_private("known-hosts", state_places())
    place = folder / hashlib.sha256(instance_id.encode()).hexdigest()[:16]
    place.write_text(f"{instance_id} {host_key.strip()}\n")
    return place
