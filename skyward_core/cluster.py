"""Dask on the nodes, seen from the client: calls go out as tasks, what happens comes back as Dask's structured events.

Threads: callers submit from any thread; Dask's own loop thread receives; one inbox thread handles what is received, in its order: a call's log lines are
told before its result is there. Callbacks and futures' done-callbacks run in the inbox thread and must not wait for another call of the pool.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import dask.config  # noqa: TID253 - this file and worker/node.py own Dask
import distributed  # noqa: TID253
from distributed.client import done_callback  # noqa: TID253

from skyward_core import pickling, sources
from skyward_core.certificates import PoolCertificate
from skyward_core.compute import PendingCompute
from skyward_core.dispatch import Entry, Queue, Shipment
from skyward_core.errors import CallCrashed, CallOutOfMemory, NodeLost, PoolClosed, RemoteError, SkywardError
from skyward_core.events import BootstrapCompleted, CallProgress, InstanceLost, LogLine, Metrics, SkywardEvent
from skyward_core.instances import Lease
from skyward_core.worker.node import POOL_TOPIC, WorkerJoined, WorkerLeft, cancel_calls, run_batch
from skyward_core.worker.settings import memory_directory
from skyward_core.worker.wire import INLINE_BYTES, Call, Ending, Outcome, Output, Parcel, Report, Sealed

PROGRESS_SECONDS = 0.1
TICK_SECONDS = 0.5
JOIN_POLL_SECONDS = 0.01
CONNECT_SECONDS = 30.0
_log = logging.getLogger("skyward")


class CallFuture[R](Future[R]):
    """A call that was handed over. As any `concurrent.futures.Future`, but `cancel()` also stops a call that is running."""

    def __init__(self, call_id: str, stop: Callable[[str], None]) -> None:
        super().__init__()
        self.call_id = call_id
        self._stop = stop

    def cancel(self) -> bool:
        """Stop the call, or do not begin it; False if it has ended already. One that is on its way may begin and is stopped then."""
        if not super().cancel():
            return False
        self._stop(self.call_id)
        return True


@dataclass(frozen=True, slots=True)
class _Given:
    """A call that was taken in: its future, and the arguments, which are ours to remove when it has ended."""

    future: CallFuture[Any]
    arguments: Parcel


class Cluster:
    """The open connection to a pool's Dask cluster. `start` opens it, `close` ends it; both belong to the pool."""

    def __init__(self, lease: Lease, certificate: PoolCertificate, emit: Callable[[SkywardEvent], object]) -> None:
        self._lease = lease
        self._certificate = certificate
        self._emit = emit
        self._client: distributed.Client | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._handle_inbox, name="skyward-inbox", daemon=True)
        self._lock = threading.RLock()
        self._topic = f"skyward-{uuid.uuid4().hex}"
        self._queue = Queue(self._topic)
        self._given: dict[str, _Given] = {}
        self._workers: dict[str, str] = {}
        self._to_stop: set[str] = set()
        self._tasks: dict[int, distributed.Future[Any]] = {}
        self._lost: SkywardError | None = None
        self._submitted = self._done = self._failed = 0
        self._progress_told = 0.0
        self._progress_counts = (0, 0, 0)
        self._is_closing = False
        self._shares_memory = all(node.instance.directory is not None for node in lease.nodes)
        self.busy_at = time.monotonic()
        """When a call was last known to be running or waiting, on time.monotonic's clock."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, deadline: float, check: Callable[[], None]) -> None:
        """Connect and wait for all workers. `check` is called now and then and raises if a node will not come. Raises NodeLost at the deadline."""
        try:
            self._client = connect(self._lease.scheduler, self._certificate, min(CONNECT_SECONDS, max(1.0, deadline - time.monotonic())))
        except OSError as error:
            raise NodeLost(f"the pool's scheduler at {self._lease.scheduler} does not answer") from error
        self._client.subscribe_topic(self._topic, lambda event: self._inbox.put(lambda: self._on_report(event[1])))
        self._client.subscribe_topic(POOL_TOPIC, lambda event: self._inbox.put(lambda: self._on_pool_news(event[1])))
        self._thread.start()
        expected = {f"{node.rank}-{index}" for node in self._lease.nodes for index in range(node.workers)}
        checked = time.monotonic()
        while missing := expected - set(self._workers):
            for address, worker in self._client.scheduler_info(n_workers=-1)["workers"].items():
                self._join(str(worker["name"]), address)
            if not missing - set(self._workers):
                continue
            if time.monotonic() > deadline:
                raise NodeLost(f"workers {', '.join(sorted(missing))} have not joined the pool in time")
            if time.monotonic() - checked > TICK_SECONDS:
                checked = time.monotonic()
                check()
            time.sleep(JOIN_POLL_SECONDS)

    def close(self, reason: str) -> None:
        """End the connection; calls that have not ended get PoolClosed with this reason. May be called twice, and after a start that failed."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            error = PoolClosed(reason)
            self._lost = self._lost or error
            left = self._queue.clear()
        if self._thread.is_alive():
            self._inbox.put(lambda: self._fail(left, error))
            self._inbox.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        if self._client is not None:
            self._tasks.clear()
            with contextlib.suppress(Exception):  # the nodes may be gone already, and it is they who cost money
                self._client.close(timeout=2)

    @property
    def client(self) -> distributed.Client:
        """The real Dask client of the pool's cluster."""
        assert self._client is not None
        return self._client

    @property
    def slots(self) -> int:
        """How many calls run at once."""
        return sum(node.workers * node.slots for node in self._lease.nodes)

    @property
    def is_idle(self) -> bool:
        """True while no call runs or waits."""
        return not self._given

    # ── calls out ────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, calls: Sequence[PendingCompute[Any]], replace_object: pickling.Replace | None = None) -> list[CallFuture[Any]]:
        """Hand calls over, to run wherever a slot is free; returns their futures, in order. Raises NotPicklable, PoolClosed or NodeLost at once."""
        return self._take_in([(call, None) for call in calls], replace_object, None)

    def broadcast(self, call: PendingCompute[Any], replace_object: pickling.Replace | None = None) -> list[CallFuture[Any]]:
        """Hand a call over once for each worker; returns the futures in the order of the workers."""
        with self._lock:
            workers = [address for _, address in sorted(self._workers.items(), key=lambda item: _rank(item[0]))]
        return self._take_in([(call, worker) for worker in workers], replace_object, uuid.uuid4().hex)

    def _take_in(
        self, calls: Sequence[tuple[PendingCompute[Any], str | None]], replace_object: pickling.Replace | None, job_id: str | None
    ) -> list[CallFuture[Any]]:
        if self._lost is not None:
            raise self._lost
        functions: dict[int, tuple[str, Parcel]] = {}
        entries = list[Entry]()
        given = list[_Given]()
        with contextlib.ExitStack() as undo:
            for pending, worker in calls:
                name, function = functions.get(id(pending.fn)) or functions.setdefault(id(pending.fn), _packed_function(pending.fn, replace_object))
                arguments = self._packed((pending.args, dict(pending.kwargs)), replace_object)
                if arguments.path is not None:
                    undo.callback(arguments.release)
                call_id = uuid.uuid4().hex
                entries.append(Entry(Call(call_id, name, arguments, job_id or call_id), function, worker))
                given.append(_Given(CallFuture(call_id, self._cancel), arguments))
            with self._lock:
                if self._lost is not None:
                    raise self._lost
                self.busy_at = time.monotonic()
                self._given.update((item.future.call_id, item) for item in given)
                self._submitted += len(given)
                self._queue.add(entries)
            undo.pop_all()
        self._ship()
        return [item.future for item in given]

    def _packed(self, value: object, replace_object: pickling.Replace | None) -> Parcel:
        pickled = sources.pack(value, label=("args", "kwargs"), replace=replace_object)
        parcel = Parcel(pickled.data, pickled.buffers)
        if parcel.nbytes > INLINE_BYTES and self._shares_memory:
            with contextlib.suppress(OSError):  # no room: Dask carries it
                head = self._lease.nodes[0].instance
                return parcel.put_aside((memory_directory(head.id), cast(str, head.directory)))
        return parcel

    def _ship(self) -> None:
        with self._lock:
            self._to_stop -= self._queue.drop(self._to_stop) if self._to_stop else set()
            shipments = self._queue.ship() if not self._is_closing else []
        for shipment in shipments:
            try:
                self._send(shipment)
            except Exception as error:  # whoever waits for these calls must hear of it, whichever thread this is
                self._lose_calls([call.call_id for call in shipment.batch.calls], NodeLost(f"the call could not be sent: {error}"), error)

    def _send(self, shipment: Shipment) -> None:
        if shipment.batch.nbytes > INLINE_BYTES * 16:
            batch = self.client.scatter(shipment.batch, direct=True, hash=False, workers=[shipment.worker] if shipment.worker else None)
        else:
            batch = Sealed(pickle.dumps(shipment.batch, protocol=5))
        task = self.client.submit(
            run_batch, batch, key=f"skyward-{shipment.number}-{self._topic[-8:]}", pure=False, workers=[shipment.worker] if shipment.worker else None
        )
        self._tasks[shipment.number] = task
        # Not task.add_done_callback: that starts a thread which stays with the process for good.
        cast(Any, self.client.loop).add_callback(done_callback, task, lambda done: self._inbox.put(lambda: self._on_task_end(shipment, done)))

    def _cancel(self, call_id: str) -> None:
        with self._lock:
            is_first = not self._to_stop
            self._to_stop.add(call_id)
        if is_first and not self._is_closing:
            cast(Any, self.client.loop).add_callback(self._stop_on_workers)
        self._inbox.put(lambda: self._on_cancelled(call_id))

    async def _stop_on_workers(self) -> None:
        """Stop all calls that are to be stopped by now, with one message to the workers, however many they are."""
        with self._lock:
            calls = self._to_stop - self._queue.drop(self._to_stop)
            self._to_stop.clear()
        calls = {call_id for call_id in calls if self._queue.is_out(call_id)}
        try:
            if calls and not self._is_closing:
                await cast(Any, self.client).run(cancel_calls, calls, wait=False)
        except Exception as error:  # the workers are on their way out, and the calls with them
            _log.debug("%d calls could not be stopped: %s", len(calls), error)

    # ── news in, all in the inbox thread ─────────────────────────────────────────────────────────────────────────────

    def _handle_inbox(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                item = self._tick
            if item is None:
                return
            try:
                item()
            except Exception:
                _log.exception("a message from the pool could not be handled")
            self._tell_progress()

    def _on_report(self, message: bytes) -> None:
        report: Report = pickle.loads(message)
        for item in report.news:
            if isinstance(item, Output):
                for line in item.lines:
                    self._emit(LogLine(report.node, report.instance_id, line, item.timestamp, item.call_id, item.stream))
            elif item.ending not in {Ending.HERE, Ending.RETURNED}:
                self._on_outcome(item, report.node)
        with self._lock:
            self._queue.returned([item.call_id for item in report.news if isinstance(item, Outcome) and item.ending is Ending.RETURNED])
        self._ship()

    def _on_outcome(self, outcome: Outcome, node: int) -> None:
        self.busy_at = time.monotonic()
        with self._lock:
            self._queue.ended(outcome.call_id, outcome.seconds if outcome.ending is Ending.RESULT else None)
            given = self._given.pop(outcome.call_id, None)
        if given is None or not given.future.set_running_or_notify_cancel():
            outcome.parcel.release()
            if given is not None:
                self._end(given)
            return
        try:
            value = _value(outcome, node)
        except BaseException as error:
            self._end(given, error=error)
        else:
            self._end(given, value=value)
        finally:
            outcome.parcel.release()

    def _on_task_end(self, shipment: Shipment, task: distributed.Future[Any]) -> None:
        """The truth about a batch: whatever its reports have not told is in the task's result, or lost with its worker."""
        with self._lock:
            self._tasks.pop(shipment.number, None)
            left = self._queue.unended(shipment)
        if left and task.status == "finished":
            self._fetch(task, left)
        elif left and not self._is_closing:
            self._lose_calls(left, NodeLost(f"the worker that ran the call is gone ({_cause(task)}); submit it again if it may run twice"))
        task.release()
        self._ship()

    def _fetch(self, task: distributed.Future[Any], call_ids: Sequence[str]) -> None:
        try:
            outcomes = cast("Mapping[str, Outcome]", self.client.gather(task, direct=True))
        except Exception as error:
            self._lose_calls(call_ids, NodeLost(f"the call ended, but its result could not be fetched: {error}"), error)
            return
        with self._lock:
            self._queue.returned([call_id for call_id in call_ids if outcomes[call_id].ending is Ending.RETURNED])
        for call_id in call_ids:
            if outcomes[call_id].ending is not Ending.RETURNED:
                self._on_outcome(outcomes[call_id], -1)

    def _on_cancelled(self, call_id: str) -> None:
        with self._lock:
            given = self._given.pop(call_id, None)
        if given is not None:
            given.future.set_running_or_notify_cancel()
            self._end(given)

    def _on_pool_news(self, message: bytes) -> None:
        news = pickle.loads(message)
        if isinstance(news, Metrics):
            self._emit(news)
        elif isinstance(news, WorkerJoined):
            self._join(news.name, news.address)
            self._ship()
        elif isinstance(news, WorkerLeft) and not self._is_closing:
            self._leave(news.name)

    def _join(self, name: str, address: str) -> None:
        with self._lock:
            is_new = name not in self._workers
            self._workers[name] = address
            node = self._lease.nodes[_rank(name)[0]]
            complete = sum(_rank(other)[0] == node.rank for other in self._workers) == node.workers
            self._count_slots()
        if is_new and complete:
            self._emit(BootstrapCompleted(node.instance.id))

    def _leave(self, name: str) -> None:
        with self._lock:
            known = self._workers.pop(name, None)
            self._count_slots()
            node = self._lease.nodes[_rank(name)[0]] if name else None
            none_left = not self._workers
        if known is not None and node is not None:
            self._emit(InstanceLost(node.instance.id, node.rank, "its worker has left the pool"))
        if none_left:
            self._lose(NodeLost("all workers of the pool are gone"))

    def _lose(self, error: SkywardError) -> None:
        with self._lock:
            self._lost = self._lost or error
            left = self._queue.clear()
        self._fail(left, error)

    def _count_slots(self) -> None:
        self._queue.slots = max(1, sum(self._lease.nodes[_rank(name)[0]].slots for name in self._workers))

    def _lose_calls(self, call_ids: Sequence[str], error: SkywardError, cause: BaseException | None = None) -> None:
        error.__cause__ = cause
        with self._lock:
            for call_id in call_ids:
                self._queue.ended(call_id)
        self._fail(call_ids, error)

    def _fail(self, call_ids: Sequence[str], error: SkywardError) -> None:
        for call_id in call_ids:
            with self._lock:
                given = self._given.pop(call_id, None)
            if given is not None and given.future.set_running_or_notify_cancel():
                self._end(given, error=error)

    def _end(self, given: _Given, value: Any = None, error: BaseException | None = None) -> None:
        self._done += 1
        if given.future.cancelled():
            pass
        elif error is not None:
            self._failed += 1
            given.future.set_exception(error)
        else:
            given.future.set_result(value)
        given.arguments.release()  # last: freeing a hundred megabytes takes longer than the rest together

    def _tick(self) -> None:
        """Nothing has come for a while: look whether the head is still there."""
        if self._given:
            self.busy_at = time.monotonic()
        if self.client.status != "running" and not self._is_closing and self._lost is None:
            head = self._lease.nodes[0].instance
            self._emit(InstanceLost(head.id, 0, "the scheduler does not answer any more"))
            self._lose(NodeLost(f"the head of the pool ({head.id}) is gone"))

    def _tell_progress(self) -> None:
        now = time.monotonic()
        counts = (self._submitted, self._done, self._failed)
        if counts != self._progress_counts and (now - self._progress_told > PROGRESS_SECONDS or self._done == self._submitted):
            self._progress_told, self._progress_counts = now, counts
            self._emit(CallProgress(*counts))


def connect(address: str, certificate: PoolCertificate, timeout_seconds: float) -> distributed.Client:
    """Return a Dask client of the pool's cluster, over TLS with the pool's certificate. Its caller closes it."""
    security = distributed.Security(
        require_encryption=True, tls_ca_file=certificate.certificate, tls_client_cert=certificate.certificate, tls_client_key=certificate.key
    )
    with dask.config.set({"distributed.admin.low-level-log-length": 0}):  # else the last thousand messages stay in memory, payloads included
        client = distributed.Client(address, security=security, set_as_default=False, timeout=timeout_seconds, name="skyward")
    stream: Any = client.scheduler_comm
    stream.interval = 0.0  # our calls are grouped before they come here: send at once instead of every 10 ms
    return client


def _packed_function(fn: Callable[..., Any], replace_object: pickling.Replace | None) -> tuple[str, Parcel]:
    """The function's pickle, named by its content: a runner that has seen it is not sent it again, and keeps what the function keeps in its globals."""
    pickled = sources.pack(fn, label=getattr(fn, "__name__", "function"), replace=replace_object)
    digest = hashlib.sha256(pickled.data)
    for buffer in pickled.buffers:
        digest.update(buffer)
    return digest.hexdigest(), Parcel(pickled.data, pickled.buffers)


def _value(outcome: Outcome, node: int) -> Any:
    """The call's result, or its exception raised."""
    if outcome.ending is Ending.RESULT:
        return pickling.loads(*outcome.parcel.contents())
    if outcome.ending is Ending.ERROR:
        raise _remote_exception(outcome, node)
    if outcome.ending is Ending.CANCELLED:
        raise CallCrashed(f"the call was stopped on node {node}", node, outcome.exit_code, outcome.output)
    if outcome.ending is Ending.OUT_OF_MEMORY:
        message = f"the call used more memory than its worker on node {node} has, and was killed; ask for more with ComputePool(memory=...)"
        raise CallOutOfMemory(message, node, outcome.exit_code, outcome.output)
    raise CallCrashed(f"the process of the call died on node {node}: {outcome.text or _death(outcome.exit_code)}", node, outcome.exit_code, outcome.output)


def _remote_exception(outcome: Outcome, node: int) -> BaseException:
    try:
        error = cast(BaseException, pickling.loads(*outcome.parcel.contents()))
    except Exception:
        return RemoteError(f"the call failed on node {node} with an exception that cannot be rebuilt here", outcome.text)
    error.__cause__ = RemoteTraceback(outcome.text)
    error.add_note(f"raised on node {node} of the pool; its traceback there is the cause shown above")
    return error


class RemoteTraceback(Exception):
    """Carries the traceback of the node as text, so that it is printed above the exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _death(exit_code: int | None) -> str:
    if exit_code is None:
        return "nobody saw how"
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    return f"killed by {signal.Signals(-exit_code).name}{' (out of memory?)' if exit_code == -signal.SIGKILL else ''}"


def _cause(task: distributed.Future[Any]) -> str:
    error = task.exception(timeout=1) if task.status == "error" else None
    return str(error) if error is not None else f"its task is {task.status}"


def _rank(worker_name: str) -> tuple[int, int]:
    """Rank of the node and index of the worker, from a worker's name."""
    rank, _, index = worker_name.partition("-")
    return int(rank), int(index)
