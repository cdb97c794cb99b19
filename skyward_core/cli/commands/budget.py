"""`skyward budget set` and `skyward budget list`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, open_ledger
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import budget as view

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

    with open_ledger(context) as ledger:
        ledger.set_account(Account(name, limit, Period(per)))
    print(f"{name}: {limit:f} USD per {per}")
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
        print_table(*view.table(budgets))
    else:
        print("no accounts; `skyward budget set NAME --limit USD --per run|day|month` makes one")
    return print_warnings(unreadable)


def _budget(ledger: Ledger, account: Account, reservations: Sequence[Reservation], now: datetime) -> dict[str, Any]:
    left = None if view.scope(account, now) is None else ledger.left_usd(account.name, "")
    return view.as_json(account, view.reserved(account, reservations, now), left)
