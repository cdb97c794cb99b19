"""The scheduler's memory of calls: calls outlive the connection of their client, and detached calls outlive the client.

The scheduler keeps a client's topic from its first `resume` on. The n-th message on it has the number n, is kept as
bytes, and is dropped when the client acknowledges it. On a new connection the client asks for the messages after the
last number that it has handled (`resume`). The answer travels in the same stream as live messages, so no message is
missed, doubled or out of order.

KEEP, a client without a connection, also wants each task whose key begins with "skyward-". It releases the task when
the client that sent it (or the one that has resumed its topic) releases it, leaves, or stays away too long. A detached
call stays until `skyward_forget`; its topic and its task are both named `detached_key(call_id)`.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler  # noqa: TID253 - this file, node.py and cluster.py own Dask
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.worker.retained_batches import OLDER, RELEASE, REPEAT_REPORTS
from skyward_core.worker.wire import Outcome, OutcomeKind, Report

KEEP = "skyward-keep"
"""A Dask client that wants the tasks of all other clients, and never leaves."""

RESUME, ACKNOWLEDGE, LEAVE, CANCEL = "skyward-resume", "skyward-acknowledge", "skyward-leave", "skyward-cancel"
"""Operations on a client's stream to the scheduler; CANCEL also on the scheduler's to a worker."""
CREDIT = "skyward-credit"
"""Likewise: streaming calls may go on."""

RETRIES, NAME = "skyward_retries", "skyward_name"
"""Annotations (`dask.annotate`) of a detached call's task: how often it may run again after the loss of its worker (0),
and its function's name.
"""

BUSY_TIMES = "skyward_busy_times"
"""Name of the workers' metric, and of the scheduler's operation that returns all of them."""

type BusyTime = tuple[str, str, float]
"""How long a worker's slots were busy, in seconds, since its process began: the id of its instance, a name of the
process, the sum over its slots.
"""

TOPIC_LIMIT_BYTES = 64 << 20
PREFIX = "skyward-"
"""The keys of our tasks begin with it; those of a user's Dask tasks do not."""
_DETACHED = "skyward-call-"


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


def detached_key(call_id: str) -> str:
    """Return the key of a detached call's task, which is the name of its topic too."""
    return _DETACHED + call_id


# ── the client's side ────────────────────────────────────────────────────────────────────────────────────────────────


def resume(client_id: str, topic: str, after: int, request: int) -> dict[str, Any]:
    """Return the message that makes this client the owner of the topic and its tasks, and asks for the topic's messages
    after number `after`.

    The answer is an event of the topic: a mapping with the number `request`, and the fields of
    `scheduler_messages.Resumed`.
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


# ── the scheduler's side ─────────────────────────────────────────────────────────────────────────────────────────────


class Topic:
    """Numbered messages. The last ones are kept; the oldest are dropped when they take more than `limit_bytes`."""

    __slots__ = ("_limit_bytes", "_messages", "nbytes", "number")

    def __init__(self, limit_bytes: int, number: int = 0) -> None:
        self.number = number
        self.nbytes = 0
        self._limit_bytes = limit_bytes
        self._messages: deque[bytes] = deque()

    def add(self, message: bytes) -> None:
        """Keep a message. The last one is kept however large it is."""
        self.number += 1
        self._messages.append(message)
        self.nbytes += len(message)
        while self.nbytes > self._limit_bytes and len(self._messages) > 1:
            self._drop_oldest()

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to this number."""
        while self._messages and self.number - len(self._messages) < number:
            self._drop_oldest()

    def after(self, number: int) -> tuple[int, list[bytes]]:
        """Return the kept messages after this number, and the number of the message before them."""
        skipped = max(0, number - (self.number - len(self._messages)))
        messages = list(self._messages)[skipped:]
        return self.number - len(messages), messages

    def _drop_oldest(self) -> None:
        self.nbytes -= len(self._messages.popleft())


@dataclass(slots=True)
class Detached:
    """The record of a detached call. `state` is "waiting", "running", "ended" (its outcome is among its messages),
    "cancelled" or "lost" (see `reason` and `dask_error`).

    `worker` is the name (RANK-INDEX) of the last worker that got it, `runs` how often a worker got it, `submitted_at`
    the head's clock.
    """

    call_id: str
    name: str
    topic: Topic
    submitted_at: float = field(default_factory=time.time)
    state: str = "waiting"
    worker: str = ""
    runs: int = 0
    reason: str = ""
    dask_error: str = ""


