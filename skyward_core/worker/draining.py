"""Nodes that are to be given no more calls, in the scheduler: what runs there, or waits there already, goes on.

For Dask such a worker is paused; the worker itself is not told, for then it would begin none of the calls that it has.
A worker process that comes back has another address and is not held: whoever wants it held asks again, as for the
number of calls left, every now and then.
"""

from __future__ import annotations

import pickle
from typing import Any

from distributed import Scheduler  # noqa: TID253 - with calls.py, node.py and streams.py stands in the scheduler
from distributed.core import Status  # noqa: TID253
from distributed.diagnostics.plugin import SchedulerPlugin  # noqa: TID253

from skyward_core.worker.retained_batches import OLDER
from skyward_core.worker.scheduler_messages import WorkerHeld

HOLD = "skyward_hold"


class NodeHolding(SchedulerPlugin):
    """Takes up the operation HOLD; tells on `topic` what comes of it."""

    name = "skyward-holding"

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._scheduler: Any = None  # Dask's types say too little
        self._left: dict[str, int] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Take up the operation."""
        self._scheduler = scheduler
        scheduler.handlers[HOLD] = self.hold

    def hold(self, rank: int) -> int:
        """Give the workers of a node no more calls; return how many batches of calls, of whichever client, they have
        left. May be asked again.
        """
        workers = [
            worker for worker in self._scheduler.workers.values() if str(worker.name).partition("-")[0] == str(rank)
        ]
        for worker in workers:
            self._scheduler.handle_worker_status_change(Status.paused, worker, f"skyward-hold-{rank}")
            left = self._left_at(worker)
            if self._left.get(worker.address) != left:
                self._left[worker.address] = left
                self._scheduler.log_event(self._topic, pickle.dumps(WorkerHeld(worker.address, left)))
        return sum(map(self._left_at, workers))

    @staticmethod
    def _left_at(worker: Any) -> int:
        return len(worker.processing) + worker.metrics.get(OLDER, 0)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Forget a worker that is gone."""
        self._left.pop(worker, None)
