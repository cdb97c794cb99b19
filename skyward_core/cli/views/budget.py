"""Accounts as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import money
from skyward_core.errors import ZERO_USD

if TYPE_CHECKING:
    from skyward_core.ledger.rows import Account, Reservation


def scope(account: Account, now: datetime) -> str | None:
    """Return the present day or month of the account; None if each pool has its own limit."""
    return {"run": None, "day": f"{now:%Y-%m-%d}", "month": f"{now:%Y-%m}"}[account.period.value]


def reserved(account: Account, reservations: Sequence[Reservation], now: datetime) -> Decimal:
    """Return what is reserved in this period; with a limit for each pool, what is reserved for all of them."""
    present = scope(account, now)
    return sum(
        (its.reserved_usd for its in reservations if its.account == account.name and present in (None, its.scope)),
        ZERO_USD,
    )


def as_json(account: Account, reserved_usd: Decimal, left_usd: Decimal | None) -> dict[str, Any]:
    """Return an account in this period; one with a limit for each pool has no sum that is spent or left."""
    return {
        "account": account.name,
        "per": account.period.value,
        "limit_usd": float(account.limit_usd),
        "spent_usd": None if left_usd is None else float(account.limit_usd - left_usd - reserved_usd),
        "reserved_usd": float(reserved_usd),
        "left_usd": None if left_usd is None else float(left_usd),
    }


def table(budgets: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = ("limit_usd", "spent_usd", "reserved_usd", "left_usd")
    return ["ACCOUNT", "PER", ">LIMIT USD", ">SPENT", ">RESERVED", ">LEFT"], [
        [
            budget["account"],
            budget["per"],
            *("" if budget[name] is None else money(budget[name]) for name in names),
        ]
        for budget in budgets
    ]