class CallMemory(SchedulerPlugin):
    """Keeps messages and tasks for clients that are away. It owns its timers; they end with the scheduler.

    After `abandoned_seconds` without its client, it drops a topic and stops its calls.
    """

    name = "skyward-calls"

    def __init__(self, abandoned_seconds: float, topic_limit_bytes: int = TOPIC_LIMIT_BYTES) -> None:
        self._abandoned_seconds = abandoned_seconds
        self._topic_limit_bytes = topic_limit_bytes
        self._topics: dict[str, Topic] = {}
        self._owners: dict[str, str] = {}  # of topics: ids of clients
        self._keys: dict[str, set[str]] = {}  # of tasks kept, by the id of their client
        self._absent: dict[str, asyncio.TimerHandle] = {}
        self._abandoned: dict[str, int] = {}
        """By topic: how often it was dropped with the tasks of its owner.

        Kept for ever: the answer with this number may be lost.
        """
        self._resumes: dict[str, int] = {}
        """By topic: the number of the last `resume` that was answered."""
        self._replaced: set[str] = set()
        """Clients whose topics others have resumed, while their streams are open."""
        self._detached: dict[str, Detached] = {}
        self._scheduler: Any = None  # Dask's types say too little

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operations of clients to the scheduler."""
        self._scheduler = scheduler
        scheduler.stream_handlers.update(
            {
                RESUME: self._resume,
                ACKNOWLEDGE: self._acknowledge,
                LEAVE: self._leave,
                CANCEL: self._cancel,
                CREDIT: self._give_credit,
                REPEAT_REPORTS: self._repeat_reports,
                RELEASE: self._release,
                "client-releases-keys": self._client_releases_keys,
            }
        )
        scheduler.handlers.update(
            {
                "skyward_calls": self.skyward_calls,
                "skyward_call": self.skyward_call,
                "skyward_forget": self.skyward_forget,
            }
        )
        scheduler.handlers.update(
            {"skyward_busy": self.skyward_busy, BUSY_TIMES: self.skyward_busy_times, "skyward_load": self.skyward_load}
        )
        scheduler.handlers.update({"skyward_cancel": self.skyward_cancel})

    async def close(self) -> None:
        """Stop the timers."""
        for timer in self._absent.values():
            timer.cancel()
        self._absent.clear()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def log_event(self, topic: str, msg: Any) -> None:
        """Keep a message. Dask calls this for every event."""
        kept = self._topics.get(topic)
        if kept is not None and type(msg) is bytes:
            kept.add(msg)

    def _resume(self, client: str, topic: str, after: int, request: int) -> None:
        """Send a client the messages that it has missed and subscribe it, in one turn of the event loop: no message can
        come in between.
        """
        if request < self._resumes.get(topic, 0):  # a later connection of the same client was faster
            self._replaced.add(client)
            return
        self._resumes[topic] = request
        kept = self._topics.get(topic)
        is_known = kept is not None
        if not topic.startswith(_DETACHED):
            kept = kept or self._topics.setdefault(topic, Topic(self._topic_limit_bytes, number=after))
            self._give(topic, client)
        number, messages = kept.after(after) if kept is not None else (after, [])
        keys = self._keys.get(client, set())
        tasks = {key: task.state for key in keys if (task := self._scheduler.tasks.get(key)) is not None}
        gone = [key for key in keys if key not in tasks]
        answer = {
            "request": request,
            "number": number,
            "missed": max(0, number - after),
            "is_known": is_known,
            "abandoned": self._abandoned.get(topic, 0),
            "tasks": tasks,
            "gone": gone,
            "last": number + len(messages),
            "workers": {
                worker.address: (str(worker.name), worker.status.name) for worker in self._scheduler.workers.values()
            },
        }
        now = time.time()
        events = [{"op": "event", "topic": topic, "event": (now, content)} for content in (answer, *messages)]
        self._scheduler.send_all({client: events}, {})
        self._scheduler.subscribe_topic(topic, client)
        if tasks:
            # Dask then sends it, after the messages above, the ends of these tasks
            self._scheduler.client_desires_keys(list(tasks), client)

    def _give(self, topic: str, client: str) -> None:
        """Make a client the owner of a topic, and of its owner's tasks."""
        owner = self._owners.get(topic, client)
        self._owners[topic] = client
        if timer := self._absent.pop(client, None):
            timer.cancel()  # Dask's automatic reconnect keeps the client's id
        if owner == client:
            return
        self._scheduler.unsubscribe_topic(topic, owner)
        if owner in self._scheduler.clients:
            self._replaced.add(owner)
        self._keys.setdefault(client, set()).update(self._keys.pop(owner, ()))
        if owner not in self._owners.values() and (timer := self._absent.pop(owner, None)):
            timer.cancel()

    def _acknowledge(self, client: str, topic: str, number: int) -> None:
        if topic in self._owners:  # the topics of detached calls have no owner
            self._topics[topic].acknowledge(number)

    def _leave(self, client: str, topic: str) -> None:
        """Drop a topic and release its owner's tasks: the client does not need them any more."""
        if self._owners.get(topic) == client:
            self._abandon(client)

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_replaced(self, client: str) -> bool:
        """Return whether another client has resumed this one's topic: that client knows which batches had come by then,
        and sends the others again.
        """
        return client in self._replaced

    def update_graph(
        self,
        scheduler: Scheduler,
        *,
        client: str,
        tasks: Any,
        keys: Collection[Any],
        annotations: Any,
        priority: Any,
        **_: Any,
    ) -> None:
        """Let KEEP want our tasks from the moment that Dask has them."""
        ours = [key for key in keys if isinstance(key, str) and key.startswith(PREFIX)]
        if not ours:
            return
        scheduler.client_desires_keys(ours, KEEP)
        detached = {key for key in ours if key.startswith(_DETACHED)}
        for key in detached - self._detached.keys():
            self._take_in(key)
        if regular := set(ours) - detached:
            self._keys.setdefault(client, set()).update(regular)

    def transition(self, key: Any, start: str, finish: str, *_: Any, **news: Any) -> None:
        """Make sure that Dask does not run an ended task again, and follow detached calls.

        Dask calls this several times for every task.
        """
        if not isinstance(key, str) or not key.startswith(PREFIX):
            return
        if finish == "memory":
            # When a worker is lost that holds a result, Dask runs the task again; without `run_spec` it cannot.
            self._scheduler.tasks[key].run_spec = None
        if call := self._detached.get(key):
            self._follow(call, self._scheduler.tasks[key], finish, news)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Give a client whose connection has ended some time to reconnect."""
        self._replaced.discard(client)
        if client in self._owners.values() or self._keys.get(client):
            if timer := self._absent.pop(client, None):
                timer.cancel()
            self._absent[client] = asyncio.get_running_loop().call_later(self._abandoned_seconds, self._abandon, client)

    def _client_releases_keys(self, keys: Iterable[str], client: str, **rest: Any) -> None:
        """Release for KEEP too the tasks that a client releases by this operation of its stream. Dask does not call it
        when the stream breaks.

        A client that has reconnected releases its earlier futures; it wants no tasks by then, and the tasks stay.
        """
        keys = list(keys)
        kept = self._keys.get(client)
        if kept and client in self._scheduler.clients:
            wanted, keeper = self._scheduler.clients[client].wants_what, self._scheduler.clients[KEEP]
            for key in kept.intersection(keys):
                task = self._scheduler.tasks.get(key)
                # so that the transitions follow from the client's release, below, and not from KEEP's
                if task in wanted:
                    keeper.wants_what.discard(task)
                    task.who_wants.discard(keeper)
                if task is None or task in wanted:
                    kept.remove(key)
            if not kept:
                del self._keys[client]
        self._scheduler.client_releases_keys(keys=keys, client=client, **rest)

    def _let_go(self, client: str, keys: Iterable[str]) -> None:
        kept = self._keys.get(client, set())
        if ours := [key for key in keys if key in kept]:
            kept.difference_update(ours)
            for holder in {KEEP, client} & self._scheduler.clients.keys():
                self._scheduler.client_releases_keys(keys=ours, client=holder)
        if not kept:
            self._keys.pop(client, None)

    def _abandon(self, client: str) -> None:
        if timer := self._absent.pop(client, None):
            timer.cancel()
        topics = [topic for topic, owner in self._owners.items() if owner == client]
        for topic in topics:
            self._scheduler.unsubscribe_topic(topic, client)
            del self._owners[topic], self._topics[topic], self._resumes[topic]
            self._abandoned[topic] = self._abandoned.get(topic, 0) + 1
        # else running calls would keep their slots, and no client could stop them
        stop = {"op": CANCEL, "calls": topics}
        self._scheduler.send_all({}, {worker: [stop] for worker in self._scheduler.workers})
        self._let_go(client, list(self._keys.get(client, ())))

    def _cancel(self, client: str, calls: Collection[str]) -> None:
        """Stop calls: take back detached ones that wait here, and stop all others on the workers."""
        for call in filter(None, map(self._detached.get, map(detached_key, calls))):
            self._take_back(call)
        message = {"op": CANCEL, "calls": list(calls)}
        self._scheduler.send_all({}, {worker: [message] for worker in self._scheduler.workers})

    def _give_credit(self, client: str, credit: Mapping[str, int]) -> None:
        self._scheduler.send_all({}, {worker: [give_credit(credit)] for worker in self._scheduler.workers})

    def _repeat_reports(self, client: str) -> None:
        self._scheduler.send_all({}, {worker: [{"op": REPEAT_REPORTS}] for worker in self._scheduler.workers})

    def _release(self, client: str, calls: Collection[str]) -> None:
        message = {"op": RELEASE, "calls": list(calls)}
        self._scheduler.send_all({}, {worker: [message] for worker in self._scheduler.workers})

    # ── detached calls ───────────────────────────────────────────────────────────────────────────────────────────────

    def skyward_busy(self) -> bool:
        """Return whether any task of any client runs or waits."""
        scheduler = self._scheduler
        return bool(
            scheduler.unrunnable
            or scheduler.queued
            or any(worker.processing or worker.metrics.get(OLDER) for worker in scheduler.workers.values())
        )

    def skyward_busy_times(self) -> list[BusyTime]:
        """Return how long the slots of each worker were busy, as of its last heartbeat."""
        return [
            busy_time
            for worker in self._scheduler.workers.values()
            if (busy_time := worker.metrics.get(BUSY_TIMES)) is not None
        ]

    def skyward_load(self) -> dict[str, list[str]]:
        """Return the keys of the unended tasks of all clients that each worker has, by the workers' names."""
        return {
            str(worker.name): [str(task.key) for task in worker.processing]
            for worker in self._scheduler.workers.values()
        }

    def skyward_cancel(self, call_id: str) -> None:
        """Stop a call as CANCEL does, for a client that needs an answer."""
        self._cancel("", [call_id])

    def skyward_calls(self) -> list[dict[str, Any]]:
        """Return the records of all detached calls, in the order in which they came."""
        return [self._record(call) for call in self._detached.values()]

    def skyward_call(self, call_id: str, after: int = 0) -> dict[str, Any] | None:
        """Return the record of a detached call and its messages after this number; None if there is none of this id.

        `number` is the number of the message before the first of `messages`; `missed` is how many messages before it
        were dropped.
        """
        call = self._detached.get(detached_key(call_id))
        if call is None:
            return None
        number, messages = call.topic.after(after)
        return {**self._record(call), "number": number, "missed": max(0, number - after), "messages": messages}

    def skyward_forget(self, call_id: str) -> bool:
        """Drop the record and the result of a detached call; False if there is none of this id.

        This does not stop a call that runs.
        """
        key = detached_key(call_id)
        call = self._detached.pop(key, None)
        if call is None:
            return False
        del self._topics[key]
        self._scheduler.client_releases_keys(keys=[key], client=KEEP)
        return True

    def _take_in(self, key: str) -> None:
        task = self._scheduler.tasks[key]
        annotations = task.annotations or {}
        # Dask fails a task after the deaths of more than `allowed-failures` (none here) of its workers: the count of
        # this one starts below zero.
        task.suspicious = -int(annotations.get(RETRIES, 0))
        topic = self._topics[key] = Topic(self._topic_limit_bytes)
        self._detached[key] = Detached(key.removeprefix(_DETACHED), str(annotations.get(NAME, "")), topic)

    def _follow(self, call: Detached, task: Any, finish: str, news: Mapping[str, Any]) -> None:
        if call.state in {"ended", "cancelled", "lost"}:
            return  # its result may be lost later, with its worker
        if finish == "processing":
            call.runs += 1
            call.worker = str(task.processing_on.name)
        elif finish in {"waiting", "queued", "no-worker"}:
            call.state = "waiting"
        elif finish == "memory":
            call.state = "ended"
        elif finish in {"erred", "forgotten"}:
            call.state = "lost"
            call.dask_error = news.get("exception_text") or ""
            call.reason = "the scheduler could not run it" if call.dask_error else "the worker that ran it is gone"

    def _record(self, call: Detached) -> dict[str, Any]:
        task = self._scheduler.tasks.get(detached_key(call.call_id))
        is_running = (
            task is not None
            and task.processing_on is not None
            and (task in task.processing_on.executing or call.topic.number > 0)
        )
        return {
            "call_id": call.call_id,
            "name": call.name,
            "state": "running" if is_running else call.state,
            "worker": call.worker,
            "runs": call.runs,
            "submitted_at": call.submitted_at,
            "reason": call.reason,
            "dask_error": call.dask_error,
            "messages_in_all": call.topic.number,
            "has_result": task is not None and task.state == "memory",
        }

    def _take_back(self, call: Detached) -> None:
        """Make sure that a cancelled call does not begin: no worker has it yet, or it must not go to another one."""
        key = detached_key(call.call_id)
        task = self._scheduler.tasks.get(key)
        if task is None or call.state != "waiting":
            return
        task.suspicious = max(0, task.suspicious)
        if task.processing_on is not None:
            return  # a worker has it: its slots get the same message to stop it
        call.state = "cancelled"
        self._scheduler.log_event(
            key, pickle.dumps(Report(-1, "", (Outcome(call.call_id, OutcomeKind.CANCELLED),)), protocol=5)
        )
        self._scheduler.stimulus_cancel(
            [key], client=KEEP, force=True, reason="skyward-cancel", msg="the call was cancelled"
        )
