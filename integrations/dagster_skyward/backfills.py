"""The runs of a backfill that share pools: what they have in common, and whether some of them are still to come."""

from collections.abc import Set as AbstractSet

import dagster as dg

from dagster_skyward.run_steps import POOL_TAG, family, steps_to_come

BACKFILL_TAG = "dagster/backfill"
PARTITION_TAG = "dagster/partition"
OF_BACKFILL = "backfill-"
OPEN = ("REQUESTED",)
"""States of a backfill that launches more runs."""
NOT_BEGUN = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING]
RUNNING = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


def group_of(run: dg.DagsterRun, sharing: str) -> str:
    """Return the name of the runs that share pools: of the run's backfill, if `sharing` says so and it has one, or of
    the run and its re-executions.
    """
    backfill = run.tags.get(BACKFILL_TAG) if sharing == "backfill" else None
    return f"{OF_BACKFILL}{backfill}" if backfill else run.root_run_id or run.run_id


def runs_to_come(instance: dg.DagsterInstance, run: dg.DagsterRun, strangers: AbstractSet[str]) -> bool:
    """Whether another run of the run's backfill may still use a pool: one that Dagster will launch, one that has not
    begun, or one with a step to come whose family is none of the `strangers`.

    A step writes its end before its resources are torn down, so that of two runs which end at the same time at least
    one sees that no step of the other is to come.
    """
    backfill = run.tags.get(BACKFILL_TAG)
    if backfill is None:
        return False
    runs = [one for one in instance.get_runs(dg.RunsFilter(tags={BACKFILL_TAG: backfill})) if one.run_id != run.run_id]
    if any(one.status in NOT_BEGUN for one in runs):
        return True
    if any(one.status in RUNNING and _users_to_come(instance, one, strangers) for one in runs):
        return True
    return _launches_more(instance, backfill, [run, *runs])


def is_pool_of_backfill(run: dg.DagsterRun) -> bool:
    """Whether the pools of a run's tags are those of its backfill."""
    return any(name.startswith(f"{POOL_TAG}/{OF_BACKFILL}") for name in run.tags)


def _users_to_come(instance: dg.DagsterInstance, run: dg.DagsterRun, strangers: AbstractSet[str]) -> bool:
    return any(family(key) not in strangers for key in steps_to_come(instance, run.run_id))


def _launches_more(instance: dg.DagsterInstance, backfill_id: str, runs: list[dg.DagsterRun]) -> bool:
    backfill = instance.get_backfill(backfill_id)
    if backfill is None or backfill.status.value not in OPEN:
        return False
    if backfill.is_asset_backfill:
        data = backfill.asset_backfill_data
        if data is None:
            return True
        left = data.target_subset - data.requested_subset - data.failed_and_downstream_subset
        return bool(left.num_partitions_and_non_partitioned_assets)
    launched = {one.tags.get(PARTITION_TAG) for one in runs}
    return not set(backfill.partition_names or ()) <= launched
