"""The ledger's entries as values: pools, requested resources and their states, bills, accounts.

Money is `Decimal` USD, times are UTC.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from enum import StrEnum
from typing import Any

from skyward_core.errors import ZERO_USD, LedgerError, PoolStopped
from skyward_core.machines.offers import Extra
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.work import NO_WORK, Work

SECONDS_PER_HOUR = 3600
MICRO_USD = Decimal("0.000001")


class ResourceKind(StrEnum):
    """What a resource of the ledger is.

    Machines are the only resources with intents; OTHER stands for the kinds in rows of earlier versions.
    """

    INSTANCE = "instance"
    OTHER = "other"


class Bucket(StrEnum):
    """What a second of a resource was spent on; each is in one bucket. Their order is that of a resource's life."""

    LAUNCHING = "launching"
    BOOTSTRAPPING = "bootstrapping"
    RUNNING_CALLS = "running calls"
    IDLE = "idle"
    WARM = "warm"
    LOST = "lost to preemption"
    TERMINATING = "terminating"


BILLING_ROUNDING = "billing rounding"
"""Key of the cost row for billed time beyond the noted seconds: begun minutes, minimum hours."""


class Period(StrEnum):
    """What the limit of an account is for: one pool, one UTC day, or one UTC month."""

    RUN = "run"
    DAY = "day"
    MONTH = "month"


