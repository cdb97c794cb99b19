"""Dask on a node: its scheduler, and its workers with the slots behind their threads.

A Dask worker stands for one worker of the pool (a MIG partition, or the whole node) and has one thread for each slot.
The thread does not run the user's code: it drives a runner process, so that neither a crash nor code that holds the
interpreter lock can stall Dask.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import dask.config  # noqa: TID253 - this file and cluster.py own Dask
import uvloop
from dask.task_spec import Task  # noqa: TID253
from distributed import Scheduler, Security, Worker, get_worker  # noqa: TID253
from distributed.core import Status, error_message, rpc  # noqa: TID253
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin  # noqa: TID253
from distributed.protocol.serialize import deserialize  # noqa: TID253
from distributed.scheduler import DEFAULT_EXTENSIONS, heartbeat_interval  # noqa: TID253
from distributed.spans import SpanMetadata  # noqa: TID253
from distributed.utils import offload  # noqa: TID253
from distributed.versions import get_versions  # noqa: TID253

from skyward_core.worker.calls import CANCEL, KEEP, PREFIX, RAN, Calls, Ran, detached_key
from skyward_core.worker.draining import Holding
from skyward_core.worker.metrics import Sampler
from skyward_core.worker.retained_batches import OLDER, RELEASE, TELL_KEPT, Kept, WorkerFree
from skyward_core.worker.runner_factory import RunnerFactory
from skyward_core.worker.scheduler_messages import WorkerJoined, WorkerLeft
from skyward_core.worker.secret_values import Keeping, ask_for
from skyward_core.worker.settings import NodeSettings, write_atomically
from skyward_core.worker.slot import News, Slot
from skyward_core.worker.streams import Told, send_at_once
from skyward_core.worker.wire import Batch, Outcome, Sealed

POOL_TOPIC = "skyward-pool"
PLUGIN = "skyward-slots"
RUN_BATCH = "skyward-run-batch"
"""The operation of a client's stream that makes a batch a task; see `PoolScheduler.take_batch`."""
START_DETACHED = "skyward_start_detached"
"""The operation that makes a batch a detached call; see `PoolScheduler.start_detached`."""

SILENT_SECONDS = 14.0  # a worker that is silent for longer is lost; after a cut of 12 s TCP sends again at 12.6 s
# the same for a worker with tasks of Dask's own: its event loop imports the packages that they need
STALLED_SECONDS = 120.0
SILENCE_CHECK_SECONDS = 1.0
LEFT = 72  # exit code of a worker without calls, when its node moves to another head
# for a worker with calls: how long it asks its lost scheduler for an answer, and how often
ASK_SECONDS, ASK_AGAIN_SECONDS = 5.0, 1.0
LEAVE_SECONDS = 10.0

DASK_CONFIG: dict[str, Any] = {
    "distributed.admin.low-level-log-length": 0,  # the logs would keep every message, payloads included
    "distributed.scheduler.allowed-failures": 0,  # Dask must not run a call twice by itself
    "distributed.scheduler.worker-saturation": 1.0,
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.worker.profile.enabled": False,
    # metrics.py asks the GPUs, once for each node; NVML refuses much for a MIG partition, which would end the worker
    "distributed.diagnostics.nvml": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.admin.tick.limit": "30s",  # late ticks are normal on a busy two-core machine
    "distributed.comm.retry.count": 0,
    # A worker that is cut off must notice, end and join again, but only after the scheduler has removed it
    # (SILENT_SECONDS): its name is in use until then. Below 11 s Dask refuses every connection.
    "distributed.comm.timeouts.tcp": "17s",
    # else an attempt just before the wire heals waits up to 16 s for TCP's next retry
    "distributed.comm.timeouts.connect": "10s",
    "distributed.scheduler.worker-ttl": f"{SILENT_SECONDS}s",
}

# A worker with a long import reads nothing either, and TCP must not end its connection. A worker that is cut off is
# noticed by its silence anyway.
SCHEDULER_CONFIG = DASK_CONFIG | {"distributed.comm.timeouts.tcp": f"{STALLED_SECONDS:.0f}s"}


def security(settings: NodeSettings) -> Security:
    """TLS for all traffic of the pool: the pool's certificate is authority and identity of every member."""
    pem, key = settings.tls_certificate, settings.tls_key
    return Security(
        require_encryption=True,
        tls_ca_file=pem,
        tls_scheduler_cert=pem,
        tls_scheduler_key=key,
        tls_worker_cert=pem,
        tls_worker_key=key,
        tls_client_cert=pem,
        tls_client_key=key,
    )


