"""Run a pool of played nodes in a separate process: the cloud, the SSH servers, the real scheduler and the workers.

`_nodes.py` has the cloud, and `tests/fake_nodes.py` the nodes. Here each node also runs batches of calls. The Dask
worker, the task `run_batch`, its reports and what a worker keeps are the product's own. Only the runner is played: a
call returns its first argument, at once or after `--call-seconds`, and no process is forked.

Scheduler, workers, SSH servers and cloud have a thread each, so that the kernel counts their processor time apart.
They share one interpreter lock: together they have one core.

It reads commands from stdin, one JSON object a line, and answers each with one: `times` returns the processor seconds of
each thread, and how many calls have run; `lose` ends a number of nodes, those of the highest ranks, so many
seconds after so many calls have run, and returns at once; `lost` returns the monotonic time at which they ended, or null;
`asked` returns how often nodes were asked for what. It ends with its stdin.

    python -m benchmarks._played_pool --call-seconds 0.2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import pickle
import queue
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter as Counted
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import dask.config
import uvloop
from distributed import Worker

from benchmarks._nodes import Rented
from skyward_core.wire.messages import Batch, Outcome, OutcomeKind, Parcel
from skyward_core.wire.protocol import POOL_TOPIC
from skyward_core.wire.settings import NodeSettings
from skyward_core.worker.calls import CallMemory
from skyward_core.worker.node import DASK_CONFIG, security
from skyward_core.worker.pool_worker import Slots
from skyward_core.worker.scheduler import CallLists, NodeHolding, PoolScheduler, PromptMessages, SecretStore
from skyward_core.worker.slot import News, Slot
from tests.fake_nodes import FakeNode, FakeNodes, Played, slowly

FIRST_NETWORK, NETWORKS = 100, 100
MOST_THREADS = 64
"""How many batches run at once, in all workers, if calls take no time. A call that takes time has its own thread."""
JOINING_AT_ONCE = 32
"""How many workers connect at once. On real machines each has its own processor. Here they share a loop, and each
connection has ten seconds (DASK_CONFIG)."""
PLAYED_CONFIG = DASK_CONFIG | {
    # each worker would measure this one process: 500 times a second with 1,000 nodes
    "distributed.admin.system-monitor.interval": "1h",
    "distributed.admin.tick.interval": "1h",
}


class Counter:
    """How many calls have run in all workers. `at` calls a function once when there are so many."""

    def __init__(self) -> None:
        self.ran = 0
        self._lock = threading.Lock()
        self._waiting: tuple[int, Callable[[], object]] | None = None

    def add(self, count: int) -> None:
        with self._lock:
            self.ran += count
            due = self._waiting
            if due is None or self.ran < due[0]:
                return
            self._waiting = None
        due[1]()

    def at(self, calls: int, work: Callable[[], object]) -> None:
        with self._lock:
            self._waiting = (self.ran + calls, work)


class PlayedSlot:
    """A slot without a runner. It has what `Slots` and `run_batch` use of a `Slot`."""

    pid = 0
    busy_since = None
    ran_seconds = 0.0

    def __init__(self, call_seconds: float, counter: Counter) -> None:
        self._call_seconds = call_seconds
        self._counter = counter
        self.is_outdated = False

    def run(self, batch: Batch, report: Callable[[list[News]], None]) -> None:
        if not self._call_seconds:
            report([_outcome(call.call_id, call.arguments, 0.0) for call in batch.calls])
            self._counter.add(len(batch.calls))
            return
        for call in batch.calls:
            time.sleep(self._call_seconds)
            report([_outcome(call.call_id, call.arguments, self._call_seconds)])
            self._counter.add(1)

    @property
    def ran_by_topic(self) -> dict[str, float]:
        return {}

    def cancel(self, call_id: str) -> None:
        """A played call cannot be stopped."""

    def give_credit(self, call_id: str, below: int) -> None:
        """Played calls yield no items."""

    def close(self) -> None:
        """There is no process."""


def _outcome(call_id: str, arguments: Parcel, seconds: float) -> Outcome:
    """Return the first argument as the result."""
    args, *_ = pickle.loads(arguments.data)
    return Outcome(call_id, OutcomeKind.RESULT, Parcel(pickle.dumps(args[0], protocol=5)), seconds=seconds)


class PlayedSlots(Slots):
    """The slots of a played worker: no runners, no sampling, no socket for locks."""

    def __init__(self, settings: NodeSettings, directory: Path, call_seconds: float, counter: Counter) -> None:
        super().__init__(replace(settings, metrics_interval_seconds=None), 0, cast(Any, None), directory)
        slots = [PlayedSlot(call_seconds, counter) for _ in range(settings.slots)]
        self._all.extend(cast("list[Slot]", slots))
        for slot in self._all:
            self._idle.put(slot)

    def setup(self, worker: Worker) -> None:
        self._loop = asyncio.get_running_loop()  # so that the base class starts no runners
        super().setup(worker)


class PlayedWorker(Worker):
    """Dask's worker without the process that ends with it."""

    epoch = 0

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        return await super().close(timeout=0, executor_wait=False, nanny=False, reason=kwargs.get("reason", ""))


