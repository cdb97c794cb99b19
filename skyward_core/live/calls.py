"""The calls of a live pool: which wait, run or are fetched, where, for whom, and on request where in the code they are.

The pool's scheduler asks its clients and workers (`worker/call_lists.py`); here their answers become one list. A worker
knows which call a slot has, and a client knows its function and its work. So a call whose client does not answer is
still in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from skyward_core.errors import BadRequest
from skyward_core.live.observer import Observer
from skyward_core.worker.detached_calls import detached_key, is_detached
from skyward_core.worker.scheduler_messages import LIST_CALLS, LISTING_SECONDS

GRACE_SECONDS = 10.0
"""For the way to a busy scheduler and back, beside the time that it waits for its members."""


class CallState(StrEnum):
    """Where a call is on its way."""

    WAITING = "waiting"  # for a slot: in its client's queue, or at a worker whose slots are busy
    RUNNING = "running"
    FETCHING = "fetching"  # it has ended, and its result is on the way to its client, or is loaded there
    UNKNOWN = "unknown"  # it was sent to a worker, and a worker does not answer


@dataclass(frozen=True, slots=True)
class CallClient:
    """The process that waits for a call; all empty for one that has not said who it is."""

    user: str = ""
    pid: int | None = None
    work: Mapping[str, str] = field(default_factory=dict[str, str])
    work_text: str = ""


NO_CLIENT = CallClient()


@dataclass(frozen=True, slots=True)
class LiveCall:
    """One call that has not ended. `seconds`: for how long it has been in its state; None if that is not known.

    `worker` is RANK-INDEX, `slot` the number of its slot there, and `pid` the call's own process on the node. A
    detached call has an `owner` in place of a client. `stacks` is None if they were not asked for.
    """

    call_id: str
    function: str
    state: CallState
    seconds: float | None
    client: CallClient = NO_CLIENT
    is_detached: bool = False
    owner: str = ""
    worker: str = ""
    slot: int | None = None
    pid: int | None = None
    stacks: str | None = None

    @property
    def node(self) -> int | None:
        """The rank of its node."""
        rank = self.worker.partition("-")[0]
        return int(rank) if rank.isdecimal() else None


@dataclass(frozen=True, slots=True)
class CallList:
    """The calls of a pool, running ones first. `more_waiting`: how many wait in queues and are not listed. `silent`:
    who has not answered, and what that means, as sentences.
    """

    calls: tuple[LiveCall, ...]
    more_waiting: int
    silent: tuple[str, ...]


def calls_of(observer: Observer, *, with_stacks: bool = False) -> CallList:
    """Return the calls of a pool. They go on.

    Raises what `Observer.ask` raises, and BadRequest if the nodes were started by an earlier release.
    """
    answer: object = observer.ask(
        LIST_CALLS, LISTING_SECONDS + GRACE_SECONDS, with_stacks=with_stacks, seconds=LISTING_SECONDS
    )
    if not isinstance(answer, Mapping):
        raise BadRequest(
            f"the nodes of pool {observer.pool_id} have a release that lists no calls: `skyward stacks` shows its slots"
        )
    return call_list(answer)  # pyright: ignore[reportUnknownArgumentType] - as `CallLists.list_calls` says


def call_list(answer: Mapping[str, Any]) -> CallList:
    """Return one list of what clients and workers have answered."""
    running = {call.call_id: call for call in _in_slots(answer["workers"])}
    clients = {one.get("topic", ""): _client(one) for one in answer["clients"]}
    mute = [one["name"] for one in answer["workers"] if one["slots"] is None]
    unheard = CallState.UNKNOWN if mute or answer["others"] else CallState.WAITING
    found = [
        call
        for one in answer["clients"]
        for row in (one["calls"] or {"listed": ()})["listed"]
        for call in [_of_client(row, _client(one), running, unheard)]
    ]
    found += _detached(answer["detached"], answer["now"], running, unheard)
    for call in running.values():  # their clients have not answered
        topic = call.owner
        found.append(replace(call, owner="", client=clients.get(topic, NO_CLIENT)))
    order = list(CallState)
    order.insert(0, order.pop(order.index(CallState.RUNNING)))
    found.sort(key=lambda call: (order.index(call.state), -(call.seconds or 0.0)))
    waiting = sum(one["calls"]["waiting"] for one in answer["clients"] if one["calls"] is not None)
    listed = sum(
        row[2] == CallState.WAITING
        for one in answer["clients"]
        if one["calls"] is not None
        for row in one["calls"]["listed"]
    )
    return CallList(tuple(found), waiting - listed, tuple(_silent(answer["clients"], mute, answer["others"])))


def _in_slots(workers: Iterable[Mapping[str, Any]]) -> Iterator[LiveCall]:
    """Return the calls in slots, each with its topic in place of its owner."""
    for worker in workers:
        for slot, pid, topic, call_id, seconds, stacks in worker["slots"] or ():
            yield LiveCall(
                str(call_id),
                "",
                CallState.RUNNING,
                seconds,
                owner=topic,
                worker=worker["name"],
                slot=slot,
                pid=pid,
                stacks=stacks,
            )


def _client(one: Mapping[str, Any]) -> CallClient:
    return CallClient(one.get("user", ""), one.get("pid"), one.get("work", {}), one.get("work_text", ""))


def _of_client(row: Sequence[Any], client: CallClient, running: dict[str, LiveCall], unheard: CallState) -> LiveCall:
    call_id, function, stage, where, seconds = row
    if (call := running.pop(call_id, None)) is not None:
        return replace(call, function=function, client=client, owner="")
    state = unheard if stage == "out" else CallState(stage)
    return LiveCall(call_id, function, state, seconds, client, worker=where or "")


def _detached(
    records: Iterable[Mapping[str, Any]], now: float, running: dict[str, LiveCall], unheard: CallState
) -> Iterator[LiveCall]:
    by_topic = {call.owner: call for call in running.values() if is_detached(call.owner)}
    for record in records:
        call_id, function, owner = record["call_id"], record["name"], record["owner"]
        if (call := by_topic.get(detached_key(call_id))) is not None:
            del running[call.call_id]
            yield replace(call, call_id=call_id, function=function, owner=owner, is_detached=True)
        elif record["state"] in ("waiting", "running"):
            state = CallState.WAITING if record["state"] == "waiting" and not record["worker"] else unheard
            yield LiveCall(
                call_id,
                function,
                state,
                max(0.0, now - record["submitted_at"]),
                is_detached=True,
                owner=owner,
                worker=record["worker"],
            )


def _silent(clients: Iterable[Mapping[str, Any]], mute: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    for one in clients:
        if one["calls"] is None:
            yield (
                f"the client {one.get('user', '')}, process {one.get('pid')}, does not answer: the functions of its"
                " calls, and those that wait, are not known"
            )
    for name in mute:
        yield f"worker {name} does not answer: what it runs is not known"
    for name in others:
        yield f"worker {name} has a release that lists no calls: `skyward stacks` shows its slots"
