"""The users of a pool with a name, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import iso, money
from skyward_core.errors import ZERO_USD

if TYPE_CHECKING:
    from skyward_core.ledger.rows import PoolEntry
    from skyward_core.ledger.users import PoolUser


def as_json(pool_id: str, users: Sequence[PoolUser], cost_usd: Decimal) -> dict[str, Any]:
    return {
        "pool": pool_id,
        "users": [_as_json(user, cost_usd) for user in users],
        "calls_cost_usd": float(calls_cost_usd(users)),
        "rest_usd": float(cost_usd - calls_cost_usd(users)),
        "cost_usd": float(cost_usd),
    }


def _as_json(user: PoolUser, cost_usd: Decimal) -> dict[str, Any]:
    return {
        "user": user.name,
        "pid": user.pid,
        "is_detached": user.is_detached,
        "state": _state(user),
        "work": user.work.labels(),
        "joined_at": iso(user.joined_at),
        "left_at": None if user.left_at is None else iso(user.left_at),
        "slot_seconds": round(user.slot_seconds, 3),
        "cost_usd": float(user.cost_usd),
        "share": _share(user, cost_usd),
    }


def table(pool: PoolEntry | None, users: Sequence[PoolUser], cost_usd: Decimal) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the users, what no call has used with who bears it, and the total."""
    heads = ["USER", ">PID", "STATE", "SINCE", ">SLOT SECONDS", ">SHARE", ">COST USD", "WORK"]
    bearer = f"pool {pool.name}" if pool is not None and pool.belongs_to_nobody else "(no calls)"
    rest_usd = money(float(cost_usd - calls_cost_usd(users)))
    rest = [bearer, "", "", "", "", "", rest_usd, "" if pool is None else str(pool.work)]
    seconds = sum(user.slot_seconds for user in users)
    total = ["total", "", "", "", f"{seconds:.1f}", "", money(float(cost_usd)), ""]
    return heads, [*(_row(user, cost_usd) for user in users), rest, total]


def _row(user: PoolUser, cost_usd: Decimal) -> list[str]:
    return [
        f"detached calls of {user.name or '(no owner)'}" if user.is_detached else user.name,
        "" if user.pid is None else str(user.pid),
        _state(user),
        iso(user.joined_at),
        f"{user.slot_seconds:.1f}",
        f"{_share(user, cost_usd):.1%}",
        money(float(user.cost_usd)),
        str(user.work),
    ]


def _state(user: PoolUser) -> str:
    """Return whether it is there: a process that neither left nor renews its lease was killed, or is cut off."""
    return "live" if user.lives else "ended" if user.left_at is not None else "silent"


def _share(user: PoolUser, cost_usd: Decimal) -> float:
    """Return its part of the whole cost of the pool, from 0 to 1."""
    return round(float(user.cost_usd / cost_usd), 6) if cost_usd else 0.0


def calls_cost_usd(users: Sequence[PoolUser]) -> Decimal:
    """Return what the calls of these users have cost."""
    return sum((user.cost_usd for user in users), ZERO_USD)