class SharedThreadPoolExecutor(ThreadPoolExecutor):
    """The threads of all workers. A worker that ends leaves them running. Dask knows the kind of executor by its name."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing."""


class Loop:
    """An event loop in a thread of this name."""

    def __init__(self, name: str) -> None:
        self.loop = uvloop.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and return its result; to be awaited in another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


class Members:
    """The scheduler and the workers of the pool."""

    def __init__(self, folder: str, call_seconds: float, threads: int) -> None:
        self._folder = folder
        self._call_seconds = call_seconds
        self._at_scheduler, self._at_workers = Loop("scheduler"), Loop("workers")
        self._threads = SharedThreadPoolExecutor(threads, "calls")
        self._schedulers: list[PoolScheduler] = []
        self._generations: dict[str, int] = {}
        self.counter = Counter()
        self.workers: dict[str, PlayedWorker] = {}
        """By id of the machine."""
        self.ranks: dict[str, int] = {}
        """By id of the machine; those that have not ended."""
        self.failed_joins = 0
        self.removed = 0
        """How many workers have ended after they had joined: those of lost machines, and those that seemed silent."""
        self._joining = asyncio.Semaphore(JOINING_AT_ONCE)

    async def serve(self, node: FakeNode, settings: NodeSettings) -> None:
        """Do what a node does with its settings: join the pool, and begin it before if it is the head."""
        if self._is_current(settings):
            return
        self._generations[settings.instance_id] = settings.generation
        if settings.scheduler is None:
            address = await self._at_scheduler.run(self._schedule(settings))
            node.say(f"::skyward head {settings.generation} {address}")
            settings = replace(settings, scheduler=address)
        joined = asyncio.run_coroutine_threadsafe(self._keep_joined(settings), self._at_workers.loop)
        joined.add_done_callback(_print_error)

    def end(self, instance_id: str) -> None:
        """End a machine: its connections close."""
        self.ranks.pop(instance_id, None)
        if (worker := self.workers.pop(instance_id, None)) is not None:
            asyncio.run_coroutine_threadsafe(_end(worker), self._at_workers.loop)

    async def _schedule(self, settings: NodeSettings) -> str:
        scheduler = await PoolScheduler(
            host=settings.host,
            port=settings.scheduler_port,
            protocol="tls",
            security=security(settings),
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            plugins=[
                PromptMessages(),
                CallMemory(settings.lease_seconds),
                NodeHolding(POOL_TOPIC),
                SecretStore(),
                CallLists(),
            ],
        )
        self._schedulers.append(scheduler)
        return str(scheduler.address)

    async def _keep_joined(self, settings: NodeSettings) -> None:
        """Join, and join anew as another worker when that failed or the scheduler removed the worker, as the supervisor
        of a real node would.
        """
        self.ranks[settings.instance_id] = settings.rank
        while settings.instance_id in self.ranks and self._is_current(settings):
            slots = PlayedSlots(settings, Path(self._folder), self._call_seconds, self.counter)
            worker = self._worker(settings, slots)
            slots.worker = cast(Any, worker)
            try:
                async with self._joining:
                    await worker
            except (OSError, TimeoutError, RuntimeError):  # a busy scheduler: many join at the same time
                self.failed_joins += 1
                with contextlib.suppress(Exception):
                    await worker.close(reason="it could not join")
                continue
            self.workers[settings.instance_id] = worker
            slots.announce()
            await worker.finished()
            self.removed += 1

    def _is_current(self, settings: NodeSettings) -> bool:
        return self._generations.get(settings.instance_id) == settings.generation

    def _worker(self, settings: NodeSettings, slots: PlayedSlots) -> PlayedWorker:
        return PlayedWorker(
            settings.scheduler,
            host=settings.host,
            name=f"{settings.rank}-0",
            nthreads=settings.slots,
            executor=self._threads,
            memory_limit=0,
            security=security(settings),
            local_directory=self._folder,
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            plugins=(slots,),
            extensions={},
        )


