"""`skyward calls`: the calls of a live pool now; without a pool, detached calls and what they have cost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyward_core.cli import values
from skyward_core.cli.options import SHOWN_ROWS, AsJson, complete_pools, id_of, nodes_of, open_ledger
from skyward_core.cli.printing import (
    duration,
    iso,
    money,
    number_of,
    print_json,
    print_table,
    print_warnings,
    stack_text,
)
from skyward_core.errors import ZERO_USD
from skyward_core.shown_text import visible

if TYPE_CHECKING:
    from skyward_core.ledger.rows import CallEntry, UnreadableRow
    from skyward_core.live.observer import CallList, LiveCall

STACKS_OF = "stacks of"


def calls(
    context: typer.Context,
    live: Annotated[
        str | None,
        typer.Argument(
            metavar="[POOL]",
            parser=values.name,
            autocompletion=complete_pools,
            help="a live pool, its id or its name: all its calls now",
        ),
    ] = None,
    *,
    as_json: AsJson = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="of a live pool: where in the code each call is")] = False,
    pool: Annotated[
        str | None, typer.Option(parser=values.name, metavar="POOL", help="only the detached calls of this pool")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(parser=values.printable, metavar="TEXT", help="only calls whose owner has this text")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=values.since,
            metavar="WHEN",
            help="started on this UTC day (2026-11-21) or later; 30d: in these days",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(parser=values.count, metavar="N", help="at most this many lines, the newest; the sum counts all"),
    ] = SHOWN_ROWS,
) -> int:
    """Show the calls of a live pool: which wait, run or are fetched, where, and for whom. Without a pool, show calls
    that were started detached: for whom, how they ended, and what they have cost.
    """
    if live is not None:
        if pool is not None or owner is not None or since is not None:
            raise typer.BadParameter("--pool, --owner and --since are for detached calls: leave the pool out")
        return _live(context, live, as_json=as_json, with_stacks=stacks, limit=limit)
    if stacks:
        raise typer.BadParameter("--stacks needs a live pool: `skyward calls POOL --stacks`")
    unreadable: list[UnreadableRow] = []
    with open_ledger(context) as ledger:
        found = ledger.calls(
            pool_id=None if pool is None else id_of(ledger, pool), owner=owner, since=since, unreadable=unreadable
        )
    if as_json:
        print_json({"calls": [detached_json(one) for one in found], "cost_usd": float(total(found))})
    elif found:
        print_table(*detached_table(found, limit))
    else:
        print("the ledger has no such detached calls")
    return print_warnings(unreadable)


def _live(context: typer.Context, name: str, *, as_json: bool, with_stacks: bool, limit: int) -> int:
    from skyward_core.live.observer import Observer, calls_of

    nodes = nodes_of(context, name)
    with Observer(nodes) as observer:
        found = calls_of(observer, with_stacks=with_stacks)
    if as_json:
        print_json(live_json(nodes.pool_id, found))
    elif found.calls:
        print_table(*live_table(found, limit))
        for text in (more(found, limit), stacks_text(found, limit)):
            if text:
                print(f"\n{text}")
    else:
        print(f"{nodes.pool_id} has no calls now")
    return print_warnings(found.silent)


def detached_json(call: CallEntry) -> dict[str, Any]:
    return {
        "call": call.call_id,
        "pool": call.pool_id,
        "name": call.name,
        "owner": call.owner,
        "attempts": call.generation,
        "state": call.state,
        "started_at": iso(call.started_at),
        "ended_at": None if call.ended_at is None else iso(call.ended_at),
        "unknown_end": call.has_unknown_end,
        "pool_ended_at": None if call.pool_ended_at is None else iso(call.pool_ended_at),
        "seconds": round(call.seconds, 3),
        "cost_usd": float(call.cost_usd),
    }


def total(calls: Sequence[CallEntry]) -> Decimal:
    return sum((call.cost_usd for call in calls), ZERO_USD)


def detached_table(calls: Sequence[CallEntry], limit: int) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the newest calls, and the sum of all."""
    heads = ["CALL", "POOL", "NAME", "OWNER", "STARTED", "STATE", ">ATTEMPTS", ">SECONDS", ">COST USD"]
    seconds = sum(call.seconds for call in calls)
    last = [number_of(calls, "call"), "", "", "", "", "", "", f"{seconds:.1f}", money(float(total(calls)))]
    return heads, [*map(_detached_row, calls[-limit:]), last]


def _detached_row(call: CallEntry) -> list[str]:
    return [
        call.call_id,
        call.pool_id,
        call.name,
        call.owner,
        iso(call.started_at),
        _detached_state(call),
        str(call.generation),
        f"{call.seconds:.1f}",
        money(float(call.cost_usd)),
    ]


def _detached_state(call: CallEntry) -> str:
    if call.has_unknown_end and call.pool_ended_at is not None:
        return f"unknown end (pool ended {iso(call.pool_ended_at)})"
    return call.state if call.ended_at is None else f"{call.state} {iso(call.ended_at)}"


def live_json(pool: str, found: CallList) -> dict[str, Any]:
    return {"pool": pool, "calls": [_live_call_json(one) for one in found.calls], "more_waiting": found.more_waiting}


def _live_call_json(one: LiveCall) -> dict[str, Any]:
    return {
        "call": one.call_id,
        "function": one.function or None,
        "state": one.state.value,
        "seconds": None if one.seconds is None else round(one.seconds, 3),
        "work": dict(one.client.work),
        "detached": one.is_detached,
        "owner": one.owner or None,
        "user": one.client.user or None,
        "client_pid": one.client.pid,
        "node": one.node,
        "worker": one.worker or None,
        "slot": one.slot,
        "pid": one.pid,
        "stacks": one.stacks,
    }


def live_table(found: CallList, limit: int) -> tuple[list[str], list[list[str]]]:
    heads = ["CALL", "FUNCTION", "STATE", ">AGE", ">NODE", ">SLOT", "CLIENT", ">PID", "WORK"]
    return heads, [_live_row(one) for one in found.calls[:limit]]


def _live_row(one: LiveCall) -> list[str]:
    return [
        one.call_id,
        one.function,
        one.state.value,
        "" if one.seconds is None else duration(one.seconds),
        "" if one.node is None else str(one.node),
        _slot(one),
        "(detached)" if one.is_detached else one.client.user,
        "" if one.client.pid is None else str(one.client.pid),
        one.owner if one.is_detached else one.client.work_text,
    ]


def _slot(one: LiveCall) -> str:
    """Return the number of the slot; on a node of several workers the worker's number is before it."""
    index = one.worker.partition("-")[2]
    return "" if one.slot is None else str(one.slot) if index in ("", "0") else f"{index}/{one.slot}"


def more(found: CallList, limit: int) -> str:
    """Return how many calls are not in the table; "" if all are."""
    left = max(0, len(found.calls) - limit) + found.more_waiting
    return f"and {left} more calls; --limit shows more" if left else ""


def stacks_text(found: CallList, limit: int) -> str:
    """Return the stacks of the running calls, the newest frame of each thread first."""
    return "\n\n".join(
        f"{STACKS_OF} {visible(one.call_id)} ({visible(one.function) or 'unknown function'}), process {one.pid} on node"
        f" {one.node}\n" + stack_text(one.stacks)
        for one in found.calls[:limit]
        if one.stacks is not None
    )
