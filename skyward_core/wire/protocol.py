"""The operations of the pool's scheduler, of its workers and of their streams, and the messages that belong to them.

Each operation has a name here, and where it needs one a function that returns its message. Client and nodes use both;
they need no Dask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from skyward_core.wire import checks

POOL_TOPIC = "skyward-pool"
"""The topic of these messages, of samples and of announcements of workers."""
LIST_CALLS = "skyward_list_calls"
"""The operation by which an observer asks for the calls of all clients (`CallLists` of the scheduler)."""
LIST_STACKS = "skyward_list_stacks"
"""The operation by which an observer asks for the stacks of all slots, idle ones too."""
LISTING_SECONDS = 5.0
"""How long clients and workers may take to answer it: longer than a worker waits for the stacks of its slots."""
DASK_PAGE = "skyward_dask_page"
"""The operation by which an observer asks for a plain page of Dask's scheduler (`dask_pages.py`)."""
PAGE_SECONDS = 10.0
"""How long a page may take: some ask a worker."""
END_CLIENT = "skyward_end_client"
"""The operation by which a client ends the calls of another one, whose process is dead or was replaced."""
ENDING_SECONDS = 10.0
"""How long it waits for slots that such calls hold: longer than from SIGTERM to SIGKILL."""
RUN_BATCH = "skyward-run-batch"
"""The operation of a client's stream that makes a batch a task; see `PoolScheduler.take_batch`."""
TASK_FAILED = "skyward-task-failed"
"""The message on the scheduler's stream to a client that a batch has failed, with the reason; Dask's own follows."""
START_DETACHED = "skyward_start_detached"
"""The operation that makes a batch a detached call; see `PoolScheduler.start_detached`."""
STALLED_SECONDS = 120.0
"""How long a worker with tasks of Dask's own may be silent: its event loop imports the packages that they need."""
HELD = "paused"
"""Dask's name for the state of a worker that gets no more calls."""
RESUME, ACKNOWLEDGE, LEAVE = "skyward-resume", "skyward-acknowledge", "skyward-leave"
"""Operations on a client's stream to the scheduler, beside CANCEL."""
WAITING = "skyward_waiting"
"""The operation that counts the calls that wait for a slot."""
CREDIT = "skyward-credit"
"""The same on both streams: streaming calls may go on."""
PREFIX = "skyward-"
"""The keys of our tasks begin with it; those of a user's Dask tasks do not."""
LOAD = "skyward-load"
"""The operation on a client's stream to the scheduler."""
RANKS = "skyward-ranks"
"""The operation by which the process that keeps an elastic pool says which ranks are to stay."""
KEEP = "skyward-keep"
"""A Dask client that wants the tasks of all other clients, and never leaves."""
CANCEL = "skyward-cancel"
"""The operation that stops calls, on a client's stream to the scheduler and on the scheduler's to a worker."""
RETRIES, NAME = "skyward_retries", "skyward_name"
"""Annotations (`dask.annotate`) of a detached call's task: how often it may run again after the loss of its worker (0),
and its function's name.
"""
WORK = "skyward_work"
"""Another one: the fields of the work that has started the call; none by default."""
RUN_ID, IS_NAMED, RESULT_TTL, OWNER = "skyward_run_id", "skyward_is_named", "skyward_result_ttl", "skyward_owner"
"""More of them, with their defaults: the id by which slots know the call (its own id); whether its id is kept when the
call is forgotten (False); how many seconds after its end it is forgotten (never); a text that says for whom it is ("").
"""
BUSY_TIMES = "skyward_busy_times"
"""Name of the workers' metric, and of the scheduler's operation that returns all of them."""
BUSY_TIMES_NOW = "skyward_busy_times_now"
"""The scheduler's operation that asks the workers for the same as of now."""
ENDS = frozenset({"ended", "cancelled", "lost"})
DETACHED_PREFIX = "skyward-call-"
HOLD, FREE, KEPT = "skyward_hold", "skyward_free", "skyward_kept"
REPEAT_REPORTS, RELEASE = "skyward-repeat-reports", "skyward-release"
"""Operations on a client's stream to the scheduler, and on the scheduler's to every worker: repeat all that is kept;
these calls' outcomes have arrived.
"""
OLDER = "skyward_older"
"""Name of the workers' metric: how many batches their slots have from an earlier head.

Dask has no tasks for them, and would treat the workers as idle.
"""
PUT_SECRETS = "skyward-put-secrets"
"""The operation of a client's stream that sends the values."""
GET_SECRETS = "skyward_get_secrets"
"""The operation that waits for them."""
INTRODUCE = "skyward_introduce"
"""The operation by which a client says who it is, once for each connection."""
CALLS_QUESTION, CALLS_ANSWER = "skyward-calls-question", "skyward-calls-answer"
"""Question and answer on the streams of clients and workers."""
ANSWERS_CALLS = "skyward_answers_calls"
"""The metric of workers that answer."""
MOST_WAITING = 1000
"""A client lists so many of the calls that wait in its queue, the oldest, and counts the others."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker, named RANK-INDEX, has joined the pool. `instance_id` is its machine, "" if that is unknown."""

    name: str
    address: str
    instance_id: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker has left the pool, or does not answer any more."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerHeld:
    """A worker gets no more calls and has `left` of them.

    Sent to every client, at first and after each change of that number.
    """

    address: str
    left: int


