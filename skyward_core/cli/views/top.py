"""Live pools with their nodes, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import duration, money
from skyward_core.cli.views.live import use, use_columns

if TYPE_CHECKING:
    from skyward_core.live.metrics import NodeUse

HEADS = [
    "POOL",
    "STATE",
    ">AGE",
    ">USD/H",
    ">COST USD",
    "NODE",
    ">BUSY",
    ">CPU %",
    "CPU",
    ">MEMORY %",
    ">GPU %",
    "GPU",
    ">GPU MEMORY %",
]


def as_json(pool: Mapping[str, Any], uses: Sequence[NodeUse] | str) -> dict[str, Any]:
    shown = ("pool", "name", "state", "provider", "age_seconds", "usd_per_hour", "cost_usd")
    return {
        **{name: pool[name] for name in shown},
        "nodes": [] if isinstance(uses, str) else [use(one) for one in uses],
        "trouble": uses if isinstance(uses, str) else None,
    }


def table(
    found: Sequence[tuple[Mapping[str, Any], Sequence[NodeUse] | str]], *, is_unicode: bool
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: one for each node; the pool's own columns stand in its first."""
    rows: list[list[str]] = []
    for pool, uses in found:
        head = [
            pool["name"] or pool["pool"],
            pool["state"],
            duration(pool["age_seconds"]),
            money(pool["usd_per_hour"]),
            money(pool["cost_usd"]),
        ]
        if isinstance(uses, str) or not uses:
            rows.append([*head, f"not known: {uses}" if uses else "none", *[""] * 7])
            continue
        for one in uses:
            rows.append([*head, str(one.node), *use_columns(one, is_unicode=is_unicode)])
            head = [""] * len(head)
    return HEADS, rows
