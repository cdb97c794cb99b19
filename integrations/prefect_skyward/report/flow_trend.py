"""One artifact for each flow: what its last runs have cost, and how they used their machines.

Prefect's page Artifacts has one card for each key, with the description of the newest artifact. So the card of a flow
says what its last run has cost. Each run that ends writes the artifact anew, from the labels of the runs, or from the
metadata of their cost artifacts where the server has refused labels. If two end at the same time, or one cannot write
it, the next one's is right again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.utilities.urls import url_for

from prefect_skyward.report import pages
from prefect_skyward.report.prefect_api import asked, figures_of, write_of_no_run
from prefect_skyward.report.task_costs import total

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

COST_LABEL, FINAL_LABEL = "skyward.cost_usd", "skyward.is_final"
MEASURE_LABEL, PERCENT_LABEL = "skyward.utilisation_of", "skyward.utilisation_percent"
ENDED = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=sorted(TERMINAL_STATES))))
BEGUN_STATES = (StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED)
ENDED_OR_BEGUN = FlowRunFilter(
    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[*sorted(TERMINAL_STATES), *BEGUN_STATES]))
)
MOST_RUNS = 30
READ_RUNS = 50
"""How many of the newest runs are read; some may have rented nothing."""
BAR_CHARACTERS, NAME_CHARACTERS, STATE_CHARACTERS = 4, 18, 12
"""Prefect's page is 708 pixels wide beside its margins, and cuts a wider table off."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One row: a run of the flow, its cost in USD, and what its calls used of the nodes (None: not measured)."""

    name: str
    url: str
    state: str
    begun: str
    usd: float
    measure: str = ""
    percent: float | None = None
    is_final: bool = True


def write_trend(flow_id: UUID, known: Mapping[UUID, Mapping[str, str]] = MappingProxyType({})) -> None:
    """Write the artifact of a flow; nothing if none of its runs has rented machines.

    It has the runs that have ended, and those with a final bill: one whose process was killed may be Running for ever.
    `known`: the figures of runs whose labels may be older than these.
    """
    flow = asked(lambda client: client.read_flow(flow_id))
    newest = asked(
        lambda client: client.read_flow_runs(
            flow_filter=FlowFilter(id=FlowFilterId(any_=[flow_id])),
            flow_run_filter=ENDED_OR_BEGUN,
            sort=FlowRunSort.START_TIME_DESC,
            limit=READ_RUNS,
        )
    )
    # a server that was busy at the end of a run may have refused its labels
    open_ones = [run.id for run in newest if (run.labels or {}).get(FINAL_LABEL) is not True and run.id not in known]
    late = {**figures_of(open_ones), **known}
    runs = [
        _row(run, figures)
        for run in newest
        if COST_LABEL in (figures := {**(run.labels or {}), **late.get(run.id, {})})
        and (run.state_type in TERMINAL_STATES or is_final(figures))
    ][:MOST_RUNS]
    if runs:
        write_of_no_run(key_of(flow.name, flow_id), trend_page(runs), trend_summary(runs))


def metadata_of(usd: float, measure: str, percent: float | None, *, is_final: bool) -> dict[str, str]:
    """Return the figures of a run as the metadata of its cost artifact, which are texts."""
    used = {} if percent is None else {MEASURE_LABEL: measure, PERCENT_LABEL: f"{percent:.1f}"}
    return {COST_LABEL: f"{usd:.8f}", FINAL_LABEL: str(is_final).lower(), **used}


def is_final(written: Mapping[str, Any]) -> bool:
    """Return whether figures, or labels, are those of the whole bill."""
    return written.get(FINAL_LABEL) in (True, "true")


def key_of(flow_name: str, flow_id: UUID) -> str:
    """Return the key of a flow's artifact: small letters, digits and dashes. Two flows never have the same one."""
    slug = re.sub(r"[^a-z0-9]+", "-", flow_name.lower()).strip("-")
    return "-".join(filter(None, ("skyward-flow", slug, "" if slug == flow_name else flow_id.hex[:8])))


def trend_summary(runs: Sequence[RunFigures]) -> str:
    """Return the line of the card; the newest run comes first."""
    last, *_ = runs
    words = [f"last run {_money(last)}", *filter(None, [pages.markdown(pages.used(last.measure, last.percent))])]
    if len(runs) > 1:
        words.append(f"the last {len(runs)} runs {pages.usd(total(run.usd for run in runs))}")
    return " · ".join(words)


def trend_page(runs: Sequence[RunFigures]) -> str:
    """Return the markdown of a flow's last runs, the newest first."""
    whole, most = total(run.usd for run in runs), max(run.usd for run in runs)
    words = "the last run" if len(runs) == 1 else f"the last {len(runs)} runs"
    head = f"**{pages.usd(whole)}** for {words}, {pages.usd(whole / len(runs))} for one in the mean."
    if measures := " or ".join(sorted({run.measure for run in runs if run.measure})):
        head += f" The utilisation is that of the {pages.markdown(measures)}."
    if not all(run.is_final for run in runs):
        head += " ≥ is so far: the bill is not final."
    rows = [
        [
            run.begun,
            pages.markdown_link(_cut(run.name, NAME_CHARACTERS), run.url),
            pages.markdown(_cut(run.state, STATE_CHARACTERS)),
            f"{'' if run.is_final else '≥ '}{pages.usd(run.usd)} {_bar(run.usd, most)}".strip(),
            f"{pages.used('', run.percent)} {_bar(run.percent or 0.0, 100.0)}".strip(),
        ]
        for run in runs
    ]
    return f"{head}\n\n" + pages.table(["begun (UTC)", "run", "state", "USD", "utilisation"], rows)


def _money(run: RunFigures) -> str:
    return pages.usd(run.usd) + ("" if run.is_final else " so far")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _bar(value: float, most: float) -> str:
    """Return a bar; what is more than nothing has one character at least."""
    if value <= 0 or most <= 0:
        return ""
    return "█" * max(1, round(BAR_CHARACTERS * min(1.0, value / most)))


def _row(run: FlowRun, figures: Mapping[str, Any]) -> RunFigures:
    """Return the row of a run, from its labels or those figures."""
    began, percent = run.start_time or run.created, figures.get(PERCENT_LABEL)
    return RunFigures(
        name=run.name,
        url=url_for("flow-run", run.id) or "",
        state=run.state_name or "",
        begun=f"{began:%m-%d %H:%M}" if began is not None else "",
        usd=float(figures[COST_LABEL]),
        is_final=is_final(figures),
        measure=str(figures.get(MEASURE_LABEL, "")),
        percent=float(percent) if percent is not None else None,
    )
