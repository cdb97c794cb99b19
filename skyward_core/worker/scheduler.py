"""The pool's Dask scheduler, on the head: takes batches, removes silent workers, reports who joins and leaves, lists
calls, holds nodes, and keeps secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from dask.task_spec import Task  # noqa: TID253 - this module is imported on nodes
from distributed import Scheduler  # noqa: TID253
from distributed.core import Status  # noqa: TID253
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253
from distributed.protocol.serialize import deserialize  # noqa: TID253
from distributed.scheduler import DEFAULT_EXTENSIONS, heartbeat_interval  # noqa: TID253
from distributed.spans import SpanMetadata  # noqa: TID253
from distributed.utils import offload  # noqa: TID253
from distributed.versions import get_versions  # noqa: TID253

from skyward_core.wire.messages import Sealed
from skyward_core.wire.protocol import (
    ANSWERS_CALLS,
    BUSY_TIMES_NOW,
    CALLS_ANSWER,
    CALLS_QUESTION,
    END_CLIENT,
    ENDING_SECONDS,
    FREE,
    GET_SECRETS,
    HOLD,
    INTRODUCE,
    KEEP,
    KEPT,
    LIST_CALLS,
    LIST_STACKS,
    LISTING_SECONDS,
    OLDER,
    POOL_TOPIC,
    PREFIX,
    PUT_SECRETS,
    RUN_BATCH,
    RUN_ID,
    STALLED_SECONDS,
    START_DETACHED,
    WorkerFree,
    WorkerHeld,
    WorkerJoined,
    WorkerLeft,
    is_detached,
    task_failed,
)
from skyward_core.wire.reports import encode_news
from skyward_core.wire.streams import send_at_once
from skyward_core.worker.calls import CallMemory, instance_of
from skyward_core.worker.pool_worker import run_batch

SILENT_SECONDS = 14.0  # a worker that is silent for longer is lost; after a cut of 12 s TCP sends again at 12.6 s
SILENCE_CHECK_SECONDS = 1.0
LOOK_SECONDS = 0.05
PATIENCE_SECONDS = 60.0
"""How long a worker waits for the pool's owner: after a change of the head another client's call may come first."""


class SilentWorkers:
    """How long workers have been silent, counted in checks and not by a clock: a pause of the scheduler itself makes no
    worker silent.
    """

    def __init__(self) -> None:
        self._silent: dict[str, tuple[object, float]] = {}

    def check(
        self, last_seen: Mapping[str, object], elapsed_seconds: float, limit_seconds: Mapping[str, float]
    ) -> list[str]:
        """Return the workers that have been silent for longer than their limit. `last_seen`: a value for each that
        changes with each sign of life.

        Of the time since the last check at most twice the interval counts. The scheduler may have slept (a laptop, a
        machine that is moved), and then it has not read the signs of life of that time.
        """
        counted = min(elapsed_seconds, 2 * SILENCE_CHECK_SECONDS)
        before = self._silent
        self._silent = {}
        for worker, seen in last_seen.items():
            was_seen, silent_seconds = before.get(worker, (seen, -counted))
            self._silent[worker] = (seen, silent_seconds + counted if seen == was_seen else 0.0)
        return [
            worker for worker, (_, silent_seconds) in self._silent.items() if silent_seconds > limit_seconds[worker]
        ]


class NoSpans:
    """Replaces Dask's spans. Dask begins one with each call on an idle scheduler, and never deletes it."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Take the arguments of every extension of Dask's scheduler."""

    def observe_tasks(self, tasks: Any, **_: Any) -> None:
        """Begin no span for new tasks."""

    def heartbeat(self, worker: Any, data: Any) -> None:
        """Drop the measurements of a plain Dask worker."""


class PoolScheduler(Scheduler):
    """Dask's scheduler, with three changes: it takes batches without a graph, does not compare packages, and removes
    silent workers sooner.

    Dask warns of each package that differs, such as a client's pandas that is not in the image. The bootstrap of a node
    already makes the packages that matter (Python, Dask, cloudpickle) the same. Dask also checks for silent workers
    only once in `worker-ttl`, and lets fifty of them be silent for 20 s.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, extensions={**DEFAULT_EXTENSIONS, "spans": NoSpans})
        self.stream_handlers[RUN_BATCH] = self.take_batch
        self.handlers[START_DETACHED] = self.start_detached
        self._silence = SilentWorkers()
        self._checked_at = time.monotonic()
        if check := self.periodic_callbacks.get("worker-ttl"):
            check.callback_time = SILENCE_CHECK_SECONDS * 1000

    def take_batch(self, client: str, key: str, batch: bytes, annotations: dict[str, Any]) -> None:
        """Make a pickled batch a task of this key for the client, as `Client.submit` would. An error becomes the error
        of the task.

        A graph of one task costs more than all the rest of a tiny call: Dask builds, pickles, unpickles and checks it
        in another thread. A batch of a client that another one has replaced is refused: the answer to that one's
        `resume` was without it.
        """
        calls = self.plugins.get(CallMemory.name)
        if isinstance(calls, CallMemory) and calls.is_replaced(client):
            return
        try:
            self._make_task(client, key, batch, annotations)
        except Exception as error:  # if raised, it would end the client's stream, and all its other calls
            if key in self.tasks:
                self.client_desires_keys([key], client)  # a half-made task ends when the client releases it
            self.send_all({client: [task_failed(key, f"{type(error).__name__}: {error}")]}, {})

    def start_detached(self, call_id: str, batch: bytes, annotations: dict[str, Any]) -> dict[str, Any]:
        """Make a pickled batch a detached call of this id, unless there was one; return its record (`begin`)."""
        calls = cast(CallMemory, self.plugins[CallMemory.name]).detached
        return calls.begin(
            call_id,
            str(annotations.get(RUN_ID, call_id)),
            lambda key: self._make_task(KEEP, key, batch, annotations),
        )

    def _make_task(self, client: str, key: str, batch: bytes, annotations: dict[str, Any]) -> None:
        self._create_taskstate_from_graph(
            start=time.time(),
            dsk={key: Task(key, run_batch, Sealed(batch))},
            keys={key},
            ordered={key: 0},
            client=client,
            annotations_by_type={},
            global_annotations=annotations,
            stimulus_id=f"{RUN_BATCH}-{key}",
            submitting_task=None,
            span_metadata=SpanMetadata(collections=[]),
        )

    async def update_graph(self, client: str, expr_ser: Any, *args: Any, **kwargs: Any) -> None:
        """Take a graph of Dask's own, after another thread has imported the packages that it needs.

        Dask imports them in its event loop, and does not answer meanwhile: on a busy machine for longer than clients
        wait. It then loads the graph again.
        """
        with contextlib.suppress(Exception):  # Dask reports the error to the client
            await offload(deserialize, expr_ser.header, expr_ser.frames)
        await super().update_graph(client, expr_ser, *args, **kwargs)

    async def check_worker_ttl(self) -> None:
        """Remove the workers that have been silent for SILENT_SECONDS, or for three heartbeats in a large pool, where
        these are rarer.

        A worker with a task of Dask's own may be silent for STALLED_SECONDS.
        """
        now = time.monotonic()
        elapsed_seconds, self._checked_at = now - self._checked_at, now
        may_stall = {address: any(map(_is_dasks_own, worker.processing)) for address, worker in self.workers.items()}
        # the end of such a task is a sign of life
        last_seen = {address: (worker.last_seen, may_stall[address]) for address, worker in self.workers.items()}
        usual = max(SILENT_SECONDS, 3 * heartbeat_interval(len(last_seen)))
        limits = {address: max(usual, STALLED_SECONDS) if may_stall[address] else usual for address in may_stall}
        for address in self._silence.check(last_seen, elapsed_seconds, limits):
            await self.remove_worker(address, stimulus_id=f"skyward-silent-{now}")

    async def add_client(self, comm: Any, client: str, versions: dict[str, Any]) -> None:
        """Take a client in, with any installed packages."""
        await super().add_client(comm, client, {**versions, "packages": get_versions()["packages"]})