@dataclass(frozen=True, slots=True)
class PoolRanks:
    """The ranks of an elastic pool that are to stay: new broadcasts use them. Nodes of other ranks leave."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The scheduler's answer to `resume`. The messages after `number` follow: those up to `last` at once, then live
    ones.

    `missed`: how many messages before them were dropped for lack of room. `is_known`: whether the scheduler knew the
    topic; a new head does not. `tasks`: the client's tasks that the scheduler keeps, and Dask's names of their states
    ("processing", "memory", "erred"); all others are lost. From now on the new client wants them: it makes a future of
    each at once (`distributed.Future(key, client)`).
    `gone`: keys that have arrived and have no task any more. If the topic is known, a key in neither has not arrived
    and will not: the scheduler refuses messages of the earlier client that are in transit. `workers`: by address, the
    names of present workers and Dask's names of their states. `abandoned`: how often the scheduler has dropped the
    topic and stopped its calls, because the client was away too long. `instances`: the ids of the workers' machines, by
    address. `ranks`: those of `PoolRanks`; None if the pool has a fixed size.
    """

    number: int
    missed: int
    is_known: bool
    tasks: Mapping[str, str]
    gone: frozenset[str] = frozenset()
    last: int = 0
    workers: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    abandoned: int = 0
    instances: Mapping[str, str] = field(default_factory=dict[str, str])
    ranks: frozenset[int] | None = None

    @staticmethod
    def of(answer: Mapping[str, object]) -> Resumed:
        """Return the scheduler's answer to `resume` as a value. Raises Unreadable.

        Workers whose names are not RANK-INDEX are none of the pool's, and are left out.
        """
        workers = dict[str, tuple[str, str]]()
        for address, worker in checks.mapping("the workers", answer.get("workers", {})).items():
            name, status = checks.fields("a worker", worker, 2)
            with contextlib.suppress(checks.Unreadable):
                workers[address] = checks.worker_name("a worker", name), checks.text("the state of a worker", status)
        ranks = checks.maybe(checks.items, "the ranks", answer.get("ranks"))
        return Resumed(
            checks.count("the number of messages", answer.get("number")),
            checks.count("the missed messages", answer.get("missed")),
            checks.truth("whether the client is known", answer.get("is_known")),
            checks.texts_by_name("the tasks", answer.get("tasks")),
            frozenset(checks.texts("the tasks that are gone", answer.get("gone"))),
            checks.count("the last message", answer.get("last", 0)),
            workers,
            checks.count("how often the topic was dropped", answer.get("abandoned", 0)),
            checks.texts_by_name("the machines", answer.get("instances", {})),
            None if ranks is None else frozenset(checks.count("a rank", rank, checks.MOST_RANK) for rank in ranks),
        )


