"""Dask on a node: runs the scheduler (`scheduler.py`) and the workers (`pool_worker.py`) in their processes.

A Dask worker stands for one worker of the pool (a MIG partition, or the whole node) and has one thread for each slot.
The thread does not run the user's code: it drives a runner process, so that neither a crash nor code that holds the
interpreter lock can stall Dask.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any, NoReturn, cast

import dask.config  # noqa: TID253 - this module is imported on nodes only
import uvloop
from distributed import Security  # noqa: TID253
from distributed.core import Status, rpc  # noqa: TID253

from skyward_core.wire.protocol import POOL_TOPIC, STALLED_SECONDS
from skyward_core.wire.settings import NodeSettings, write_atomically
from skyward_core.worker.calls import CallMemory
from skyward_core.worker.dask_pages import DaskPages
from skyward_core.worker.pool_worker import PoolWorker, Slots, SlotThreadPoolExecutor
from skyward_core.worker.scheduler import (
    SILENT_SECONDS,
    CallLists,
    NodeHolding,
    PoolScheduler,
    PromptMessages,
    SecretStore,
)

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
    # Dask measures the delay of its event loop fifty times a second, and its process twice. That was three quarters of
    # what an idle node computed. Late ticks are normal on a busy two-core machine.
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.limit": "30s",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.comm.retry.count": 0,
    # A worker that is cut off must notice, end and join again, but only after the scheduler has removed it
    # (SILENT_SECONDS). Before that its name is in use. Below 11 s Dask refuses every connection.
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
            plugins=[
                PromptMessages(),
                CallMemory(settings.lease_seconds),
                NodeHolding(POOL_TOPIC),
                SecretStore(),
                CallLists(),
                DaskPages(),
            ],
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
    """Run one worker of the node in this process. It ends when it is killed, or when the scheduler is gone and the
    worker has no calls for the next one.
    """
    slots = Slots(settings, index, control, directory)
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
        if moved.done() and not slots.retained.calls:
            os._exit(LEFT)
        if not moved.done() and here.exception() is not None:
            if not slots.retained.calls:
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
        executor=SlotThreadPoolExecutor(settings.slots, thread_name_prefix="skyward-slot"),
        extensions={},  # Dask's only one is for spans: see NoSpans
    )
    worker.epoch = slots.retained.epoch
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
    """Leave the present scheduler. If that takes too long, the process ends."""
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
