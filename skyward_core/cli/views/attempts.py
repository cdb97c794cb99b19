"""Attempts to rent machines, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import iso

if TYPE_CHECKING:
    from skyward_core.ledger.rows import Attempt, PoolEntry


def as_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "at": iso(attempt.at),
        "provider": attempt.provider,
        "region": attempt.region,
        "instance_type": attempt.instance_type,
        "spot": attempt.is_spot,
        "seconds": round(attempt.seconds, 3),
        "error": attempt.error or None,
        "code": attempt.code or None,
        "message": attempt.message or None,
    }


def table(attempts: Sequence[Attempt]) -> tuple[list[str], list[list[str]]]:
    heads = ["AT", "PROVIDER", "REGION", "TYPE", "MARKET", ">SECONDS", "OUTCOME", "CODE", "REASON"]
    return heads, [_row(attempt) for attempt in attempts]


def _row(attempt: Attempt) -> list[str]:
    return [
        iso(attempt.at),
        attempt.provider,
        attempt.region,
        attempt.instance_type,
        "" if not attempt.instance_type else "spot" if attempt.is_spot else "on demand",
        f"{attempt.seconds:.1f}",
        attempt.error or "rented",
        attempt.code,
        " ".join(attempt.message.split()),
    ]


def notes(entry: PoolEntry, attempts: Sequence[Attempt]) -> list[str]:
    """Return what the table does not say of the accelerators that the pool wanted."""
    from pydantic import ValidationError

    from skyward_core.providers.choice import sizes_on_aws
    from skyward_core.spec import PoolSpec

    if all(attempt.provider != "aws" for attempt in attempts):
        return []
    try:
        spec = PoolSpec.model_validate_json(entry.spec_json)
    except ValidationError:  # of another release, or deleted
        return []
    chips = [one.first_accelerator for one in spec.each_alternative()]
    return [note for chip in chips if chip is not None and (note := sizes_on_aws(chip))]


def none_known(entry: PoolEntry) -> str:
    """Return why the ledger has no attempts of this pool."""
    from skyward_core.ledger.rows import PRUNED_SPEC

    if entry.spec_json == PRUNED_SPEC:
        return f"{entry.id}: its attempts are not known any more: `skyward ledger prune` deleted them"
    return f"{entry.id} has not tried to rent anything"
