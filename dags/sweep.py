"""End, every ten minutes, machines that were left running: of pools with a dead owner or an expired lease.

    AIRFLOW__CORE__DAGS_FOLDER=dags airflow dags test skyward_sweep                           ends what it finds
    AIRFLOW__CORE__DAGS_FOLDER=dags airflow dags test skyward_sweep -c '{"dry_run": true}'    lists what it would end

The task asks the providers of all pools in the ledger, and those that the settings name (SKYWARD_PROVIDER,
skyward.toml) for machines that the ledger does not know. Machines of living pools are never touched. Workers on several
computers need a ledger that all of them see: SKYWARD_LEDGER=postgresql+psycopg://...
"""

import logging
from datetime import UTC, datetime, timedelta

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException

import skyward_core as sky

PROVIDERS = None  # those of the settings; or name them here: [sky.AWS(region="us-east-1"), sky.RunPod()]

log = logging.getLogger(__name__)


def in_words(finding) -> str:
    return (
        f"{finding.action} {', '.join(finding.resource_ids)} of {finding.pool_id} at {finding.provider}:"
        f" {finding.reason}"
    )


@dag(
    schedule=timedelta(minutes=10),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    params={"dry_run": False},
    tags=["skyward"],
)
def skyward_sweep():
    @task(execution_timeout=timedelta(minutes=30))
    def end_what_is_left_running(params) -> list[str]:
        report = sky.sweep(providers=PROVIDERS, is_dry_run=params["dry_run"])
        for finding in report.findings:
            log.info("%s", in_words(finding))
        for line in report.pruned:
            log.info("of no use any more: %s", line)
        if report.failures:
            raise AirflowFailException(
                "not everything could be seen or ended; the next sweep tries again: "
                + "; ".join(map(str, report.failures))
            )
        return [in_words(finding) for finding in report.ended]

    end_what_is_left_running()


skyward_sweep()
