"""Dagster: pools that several steps and runs use: `skyward_executor`, `sharing`, backfills."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill  # noqa: E402

import skyward_core as sky  # noqa: E402
from dagster_skyward import Lifecycle, SkywardResource, upkeep  # noqa: E402
from dagster_skyward.backfills import BACKFILL_TAG, PARTITION_TAG, group_of, runs_to_come  # noqa: E402
from dagster_skyward.lifecycle import spec_of_run  # noqa: E402
from dagster_skyward.run_steps import KEEP_TAG, WILL_RETRY_TAG  # noqa: E402
from dagster_skyward.upkeep import release_after  # noqa: E402
from skyward_core.ledger.ledger import Ledger, default_url  # noqa: E402
from skyward_core.worker.node_clocks import tagged_processes  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

# Dagster's own: it uses its deprecated names for nested resources; and a policy of backfills is beta
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*backfill_policy"),
]
PRICE = 36.0


def resource(**options: Any) -> SkywardResource:
    return SkywardResource(**{"provider": sky.Local(price_per_hour=PRICE), "lease_seconds": 60} | options)


# ── steps as calls ───────────────────────────────────────────────────────────────────────────────────────────────────


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
    {"compute": {"provider": {"name": "local", "price_per_hour": 36.0}, "nodes": 2, "lease_seconds": 60}}
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

    wait_until(is_over, f"{pools} to end")


def events(log: list[Any], kind: Any) -> list[str]:
    return [entry.step_key for entry in log if entry.is_dagster_event and entry.dagster_event.event_type is kind]


def printed(project: Path, run: Any, log: list[Any]) -> dict[str, str]:
    """What each step has printed, as its node has stored it in Dagster's own log."""
    found: dict[str, str] = {}
    with dg.DagsterInstance.from_config(str(project)) as instance:
        for entry in log:
            if entry.is_dagster_event and entry.dagster_event.event_type is dg.DagsterEventType.LOGS_CAPTURED:
                data = entry.dagster_event.logs_captured_data
                text = instance.compute_log_manager.get_log_data([run.run_id, "compute_logs", data.file_key]).stdout
                found[data.step_keys[0]] = found.get(data.step_keys[0], "") + text.decode()
    return found


def test_the_steps_of_a_run_are_calls_on_one_pool(project: Path) -> None:
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
    for step, text in printed(project, run, log).items():
        assert f"printed by {step}" in text
    assert any("the pool is ready" in entry.user_message for entry in log)
    parts = sky.cost_parts(sky.Work(system="dagster", run=run.run_id))
    assert {"left", "right", "total"} <= {part.work.task for part in parts if part.cost_usd > 0}
    said = [entry.dagster_event.message or "" for entry in log if entry.is_dagster_event]
    assert any("the rest of the cost of total" in line for line in said)
    assert any("(4 of 4 calls done)" in entry.user_message for entry in log)  # no step's process is cut at its end
    assert_nothing_is_left(project)


# ── pools of runs and backfills ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("keep_warm", "expected"), [(None, 300), (40, 60), (600, 600)])
def test_pools_of_runs_wait_for_keep_warm(keep_warm: float | None, expected: float) -> None:
    """The resource accepts it without a name, which the run gives; `keep_on_failure` is the least."""
    compute = resource(sharing="run", keep_warm=keep_warm, lifecycle=Lifecycle(keep_on_failure=60))
    given = 0.0 if compute.keep_warm is None else compute.keep_warm
    assert spec_of_run(compute.spec, "run", given, 60).keep_warm == expected


def test_a_sensor_leaves_pools_that_a_run_still_needs() -> None:
    """A run that is tried again keeps its pools; so does a failed one whose resource says so."""
    failed = dg.DagsterRunStatus.FAILURE
    pool = {"skyward/pool/abc": "sky-none"}
    run = dg.DagsterRun("job", status=failed, tags=pool)
    assert "tried again" in release_after(run.with_tags({**pool, WILL_RETRY_TAG: "true"}))
    assert "stay after a failure" in release_after(run.with_tags({**pool, KEEP_TAG: "true"}))
    assert release_after(run.with_tags({})) == "the run has no shared pools"
    assert release_after(run) == "released: none"
    definitions = upkeep()
    names = sorted(sensor.name for sensor in definitions.sensors or ())  # pyright: ignore[reportAttributeAccessIssue]
    assert names == ["skyward_release_after_cancel", "skyward_release_after_failure", "skyward_report_costs"]
    assert [job.name for job in definitions.jobs or ()] == ["skyward_sweep"]  # pyright: ignore[reportAttributeAccessIssue]


DAYS = ["mon", "tue", "wed", "thu"]
STATUS = dg.DagsterRunStatus


@pytest.fixture
def instance() -> Iterator[Any]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


