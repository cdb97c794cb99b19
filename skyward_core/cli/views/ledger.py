"""What `skyward ledger prune` deletes, as JSON and in words."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import iso

if TYPE_CHECKING:
    from skyward_core.ledger.rows import Pruned


def as_json(pruned: Pruned, before: datetime, *, is_dry_run: bool) -> dict[str, Any]:
    return {
        "is_dry_run": is_dry_run,
        "ended_before": iso(before),
        "pools": pruned.pools,
        "attempts": pruned.attempts,
        "reservations": pruned.reservations,
        "calls": pruned.calls,
    }


def summary(pruned: Pruned, before: datetime, *, is_dry_run: bool) -> str:
    if not pruned.pools:
        return f"no pool that ended before {iso(before)} has details left"
    what = (
        f"details of {pruned.pools} pools, {pruned.attempts} tries to rent machines, {pruned.reservations} settled"
        f" reservations, {pruned.calls} detached calls"
    )
    if is_dry_run:
        return f"to be taken away: {what}\nnothing was touched; --yes does it"
    return f"taken away: {what}; what they have cost stays"
