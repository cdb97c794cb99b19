"""`skyward ledger prune`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import TO_DO, AsJson, open_ledger
from skyward_core.cli.printing import print_json
from skyward_core.cli.views import ledger as view


def prune(
    context: typer.Context,
    *,
    older_than: Annotated[
        timedelta,
        typer.Option(parser=values.days, metavar="DAYS", help="of pools that ended longer ago than this: 90d"),
    ],
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without this nothing is touched")] = False,
) -> int:
    """Show which details of old pools can go; with --yes, delete them. What the pools have cost stays."""
    before = datetime.now(UTC) - older_than
    with open_ledger(context) as ledger:
        pruned = ledger.prune(before, is_dry_run=not yes)
        if yes and pruned.pools:
            ledger.vacuum()
    if as_json:
        print_json(view.as_json(pruned, before, is_dry_run=not yes))
    else:
        print(view.summary(pruned, before, is_dry_run=not yes))
    return TO_DO if pruned.pools and not yes else 0
