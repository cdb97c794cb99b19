"""Metrics that calls report: `sky.report`."""

import math
import os
from collections.abc import Iterator

import pytest

import skyward_core as sky
from skyward_core.wire.log_records import LogLines, split_records
from skyward_core.wire.messages import BURST, CallMetrics, Reporter
from skyward_core.worker.runner_process import LAST_LINES, Stream

MARK = b"\x1e0123456789abcdef\x1e"


class Pipe:
    """A runner's standard output, and a clock that stands still."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.now = 0.0
        self.stream = Stream("stdout", self.read, MARK)
        self.reporter = Reporter(self.write, MARK, lambda: self.now)

    def items(self) -> list[LogLines | CallMetrics]:
        while self.stream.read():
            pass
        return [item for _, lines in self.stream.lines() for item in split_records(MARK, lines)]

    def metrics(self) -> list[CallMetrics]:
        return [item for item in self.items() if isinstance(item, CallMetrics)]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.read)
    os.close(pipe.write)


def test_a_report_arrives_as_it_was(pipe: Pipe):
    reports = [CallMetrics(1, {"loss": 0.5}), CallMetrics(None, {"α": math.inf, "b": -1.0}), CallMetrics(2, {})]
    for metrics in reports:
        pipe.reporter.report(metrics)
    assert pipe.metrics() == reports


def test_a_report_cuts_no_text(pipe: Pipe):
    os.write(pipe.write, b"before\nno line end yet")
    pipe.reporter.report(CallMetrics(1, {"loss": 0.5}))
    os.write(pipe.write, b"after\n")
    assert pipe.items() == [
        LogLines(None, ("before", "no line end yet")),
        CallMetrics(1, {"loss": 0.5}),
        LogLines(None, ("after",)),
    ]


def test_many_reports_become_few_and_the_last_values_arrive(pipe: Pipe):
    for step in range(1000):
        pipe.reporter.report(CallMetrics(step, {"even" if step % 2 == 0 else "odd": float(step)}))
    assert [metrics.step for metrics in pipe.metrics()] == list(range(BURST))
    pipe.reporter.end_call()
    assert pipe.metrics() == [CallMetrics(999, {"even": 998.0, "odd": 999.0})]


def test_a_report_never_waits_for_a_full_pipe(pipe: Pipe):
    os.set_blocking(pipe.write, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe.write, b"x" * 4095 + b"\n")
    os.set_blocking(pipe.write, True)
    pipe.reporter.report(CallMetrics(1, {"loss": 0.5}))  # would wait for ever
    pipe.items()
    pipe.reporter.report(CallMetrics(2, {"accuracy": 0.5}))
    assert pipe.metrics() == [CallMetrics(2, {"loss": 0.5, "accuracy": 0.5})]


def test_too_many_metrics_are_refused(pipe: Pipe):
    with pytest.raises(sky.BadRequest, match="1000 metrics are too many"):
        pipe.reporter.report(CallMetrics(None, {f"metric{number}": 0.0 for number in range(1000)}))


def test_a_reader_that_is_gone_does_not_fail_the_call(pipe: Pipe):
    read, write = os.pipe()
    os.close(read)
    Reporter(write, MARK).report(CallMetrics(1, {}))
    os.close(write)


def test_reports_do_not_push_out_the_last_lines(pipe: Pipe):
    for step in range(BURST):
        os.write(pipe.write, f"line {step}\n".encode())
        pipe.reporter.report(CallMetrics(step, {}))
    pipe.items()
    assert pipe.stream.forget(0) == tuple(f"line {step}" for step in range(LAST_LINES))


def test_outside_a_pool_nothing_is_written(capfd: pytest.CaptureFixture[str]):
    sky.report(step=1, loss=0.5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", ["0.5", None, [1.0], {}])
def test_what_is_no_number_is_refused(value: object):
    with pytest.raises(sky.BadRequest, match="loss must be a number"):
        sky.report(loss=value)  # pyright: ignore[reportArgumentType]


def test_a_step_is_a_whole_number():
    with pytest.raises(sky.BadRequest, match="step must be a whole number, not 'first'"):
        sky.report(step="first")  # pyright: ignore[reportArgumentType]
