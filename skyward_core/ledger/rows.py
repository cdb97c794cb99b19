"""What the ledger's entries are, as values: pools, what was asked for and what became of it, bills, accounts.

Money is `Decimal` USD, times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from enum import StrEnum
from typing import Any

from skyward_core.errors import ZERO_USD, LedgerError
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
    """What a second of a resource was spent on; each second falls into one. The order is that of a resource's life."""

    LAUNCHING = "launching"
    BOOTSTRAPPING = "bootstrapping"
    RUNNING_CALLS = "running calls"
    IDLE = "idle"
    LOST = "lost to preemption"
    TERMINATING = "terminating"


BILLING_ROUNDING = "billing rounding"
"""Key of the cost row for what is billed beyond the seconds noted: begun minutes, minimum hours."""


class Period(StrEnum):
    """What the limit of an account holds for: one pool, one UTC day, or one UTC month."""

    RUN = "run"
    DAY = "day"
    MONTH = "month"


class CostBy(StrEnum):
    """What `Ledger.cost_rows` adds up by.

    A resource belongs to the UTC day of its intent; RUN, TASK and ASSET are those of the work that a pool is for.
    """

    RESOURCE = "resource"
    POOL = "pool"
    OWNER = "owner"
    DAY = "day"
    BUCKET = "bucket"
    RUN = "run"
    TASK = "task"
    ASSET = "asset"


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A pool as the ledger knows it.

    `provider` is the provider as `Provider.to_json()` gives it. `ended_at` is None while nobody has said that it has
    ended. `lives_by_lease`: it was detached, or has detached calls, and outlives its owner until its lease runs out.
    `condemned_at`: a sweep has judged it dead and ends its machines. `account` is the one that pays, `provider_account`
    is whose machines they are in the provider's words ("": not known). `work` is what it is rented for.
    """

    id: str
    owner: Owner
    provider: Mapping[str, Any]
    spec_json: str
    created_at: datetime
    lease_expires_at: datetime
    lives_by_lease: bool = False
    account: str | None = None
    condemned_at: datetime | None = None
    ended_at: datetime | None = None
    provider_account: str = ""
    work: Work = NO_WORK
    trouble: str = ""
    """What of its row could not be read, in words: its owner, so that nothing but its lease tells whether it lives."""

    def why_dead(self, now: datetime, owner_state: OwnerState) -> str:
        """Return why nobody may count on this pool's machines any more; "" if it is live."""
        if self.ended_at is not None:
            return "the pool has ended"
        if self.condemned_at is not None:
            return "the pool was judged dead before"
        if self.lease_expires_at <= now:
            return f"its lease ran out {(now - self.lease_expires_at).total_seconds():.0f} s ago"
        if owner_state is OwnerState.DEAD and not self.lives_by_lease:
            return "its owner is dead"
        return ""


class UnreadableRow(LedgerError):
    """A row of the ledger whose text or numbers mean nothing: mend it, or delete it.

    `pool_id` is "" if it is about no pool.
    """

    def __init__(self, table: str, key: object, pool_id: str, reason: str) -> None:
        """Say which row of which table it is, and what could not be read."""
        super().__init__(
            f"row {key!r} of {table} in the ledger cannot be"
            f" read{f' (pool {pool_id!r})' if pool_id and pool_id != key else ''}: {reason}. Mend that row, or delete"
            " it, with the database's own shell (sqlite3, psql)."
        )
        self.pool_id = pool_id
        self.is_pool = key == pool_id
        """Whether the row is the pool's own."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to rent machines: `error` is "" if they came, else the class of ours; `code` is the provider's own word.

    The rest as in `errors.Refusal`.
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
    """How many machines its pool wants: what is known of the pool, not written down with each try."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a resource costs, in USD per hour, as it was launched, and how the provider counts: begun increments, and at
    least a minimum.

    `per_hour` has everything in it; `on_demand_per_hour` is what the same thing costs without spot, the same if not
    given. `extras` say what of both is billed beside the machine. `minimum_usd` is paid at least, if there was anything
    at all.
    """

    per_hour: Decimal = ZERO_USD
    on_demand_per_hour: Decimal | None = None
    is_spot: bool = False
    increment_seconds: int = 1
    minimum_seconds: int = 0
    minimum_usd: Decimal = ZERO_USD
    extras: tuple[Extra, ...] = ()

    def cost(self, seconds: float) -> Decimal:
        """Return what so many seconds cost, in USD with six places, rounded up once: begun increments, at least the
        minimum.

        The ledger's SQL counts the same (`ledger.cost_rows`); a test compares them.
        """
        return self._billed(self.per_hour, seconds)

    def on_demand_cost(self, seconds: float) -> Decimal:
        """Return what they would cost without spot."""
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
        """Return what of a cost, in USD, was for the machine ("machine") and for each of the extras, by its name; they
        add up to it.
        """
        per_hour = self.per_hour or Decimal(1)
        shares = {
            extra.name: (cost * Decimal(repr(extra.usd_per_hour)) / per_hour).quantize(MICRO_USD, ROUND_FLOOR)
            for extra in self.extras
        }
        return {"machine": cost - sum(shares.values(), ZERO_USD), **shares}


def micro_usd(usd: Decimal) -> int:
    """Round up to a whole micro-dollar: what is refused too early costs nothing, what is spent unseen does."""
    return int(usd.quantize(MICRO_USD, ROUND_CEILING) / MICRO_USD)


def _up(number: int, by: int) -> int:
    """Divide, rounded up."""
    return (number + by - 1) // by


@dataclass(frozen=True, slots=True)
class Wish:
    """One thing that is about to be asked for: what an intent says of it before there is an answer.

    `token` is the creating call's idempotency token with what tells the things of one call apart; `tags` are those that
    it will carry.
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
    """What a provider has given in place of quite what was asked for: at a lower price, USD per hour, with tags that
    tell what it is.
    """

    per_hour: Decimal
    tags: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Intent:
    """One thing that we asked a provider for, and what has become of it.

    Open until `gone_at` is set. `cloud_id` is None while nobody knows whether the creating call took effect: find out
    by `token`, `name` and `tags`.
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
    """A line of a bill: what it is for, how many resources, their seconds, and USD as priced and as on demand."""

    key: str
    resources: int
    seconds: float
    cost_usd: Decimal
    on_demand_usd: Decimal

    @property
    def saved_usd(self) -> Decimal:
        """What spot has saved against on demand."""
        return self.on_demand_usd - self.cost_usd


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool with what it has asked for and what that has cost so far: a line of `skyward ps`.

    `seconds` are those of all its resources together.
    """

    entry: PoolEntry
    open_resources: int
    resources: int
    seconds: float
    cost_usd: Decimal
    on_demand_usd: Decimal


PRUNED_SPEC = '{"pruned": true}'
"""Takes the place of the spec of a pool whose details were pruned (`Ledger.prune`)."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `Ledger.prune` has taken away, or would take: details of so many pools, tries to rent machines, and
    reservations that were settled.
    """

    pools: int
    attempts: int
    reservations: int


@dataclass(frozen=True, slots=True)
class Account:
    """A limit in USD for each period, shared by all pools that name it."""

    name: str
    limit_usd: Decimal
    period: Period


@dataclass(frozen=True, slots=True)
class Reservation:
    """Money set aside for a pool. `scope` is the period it counts in: `pool <id>`, `2026-11-21` or `2026-11`."""

    id: int
    account: str
    pool_id: str
    scope: str
    reserved_usd: Decimal
    made_at: datetime
    settled_at: datetime | None = None
    spent_usd: Decimal | None = None
