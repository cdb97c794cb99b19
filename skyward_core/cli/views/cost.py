"""Costs as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import money
from skyward_core.errors import ZERO_USD

if TYPE_CHECKING:
    from skyward_core.ledger.rows import CostRow


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


def table(by: str, rows: Sequence[CostRow], limit: int) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the costliest lines in the ledger's order, the others as one line, and the total."""
    costliest = sorted(rows, key=lambda row: row.cost_usd, reverse=True)[:limit]
    shown = {row.key for row in costliest}
    sums = [sum_of(row.key, [row]) for row in rows if row.key in shown]
    if others := [row for row in rows if row.key not in shown]:
        sums.append(sum_of(f"({len(others)} others)", others))
    heads = [by.upper(), ">RESOURCES", ">HOURS", ">USD", ">ON DEMAND", ">SAVED"]
    return heads, [_row(one) for one in [*sums, total(rows)]]


def _row(its: Mapping[str, Any]) -> list[str]:
    from skyward_core.ledger.rows import BILLING_ROUNDING

    return [
        str(its["key"]),
        "" if its["key"] == BILLING_ROUNDING else str(its["resources"]),
        f"{its['seconds'] / 3600:.2f}",
        *(money(its[name]) for name in ("cost_usd", "on_demand_usd", "saved_usd")),
    ]
