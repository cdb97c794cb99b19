"""Dask on a node: its scheduler, and its workers with the slots behind their threads.

A Dask worker stands for one worker of the pool (a MIG partition, or the whole node) and has one thread for each slot. The thread does not run the
user's code: it drives a runner process, so that neither a crash nor code that holds the interpreter lock can stall Dask.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import socket
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import dask.config  # noqa: TID253 - this file and cluster.py own Dask
import uvloop
from distributed import Scheduler, Security, Worker, get_worker  # noqa: TID253
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin  # noqa: TID253
from distributed.versions import get_versions  # noqa: TID253

from skyward_core.worker.metrics import Sampler
from skyward_core.worker.settings import NodeSettings, write_atomically
from skyward_core.worker.slot import Foundry, News, Slot
from skyward_core.worker.wire import INLINE_BYTES, Batch, Ending, Outcome, Parcel, Report, Sealed

POOL_TOPIC = "skyward-pool"
PLUGIN = "skyward-slots"

DASK_CONFIG: dict[str, Any] = {
    "distributed.admin.low-level-log-length": 0,  # the logs would keep every message, payloads included
    "distributed.scheduler.allowed-failures": 0,  # a call is never run twice behind our back
    "distributed.scheduler.worker-saturation": 1.0,
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.admin.tick.limit": "30s",  # on a busy two-core machine late ticks are no news
    "distributed.comm.retry.count": 0,
}


def security(settings: NodeSettings) -> Security:
    """TLS for all traffic of the pool: one certificate, made for it, is authority and identity of every member."""
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
    """Run the pool's scheduler in this process until it is killed. Its address is written to `head.json` as soon as it listens."""

    async def main() -> None:
        scheduler = PoolScheduler(
            host=settings.host, port=0, protocol="tls", security=security(settings), dashboard=False, dashboard_address="127.0.0.1:0", plugins=[Prompt()]
        )
        async with scheduler:
            write_atomically(directory / "head.json", str(scheduler.address))
            await scheduler.finished()

    with dask.config.set(DASK_CONFIG):
        uvloop.run(main())
    os._exit(0)


def run_worker(directory: Path, settings: NodeSettings, index: int, control: socket.socket) -> NoReturn:
    """Run one worker of the node in this process until it is killed or the scheduler goes away."""
    slots = Slots(settings, index, control)

    async def main() -> None:
        address = settings.scheduler or await _head_address(directory)
        worker = Worker(
            address,
            host=settings.host,
            name=f"{settings.rank}-{index}",
            nthreads=settings.slots,
            memory_limit=0,
            security=security(settings),
            local_directory=str(directory),
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            plugins=(slots,),
        )
        async with worker:
            await worker.finished()

    os.environ.update(settings.workers[index])
    with dask.config.set(DASK_CONFIG):
        uvloop.run(main())
    os._exit(0)


async def _head_address(directory: Path) -> str:
    path = directory / "head.json"
    while not path.exists():  # noqa: ASYNC110 - another process writes it; the supervisor ends this process with the node, should the scheduler never come up
        await asyncio.sleep(0.005)
    return path.read_text()


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker, named RANK-INDEX, has joined the pool."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker has left the pool, or does not answer any more."""

    name: str
    address: str


class PoolScheduler(Scheduler):
    """Dask's scheduler, told that every client has the node's own packages.

    It would warn of each that differs, such as a client's pandas that the image has not; those that matter (Python, Dask, cloudpickle) are the same
    by the way a node is prepared.
    """

    async def add_client(self, comm: Any, client: str, versions: dict[str, Any]) -> None:
        """Take a client in, whatever it has installed."""
        await super().add_client(comm, client, {**versions, "packages": get_versions()["packages"]})


class Prompt(SchedulerPlugin):
    """Sends at once what Dask would collect for some milliseconds (our calls are grouped before they come here), and tells who comes and goes."""

    name = "skyward-prompt"

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        _send_at_once(scheduler.stream_comms[worker])
        self._names[worker] = str(scheduler.workers[worker].name)
        scheduler.log_event(POOL_TOPIC, pickle.dumps(WorkerJoined(self._names[worker], worker)))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        scheduler.log_event(POOL_TOPIC, pickle.dumps(WorkerLeft(self._names.pop(worker, ""), worker)))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        def at_once() -> None:
            if client in scheduler.client_comms:
                _send_at_once(scheduler.client_comms[client])

        asyncio.get_running_loop().call_soon(at_once)  # Dask makes the stream right after it has told its plug-ins


