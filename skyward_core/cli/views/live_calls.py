"""The calls of a live pool, as JSON and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import duration, visible

if TYPE_CHECKING:
    from skyward_core.live.calls import CallList, LiveCall

STACKS_OF = "stacks of"


def as_json(pool: str, found: CallList) -> dict[str, Any]:
    return {"pool": pool, "calls": [_as_json(one) for one in found.calls], "more_waiting": found.more_waiting}


def _as_json(one: LiveCall) -> dict[str, Any]:
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


def table(found: CallList, limit: int) -> tuple[list[str], list[list[str]]]:
    heads = ["CALL", "FUNCTION", "STATE", ">AGE", ">NODE", ">SLOT", "CLIENT", ">PID", "WORK"]
    return heads, [_row(one) for one in found.calls[:limit]]


def _row(one: LiveCall) -> list[str]:
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


def stacks(found: CallList, limit: int) -> str:
    """Return the stacks of the running calls, the newest frame of each thread first."""
    return "\n\n".join(
        f"{STACKS_OF} {one.call_id} ({one.function or 'unknown function'}), process {one.pid} on node {one.node}\n"
        + (
            "\n".join(f"  {visible(line)}" for line in one.stacks.splitlines() if line)
            or "  no answer: it has just ended"
        )
        for one in found.calls[:limit]
        if one.stacks is not None
    )
