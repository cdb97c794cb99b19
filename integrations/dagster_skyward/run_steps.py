"""The steps of a run that are still to come, and the pools that its steps share, as tags of the run."""

import logging
from collections.abc import Mapping
from typing import Any

import dagster as dg

import skyward_core as sky

POOL_TAG = "skyward/pool"
"""Prefix of the run's tags that name its shared pools: `skyward/pool/SETTINGS: POOL_ID`."""
KEEP_TAG = "skyward/keep_on_failure"
WILL_RETRY_TAG = "dagster/will_retry"
ENDED = {dg.DagsterEventType.STEP_SUCCESS, dg.DagsterEventType.STEP_SKIPPED}

_log = logging.getLogger("skyward")


def note_pool(instance: dg.DagsterInstance, run_id: str, settings: str, pool_id: str, *, keeps: bool) -> None:
    """Write a shared pool on its run, so that any process that sees the run's end can release it.

    `keeps`: whether it stays after a failure.
    """
    instance.add_run_tags(run_id, {f"{POOL_TAG}/{settings}": pool_id} | ({KEEP_TAG: "true"} if keeps else {}))


def pools_of(run: dg.DagsterRun | None) -> list[str]:
    """Return the ids of the pools that the steps of a run share."""
    tags: Mapping[str, str] = {} if run is None else run.tags
    return [value for name, value in tags.items() if name.startswith(f"{POOL_TAG}/")]


def release_pools(run: dg.DagsterRun | None, provider: sky.Provider | None = None) -> list[str]:
    """End the pools that the steps of a run share; return their ids. An error is logged: the machines end by their own
    clocks.
    """
    released: list[str] = []
    for pool_id in pools_of(run):
        try:
            sky.release(pool_id, credentials=provider)
            released.append(pool_id)
        except sky.SkywardError as error:
            _log.warning("the pool %s could not be released, and ends after its keep_warm: %s", pool_id, error)
    return released


def failed_steps(instance: dg.DagsterInstance, run_id: str) -> set[str]:
    """Return the keys of the steps that have failed and are not tried again."""
    return {
        entry.step_key
        for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        if entry.step_key is not None
    }


def ended_steps(instance: dg.DagsterInstance, run_id: str) -> set[str]:
    """Return the keys of the steps that have ended, well or not, and are not tried again."""
    return failed_steps(instance, run_id) | {
        entry.step_key for kind in ENDED for entry in instance.all_logs(run_id, of_type=kind) if entry.step_key
    }


def steps_to_come(instance: dg.DagsterInstance, run_id: str) -> set[str]:
    """Return the steps of a run that may still begin or end: not ended, and not after one that has failed.

    A step writes its end before its resources are torn down, so
    that of two steps which end at the same time at least one sees the other's end.
    """
    run = instance.get_run_by_id(run_id)
    if run is None or run.execution_plan_snapshot_id is None:
        return set()
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    failed = failed_steps(instance, run_id)
    due = set(plan.step_keys_to_execute) - ended_steps(instance, run_id)
    dead = set(failed)
    for step in plan.steps:  # in the order of their dependencies
        if _sources(step) & dead:
            dead.add(step.key)
    return due - dead


def _sources(step: Any) -> set[str]:
    return {source.step_key for given in step.inputs for source in given.upstream_output_handles}
