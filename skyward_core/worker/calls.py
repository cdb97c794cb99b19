"""The scheduler's memory of calls: with it they outlive the connection of the client that sent them, and detached ones the client itself.

A client's topic is remembered from its first `resume` on: the n-th message on it has the number n, is kept as the bytes it came in, and dropped once the
client acknowledges it. A client that lost its connection asks, on a new one, for what came after the last number that it has handled (`resume`);
the answer travels in the same stream as live messages, so nothing is missed, doubled or out of order, however the two meet.

A task whose key begins with "skyward-" is wanted by KEEP too, a client that has no connection to lose: until the client that sent it, or the one that has
resumed its topic since, releases it, leaves, or stays away too long. A detached call, whose topic and task are both named `detached_key(call_id)`, stays
until it is to be forgotten.
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

from skyward_core.worker.retained_batches import OLDER, RELEASE, TELL_KEPT
from skyward_core.worker.wire import Ending, Outcome, Report

KEEP = "skyward-keep"
"""The client of Dask's that wants the tasks of all others, and never goes away."""

RESUME, ACKNOWLEDGE, LEAVE, LET_GO, CANCEL = "skyward-resume", "skyward-acknowledge", "skyward-leave", "skyward-let-go", "skyward-cancel"
"""Operations of a client's stream to the scheduler; CANCEL also of the scheduler's to a worker."""

RETRIES, NAME = "skyward_retries", "skyward_name"
"""Annotations (`dask.annotate`) of a detached call's task: how often it may run again when its worker is lost under it (0), its function's name."""

RAN = "skyward_ran"
"""Name of the workers' metric, and of the scheduler's operation that returns all of them."""

type Ran = tuple[str, str, float]
"""For how long a worker's slots were busy, in seconds, since its process began: the id of its instance, a name of the process, the sum over its slots."""

TOPIC_LIMIT_BYTES = 64 << 20
PREFIX = "skyward-"
"""With which the keys of our tasks begin; those of a user of Dask do not."""
_DETACHED = "skyward-call-"


def let_go(keys: Collection[str]) -> dict[str, Any]:
    """Return the message that releases tasks of which the client has no future."""
    return {"op": LET_GO, "keys": list(keys)}


def cancel(call_ids: Collection[str]) -> dict[str, Any]:
    """Return the message that stops these calls, wherever they are. Unknown ids are ignored."""
    return {"op": CANCEL, "calls": list(call_ids)}


def tell_kept() -> dict[str, Any]:
    """Return the message that has every worker tell what it keeps, and report it again: for a client that is new to the scheduler, as soon as it listens."""
    return {"op": TELL_KEPT}


def release(call_ids: Collection[str]) -> dict[str, Any]:
    """Return the message that has workers forget calls that have outlived the head they were sent to: their outcomes have arrived, or nobody wants them."""
    return {"op": RELEASE, "calls": list(call_ids)}


def detached_key(call_id: str) -> str:
    """Return the key of a detached call's task, which is the name of its topic too."""
    return _DETACHED + call_id


# ── the client's side ────────────────────────────────────────────────────────────────────────────────────────────────


def resume(client_id: str, topic: str, after: int, asked: int) -> dict[str, Any]:
    """Return the message that has the scheduler send all after number `after` to this client, and make it the owner of the topic and its tasks.

    The answer is an event of the topic: a mapping with the number `asked`, and what `scheduler_messages.Resumed` tells.
    """
    return {"op": RESUME, "client": client_id, "topic": topic, "after": after, "asked": asked}


def acknowledge(topic: str, number: int) -> dict[str, Any]:
    """Return the message that lets the scheduler drop the messages of a topic up to this number."""
    return {"op": ACKNOWLEDGE, "topic": topic, "number": number}


def leave(topic: str) -> dict[str, Any]:
    """Return the message that has the scheduler drop a topic and its owner's tasks: to be sent before the client is closed for good."""
    return {"op": LEAVE, "topic": topic}


# ── the scheduler's side ─────────────────────────────────────────────────────────────────────────────────────────────


