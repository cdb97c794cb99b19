"""Machines: what a provider rents us (`Instance`), what we make of it (`Node`), and the written claim on both (`Lease`)."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class InstanceState(StrEnum):
    """What a provider says of a machine. Only GONE costs nothing for certain."""

    PENDING = "pending"  # paid for or about to be, not yet reachable
    RUNNING = "running"
    STOPPING = "stopping"  # on its way out, may still be paid for
    GONE = "gone"


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
    ip: str | None = None
    private_ip: str | None = None
    directory: str | None = None
    """Where its files are, for an instance that is a set of processes of this machine."""


class Node(BaseModel):
    """An instance that answers, with its rank and workers, as we see it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance: Instance
    rank: int
    workers: int = 1
    slots: int = 1
    """Calls that one worker runs at once."""


class Lease(BaseModel):
    """The written claim on what we are paying for: enough, with the provider's own credentials, to use it or to give it back from any process.

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
