"""The scheduler's memory of calls: calls outlive the connection of their client, and detached calls outlive the client.

The scheduler keeps a client's topic from its first `resume` on. The n-th message on it has the number n, is kept as
bytes, and is dropped when the client acknowledges it. On a new connection the client asks for the messages after the
last number that it has handled (`resume`). The answer travels in the same stream as live messages, so no message is
missed, doubled or out of order.

KEEP, a client without a connection, also wants each task whose key begins with "skyward-". KEEP releases the task when
its client releases it, leaves, or stays away too long. Its client is the one that sent it, or the one that has resumed
its topic. A detached call stays until `skyward_forget` (`detached_calls`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler  # noqa: TID253 - this file, node.py and cluster.py own Dask
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.wire.protocol import (
    ACKNOWLEDGE,
    BUSY_TIMES,
    CANCEL,
    CREDIT,
    KEEP,
    LEAVE,
    LOAD,
    OLDER,
    POOL_TOPIC,
    PREFIX,
    RANKS,
    RELEASE,
    REPEAT_REPORTS,
    RESUME,
    WAITING,
    BusyTime,
    PoolRanks,
    give_credit,
    is_detached,
    task_failed,
)
from skyward_core.wire.reports import encode_news
from skyward_core.worker.detached_calls import DetachedCalls, Topic
from skyward_core.worker.topic_seconds import by_use

TOPIC_LIMIT_BYTES = 64 << 20


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

        Never removed: the answer with this number may be lost.
        """
        self._resumes: dict[str, int] = {}
        """By topic: the number of the last `resume` that was answered."""
        self._ended: set[str] = set()
        """Topics that another client has ended. Few, and never removed: their clients may try to come back."""
        self._replaced: set[str] = set()
        """Clients whose topics others have resumed, while their streams are open."""
        self.detached = DetachedCalls(self._topics, topic_limit_bytes)
        self.loads = ClientLoads()
        self._ranks: frozenset[int] | None = None
        """The ranks that are to stay; None: the process that keeps the pool has not said it."""
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
                LOAD: self._note_load,
                RANKS: self._note_ranks,
                "client-releases-keys": self._client_releases_keys,
            }
        )
        scheduler.handlers.update(
            {
                "skyward_busy": self.skyward_busy,
                BUSY_TIMES: self.skyward_busy_times,
                "skyward_load": self.skyward_load,
                WAITING: self.skyward_waiting,
            }
        )
        self.detached.start(scheduler)

    async def close(self) -> None:
        """Stop the timers."""
        for timer in self._absent.values():
            timer.cancel()
        self._absent.clear()
        self.detached.close()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def log_event(self, topic: str, msg: Any) -> None:
        """Keep a message. Dask calls this for every event."""
        kept = self._topics.get(topic)
        if kept is not None and type(msg) is bytes and self.detached.hear(topic, msg):
            kept.add(msg)

    def _resume(self, client: str, topic: str, after: int, request: int) -> None:
        """Send a client the messages that it has missed and subscribe it, in one turn of the event loop: no message can
        come in between.
        """
        # ended by a newer attempt of its work, or a later connection of the same client was faster
        if topic in self._ended or request < self._resumes.get(topic, 0):
            self._replaced.add(client)
            return
        self._resumes[topic] = request
        kept = self._topics.get(topic)
        is_known = kept is not None
        if not is_detached(topic):
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
            "instances": {worker.address: instance_of(worker) for worker in self._scheduler.workers.values()},
            "ranks": None if self._ranks is None else sorted(self._ranks),
        }
        now = time.time()
        events = [{"op": "event", "topic": topic, "event": (now, content)} for content in (answer, *messages)]
        for key, state in tasks.items():
            if state == "erred":  # Dask says below that they have failed, and not why
                events.append(task_failed(key, self._scheduler.tasks[key].exception_text or ""))
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

    def end(self, topic: str) -> None:
        """Drop a topic whose client is dead or replaced, and stop its calls. A client that lives cannot come back."""
        self._ended.add(topic)
        if (owner := self._owners.get(topic)) is not None:
            self._replaced.add(owner)
            self._abandon(owner)

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_replaced(self, client: str) -> bool:
        """Return whether another client has resumed this one's topic: that client knows which batches had arrived, and
        sends the others again.
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
        detached = {key for key in ours if is_detached(key)}
        for key in detached:
            self.detached.take_in(key)
        if regular := set(ours) - detached:
            self._keys.setdefault(client, set()).update(regular)

    def transition(self, key: Any, start: str, finish: str, *_: Any, stimulus_id: str = "", **news: Any) -> None:
        """Make sure that Dask does not run an ended task again, and follow detached calls.

        Dask calls this several times for every task.
        """
        if not isinstance(key, str) or not key.startswith(PREFIX):
            return
        if finish == "memory":
            # When a worker is lost that holds a result, Dask runs the task again; without `run_spec` it cannot.
            self._scheduler.tasks[key].run_spec = None
        if finish == "erred":
            message = task_failed(key, news.get("exception_text") or "")
            clients = [client.client_key for client in self._scheduler.tasks[key].who_wants or ()]
            self._scheduler.send_all({client: [dict(message)] for client in clients if client != KEEP}, {})
        if is_detached(key):
            self.detached.follow(key, start, finish, stimulus_id, news)

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

        A client that has reconnected releases its earlier futures. It does not want any task at that time, so the tasks
        stay.
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

    def _release_keys(self, client: str, keys: Iterable[str]) -> None:
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
            self.loads.forget(topic)
        # otherwise running calls would keep their slots, and no client could stop them
        stop = {"op": CANCEL, "calls": topics}
        self._scheduler.send_all({}, {worker: [stop] for worker in self._scheduler.workers})
        self._release_keys(client, list(self._keys.get(client, ())))

    def _cancel(self, client: str, calls: Collection[str]) -> None:
        self.detached.stop(calls)

    def _give_credit(self, client: str, credit: Mapping[str, int]) -> None:
        self._scheduler.send_all({}, {worker: [give_credit(credit)] for worker in self._scheduler.workers})

    def _repeat_reports(self, client: str) -> None:
        self._scheduler.send_all({}, {worker: [{"op": REPEAT_REPORTS}] for worker in self._scheduler.workers})

    def _release(self, client: str, calls: Collection[str]) -> None:
        message = {"op": RELEASE, "calls": list(calls)}
        self._scheduler.send_all({}, {worker: [message] for worker in self._scheduler.workers})

    # ── load ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def skyward_busy(self) -> bool:
        """Return whether any task of any client runs or waits."""
        scheduler = self._scheduler
        return bool(
            scheduler.unrunnable
            or scheduler.queued
            or any(worker.processing or worker.metrics.get(OLDER) for worker in scheduler.workers.values())
        )

    def skyward_waiting(self, topic: str = "") -> int:
        """Return how many tasks of all clients wait for a slot, and calls in the queues of all but the client of this
        topic.
        """
        scheduler = self._scheduler
        late = sum(max(0, len(worker.processing) - worker.nthreads) for worker in scheduler.workers.values())
        in_queues = self.loads.waiting(lambda its: its != topic and self._owners.get(its) in scheduler.clients)
        return len(scheduler.unrunnable) + len(scheduler.queued) + late + in_queues

    def needs(self, workers: Iterable[Any]) -> int:
        """Return how many clients need the memory of the machine of one of these workers."""
        return self.loads.needs({instance_of(worker) for worker in workers})

    def _note_load(self, client: str, topic: str, waiting: int, needed: Collection[str]) -> None:
        if self._owners.get(topic) == client:
            self.loads.note(topic, waiting, needed)

    def _note_ranks(self, client: str, ranks: Collection[int]) -> None:
        before, self._ranks = self._ranks, frozenset(ranks)
        if before != self._ranks:
            self._scheduler.log_event(POOL_TOPIC, encode_news(PoolRanks(self._ranks)))

    def skyward_busy_times(self, topic: str = "") -> list[BusyTime]:
        """Return how long the slots of each worker were busy, by its last heartbeat, with the parts for the uses of the
        client with this topic.
        """
        times = [worker.metrics.get(BUSY_TIMES) for worker in self._scheduler.workers.values()]
        return [
            (instance_id, process, seconds, by_use(by_key, topic))
            for instance_id, process, seconds, by_key in filter(None, times)
        ]

    def skyward_load(self) -> dict[str, list[str]]:
        """Return the keys of the unended tasks of all clients that each worker has, by the workers' names."""
        return {
            str(worker.name): [str(task.key) for task in worker.processing]
            for worker in self._scheduler.workers.values()
        }


