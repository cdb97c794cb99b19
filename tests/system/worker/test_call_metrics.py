"""Metrics that calls report: `sky.report`."""

import os

import pytest

import skyward_core as sky
from skyward_core.worker.call_metrics import BURST
from tests.conftest import RecordedEvents


@sky.compute
def train(steps: int) -> str:
    import numpy as np

    for step in range(steps):
        sky.report(step=step, loss=np.float32(1 / (1 + step)), secret_name=True)
    print("trained")
    return "done"


@sky.compute
def train_and_die() -> None:
    sky.report(step=1, loss=0.5)
    os._exit(3)


def test_a_call_reports_while_it_runs(pool: sky.ComputePool, recorded: RecordedEvents):
    future = pool.submit(train(1000))
    assert future.result() == "done"
    reports = [event for event in recorded.of(sky.CallReported) if event.call_id == future.call_id]
    assert len(reports) == BURST + 1
    assert (reports[0].step, reports[0].values) == (0, {"loss": 1.0, "secret_name": 1.0})
    assert (reports[-1].step, reports[-1].values["loss"]) == (999, pytest.approx(0.001))
    assert reports[0].timestamp > 0
    assert [line.line for line in recorded.of(sky.LogLine) if line.call_id == future.call_id] == ["trained"]


def test_a_call_that_dies_has_reported(pool: sky.ComputePool, recorded: RecordedEvents):
    future = pool.submit(train_and_die())
    with pytest.raises(sky.CallCrashed) as crash:
        future.result()
    assert "report" not in str(crash.value)
    assert [event.step for event in recorded.of(sky.CallReported) if event.call_id == future.call_id] == [1]