class Topic:
    """Numbered messages, the last of them at hand; the oldest are dropped when they take more than `limit_bytes`."""

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
        """Return the messages after this number that are at hand, and the number of the message before them."""
        skipped = max(0, number - (self.number - len(self._messages)))
        messages = list(self._messages)[skipped:]
        return self.number - len(messages), messages

    def _drop_oldest(self) -> None:
        self.nbytes -= len(self._messages.popleft())


@dataclass(slots=True)
class Detached:
    """What is known of a detached call. `state` is "waiting", "running", "ended" (its outcome is among its messages), "cancelled" or "lost" (see `reason`).

    `worker` is the name (RANK-INDEX) of the worker it was sent to last, `runs` how often it was sent to one, `submitted_at` the head's clock.
    """

    call_id: str
    name: str
    topic: Topic
    submitted_at: float = field(default_factory=time.time)
    state: str = "waiting"
    worker: str = ""
    runs: int = 0
    reason: str = ""


class Calls(SchedulerPlugin):
    """Keeps messages and tasks for clients that are away. Owns its timers; they end with the scheduler.

    `abandoned_seconds` is how long a client may be away before what was kept for it is dropped.
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
        """By topic: how often it was dropped with the tasks of its owner. Not forgotten: the answer that says so may be lost."""
        self._asked: dict[str, int] = {}
        """By topic: the number of the last question that was answered."""
        self._replaced: set[str] = set()
        """Clients whose topics others have resumed, as long as their streams stand."""
        self._detached: dict[str, Detached] = {}
        self._scheduler: Any = None  # Dask's types say too little

    async def start(self, scheduler: Scheduler) -> None:
        """Take up the operations of clients."""
        self._scheduler = scheduler
        scheduler.stream_handlers.update(
            {
                RESUME: self._resume,
                ACKNOWLEDGE: self._acknowledge,
                LEAVE: self._leave,
                LET_GO: self._let_go,
                CANCEL: self._cancel,
                TELL_KEPT: self._tell_kept,
                RELEASE: self._release,
                "client-releases-keys": self._client_releases_keys,
            }
        )
        scheduler.handlers.update({"skyward_calls": self.skyward_calls, "skyward_call": self.skyward_call, "skyward_forget": self.skyward_forget})
        scheduler.handlers.update({"skyward_busy": self.skyward_busy, RAN: self.skyward_ran, "skyward_load": self.skyward_load})
        scheduler.handlers.update({"skyward_cancel": self.skyward_cancel})

    async def close(self) -> None:
        """Stop the timers."""
        for timer in self._absent.values():
            timer.cancel()
        self._absent.clear()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def log_event(self, topic: str, msg: Any) -> None:
        """Keep a message. Dask calls this for every event there is."""
        kept = self._topics.get(topic)
        if kept is not None and type(msg) is bytes:
            kept.add(msg)

    def _resume(self, client: str, topic: str, after: int, asked: int) -> None:
        """Send a client what it has missed and make it a subscriber, within one turn of the event loop: no message can come between the two."""
        if asked < self._asked.get(topic, 0):  # a later connection of the same client has been faster
            self._replaced.add(client)
            return
        self._asked[topic] = asked
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
            "asked": asked,
            "number": number,
            "missed": max(0, number - after),
            "is_known": is_known,
            "abandoned": self._abandoned.get(topic, 0),
            "tasks": tasks,
            "gone": gone,
            "last": number + len(messages),
            "workers": {worker.address: (str(worker.name), worker.status.name) for worker in self._scheduler.workers.values()},
        }
        now = time.time()
        events = [{"op": "event", "topic": topic, "event": (now, content)} for content in (answer, *messages)]
        self._scheduler.send_all({client: events}, {})
        self._scheduler.subscribe_topic(topic, client)
        if tasks:
            self._scheduler.client_desires_keys(list(tasks), client)  # it is told, after all this, of those that have ended

    def _give(self, topic: str, client: str) -> None:
        """Make a client the owner of a topic, and of the tasks of whoever owned it."""
        owner = self._owners.get(topic, client)
        self._owners[topic] = client
        if timer := self._absent.pop(client, None):
            timer.cancel()  # Dask's own reconnecting keeps the client's id
        if owner == client:
            return
        self._scheduler.unsubscribe_topic(topic, owner)
        if owner in self._scheduler.clients:
            self._replaced.add(owner)
        self._keys.setdefault(client, set()).update(self._keys.pop(owner, ()))
        if owner not in self._owners.values() and (timer := self._absent.pop(owner, None)):
            timer.cancel()

    def _acknowledge(self, client: str, topic: str, number: int) -> None:
        if topic in self._owners:  # the messages of detached calls are nobody's
            self._topics[topic].acknowledge(number)

    def _leave(self, client: str, topic: str) -> None:
        """Drop a topic and let go of its owner's tasks: the client is done with them."""
        if self._owners.get(topic) == client:
            self._abandon(client)

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_replaced(self, client: str) -> bool:
        """Tell whether another client has resumed this one's topic: it was told what had come by then, and sends the rest again."""
        return client in self._replaced

    def update_graph(self, scheduler: Scheduler, *, client: str, tasks: Any, keys: Collection[Any], annotations: Any, priority: Any, **_: Any) -> None:
        """Want our tasks as KEEP, from the moment they are known to Dask."""
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
        """See that what has ended is not run again, and follow the detached calls. Dask calls this several times for every task."""
        if not isinstance(key, str) or not key.startswith(PREFIX):
            return
        if finish == "memory":
            # Without it Dask cannot do what it does when a worker is lost that holds a result: run the task again.
            self._scheduler.tasks[key].run_spec = None
        if call := self._detached.get(key):
            self._follow(call, self._scheduler.tasks[key], finish, news)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Give a client whose connection is gone some time to come back."""
        self._replaced.discard(client)
        if client in self._owners.values() or self._keys.get(client):
            if timer := self._absent.pop(client, None):
                timer.cancel()
            self._absent[client] = asyncio.get_running_loop().call_later(self._abandoned_seconds, self._abandon, client)

    def _client_releases_keys(self, keys: Iterable[str], client: str, **rest: Any) -> None:
        """Release for KEEP too what a client itself releases; this is the operation of its stream, not what Dask does when the stream breaks.

        A client that has reconnected releases the futures of before; it has no wishes by then, and their tasks stay.
        """
        keys = list(keys)
        kept = self._keys.get(client)
        if kept and client in self._scheduler.clients:
            wanted, keeper = self._scheduler.clients[client].wants_what, self._scheduler.clients[KEEP]
            for key in kept.intersection(keys):
                task = self._scheduler.tasks.get(key)
                if task in wanted:  # so that nothing follows from KEEP's wish being gone but what follows from the client's, below
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
            for wisher in {KEEP, client} & self._scheduler.clients.keys():
                self._scheduler.client_releases_keys(keys=ours, client=wisher)
        if not kept:
            self._keys.pop(client, None)

    def _abandon(self, client: str) -> None:
        if timer := self._absent.pop(client, None):
            timer.cancel()
        topics = [topic for topic, owner in self._owners.items() if owner == client]
        for topic in topics:
            self._scheduler.unsubscribe_topic(topic, client)
            del self._owners[topic], self._topics[topic], self._asked[topic]
            self._abandoned[topic] = self._abandoned.get(topic, 0) + 1
        stop = {"op": CANCEL, "calls": topics}  # else what runs would keep its slot, and nobody could stop it any more
        self._scheduler.send_all({}, {worker: [stop] for worker in self._scheduler.workers})
        self._let_go(client, list(self._keys.get(client, ())))

    def _cancel(self, client: str, calls: Collection[str]) -> None:
        """Stop calls: detached ones that wait are taken back here, all others wherever they are."""
        for call in filter(None, map(self._detached.get, map(detached_key, calls))):
            self._take_back(call)
        message = {"op": CANCEL, "calls": list(calls)}
        self._scheduler.send_all({}, {worker: [message] for worker in self._scheduler.workers})

    def _tell_kept(self, client: str) -> None:
        self._scheduler.send_all({}, {worker: [{"op": TELL_KEPT}] for worker in self._scheduler.workers})

    def _release(self, client: str, calls: Collection[str]) -> None:
        message = {"op": RELEASE, "calls": list(calls)}
        self._scheduler.send_all({}, {worker: [message] for worker in self._scheduler.workers})

    # ── detached calls ───────────────────────────────────────────────────────────────────────────────────────────────

    def skyward_busy(self) -> bool:
        """Tell whether any task runs or waits, whoever sent it."""
        scheduler = self._scheduler
        return bool(scheduler.unrunnable or scheduler.queued or any(worker.processing or worker.metrics.get(OLDER) for worker in scheduler.workers.values()))

    def skyward_ran(self) -> list[Ran]:
        """Return for how long the slots of each worker were busy, as of its last heartbeat."""
        return [ran for worker in self._scheduler.workers.values() if (ran := worker.metrics.get(RAN)) is not None]

    def skyward_load(self) -> dict[str, list[str]]:
        """Return the keys of the tasks that each worker has and has not ended, whoever sent them, by the workers' names."""
        return {str(worker.name): [str(task.key) for task in worker.processing] for worker in self._scheduler.workers.values()}

    def skyward_cancel(self, call_id: str) -> None:
        """Stop a call as CANCEL does, for one who wants to know that it was told."""
        self._cancel("", [call_id])

    def skyward_calls(self) -> list[dict[str, Any]]:
        """Return what is known of every detached call, in the order in which they came."""
        return [self._told(call) for call in self._detached.values()]

    def skyward_call(self, call_id: str, after: int = 0) -> dict[str, Any] | None:
        """Return what is known of a detached call and its messages after this number; None if there is none of this id.

        `number` is that of the message before the first of `messages`, `missed` how many before it were dropped.
        """
        call = self._detached.get(detached_key(call_id))
        if call is None:
            return None
        number, messages = call.topic.after(after)
        return {**self._told(call), "number": number, "missed": max(0, number - after), "messages": messages}

    def skyward_forget(self, call_id: str) -> bool:
        """Drop all there is of a detached call, its result too; False if there is none of this id. One that runs is not stopped by it."""
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
        # Dask gives a task up when it has seen more than `allowed-failures` (none here) workers die under it: this one's count starts below zero.
        task.suspicious = -int(annotations.get(RETRIES, 0))
        topic = self._topics[key] = Topic(self._topic_limit_bytes)
        self._detached[key] = Detached(key.removeprefix(_DETACHED), str(annotations.get(NAME, "")), topic)

    def _follow(self, call: Detached, task: Any, finish: str, news: Mapping[str, Any]) -> None:
        if call.state in {"ended", "cancelled", "lost"}:
            return  # its result may be lost later, with the worker that holds it
        if finish == "processing":
            call.runs += 1
            call.worker = str(task.processing_on.name)
        elif finish in {"waiting", "queued", "no-worker"}:
            call.state = "waiting"
        elif finish == "memory":
            call.state = "ended"
        elif finish in {"erred", "forgotten"}:
            call.state = "lost"
            call.reason = news.get("exception_text") or "the worker that ran it is gone"

    def _told(self, call: Detached) -> dict[str, Any]:
        task = self._scheduler.tasks.get(detached_key(call.call_id))
        is_running = task is not None and task.processing_on is not None and (task in task.processing_on.executing or call.topic.number > 0)
        return {
            "call_id": call.call_id,
            "name": call.name,
            "state": "running" if is_running else call.state,
            "worker": call.worker,
            "runs": call.runs,
            "submitted_at": call.submitted_at,
            "reason": call.reason,
            "messages_in_all": call.topic.number,
            "has_result": task is not None and task.state == "memory",
        }

    def _take_back(self, call: Detached) -> None:
        """Keep a call that is to be stopped from beginning: no worker has it yet, or it must not go to another one."""
        key = detached_key(call.call_id)
        task = self._scheduler.tasks.get(key)
        if task is None or call.state != "waiting":
            return
        task.suspicious = max(0, task.suspicious)
        if task.processing_on is not None:
            return  # it goes to a worker's slots, which know by then that it is to be stopped
        call.state = "cancelled"
        self._scheduler.log_event(key, pickle.dumps(Report(-1, "", (Outcome(call.call_id, Ending.CANCELLED),)), protocol=5))
        self._scheduler.stimulus_cancel([key], client=KEEP, force=True, reason="skyward-cancel", msg="the call was cancelled")
