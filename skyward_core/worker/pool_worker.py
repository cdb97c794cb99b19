"""A pool's Dask worker, its slots, and the task that runs a batch in a slot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast, override

from distributed import Worker, get_worker  # noqa: TID253 - this module is imported on nodes
from distributed.core import Status  # noqa: TID253
from distributed.diagnostics.plugin import WorkerPlugin  # noqa: TID253
from distributed.threadpoolexecutor import ThreadPoolExecutor  # noqa: TID253

from skyward_core.wire.masking import SecretValues
from skyward_core.wire.messages import Batch, Outcome, Parcel, Sealed
from skyward_core.wire.protocol import (
    ANSWERS_CALLS,
    BUSY_TIMES,
    CALLS_QUESTION,
    CANCEL,
    CREDIT,
    GET_SECRETS,
    OLDER,
    POOL_TOPIC,
    RELEASE,
    REPEAT_REPORTS,
    WorkerFree,
    answer_of,
)
from skyward_core.wire.reports import encode_news
from skyward_core.wire.settings import NodeSettings
from skyward_core.wire.streams import ReportedOutcomes, send_at_once
from skyward_core.worker.detached_calls import DROP_RESULT
from skyward_core.worker.metrics import Sampler
from skyward_core.worker.retained_batches import RetainedBatches
from skyward_core.worker.runner_process import RunnerFactory
from skyward_core.worker.slot import News, Slot
from skyward_core.worker.stacks import stacks_of
from skyward_core.worker.topic_seconds import WorkerTime, added_up

PLUGIN = "skyward-slots"
THREAD_AGAIN_SECONDS = 0.5
"""After so long a thread that the system has refused is tried again."""


class PoolWorker(Worker):
    """Dask's worker. Its process ends with it, unless it keeps calls; the supervisor starts another, which joins the
    pool again.

    Dask's worker waits up to 30 s for running calls. This one ends them, or lets them run on and reports them to
    another head. It is paused from the start while its slots have calls from an earlier head.
    """

    is_leaving = False
    """Whether it leaves for another head."""
    epoch = 0
    """The number of its scheduler, as in `RetainedBatches`."""

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        """Leave the pool: at a request, cut off from the scheduler, or removed by it."""
        if self.status not in {Status.running, Status.paused, Status.closing_gracefully}:
            return await super().close(*args, **kwargs)
        slots = cast(Slots, self.plugins[PLUGIN])
        is_to_stay = self.is_leaving or bool(slots.settings.keeps_calls and slots.retained.calls)
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


class SlotThreadPoolExecutor(ThreadPoolExecutor):
    """The threads that wait for the slots of a worker. If the system refuses one it is started later: Dask would count
    it as started, and its call would wait for ever. Dask knows an executor of threads by the name of its class.
    """

    @override
    def _adjust_thread_count(self) -> None:
        started = set(self._threads)
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            self._threads.intersection_update(started)
            print(f"skyward: a thread for a call is started later: {error}", flush=True)
            asyncio.get_running_loop().call_later(THREAD_AGAIN_SECONDS, self._adjust_thread_count)


class Slots(WorkerPlugin):
    """The slots of one worker and its metrics. It owns both; `end` ends them."""

    name = PLUGIN

    def __init__(self, settings: NodeSettings, index: int, control: socket.socket, directory: Path) -> None:
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
        self._telling: set[asyncio.Task[None]] = set()
        """The answers that wait for stacks."""
        self.worker: PoolWorker | None = None
        self.is_attached = False
        """Whether Dask's tasks belong to the present scheduler.

        A worker that closes frees tasks too, without a client's request.
        """
        self.retained = RetainedBatches(f"{settings.instance_id}/{index}-{os.getpid()}", keeps=settings.keeps_calls)

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
        worker.stream_handlers[REPEAT_REPORTS] = self.announce
        worker.stream_handlers[RELEASE] = self.release
        worker.stream_handlers[CREDIT] = self.give_credit
        worker.stream_handlers[DROP_RESULT] = self.drop_result
        worker.stream_handlers[CALLS_QUESTION] = self.tell_calls
        worker.metrics[BUSY_TIMES] = self.busy_time
        worker.metrics[ANSWERS_CALLS] = lambda _: True
        worker.metrics[OLDER] = lambda _: len(self._older.intersection(self.retained.running))
        interval = self.settings.metrics_interval_seconds
        if self.index == 0 and interval is not None:
            settings = self.settings
            self._sampler = Sampler(
                lambda sample: worker.log_event(POOL_TOPIC, encode_news(sample)),
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
        if finish in {"released", "forgotten"} and isinstance(key, str) and self.is_attached:
            self.retained.release(key)

    async def next_settings(self) -> NodeSettings:
        """Wait for the settings of the node's next head; of several, return the last."""
        settings = await self._next_settings.get()
        while not self._next_settings.empty():
            settings = self._next_settings.get_nowait()
        return settings

    def move(self, settings: NodeSettings) -> None:
        """Use the settings of the node's next head. Each runner is replaced when its batch has ended."""
        self.settings = settings
        self._older = set(self.retained.running)
        for slot in self._all:
            slot.is_outdated = True

    def detach(self) -> None:
        """Report and release nothing more: the scheduler is gone."""
        self.is_attached = False
        self.retained.detach()

    @property
    def has_older_calls(self) -> bool:
        """Whether slots have batches from an earlier head."""
        return bool(self._older.intersection(self.retained.running))

    def announce(self) -> None:
        """Announce this worker's calls to the scheduler, and repeat their reports. In Dask's loop."""
        worker = self.worker
        assert worker is not None
        self.is_attached = True
        self.retained.attach(
            str(worker.name), worker.address, POOL_TOPIC, worker.log_event, is_paused=self.has_older_calls
        )
        self._free()

    def release(self, calls: Iterable[str]) -> None:
        """Forget these calls: the client has their outcomes, or does not want them."""
        self.retained.release_calls(list(calls))

    def ended(self, key: str) -> None:
        """A batch has ended, and its slot is idle. Called from the thread that drove it."""
        self.retained.end(key)
        if key in self._older and self._loop is not None:
            self._loop.call_soon_threadsafe(self._free)

    def _free(self) -> None:
        """Take calls again when those from the earlier head have ended."""
        worker = self.worker
        if worker is not None and worker.status is Status.paused and self._older and not self.has_older_calls:
            self._older.clear()
            worker.status = Status.running
            worker.log_event(POOL_TOPIC, encode_news(WorkerFree(str(worker.name), worker.address)))

    def furnish(self, worker: Worker) -> None:
        """Get the pool's secrets before a call runs, in a thread of the worker.

        Raises LookupError or OSError if that fails.
        """
        with self._furnishing:
            if self._is_furnished:
                return
            asking = asyncio.run_coroutine_threadsafe(
                secrets_from(worker.scheduler, self.settings.secret_names), cast(Any, worker.loop).asyncio_loop
            )
            secrets = asking.result()
            for slot in self._all:
                slot.furnish(secrets)
            self._is_furnished = True

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the scheduler. Raises OSError without one."""
        if self.worker is not None and self.is_attached:
            self.worker.batched_stream.send(message)

    def cancel(self, calls: Iterable[str]) -> None:
        """Stop the calls of these ids in all slots of this worker."""
        calls = list(calls)
        for slot in self._all:
            for call_id in calls:
                slot.cancel(call_id)

    def give_credit(self, credit: Mapping[str, int]) -> None:
        """Let streaming calls go on: by call, the number below which items may be yielded."""
        for slot in self._all:
            for call_id, below in credit.items():
                slot.give_credit(call_id, below)

    def drop_result(self, path: str) -> None:
        """Remove the file of a result that was forgotten, if it is one of this node's."""
        if Path(path).parent in map(Path, self.settings.value_directories):
            Parcel(b"", (), path).release()

    def busy_time(self, _: Worker | None) -> WorkerTime:
        """Return how long calls have kept the slots busy, running ones included; each heartbeat sends it to the
        scheduler.
        """
        return (
            self.settings.instance_id,
            f"{self.index}-{os.getpid()}",
            sum(slot.ran_seconds for slot in self._all),
            added_up(slot.ran_by_topic for slot in self._all),
        )

    def processes(self) -> list[tuple[int, float | None]]:
        """Return the process of each slot, and for how many seconds its batch has run; None for an idle one."""
        now = time.monotonic()
        return [(slot.pid, None if (since := slot.busy_since) is None else now - since) for slot in self._all]

    def tell_calls(
        self,
        request: int,
        *,
        with_stacks: bool = False,
        topic: str = "",
        with_times: bool = False,
        of_all_slots: bool = False,
    ) -> None:
        """Send the scheduler the calls in the slots, what one client has had (`CallLists`), with times as a `BusyTime`,
        or the stacks of all slots. In Dask's loop, which goes on meanwhile.
        """
        if topic:
            its = [slot.ran_for(topic) for slot in self._all]
            with contextlib.suppress(OSError):  # the scheduler is gone, and so is its question
                is_running, seconds = any(runs for runs, _ in its), added_up(seconds for _, seconds in its)
                instance_id, process, total, _ = self.busy_time(None)
                answer = [instance_id, process, total, seconds] if with_times else [is_running, instance_id, seconds]
                self._send(answer_of(request, answer))
            return
        told = self._tell_stacks(request) if of_all_slots else self._tell_calls(request, with_stacks=with_stacks)
        telling = asyncio.get_running_loop().create_task(told)
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell_calls(self, request: int, *, with_stacks: bool) -> None:
        running = [(number, slot.pid, slot.running) for number, slot in enumerate(self._all)]
        busy = [(number, pid, call) for number, pid, call in running if call is not None]
        stacks = await asyncio.gather(*(stacks_of(pid) for _, pid, _ in busy)) if with_stacks else [None] * len(busy)
        with contextlib.suppress(OSError):  # the scheduler is gone, and so is its question
            self._send(
                answer_of(request, [[*one, *call, text] for (*one, call), text in zip(busy, stacks, strict=True)])
            )

    async def _tell_stacks(self, request: int) -> None:
        slots = self.processes()
        stacks = await asyncio.gather(*(stacks_of(pid) for pid, _ in slots))
        with contextlib.suppress(OSError):  # as above
            self._send(answer_of(request, [[*slot, text] for slot, text in zip(slots, stacks, strict=True)]))

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

    def report(news: list[News]) -> None:
        outcomes.update({item.call_id: item for item in news if isinstance(item, Outcome)})
        slots.retained.report(key, slots.settings.rank, slots.settings.instance_id, tuple(news))

    slots.furnish(worker)
    slots.retained.begin(key, batch.topic, (call.call_id for call in batch.calls), epoch)
    try:
        with slots.borrowed() as slot:
            slot.run(batch, report)
    finally:
        slots.ended(key)
    return ReportedOutcomes(outcomes, slots.settings.rank, slots.settings.instance_id)


async def secrets_from(scheduler: Any, names: Collection[str]) -> SecretValues:
    """Get the values from the scheduler. Raises LookupError if some are missing."""
    found: SecretValues | None = await getattr(scheduler, GET_SECRETS)()
    if missing := [name for name in names if found is None or name not in found]:
        raise LookupError(f"the pool's secrets are not here: {', '.join(missing)}")
    return found or SecretValues()