def _is_dasks_own(task: Any) -> bool:
    """Return whether a task came from a plain Dask client, and is none of our batches."""
    return not (isinstance(task.key, str) and task.key.startswith(PREFIX))


class PromptMessages(SchedulerPlugin):
    """Sends messages at once that Dask would collect for some milliseconds (our calls are grouped already), and reports
    workers that join and leave.
    """

    name = "skyward-prompt"

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        send_at_once(scheduler.stream_comms[worker])
        self._names[worker] = str(scheduler.workers[worker].name)
        news = WorkerJoined(self._names[worker], worker, instance_of(scheduler.workers[worker]))
        scheduler.log_event(POOL_TOPIC, encode_news(news))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        scheduler.log_event(POOL_TOPIC, encode_news(WorkerLeft(self._names.pop(worker, ""), worker)))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        def at_once() -> None:
            if client in scheduler.client_comms:
                send_at_once(scheduler.client_comms[client])

        asyncio.get_running_loop().call_soon(at_once)  # Dask makes the stream right after it has called its plug-ins


# Which calls a pool has right now, on request: the scheduler asks its clients and workers, and adds up what they know.
#
#     observer ──LIST_CALLS──▶ scheduler ──CALLS_QUESTION──▶ each client: its calls that wait, are out, or are fetched
#                                 ▲  └─────CALLS_QUESTION──▶ each worker: the call of each slot, with its stacks;
#                                 │                          about one client: the seconds of its uses
#                                 └──CALLS_ANSWER── both; who does not answer in time is named, and the rest is shown
#
# Before a request, only one introduction of each client is sent. Only members are asked that can answer. A client shows
# this by its introduction, a worker by a metric: a member of an earlier release would take the question for an error.