def _print_error(joined: Future[None]) -> None:
    """Print why a worker does not join any more: nobody waits for it."""
    if not joined.cancelled() and (error := joined.exception()) is not None:
        traceback.print_exception(error)


async def _end(worker: PlayedWorker) -> None:
    for callback in worker.periodic_callbacks.values():
        callback.stop()
    if (comm := worker.batched_stream.comm) is not None:
        comm.abort()
    with contextlib.suppress(Exception):
        await worker.close(reason="its machine has ended")


class Cloud(Rented):
    """Each droplet is a played node."""

    def __init__(self, nodes: FakeNodes, members: Members) -> None:
        super().__init__(nodes)
        # two benchmarks may run at the same time, and both have a droplet with the first number
        self.network = f"127.{FIRST_NETWORK + os.getpid() % NETWORKS}"
        self._members = members
        self.lost_at: float | None = None

    def node_requests(self) -> Counted[str]:
        """Return how often nodes were asked for what."""
        return Counted(what for node in list(self._nodes.nodes.values()) for what in list(node.asked))

    def lose(self, count: int, later_seconds: float) -> None:
        """The cloud takes machines away: those of the highest ranks.

        It waits before: calls of equal length end together, and their nodes have none just then.
        """
        time.sleep(later_seconds)
        ranks = self._members.ranks
        lost = sorted(ranks, key=lambda instance_id: ranks[instance_id])[-count:]
        with self.lock:
            for instance_id in lost:
                self.droplets.pop(int(instance_id), None)
        for instance_id in lost:
            self._members.end(instance_id)
            self._nodes.end(instance_id)
        self.lost_at = time.monotonic()


def thread_seconds() -> dict[str, float]:
    """Return the processor seconds of this process by thread; threads of one name, without its number, together.

    The first field of schedstat in proc(5), in nanoseconds. Threads that have ended are not among them.
    """
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        name = thread.name.rpartition("_")[0] or thread.name
        with contextlib.suppress(OSError, TypeError):
            spent = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
            seconds[name] = seconds.get(name, 0.0) + spent
    return seconds


def answer(
    command: dict[str, Any], cloud: Cloud, members: Members, jobs: queue.SimpleQueue[Callable[[], object]]
) -> Any:
    match command["op"]:
        case "times":
            return {
                "threads": thread_seconds(),
                "process": time.process_time(),
                "ran": members.counter.ran,
                "failed_joins": members.failed_joins,
                "removed": members.removed,
            }
        case "lose":
            members.counter.at(
                command["after"], lambda: jobs.put(lambda: cloud.lose(command["nodes"], command["later"]))
            )
            return None
        case "asked":  # what nodes were asked for: more logins than nodes are tries that failed
            return cloud.node_requests()
        case "lost":
            return cloud.lost_at
        case other:
            raise ValueError(other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call-seconds", type=float, default=0.0, help="how long each call takes")
    parser.add_argument("--threads", type=int, default=MOST_THREADS, help="how many batches run at once")
    options = parser.parse_args()
    for name in ("distributed", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    folder = tempfile.mkdtemp()
    jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    threading.Thread(target=lambda: [jobs.get()() for _ in iter(int, 1)], name="jobs", daemon=True).start()
    with dask.config.set(PLAYED_CONFIG):
        members = Members(folder, options.call_seconds, options.threads)
        nodes = FakeNodes(Played(), before=slowly(0), serve=members.serve)
        cloud = Cloud(nodes, members).serve()
        print(json.dumps({"url": cloud.url}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), cloud, members, jobs)), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if nodes.unknown:
        print(f"the nodes received commands that they do not know: {nodes.unknown[:3]}", file=sys.stderr, flush=True)
    os._exit(1 if nodes.unknown else 0)


if __name__ == "__main__":
    main()
