"""The parts of the Prefect report that need no server: series, the state of a pool, pages and notices."""

import threading
from collections import Counter
from uuid import UUID

import pytest

import skyward_core as sky
from prefect_skyward.report import run_report
from prefect_skyward.report.run_report import RunReport
from prefect_skyward.ui import RunLog
from tests.conftest import wait_until
from tests.unit.integrations.test_prefect_pages import (
    provisioned,
)


def test_a_page_is_written_at_once_at_a_change_of_the_pool_and_else_every_15_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many costs and reports come. Here the 15 seconds do not pass."""
    written: list[str] = []

    class Api:
        def __init__(self, _: UUID) -> None:
            """Nothing to keep."""

        def write(self, key: str, *_: object, **__: object) -> None:
            written.append(key)

        def label(self, _: object) -> None:
            written.append("labels")

        def emit(self, *_: object) -> None:
            """Events are few by the sieve."""

    monkeypatch.setattr(run_report, "RunApi", Api)
    assert run_report.WRITE_SECONDS == 15.0
    report = RunReport(UUID(int=1), RunLog.of_flow(), sky.Work())
    take = report.sink()
    take(sky.InfraCreating("p-1"))
    take(provisioned(0))
    take(sky.PoolReady("p-1", 1, 1, 2.0))
    for second in range(1000):
        take(sky.CostUpdate(float(second), second / 1000, 3.6, 0, 1))
    take(sky.CostFinal(1.0, 1000.0, 3.6, 0, 1, 0.0))
    report.close()
    counts = Counter(written)
    assert counts["skyward-machines"] == 4, "at the request, when it is ready, with its bill, at the end"
    assert counts["skyward-cost"] == counts["labels"] - 1 == 3


def test_the_end_of_a_flow_does_not_wait_long_for_a_slow_api(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says where the bill is, also after an earlier warning. What the API takes later is not lost."""
    answers, writes, labels = threading.Event(), list[object](), list[object]()

    class Api:
        def __init__(self, _: UUID) -> None:
            pass

        def write(self, *_: object, **__: object) -> None:
            if not writes:
                writes.append(1)
                raise OSError("the API answers 503")
            assert answers.wait(60)

        def label(self, values: object) -> None:
            labels.append(values)

        def emit(self, *_: object) -> None:
            pass

    monkeypatch.setattr(run_report, "RunApi", Api)
    monkeypatch.setattr(run_report, "CLOSE_SECONDS", 0.0)
    report = RunReport(UUID(int=1), RunLog.of_flow(), sky.Work())
    take = report.sink()
    take(sky.InfraCreating("p-1"))
    wait_until(lambda: "incomplete" in caplog.text, "the warning about the first request")
    labels.clear()
    take(sky.PoolReady("p-1", 1, 1, 2.0))
    report.close()
    report.close()  # it does not wait again
    assert caplog.text.count("within 0 s") == 1
    assert "skyward receipt" in caplog.text
    answers.set()
    wait_until(lambda: labels, "the last request")