class CallLists(SchedulerPlugin):
    """Knows who the clients are, and asks all members. It keeps no calls."""

    name = "skyward-call-lists"

    def __init__(self) -> None:
        self._who: dict[str, dict[str, Any]] = {}
        """By the id of a client: how it has introduced itself."""
        self._answers: dict[int, dict[str, Any]] = {}
        """By question: the answers by client or worker; None for those that are missing."""
        self._complete: dict[int, asyncio.Event] = {}
        self._asked = 0
        self._scheduler: Any = None  # Dask's types say too little

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operations to the scheduler."""
        self._scheduler = scheduler
        scheduler.handlers.update(
            {
                INTRODUCE: self.introduce,
                LIST_CALLS: self.list_calls,
                LIST_STACKS: self.list_stacks,
                END_CLIENT: self.end_client,
                BUSY_TIMES_NOW: self.busy_times_now,
            }
        )
        streams: dict[str, Any] = scheduler.stream_handlers
        streams[CALLS_ANSWER] = self._answered

    def introduce(self, client: str, who: dict[str, Any]) -> None:
        """Note who a client is: its topic, user, process and work."""
        self._who[client] = who

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget a client whose connection has ended."""
        self._who.pop(client, None)

    async def list_calls(self, *, with_stacks: bool = False, seconds: float = LISTING_SECONDS) -> dict[str, Any]:
        """Ask all members, for so many seconds at most; return their answers, None for those that have not answered.

        `others` are workers of an earlier release, `detached` the records of detached calls, and `now` is this clock.
        """
        clients = [client for client in self._who if client in self._scheduler.clients]
        workers = self._workers()
        answers = await self._ask(clients, list(workers), {"with_stacks": with_stacks}, seconds=seconds)
        memory = self._scheduler.plugins[CallMemory.name]
        return {
            "clients": [{**self._who.get(client, {}), "calls": answers[client]} for client in clients],
            "workers": [{"name": name, "slots": answers[address]} for address, name in workers.items()],
            "others": [str(one.name) for one in self._scheduler.workers.values() if one.address not in workers],
            "detached": memory.detached.calls(),
            "now": time.time(),
        }

    async def list_stacks(self, *, seconds: float = LISTING_SECONDS) -> list[tuple[str, Any]]:
        """Ask all workers for the stacks of their slots, for so many seconds at most; return them by the workers'
        names, None for those that have not answered.
        """
        workers = self._workers()
        answers = await self._ask([], list(workers), {"of_all_slots": True}, seconds=seconds)
        return [(name, answers[address]) for address, name in workers.items()]

    def _workers(self) -> dict[str, str]:
        """Return the names of the workers that answer, by their addresses."""
        return {
            address: str(worker.name)
            for address, worker in self._scheduler.workers.items()
            if worker.metrics.get(ANSWERS_CALLS)
        }

    async def end_client(self, *, topic: str, seconds: float = ENDING_SECONDS) -> tuple[bool, list[Any]]:
        """End the calls of another client, and wait until they hold no slot, for so many seconds at most.

        Return whether that is so, and for each worker its instance and how long it was busy for this client, by use.
        Workers that do not answer hold none that are known.
        """
        self._scheduler.plugins[CallMemory.name].end(topic)
        until = time.monotonic() + seconds
        while True:
            workers = [address for address, one in self._scheduler.workers.items() if one.metrics.get(ANSWERS_CALLS)]
            question = {"topic": topic}
            answers = await self._ask([], workers, question, seconds=max(0.1, until - time.monotonic()))
            known = [answer for answer in answers.values() if answer is not None]
            is_free = not any(is_running for is_running, *_ in known)
            if is_free or time.monotonic() > until:
                return is_free, [spent for _, *spent in known]
            await asyncio.sleep(LOOK_SECONDS)

    async def busy_times_now(self, *, topic: str, seconds: float) -> list[Any]:
        """Return what `CallMemory.skyward_busy_times` does as of now, of the workers that answer in so many seconds."""
        workers = [address for address, one in self._scheduler.workers.items() if one.metrics.get(ANSWERS_CALLS)]
        answers = await self._ask([], workers, {"topic": topic, "with_times": True}, seconds=seconds)
        return [answer for answer in answers.values() if answer is not None]

    async def _ask(
        self, clients: Sequence[str], workers: Sequence[str], question: Mapping[str, Any], *, seconds: float
    ) -> dict[str, Any]:
        self._asked += 1
        request = self._asked
        self._answers[request] = dict.fromkeys([*clients, *workers])
        complete = self._complete[request] = asyncio.Event()
        if not self._answers[request]:
            complete.set()
        message = {"op": CALLS_QUESTION, "request": request, **question}
        self._scheduler.send_all(
            {client: [dict(message)] for client in clients}, {worker: [dict(message)] for worker in workers}
        )
        try:
            async with asyncio.timeout(seconds):
                await complete.wait()
        except TimeoutError:
            pass
        finally:
            answers = self._answers.pop(request)
            del self._complete[request]
        return answers

    def _answered(self, request: int, answer: Any, client: str = "", worker: str = "") -> None:
        answers = self._answers.get(request, {})
        if (client or worker) in answers:
            answers[client or worker] = answer
            if None not in answers.values():
                self._complete[request].set()


