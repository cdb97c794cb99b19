"""Checks of an installation as JSON, as a table and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward_core.doctor.check import Check


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(check) | {"state": check.state.value, "cure": check.cure or None} for check in checks]


def table(checks: Sequence[Check]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows. A cure has its own row below its check."""
    rows: list[list[str]] = []
    for check in checks:
        rows.append([check.state.value, check.subject, " ".join(check.message.split())])
        if check.cure:
            rows.append(["", "", f"what to do: {' '.join(check.cure.split())}"])
    return ["STATE", "CHECK", "FOUND"], rows


def summary(checks: Sequence[Check]) -> str:
    """Return how many checks ended how."""
    states = [check.state.value for check in checks]
    return ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warning", "failed") if state in states)


def has_failed(checks: Sequence[Check]) -> bool:
    return any(check.state.value == "failed" for check in checks)
