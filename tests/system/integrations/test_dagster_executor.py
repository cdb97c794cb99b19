"""Dagster: the steps of a run as calls on one pool, by `skyward_executor`. Each run is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

dg = pytest.importorskip("dagster")


import skyward_core as sky  # noqa: E402
from skyward_core.ledger.ledger import Ledger, default_url  # noqa: E402
from skyward_core.worker.watchdog import tagged_processes  # noqa: E402
from tests.conftest import wait_until  # noqa: E402

pytestmark = [pytest.mark.timeout(300)]

DEADLINE_SECONDS = 120.0

PROJECT = '''
import os, pathlib, threading
import dagster as dg
from dagster_skyward import skyward_executor

HERE = pathlib.Path(__file__).parent

def note(context):
    print(f"printed by {context.op.name}")
    line = f"{context.op.name} {os.environ.get('SKYWARD_POOL_ID')} {os.environ.get('SKYWARD_INSTANCE_ID')} {os.getpid()}\\n"
    with open(HERE / "notes.txt", "a") as file:
        file.write(line)

def meet(context, other):
    """Wait until the other step runs too."""
    (HERE / context.op.name).touch()
    while not (HERE / other).exists():
        threading.Event().wait(0.05)

@dg.op
def left(context):
    note(context)
    meet(context, "right")
    return 20

@dg.op
def right(context):
    note(context)
    meet(context, "left")
    return 1

@dg.op(retry_policy=dg.RetryPolicy(max_retries=1))
def total(context, a, b):
    note(context)
    if context.retry_number == 0:
        raise LookupError("only the second try succeeds")
    return a + 2 * b

@dg.op(retry_policy=dg.RetryPolicy(max_retries=1))
def killed_once(context):
    note(context)
    if context.retry_number == 0:
        os.kill(os.getpid(), 9)

@dg.op(retry_policy=dg.RetryPolicy(max_retries=1))
def loses_its_node(context):
    note(context)
    while context.retry_number == 0:
        threading.Event().wait(0.05)

@dg.op
def endless(context):
    note(context)
    try:
        while True:
            threading.Event().wait(0.05)
    finally:
        (HERE / "interrupted").touch()

on_pool = skyward_executor.configured(
    {"compute": {"provider": {"name": "local", "price_per_hour": 36.0}, "nodes": 2, "lease_seconds": 10}}
)

@dg.job(executor_def=on_pool)
def adds():
    total(left(), right())

@dg.job(executor_def=on_pool)
def survives():
    killed_once()

@dg.job(executor_def=on_pool)
def moves():
    loses_its_node()

@dg.job(executor_def=on_pool)
def never_ends():
    endless()

too_much = {"provider": {"name": "local", "simulate": "T4"}, "accelerator": "A100"}

@dg.job(executor_def=skyward_executor.configured({"compute": too_much}))
def cannot_open():
    killed_once()

defs = dg.Definitions(jobs=[adds, survives, moves, never_ends, cannot_open])
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (tmp_path / "project.py").write_text(PROJECT)
    return tmp_path


def started(project: Path, job: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dagster", "job", "execute", "-f", "project.py", "-j", job],
        cwd=project,
        env={**os.environ, "DAGSTER_HOME": str(project)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def executed(project: Path, job: str) -> str:
    """Run the job to its end; return its output."""
    with started(project, job) as process:
        output, _ = process.communicate(timeout=240)
    return output


def notes(project: Path) -> list[list[str]]:
    """Name, pool, instance and pid of each step process that has run."""
    path = project / "notes.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def run_of(project: Path) -> tuple[Any, list[Any]]:
    """The only run, and its events."""
    with dg.DagsterInstance.from_config(str(project)) as instance:
        (record,) = instance.get_run_records(limit=1)
        return record.dagster_run, list(instance.all_logs(record.dagster_run.run_id))


def assert_nothing_is_left(project: Path) -> None:
    """The pool has ended in the ledger, and no process of its nodes or of a step lives."""
    pools = {pool for _, pool, _, _ in notes(project)}

    def is_over() -> bool:
        with Ledger(default_url()) as ledger:
            ended = all((entry := ledger.pool(pool)) is not None and entry.ended_at is not None for pool in pools)
        return ended and not [pid for pid, environ in tagged_processes() if environ.get("SKYWARD_POOL_ID") in pools]

    wait_until(is_over, f"{pools} to end", DEADLINE_SECONDS)


def events(log: list[Any], kind: Any) -> list[str]:
    return [entry.step_key for entry in log if entry.is_dagster_event and entry.dagster_event.event_type is kind]


def test_the_steps_of_a_run_are_calls_on_one_pool(project: Path) -> None:
    """Two steps run at once, on two nodes of one rental; the third gets their values, fails, and is tried again by its
    policy. What a step prints is in its own log of Dagster's. When the run has ended, nothing is left.
    """
    output = executed(project, "adds")
    run, log = run_of(project)
    assert run.status is dg.DagsterRunStatus.SUCCESS, output[-5000:]
    seen = notes(project)
    assert sorted(name for name, *_ in seen) == ["left", "right", "total", "total"]
    assert len({pool for _, pool, _, _ in seen}) == 1
    assert len({instance for _, _, instance, _ in seen[:2]}) == 2
    assert len({pid for _, _, _, pid in seen}) == 4
    kind = dg.DagsterEventType
    assert events(log, kind.STEP_UP_FOR_RETRY) == ["total"]
    assert sorted(events(log, kind.STEP_SUCCESS)) == ["left", "right", "total"]
    captured = [
        entry.dagster_event.logs_captured_data
        for entry in log
        if entry.is_dagster_event and entry.dagster_event.event_type is kind.LOGS_CAPTURED
    ]
    with dg.DagsterInstance.from_config(str(project)) as instance:
        for data in captured:
            (step,) = data.step_keys
            key = [run.run_id, "compute_logs", data.file_key]
            text = instance.compute_log_manager.get_log_data(key).stdout
            assert f"printed by {step}".encode() in text
    assert any("the pool is ready" in entry.user_message for entry in log)
    parts = sky.cost_parts(sky.Work(system="dagster", run=run.run_id))
    assert {"left", "right", "total"} <= {part.work.task for part in parts if part.cost_usd > 0}
    said = [entry.dagster_event.message or "" for entry in log if entry.is_dagster_event]
    assert any("the rest of the cost of total" in line for line in said)
    assert any("(4 of 4 calls done)" in entry.user_message for entry in log)  # no step's process is cut at its end
    assert_nothing_is_left(project)