def instance_of(worker: Any) -> str:
    """Return the id of the instance of a worker; "" if it is not one of the pool's workers."""
    instance_id, *_ = worker.metrics.get(BUSY_TIMES) or ("",)
    return str(instance_id)


@dataclass(frozen=True, slots=True)
class _Load:
    waiting: int
    needed: frozenset[str]


class ClientLoads:
    """What clients have that the scheduler does not see, by topic: calls that wait in their own queues, and nodes whose
    memory they still need, because they send arguments there or fetch results from there.

    Each client reports it with LOAD on its stream when it changes. A client that is away keeps its needs until its
    topic is abandoned; its waiting calls do not count.
    """

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}

    def note(self, topic: str, waiting: int, needed: Collection[str]) -> None:
        """Note the present load of a client."""
        self._loads[topic] = _Load(waiting, frozenset(needed))

    def forget(self, topic: str) -> None:
        """Note that a client has left, or was away for too long."""
        self._loads.pop(topic, None)

    def waiting(self, counts: Callable[[str], bool]) -> int:
        """Return how many calls wait in the queues of the clients whose topics count."""
        return sum(one.waiting for topic, one in self._loads.items() if counts(topic))

    def needs(self, instance_ids: Collection[str]) -> int:
        """Return how many clients need one of these instances."""
        return sum(not one.needed.isdisjoint(instance_ids) for one in self._loads.values())
