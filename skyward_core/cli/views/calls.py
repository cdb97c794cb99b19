"""Detached calls, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import iso, money, number_of
from skyward_core.errors import ZERO_USD

if TYPE_CHECKING:
    from skyward_core.ledger.rows import CallEntry


def as_json(call: CallEntry) -> dict[str, Any]:
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


def table(calls: Sequence[CallEntry], limit: int) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the newest calls, and the sum of all."""
    heads = ["CALL", "POOL", "NAME", "OWNER", "STARTED", "STATE", ">ATTEMPTS", ">SECONDS", ">COST USD"]
    seconds = sum(call.seconds for call in calls)
    last = [number_of(calls, "call"), "", "", "", "", "", "", f"{seconds:.1f}", money(float(total(calls)))]
    return heads, [*map(_row, calls[-limit:]), last]


def _row(call: CallEntry) -> list[str]:
    return [
        call.call_id,
        call.pool_id,
        call.name,
        call.owner,
        iso(call.started_at),
        _state(call),
        str(call.generation),
        f"{call.seconds:.1f}",
        money(float(call.cost_usd)),
    ]


def _state(call: CallEntry) -> str:
    if call.has_unknown_end and call.pool_ended_at is not None:
        return f"unknown end (pool ended {iso(call.pool_ended_at)})"
    return call.state if call.ended_at is None else f"{call.state} {iso(call.ended_at)}"
