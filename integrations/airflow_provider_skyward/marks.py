"""Ends the machines of a task that a user marks while no process of the task can notice it.

The trigger of a deferred task hears of a mark only after a triggerer has taken it, and a worker that is dead gets no
SIGTERM. The api-server, which takes the mark, calls these hooks. It needs the ledger of the workers and, in its
environment, the credentials of the cloud; without them the machines end by their lease.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from airflow.listeners import hookimpl

_log = logging.getLogger("skyward")
SETUP = "SkywardCreatePool"
"""Its pool is used by other tasks after it has ended."""


@hookimpl
def on_task_instance_success(previous_state: object, task_instance: Any) -> None:
    """End the machines of a task that was marked as success."""
    _end_pools(previous_state, task_instance)


@hookimpl
def on_task_instance_failed(previous_state: object, task_instance: Any) -> None:
    """End the machines of a task that was marked as failed."""
    _end_pools(previous_state, task_instance)


@hookimpl
def on_task_instance_skipped(previous_state: object, task_instance: Any) -> None:
    """End the machines of a task that was marked as skipped."""
    _end_pools(previous_state, task_instance)


def _end_pools(previous_state: object, task_instance: Any) -> None:
    """Airflow names the previous state for each end but a mark."""
    operator = str(getattr(task_instance, "operator", ""))
    if previous_state is not None or "Skyward" not in operator or operator == SETUP:
        return
    # Airflow imports plugins in all its processes
    import skyward_core as sky
    from airflow_provider_skyward.stop_order import order_stop
    from airflow_provider_skyward.task_attempt import work_of

    work = replace(work_of(task_instance), attempt="")
    of_task = f"{work.workflow}/{work.run}/{work.task}"
    try:
        pools = sky.receipts_of(work)
    except sky.LedgerError as error:
        _log.warning(
            "the machines of %s were not looked for after its mark, and end by their lease; `skyward sweep` ends them"
            " at once: %s",
            of_task,
            error,
        )
        return
    for pool_id in (pool["pool_id"] for pool in pools if not pool["ended_at"]):
        try:
            order_stop(pool_id)
        except OSError as error:  # no process can be started
            _log.warning("the pool %s of %s was not ended after its mark: %s", pool_id, of_task, error)
