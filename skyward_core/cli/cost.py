"""`skyward cost` and `users`: what was spent, and by whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyward_core.cli import values
from skyward_core.cli.options import SHOWN_ROWS, AsJson, Split, complete_pools, id_of, open_settled_ledger
from skyward_core.cli.printing import iso, money, print_json, print_table, print_warnings
from skyward_core.errors import ZERO_USD, BadRequest

if TYPE_CHECKING:
    from skyward_core.ledger.receipt import PoolUser
    from skyward_core.ledger.rows import CostRow, PoolEntry, UnreadableRow


def cost(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    by: Annotated[
        Literal["day", "pool", "owner", "bucket", "run", "task", "asset", "partition"],
        typer.Option(help="one line for each of these"),
    ] = "day",
    split: Split = False,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=values.since,
            metavar="WHEN",
            help="requested on this UTC day (2026-11-21) or later; 30d: in these days",
        ),
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=values.date, metavar="DATE", help="requested before this UTC day")
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            parser=values.count, metavar="N", help="at most this many lines, the costliest; the others are one line"
        ),
    ] = SHOWN_ROWS,
) -> int:
    """Add up what was spent, and what spot has saved."""
    from skyward_core.ledger.rows import CostBy

    if since is not None and until is not None and until <= since:
        raise typer.BadParameter(f"--until {iso(until)} is not after --since {iso(since)}: nothing is between them")
    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger:
        rows = ledger.cost_rows(CostBy(by), since=since, until=until, split=split, unreadable=unreadable)
    if as_json:
        print_json({"by": by, "rows": [sum_of(row.key, [row]) for row in rows], "total": total(rows)})
    else:
        print_table(*_cost_table(by, rows, limit))
    return print_warnings(unreadable)


def users(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", parser=values.name, autocompletion=complete_pools, help="of a pool, or its id"),
    ],
    *,
    as_json: AsJson = False,
    split: Split = False,
) -> int:
    """Show who uses a pool with a name, or has used it, and what that has cost."""
    from skyward_core.ledger.receipt import users_of

    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger, ledger.snapshot():
        pool_id = id_of(ledger, name)
        found = users_of(ledger, pool_id, split=split, unreadable=unreadable)
        if not found and (entry := ledger.pool(pool_id)) is not None:
            raise BadRequest(
                f"the pool {pool_id} is not shared: all of it is for {str(entry.work) or entry.owner.name}. `skyward"
                f" receipt {pool_id}` has its cost"
            )
        if not found:
            raise BadRequest(f"the ledger has no pool with the name or the id {name!r}: look with `skyward ps --all`")
        cost = ledger.pool_cost_usd(pool_id)
        pool = ledger.pool(pool_id)
    if as_json:
        print_json(_users_json(pool_id, found, cost))
    else:
        print_table(*_users_table(pool, found, cost))
    return print_warnings(unreadable)


def sum_of(key: str, rows: Sequence[CostRow]) -> dict[str, Any]:
    """Return the sum of these rows as one line of `skyward cost --json`."""
    return {
        "key": key,
        "resources": sum(row.resources for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 3),
        "cost_usd": float(sum((row.cost_usd for row in rows), ZERO_USD)),
        "on_demand_usd": float(sum((row.on_demand_usd for row in rows), ZERO_USD)),
        "saved_usd": float(sum((row.saved_usd for row in rows), ZERO_USD)),
    }


def total(rows: Sequence[CostRow]) -> dict[str, Any]:
    from skyward_core.ledger.rows import BILLING_ROUNDING

    # a resource has seconds in several buckets; the row of billing rounding counts each resource once
    counted = [row for row in rows if row.key == BILLING_ROUNDING] or rows
    return {**sum_of("total", rows), "resources": sum(row.resources for row in counted)}


def _cost_table(by: str, rows: Sequence[CostRow], limit: int) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the costliest lines in the ledger's order, the others as one line, and the total."""
    costliest = sorted(rows, key=lambda row: row.cost_usd, reverse=True)[:limit]
    shown = {row.key for row in costliest}
    sums = [sum_of(row.key, [row]) for row in rows if row.key in shown]
    if others := [row for row in rows if row.key not in shown]:
        sums.append(sum_of(f"({len(others)} others)", others))
    heads = [by.upper(), ">RESOURCES", ">HOURS", ">USD", ">ON DEMAND", ">SAVED"]
    return heads, [_cost_row(one) for one in [*sums, total(rows)]]


def _cost_row(its: Mapping[str, Any]) -> list[str]:
    from skyward_core.ledger.rows import BILLING_ROUNDING

    return [
        str(its["key"]),
        "" if its["key"] == BILLING_ROUNDING else str(its["resources"]),
        f"{its['seconds'] / 3600:.2f}",
        *(money(its[name]) for name in ("cost_usd", "on_demand_usd", "saved_usd")),
    ]


def _users_json(pool_id: str, users: Sequence[PoolUser], cost_usd: Decimal) -> dict[str, Any]:
    return {
        "pool": pool_id,
        "users": [_user_json(user, cost_usd) for user in users],
        "calls_cost_usd": float(_calls_cost_usd(users)),
        "rest_usd": float(cost_usd - _calls_cost_usd(users)),
        "cost_usd": float(cost_usd),
    }


def _user_json(user: PoolUser, cost_usd: Decimal) -> dict[str, Any]:
    return {
        "user": user.name,
        "pid": user.pid,
        "is_detached": user.is_detached,
        "state": _user_state(user),
        "work": user.work.labels(),
        "joined_at": iso(user.joined_at),
        "left_at": None if user.left_at is None else iso(user.left_at),
        "slot_seconds": round(user.slot_seconds, 3),
        "cost_usd": float(user.cost_usd),
        "share": _share(user, cost_usd),
    }


def _users_table(
    pool: PoolEntry | None, users: Sequence[PoolUser], cost_usd: Decimal
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the users, what no call has used with who bears it, and the total."""
    heads = ["USER", ">PID", "STATE", "SINCE", ">SLOT SECONDS", ">SHARE", ">COST USD", "WORK"]
    bearer = f"pool {pool.name}" if pool is not None and pool.belongs_to_nobody else "(no calls)"
    rest_usd = money(float(cost_usd - _calls_cost_usd(users)))
    rest = [bearer, "", "", "", "", "", rest_usd, "" if pool is None else str(pool.work)]
    seconds = sum(user.slot_seconds for user in users)
    total = ["total", "", "", "", f"{seconds:.1f}", "", money(float(cost_usd)), ""]
    return heads, [*(_user_row(user, cost_usd) for user in users), rest, total]


def _user_row(user: PoolUser, cost_usd: Decimal) -> list[str]:
    return [
        f"detached calls of {user.name or '(no owner)'}" if user.is_detached else user.name,
        "" if user.pid is None else str(user.pid),
        _user_state(user),
        iso(user.joined_at),
        f"{user.slot_seconds:.1f}",
        f"{_share(user, cost_usd):.1%}",
        money(float(user.cost_usd)),
        str(user.work),
    ]


def _user_state(user: PoolUser) -> str:
    """Return whether it is there: a process that neither left nor renews its lease was killed, or is cut off."""
    return "live" if user.lives else "ended" if user.left_at is not None else "silent"


def _share(user: PoolUser, cost_usd: Decimal) -> float:
    """Return its part of the whole cost of the pool, from 0 to 1."""
    return round(float(user.cost_usd / cost_usd), 6) if cost_usd else 0.0


def _calls_cost_usd(users: Sequence[PoolUser]) -> Decimal:
    """Return what the calls of these users have cost."""
    return sum((user.cost_usd for user in users), ZERO_USD)
