"""End machines of dead pools every ten minutes. A pool is dead if its owner is dead or its lease has expired.

    AIRFLOW__CORE__DAGS_FOLDER=dags airflow dags test skyward_sweep                           ends the machines
    AIRFLOW__CORE__DAGS_FOLDER=dags airflow dags test skyward_sweep -c '{"dry_run": true}'    only lists them

The task queries the providers of all pools in the ledger. It also queries the providers of the settings
(SKYWARD_PROVIDER, skyward.toml), for machines that the ledger does not have. It never touches machines of living pools.
Workers on several computers need a shared ledger: SKYWARD_LEDGER=postgresql+psycopg://...

A sweep that finds something opens an event of the asset `skyward://sweep/found`, with what it has found in `extra`. A
DAG with `schedule=[Asset("skyward://sweep/found")]` runs then.

The second task makes the bill (XCom `skyward_cost`) final of each task that was killed in its last try. The asset
`skyward://bills` remembers until when it has looked, so that a sweep after an outage leaves no bill out.

Install what it needs with `pip install ".[airflow]"` in a clone of the repository.
"""

import logging
from datetime import UTC, datetime, timedelta

from airflow.sdk import Asset, AssetAlias, dag, task
from airflow.sdk.exceptions import AirflowFailException

import skyward_core as sky
from airflow_provider_skyward.bills import settle_bills

PROVIDERS = None  # the providers of the settings; or a list: [sky.AWS(region="us-east-1"), sky.RunPod()]

FOUND = Asset(name="skyward_sweep_found", uri="skyward://sweep/found")
BILLS = Asset(name="skyward_bills", uri="skyward://bills")
SWEEP = AssetAlias("skyward_sweep")  # an alias, because most sweeps find nothing, and then there is no event
MOST_LINES = 50  # of an event: Airflow keeps it in its database

log = logging.getLogger(__name__)


def as_line(finding) -> str:
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
    @task(execution_timeout=timedelta(minutes=30), outlets=[SWEEP])
    def end_what_is_left_running(params, outlet_events) -> list[str]:
        report = sky.sweep(providers=PROVIDERS, is_dry_run=params["dry_run"])
        for finding in report.findings:
            log.info("%s", as_line(finding))
        for line in report.pruned:
            log.info("removed, because it is not used any more: %s", line)
        if report.failures:
            raise AirflowFailException(
                "some machines could not be listed or ended; the next sweep tries again: "
                + "; ".join(map(str, report.failures))
            )
        if found := [finding for finding in report.findings if finding.action in {"end", "close"}]:
            lines = [as_line(finding) for finding in found[:MOST_LINES]]
            extra = {
                "is_dry_run": params["dry_run"],
                "found": lines,
                "machines": sum(len(one.resource_ids) for one in found),
            }
            outlet_events[SWEEP].add(FOUND, extra=extra)
        return [as_line(finding) for finding in report.ended]

    @task(execution_timeout=timedelta(minutes=30), inlets=[BILLS])
    def make_bills_final(params, asset_state_store) -> list[str]:
        return [] if params["dry_run"] else settle_bills(asset_state_store)

    end_what_is_left_running()
    make_bills_final()


skyward_sweep()
