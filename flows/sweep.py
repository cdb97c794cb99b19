"""End machines that were left running: of pools with a dead owner or an expired lease.

    python flows/sweep.py            sweeps once
    python flows/sweep.py serve      sweeps every ten minutes, as a deployment of the server that PREFECT_API_URL names

The flow asks the providers of all pools in the ledger, and those that the settings name (SKYWARD_PROVIDER,
skyward.toml) for machines that the ledger does not know. Machines of living pools are never touched. Workers on several
computers need a ledger that all of them see: SKYWARD_LEDGER=postgresql+psycopg://...
"""

import sys

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

import skyward_core as sky

PROVIDERS = None  # those of the settings; or name them here: [sky.AWS(region="us-east-1"), sky.RunPod()]


def in_words(finding) -> str:
    return (
        f"{finding.action} {', '.join(finding.resource_ids)} of {finding.pool_id} at {finding.provider}:"
        f" {finding.reason}"
    )


@flow(timeout_seconds=1800)
def skyward_sweep(is_dry_run: bool = False) -> list[str]:
    """Log each finding and its reason; end the machines unless it is a dry run.

    Fails if a provider could not be asked, or machines are left.
    """
    report = sky.sweep(providers=PROVIDERS, is_dry_run=is_dry_run)
    for finding in report.findings:
        get_run_logger().info("%s", in_words(finding))
    for line in report.pruned:
        get_run_logger().info("of no use any more: %s", line)
    rows = [
        {
            "provider": each.provider,
            "pool": each.pool_id,
            "machines": ", ".join(each.resource_ids),
            "reason": each.reason,
        }
        for each in report.ended
    ]
    create_table_artifact(rows, key="skyward-sweep", description="What the sweep has ended")
    if report.failures:
        raise RuntimeError(
            "not everything could be seen or ended; the next sweep tries again: " + "; ".join(map(str, report.failures))
        )
    return [in_words(finding) for finding in report.ended]


if __name__ == "__main__":
    if "serve" in sys.argv[1:]:
        skyward_sweep.serve("every-ten-minutes", interval=600, limit=1)
    else:
        skyward_sweep()
