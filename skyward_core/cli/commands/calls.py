"""`skyward calls`: detached calls, and what they have cost."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import SHOWN_ROWS, AsJson, open_ledger
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import calls as view

if TYPE_CHECKING:
    from skyward_core.ledger.rows import UnreadableRow


def calls(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    pool: Annotated[
        str | None, typer.Option(parser=values.name, metavar="POOL_ID", help="only the calls of this pool")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(parser=values.printable, metavar="TEXT", help="only calls whose owner has this text")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(parser=values.date, metavar="DATE", help="started on this UTC day (2026-11-21) or later"),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(parser=values.count, metavar="N", help="at most this many lines, the newest; the sum counts all"),
    ] = SHOWN_ROWS,
) -> int:
    """Show calls that were started detached: for whom, how they ended, and what they have cost."""
    unreadable: list[UnreadableRow] = []
    with open_ledger(context) as ledger:
        found = ledger.calls(pool_id=pool, owner=owner, since=since, unreadable=unreadable)
    if as_json:
        print_json({"calls": [view.as_json(one) for one in found], "cost_usd": float(view.total(found))})
    elif found:
        print_table(*view.table(found, limit))
    else:
        print("the ledger has no such detached calls")
    return print_warnings(unreadable)