@dg.op
def first() -> int:
    return 1


@dg.op
def second(number: int) -> None: ...


@dg.job
def two_steps() -> None:
    second(first())


def run_in(instance: Any, status: Any, partition: str, backfill: str = "abcd") -> Any:
    tags = {BACKFILL_TAG: backfill, PARTITION_TAG: partition}
    return instance.create_run_for_job(two_steps, status=status, tags=tags)


def add_backfill(instance: Any, status: Any = BulkActionStatus.REQUESTED) -> None:
    instance.add_backfill(
        PartitionBackfill(
            backfill_id="abcd",
            partition_names=DAYS,
            status=status,
            from_failure=False,
            tags={},
            backfill_timestamp=time.time(),
        )
    )


def test_runs_of_a_backfill_have_one_group_and_others_their_own() -> None:
    """Without a backfill it is the run with its re-executions; `sharing="run"` never asks for the backfill."""
    again = dg.DagsterRun("job", run_id="2" * 8, root_run_id="1" * 8, parent_run_id="1" * 8)
    in_backfill = dg.DagsterRun("job", run_id="3" * 8, tags={BACKFILL_TAG: "abcd"})
    assert group_of(in_backfill, "backfill") == "backfill-abcd"
    assert group_of(in_backfill, "run") == "3" * 8
    assert [group_of(again, sharing) for sharing in ("run", "backfill")] == ["1" * 8] * 2


@pytest.mark.parametrize("status", [STATUS.NOT_STARTED, STATUS.STARTING, STATUS.STARTED])
def test_a_run_that_may_use_the_pool_is_to_come(instance: Any, status: Any) -> None:
    """One that has not begun, or has steps left, of the same backfill."""
    own = run_in(instance, STATUS.STARTED, "mon")
    run_in(instance, STATUS.STARTED, "mon", backfill="another")
    run_in(instance, STATUS.SUCCESS, "tue")
    assert not runs_to_come(instance, own, set())
    run_in(instance, status, "wed")
    assert runs_to_come(instance, own, set())
    only_strangers = {"first", "second"}
    assert runs_to_come(instance, own, only_strangers) == (status is not STATUS.STARTED)


@pytest.mark.parametrize(
    ("status", "expected"), [(BulkActionStatus.REQUESTED, True), (BulkActionStatus.CANCELING, False)]
)
def test_a_backfill_that_launches_more_runs_is_not_over(instance: Any, status: Any, expected: bool) -> None:
    """As long as a partition has no run, unless the backfill is canceled."""
    add_backfill(instance, status)
    own = run_in(instance, STATUS.STARTED, "thu")
    for day in DAYS[:2]:
        run_in(instance, STATUS.SUCCESS, day)
    assert runs_to_come(instance, own, set()) is expected
    run_in(instance, STATUS.FAILURE, "wed")
    assert not runs_to_come(instance, own, set())


def test_a_sensor_leaves_a_pool_that_other_runs_of_the_backfill_may_use(instance: Any) -> None:
    """A failed run releases it only if it is the last one; without the instance that is not known."""
    run_in(instance, STATUS.NOT_STARTED, "tue")
    failed = run_in(instance, STATUS.FAILURE, "mon").with_tags(
        {BACKFILL_TAG: "abcd", "skyward/pool/backfill-0123": "sky-none"}
    )
    assert "other runs of its backfill" in release_after(failed, instance)
    with dg.DagsterInstance.ephemeral() as of_no_other_run:
        assert release_after(failed, of_no_other_run) == "released: none"
    assert "other runs of its backfill" in release_after(failed)


def where(day: str) -> tuple[str, str]:
    return day, os.environ["SKYWARD_POOL_ID"]


def is_ended(pool: str) -> bool:
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool)
    assert entry is not None
    return entry.ended_at is not None


made: dict[str, str] = {}
"""The pool of each partition."""


@pytest.fixture
def days() -> Any:
    """An asset that makes all its partitions in one run; the option is beta, so that Dagster warns."""
    made.clear()

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(DAYS), backfill_policy=dg.BackfillPolicy.single_run())
    def days(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        made.update(compute.map(context, where, context.partition_keys))

    return days


def test_the_runs_of_a_backfill_use_one_pool_which_the_last_one_releases(instance: Any, days: Any) -> None:
    """Four runs, one rental. After the last partition's run nothing is left, without a wait for the warm time."""
    add_backfill(instance)
    compute = resource(sharing="backfill")
    ended = []
    for day in DAYS:
        dg.materialize(
            [days], resources={"compute": compute}, instance=instance, partition_key=day, tags={BACKFILL_TAG: "abcd"}
        )
        ended.append(is_ended(made[day]))
    assert len(set(made.values())) == 1
    assert ended == [False, False, False, True]
