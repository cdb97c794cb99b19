"""joblib's backend for a pool: each batch of joblib's is one call of the pool.

States of a batch: waiting (fewer than `n_jobs` may run) -> running, a call of the pool -> ended. joblib learns of the
end from the future that `submit` returned, also if the batch could not be submitted. Its callbacks run in the pool's
thread, where no caller would see an exception.
"""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# (joblib has no type hints)

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from joblib.parallel import (  # noqa: TID253 - imported when a backend is registered
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from skyward_core.compute import PendingCompute
from skyward_core.engine.futures import CallFuture
from skyward_core.machines.instances import Node
from skyward_core.pool.pool import ComputePool
from skyward_core.sklearn.tasks import Share, TaskPacker, run_tasks


def slots_of(nodes: tuple[Node, ...]) -> int:
    """Return how many calls these nodes run at once."""
    return sum(node.workers * node.slots for node in nodes)


def slots_sharing_a_machine(nodes: tuple[Node, ...]) -> int:
    """Return how many slots share the processors of one machine. All nodes without an endpoint are this machine."""
    here = slots_of(tuple(node for node in nodes if node.instance.endpoint is None))
    return max(here, *(node.workers * node.slots for node in nodes), 1)


class PoolBackend(AutoBatchingMixin, ParallelBackendBase):
    """A joblib backend over an open pool. Each `joblib.Parallel` gets its own one from it: a backend cannot know from
    joblib which of them has sent a batch, or which one is to be aborted.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    uses_threads = False
    supports_sharedmem = False
    default_n_jobs = 1

    def __init__(self, pool: ComputePool, nesting_level: int | None = None, *, is_template: bool = True) -> None:
        super().__init__(nesting_level=nesting_level)
        self._pool = pool
        self._is_template = is_template
        self._lock = threading.Lock()
        """Guards the attributes below. No call of the pool or of joblib is made while it is held."""
        self._waiting: deque[tuple[Any, Future[Any]]] = deque()
        self._running: dict[Future[Any], Future[Any] | None] = {}
        """The calls of the pool, by the futures that joblib has; None while one is being submitted."""
        self._is_aborted = False
        self._seconds: float | None = None
        """How long the batch that has just ended ran on its node."""
        self._most = sys.maxsize
        """How many batches may run at once."""
        self._array_settings: tuple[int | None, str | None] = (None, None)
        self._packer = TaskPacker()
        self._share = Share(1)

    # ── what joblib asks ─────────────────────────────────────────────────────────────────────────────────────────────

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many batches run at once: of -1 every slot of the pool, of -2 all but one.

        joblib runs everything in this process for 1. So a pool of one slot gets two batches at once, of which one waits
        in its queue.
        """
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs > 0:
            return n_jobs
        slots = slots_of(self._pool.lease.nodes)
        return max(2, slots) if n_jobs == -1 else max(1, slots + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Prepare for one `Parallel`: replace the registered backend by one for it alone."""
        if self._is_template:
            own = PoolBackend(self._pool, self.nesting_level, is_template=False)
            own.inner_max_num_threads = self.inner_max_num_threads
            raise FallbackToBackend(own)
        most = self.effective_n_jobs(n_jobs)
        if most == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        nodes = self._pool.lease.nodes
        self._most = most if most < slots_of(nodes) else sys.maxsize
        self._share = Share(slots_sharing_a_machine(nodes), self.inner_max_num_threads)
        self._array_settings = settings.get("max_nbytes"), settings.get("mmap_mode")
        self._forget_arrays()
        return most

    def start_call(self) -> None:
        """A call of `Parallel` begins. Its arrays may be others than those of the last one, in the same place."""
        self._is_aborted = False
        self._forget_arrays()

    def stop_call(self) -> None:
        """A call of `Parallel` has ended."""
        self._forget_arrays()

    def terminate(self) -> None:
        """A `Parallel` has ended."""
        self.reset_batch_stats()

    def submit(self, func: Any, callback: Callable[[Future[Any]], object] | None = None) -> Future[Any]:
        """Run a batch on the pool as soon as fewer than `n_jobs` run. Never raises: the future does."""
        job = Future[Any]()
        if callback is not None:
            job.add_done_callback(callback)
        with self._lock:
            self._waiting.append((func, job))
        self._start_jobs()
        return job

    apply_async = submit
    """The name before joblib 1.5."""

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Learn how long batches take, for the size of the next ones. `joblib` calls this from within `_end`.

        joblib's own measurement includes the way to the node and back, and the wait for a free slot. With it batches
        would stay small where the way is long.
        """
        super().batch_completed(batch_size, duration if self._seconds is None else self._seconds)

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the results of a batch, or raise its error."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Stop all batches that have not ended."""
        with self._lock:
            self._is_aborted = True
            calls = [call for call in self._running.values() if call is not None]
            self._waiting.clear()
        for call in calls:
            call.cancel()

    def get_nested_backend(self) -> tuple[Any, int | None]:
        """Return what joblib would use inside tasks. On the nodes `run_tasks` decides that."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forget_arrays(self) -> None:
        self._packer = TaskPacker(*self._array_settings)

    def _start_jobs(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._start(*batch)

    def _next_batch(self) -> tuple[Any, Future[Any]] | None:
        with self._lock:
            if not self._waiting or len(self._running) >= self._most:
                return None
            func, job = self._waiting.popleft()
            self._running[job] = None
            return func, job

    def _start(self, func: Any, job: Future[Any]) -> None:
        try:
            packed, arrays = self._packer.pack(func.items)
            call = self._pool.submit(PendingCompute(run_tasks, (packed, arrays, self._share)))
        except Exception as error:
            self._forget(job)
            job.set_exception(error)
            return
        with self._lock:
            self._running[job] = call
            is_aborted = self._is_aborted
        if is_aborted:
            call.cancel()
        call.add_done_callback(lambda _: self._end(job, call))

    def _end(self, job: Future[Any], call: CallFuture[Any]) -> None:
        self._forget(job)
        self._seconds = call.seconds
        if call.cancelled():
            job.set_exception(CancelledError())
        elif (error := call.exception()) is not None:
            job.set_exception(error)
        else:
            job.set_result(call.result())
        self._start_jobs()

    def _forget(self, job: Future[Any]) -> None:
        with self._lock:
            self._running.pop(job, None)
