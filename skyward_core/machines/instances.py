"""Machines: what a provider rents us (`Instance`), what we make of it (`Node`), and the written claim on both
(`Lease`).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from skyward_core.machines.offers import Extra


class InstanceState(StrEnum):
    """What a provider says of a machine. Only GONE costs nothing for certain."""

    PENDING = "pending"  # paid for or about to be, not yet reachable
    RUNNING = "running"
    STOPPING = "stopping"  # on its way out, may still be paid for
    GONE = "gone"


class Endpoint(BaseModel):
    """Where and as whom to log in. Plain JSON, no secrets: `key` is a path.

    What is None is decided by ~/.ssh/config and, after it, by OpenSSH's defaults: the port, the user, the keys and the
    agent, the known_hosts file. `host` may be an alias of that file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(min_length=1)
    port: int | None = Field(default=None, ge=1, le=65535)
    user: str | None = None
    key: str | None = None
    """Path of a private key without passphrase. The agent and other keys are not tried then."""
    host_key: str | None = None
    """The machine's public key as in a `.pub` file: "ssh-ed25519 AAAA..."."""
    host_key_grace_seconds: float = Field(default=0.0, ge=0)
    """For so long after its first answer a new machine may show another key: one whose startup script, which brings
    this one, runs later than its sshd.
    """
    known_hosts: str | None = None
    """Path; "/dev/null" trusts the first key seen, which suits addresses that a cloud hands from one machine to the
    next.
    """
    config: str | None = None
    """Path of the file to read in place of ~/.ssh/config."""
    proxy_command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """A command, with its arguments, whose stdin and stdout are the connection (`proxy_command.Proxy`); `host` is then
    a name for messages and host keys only.

    No secrets: it is run with the environment of whoever connects. The word "{python}" stands for that one's
    interpreter. It ends when its input does, says in the last line of its stderr what is wrong, and exits with 77 if
    credentials are refused and 78 if it asks for what cannot be; else it is tried again.
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
    """What is billed beside it, as far as its provider can tell."""
    ip: str | None = None
    private_ip: str | None = None
    tags: dict[str, str] = {}
    """What it was tagged with in the creating call, as far as the provider tells."""
    directory: str | None = None
    """Where its files are: on this machine, or on its own if it has an `endpoint`."""
    endpoint: Endpoint | None = None
    """How to log in; None for an instance that is a set of processes of this machine."""


class Node(BaseModel):
    """An instance that answers, with its rank and workers, as we see it."""

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
    """The written claim on what we are paying for: enough, with the provider's own credentials, to use it or to give it
    back from any process.

    Plain JSON, no secrets: keys and certificates stay with the client that opened the pool.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool_id: str
    provider: dict[str, Any]
    """The provider as `Provider.to_json()` gives it."""
    nodes: tuple[Node, ...] = ()
    scheduler: str = ""
    """Address of the pool's Dask scheduler."""
    created_at: datetime
    expires_at: datetime | None = None
    signature: str = ""
    """Made by the opener, over all but the paths of SSH keys (`signing.py`); "" where the nodes are processes of this
    machine.
    """

    def with_key(self, key: str) -> Lease:
        """Return the lease with another path of the SSH key, for a process that has it elsewhere."""
        return self.model_copy(update={"nodes": tuple(node.with_key(key) for node in self.nodes)})
