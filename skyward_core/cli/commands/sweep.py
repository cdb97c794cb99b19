"""`skyward sweep`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import FAILED, TO_DO, AsJson, open_ledger, providers_from
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import sweep as view

BILLS = "skyward.bills"
"""The group of entry points that name functions without arguments: they complete bills, and return how many."""


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
    if yes:
        print_warnings(_complete_bills(is_quiet=as_json))
    if report.failures:
        return FAILED
    return TO_DO if (report.to_do or report.pruned) and not yes else 0


def _complete_bills(*, is_quiet: bool) -> Iterator[str]:
    """Complete the bills that orchestrators show of runs whose processes were killed. Yield what has failed: machines
    are more important, so that is no failure of the sweep.
    """
    for entry in entry_points(group=BILLS):
        try:
            count = _completed(entry)
        except Exception as error:  # of another distribution, or of its server
            yield f"{entry.name}: the costs of runs whose processes were killed could not be completed: {error}"
        else:
            if count and not is_quiet:
                print(f"{entry.name}: the final costs of {count} {'run' if count == 1 else 'runs'} were written")


def _completed(entry: EntryPoint) -> int:
    try:
        return entry.load()()
    except ModuleNotFoundError as error:
        ours = entry.module.partition(".")[0]
        if (error.name or ours).partition(".")[0] == ours:
            raise
        return 0  # the orchestrator is not installed
