"""A flow run that is cancelled while no process stops it: `python flow.py` has started it, or its worker has died.

Prefect only changes the state of such a run to Cancelling, and waits for a process that sends SIGTERM. The calls and
the machines would go on, and cost money, until the flow ends.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import SyncClientContext
from prefect.states import Cancelled

import skyward_core as sky
from prefect_skyward.ui import RunLog

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import State

ASK_SECONDS = 15.0
"""How often the state is read. A worker or `serve()` that lives sends SIGTERM within a second."""


class Cancellation:
    """Reads the state of a flow run, and of those around it, now and then, in a thread; acts once if one is cancelled.

    States: watching -> seen -> settled, or watching -> ended. The thread makes the step to seen, and calls
    `on_cancelled` in it. An answer that does not come is no cancellation.
    """

    def __init__(self, flow_run_id: UUID, log: RunLog, on_cancelled: Callable[[], None]) -> None:
        self._flow_run_id = flow_run_id
        self._ids: list[UUID] = []
        """The flow run and those around it, once they are known."""
        self._log = log
        self._on_cancelled = on_cancelled
        self._has_ended = threading.Event()
        self._is_seen = False
        if not sky.LoopThread("skyward-cancelled", self._watch).start_if_possible():
            log.say(logging.WARNING, "no thread can be started: a cancellation ends the pools only with the process")

    @property
    def is_seen(self) -> bool:
        """Whether the flow run is cancelled, and this object has acted."""
        return self._is_seen

    def end(self) -> None:
        """Stop watching. A request that is on its way ends by itself."""
        self._has_ended.set()

    def settle(self) -> None:
        """Set the state Cancelled, if the cancellation was seen; called when Prefect has set its last state.

        From Cancelling the API takes no other state, and no process sets this one. Raises nothing.
        """
        if self._is_seen:
            sky.after_the_work(
                "the state Cancelled of the flow run",
                functools.partial(self._log.run, self._set_cancelled),
                functools.partial(self._log.say, logging.WARNING),
            )

    def _watch(self) -> None:
        while not self._has_ended.wait(ASK_SECONDS):
            states: list[State[Any] | None] = []
            try:
                self._log.run(self._read, states)
            except Exception as failure:
                self._log.logger.debug("the state of the flow run could not be read: %r", failure)
            if any(is_cancelled(state) for state in states) and not self._has_ended.is_set():
                self._is_seen = True
                self._log.say(
                    logging.WARNING, "the flow run is cancelled: its calls are stopped, its machines given back"
                )
                self._on_cancelled()
                return

    def _read(self, states: list[State[Any] | None]) -> None:
        with SyncClientContext.get_or_create() as context:
            if not self._ids:
                self._ids = _with_those_around(context.client, self._flow_run_id)
            wanted = FlowRunFilter(id=FlowRunFilterId(any_=self._ids))
            states += [run.state for run in context.client.read_flow_runs(flow_run_filter=wanted)]

    def _set_cancelled(self) -> None:
        with SyncClientContext.get_or_create() as context:
            state = context.client.read_flow_run(self._flow_run_id).state
            if state is None or not state.is_cancelled():
                message = "The flow run was cancelled: its calls were stopped, and its machines given back."
                context.client.set_flow_run_state(self._flow_run_id, Cancelled(message=message), force=True)


def is_cancelled(state: State[Any] | None) -> bool:
    """Return whether a flow run is cancelled, or is to be."""
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _with_those_around(client: SyncPrefectClient, flow_run_id: UUID) -> list[UUID]:
    run = client.read_flow_run(flow_run_id)
    ids = [run.id]
    while run.parent_task_run_id is not None:
        parent = client.read_task_run(run.parent_task_run_id)  # the server gets it with a delay: then the next time
        if parent.flow_run_id is None:
            break
        run = client.read_flow_run(parent.flow_run_id)
        ids.append(run.id)
    return ids
