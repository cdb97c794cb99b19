"""Dagster: the parts of a run's bill, and what the run's events say of them. The test writes the bills into the ledger."""

from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from dagster_skyward.settlement import OPEN, REPORTED, STATE_TAG, note_open, settle_ended_runs
from tests.system.integrations.test_dagster_money import (  # noqa: F401 - fixtures
    Bill,
    bill,
    dg,
    instance,
    made,
    observed,
    run_of,
    work,
)


def test_the_sensor_settles_ended_runs_until_their_bills_are_final(
    bill: Bill, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        run, without = run_of([made], instance), run_of([made], instance)
        note_open(instance, run.run_id)
        bill.open(work(run, "made", "made"))
        assert settle_ended_runs(instance) == []
        bill.end()
        with monkeypatch.context() as patch:

            def away(_: sky.Work) -> Any:
                raise sky.LedgerError("the database is locked")

            patch.setattr(sky, "cost_parts", away)
            assert settle_ended_runs(instance) == []
            assert "could not be reported yet: the database is locked" in caplog.text
        assert settle_ended_runs(instance) == [run.run_id]
        assert settle_ended_runs(instance) == []
        assert observed(instance, run) == [("made", "made", 0.75)]
        tags = [instance.get_run_by_id(one.run_id).tags for one in (run, without)]
    assert [its.get(STATE_TAG) for its in tags] == [REPORTED, None]
    assert OPEN != REPORTED
