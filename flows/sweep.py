"""End machines of dead pools, and complete the bills of flow runs whose processes were killed.

A pool is dead if its owner is dead or its lease has expired.

    python flows/sweep.py            sweeps once
    python flows/sweep.py serve      sweeps every ten minutes, as a deployment on the server of PREFECT_API_URL

The flow queries the providers of all pools in the ledger. It also queries the providers of the settings
(SKYWARD_PROVIDER, skyward.toml), for machines that the ledger does not have. It never touches machines of living pools.
Workers on several computers need a shared ledger: SKYWARD_LEDGER=postgresql+psycopg://...

Install what it needs with `pip install ".[prefect]"` in a clone of the repository.
"""

import sys

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

import skyward_core as sky
from prefect_skyward import settle_flow_runs

PROVIDERS = None  # the providers of the settings; or a list: [sky.AWS(region="us-east-1"), sky.RunPod()]


def as_line(finding) -> str:
    return (
        f"{finding.action} {', '.join(finding.resource_ids)} of {finding.pool_id} at {finding.provider}:"
        f" {finding.reason}"
    )


@flow(timeout_seconds=1800)
def skyward_sweep(is_dry_run: bool = False) -> list[str]:
    """Log each finding and its reason; end the machines unless it is a dry run.

    Fails if the sweep could not list or end some machines.
    """
    report = sky.sweep(providers=PROVIDERS, is_dry_run=is_dry_run)
    for finding in report.findings:
        get_run_logger().info("%s", as_line(finding))
    for line in report.pruned:
        get_run_logger().info("removed, because it is not used any more: %s", line)
    rows = [
        {
            "provider": each.provider,
            "pool": each.pool_id,
            "machines": ", ".join(each.resource_ids),
            "reason": each.reason,
        }
        for each in report.ended
    ]
    create_table_artifact(rows, key="skyward-sweep", description="Machines that the sweep has ended")
    try:
        if not is_dry_run and (settled := settle_flow_runs()):
            get_run_logger().info("wrote the final costs of %d flow runs whose processes could not", settled)
    finally:  # machines are more important than pages
        if report.failures:
            raise RuntimeError(
                "some machines could not be listed or ended; the next sweep tries again: "
                + "; ".join(map(str, report.failures))
            )
    return [as_line(finding) for finding in report.ended]


if __name__ == "__main__":
    if "serve" in sys.argv[1:]:
        skyward_sweep.serve("every-ten-minutes", interval=600, limit=1)
    else:
        skyward_sweep()
