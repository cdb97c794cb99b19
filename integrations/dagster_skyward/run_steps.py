"""The steps of a run that are still to come, and the pools that its steps share, as tags of the run."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

import skyward_core as sky

POOL_TAG = "skyward/pool"
"""Prefix of the run's tags that name its shared pools: `skyward/pool/SETTINGS: POOL_ID`."""
KEEP_TAG = "skyward/keep_on_failure"
WILL_RETRY_TAG = "dagster/will_retry"
PENDING = "[?]"
"""The end of the key of a mapped step before it is known how many of it there are."""
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
    return release_each(pools_of(run), provider)


def release_each(pool_ids: Iterable[str], provider: sky.Provider | None = None) -> list[str]:
    """End these pools, as `release_pools` does."""
    released: list[str] = []
    for pool_id in pool_ids:
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
    that of two steps which end at the same time at least one sees the other's end. A mapped step is one key with
    PENDING until its dynamic output is known, and then one key for each item.
    """
    run = instance.get_run_by_id(run_id)
    if run is None or run.execution_plan_snapshot_id is None:
        return set()
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    dead, ended = failed_steps(instance, run_id), ended_steps(instance, run_id)
    roots = {step.key: _roots(step) for step in plan.steps if step.key.endswith(PENDING)}
    items = _items(instance, run_id) if roots else {}
    mapped = {
        key: [item for root in its for item in items.get(root, ())]
        for key, its in roots.items()
        if {step for step, _ in its} <= ended
    }
    sources = dict(_with_sources(plan.steps, mapped))
    planned = set(plan.step_keys_to_execute)
    due = {key for key in sources if key in planned or f"{family(key)}{PENDING}" in planned & mapped.keys()} - ended
    # the plan's steps are in the order of their names, so a chain may need several rounds
    while found := {key for key, its in sources.items() if key not in dead and its & dead}:
        dead |= found
    return due - dead


def family(step_key: str) -> str:
    """Return what the keys of all steps of a mapped output have in common: `each` of `each[1]` and `each[?]`."""
    return step_key.partition("[")[0]


def _with_sources(steps: Sequence[Any], mapped: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, set[str]]]:
    """Give each step with the steps that its inputs come from; a mapped step once for each of its items."""
    for step in steps:
        sources = {handle.step_key for given in step.inputs for handle in given.upstream_output_handles}
        for item in mapped.get(step.key, ()):
            its = {f"{family(one)}[{item}]" if one in mapped else one for one in sources}
            yield f"{family(step.key)}[{item}]", its
        if step.key not in mapped:
            yield step.key, {key for one in sources for key in _keys(one, mapped)}


def _keys(step_key: str, mapped: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{family(step_key)}[{item}]" for item in mapped[step_key]] if step_key in mapped else [step_key]


def _roots(step: Any) -> set[tuple[str, str]]:
    """Return step and name of the dynamic outputs that decide how many there are of a mapped step."""
    dynamic = [given.source for given in step.inputs if hasattr(given.source, "resolved_by_step_key")]
    return {(one.resolved_by_step_key, one.resolved_by_output_name) for one in dynamic}


def _items(instance: dg.DagsterInstance, run_id: str) -> Mapping[tuple[str, str], list[str]]:
    """Return the keys of the items of each dynamic output so far, by step and name."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_OUTPUT):
        event: Any = entry.dagster_event
        handle = event.step_output_data.step_output_handle
        if handle.mapping_key is not None:
            found.setdefault((handle.step_key, handle.output_name), []).append(handle.mapping_key)
    return found