def run_scheduler(directory: Path, settings: NodeSettings) -> NoReturn:
    """Run the pool's scheduler in this process until it is killed.

    It writes its address to `head.json` when it listens.
    """

    async def main() -> None:
        scheduler = PoolScheduler(
            host=settings.host,
            port=settings.scheduler_port,
            protocol="tls",
            security=security(settings),
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            local_directory=str(directory),  # else it is below /tmp and outlives the node; Dask puts it on sys.path
            plugins=[Prompt(), Calls(settings.lease_seconds), Holding(POOL_TOPIC), Keeping()],
        )
        async with scheduler:
            write_atomically(directory / "head.json", str(scheduler.address))
            # for the client, which follows the node's log
            print(f"::skyward head {settings.generation} {scheduler.address}", flush=True)
            await scheduler.finished()

    with dask.config.set(SCHEDULER_CONFIG):
        uvloop.run(main())
    os._exit(0)


def run_worker(directory: Path, settings: NodeSettings, index: int, control: socket.socket) -> NoReturn:
    """Run one worker of the node in this process until it is killed, or the scheduler is gone and the worker has no
    calls for the next one.
    """
    slots = Slots(settings, index, control)
    os.environ.update(settings.workers[index])
    with dask.config.set(DASK_CONFIG):
        uvloop.run(_work(directory, slots))
    os._exit(0)


async def _work(directory: Path, slots: Slots) -> None:
    """Be a worker of one scheduler after the other; report to each the calls that came from the ones before."""
    while True:
        settings = slots.settings
        here = asyncio.create_task(_be_member(directory, slots))
        moved = asyncio.create_task(slots.next_settings())
        await asyncio.wait({here, moved}, return_when=asyncio.FIRST_COMPLETED)
        if moved.done() and not slots.kept.calls:
            os._exit(LEFT)
        if not moved.done() and here.exception() is not None:
            if not slots.kept.calls:
                here.result()
            # it could not join or stay: try again here, or at another head
            await asyncio.wait({moved}, timeout=ASK_AGAIN_SECONDS)
        elif not moved.done():  # a process without calls has ended by now
            await _await_place(slots, moved)
        await _leave(slots, here)
        if not moved.done():
            moved.cancel()
            continue
        slots.move(moved.result())
        print(
            f"skyward: worker {settings.rank}-{slots.index} goes to another head as"
            f" {slots.settings.rank}-{slots.index}",
            flush=True,
        )


async def _be_member(directory: Path, slots: Slots) -> None:
    """Join the pool and be its worker until the scheduler is gone."""
    settings, index = slots.settings, slots.index
    address = settings.scheduler or await _head_address(directory)
    worker = slots.worker = PoolWorker(
        address,
        host=settings.host,
        port=settings.worker_ports[index] if settings.worker_ports else 0,
        name=f"{settings.rank}-{index}",
        nthreads=settings.slots,
        memory_limit=0,
        security=security(settings),
        local_directory=str(directory),
        dashboard=False,
        dashboard_address="127.0.0.1:0",
        plugins=(slots,),
        extensions={},  # Dask's only one is for spans: see NoSpans
    )
    worker.epoch = slots.kept.epoch
    async with worker:
        slots.announce()
        await worker.finished()


async def _await_place(slots: Slots, moved: asyncio.Task[NodeSettings]) -> None:
    """Wait for the node's next head.

    End the process if none comes within a lease, or if the scheduler lives after all: it has removed this worker.
    """
    address = slots.worker.scheduler.address if slots.worker is not None else ""
    deadline = time.monotonic() + slots.settings.lease_seconds
    while not moved.done():
        if time.monotonic() > deadline or await _is_there(address, slots.settings):
            slots.end()
            os._exit(0)
        await asyncio.wait({moved}, timeout=ASK_AGAIN_SECONDS)


async def _is_there(address: str, settings: NodeSettings) -> bool:
    try:
        async with (
            asyncio.timeout(ASK_SECONDS),
            rpc(address, connection_args=security(settings).get_connection_args("worker")) as scheduler,
        ):
            await cast(Any, scheduler).identity()
    except (OSError, TimeoutError):  # distributed.CommClosedError is an OSError
        return False
    return True


