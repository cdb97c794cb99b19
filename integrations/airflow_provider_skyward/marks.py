"""Ends the machines of a task that ends while no process of the task can notice it.

The trigger of a deferred task hears of a mark only after a triggerer has taken it, and a worker that is dead gets no
SIGTERM. The api-server, which takes the mark, calls these hooks. The scheduler calls them when it fails a task whose
worker is dead, such as the one that was to fetch the result of a deferred task. Both need the ledger of the workers
and, in their environment, the credentials of the cloud; without them the machines end by their lease.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import Any

from airflow.listeners import hookimpl

_log = logging.getLogger("skyward")
_turn = threading.Lock()
"""One at a time: with a computer hundreds of workers may be lost, and each look takes a connection to the ledger."""
SETUP = "SkywardCreatePool"
"""Its pool is used by other tasks after it has ended."""


@hookimpl
def on_task_instance_success(previous_state: object, task_instance: Any) -> None:
    """End the machines of a task that was marked as success."""
    _end_pools(previous_state, task_instance)


@hookimpl
def on_task_instance_failed(previous_state: object, task_instance: Any) -> None:
    """End the machines of a task that was marked as failed, or whose worker is dead."""
    _end_pools(previous_state, task_instance)


@hookimpl
def on_task_instance_skipped(previous_state: object, task_instance: Any) -> None:
    """End the machines of a task that was marked as skipped."""
    _end_pools(previous_state, task_instance)


def _end_pools(previous_state: object, task_instance: Any) -> None:
    operator = str(getattr(task_instance, "operator", ""))
    if "Skyward" not in operator or operator == SETUP:
        return
    if previous_state is None:  # Airflow names it for each end but a mark
        _end_pools_of(task_instance)
    elif _is_failed_by_scheduler(task_instance):
        # a ledger that is away must not hold up the scheduler
        import skyward_core as sky

        sky.in_thread("skyward-marks", partial(_end_in_turn, task_instance))


def _is_failed_by_scheduler(task_instance: Any) -> bool:
    """A worker, which ends its own pool, has another class of task instances. A task that is tried again adopts it."""
    return type(task_instance).__module__.startswith("airflow.models.") and str(task_instance.state) == "failed"


def _end_in_turn(task_instance: Any) -> None:
    with _turn:
        _end_pools_of(task_instance)


def _end_pools_of(task_instance: Any) -> None:
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
            "the machines of %s were not looked for after its end, and end by their lease; `skyward sweep` ends them"
            " at once: %s",
            of_task,
            error,
        )
        return
    for pool_id in (pool["pool_id"] for pool in pools if not pool["ended_at"]):
        try:
            order_stop(pool_id)
        except OSError as error:  # no process can be started
            _log.warning("the pool %s of %s was not ended with it: %s", pool_id, of_task, error)