class Slots(WorkerPlugin):
    """The slots of one worker and its metrics. Owns both: `teardown` gives them back."""

    name = PLUGIN

    def __init__(self, settings: NodeSettings, index: int, control: socket.socket) -> None:
        self.settings = settings
        self.index = index
        self._control = control
        self._idle: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._all: list[Slot] = []
        self._sampler: Sampler | None = None

    def setup(self, worker: Worker) -> None:
        """Have the runners forked and begin to sample."""
        foundry = Foundry(self._control)
        for _ in range(self.settings.slots):
            slot = Slot(foundry, self.settings.value_directories, self.settings.memory_limit_bytes)
            self._all.append(slot)
            self._idle.put(slot)
        _send_at_once(worker.batched_stream)
        interval = self.settings.metrics_interval_seconds
        if self.index == 0 and interval is not None:
            settings = self.settings
            self._sampler = Sampler(lambda sample: worker.log_event(POOL_TOPIC, pickle.dumps(sample)), settings.instance_id, settings.rank, interval)
            self._sampler.start()

    def teardown(self, worker: Worker) -> None:
        """End the runners and the sampling."""
        if self._sampler is not None:
            self._sampler.stop()
        for slot in self._all:
            slot.close()

    def cancel(self, call_ids: set[str]) -> None:
        """Stop these calls, wherever they are on this worker."""
        for slot in self._all:
            for call_id in call_ids:
                slot.cancel(call_id)

    @contextlib.contextmanager
    def borrowed(self) -> Generator[Slot]:
        """Lend an idle slot to the calling thread. There is one for each thread of the worker."""
        slot = self._idle.get()
        try:
            yield slot
        finally:
            self._idle.put(slot)


def _send_at_once(stream: Any) -> None:
    """Take the waiting out of one of Dask's batched streams."""
    stream.interval = 0.0


def run_batch(sealed: Sealed | Batch) -> dict[str, Outcome]:
    """The Dask task: run a batch in a slot of this worker, reporting as it goes. Returns the outcomes too, for a client that missed a report."""
    batch = cast(Batch, pickle.loads(sealed.data)) if isinstance(sealed, Sealed) else sealed
    worker = get_worker()
    slots = cast(Slots, worker.plugins[PLUGIN])
    outcomes: dict[str, Outcome] = {}

    def tell(news: list[News]) -> None:
        news = [slots_fit(item, slots.settings) for item in news]
        outcomes.update((item.call_id, item) for item in news if isinstance(item, Outcome))
        report = Report(slots.settings.rank, slots.settings.instance_id, tuple(map(_summary, news)))
        worker.log_event(batch.topic, pickle.dumps(report, protocol=5))

    with slots.borrowed() as slot:
        slot.run(batch, tell)
    return outcomes


def slots_fit(item: News, settings: NodeSettings) -> News:
    """Load a large outcome into this process when the client cannot see the node's memory: Dask carries it from here."""
    if not isinstance(item, Outcome) or item.parcel.path is None or settings.client_shares_memory:
        return item
    data, buffers = item.parcel.contents()
    item.parcel.release()
    return Outcome(item.call_id, item.ending, Parcel(bytes(data), buffers), item.text, item.exit_code, item.output, item.seconds)


def _summary(item: News) -> News:
    """What goes through the scheduler: everything but large values, which the client fetches from this worker."""
    if isinstance(item, Outcome) and item.parcel.nbytes > INLINE_BYTES:
        return Outcome(item.call_id, Ending.HERE, seconds=item.seconds)
    return item


async def cancel_calls(call_ids: set[str], dask_worker: Worker) -> None:
    """Run by the client on every worker: stop these calls. A coroutine, because only those can be sent without waiting for an answer."""
    cast(Slots, dask_worker.plugins[PLUGIN]).cancel(call_ids)