async def _leave(slots: Slots, here: asyncio.Task[None]) -> None:
    """Leave the scheduler so far. If that takes too long, the process ends."""
    worker = slots.worker
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            if worker is None or worker.status is Status.init:
                here.cancel()
                await asyncio.wait({here})
            if worker is not None:
                worker.is_leaving = True
                await worker.close(timeout=1, executor_wait=False, nanny=False, reason="there is another head")
            await asyncio.wait({here})
    except TimeoutError:
        slots.end()
        os._exit(LEFT)


async def _head_address(directory: Path) -> str:
    path = directory / "head.json"
    while not path.exists():  # noqa: ASYNC110 - another process writes it; the supervisor ends this process with the node if the scheduler never starts
        await asyncio.sleep(0.005)
    return path.read_text()


class Silence:
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

        Of the time since the last check at most twice the interval counts: the scheduler may have slept (a laptop, a
        machine that is moved), and then the signs of life of that time are unread.
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
    """Replaces Dask's spans: Dask would begin one with each call on an idle scheduler, and keep it for ever."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Take the arguments of every extension of Dask's scheduler."""

    def observe_tasks(self, tasks: Any, **_: Any) -> None:
        """Begin no span for new tasks."""

    def heartbeat(self, worker: Any, data: Any) -> None:
        """Drop the measurements of a plain Dask worker."""


class PoolScheduler(Scheduler):
    """Dask's scheduler, with three changes: it takes batches without a graph, does not compare packages, and removes
    silent workers sooner.

    Dask warns of each package that differs, such as a client's pandas that is not in the image; the bootstrap of a node
    already makes those that matter (Python, Dask, cloudpickle) the same. And Dask checks for silent workers only once
    in `worker-ttl`, and lets fifty of them be silent for 20 s.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, extensions={**DEFAULT_EXTENSIONS, "spans": NoSpans})
        self.stream_handlers[RUN_BATCH] = self.take_batch
        self.handlers[START_DETACHED] = self.start_detached
        self._silence = Silence()
        self._checked_at = time.monotonic()
        if check := self.periodic_callbacks.get("worker-ttl"):
            check.callback_time = SILENCE_CHECK_SECONDS * 1000

    def take_batch(self, client: str, key: str, batch: bytes, annotations: dict[str, Any]) -> None:
        """Make a pickled batch a task of this key, wanted by the client, as `Client.submit` would. An error becomes the
        error of the task.

        A graph of one task costs more than all the rest of a tiny call: Dask builds, pickles, unpickles and checks it
        in another thread. A batch of a client that another one has replaced is refused: the answer to that one's
        `resume` was without it.
        """
        calls = self.plugins.get(Calls.name)
        if isinstance(calls, Calls) and calls.is_replaced(client):
            return
        try:
            self._make_task(client, key, batch, annotations)
        except Exception as error:  # if raised, it would end the client's stream, and all its other calls
            if key in self.tasks:
                self.client_desires_keys([key], client)  # a half-made task ends when the client releases it
            message = error_message(error)
            self.report(
                {"op": "task-erred", "key": key, "exception": message["exception"], "traceback": message["traceback"]},
                client=client,
            )

    def start_detached(self, call_id: str, batch: bytes, annotations: dict[str, Any]) -> None:
        """Make a pickled batch a detached call of this id.

        Idempotent: a client that has not got the answer asks again.
        """
        if cast(Calls, self.plugins[Calls.name]).skyward_call(call_id) is None:
            self._make_task(KEEP, detached_key(call_id), batch, annotations)

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
    """Tell whether a task came from a plain Dask client, and is none of our batches."""
    return not (isinstance(task.key, str) and task.key.startswith(PREFIX))


class PoolWorker(Worker):
    """Dask's worker. Its process ends with it, unless it keeps calls; the supervisor starts another, which joins the
    pool again.

    Dask's worker waits up to 30 s for running calls. This one ends them, or lets them run on and reports them to
    another head. It is paused from the start while its slots have calls from an earlier head.
    """

    is_leaving = False
    """Whether it leaves for another head."""
    epoch = 0
    """The number of its scheduler, as in `Kept`."""

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        """Leave the pool: at a request, cut off from the scheduler, or removed by it."""
        if self.status not in {Status.running, Status.paused, Status.closing_gracefully}:
            return await super().close(*args, **kwargs)
        slots = cast(Slots, self.plugins[PLUGIN])
        is_to_stay = self.is_leaving or bool(slots.settings.keeps_calls and slots.kept.calls)
        print(
            f"skyward: worker {self.name} {'has lost its scheduler' if is_to_stay else 'ends'}:"
            f" {kwargs.get('reason', 'asked to')}",
            flush=True,
        )
        if is_to_stay:
            slots.detach()
            return await super().close(timeout=1, executor_wait=False, nanny=False, reason=kwargs.get("reason", ""))
        slots.end()
        os._exit(0)

    @property
    def status(self) -> Status:
        """Dask's state of the worker."""
        return cast(Any, Worker.status).fget(self)

    @status.setter
    def status(self, value: Status) -> None:
        slots = getattr(self, "plugins", {}).get(PLUGIN)
        is_busy = value is Status.running and isinstance(slots, Slots) and slots.has_older_calls
        cast(Any, Worker.status).fset(self, Status.paused if is_busy else value)


