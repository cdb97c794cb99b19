"""What a run's page shows of a step: the utilisation as a picture, the machines, spans and errors.

Spans of the Gantt chart are pairs of engine events with markers. Everything is written in the thread of `LogWriter`.
"""

import base64
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import dagster as dg

import skyward_core as sky
from dagster_skyward.dagster_events import report_error, report_span
from dagster_skyward.metadata import shown

PROVISION, BOOTSTRAP, RUN, WAIT = "skyward_provision", "skyward_bootstrap", "skyward_run", "skyward_wait"
"""Spans: machines are requested; they are prepared; the step uses the pool; its calls wait for slots of others."""
SPAN_SECONDS = 5.0
"""How often the end of the span RUN is moved: a step may make thousands of calls."""
LEFT, WIDE, HIGH = 50, 480, 100
"""Of a picture of the utilisation, in pixels: what is left of the lines, and their room."""
COLOURS = {
    "gpu_percent": "#2f6fde",
    "gpu_memory_percent": "#8a4fd3",
    "cpu_percent": "#d9822b",
    "memory_percent": "#2e9e6b",
}
"""By the names of `sky.Utilisation.measured`. They can be told apart on white and on black."""
NODES_TABLE, CONSOLE = "skyward/node_table", "skyward/console"
BARS, CHART = "skyward/utilization", "skyward/utilization_chart"


@dataclass(slots=True)
class StepSpan:
    """The span RUN of one step: whether it has begun, when its end was moved, and whether that end is too early."""

    has_begun: bool = False
    moved_at: float = -math.inf
    is_late: bool = False


def charts_of(use: sky.Utilisation) -> Mapping[str, dg.MarkdownMetadataValue]:
    """Return the course of the utilisation as bars and as a picture, in Markdown; nothing without a measurement.

    Dagster's page shows Markdown of less than 1,000 characters in place, as always the bars, and any other after a
    click.
    """
    rows = [
        f"| {use.words_of(name)} | {its.sparkline(0, 100)} | {its.mean:.0f} % | {its.greatest:.0f} % |"
        for name, its in use.measured.items()
    ]
    head = ["| | 0 to 100 % over time | mean | greatest |", "| --- | --- | --- | --- |"]
    texts = {BARS: "\n".join([*head, *rows]), CHART: _picture(use)} if rows else {}
    return {name: dg.MetadataValue.md(text) for name, text in texts.items()}


def _picture(use: sky.Utilisation) -> str:
    """Return lines from 0 to 100 % as an image in Markdown: Dagster's pages show images of data, and no tags of SVG."""
    parts = [
        f'<text x="{LEFT - 4}" y="{_height(percent) + 4}" text-anchor="end">{percent} %</text>'
        f'<path d="M{LEFT} {_height(percent)}H{LEFT + WIDE}" stroke="#8885"/>'
        for percent in (0, 50, 100)
    ]
    for number, (name, its) in enumerate(use.measured.items()):
        points = its.points * (2 if its.count == 1 else 1)
        places = ((LEFT + WIDE * at / (len(points) - 1), _height(one)) for at, one in enumerate(points))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour, words = COLOURS[name], sky.shown_text.html(use.words_of(name))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + WIDE + 12}" y="{20 + 18 * number}" fill="{colour}">{words}</text>')
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDE + 170}" height="{HIGH + 20}"'
    svg = f'{start} font-family="sans-serif" font-size="12" fill="#888">{"".join(parts)}</svg>'
    return f"![utilisation](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _height(percent: float) -> float:
    return 10 + HIGH * (1 - min(100.0, max(0.0, percent)) / 100)


class Spans:
    """The spans of one run, and its errors, in the run's log. Without an instance nothing is written."""

    def __init__(self, instance: dg.DagsterInstance | None, run: dg.DagsterRun | None) -> None:
        self._instance = instance
        self._run = run
        self._open: list[tuple[str, str]] = []

    @property
    def is_written(self) -> bool:
        """Whether there is a log for them."""
        return self._instance is not None and self._run is not None

    def begin(self, step: str, name: str, words: str) -> None:
        """Begin a span of a step, or of the run if the step is "".

        A span that has begun goes on: each node begins to be prepared.
        """
        if (step, name) not in self._open:
            self._open.append((step, name))
            self._report(step, words, start=name)

    def end(self, step: str, name: str, words: str) -> None:
        """End a span that has begun; otherwise nothing happens."""
        open_now = [one for one in self._open if one[1] != name]
        if len(open_now) < len(self._open):
            self._open = open_now
            self._report(step, words, end=name)

    def move_end(self, step: str, name: str, words: str) -> None:
        """Write the end of a span that may go on: the last end counts."""
        self._report(step, words, end=name)

    def error(self, step: str, message: str, error: BaseException | None = None) -> None:
        """Write an error as a structured event."""
        if self._instance is not None and self._run is not None:
            report_error(self._instance, self._run, step, message, error)

    def _report(self, step: str, words: str, *, start: str | None = None, end: str | None = None) -> None:
        if self._instance is not None and self._run is not None:
            report_span(self._instance, self._run, step, words, start=start, end=end)


def node_table(pool: sky.ComputePool, consoles: Mapping[str, str | None]) -> Mapping[str, Any]:
    """Return the machines of an open pool as metadata: a table, and the first link to a provider's console."""
    nodes = pool.lease.nodes if pool.is_active else ()
    if not nodes:
        return {}
    links = {node.instance.id: consoles.get(node.instance.id) or _console_url(pool, node) for node in nodes}
    records = [_record(node, links[node.instance.id]) for node in nodes]
    found = next(filter(None, links.values()), None)
    table = {NODES_TABLE: dg.MetadataValue.table(records)}
    return table | ({CONSOLE: dg.MetadataValue.url(found)} if found else {})


def _record(node: sky.Node, console: str | None) -> dg.TableRecord:
    machine = node.instance
    return dg.TableRecord(
        shown(
            {
                "node": node.rank,
                "machine": machine.id,
                "provider": machine.provider,
                "region": machine.region,
                "type": machine.instance_type,
                "market": "spot" if machine.is_spot else "on demand",
                "USD per hour": machine.price_per_hour,
                "slots": node.workers * node.slots,
                "console": console or "",
            }
        )
    )


def _console_url(pool: sky.ComputePool, node: sky.Node) -> str | None:
    """For a process that has joined the pool: the events of the machines were those of its opener."""
    provider = next((one for one in pool.spec.providers if one.name == node.instance.provider), None)
    return None if provider is None else provider.console_url(node.instance)


def savings(pool: sky.ComputePool, cost_usd: float) -> float:
    """Return what the same time of the machines would have cost more on demand, in USD."""
    machines = [node.instance for node in pool.lease.nodes] if pool.is_active else []
    paid = sum(machine.price_per_hour for machine in machines)
    on_demand = sum(
        machine.price_per_hour if machine.on_demand_price_per_hour is None else machine.on_demand_price_per_hour
        for machine in machines
    )
    return max(0.0, cost_usd * (on_demand / paid - 1)) if paid else 0.0


def print_line(event: sky.LogLine) -> None:
    """Print a node's line to the same stream of this process, which Dagster shows beside the run."""
    stream: TextIO = sys.stderr if event.stream == "stderr" else sys.stdout
    print(sky.shown_text.each_line(f"[node {event.node}] ", event.line), file=stream, flush=True)


def is_due(moved_at: float, seconds: float) -> bool:
    """Return whether so many seconds have passed since then, on the monotonic clock."""
    return time.monotonic() - moved_at >= seconds
