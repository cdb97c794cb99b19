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
        bill = receipt_of(ledger, id_of(ledger, pool), unreadable=unreadable)
    if as_json:
        print_json(bill)
    else:
        say(_title(bill))
        if bill["resources"]:
            print_table(HEADS, _machine_rows(bill))
            print()
            print_table(["BUCKET", ">SECONDS", ">USD", ">ON DEMAND"], _bucket_rows(bill))
            print()
        for line in _summary(bill):
            say(line)
    return print_warnings(unreadable)


def _title(bill: Mapping[str, Any]) -> str:
    from skyward_core.work import Work

    name = f" ({bill['name']})" if bill["name"] else ""
    work = str(Work(**bill["work"]))
    until = _shown(bill["ended_at"]) if bill["ended_at"] else "now, so far"
    return (
        f"{bill['pool_id']}{name} of {bill['owner']}{f' for {work}' if work else ''}, from"
        f" {_shown(bill['created_at'])} until {until}"
    )


def _machine_rows(bill: Mapping[str, Any]) -> list[list[str]]:
    rows = [_machine_row(resource, bill["pool_id"]) for resource in bill["resources"]]
    seconds = sum(_seconds(resource) for resource in bill["resources"])
    return [*rows, ["total", "", "", "", "", "", f"{seconds:.1f}", money(bill["total_cost_usd"])]]


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


def _bucket_rows(bill: Mapping[str, Any]) -> list[list[str]]:
    """Return the buckets that have something in them, and their sum."""
    buckets = bill["buckets"]
    rows = [_bucket_row(name, sums) for name, sums in buckets.items() if sums["seconds"] or sums["cost_usd"]]
    seconds = sum(bucket["seconds"] for bucket in buckets.values())
    total = {"seconds": seconds, "cost_usd": bill["total_cost_usd"], "on_demand_usd": bill["on_demand_usd"]}
    return [*rows, _bucket_row("total", total)]


def _bucket_row(name: str, sums: Mapping[str, float]) -> list[str]:
    return [name, f"{sums['seconds']:.1f}", money(sums["cost_usd"]), money(sums["on_demand_usd"])]


def _summary(bill: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the tables do not say."""
    lines: Mapping[str, float] = bill["lines"]
    if len(lines) > 1:
        yield f"of the total: {', '.join(f'{name} {money(usd)} USD' for name, usd in lines.items())}"
    if bill["saved_usd"]:
        yield f"saved: {money(bill['saved_usd'])} USD, beside machines on demand"
    if bill["ceiling_usd"] is not None:
        yield f"limit: {money(bill['ceiling_usd'])} USD"
    if bill["account"]:
        yield f"paid by: account {bill['account']}"
    if bill["users"]:
        yield f"users: {len(bill['users'])}; `skyward users {bill['pool_id']}` has the cost of each"
    yield _left(bill["resources"], [resource["cloud_id"] or resource["name"] for resource in bill["left"]])


def _left(resources: Sequence[object], left: Sequence[str]) -> str:
    if not resources:
        return "nothing was rented"
    if not left:
        return "nothing is left: each machine is known to be gone"
    return f"left: {number_of(left, 'machine')}, not known to be gone ({first_of(left)})"


def _shown(time: str | None) -> str:
    return "" if time is None else iso(datetime.fromisoformat(time))
