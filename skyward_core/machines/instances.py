"""Machines: a rented one (`Instance`), one that runs our software (`Node`), and the written claim on them (`Lease`)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from skyward_core.machines.offers import Extra


class InstanceState(StrEnum):
    """The state of a machine, as its provider reports it. Only GONE certainly costs nothing."""

    PENDING = "pending"  # billed now or soon, not yet reachable
    RUNNING = "running"
    STOPPING = "stopping"  # ending, may still be billed
    GONE = "gone"


class Endpoint(BaseModel):
    """The host, port and user of a login. Plain JSON, no secrets: `key` is a path.

    Fields that are None come from ~/.ssh/config and, after it, from OpenSSH's defaults: the port, the user, the keys,
    the agent, the known_hosts file. `host` may be an alias of that file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(min_length=1)
    port: int | None = Field(default=None, ge=1, le=65535)
    user: str | None = None
    key: str | None = None
    """Path of a private key without passphrase. With it, the agent and other keys are not tried."""
    host_key: str | None = None
    """The machine's public key as in a `.pub` file: "ssh-ed25519 AAAA..."."""
    host_key_grace_seconds: float = Field(default=0.0, ge=0)
    """How long after its first answer a new machine may show another key.

    A machine needs it if its startup script, which installs this key, runs after its sshd.
    """
    known_hosts: str | None = None
    """Path; "/dev/null" trusts the first key seen, which suits addresses that a cloud reuses for other machines."""
    config: str | None = None
    """Path of the file to read in place of ~/.ssh/config."""
    proxy_command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """A command, with its arguments, whose stdin and stdout are the connection (`proxy_command.Proxy`).

    `host` is then only a name for messages and host keys. The command has no secrets: it runs with the environment of
    the connecting process. "{python}" stands for that process's interpreter. The command ends when its input ends. The
    last line of its stderr has the reason of a failure. It exits with 77 if credentials are refused, and with 78 if the
    request is invalid. After any other code it is tried again.
    """

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")


class Instance(BaseModel):
    """A machine rented from a provider, as the provider sees it. Prices are USD per hour."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    provider: str
    pool_id: str
    rank: int
    state: InstanceState
    region: str
    instance_type: str
    is_spot: bool = False
    price_per_hour: float = 0.0
    on_demand_price_per_hour: float | None = None
    extras_per_hour: tuple[Extra, ...] = ()
    """What is billed beside the machine, as far as its provider reports it."""
    ip: str | None = None
    private_ip: str | None = None
    tags: dict[str, str] = {}
    """Its tags from the creating call, as far as the provider reports them."""
    directory: str | None = None
    """The folder of its files: on this machine, or on the machine of its `endpoint`."""
    endpoint: Endpoint | None = None
    """How to log in; None for an instance that is a set of processes of this machine."""


class Node(BaseModel):
    """An instance that runs our software, with its rank and workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance: Instance
    rank: int
    workers: int = 1
    slots: int = 1
    """Calls that one worker runs at once."""

    def with_key(self, key: str) -> Node:
        """Return the node with another path of the SSH key."""
        endpoint = self.instance.endpoint
        if endpoint is None:
            return self
        return self.model_copy(
            update={"instance": self.instance.model_copy(update={"endpoint": endpoint.model_copy(update={"key": key})})}
        )


class Lease(BaseModel):
    """The written claim on the machines of a pool: any process with the provider's credentials can use or end them.

    Plain JSON, no secrets: keys and certificates stay with the client that opened the pool.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool_id: str
    provider: dict[str, Any]
    """The provider, from `Provider.to_json()`."""
    accelerator: dict[str, Any] | None = Field(default=None, exclude_if=lambda value: value is None)
    """The alternative that the pool has, from `Accelerator.to_json()`; None if its spec has none.

    Without one it is not in the JSON: then releases before alternatives can read and verify the lease.
    """
    nodes: tuple[Node, ...] = ()
    scheduler: str = ""
    """Address of the pool's Dask scheduler."""
    created_at: datetime
    expires_at: datetime | None = None
    signature: str = ""
    """Made by the owner, over all but the paths of SSH keys (`signing.py`); "" if the nodes run on this machine."""

    def with_key(self, key: str) -> Lease:
        """Return the lease with another path of the SSH key, for a process that has it elsewhere."""
        return self.model_copy(update={"nodes": tuple(node.with_key(key) for node in self.nodes)})


def new_pool_id() -> str:
    """Return an id for a pool that is to be opened."""
    return f"sky-{uuid.uuid4().hex[:12]}"


# When and why a node has ended: what its keeper or its guard writes into a file that stays after the node.
#
#     UPTIME EPOCH BOOT     of the machine: seconds since its boot, seconds since 1970, id of the boot
#     REASON                one line
#
# The uptime counts while the machine runs: its time of day may be set. After a reboot only the time of day is left.


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """The end of a node. `reason` is what the node itself has written."""

    at: datetime
    reason: str

    def __str__(self) -> str:
        """Return it as evidence in words."""
        return f"it has written that it ended at {self.at:%Y-%m-%d %H:%M:%S} UTC: {self.reason}"


def node_end(text: str, *, now: datetime, uptime: float, boot: str) -> NodeEnd | None:
    """Return the end in the text of a file; None if it cannot be read. The other values are of its machine, now."""
    head, _, rest = text.partition("\n")
    words = head.split()
    reason = rest.partition("\n")[0].strip() or "it gave no reason"
    try:
        then, epoch = float(words[0]), float(words[1])
        of_boot = words[2] if len(words) > 2 else ""
        at = (
            now - timedelta(seconds=max(0.0, uptime - then))
            if boot and of_boot == boot
            else datetime.fromtimestamp(epoch, UTC)
        )
    except (IndexError, ValueError, OverflowError, OSError):
        return None
    return NodeEnd(min(at, now), reason)