class CostBy(StrEnum):
    """The key by which `Ledger.cost_rows` adds up.

    A resource belongs to the UTC day of its intent. RUN, TASK, ASSET and PARTITION are those of the works that bear
    the cost, and OWNER is user@host of their processes.
    """

    RESOURCE = "resource"
    POOL = "pool"
    OWNER = "owner"
    DAY = "day"
    BUCKET = "bucket"
    RUN = "run"
    TASK = "task"
    ASSET = "asset"
    PARTITION = "partition"


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A pool in the ledger.

    `written_provider` is the result of `Provider.to_json()`, as anybody may have written it: only
    `config/own_providers.py` decides what it leads to. `provider_signature` is its owner's, "" if it needs none, or has
    none. `ended_at` is None until the end of the pool is recorded.
    `lives_by_lease`: the pool was detached, or has detached calls, and outlives its owner until its lease expires.
    `condemned_at`: a sweep or `release` has condemned it, and ends its machines. `stopped_by` is the user who has
    stopped it on purpose, "" for nobody. `account` is the account that pays.
    `run_account` is the one that all pools of its run share (`Ledger.open_pool`).
    `provider_account` is the provider's account that has the machines ("": unknown). `work` is that to which the pool
    belongs: it bears what no call has used. A pool with a `name` and without a work belongs to nobody.
    """

    id: str
    owner: Owner
    written_provider: Mapping[str, Any]
    spec_json: str
    created_at: datetime
    lease_expires_at: datetime
    lives_by_lease: bool = False
    account: str | None = None
    run_account: str | None = None
    condemned_at: datetime | None = None
    ended_at: datetime | None = None
    provider_account: str = ""
    provider_signature: str = ""
    work: Work = NO_WORK
    name: str = ""
    stopped_by: str = ""
    trouble: str = ""
    """Why its owner could not be read; "" if it could. Then only its lease shows whether it lives."""
    lease_shift: timedelta | None = None
    """By how much this computer's time of day was set forward since the lease was written in this boot of it; that is
    a part of `lease_expires_at`. None: the lease was written elsewhere, and `lease_expires_at` is as it was written.
    """

    @property
    def provider_name(self) -> str:
        """The name of the provider, for people: what is no visible character is escaped. "?" if there is none."""
        return ascii(str(self.written_provider.get("name", "?")))[1:-1]

    @property
    def max_cost(self) -> float | None:
        """The `max_cost` of its spec, in USD. Raises LedgerError if that cannot be read.

        The spec itself is not rebuilt: a text that anybody may write could name files of this computer.
        """
        try:
            found = json.loads(self.spec_json).get("max_cost")
            usd = None if found is None else float(found)
        except (ValueError, TypeError, AttributeError) as error:
            raise LedgerError(f"the spec of pool {self.id!r} in the ledger cannot be read: {error}") from error
        if usd is not None and not 0 <= usd < math.inf:
            raise LedgerError(f"the spec of pool {self.id!r} in the ledger has max_cost={usd}, which is no amount")
        return usd

    def raise_if_stopped(self) -> None:
        """Raise PoolStopped if somebody has stopped the pool on purpose."""
        if self.stopped_by:
            at = self.condemned_at or self.ended_at
            raise PoolStopped(
                f"Pool {self.id!r} was stopped by {self.stopped_by}{f' at {at:%Y-%m-%d %H:%M:%S} UTC' if at else ''}:"
                " nothing more is rented for it. Open another if it is still wanted."
            )

    @property
    def belongs_to_nobody(self) -> bool:
        """Whether its user has named it, so that nobody but the pool itself bears what no call has used."""
        return bool(self.name) and not self.work.labels()

    @property
    def written_lease(self) -> datetime:
        """The end of the lease as it was written, for `Ledger.condemn`."""
        return self.lease_expires_at - (self.lease_shift or timedelta(0))

    def why_dead(self, now: datetime, owner_state: OwnerState) -> str:
        """Return why this pool is dead; "" if it lives.

        An owner that runs on this computer is not dead because of a lease that another clock may have written. A lease
        of the same boot is exact: an owner that runs and does not renew it has abandoned its pool (InstancesLeft).
        """
        if self.ended_at is not None:
            return "the pool has ended"
        if self.condemned_at is not None:
            return (
                f"the pool was stopped by {self.stopped_by}" if self.stopped_by else "the pool was judged dead before"
            )
        if owner_state is OwnerState.ALIVE and not self.lives_by_lease and self.lease_shift is None:
            return ""
        if self.lease_expires_at <= now:
            return f"its lease ran out {(now - self.lease_expires_at).total_seconds():.0f} s ago"
        if owner_state is OwnerState.DEAD and not self.lives_by_lease:
            return "its owner is dead"
        return ""

    def needs_second_look(self, now: datetime, owner_state: OwnerState) -> bool:
        """Return whether this pool counts as dead only because of its lease, and its owner may still renew that: the
        lease is of another computer's clock, or the owner runs.
        """
        is_open = self.ended_at is None and self.condemned_at is None
        is_dead = owner_state is OwnerState.DEAD and not self.lives_by_lease
        may_renew = self.lease_shift is None or owner_state is OwnerState.ALIVE
        return is_open and not is_dead and may_renew and bool(self.why_dead(now, owner_state))


class UnreadableRow(LedgerError):
    """A row of the ledger with values that cannot be read. A person must correct or delete it.

    `pool_id` is "" if the row belongs to no pool.
    """

    def __init__(self, table: str, key: object, pool_id: str, reason: str) -> None:
        """Name the row, its table and the reason."""
        super().__init__(
            f"row {key!r} of {table} in the ledger cannot be"
            f" read{f' (pool {pool_id!r})' if pool_id and pool_id != key else ''}"
            f": {reason}. Correct that row, or delete it, with the database's own shell (sqlite3, psql)."
        )
        self.pool_id = pool_id
        self.is_pool = key == pool_id
        """Whether the row is the pool's own."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to rent machines.

    `error` is "" after a success, else the class of our error; `code` is the provider's own code. The other fields are
    those of `errors.Refusal`.
    """

    pool_id: str
    at: datetime
    provider: str
    region: str
    instance_type: str
    is_spot: bool
    seconds: float
    error: str = ""
    code: str = ""
    message: str = ""
    nodes: int = 1
    """The number of nodes of its pool. It is read from the pool, not stored with each attempt."""


@dataclass(frozen=True, slots=True)
class SlotUse:
    """For how many seconds a call had one of the slots of an instance. `slots` is how many that instance has."""

    instance_id: str
    slots: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CallState:
    """What a client knows of a detached call.

    `generation` is how many nodes have got it. `ended_at` is None before its end. `work` has started it; `owner` says
    in words whom it is for.
    """

    call_id: str
    name: str
    owner: str
    generation: int
    state: str
    started_at: datetime
    ended_at: datetime | None = None
    used: tuple[SlotUse, ...] = ()
    work: Work = NO_WORK


@dataclass(frozen=True, slots=True)
class CallEntry:
    """A detached call. `state` is the last one that a client has seen; `seconds` is how long it had slots up to that
    state, and `cost_usd` the price of these slots.
    """

    pool_id: str
    call_id: str
    name: str
    owner: str
    generation: int
    state: str
    started_at: datetime
    ended_at: datetime | None
    seconds: float
    cost_usd: Decimal
    pool_ended_at: datetime | None
    work: Work = NO_WORK
    """That has started it."""

    @property
    def has_unknown_end(self) -> bool:
        """Whether the pool has ended, and no client has seen the end of the call."""
        return self.ended_at is None and self.pool_ended_at is not None


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a resource in USD per hour at its launch, and the provider's billing rules: increments and minimums.

    `per_hour` includes all extras. `on_demand_per_hour` is the price without spot; None if it is the same. `extras` are
    the parts of both prices that are billed in addition to the machine. `minimum_usd` is the lowest cost of a resource
    that existed.
    """

    per_hour: Decimal = ZERO_USD
    on_demand_per_hour: Decimal | None = None
    is_spot: bool = False
    increment_seconds: int = 1
    minimum_seconds: int = 0
    minimum_usd: Decimal = ZERO_USD
    extras: tuple[Extra, ...] = ()

    def cost(self, seconds: float) -> Decimal:
        """Return the cost of so many seconds in USD, rounded up once to six places.

        Begun increments count as whole ones, and the minimum applies. The ledger's SQL computes the same
        (`ledger.cost_rows`); a test compares them.
        """
        return self._billed(self.per_hour, seconds)

    def on_demand_cost(self, seconds: float) -> Decimal:
        """Return the cost of so many seconds without spot."""
        return self._billed(self.per_hour if self.on_demand_per_hour is None else self.on_demand_per_hour, seconds)

    def _billed(self, per_hour: Decimal, seconds: float) -> Decimal:
        begun = _up(_up(round(seconds * 1000), 1000), self.increment_seconds) * self.increment_seconds
        return (
            max(
                _up(micro_usd(per_hour) * max(begun, self.minimum_seconds), SECONDS_PER_HOUR),
                micro_usd(self.minimum_usd),
            )
            * MICRO_USD
        )

    def lines(self, cost: Decimal) -> dict[str, Decimal]:
        """Divide a cost in USD into the parts of the machine ("machine") and of each extra, by name."""
        per_hour = self.per_hour or Decimal(1)
        shares = {
            extra.name: (cost * Decimal(repr(extra.usd_per_hour)) / per_hour).quantize(MICRO_USD, ROUND_FLOOR)
            for extra in self.extras
        }
        return {"machine": cost - sum(shares.values(), ZERO_USD), **shares}


