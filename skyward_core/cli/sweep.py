"""`skyward sweep`, `skyward ledger prune` and `migrate`: what is left of dead pools, of old ones, of older releases."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, make_ledger, open_ledger, providers_from
from skyward_core.cli.printing import (
    FAILED,
    TO_DO,
    first_of,
    iso,
    number_of,
    print_json,
    print_table,
    print_warnings,
    say,
)

if TYPE_CHECKING:
    from skyward_core.cleanup.policy import Finding
    from skyward_core.cleanup.sweep import SweepReport
    from skyward_core.ledger.rows import Pruned

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

    with make_ledger(context, may_migrate=True) if yes else open_ledger(context) as ledger:
        report = sweep_providers(
            ledger, providers_from(provider), is_dry_run=not yes, min_age_seconds=min_age, include_unknown=unknown
        )
    if as_json:
        print_json(_sweep_json(report, is_dry_run=not yes))
    else:
        if report.findings:
            print_table(*_sweep_table(report))
        print_warnings(report.failures)
        for line in _sweep_summary(report, is_dry_run=not yes):
            say(line)
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
                say(f"{entry.name}: the final costs of {count} {'run' if count == 1 else 'runs'} were written")


def _completed(entry: EntryPoint) -> int:
    try:
        return entry.load()()
    except ModuleNotFoundError as error:
        ours = entry.module.partition(".")[0]
        if (error.name or ours).partition(".")[0] == ours:
            raise
        return 0  # the orchestrator is not installed


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
        print_json(_pruned_json(pruned, before, is_dry_run=not yes))
    else:
        for line in _pruned_summary(pruned, before, is_dry_run=not yes):
            say(line)
    return TO_DO if pruned.pools and not yes else 0


def migrate(context: typer.Context) -> int:
    """Bring a ledger of an earlier release to this one's version, unless a pool of that release lives."""
    with make_ledger(context, may_migrate=True) as ledger:
        print(f"the ledger has version {ledger.try_write()}, which is that of this release")
    return 0


def _sweep_json(report: SweepReport, *, is_dry_run: bool) -> dict[str, Any]:
    return {
        "is_dry_run": is_dry_run,
        "findings": [_finding(finding) for finding in report.findings],
        "ended": [_finding(finding) for finding in report.ended],
        "closed": [_finding(finding) for finding in report.closed],
        "adopted": [_finding(finding) for finding in report.adopted],
        "pruned": list(report.pruned),
        "failures": [
            {"provider": its.provider, "pool": its.pool_id, "error": str(its.error)} for its in report.failures
        ],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "action": finding.action.value,
        "pool": finding.pool_id,
        "provider": finding.provider,
        "resources": list(finding.resource_ids),
        "reason": finding.reason,
    }


def _sweep_table(report: SweepReport) -> tuple[list[str], list[list[str]]]:
    return ["ACTION", "POOL", "PROVIDER", "RESOURCES", "WHY"], [
        [its.action.value, its.pool_id, its.provider, first_of(its.resource_ids), its.reason] for its in report.findings
    ]


def _sweep_summary(report: SweepReport, *, is_dry_run: bool) -> list[str]:
    """Return what was pruned, one line each, and last what was done or remains to do."""
    pruned = [f"{'to be taken away' if is_dry_run else 'taken away'}: {line}" for line in report.pruned]
    return [*pruned, _last_line(report, is_dry_run=is_dry_run)]


def _last_line(report: SweepReport, *, is_dry_run: bool) -> str:
    if not report.to_do and not report.pruned:
        return "nothing is to be done"
    return "nothing was touched; `skyward sweep --yes` does it" if is_dry_run else _done(report)


def _done(report: SweepReport) -> str:
    from skyward_core.cleanup.policy import Action

    waiting = [finding for finding in report.findings if finding.action is Action.WAIT]
    parts = [
        f"machines of {number_of(report.ended, 'pool')} ended" if report.ended else "",
        f"entries of {number_of(report.closed, 'pool')} closed, nothing of which was there" if report.closed else "",
        f"machines of {number_of(report.adopted, 'live pool')} written down" if report.adopted else "",
        f"{number_of(waiting, 'pool')} left for the next sweep" if waiting else "",
        f"{number_of(report.pruned, 'thing')} of no use taken away" if report.pruned else "",
        number_of(report.failures, "failure") if report.failures else "",
    ]
    return "; ".join(part for part in parts if part) or "nothing was done"


def _pruned_json(pruned: Pruned, before: datetime, *, is_dry_run: bool) -> dict[str, Any]:
    return {
        "is_dry_run": is_dry_run,
        "ended_before": iso(before),
        "pools": pruned.pools,
        "attempts": pruned.attempts,
        "reservations": pruned.reservations,
        "calls": pruned.calls,
    }


def _pruned_summary(pruned: Pruned, before: datetime, *, is_dry_run: bool) -> list[str]:
    if not pruned.pools:
        return [f"no pool that ended before {iso(before)} has details left"]
    what = (
        f"details of {pruned.pools} pools, {pruned.attempts} tries to rent machines, {pruned.reservations} settled"
        f" reservations, {pruned.calls} detached calls"
    )
    if is_dry_run:
        return [f"to be taken away: {what}", "nothing was touched; --yes does it"]
    return [f"taken away: {what}; what they have cost stays"]
