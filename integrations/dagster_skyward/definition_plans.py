"""The pools that the steps of Dagster's jobs and assets would open, as far as they are known before a run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

# no public name has what @dg.definitions makes
from dagster.components.definitions import LazyDefinitions

import skyward_core as sky
from dagster_skyward.configuration import FIELDS, spec_of
from dagster_skyward.executor import skyward_executor
from dagster_skyward.lifecycle import OF_RUNS, spec_of_step

ASSETS = "__ASSET_JOB"
"""Dagster's name for a run of assets that are in no job of their own; the ledger has it too."""
RUN_RETRIES_TAG = "dagster/max_retries"
A_RUN = "RUN"
"""What a quote has in place of a run's id."""


@dataclass(frozen=True)
class Step:
    """A step with a pool. `is_mapped`: the run decides how many of it there are. `is_shared`: None if it is only with
    other steps that need the same.
    """

    key: str
    spec: sky.PoolSpec | None
    reason: str
    tries: int
    is_mapped: bool
    is_shared: bool | None


def plan_of(place: str, name: str, *, is_file: bool) -> sky.Plan | None:
    """Return the plan of definitions in a module or a file; None if that name is something else."""
    found = getattr(_module(place, is_file=is_file), name, None)
    if isinstance(found, LazyDefinitions) and not found.has_context_arg:  # @dg.definitions
        found = found()
    if not isinstance(found, dg.Definitions):
        return None
    tasks = [task for job in _jobs(found) for task in _planned(found, job)]
    return sky.Plan(tuple(tasks))


def _module(place: str, *, is_file: bool) -> Any:
    folder = str(Path(place).resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path:  # the definitions import modules of their folder
        sys.path.insert(0, folder)
    return importlib.import_module(Path(place).stem if is_file else place)


def _jobs(defs: dg.Definitions) -> Iterator[Any]:
    """Give the jobs, and the job of all assets last."""
    jobs = {job.name: job for job in defs.resolve_all_job_defs()}
    assets = jobs.pop(ASSETS, None)
    yield from (jobs[name] for name in sorted(jobs))
    if assets is not None:
        yield assets


def _planned(defs: dg.Definitions, job: Any) -> Iterator[sky.PlannedTask]:
    """Give one task for each pool of a run: steps that share one are a task together."""
    runs = 1 + int(job.tags.get(RUN_RETRIES_TAG, 0))
    executor = job.executor_def
    if executor.name == skyward_executor.name:
        config = executor.apply_config_mapping({"config": {}}).value["config"]
        spec, reason = _spec_of(config["compute"], {})
        yield sky.PlannedTask(job.name, "all steps", spec, reason=reason, tries=runs)
    is_one_process = executor.name == dg.in_process_executor.name
    shared: dict[str, list[Step]] = {}
    for step in _steps(defs, job, job.graph, ""):
        if (step.is_shared is not False or is_one_process) and step.spec is not None:
            shared.setdefault(step.spec.model_dump_json(), []).append(step)
        else:
            yield _own_pool(job, step, runs)
    for steps in shared.values():
        if len(steps) == 1 and steps[0].is_shared is None and not steps[0].is_mapped and not is_one_process:
            yield _own_pool(job, steps[0], runs)
        else:
            yield sky.PlannedTask(job.name, ", ".join(step.key for step in steps), steps[0].spec, tries=runs)


def _own_pool(job: Any, step: Step, runs: int) -> sky.PlannedTask:
    instances = None if step.is_mapped else 1
    return sky.PlannedTask(
        job.name, step.key, step.spec, reason=step.reason, tries=step.tries * runs, instances=instances
    )


def _steps(defs: dg.Definitions, job: Any, graph: Any, prefix: str) -> Iterator[Step]:
    for node in graph.nodes_in_topological_order:
        key = f"{prefix}{node.name}"
        if isinstance(node.definition, dg.GraphDefinition):
            yield from _steps(defs, job, node.definition, f"{key}.")
            continue
        retries = node.retry_policy or node.definition.retry_policy
        for resource in _resources(defs, node.definition.required_resource_keys):
            spec, reason = _spec(resource, node.tags)
            sharing = _value(resource, "sharing")
            has_name = spec is not None and spec.name is not None
            yield Step(
                key,
                spec,
                reason,
                tries=1 + (retries.max_retries if retries is not None else 0),
                is_mapped=graph.dependency_structure.is_dynamic_mapped(node.name),
                is_shared=has_name or (None if sharing is None else sharing != "step"),
            )


def _resources(defs: dg.Definitions, keys: Any) -> Iterator[Any]:
    """Give the `SkywardResource`s among the resources of a step, also within a Pipes client."""
    resources: Mapping[str, Any] = defs.resources or {}
    for key in sorted(keys):
        resource = resources.get(key)
        kind = getattr(resource, "resource_cls", type(resource))
        if getattr(kind, "is_skyward", False):
            yield _value(resource, "compute") or resource


def _value(resource: Any, name: str) -> Any:
    """Return a field of a resource, or the default of one that is configured at launch."""
    data = getattr(resource, "data", None)
    return data.get(name) if isinstance(data, Mapping) else getattr(resource, name, None)


def _spec(resource: Any, tags: Mapping[str, str]) -> tuple[sky.PoolSpec | None, str]:
    values = {name: _value(resource, name) for name in FIELDS}
    if _value(resource, "sharing") in OF_RUNS:
        values.pop("keep_warm", None)  # then it is none of the spec's, whose name comes from the run
    return _spec_of(values, tags)


def _spec_of(values: Mapping[str, Any], tags: Mapping[str, str]) -> tuple[sky.PoolSpec | None, str]:
    try:
        return spec_of_step(spec_of(values, A_RUN), tags), ""
    except sky.SkywardError as error:  # an environment variable that only the run has
        return None, str(error)
