"""Calls that outlive their client, on the client's side: hand one over to the scheduler, and load its result."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from skyward_core.engine.connection import SchedulerConnection
from skyward_core.engine.owner import EngineThread
from skyward_core.engine.results import value_of
from skyward_core.errors import NodeLost, SkywardError
from skyward_core.transport.transport import Transport, Transports
from skyward_core.worker.calls import NAME, RETRIES, detached_key
from skyward_core.worker.pool_scheduler import START_DETACHED
from skyward_core.worker.wire import Batch, Call, Outcome, Parcel

# how long `start` waits for a scheduler that is out of reach: the connection may come back, or another head may start
DETACH_SECONDS = 60.0
RETRY_SECONDS = 0.01


class DetachedCalls:
    """The detached calls of one cluster. `lost` returns why the cluster has ended, or None."""

    def __init__(
        self, owner: EngineThread, transports: Transports, retries: int, lost: Callable[[], SkywardError | None]
    ) -> None:
        self.schedulers = 1
        """How many schedulers the pool has had: the answer of one is not valid for another."""
        self._owner = owner
        self._transports = transports
        self._retries = retries
        self._lost = lost

    def start(
        self, function_name: str, function: Parcel, arguments: Parcel, name: str, timeout_seconds: float | None
    ) -> str:
        """Hand a call over to the scheduler; return its id. Raises NodeLost if the scheduler does not confirm it."""
        call_id = uuid.uuid4().hex
        call = Call(call_id, function_name, arguments, call_id, timeout_seconds)
        batch = pickle.dumps(Batch(detached_key(call_id), (call,), {function_name: function}), protocol=5)
        self._hand_over(call_id, {"batch": batch, "annotations": {RETRIES: self._retries, NAME: name}})
        return call_id

    def value(self, outcome: Outcome, node: int) -> Any:
        """Return the result of a call that has ended, or raise its exception. The result stays on its node."""
        parcel = outcome.parcel
        if parcel.path is not None:
            parcel = self._transport_of(parcel).take(parcel, keep=True)
        return value_of(outcome._replace(parcel=parcel), node)

    def release(self, outcome: Outcome) -> None:
        """Remove the result from its node."""
        if outcome.parcel.path is not None:
            self._transport_of(outcome.parcel).release(outcome.parcel)

    def _hand_over(self, call_id: str, message: Mapping[str, Any]) -> None:
        """Ask the scheduler to take a detached call in, again on each connection to the same scheduler.

        Another one cannot know whether the call has begun.
        """
        deadline = time.monotonic() + DETACH_SECONDS
        sent_to: int | None = None
        error: Exception | None = None
        while True:
            connection, scheduler = self._owner.connection, self.schedulers
            if sent_to not in (None, scheduler) or self._lost() is not None or time.monotonic() > deadline:
                break
            if connection is not None:
                sent_to = scheduler
                try:
                    ask_on(self._owner, connection, START_DETACHED, deadline, {"call_id": call_id, **message})
                except NodeLost as failure:
                    error = failure
                else:
                    return
            time.sleep(RETRY_SECONDS)
        if sent_to is None:
            raise self._lost() or NodeLost("the pool's scheduler is out of reach just now: try again")
        raise NodeLost(
            f"the pool's scheduler does not answer, and call {call_id} may have begun: look for it by this id"
            " (detached_call)"
        ) from (self._lost() or error)

    def _transport_of(self, parcel: Parcel) -> Transport:
        """Return the transport to the node whose memory has a parcel."""
        members = self._owner.dispatcher.members
        instance_id = members.instance_of(parcel)
        node = next((node for node in members.nodes.values() if node.instance.id == instance_id), None)
        if node is None:
            raise NodeLost(
                "the value is on a node that this client does not know: it has replaced another one, or is lost"
            )
        return self._transports.to(node.instance)


def ask_on(
    owner: EngineThread, connection: SchedulerConnection, operation: str, deadline: float, arguments: Mapping[str, Any]
) -> Any:
    """Ask the scheduler on this connection, while it is the present one and until the deadline (time.monotonic)."""
    return connection.ask(operation, lambda: owner.connection is connection and time.monotonic() < deadline, arguments)
