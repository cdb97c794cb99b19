"""The commands that log in to a node of a live pool with OpenSSH, and that run a script there."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from skyward_core.errors import BadRequest, NodeLost
from skyward_core.live.pool_nodes import PoolNodes
from skyward_core.machines.instances import Endpoint
from skyward_core.paths import first_private, state_places
from skyward_core.session.sealed_lease import exists


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
