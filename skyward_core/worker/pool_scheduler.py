"""The pool's Dask scheduler, on the head: takes batches, removes silent workers, reports who joins and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import Mapping
from typing import Any, cast

from dask.task_spec import Task  # noqa: TID253 - this module is imported on nodes
from distributed import Scheduler  # noqa: TID253
from distributed.core import error_message  # noqa: TID253
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253
from distributed.protocol.serialize import deserialize  # noqa: TID253
from distributed.scheduler import DEFAULT_EXTENSIONS, heartbeat_interval  # noqa: TID253
from distributed.spans import SpanMetadata  # noqa: TID253
from distributed.utils import offload  # noqa: TID253
from distributed.versions import get_versions  # noqa: TID253

from skyward_core.worker.calls import PREFIX, CallMemory, instance_of
from skyward_core.worker.detached_calls import KEEP, RUN_ID
from skyward_core.worker.pool_worker import run_batch
from skyward_core.worker.scheduler_messages import (
    POOL_TOPIC,
    RUN_BATCH,
    STALLED_SECONDS,
    START_DETACHED,
    WorkerJoined,
    WorkerLeft,
)
from skyward_core.worker.streams import send_at_once
from skyward_core.worker.wire import Sealed

SILENT_SECONDS = 14.0  # a worker that is silent for longer is lost; after a cut of 12 s TCP sends again at 12.6 s
SILENCE_CHECK_SECONDS = 1.0


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
            message = error_message(error)
            self.report(
                {"op": "task-erred", "key": key, "exception": message["exception"], "traceback": message["traceback"]},
                client=client,
            )

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
        scheduler.log_event(POOL_TOPIC, pickle.dumps(news))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        scheduler.log_event(POOL_TOPIC, pickle.dumps(WorkerLeft(self._names.pop(worker, ""), worker)))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        def at_once() -> None:
            if client in scheduler.client_comms:
                send_at_once(scheduler.client_comms[client])

        asyncio.get_running_loop().call_soon(at_once)  # Dask makes the stream right after it has called its plug-ins
