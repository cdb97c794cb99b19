"""What a task needs to know of a pool that a setup task has opened for several tasks of its DAG run.

Nothing of it comes from XCom: the name is derived from DAG, run and setup task, and the settings are those in the DAG
file. The XCom of the setup is only compared (docs/decisions/0039).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import skyward_core as sky
from airflow_provider_skyward.generations import pool_name_of
from airflow_provider_skyward.pool_keywords import as_plain_data

if TYPE_CHECKING:
    from collections.abc import Iterable

EACH_ITS_OWN = frozenset({"retries", "lease_seconds", "provision_timeout", "output", "collect_metrics"})
"""Fields that a task on a shared pool may set itself: they say how it uses the pool, not which machines there are."""
HAS_RUN = frozenset({"success", "failed", "skipped", "upstream_failed", "removed", "running"})
"""States of a teardown after which it does not end a pool that is rented now."""


class PoolSetup(Protocol):
    """What `SkywardCreatePool` is to the tasks that use its pool."""

    task_id: str
    is_pool_setup: bool
    is_pool_named: bool
    skyward_conn_id: str | None
    provider_conn_id: str | None

    @property
    def plain_fields(self) -> dict[str, Any]: ...
    def get_closest_mapped_task_group(self) -> object | None: ...


# ── while a DAG is parsed ────────────────────────────────────────────────────────────────────────────────────────────


def setup_of(skyward_pool: Any) -> PoolSetup:
    """Return the setup task of what `skyward_pool=` was given. Raises BadRequest for anything else."""
    is_reference = callable(getattr(skyward_pool, "iter_references", None))
    tasks: list[Any] = [task for task, _ in skyward_pool.iter_references()] if is_reference else [skyward_pool]
    if len(tasks) == 1 and getattr(tasks[0], "is_pool_setup", False) is True:
        return cast("PoolSetup", tasks[0])
    raise sky.BadRequest(
        f"skyward_pool={type(skyward_pool).__name__}: give what `with skyward_pool(...) as pool:` returns, or"
        " `create.output` of one SkywardCreatePool that is not mapped. Airflow's pool of slots is `pool`"
    )


def setup_id_of(task: Any) -> str:
    """Return the id of the setup whose pool a task uses, also a mapped one; "" for a task without such a pool."""
    mapped: Mapping[str, Any] = getattr(task, "partial_kwargs", {})
    if (shared := mapped.get("skyward_pool")) is not None:
        return setup_of(shared).task_id
    return "" if task.is_teardown else getattr(task, "pool_setup_id", "")


def shared_fields(setup: PoolSetup, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain fields of the spec for a task on the pool of a setup.

    Raises BadRequest if the task was given another value than the setup in a field that all users must have in common.
    """
    theirs, own = setup.plain_fields, as_plain_data(given) if given else {}
    if wrong := sorted(name for name in own.keys() - EACH_ITS_OWN if own[name] != theirs.get(name)):
        raise sky.BadRequest(
            f"{', '.join(wrong)}: the pool of {setup.task_id!r} has its settings from there, and all of its tasks have"
            " the same machines. Write it there, or give this task a pool of its own (leave skyward_pool out)"
        )
    return theirs | {name: value for name, value in own.items() if name in EACH_ITS_OWN}


# ── in a run ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def setup_work(work: sky.Work, setup_id: str, *, is_mapped: bool) -> sky.Work:
    """Return the work of the setup task in the run of another task's work.

    `is_mapped`: both are in one mapped task group, of which each instance has its own pool.
    """
    return replace(work, task=setup_id, task_run=work.task_run if is_mapped else "", attempt="")


def shared_name(work: sky.Work, setup_id: str, handle: object, *, is_mapped: bool, given: str = "") -> str:
    """Return the name of the pool that a setup has opened in this run, after its XCom was compared with it.

    `given` is the name that the user has written, "" for none. Raises LeaseTampered if the XCom is not what the setup
    has written, and LedgerError.
    """
    its = setup_work(work, setup_id, is_mapped=is_mapped)
    name = given or pool_name_of(its)
    found = cast("Mapping[str, Any]", handle) if isinstance(handle, Mapping) else {}
    if found.keys() != {"name", "pool_id"} or found["name"] != name:
        raise sky.LeaseTampered(
            f"the XCom of {setup_id!r} is not what it has written in this run: it names no pool, or another one."
            f" Nothing in it was used, and nothing was rented. Clear {setup_id!r} with its tasks"
        )
    if given:  # it belongs to no run
        return name
    of_run = sky.cost_of(replace(its, task="", task_run=""))
    if found["pool_id"] not in of_run:
        raise sky.LeaseTampered(
            f"the XCom of {setup_id!r} names the pool {str(found['pool_id'])[:100]!r}, which this DAG run has not"
            f" opened by the ledger. Nothing was rented. Is SKYWARD_LEDGER the same for all workers? Else clear"
            f" {setup_id!r} with its tasks"
        )
    return name


def refuse_without_teardown(task: Any, task_instance: Any, setup_id: str, *, is_mapped: bool) -> None:
    """Raise BadRequest if no teardown would end a pool that this task rents anew under the name of the setup's.

    A setup without any teardown is the user's choice: then its `hold` ends the pool.
    """
    dag = getattr(task, "dag", None)
    if dag is None or not dag.has_task(setup_id):
        return
    teardowns = {
        one.task_id for one in cast("Iterable[Any]", dag.get_task(setup_id).downstream_list) if one.is_teardown
    }
    for teardown_id in sorted(teardowns - task.get_flat_relative_ids(upstream=False)):
        raise sky.BadRequest(
            f"{teardown_id!r} ends the pool and does not wait for {task.task_id!r}: write"
            f" {task.task_id} >> {teardown_id}, or put the task into the `with` block of the pool"
        )
    ask = getattr(task_instance, "get_task_states", None)
    if not teardowns or ask is None:
        return
    index = {"map_index": task_instance.map_index} if is_mapped else {}
    answer = ask(dag_id=dag.dag_id, task_ids=sorted(teardowns), run_ids=[task_instance.run_id], **index)
    states = cast("Mapping[str, object]", answer.get(task_instance.run_id, {}))
    if states and all(str(state) in HAS_RUN for state in states.values()):
        raise sky.BadRequest(
            f"{', '.join(sorted(teardowns))} has already ended the pool in this DAG run, and does not run again, so"
            f" that nothing would end a new one. Clear {setup_id!r} and the teardown with this task"
        )
