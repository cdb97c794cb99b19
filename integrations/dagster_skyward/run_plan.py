"""What the definitions of a run say of its steps: which of them would use a pool with the same settings.

Steps are named by their families (`run_steps.family`), as the steps of a mapped output have one definition.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward.configuration import FIELDS, spec_of
from dagster_skyward.lifecycle import OF_RUNS, spec_of_step
from dagster_skyward.metadata import StepContext, op_context
from dagster_skyward.run_steps import PENDING, family


def strangers(context: StepContext, spec: sky.PoolSpec | None = None) -> frozenset[str]:
    """Return the families of steps that are known not to use a pool with these settings (None: any pool).

    None are known for a context that was made by hand.
    """
    try:
        step: Any = op_context(context).get_step_execution_context()
        nodes = {one.node_handle: one for one in step.execution_plan.step_dict_by_key.values()}
        return frozenset(str(handle) for handle in nodes if not _may_use(step, step.job_def.get_op(handle), spec))
    except (dg.DagsterError, AttributeError, LookupError):  # a context that was made by hand
        return frozenset()


def planned_users(context: StepContext, instance: dg.DagsterInstance, others: frozenset[str]) -> int:
    """Return how many steps of the run use a pool that these families do not use; a mapped step counts as two."""
    step: Any = op_context(context).get_step_execution_context()
    snapshot_id = step.dagster_run.execution_plan_snapshot_id
    planned = (
        step.execution_plan.step_keys_to_execute
        if snapshot_id is None
        else instance.get_execution_plan_snapshot(snapshot_id).step_keys_to_execute
    )
    return sum(2 if key.endswith(PENDING) else 1 for key in planned if family(key) not in others)


def _may_use(step: Any, node: Any, spec: sky.PoolSpec | None) -> bool:
    """Whether a step of this op may use such a pool; True too if that is only known when it runs."""
    found = [_values(step, name) for name in node.definition.required_resource_keys]
    values = [its for its in found if its is not None]
    return bool(values) if spec is None else any(_is_of(spec, its, node.tags, step.run_id) for its in values)


def _is_of(spec: sky.PoolSpec, values: Mapping[str, Any], tags: Mapping[str, str], run_id: str) -> bool:
    try:
        return spec_of_step(spec_of(_of_pool(values), run_id), tags) == spec
    except sky.SkywardError:  # an environment variable that is not set here, or a tag that the step will refuse
        return True


def _of_pool(values: Mapping[str, Any]) -> dict[str, Any]:
    names_itself = values.get("sharing") in OF_RUNS  # then `keep_warm` is none of the spec's
    return {name: values.get(name) for name in FIELDS if name != "keep_warm" or not names_itself}


def _values(step: Any, name: str) -> Mapping[str, Any] | None:
    """Return the fields of a `SkywardResource`, or of that of a Pipes client; None for other resources."""
    definition = step.job_def.resource_defs.get(name)
    if not getattr(getattr(definition, "configurable_resource_cls", None), "is_skyward", False):
        return None
    nested = dict(_nested(definition))
    if not nested:
        return step.resolved_run_config.resources[name].config or {}
    (inner,) = nested.values()
    data = getattr(inner, "data", None)  # of one that is configured at launch
    return data if isinstance(data, Mapping) else {field: getattr(inner, field, None) for field in (*FIELDS, "sharing")}


def _nested(definition: Any) -> Iterator[tuple[str, Any]]:
    """Give the pools among the nested resources: a Pipes client has one, and a pool may have credentials."""
    for name, inner in (getattr(definition, "nested_resources", None) or {}).items():
        if getattr(getattr(inner, "resource_cls", type(inner)), "is_skyward", False):
            yield name, inner
