"""Task runs that began on nodes, in calls that did not end as functions do: a process that was killed ends none of its
task runs. The flow's process gives them a final state when its flow run ends.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType, TaskRun
from prefect.context import TaskRunContext
from prefect.states import Cancelled, Crashed

import skyward_core as sky
from prefect_skyward.ui import RunLog

LOOKS = 3
"""How often the server is asked: task runs reach it as events, which take a moment."""
PAUSE_SECONDS = 1.0
_OPEN = (StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED, StateType.PAUSED)


class NestedRuns:
    """The calls of one flow run whose processes have died, and the task runs that these have left."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._dead: dict[str, bool] = {}
        """Whether the call was cancelled, by the id of its task run."""
        self._flow_run_ids: set[UUID] = set()

    def follow(self, futures: list[Future[Any]]) -> None:
        """Learn how these calls of this thread's task run end."""
        context = TaskRunContext.get()
        if context is None or context.task_run.flow_run_id is None:
            return
        self._flow_run_ids.add(context.task_run.flow_run_id)
        for future in futures:
            future.add_done_callback(functools.partial(self._note, str(context.task_run.id)))

    def end(self) -> None:
        """Give the task runs of dead processes a final state. Raises nothing, and waits for some seconds at most: the
        flow run has ended.
        """
        if self._dead:
            sky.after_the_work(
                "the end of task runs that began on nodes, and may stay Running in the UI,",
                functools.partial(self._log.run, self._end),
                functools.partial(self._log.say, logging.WARNING),
            )

    def _note(self, task_run_id: str, future: Future[Any]) -> None:
        if has_died(future):
            self._dead[task_run_id] = future.cancelled()

    def _end(self) -> None:
        dead, self._dead = dict(self._dead), {}
        with get_client(sync_client=True) as client:
            for look in range(LOOKS):
                if look:
                    time.sleep(PAUSE_SECONDS)
                for task_run_id, is_cancelled in left_by(dead, self._open_runs(client)).items():
                    state = Cancelled if is_cancelled else Crashed
                    client.set_task_run_state(
                        task_run_id, state(message="the process on the node in which it ran has ended"), force=True
                    )

    def _open_runs(self, client: SyncPrefectClient) -> list[TaskRun]:
        return client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=sorted(self._flow_run_ids))),
            task_run_filter=TaskRunFilter(
                state=TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=list(_OPEN)))
            ),
        )


def has_died(future: Future[Any]) -> bool:
    """Return whether the process of a call that has ended died. A function that raises has ended its task runs."""
    error = None if future.cancelled() else future.exception()
    return future.cancelled() or (isinstance(error, sky.SkywardError) and not isinstance(error, sky.RemoteError))


def left_by(dead: Mapping[str, bool], runs: Iterable[TaskRun]) -> dict[UUID, bool]:
    """Return the task runs that began below dead calls, directly or below others of these.

    `dead` has the ids of the calls' task runs, and whether they were cancelled; so has the answer.
    """
    known, left = dict(dead), {str(run.id): run for run in runs}
    found = dict[UUID, bool]()
    while new := {name: parent for name, run in left.items() if (parent := _parent_in(run, known)) is not None}:
        for name, parent in new.items():
            known[name] = found[left.pop(name).id] = known[parent]
    return found


def _parent_in(run: TaskRun, known: Mapping[str, bool]) -> str | None:
    parents = (str(getattr(one, "id", "")) for one in run.task_inputs.get("__parents__", ()))
    return next((parent for parent in parents if parent in known), None)
