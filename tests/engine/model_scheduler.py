"""A model of the scheduler of a pool, with its memory of calls, and of the client's connection to it.

They behave like `worker/calls.py` and Dask, as seen by a client. See `model.py` for the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from skyward_core.wire.messages import Batch, Report
from skyward_core.wire.protocol import HELD, Resumed, WorkerFree, WorkerHeld, WorkerJoined, WorkerLeft

if TYPE_CHECKING:
    from tests.engine.model import Worker
    from tests.engine.simulation import World


@dataclass(slots=True)
class Topic:
    """Numbered messages; the last ones are kept."""

    number: int
    limit: int
    messages: list[Report] = field(default_factory=list[Report])

    def add(self, message: Report) -> None:
        self.number += 1
        self.messages.append(message)
        if len(self.messages) > self.limit:
            del self.messages[0]

    def acknowledge(self, number: int) -> None:
        del self.messages[: max(0, number - (self.number - len(self.messages)))]

    def after(self, number: int) -> tuple[int, list[Report]]:
        messages = self.messages[max(0, number - (self.number - len(self.messages))) :]
        return self.number - len(messages), messages


@dataclass(slots=True)
class Task:
    """A batch in the scheduler. `address`: the only worker where it may run. `worker`: the one that has it."""

    key: str
    batch: Batch
    address: str | None
    state: str = "no-worker"
    worker: Worker | None = None


class Connection:
    """A client's connection: a wire in each direction, and Dask's futures, by key: whether each has ended, and its
    batch's number once it is followed.
    """

    def __init__(self, world: World, scheduler: Scheduler, topic: str) -> None:
        self.world, self.scheduler, self.topic = world, scheduler, topic
        self.epoch = 0
        self.is_closed = False
        """Whether the client knows that it is closed."""
        self.ends: dict[str, bool | None] = {}
        """Futures: None while they are pending, then whether there is a result."""
        self.numbers: dict[str, int] = {}
        self.up = world.wire(lambda message: scheduler.receive(self, message))
        self.down = world.wire(self.receive)

    @property
    def carries(self) -> bool:
        """Whether questions reach the scheduler and answers come back."""
        return self.up.is_open and self.down.is_open and self.scheduler.is_alive

    def receive(self, message: Any) -> None:
        """Pass the scheduler's messages to the owner, like Dask's client."""
        kind, what, more = message
        post = self.world.post
        if kind == "event" and what == self.topic:
            if isinstance(more, Report):
                post("report", self.epoch, more)
            else:
                for key in more.tasks:
                    self.ends.setdefault(key, None)
                post("resumed", self.epoch, more)
        elif kind == "pool":
            post("pool_news", self.epoch, what)
        elif kind == "ended" and what in self.ends:
            was_pending, self.ends[what] = self.ends[what] is None, more
            if was_pending and what in self.numbers:
                self._post_end(what)
        elif kind == "closed":
            self.is_closed = True
            post("cut", self.epoch)

    def follow(self, number: int, key: str) -> None:
        """Post when a task has ended."""
        self.numbers[key] = number
        if self.ends.setdefault(key, None) is not None:
            self._post_end(key)

    def _post_end(self, key: str) -> None:
        self.world.post(
            "task_ended",
            self.epoch,
            self.numbers[key],
            is_finished=self.ends[key],
            reason="the worker that ran it is gone",
        )

    def release(self, keys: Iterable[str]) -> None:
        """Let the scheduler forget tasks."""
        keys = tuple(key for key in keys if key in self.ends)
        for key in keys:
            del self.ends[key]
            self.numbers.pop(key, None)
        self.up.send(("release", keys))

    def take_back(self, key: str) -> bool:
        """Release a task that has not ended; False if it has."""
        if self.ends.get(key, True) is not None:
            return False
        self.release((key,))
        return True

    def close(self, rng: Random) -> None:
        """The client closes it."""
        self.is_closed = True
        if self.up.is_open and rng.random() < 0.5:
            self.up.send(("gone", None))
            self.up.is_open = False
        else:
            self.up.cut(rng, ("gone", None) if rng.random() < 0.7 else None)
        self.down.is_open = False


class Scheduler:
    """The scheduler of the pool, with the plug-ins that keep messages and tasks for clients that are away."""

    def __init__(self, world: World, limit: int) -> None:
        self.world = world
        self.is_alive = True
        self.limit = limit
        self.topics: dict[str, Topic] = {}
        self.abandoned: dict[str, int] = {}
        self.owners: dict[str, Connection] = {}
        self.keys: dict[Connection, set[str]] = {}
        self.clients: set[Connection] = set()
        self.replaced: set[Connection] = set()
        self.subscribers: dict[str, list[Connection]] = {}
        self.tasks: dict[str, Task] = {}
        self.workers: dict[str, Worker] = {}
        self.held: set[str] = set()

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, client: Connection, message: Any) -> None:
        """Take a message of a client's stream."""
        if not self.is_alive:
            return
        kind, what = message
        if kind == "gone":
            self._remove_client(client)
            return
        self.clients.add(client)
        if kind == "run":
            self._take_batch(client, *what)
        elif kind == "subscribe":
            self._subscribe(what, client)
        elif kind == "resume":
            self._resume(client, *what)
        elif kind == "acknowledge":
            if what[0] in self.owners:
                self.topics[what[0]].acknowledge(what[1])
        elif kind == "release":
            self._release_keys(client, what)
        else:  # "cancel", "tell kept" and "release kept" go to all workers
            for worker in self.workers.values():
                worker.down.send(message)

    def _remove_client(self, client: Connection) -> None:
        self.clients.discard(client)
        self.replaced.discard(client)
        for subscribers in self.subscribers.values():
            if client in subscribers:
                subscribers.remove(client)

    def _subscribe(self, topic: str, client: Connection) -> None:
        subscribers = self.subscribers.setdefault(topic, [])
        if client not in subscribers:
            subscribers.append(client)

    def _resume(self, client: Connection, topic: str, after: int) -> None:
        owner = self.owners.get(topic, client)
        if owner.epoch > client.epoch:  # too late: the client has another connection by now
            self.replaced.add(client)
            return
        is_known = topic in self.topics
        kept = self.topics.setdefault(topic, Topic(after, self.limit))
        self.owners[topic] = client
        if owner is not client:
            if owner in self.subscribers.get(topic, ()):
                self.subscribers[topic].remove(owner)
            if owner in self.clients:
                self.replaced.add(owner)
            self.keys.setdefault(client, set()).update(self.keys.pop(owner, ()))
        number, messages = kept.after(after)
        keys = self.keys.get(client, set())
        tasks = {key: self.tasks[key].state for key in sorted(keys) if key in self.tasks}
        gone = frozenset(keys - tasks.keys())
        workers = {
            worker.address: (worker.name, HELD if worker.address in self.held else "running")
            for worker in self.workers.values()
        }
        last = number + len(messages)
        self.world.missed += max(0, number - after)
        client.down.send(
            (
                "event",
                topic,
                Resumed(
                    number, max(0, number - after), is_known, tasks, gone, last, workers, self.abandoned.get(topic, 0)
                ),
            )
        )
        for message in messages:
            client.down.send(("event", topic, message))
        self._subscribe(topic, client)
        for key in tasks:
            self._tell_if_ended(key, client)

    def abandon(self) -> None:
        """The client has been away for too long: forget its messages and tasks, and stop its calls."""
        for topic, owner in list(self.owners.items()):
            if owner not in self.clients:
                del self.owners[topic], self.topics[topic]
                self.abandoned[topic] = self.abandoned.get(topic, 0) + 1
                for worker in self.workers.values():
                    worker.down.send(("cancel", [topic]))
                self._release_keys(owner, sorted(self.keys.get(owner, ())))
        for worker in self.workers.values():  # the workers have long done this when the client comes back
            while worker.down.queue:
                worker.receive(worker.down.queue.popleft())

    def _release_keys(self, client: Connection, keys: Sequence[str]) -> None:
        kept = self.keys.get(client, set())
        for key in keys:
            if key in kept:
                kept.remove(key)
                self._forget(key)

    def _forget(self, key: str) -> None:
        task = self.tasks.pop(key, None)
        if task is not None and task.worker is not None:
            task.worker.down.send(("free", key))
        self._assign()

    def _tell_if_ended(self, key: str, client: Connection) -> None:
        task = self.tasks.get(key)
        if task is not None and task.state in ("memory", "erred"):
            client.down.send(("ended", key, task.state == "memory"))

    def _tell_owner(self, task: Task) -> None:
        for client, keys in self.keys.items():
            if task.key in keys:
                self._tell_if_ended(task.key, client)

    def load(self) -> dict[str, list[str]]:
        """Return the keys of the tasks that each worker has."""
        return {
            worker.name: [
                task.key for task in self.tasks.values() if task.worker is worker and task.state == "processing"
            ]
            for worker in self.workers.values()
        }

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_batch(self, client: Connection, key: str, batch: Batch, address: str | None) -> None:
        if client in self.replaced:
            return
        self.keys.setdefault(client, set()).add(key)
        self.tasks[key] = Task(key, batch, address)
        self._assign()

    def _assign(self) -> None:
        for task in list(self.tasks.values()):
            if task.state == "no-worker" and (worker := self._worker_for(task)) is not None:
                task.state, task.worker = "processing", worker
                worker.down.send(("compute", (task.key, task.batch)))

    def _worker_for(self, task: Task) -> Worker | None:
        if task.address is not None:
            return self.workers.get(task.address) if task.address not in self.held else None
        for worker in self.workers.values():
            if worker.address not in self.held and self._left_at(worker) < len(worker.slots):
                return worker
        return None

    def _left_at(self, worker: Worker) -> int:
        return sum(task.worker is worker and task.state == "processing" for task in self.tasks.values())

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, worker: Worker, message: Any) -> None:
        """Take a message of a worker's stream."""
        if not self.is_alive or worker.address not in self.workers:
            return
        kind, what, more = message
        if kind == "report":
            if what in self.topics:
                self.topics[what].add(more)
            for client in self.subscribers.get(what, ()):
                client.down.send(("event", what, more))
        elif kind == "news":
            if isinstance(what, WorkerFree):
                self.held.discard(worker.address)
            self._tell_pool(what)
            self._assign()
        elif kind == "finished":
            task = self.tasks.get(what)
            if task is None or task.worker is not worker:
                worker.down.send(("free", what))
            else:
                task.state = "memory"
                self._tell_owner(task)
                self._assign()
        else:
            self.remove_worker(worker)

    def add_worker(self, worker: Worker) -> None:
        """A worker joins."""
        self.workers[worker.address] = worker
        if worker.older:
            self.held.add(worker.address)
        self._tell_pool(WorkerJoined(worker.name, worker.address))
        self._assign()

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker: its running calls and the results that it holds are lost."""
        del self.workers[worker.address]
        self.held.discard(worker.address)
        self._tell_pool(WorkerLeft(worker.name, worker.address))
        for task in [task for task in self.tasks.values() if task.worker is worker]:
            task.worker = None
            if task.state == "processing":
                task.state = "erred"
                self._tell_owner(task)
            elif task.state == "memory":
                task.state = "erred"
                self._tell_owner(task)
                del self.tasks[task.key]
        self._assign()

    def hold(self, rank: int) -> None:
        """Give the workers of a node no more calls."""
        for worker in self.workers.values():
            if worker.node.rank == rank:
                self.held.add(worker.address)
                self._tell_pool(WorkerHeld(worker.address, self._left_at(worker)))

    def _tell_pool(self, news: object) -> None:
        for client in self.subscribers.get("pool", ()):
            client.down.send(("pool", news, None))