type BusyTime = tuple[str, str, float, dict[str, float]]
"""How long a worker's slots were busy, in seconds, since its process began. It has the id of the instance, a name of
the process, the sum over the slots, and the parts of one client's calls by their uses ("": of none).
"""


def cancel(call_ids: Collection[str]) -> dict[str, Any]:
    """Return the message that stops these calls on all workers. Unknown ids are ignored."""
    return {"op": CANCEL, "calls": list(call_ids)}


def give_credit(credit: Mapping[str, int]) -> dict[str, Any]:
    """Return the message that lets streaming calls yield the items below these numbers, by call. Idempotent."""
    return {"op": CREDIT, "credit": dict(credit)}


def repeat_reports() -> dict[str, Any]:
    """Return the message that makes every worker announce the calls that it keeps, and repeat their reports.

    A client sends it after `resume`.
    """
    return {"op": REPEAT_REPORTS}


def release(call_ids: Collection[str]) -> dict[str, Any]:
    """Return the message that lets workers forget calls that have outlived their head: their outcomes have arrived, or
    have no caller any more.
    """
    return {"op": RELEASE, "calls": list(call_ids)}


def resume(client_id: str, topic: str, after: int, request: int) -> dict[str, Any]:
    """Return the message that makes this client the owner of the topic and its tasks, and asks for the topic's messages
    after number `after`.

    The answer is an event of the topic: a mapping with the number `request`, and the fields of `Resumed`.
    """
    return {"op": RESUME, "client": client_id, "topic": topic, "after": after, "request": request}


def acknowledge(topic: str, number: int) -> dict[str, Any]:
    """Return the message that lets the scheduler drop the messages of a topic up to this number."""
    return {"op": ACKNOWLEDGE, "topic": topic, "number": number}


def leave(topic: str) -> dict[str, Any]:
    """Return the message that makes the scheduler drop a topic and its owner's tasks.

    A client sends it before it closes for good.
    """
    return {"op": LEAVE, "topic": topic}


def load(topic: str, waiting: int, needed: Collection[str]) -> dict[str, Any]:
    """Return the message with the load of the client of this topic: how many calls wait in its queue, and the ids of
    the instances that it needs.
    """
    return {"op": LOAD, "topic": topic, "waiting": waiting, "needed": sorted(needed)}


def stay(ranks: Collection[int]) -> dict[str, Any]:
    """Return the message that these ranks are to stay: broadcasts use them. All others leave. Idempotent."""
    return {"op": RANKS, "ranks": sorted(ranks)}


def detached_key(call_id: str) -> str:
    """Return the key of a detached call's task, which is the name of its topic too."""
    return DETACHED_PREFIX + call_id


def is_detached(key: str) -> bool:
    """Return whether this is the key of a detached call."""
    return key.startswith(DETACHED_PREFIX)


@dataclass(frozen=True, slots=True)
class WorkerKept:
    """A worker announces its calls: those that run or wait in its slots, and those that have ended and were not
    released. Their reports follow.

    `keys` are the keys of their batches: a call may be in two, of which the first has handed it back.
    `is_paused`: it takes no other calls until those from before it joined this scheduler have ended (`WorkerFree`).
    """

    name: str
    address: str
    calls: tuple[str, ...]
    is_paused: bool = False
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerFree:
    """A worker that joined with calls runs none of them any more: it takes other calls again."""

    name: str
    address: str


def task_failed(key: str, reason: str) -> dict[str, Any]:
    """Return the message that a batch has failed; "": its worker is gone."""
    return {"op": TASK_FAILED, "key": key, "reason": reason}


def answer_of(request: int, answer: Any) -> dict[str, Any]:
    """Return the message that answers a question."""
    return {"op": CALLS_ANSWER, "request": request, "answer": answer}


def content_of(event: object) -> object:
    """Return what an event of a topic has, and None for something else than an event: a time and its content."""
    return event[1] if isinstance(event, tuple | list) and len(cast("list[object]", event)) == 2 else None
