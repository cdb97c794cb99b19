"""`skyward sweep`."""

from __future__ import annotations

from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import FAILED, TO_DO, AsJson, open_ledger, providers_from
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import sweep as view


def sweep(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without this nothing is touched")] = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            parser=values.printable,
            metavar="NAME",
            help="another provider to list, beside those of the ledger's pools; may be repeated"
            " (default: those of the settings)",
        ),
    ] = None,
    min_age: Annotated[
        float,
        typer.Option(
            parser=values.seconds,
            metavar="SECONDS",
            help="leave machines that the ledger does not know until they are older",
        ),
    ] = 600.0,
    unknown: Annotated[
        bool,
        typer.Option("--unknown", help="end old machines of unknown owners too; they may be another user's"),
    ] = False,
) -> int:
    """Find machines that belong to no living pool; with --yes, end them."""
    from skyward_core.cleanup.sweep import sweep as sweep_providers

    with open_ledger(context) as ledger:
        report = sweep_providers(
            ledger, providers_from(provider), is_dry_run=not yes, min_age_seconds=min_age, include_unknown=unknown
        )
    if as_json:
        print_json(view.as_json(report, is_dry_run=not yes))
    else:
        if report.findings:
            print_table(*view.table(report))
        print_warnings(report.failures)
        print(view.summary(report, is_dry_run=not yes))
    if report.failures:
        return FAILED
    return TO_DO if (report.to_do or report.pruned) and not yes else 0
