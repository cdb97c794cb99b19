"""The pages of flow runs whose process could not write them to the end: it was killed, or Prefect's API did not answer.

The last thing that the report of a flow run writes is the label `skyward.is_final`. An ended run without it gets its
figures from the ledger, which has the whole bill, by the next run of the same flow. Each step may be repeated.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import SyncClientContext

import skyward_core as sky
from prefect_skyward.report import pages
from prefect_skyward.report.prefect_api import RunApi
from prefect_skyward.report.task_costs import total, with_the_ledger

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

COST_KEY, TASKS_KEY = "skyward-cost", "skyward-tasks"
COST_LABEL, FINAL_LABEL = "skyward.cost_usd", "skyward.is_final"
MOST_RUNS = 50
"""How many of the runs that have ended last are looked at."""


def settle_earlier_runs(flow_id: UUID, but: UUID) -> None:
    """Write the costs of ended runs of a flow whose figures are not final, except for this run."""
    ended = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(TERMINAL_STATES))))
    with SyncClientContext.get_or_create() as context:
        runs = context.client.read_flow_runs(
            flow_filter=FlowFilter(id=FlowFilterId(any_=[flow_id])),
            flow_run_filter=ended,
            sort=FlowRunSort.END_TIME_DESC,
            limit=MOST_RUNS,
        )
    for run in runs:
        if run.id != but and (run.labels or {}).get(FINAL_LABEL) is not True:
            _settle(run)


def _settle(run: FlowRun) -> None:
    parts = sky.cost_parts(sky.Work(system="prefect", run=str(run.id)))
    if not parts or not all(part.is_final for part in parts):
        return  # a later run finds it again
    api = RunApi(run.id)
    data = api.read([TASKS_KEY, COST_KEY]).get(TASKS_KEY)
    rows = with_the_ledger(json.loads(data) if isinstance(data, str) else data or [], parts)
    usd = total(float(part.cost_usd) for part in parts)
    api.write(TASKS_KEY, "table", rows, f"{len(rows)} task runs")
    page = pages.settled_page(usd, rows, sorted({part.pool_id for part in parts}))
    api.write(COST_KEY, "markdown", page, f"{pages.usd(usd)} · by the ledger")
    api.label({COST_LABEL: usd, FINAL_LABEL: True})
