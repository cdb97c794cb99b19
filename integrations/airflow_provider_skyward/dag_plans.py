"""The pools that the tasks of DAGs would open, as far as they are known before a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, cast

from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.configuration import conf
from airflow.sdk.definitions.mappedoperator import MappedOperator

import skyward_core as sky
from airflow_provider_skyward.operators import SkywardOperator
from airflow_provider_skyward.pool_keywords import OTHER_NAMES, POOL_FIELDS, as_keywords, is_template, named
from airflow_provider_skyward.secrets import shown

PRICED = frozenset(
    {"provider", "nodes", "machine", "accelerator", "cpu", "memory", "architecture", "spot", "image", "volume", "spec"}
)
"""The fields on which the price depends. A pool is quoted if only others are not known before a run."""

type Mapped = tuple[Mapping[str, Any], int | None]
"""Keywords that tasks mapped from one have in common, and how many such tasks there are."""


def plan_of(path: Path) -> sky.Plan:
    """Return the plan of a folder or a file of DAGs. A file that cannot be imported is among the warnings."""
    folder = str((path if path.is_dir() else path.parent).resolve())
    if folder not in sys.path:  # DAGs import modules of their folder
        sys.path.append(folder)
    bag = DagBag(path, collect_dags=False)
    bag.collect_dags(path)
    tasks = [
        planned for dag_id in sorted(bag.dags) for task in bag.dags[dag_id].tasks for planned in _planned(dag_id, task)
    ]
    warnings = [f"{file}: {_last_line(error)}" for file, error in sorted(bag.import_errors.items())]
    return sky.Plan(tuple(tasks), tuple(warnings))


def _planned(dag_id: str, task: Any) -> Iterator[sky.PlannedTask]:
    if _uses_pool_of_setup(task):
        return
    if isinstance(task, SkywardOperator):
        yield _planned_task(dag_id, task, task.plain_fields, {}, 1)
    elif isinstance(task, MappedOperator) and issubclass(task.operator_class, SkywardOperator):
        common = _pool_fields(task.partial_kwargs)
        for keywords, count in _mapped(task):
            yield _planned_task(dag_id, task, common, keywords, count)


def _planned_task(
    dag_id: str, task: Any, fields: Mapping[str, Any], mapped: Mapping[str, Any], count: int | None
) -> sky.PlannedTask:
    spec, reason = _spec(dict(fields) | _pool_fields(mapped))
    return sky.PlannedTask(
        workflow=dag_id,
        task=task.task_id,
        spec=spec,
        reason=reason,
        timeout_seconds=_timeout_seconds(task),
        tries=(task.retries or 0) + 1,
        instances=None if task.get_closest_mapped_task_group() is not None else count,
    )


def _uses_pool_of_setup(task: Any) -> bool:
    """Return whether a task rents nothing itself: its pool is that of a setup task, which has a quote of its own."""
    keywords = task.partial_kwargs if isinstance(task, MappedOperator) else vars(task)
    return bool(keywords.get("pool_setup_id") or keywords.get("skyward_pool"))


def _timeout_seconds(task: Any) -> float | None:
    """Return after how long Airflow ends a try, and its pool; None if it never does, or if the pool outlives the task.

    A deferrable task has the time once for its start and the deferral together, and once for the worker that fetches
    the result.
    """
    kind = task.operator_class if isinstance(task, MappedOperator) else type(task)
    if task.execution_timeout is None or getattr(kind, "is_pool_setup", False):
        return None
    return task.execution_timeout.total_seconds() * (2 if _is_deferrable(task) else 1)


def _is_deferrable(task: Any) -> bool:
    keywords = task.partial_kwargs if isinstance(task, MappedOperator) else vars(task)
    given = keywords.get("deferrable")
    return conf.getboolean("operators", "default_deferrable", fallback=False) if given is None else bool(given)


def _spec(fields: Mapping[str, Any]) -> tuple[sky.PoolSpec | None, str]:
    """Return the spec of the known fields, or None and the reason why it is not known."""
    unknown = [OTHER_NAMES.get(name, name) for name, value in fields.items() if is_template(value)]
    if decisive := [name for name in unknown if name in PRICED]:
        return None, f"{', '.join(decisive)} {'is' if len(decisive) == 1 else 'are'} known only in a run"
    known = {name: shown(value) for name, value in fields.items() if not is_template(value)}
    try:
        return sky.PoolSpec.of(**named(known, known)), ""
    except sky.BadRequest as error:
        return None, str(error)


def _pool_fields(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pool's fields among the keywords of an operator."""
    spec = keywords.get("spec")
    of_spec = {"spec": spec} if is_template(spec) else as_keywords(spec)
    return of_spec | {POOL_FIELDS[name]: value for name, value in keywords.items() if name in POOL_FIELDS}


def _mapped(task: Any) -> Iterator[Mapped]:
    """Return the keywords of the tasks that are mapped from one, equal ones once."""
    given = getattr(task, task._expand_input_attr).value
    if not isinstance(given, Mapping):
        yield from _mapped_by_dicts(given)
        return
    columns = cast("Mapping[str, Any]", given)
    ours = {name: values for name, values in columns.items() if name in POOL_FIELDS or name == "spec"}
    counts = [len(values) if _is_literal(values) else None for name, values in columns.items() if name not in ours]
    others = None if None in counts else prod(count for count in counts if count is not None)
    if any(not _is_literal(values) for values in ours.values()):
        yield ours, None
        return
    for values in product(*ours.values()):
        yield dict(zip(ours, values, strict=True)), others


def _mapped_by_dicts(given: Any) -> Iterator[Mapped]:
    """The same for `expand_kwargs`, which has one dictionary for each task."""
    if not _is_literal(given) or not all(isinstance(one, Mapping) for one in given):
        yield {"spec": given}, None
        return
    kinds = [{name: value for name, value in one.items() if name in POOL_FIELDS or name == "spec"} for one in given]
    for number, kind in enumerate(kinds):
        if kind not in kinds[:number]:
            yield kind, kinds.count(kind)


def _is_literal(values: Any) -> bool:
    return (
        isinstance(values, (Sequence, Mapping))
        and not isinstance(values, str)
        and not hasattr(values, "iter_references")
    )


def _last_line(error: str) -> str:
    return next((line.strip() for line in reversed(error.splitlines()) if line.strip()), "it cannot be imported")
