"""The receipt of a pool as plain data: what it has rented, how each resource ended, what it has cost, and for whom.

`users_of` divides the cost among those who have used the pool: uses (`uses.py`) and detached calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from skyward_core.errors import ZERO_USD, LedgerConflict
from skyward_core.ledger.bills import HeldPart, divided
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Client
from skyward_core.ledger.rows import MICRO_USD, Bucket, CallEntry, CostBy, CostRow, Intent, ResourceKind, UnreadableRow
from skyward_core.ledger.sql_engine import shown
from skyward_core.ledger.uses import UseEntry
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.providers.base import TYPE_TAG
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


def receipt(ledger: Ledger, pool_id: str, *, unreadable: list[UnreadableRow] | None = None) -> dict[str, Any]:
    """Return the receipt of a pool as data for `json.dumps`; of a live pool, the receipt so far.

    Raises LedgerError, and LedgerConflict if the ledger does not have the pool. Entries that cannot be read are
    appended to `unreadable`, and raised without that list.

    Times are UTC in ISO 8601, None if it has not happened; money is USD to the micro-dollar, seconds are exact to the
    millisecond. `resources` are in the order of their requests. Their costs add up to `total_cost_usd`, and so do the
    `buckets`, one of which is the billing rounding; their seconds add up to those of the buckets. `lines` divide the
    same total into machines, disks, addresses and so on. `users` are the processes that have used a pool with a name;
    their costs are in the bucket "running calls", which also has slots that were empty beside them. `max_cost_usd` is
    the pool's limit, None if it has none, or is pruned. `ceiling_usd` is the most that it may cost: by that limit, or
    by `max_lifetime` and the dearest price of its machines. `left` are the resources that are not known to be gone.
    """
    with ledger.snapshot():
        return _receipt(ledger, pool_id, unreadable)


def _receipt(ledger: Ledger, pool_id: str, unreadable: list[UnreadableRow] | None) -> dict[str, Any]:
    pool = ledger.pool(pool_id)
    if pool is None:
        raise LedgerConflict(
            f"The ledger at {shown(ledger.url)} has no pool {pool_id!r}. Is it another ledger than the one it was"
            " opened with?"
        )
    bills = {row.key: row for row in ledger.cost_rows(CostBy.RESOURCE, pool_id=pool_id, unreadable=unreadable)}
    intents = sorted(
        (intent for intent in ledger.intents(pool_id=pool_id, unreadable=unreadable) if str(intent.id) in bills),
        key=lambda intent: intent.id,
    )
    spec = json.loads(pool.spec_json)
    buckets = ledger.cost_rows(CostBy.BUCKET, pool_id=pool_id, unreadable=None if unreadable is None else [])
    seconds = _seconds(intents, buckets)
    return {
        "pool_id": pool.id,
        "name": pool.name or None,
        "owner": pool.owner.name,
        "work": pool.work.labels(),
        "provider": pool.provider_name,
        "account": pool.account,
        "max_cost_usd": spec.get("max_cost"),
        "ceiling_usd": _ceiling(spec, intents),
        "created_at": _time(pool.created_at),
        "ended_at": _time(pool.ended_at),
        "resources": [_resource(intent, bills[str(intent.id)], seconds[intent.id]) for intent in intents],
        "buckets": {
            row.key: {
                "seconds": row.seconds,
                "cost_usd": float(row.cost_usd),
                "on_demand_usd": float(row.on_demand_usd),
            }
            for row in buckets
        },
        "lines": _lines(intents, bills),
        "users": [_user(user) for user in users_of(ledger, pool_id, unreadable=unreadable)],
        "total_cost_usd": _sum(row.cost_usd for row in bills.values()),
        "on_demand_usd": _sum(row.on_demand_usd for row in bills.values()),
        "saved_usd": _sum(row.saved_usd for row in bills.values()),
        "left": [_name(intent) for intent in intents if intent.gone_at is None],
    }


def _ceiling(spec: Mapping[str, Any], intents: Iterable[Intent]) -> float | None:
    """As `ceiling_of` of a quote, with the prices that were paid in place of those that may be."""
    limits = [spec["max_cost"]] if spec.get("max_cost") is not None else []
    prices = [float(intent.price.per_hour) for intent in intents if intent.kind is ResourceKind.INSTANCE]
    lifetime, nodes = spec.get("max_lifetime"), spec.get("nodes", 1)
    if lifetime is not None and prices:
        most = max(nodes) if isinstance(nodes, list) else nodes
        limits.append(round(max(prices) * most * lifetime / 3600, 6))
    return min(limits, default=None)


def _seconds(intents: Sequence[Intent], buckets: Sequence[CostRow]) -> dict[int, dict[Bucket, float]]:
    """Return the seconds of each resource by bucket. What a bucket of the pool has given to running calls, its
    resources have given, in their order.
    """
    found = {
        intent.id: {bucket: round(intent.seconds.get(bucket, 0.0) * 1000) for bucket in Bucket} for intent in intents
    }
    left = {row.key: round(row.seconds * 1000) for row in buckets}
    for bucket in Bucket:
        missing = sum(its[bucket] for its in found.values()) - left[bucket]
        for its in found.values() if bucket is not Bucket.RUNNING_CALLS else ():
            moved = max(0, min(missing, its[bucket]))
            its[bucket] -= moved
            its[Bucket.RUNNING_CALLS] += moved
            missing -= moved
    return {number: {bucket: spent / 1000 for bucket, spent in its.items()} for number, its in found.items()}


def _resource(intent: Intent, bill: CostRow, seconds: Mapping[Bucket, float]) -> dict[str, Any]:
    return {
        **_name(intent),
        "instance_type": intent.tags.get(TYPE_TAG),
        "is_spot": intent.price.is_spot,
        "price_per_hour_usd": float(intent.price.per_hour),
        "extras_per_hour": [extra.model_dump() for extra in intent.price.extras],
        "lines": {name: float(usd) for name, usd in intent.price.lines(bill.cost_usd).items()},
        "intended_at": _time(intent.intended_at),
        "bound_at": _time(intent.bound_at),
        "end_asked_at": _time(intent.end_asked_at),
        "gone_at": _time(intent.gone_at),
        "evidence": intent.evidence,
        "seconds": {bucket.value: seconds[bucket] for bucket in Bucket},
        "cost_usd": float(bill.cost_usd),
        "on_demand_usd": float(bill.on_demand_usd),
    }


def _user(user: PoolUser) -> dict[str, Any]:
    return {
        "user": user.name,
        "is_detached": user.is_detached,
        "work": user.work.labels(),
        "joined_at": _time(user.joined_at),
        "left_at": _time(user.left_at),
        "slot_seconds": round(user.slot_seconds, 3),
        "cost_usd": float(user.cost_usd),
    }


def _lines(intents: Iterable[Intent], bills: Mapping[str, CostRow]) -> dict[str, float]:
    """Return the total cost of the machines, and of each kind of extra."""
    totals: dict[str, Decimal] = {}
    for intent in intents:
        for name, usd in intent.price.lines(bills[str(intent.id)].cost_usd).items():
            totals[name] = totals.get(name, ZERO_USD) + usd
    return {name: float(usd) for name, usd in totals.items()}


def _name(intent: Intent) -> dict[str, Any]:
    """Return what a person needs to find a resource at the provider."""
    return {
        "kind": intent.kind.value,
        "provider": intent.provider,
        "region": intent.region,
        "name": intent.name,
        "cloud_id": intent.cloud_id,
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()


def _sum(amounts: Iterable[Decimal]) -> float:
    return float(sum(amounts, ZERO_USD))


@dataclass(frozen=True, slots=True)
class PoolUser:
    """A use of a pool; a process that has made no calls; or all detached calls of a work for one owner.

    `name` is user@host, or the owner of the detached calls. `joined_at` is when it came, or when the first of these
    calls was started. `slot_seconds` is for how long its calls have held slots, as it was recorded last, and `cost_usd`
    what that has cost. `lives`: whether the process may still use the pool, or one of the calls has not ended.
    """

    name: str
    work: Work
    joined_at: datetime
    left_at: datetime | None
    slot_seconds: float
    cost_usd: Decimal
    is_detached: bool = False
    pid: int | None = None
    """Of the process on its host; None for detached calls."""
    lives: bool = False
    has_calls: bool = True


def users_of(
    ledger: Ledger, pool_id: str, *, split: bool = False, unreadable: list[UnreadableRow] | None = None
) -> list[PoolUser]:
    """Return the users of a pool, in the order in which they came; none for a pool without a name and without uses.

    Their costs are those of `Ledger.cost_rows`. `split` divides among them what no call has used of a pool that belongs
    to nobody, in proportion to their costs. Raises LedgerError.
    """
    with ledger.snapshot():
        return _users_of(ledger, pool_id, unreadable, split=split)


def _users_of(ledger: Ledger, pool_id: str, unreadable: list[UnreadableRow] | None, *, split: bool) -> list[PoolUser]:
    clients, uses, entry = ledger.names.clients(pool_id), ledger.uses.of_pool(pool_id, unreadable), ledger.pool(pool_id)
    if not clients and not uses:
        return []
    calls = ledger.calls(pool_id=pool_id, unreadable=unreadable)
    parts = {part.key: part for part in ledger.held_parts(pool_id)}
    now, owners = ledger.names.now(), {client.id: client.owner for client in clients}
    opener = entry.owner if entry is not None else Owner.unknown("")
    has_use = {use.client_id for use in uses}
    steps = [_of_use(use, owners.get(use.client_id, opener), parts.get(use.id)) for use in uses]
    others = [_of_client(client, now) for client in clients if client.id not in has_use]
    found = [*sorted([*steps, *others], key=lambda user: user.joined_at), *_of_calls(calls, parts)]
    if split and entry is not None and entry.belongs_to_nobody:
        rows = ledger.cost_rows(CostBy.POOL, pool_id=pool_id, unreadable=None if unreadable is None else [])
        return _with_all_of(sum((row.cost_usd for row in rows), ZERO_USD), found)
    return found


def _with_all_of(cost_usd: Decimal, users: Sequence[PoolUser]) -> list[PoolUser]:
    """Return the users with the whole cost of their pool, divided among those that have made calls."""
    costs = [int(user.cost_usd / MICRO_USD) for user in users if user.has_calls]
    parts = iter(divided(int(cost_usd / MICRO_USD) - sum(costs), costs))
    return [
        replace(user, cost_usd=user.cost_usd + next(parts) * MICRO_USD) if user.has_calls else user for user in users
    ]


def _of_use(use: UseEntry, owner: Owner, part: HeldPart | None) -> PoolUser:
    lives = use.ended_at is None and owner.state() is not OwnerState.DEAD
    cost_usd, estimated_usd = (ZERO_USD, ZERO_USD) if part is None else (part.cost_usd, part.estimated_usd)
    # of what is estimated, only the part for which others have left slots
    share = float(estimated_usd / use.estimated_usd) if use.estimated_usd else 1.0
    slot_seconds = use.slot_seconds - (1.0 - share) * use.estimated_seconds
    return PoolUser(
        owner.name, use.work, use.began_at, use.ended_at, slot_seconds, cost_usd, pid=owner.pid or None, lives=lives
    )


def _of_client(client: Client, now: datetime) -> PoolUser:
    return PoolUser(
        client.owner.name,
        client.work,
        client.joined_at,
        client.left_at,
        0.0,
        ZERO_USD,
        pid=client.owner.pid or None,
        lives=client.lives(now, client.owner.state()),
        has_calls=False,
    )


def _of_calls(calls: Sequence[CallEntry], parts: Mapping[str | tuple[str, Work], HeldPart]) -> list[PoolUser]:
    """Return one user for the detached calls of each owner and work."""
    by_owner: dict[tuple[str, Work], list[CallEntry]] = {}
    for call in calls:
        by_owner.setdefault((call.owner, call.work), []).append(call)
    return [
        PoolUser(
            owner,
            work,
            min(call.started_at for call in its),
            _last_end(its),
            sum(round(call.seconds * 1000) for call in its) / 1000,
            parts[owner, work].cost_usd if (owner, work) in parts else ZERO_USD,
            is_detached=True,
            lives=_last_end(its) is None and its[0].pool_ended_at is None,
        )
        for (owner, work), its in sorted(by_owner.items(), key=lambda one: (one[0][0], str(one[0][1])))
    ]


def _last_end(calls: Sequence[CallEntry]) -> datetime | None:
    """Return when the last one has ended; None while one runs."""
    ends = [call.ended_at for call in calls if call.ended_at is not None]
    return max(ends) if len(ends) == len(calls) else None