# Held nodes, in the scheduler: they get no more calls; calls that run or wait there continue. `free` undoes it.
#
# A held node still takes a call that may run nowhere else: it was on its way there when the node was held.
#
# For Dask a held worker is paused. The worker itself is not informed, because it would then begin none of its waiting
# calls. A worker process that restarts has another address and is not held. So the client repeats the request, and gets
# the number of calls left.


class NodeHolding(SchedulerPlugin):
    """Adds the operations HOLD, FREE and KEPT to the scheduler, and reports held workers on `topic`."""

    name = "skyward-holding"

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._scheduler: Any = None  # Dask's types say too little
        self._left: dict[str, int] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operation to the scheduler."""
        self._scheduler = scheduler
        scheduler.handlers.update({HOLD: self.hold, FREE: self.free, KEPT: self.kept})

    def hold(self, rank: int) -> int:
        """Give the workers of a node no more calls; return how many batches of any client they have left.

        Idempotent.
        """
        workers = self._workers_at(rank)
        for worker in workers:
            self._scheduler.handle_worker_status_change(Status.paused, worker, f"skyward-hold-{rank}")
            self._let_in(worker)
            left = self._left_at(worker)
            if self._left.get(worker.address) != left:
                self._left[worker.address] = left
                self._scheduler.log_event(self._topic, encode_news(WorkerHeld(worker.address, left)))
        return sum(map(self._left_at, workers))

    def _let_in(self, worker: Any) -> None:
        """Let a held worker run the tasks that no other worker may run; otherwise they would never run."""
        if any(worker.address in (task.worker_restrictions or ()) for task in self._scheduler.unrunnable):
            for status in (Status.running, Status.paused):
                self._scheduler.handle_worker_status_change(status, worker, "skyward-let-in")

    def free(self, rank: int) -> None:
        """Give the workers of a node calls again. Idempotent."""
        for worker in self._workers_at(rank):
            if worker.status is Status.paused:
                self._scheduler.handle_worker_status_change(Status.running, worker, f"skyward-free-{rank}")
            self._left.pop(worker.address, None)
            self._scheduler.log_event(self._topic, encode_news(WorkerFree(str(worker.name), worker.address)))

    def kept(self, rank: int) -> int:
        """Return how many values a node has that a client may ask for: results of tasks that no client has released,
        other than small ones of detached calls, which the scheduler has; large ones of detached calls. Each client
        that fetches from the node, or sends arguments there, counts too.
        """
        calls = cast("CallMemory", self._scheduler.plugins[CallMemory.name])
        workers = self._workers_at(rank)
        keys = [str(task.key) for worker in workers for task in worker.has_what]
        return sum(not is_detached(key) for key in keys) + calls.detached.results_at(rank) + calls.needs(workers)

    def _workers_at(self, rank: int) -> list[Any]:
        return [
            worker for worker in self._scheduler.workers.values() if str(worker.name).partition("-")[0] == str(rank)
        ]

    @staticmethod
    def _left_at(worker: Any) -> int:
        return len(worker.processing) + worker.metrics.get(OLDER, 0)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Forget a worker that has left."""
        self._left.pop(worker, None)


# The values of a pool's secrets on its nodes: only in memory, from scheduler to workers to runners, over the pool's
# TLS.
#
# The pool's owner sends them to the scheduler on each new connection, before the first call. A worker gets them from
# the scheduler before its first batch, and sends them to each runner with its first call. So replaced nodes,
# restarted workers and a new head get them too, and an attached client needs none. They are never written to a file,
# nor to the environment of a process that starts.


class SecretStore(SchedulerPlugin):
    """Keeps the values in the scheduler, still pickled: the scheduler does not use them."""

    name = "skyward-secrets"

    def __init__(self) -> None:
        self._packed: Any = None
        self._are_here = asyncio.Event()

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operations to the scheduler."""
        streams: dict[str, Any] = scheduler.stream_handlers
        streams[PUT_SECRETS] = self.put
        scheduler.handlers[GET_SECRETS] = self.get

    def put(self, client: str, secrets: Any) -> None:
        """Take the values from the pool's owner."""
        self._packed = secrets
        self._are_here.set()

    async def get(self) -> Any:
        """Wait for the values and return them; None if they do not come."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._are_here.wait()
        except TimeoutError:
            return None
        return self._packed
