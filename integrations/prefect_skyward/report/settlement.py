"""The pages of flow runs whose process could not write them to the end: it was killed, or Prefect's API did not answer.

The last thing that the report of a flow run writes is the label `skyward.is_final`. A run without it gets its figures
from the ledger, once that has the whole bill: by the next run of the same flow, or by `settle_flow_runs`, which the
sweep of flows/sweep.py calls. Each step may be repeated.

A killed process leaves its run Running in Prefect. So a run is settled too that has not ended there and has no use of a
pool any more. If its process lives, and rents again, its report writes all of it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, cast
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
from prefect.context import FlowRunContext, TaskRunContext

import skyward_core as sky
from prefect_skyward.report import pages
from prefect_skyward.report.flow_trend import (
    BEGUN_STATES,
    COST_LABEL,
    ENDED,
    FINAL_LABEL,
    MEASURE_LABEL,
    PERCENT_LABEL,
    is_final,
    metadata_of,
    write_trend,
)
from prefect_skyward.report.notices import FINAL
from prefect_skyward.report.prefect_api import COST_KEY, RunApi, asked, figures_of
from prefect_skyward.report.task_costs import nodes_with_the_ledger, total, with_the_ledger

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

NODES_KEY, TASKS_KEY = "skyward-nodes", "skyward-tasks"
MICRO_USD = 1e-6
MOST_RUNS = 50
"""How many of a flow's runs that have ended last are looked at, and of those that have not ended."""
MOST_RUNS_OF_ALL = 200
"""The same for all flows together."""
NOT_ENDED = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(BEGUN_STATES))))


def settle_flow_runs() -> int:
    """Write the final costs of flow runs, of all flows, whose processes could not write them.

    Returns how many runs it has completed: total, table of task runs, labels, tag and event `skyward.cost.final`, with
    the figures of the ledger. A run whose bill is not final there is left for the next time. May be called at any time,
    also by several processes at once. Raises LedgerError and the errors of Prefect's client: that of a single run after
    all others were tried.
    """
    settled, errors = _settle_all([run for run in _runs(None, MOST_RUNS_OF_ALL) if _is_open(run)])
    for flow_id in {run.flow_id for run in settled}:
        write_trend(flow_id)
    if errors:
        raise errors[0]
    return len(settled)


def begin_bill(flow_run_id: UUID) -> None:
    """Note that a flow run costs, and that its figures are not final; `settle_flow_run` ends that."""
    RunApi(flow_run_id).label({FINAL_LABEL: False})


def settle_flow_run(flow_run_id: UUID) -> None:
    """Write the final costs of a flow run if no use of a pool is left. Else another process or a later call does it."""
    run = asked(lambda client: client.read_flow_run(flow_run_id))
    if _settle(run):
        write_trend(run.flow_id)


def settle_earlier_runs(flow_id: UUID, but: UUID) -> int:
    """Write the costs of runs of a flow whose figures are not final, except for this run; return how many have them
    now. Raises the first error, after all were tried.
    """
    found = _runs(FlowFilter(id=FlowFilterId(any_=[flow_id])), MOST_RUNS)
    open_ones = [run for run in found if run.id != but and (_is_open(run) or _has_ended_without(run))]
    settled, errors = _settle_all(open_ones)
    if errors:
        raise errors[0]
    return len(settled)


def _runs(of: FlowFilter | None, most: int) -> list[FlowRun]:
    """Return runs that have ended, the last ones first, and those that have begun and not ended."""
    orders = ((ENDED, FlowRunSort.END_TIME_DESC), (NOT_ENDED, FlowRunSort.START_TIME_DESC))
    return asked(
        lambda client: [
            run
            for runs, order in orders
            for run in client.read_flow_runs(flow_filter=of, flow_run_filter=runs, sort=order, limit=most)
        ]
    )


def _is_open(run: FlowRun) -> bool:
    """Whether its process has begun to write its costs, and has not ended that; or was killed, perhaps, before a busy
    server has taken the first label.
    """
    return (run.labels or {}).get(FINAL_LABEL, run.state_type not in BEGUN_STATES) is False


