"""Held nodes, in the scheduler: they get no more calls; calls that run or wait there continue. `free` undoes it.

A held node still takes a call that may run nowhere else: it was on its way there when the node was held.

For Dask a held worker is paused. The worker itself is not informed, because it would then begin none of its waiting
calls. A worker process that restarts has another address and is not held. So the client repeats the request, and gets
the number of calls left.
"""

from __future__ import annotations

import pickle
from typing import Any, cast

from distributed import Scheduler  # noqa: TID253 - with calls.py, node.py and streams.py stands in the scheduler
from distributed.core import Status  # noqa: TID253
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.worker.calls import CallMemory
from skyward_core.worker.detached_calls import is_detached
from skyward_core.worker.retained_batches import OLDER, WorkerFree
from skyward_core.worker.scheduler_messages import WorkerHeld

HOLD, FREE, KEPT = "skyward_hold", "skyward_free", "skyward_kept"


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
                self._scheduler.log_event(self._topic, pickle.dumps(WorkerHeld(worker.address, left)))
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
            self._scheduler.log_event(self._topic, pickle.dumps(WorkerFree(str(worker.name), worker.address)))

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
