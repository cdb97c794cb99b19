"""`skyward cost`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from skyward_core.cli import values
from skyward_core.cli.options import SHOWN_ROWS, AsJson, Split, open_settled_ledger
from skyward_core.cli.printing import iso, print_json, print_table, print_warnings
from skyward_core.cli.views import cost as view

if TYPE_CHECKING:
    from skyward_core.ledger.rows import UnreadableRow


def cost(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    by: Annotated[
        Literal["day", "pool", "owner", "bucket", "run", "task", "asset", "partition"],
        typer.Option(help="one line for each of these"),
    ] = "day",
    split: Split = False,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=values.since,
            metavar="WHEN",
            help="requested on this UTC day (2026-11-21) or later; 30d: in these days",
        ),
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=values.date, metavar="DATE", help="requested before this UTC day")
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            parser=values.count, metavar="N", help="at most this many lines, the costliest; the others are one line"
        ),
    ] = SHOWN_ROWS,
) -> int:
    """Add up what was spent, and what spot has saved."""
    from skyward_core.ledger.rows import CostBy

    if since is not None and until is not None and until <= since:
        raise typer.BadParameter(f"--until {iso(until)} is not after --since {iso(since)}: nothing is between them")
    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger:
        rows = ledger.cost_rows(CostBy(by), since=since, until=until, split=split, unreadable=unreadable)
    if as_json:
        print_json({"by": by, "rows": [view.sum_of(row.key, [row]) for row in rows], "total": view.total(rows)})
    else:
        print_table(*view.table(by, rows, limit))
    return print_warnings(unreadable)
