"""What Prefect shows of a task run while its machines are rented: Pending, by the name WaitingForMachines, and why.

    Running ──the pool is not open──▶ WaitingForMachines ──it is open──▶ Running
                                              └──it could not be opened──▶ what the engine makes of the error

Its message says why: which machines are requested, or who had none. For the first task runs that wait it changes with
that.

The engine sets the first Running before it calls the function, because it looks for a cached result first. Prefect's
server takes the states of task runs from events, and asks nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, cast

from prefect.context import TaskRunContext
from prefect.states import Pending, Running
from prefect.utilities.engine import emit_task_run_state_change_event

from prefect_skyward.pool_life import PoolLife

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun

WAITING = "WaitingForMachines"


@contextmanager
def waiting_for_machines(life: PoolLife) -> Generator[None]:
    """Wait in the block for the opening of a pool. If it is not open yet, this thread's task run is Pending meanwhile,
    and begins anew after that: its time is that of its work.
    """
    context = TaskRunContext.get()
    if context is None or life.opened.done():
        yield
        return
    run, name = context.task_run, f" {life.spec.name}" if life.spec.name else ""
    own = copy_context()

    def say(why: str) -> None:
        words = f"the pool{name} ({life.spec_text}) is being opened{f': {why}' if why else ''}"
        text = f"waiting for machines: {words}; the flow run's log says how far that is"
        own.run(_enter, run, Pending(name=WAITING, message=text))

    with life.waiting_message(say):
        yield
    running: State[Any] = Running()
    if run.run_count <= 1:
        run.start_time = cast(Any, running.timestamp)
    _enter(run, running)


def _enter(run: TaskRun, state: State[Any]) -> None:
    """Set a state as the engine does, which goes on from it. It is no other attempt."""
    before = run.state
    state.state_details.task_run_id, state.state_details.flow_run_id = run.id, run.flow_run_id
    run.state, run.state_id, run.state_type, run.state_name = state, state.id, state.type, state.name
    emit_task_run_state_change_event(task_run=run, initial_state=before, validated_state=state)