class Prompt(SchedulerPlugin):
    """Sends messages at once that Dask would collect for some milliseconds (our calls are grouped already), and reports
    workers that join and leave.
    """

    name = "skyward-prompt"

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        send_at_once(scheduler.stream_comms[worker])
        self._names[worker] = str(scheduler.workers[worker].name)
        scheduler.log_event(POOL_TOPIC, pickle.dumps(WorkerJoined(self._names[worker], worker)))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        scheduler.log_event(POOL_TOPIC, pickle.dumps(WorkerLeft(self._names.pop(worker, ""), worker)))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        def at_once() -> None:
            if client in scheduler.client_comms:
                send_at_once(scheduler.client_comms[client])

        asyncio.get_running_loop().call_soon(at_once)  # Dask makes the stream right after it has called its plug-ins


class Slots(WorkerPlugin):
    """The slots of one worker and its metrics. It owns both; `end` ends them."""

    name = PLUGIN

    def __init__(self, settings: NodeSettings, index: int, control: socket.socket) -> None:
        self.settings = settings
        self.index = index
        self._control = control
        self._idle: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._all: list[Slot] = []
        self._sampler: Sampler | None = None
        self._furnishing = threading.Lock()
        self._is_furnished = not settings.secret_names
        self._next_settings: asyncio.Queue[NodeSettings] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._older: set[str] = set()
        """Keys of the batches from an earlier head that still have slots."""
        self.worker: PoolWorker | None = None
        self.kept_is_attached = False
        """Whether Dask's tasks belong to the present scheduler.

        A worker that closes frees tasks too, without a client's request.
        """
        self.kept = Kept(f"{settings.instance_id}/{index}-{os.getpid()}", keeps=settings.keeps_calls)

    def setup(self, worker: Worker) -> None:
        """Start the runners, if this is the first scheduler, and begin to sample."""
        if self._loop is None:
            self._loop = loop = asyncio.get_running_loop()
            factory = RunnerFactory(
                self._control, lambda settings: loop.call_soon_threadsafe(self._next_settings.put_nowait, settings)
            )
            for _ in range(self.settings.slots):
                slot = Slot(factory, self.settings.value_directories, self.settings.memory_limit_bytes)
                self._all.append(slot)
                self._idle.put(slot)
        send_at_once(worker.batched_stream)
        worker.stream_handlers[CANCEL] = self.cancel
        worker.stream_handlers[TELL_KEPT] = self.announce
        worker.stream_handlers[RELEASE] = self.release
        worker.metrics[RAN] = self.ran
        worker.metrics[OLDER] = lambda _: len(self._older.intersection(self.kept.running))
        interval = self.settings.metrics_interval_seconds
        if self.index == 0 and interval is not None:
            settings = self.settings
            self._sampler = Sampler(
                lambda sample: worker.log_event(POOL_TOPIC, pickle.dumps(sample)),
                settings.instance_id,
                settings.rank,
                interval,
            )
            self._sampler.start()

    def teardown(self, worker: Worker) -> None:
        """End the sampling; the runners may have calls for another scheduler."""
        if self._sampler is not None:
            self._sampler.stop()

    def end(self) -> None:
        """End the runners and the sampling."""
        if self._sampler is not None:
            self._sampler.stop()
        for slot in self._all:
            slot.close()

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Release a batch whose task Dask frees. Dask calls this for every step of every task."""
        if finish in {"released", "forgotten"} and isinstance(key, str) and self.kept_is_attached:
            self.kept.release(key)

    async def next_settings(self) -> NodeSettings:
        """Wait for the settings of the node's next head; of several, return the last."""
        settings = await self._next_settings.get()
        while not self._next_settings.empty():
            settings = self._next_settings.get_nowait()
        return settings

    def move(self, settings: NodeSettings) -> None:
        """Use the settings of the node's next head. Each runner is replaced when its batch has ended."""
        self.settings = settings
        self._older = set(self.kept.running)
        for slot in self._all:
            slot.is_outdated = True

    def detach(self) -> None:
        """Report and release nothing more: the scheduler is gone."""
        self.kept_is_attached = False
        self.kept.detach()

    @property
    def has_older_calls(self) -> bool:
        """Whether slots have batches from an earlier head."""
        return bool(self._older.intersection(self.kept.running))

    def announce(self) -> None:
        """Announce this worker's calls to the scheduler, and repeat their reports. In Dask's loop."""
        worker = self.worker
        assert worker is not None
        self.kept_is_attached = True
        self.kept.attach(str(worker.name), worker.address, POOL_TOPIC, worker.log_event, is_paused=self.has_older_calls)
        self._free()

    def release(self, calls: Iterable[str]) -> None:
        """Forget these calls: the client has their outcomes, or does not want them."""
        self.kept.release_calls(list(calls))

    def ended(self, key: str) -> None:
        """A batch has ended, and its slot is idle. Called from the thread that drove it."""
        self.kept.end(key)
        if key in self._older and self._loop is not None:
            self._loop.call_soon_threadsafe(self._free)

    def _free(self) -> None:
        """Take calls again when those from the earlier head have ended."""
        worker = self.worker
        if worker is not None and worker.status is Status.paused and self._older and not self.has_older_calls:
            self._older.clear()
            worker.status = Status.running
            worker.log_event(POOL_TOPIC, pickle.dumps(WorkerFree(str(worker.name), worker.address)))

    def furnish(self, worker: Worker) -> None:
        """Get the pool's secrets before a call runs, in a thread of the worker.

        Raises LookupError or OSError if that fails.
        """
        with self._furnishing:
            if self._is_furnished:
                return
            asking = asyncio.run_coroutine_threadsafe(
                ask_for(worker.scheduler, self.settings.secret_names), cast(Any, worker.loop).asyncio_loop
            )
            secrets = asking.result()
            for slot in self._all:
                slot.furnish(secrets)
            self._is_furnished = True

    def cancel(self, calls: Iterable[str]) -> None:
        """Stop the calls of these ids in all slots of this worker."""
        calls = list(calls)
        for slot in self._all:
            for call_id in calls:
                slot.cancel(call_id)

    def ran(self, _: Worker) -> Ran:
        """Return how long calls have kept the slots busy, running ones included; each heartbeat sends it to the
        scheduler.
        """
        return self.settings.instance_id, f"{self.index}-{os.getpid()}", sum(slot.ran_seconds for slot in self._all)

    @contextlib.contextmanager
    def borrowed(self) -> Generator[Slot]:
        """Lend an idle slot to the calling thread. There is one for each thread of the worker."""
        slot = self._idle.get()
        try:
            yield slot
        finally:
            self._idle.put(slot)


def run_batch(sealed: Sealed) -> Mapping[str, Outcome]:
    """The Dask task: run a batch in a slot of this worker, reporting as it goes.

    Returns the outcomes too, for a client that missed a report.
    """
    batch = cast(Batch, pickle.loads(sealed.data))
    worker = get_worker()
    slots = cast(Slots, worker.plugins[PLUGIN])
    outcomes: dict[str, Outcome] = {}
    key, epoch = str(worker.get_current_task()), cast(PoolWorker, worker).epoch

    def tell(news: list[News]) -> None:
        outcomes.update((item.call_id, item) for item in news if isinstance(item, Outcome))
        slots.kept.tell(key, slots.settings.rank, slots.settings.instance_id, tuple(news))

    slots.furnish(worker)
    slots.kept.begin(key, batch.topic, (call.call_id for call in batch.calls), epoch)
    try:
        with slots.borrowed() as slot:
            slot.run(batch, tell)
    finally:
        slots.ended(key)
    return Told(outcomes, slots.settings.rank, slots.settings.instance_id)
