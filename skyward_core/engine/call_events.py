"""Events for what a running call has written and reported."""

from __future__ import annotations

from collections.abc import Iterator

from skyward_core.events.events import CallReported, LogLine
from skyward_core.worker.wire import Output, Report, ReportedMetrics


def call_events(
    report: Report, item: Output | ReportedMetrics, place: int | None = None, use: str = ""
) -> Iterator[LogLine | CallReported]:
    """Yield an event for each line, or one for the metrics; `place` as in `LogLine`, `use` as in `CallReported`."""
    if isinstance(item, ReportedMetrics):
        step, values = item.metrics
        yield CallReported(report.node, report.instance_id, item.call_id, step, values, item.timestamp, use=use)
        return
    for line in item.lines:
        yield LogLine(
            report.node, report.instance_id, line, item.timestamp, item.call_id, item.stream, item.level, place
        )