def micro_usd(usd: Decimal) -> int:
    """Return whole micro-dollars, rounded up: a limit must stop a little too early, never too late."""
    return int(usd.quantize(MICRO_USD, ROUND_CEILING) / MICRO_USD)


def _up(number: int, by: int) -> int:
    """Divide, rounded up."""
    return (number + by - 1) // by


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """One resource that is about to be requested: the part of its intent that is known before the answer.

    `token` is the idempotency token of the creating call, with a suffix for each resource of the call. `tags` are the
    tags that the resource will have.
    """

    kind: ResourceKind
    provider: str
    region: str
    name: str
    token: str
    tags: Mapping[str, str]
    expires_at: datetime
    price: Price = Price()


@dataclass(frozen=True, slots=True)
class Rented:
    """How a resource differs from the request: its lower price in USD per hour, and its tags."""

    per_hour: Decimal
    tags: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Intent:
    """One requested resource, and its state.

    Open until `gone_at` is set. `cloud_id` is None while it is unknown whether the creating call took effect. Then
    `token`, `name` and `tags` find the resource.
    """

    id: int
    pool_id: str
    kind: ResourceKind
    provider: str
    region: str
    name: str
    token: str
    tags: Mapping[str, str]
    price: Price
    intended_at: datetime
    expires_at: datetime
    cloud_id: str | None
    bound_at: datetime | None
    end_asked_at: datetime | None
    gone_at: datetime | None
    evidence: str | None
    seconds: Mapping[Bucket, float]


@dataclass(frozen=True, slots=True)
class CostRow:
    """A line of a bill: its key, the number of resources, their seconds, and the cost in USD, real and on demand."""

    key: str
    resources: int
    seconds: float
    cost_usd: Decimal
    on_demand_usd: Decimal

    @property
    def saved_usd(self) -> Decimal:
        """The on-demand cost minus the real cost."""
        return self.on_demand_usd - self.cost_usd

    def plus(self, other: CostRow) -> CostRow:
        """Return the sum of two lines of one key."""
        return CostRow(
            self.key,
            self.resources + other.resources,
            self.seconds + other.seconds,
            self.cost_usd + other.cost_usd,
            self.on_demand_usd + other.on_demand_usd,
        )


@dataclass(frozen=True, slots=True)
class CostPart:
    """The part of a pool's cost that is for one work, in USD, real and on demand.

    `is_final`: whether it does not change any more: the pool and all that it rented have ended, or the uses and
    detached calls of this work have, and the rest of the pool is not for this work. `pool` is the name of a pool that
    belongs to nobody, if this is what no call has used of it; else "".
    """

    pool_id: str
    work: Work
    cost_usd: Decimal
    on_demand_usd: Decimal
    is_final: bool
    pool: str = ""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool with its resources and their cost so far: a line of `skyward ps`.

    `seconds` is the sum of all its resources.
    """

    entry: PoolEntry
    open_resources: int
    resources: int
    seconds: float
    cost_usd: Decimal
    on_demand_usd: Decimal


@dataclass(frozen=True, slots=True, repr=False)
class SealedLease:
    """The newest lease of a pool that outlives its owner, and the keys for it, sealed (`machines/signing.py`).

    Neither text is verified.
    """

    pool_id: str
    lease_json: str
    sealed: str
    updated_at: datetime

    def __repr__(self) -> str:
        return f"SealedLease({self.pool_id!r}, updated_at={self.updated_at:%Y-%m-%dT%H:%M:%SZ})"


PRUNED_SPEC = '{"pruned": true}'
"""Replaces the spec of a pool whose details were pruned (`Ledger.prune`)."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many pools, attempts, settled reservations and detached calls `Ledger.prune` has pruned, or would prune."""

    pools: int
    attempts: int
    reservations: int
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """A limit in USD for each period, shared by all pools that use the account."""

    name: str
    limit_usd: Decimal
    period: Period


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved money of a pool. `scope` is the period to which it belongs: `pool <id>`, `2026-11-21` or `2026-11`."""

    id: int
    account: str
    pool_id: str
    scope: str
    reserved_usd: Decimal
    made_at: datetime
    settled_at: datetime | None = None
    spent_usd: Decimal | None = None
