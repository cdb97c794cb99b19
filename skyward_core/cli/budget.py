"""`skyward budget set`, `list` and `remove`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, make_ledger, open_ledger
from skyward_core.cli.printing import money, print_json, print_table, print_warnings, say
from skyward_core.errors import ZERO_USD

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.rows import Account, Reservation, UnreadableRow


def set_(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", parser=values.name, help="of the account")],
    *,
    limit: Annotated[Decimal, typer.Option(parser=values.usd, metavar="USD", help="the most that may be spent")],
    per: Annotated[Literal["run", "day", "month"], typer.Option(help="for each pool, each UTC day, or each UTC month")],
) -> int:
    """Make an account, or change its limit."""
    from skyward_core.ledger.rows import Account, Period

    with make_ledger(context) as ledger:
        ledger.set_account(Account(name, limit, Period(per)))
    say(f"{name}: {limit:f} USD per {per}")
    return 0


def list_(context: typer.Context, *, as_json: AsJson = False) -> int:
    """Show the accounts, and what is left of each."""
    unreadable: list[UnreadableRow] = []
    with open_ledger(context) as ledger:
        reservations, now = ledger.open_reservations(unreadable=unreadable), datetime.now(UTC)
        budgets = [_budget(ledger, account, reservations, now) for account in ledger.accounts(unreadable=unreadable)]
    if as_json:
        print_json(budgets)
    elif budgets:
        print_table(*_table(budgets))
    else:
        print("no accounts; `skyward budget set NAME --limit USD --per run|day|month` makes one")
    return print_warnings(unreadable)


def remove(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", parser=values.name, help="of the account")],
) -> int:
    """Remove an account that no open pool uses. What was spent from it stays in costs and receipts."""
    with open_ledger(context) as ledger:
        ledger.remove_account(name)
    say(f"{name} is removed; what was spent from it stays in `skyward cost` and in receipts")
    return 0


def _budget(ledger: Ledger, account: Account, reservations: Sequence[Reservation], now: datetime) -> dict[str, Any]:
    left = None if _scope(account, now) is None else ledger.left_usd(account.name, "")
    return _as_json(account, _reserved(account, reservations, now), left)


def _scope(account: Account, now: datetime) -> str | None:
    """Return the present day or month of the account; None if each pool has its own limit."""
    return {"run": None, "day": f"{now:%Y-%m-%d}", "month": f"{now:%Y-%m}"}[account.period.value]


def _reserved(account: Account, reservations: Sequence[Reservation], now: datetime) -> Decimal:
    """Return what is reserved in this period; with a limit for each pool, what is reserved for all of them."""
    present = _scope(account, now)
    return sum(
        (its.reserved_usd for its in reservations if its.account == account.name and present in (None, its.scope)),
        ZERO_USD,
    )


def _as_json(account: Account, reserved_usd: Decimal, left_usd: Decimal | None) -> dict[str, Any]:
    """Return an account in this period; one with a limit for each pool has no sum that is spent or left."""
    return {
        "account": account.name,
        "per": account.period.value,
        "limit_usd": float(account.limit_usd),
        "spent_usd": None if left_usd is None else float(account.limit_usd - left_usd - reserved_usd),
        "reserved_usd": float(reserved_usd),
        "left_usd": None if left_usd is None else float(left_usd),
    }


def _table(budgets: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = ("limit_usd", "spent_usd", "reserved_usd", "left_usd")
    return ["ACCOUNT", "PER", ">LIMIT USD", ">SPENT", ">RESERVED", ">LEFT"], [
        [
            budget["account"],
            budget["per"],
            *("" if budget[name] is None else money(budget[name]) for name in names),
        ]
        for budget in budgets
    ]
