"""Dagster: the steps of a run as calls on one pool, by `skyward_executor`. Each run is a process of its own."""

import signal
from pathlib import Path

import pytest

from tests.conftest import signal_members, wait_until
from tests.system.integrations.test_dagster_executor import (  # noqa: F401 - fixtures
    DEADLINE_SECONDS,
    assert_nothing_is_left,
    dg,
    events,
    executed,
    notes,
    project,
    run_of,
    started,
)

pytestmark = [pytest.mark.timeout(300)]


def test_a_step_whose_process_is_killed_is_tried_again_by_its_policy(project: Path) -> None:
    """Its call fails; the step gets a reason, and its retry runs on the same pool."""
    output = executed(project, "survives")
    run, log = run_of(project)
    assert run.status is dg.DagsterRunStatus.SUCCESS, output[-5000:]
    assert events(log, dg.DagsterEventType.STEP_UP_FOR_RETRY) == ["killed_once"]
    assert any(
        "signal SIGKILL" in str(entry.dagster_event.step_retry_data.error)
        for entry in log
        if entry.is_dagster_event and entry.dagster_event.event_type is dg.DagsterEventType.STEP_UP_FOR_RETRY
    )
    assert len({pool for _, pool, _, _ in notes(project)}) == 1
    assert_nothing_is_left(project)


def test_a_step_whose_node_is_lost_is_tried_again_on_another(project: Path) -> None:
    """The engine does not repeat the call; Dagster's retry policy does, in the same pool."""
    with started(project, "moves") as process:
        try:
            wait_until(lambda: bool(notes(project)), "the step to begin", DEADLINE_SECONDS)
            ((_, pool, instance, _),) = notes(project)
            signal_members(instance, signal.SIGKILL)
            output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.kill()
    run, log = run_of(project)
    assert run.status is dg.DagsterRunStatus.SUCCESS, output[-5000:]
    assert events(log, dg.DagsterEventType.STEP_UP_FOR_RETRY) == ["loses_its_node"]
    assert [its for _, its, _, _ in notes(project)] == [pool, pool]
    assert notes(project)[1][2] != instance
    assert "NodeLost" in output
    assert_nothing_is_left(project)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_ends_its_steps_and_its_pool(project: Path, sig: signal.Signals) -> None:
    """A terminated run interrupts its steps, which clean up. A killed one cannot: its nodes end all the same."""
    with started(project, "never_ends") as process:
        try:
            wait_until(lambda: bool(notes(project)), "the step to begin", DEADLINE_SECONDS)
            if sig is signal.SIGTERM:  # what the UI does: without a request Dagster takes the signal for a failure
                with dg.DagsterInstance.from_config(str(project)) as instance:
                    instance.report_run_canceling(run_of(project)[0])
            process.send_signal(sig)
            output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.kill()
    assert_nothing_is_left(project)
    run, log = run_of(project)
    assert (project / "interrupted").exists() == (sig is signal.SIGTERM)
    if sig is signal.SIGTERM:
        assert run.status is dg.DagsterRunStatus.CANCELED, output[-5000:]
        assert events(log, dg.DagsterEventType.STEP_FAILURE) == ["endless"]


def test_a_pool_that_cannot_open_fails_the_run_with_the_reason(project: Path) -> None:
    """Each try of the step fails; nothing is rented, and the error says what was looked for."""
    output = executed(project, "cannot_open")
    run, log = run_of(project)
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert events(log, dg.DagsterEventType.STEP_FAILURE) == ["killed_once"]
    assert "NoCapacity" in output
    assert "A100" in output
    assert notes(project) == []
