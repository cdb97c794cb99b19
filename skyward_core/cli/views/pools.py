"""Pools as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import duration, first_of, iso, money, number_of

if TYPE_CHECKING:
    from skyward_core.ledger.names_policy import Activity, NamedPool
    from skyward_core.ledger.rows import PoolEntry, PoolRow


def pool(
    row: PoolRow,
    usd_per_hour: Decimal,
    now: datetime,
    named: NamedPool | None = None,
    use: Activity | None = None,
) -> dict[str, Any]:
    """Return a pool as in `skyward ps --json`. `use` is there for a pool with a name."""
    entry = row.entry
    idle_since = None if use is None or entry.ended_at is not None else use.idle_since
    return {
        "pool": entry.id,
        "name": None if named is None else named.name,
        "users": None if use is None else use.users,
        "calls": None if use is None else use.calls,
        "idle_since": None if idle_since is None else iso(idle_since),
        "idle_seconds": None if idle_since is None else round(max(0.0, (now - idle_since).total_seconds()), 3),
        "warm_until": None if named is None or named.warm_until is None or entry.ended_at else iso(named.warm_until),
        "state": _state(entry, now),
        "owner": entry.owner.name,
        "work": entry.work.labels(),
        "provider": str(entry.provider.get("name", "?")),
        "account": entry.account,
        "created_at": iso(entry.created_at),
        "lease_expires_at": iso(entry.lease_expires_at),
        "ended_at": None if entry.ended_at is None else iso(entry.ended_at),
        "open_resources": row.open_resources,
        "resources": row.resources,
        "age_seconds": round(((entry.ended_at or now) - entry.created_at).total_seconds(), 3),
        "lease_seconds": round((entry.lease_expires_at - now).total_seconds(), 3),
        "usd_per_hour": float(usd_per_hour),
        "cost_usd": float(row.cost_usd),
        "saved_usd": float(row.on_demand_usd - row.cost_usd),
    }


def _state(entry: PoolEntry, now: datetime) -> str:
    if entry.ended_at is not None:
        return "ended"
    if why := entry.why_dead(now, entry.owner.state()):
        return f"dead: {why}"
    return "live, by its lease" if entry.lives_by_lease else "live"


def table(pools: Sequence[Mapping[str, Any]], works: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows. NAME, USERS, CALLS and IDLE are there only if a pool has a name, WORK only if one has
    work.
    """
    heads = ["POOL", "STATE", "OWNER", "PROVIDER", ">OPEN", ">AGE", ">LEASE", ">USD/H", ">COST USD"]
    rows = [_row(one) for one in pools]
    if any(one["name"] for one in pools):
        heads += ["NAME", ">USERS", ">CALLS", ">IDLE"]
        rows = [[*row, *_name(one)] for row, one in zip(rows, pools, strict=True)]
    if any(works.values()):
        return [*heads, "WORK"], [[*row, works[row[0]]] for row in rows]
    return heads, rows


def _name(pool: Mapping[str, Any]) -> list[str]:
    if not pool["name"]:
        return ["", "", "", ""]
    warm_until: str | None = pool["warm_until"]
    idle_seconds: float | None = pool["idle_seconds"]
    is_warm = warm_until is not None and not pool["users"]
    users = f"warm until {warm_until[11:16]}" if is_warm and warm_until else str(pool["users"])
    return [pool["name"], users, str(pool["calls"]), "" if idle_seconds is None else duration(idle_seconds)]


def _row(pool: Mapping[str, Any]) -> list[str]:
    return [
        pool["pool"],
        pool["state"],
        pool["owner"],
        pool["provider"],
        f"{pool['open_resources']}/{pool['resources']}",
        duration(pool["age_seconds"]),
        "" if pool["state"] == "ended" else duration(pool["lease_seconds"]),
        _rate(pool["usd_per_hour"]),
        money(pool["cost_usd"]),
    ]


def _rate(usd_per_hour: float) -> str:
    """Return a price to the cent; one below a dollar as exactly as any sum."""
    return f"{usd_per_hour:.2f}" if usd_per_hour >= 1 else money(usd_per_hour) if usd_per_hour else ""


def faults(rows: Sequence[PoolRow]) -> list[str]:
    """Return what is wrong with pools that could be read in part."""
    return [f"pool {row.entry.id!r}: {row.entry.trouble}" for row in rows if row.entry.trouble]


def stopped(pool_id: str, ended: Sequence[str], *, is_known: bool, provider: str | None) -> str:
    """Return what `skyward stop` has done: `ended` are ids of machines."""
    if ended:
        return f"{pool_id} has ended: {number_of(ended, 'machine')} ended ({first_of(ended)}); nothing of it is left"
    if is_known:
        return f"{pool_id} has ended; there was no machine of it to end"
    return (
        f"nothing was ended: the ledger has no pool {pool_id!r}, and {provider or 'the provider'} lists no machine"
        " of it; is that its id? look with `skyward ps --all`"
    )
