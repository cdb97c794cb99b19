"""The report of a sweep as JSON, as a table, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import first_of, number_of

if TYPE_CHECKING:
    from skyward_core.cleanup.policy import Finding
    from skyward_core.cleanup.sweep import SweepReport


def as_json(report: SweepReport, *, is_dry_run: bool) -> dict[str, Any]:
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


def table(report: SweepReport) -> tuple[list[str], list[list[str]]]:
    return ["ACTION", "POOL", "PROVIDER", "RESOURCES", "WHY"], [
        [its.action.value, its.pool_id, its.provider, first_of(its.resource_ids), its.reason] for its in report.findings
    ]


def summary(report: SweepReport, *, is_dry_run: bool) -> str:
    """Return what was pruned, one line each, and last what was done or remains to do."""
    pruned = [f"{'to be taken away' if is_dry_run else 'taken away'}: {line}" for line in report.pruned]
    return "\n".join([*pruned, _last_line(report, is_dry_run=is_dry_run)])


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
