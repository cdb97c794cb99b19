"""Calls that outlive their client, on the client's side: hand one over to the scheduler, ask for its record, load its
result.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

from skyward_core.compute import PendingCompute
from skyward_core.engine.futures import value_of
from skyward_core.engine.owner import EngineThread
from skyward_core.engine.packing import WantedCall, packed_function, pickled_arguments, surroundings_of_calls
from skyward_core.errors import BadRequest, NodeLost
from skyward_core.serialization import pickling
from skyward_core.transport.transport import Transport, Transports
from skyward_core.wire.answers import call_record, call_records
from skyward_core.wire.messages import Batch, Call, Outcome, Parcel
from skyward_core.wire.protocol import (
    ENDS,
    IS_NAMED,
    NAME,
    OWNER,
    RESULT_TTL,
    RETRIES,
    RUN_ID,
    START_DETACHED,
    WORK,
    detached_key,
)

# how long `start` waits for a scheduler that is out of reach: the connection may come back, or another head may start
DETACH_SECONDS = 60.0
RETRY_SECONDS = 0.01


def _record_or_none(answer: object) -> dict[str, Any] | None:
    return None if answer is None else call_record(answer)


class DetachedCalls:
    """The detached calls of one cluster."""

    def __init__(self, owner: EngineThread, transports: Transports, retries: int) -> None:
        self.schedulers = 1
        """How many schedulers the pool has had: the answer of one is not valid for another."""
        self._owner = owner
        self._transports = transports
        self._retries = retries

    def start(
        self,
        pending: PendingCompute[Any],
        replace_object: pickling.Replace | None,
        wanted: WantedCall,
    ) -> Mapping[str, Any]:
        """Submit a call to the cluster, which keeps the call and its outcome until `forget` or `result_ttl` seconds
        after its end; return its record.

        If there is a call of this id already, its record is returned and nothing is begun; `is_new` says which. While
        the scheduler is out of reach it waits and repeats the request, which is idempotent by the id. Raises NodeLost
        when it gives up; the message says whether the call may have begun.
        """
        self._owner.raise_if_refused()
        function_name, function = packed_function(pending.fn, replace_object)
        surroundings = surroundings_of_calls()
        pickled = pickled_arguments(pending, surroundings.run, replace_object)
        arguments = Parcel(pickled.data, tuple(bytes(buffer) for buffer in pickled.buffers))
        run_id = wanted.run_id
        levels, env = surroundings.levels, surroundings.env
        call = Call(run_id, function_name, arguments, run_id, pending.timeout_seconds, levels=levels, env=env)
        batch = pickle.dumps(Batch(detached_key(wanted.call_id), (call,), {function_name: function}), protocol=5)
        annotations = {
            RETRIES: self._retries,
            NAME: getattr(pending.fn, "__name__", ""),
            RUN_ID: run_id,
            IS_NAMED: wanted.call_id != run_id or wanted.result_ttl is not None,
            RESULT_TTL: wanted.result_ttl,
            OWNER: wanted.owner,
            WORK: wanted.work.labels(),
        }
        return self._start_detached(wanted.call_id, {"batch": batch, "annotations": annotations})

    def all(self) -> Sequence[Mapping[str, Any]]:
        """Return the records of all detached calls that are not forgotten, in the order in which they came."""
        return self._owner.ask_for(lambda answer: call_records(answer, self._owner.note_unreadable), "skyward_calls")

    def known(self, timeout_seconds: float) -> Sequence[Mapping[str, Any]]:
        """Return the records of all detached calls, forgotten ones too. Raises as `record` does."""
        return self._owner.ask_for(
            lambda answer: call_records(answer, self._owner.note_unreadable),
            "skyward_calls",
            timeout_seconds,
            is_all=True,
        )

    def record(self, call_id: str, after: int = 0) -> Mapping[str, Any]:
        """Return the record of a detached call, and its messages after number `after`.

        Raises BadRequest if the pool has no call of this id.
        """
        known = self._owner.ask_for(_record_or_none, "skyward_call", call_id=call_id, after=after)
        if known is None:
            raise BadRequest(f"the pool knows of no call {call_id!r}: it was forgotten, or started in another pool")
        has_ended = known["state"] in ENDS or known["is_forgotten"]
        self._owner.follow_detached(call_id, known["number"] + len(known["messages"]), has_ended=has_ended)
        return known

    def cancel(self, call_id: str) -> None:
        """Stop a detached call, or do not begin it. Raises NodeLost if the scheduler does not answer."""
        self._owner.ask("skyward_cancel", call_id=call_id)

    def forget(self, call_id: str, outcome: Outcome | None) -> None:
        """Drop the record of a detached call, and its result. A chosen id stays known."""
        if outcome is not None and outcome.parcel.path is not None:
            self._transport_of(outcome.parcel).release(outcome.parcel)
        self._owner.ask("skyward_forget", call_id=call_id)

    def value(self, outcome: Outcome, node: int) -> Any:
        """Return the result of a call that has ended, or raise its exception. The result stays on its node."""
        parcel = outcome.parcel
        if parcel.path is not None:
            parcel = self._transport_of(parcel).take(parcel, keep=True)
        return value_of(outcome._replace(parcel=parcel), node)

    def _start_detached(self, call_id: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the scheduler to take a detached call in; return its record. Ask again on each connection to the same
        scheduler.

        Another one cannot know whether the call has begun.
        """
        deadline = time.monotonic() + DETACH_SECONDS
        sent_to: int | None = None
        error: Exception | None = None
        while True:
            connection, scheduler = self._owner.connection, self.schedulers
            if sent_to not in (None, scheduler) or self._owner.lost is not None or time.monotonic() > deadline:
                break
            if connection is not None:
                sent_to = scheduler
                try:
                    answer = self._owner.ask_on(connection, START_DETACHED, deadline, {"call_id": call_id, **message})
                    return self._owner.checked(call_record, answer)
                except NodeLost as failure:
                    error = failure
            time.sleep(RETRY_SECONDS)
        if sent_to is None:
            raise self._owner.lost or NodeLost("the pool's scheduler is out of reach just now: try again")
        raise NodeLost(
            f"the pool's scheduler does not answer, and call {call_id} may have begun: look for it by this id"
            " (detached_call)"
        ) from (self._owner.lost or error)

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
