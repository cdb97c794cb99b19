"""Events of a running call: each printed line is one, and so are the metrics of one report."""

from skyward_core.engine.call_events import call_events
from skyward_core.events.events import CallReported, LogLine
from skyward_core.worker.wire import Output, Report, ReportedMetrics

REPORT = Report(2, "i-2", ())


def test_each_line_is_an_event() -> None:
    """In order, with the node that printed it."""
    output = Output("call", "stderr", ("first", "second"), 12.5, 30)
    assert list(call_events(REPORT, output)) == [
        LogLine(2, "i-2", "first", 12.5, "call", "stderr", 30),
        LogLine(2, "i-2", "second", 12.5, "call", "stderr", 30),
    ]


def test_metrics_are_one_event() -> None:
    """With the step that the call has given."""
    metrics = ReportedMetrics("call", (10, {"loss": 0.5}), 12.5)
    assert list(call_events(REPORT, metrics)) == [CallReported(2, "i-2", "call", 10, {"loss": 0.5}, 12.5)]
