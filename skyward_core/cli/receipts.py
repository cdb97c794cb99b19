"""`skyward receipt`: what one pool has rented, what became of it, and what it has cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from skyward_core.cli.options import AsJson, PoolId, id_of, open_settled_ledger
from skyward_core.cli.printing import first_of, iso, money, number_of, print_json, print_table, print_warnings, say

if TYPE_CHECKING:
    from skyward_core.ledger.rows import UnreadableRow

HEADS = ["NODE", "MACHINE", "TYPE", "REGION", "REQUESTED", "ENDED", ">SECONDS", ">USD"]


def receipt(context: typer.Context, pool: PoolId, *, as_json: AsJson = False) -> int:
    """Show what a pool has rented, what became of it, and what it has cost."""
    from skyward_core.ledger.receipt import receipt as receipt_of

    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger:
        found = receipt_of(ledger, id_of(ledger, pool), unreadable=unreadable)
    if as_json:
        print_json(found)
    else:
        say(_title(found))
        if found["resources"]:
            print_table(HEADS, _machine_rows(found))
            print()
            print_table(["BUCKET", ">SECONDS", ">USD", ">ON DEMAND"], _bucket_rows(found))
            print()
        for line in _summary(found):
            say(line)
    return print_warnings(unreadable)


def _title(found: Mapping[str, Any]) -> str:
    from skyward_core.work import Work

    name = f" ({found['name']})" if found["name"] else ""
    work = str(Work(**found["work"]))
    until = _shown(found["ended_at"]) if found["ended_at"] else "now, so far"
    return (
        f"{found['pool_id']}{name} of {found['owner']}{f' for {work}' if work else ''}, from"
        f" {_shown(found['created_at'])} until {until}"
    )


def _machine_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [_machine_row(one, found["pool_id"]) for one in found["resources"]]
    seconds = sum(_seconds(one) for one in found["resources"])
    return [*rows, ["total", "", "", "", "", "", f"{seconds:.1f}", money(found["total_cost_usd"])]]


def _machine_row(resource: Mapping[str, Any], pool_id: str) -> list[str]:
    is_ending = resource["end_asked_at"] and not resource["gone_at"]
    return [
        resource["name"].removeprefix(f"{pool_id}-"),
        resource["cloud_id"] or "",
        resource["instance_type"] or "",
        resource["region"],
        _shown(resource["intended_at"]),
        "(is ending)" if is_ending else _shown(resource["gone_at"]),
        f"{_seconds(resource):.1f}",
        money(resource["cost_usd"]),
    ]


def _seconds(resource: Mapping[str, Any]) -> float:
    return sum(resource["seconds"].values())


def _bucket_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the buckets that have something in them, and their sum."""
    buckets = found["buckets"]
    rows = [_bucket_row(name, one) for name, one in buckets.items() if one["seconds"] or one["cost_usd"]]
    seconds = sum(one["seconds"] for one in buckets.values())
    total = {"seconds": seconds, "cost_usd": found["total_cost_usd"], "on_demand_usd": found["on_demand_usd"]}
    return [*rows, _bucket_row("total", total)]


def _bucket_row(name: str, one: Mapping[str, float]) -> list[str]:
    return [name, f"{one['seconds']:.1f}", money(one["cost_usd"]), money(one["on_demand_usd"])]


def _summary(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the tables do not say."""
    lines: Mapping[str, float] = found["lines"]
    if len(lines) > 1:
        yield f"of the total: {', '.join(f'{name} {money(usd)} USD' for name, usd in lines.items())}"
    if found["saved_usd"]:
        yield f"saved: {money(found['saved_usd'])} USD, beside machines on demand"
    if found["ceiling_usd"] is not None:
        yield f"limit: {money(found['ceiling_usd'])} USD"
    if found["account"]:
        yield f"paid by: account {found['account']}"
    if found["users"]:
        yield f"users: {len(found['users'])}; `skyward users {found['pool_id']}` has the cost of each"
    yield _left(found["resources"], [one["cloud_id"] or one["name"] for one in found["left"]])


def _left(resources: Sequence[object], left: Sequence[str]) -> str:
    if not resources:
        return "nothing was rented"
    if not left:
        return "nothing is left: each machine is known to be gone"
    return f"left: {number_of(left, 'machine')}, not known to be gone ({first_of(left)})"


def _shown(time: str | None) -> str:
    return "" if time is None else iso(datetime.fromisoformat(time))
