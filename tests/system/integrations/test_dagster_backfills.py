"""Dagster: one pool for a range of partitions, and one for the runs of a backfill."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill  # noqa: E402

import skyward_core as sky  # noqa: E402
from dagster_skyward import SkywardResource  # noqa: E402
from dagster_skyward.backfills import BACKFILL_TAG, PARTITION_TAG, group_of, runs_to_come  # noqa: E402
from dagster_skyward.upkeep import release_after  # noqa: E402
from skyward_core.ledger.ledger import Ledger, default_url  # noqa: E402

# Dagster's own: it uses its deprecated names for nested resources; and a policy of backfills is beta
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*backfill_policy"),
]

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
    compute = SkywardResource(provider=sky.Local(price_per_hour=36.0), sharing="backfill", lease_seconds=30)
    ended = []
    for day in DAYS:
        dg.materialize(
            [days],
            resources={"compute": compute},
            instance=instance,
            partition_key=day,
            tags={BACKFILL_TAG: "abcd"},
        )
        ended.append(is_ended(made[day]))
    assert len(set(made.values())) == 1
    assert ended == [False, False, False, True]
