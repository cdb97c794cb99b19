"""What `skyward warm` has changed, as JSON and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import duration, iso

if TYPE_CHECKING:
    from skyward_core.ledger.names_policy import NamedPool


def as_json(row: NamedPool) -> dict[str, Any]:
    return {
        "name": row.name,
        "pool": row.pool_id,
        "state": row.state.value,
        "warm_until": None if row.warm_until is None else iso(row.warm_until),
        "keep_warm_seconds": row.keep_warm_seconds,
    }


def words(row: NamedPool) -> str:
    if row.warm_until is not None:
        return f"{row.name} ({row.pool_id}) stays warm until {iso(row.warm_until)}"
    seconds = duration(row.keep_warm_seconds)
    return f"{row.name} ({row.pool_id}) is {row.state}; it stays warm for {seconds} when the last process has left it"