def _has_ended_without(run: FlowRun) -> bool:
    """Whether it has ended, and its process may not even have begun to write its costs."""
    return run.state_type in TERMINAL_STATES and FINAL_LABEL not in (run.labels or {})


def _settle_all(runs: Sequence[FlowRun]) -> tuple[list[FlowRun], list[Exception]]:
    """Return the runs that are settled now, and the errors of those that could not be."""
    settled: list[FlowRun] = []
    errors: list[Exception] = []
    for run in runs:
        try:
            if _settle(run):
                settled.append(run)
        except Exception as error:
            error.add_note(f"while the costs of flow run {run.id} were written")
            errors.append(error)
    return settled, errors


def _settle(run: FlowRun) -> bool:
    """Write what is missing; return whether all of it is written now."""
    parts = sky.cost_parts(sky.Work(system="prefect", run=str(run.id)))
    if not parts or not all(part.is_final for part in parts):
        return False  # another call finds it again
    api = RunApi(run.id)
    tables = api.read([TASKS_KEY, NODES_KEY, COST_KEY])
    rows = with_the_ledger(_rows(tables.get(TASKS_KEY)), parts)
    usd = total(float(part.cost_usd) for part in parts)
    api.write(TASKS_KEY, "table", rows, f"{len(rows)} task runs")
    pools = {pool_id: sky.receipt_of(pool_id) for pool_id in {part.pool_id for part in parts}}
    if nodes := nodes_with_the_ledger(_rows(tables.get(NODES_KEY)), pools):
        api.write(NODES_KEY, "table", nodes, f"{pages.machines(len(nodes))} · {pages.usd(usd)}")
    written = figures_of([run.id]).get(run.id, {})
    shown = {**(run.labels or {}), **written}
    measure, share = str(shown.get(MEASURE_LABEL, "")), shown.get(PERCENT_LABEL)
    percent = None if share is None else float(share)
    tag = pages.cost_tag(usd, measure, percent)
    if not (is_final(written) and abs(float(written[COST_LABEL]) - usd) < MICRO_USD):
        page = pages.settled_page(usd, rows, sorted({part.pool_id for part in parts}))
        its = metadata_of(usd, measure, percent, is_final=True)
        api.write(COST_KEY, "markdown", page, f"{pages.usd(usd)} · by the ledger", tag=tag, figures=its)
    api.tag(tag)
    _emit_bills(api, run, parts, usd)
    used = {} if percent is None else {MEASURE_LABEL: measure, PERCENT_LABEL: percent}
    api.label({**_of_machines(pools), **used, COST_LABEL: usd, FINAL_LABEL: True})  # last
    return True


def _rows(table: Any) -> list[dict[str, Any]]:
    return json.loads(table) if isinstance(table, str) else table or []


def _of_machines(pools: Mapping[str, Mapping[str, Any]]) -> dict[str, str | int]:
    """Return the labels of a run's pools that the report writes too, by their receipts."""
    machines = [one for receipt in pools.values() for one in receipt["resources"] if one["kind"] == "instance"]
    return {
        "skyward.pool_id": ",".join(sorted(pools)),
        "skyward.provider": ",".join(sorted({receipt["provider"] for receipt in pools.values()})),
        "skyward.nodes": len(machines),
    }


def _emit_bills(api: RunApi, run: FlowRun, parts: Sequence[sky.CostPart], usd: float) -> None:
    """Emit the bill of each pool, as the run's process would have."""
    flow = asked(lambda client: client.read_flow(run.flow_id))
    related = [
        {
            "prefect.resource.id": f"prefect.flow.{flow.id}",
            "prefect.resource.role": "flow",
            "prefect.resource.name": flow.name,
        }
    ]
    outside = copy_context()  # Prefect would relate the events to the run of this thread too
    for around in (FlowRunContext, TaskRunContext):
        outside.run(cast(Any, around).__var__.set, None)
    for pool_id in sorted({part.pool_id for part in parts}):
        cost = total(float(part.cost_usd) for part in parts if part.pool_id == pool_id)
        payload = {"usd": cost, "flow_run_usd": usd, "by": "ledger"}
        outside.run(partial(api.emit, FINAL, pool_id, "", payload, related=related))
