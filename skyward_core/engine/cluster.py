"""Dask on the nodes, seen from the client: calls go out as tasks, what happens comes back as Dask's structured events.

Threads: callers submit from any thread; Dask's own loop thread receives; one inbox thread handles what is received, in its order: a call's log lines are
told before its result is there. Callbacks and futures' done-callbacks run in the inbox thread and must not wait for another call of the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import pickle
import queue
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import distributed  # noqa: TID253 - this file, its closet and worker/node.py own Dask
from distributed.client import ClosedClientError, done_callback  # noqa: TID253
from distributed.protocol.serialize import to_serialize  # noqa: TID253
from distributed.scheduler import KilledWorker  # noqa: TID253

from skyward_core import bare_exceptions, exceptions, pickling, sources
from skyward_core.compute import PendingCompute
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.connection import PoolClient, asked, connect, members
from skyward_core.engine.futures import CallFuture
from skyward_core.engine.outbox import Entry, Queue, Shipment
from skyward_core.errors import (
    BadRequest,
    Bytes,
    CallCrashed,
    CallOutOfMemory,
    CommandFailed,
    ConnectionLost,
    NodeLost,
    PoolClosed,
    ResultNotLoaded,
    SkywardError,
    Unreachable,
)
from skyward_core.events import BootstrapCompleted, CallProgress, CallRetrying, LogLine, Metrics, SkywardEvent
from skyward_core.instances import Lease, Node
from skyward_core.reach import Reach, Reaches
from skyward_core.remote_notes import note_for
from skyward_core.unpicklable import one_line
from skyward_core.worker.calls import NAME, RAN, RETRIES, Following, Ran, Resumed, cancel, detached_key, let_go
from skyward_core.worker.holding import HELD, HOLD, WorkerHeld
from skyward_core.worker.masking import SecretValues
from skyward_core.worker.node import POOL_TOPIC, RUN_BATCH, START_DETACHED, WorkerJoined, WorkerLeft
from skyward_core.worker.secret_values import PUT_SECRETS
from skyward_core.worker.streams import Told
from skyward_core.worker.wire import INLINE_BYTES, Batch, Call, Ending, Outcome, Output, Parcel, Report

PROGRESS_SECONDS = 0.1
TICK_SECONDS = 0.5
JOIN_POLL_SECONDS = 0.01
CONNECT_SECONDS = 30.0
PING_SECONDS = 4.0
PINGS = 3  # unanswered in a row
BUSY_SECONDS = 2.0
ACKNOWLEDGED_TOGETHER = 1000
TAKERS = 4  # large results fetched at once
TAKE_SECONDS = 120.0  # for which a result whose wire is cut is asked for again, while its node lives: as long as a lease
DETACH_SECONDS = 60.0  # for which a detached call that is being handed over waits for a scheduler that is out of reach: a wire that heals, or a new head
HEARD_SECONDS = 1.0
MANY = 1_000_000  # more calls than a worker has slots
_log = logging.getLogger("skyward")


@dataclass(slots=True)
class _Given:
    """A call that was taken in: its future, its arguments, which are ours to remove when it has ended, and its place in the queue.

    `aside` is where its arguments lie on a node, `lies_at` the path of its outcome there while that is being fetched, until time.monotonic says `take_until`.
    """

    future: CallFuture[Any]
    arguments: Parcel
    entry: Entry
    aside: tuple[Reach, Parcel] | None = None
    lies_at: str = ""
    take_until: float = 0.0


class Watcher(Protocol):
    """Who is told what becomes of the cluster's members; called in the inbox thread, and must not wait."""

    def joined(self, rank: int) -> None:
        """All workers of a node are there."""
        ...

    def left(self, rank: int) -> None:
        """A worker of a node is gone, or does not answer any more."""
        ...

    def cut(self) -> None:
        """The scheduler is out of reach."""
        ...


class Counts(Protocol):
    """Who counts what calls cost (`metering.Meter`). Called in the inbox thread, and must not wait."""

    def ran(self, instance_id: str, seconds: float) -> float:
        """Calls that have ended have kept slots of a machine busy for so many seconds in all; return their share of the bill, in USD."""
        ...

    def seen_running(self, instance_id: str, seconds: float) -> None:
        """Slots of a machine were busy for so many seconds since it was rented: with anybody's calls, and those that still run. Told every few seconds."""
        ...


@dataclass(frozen=True, slots=True)
class _CutOff:
    """A large outcome that could not be fetched, as the wire to its node was cut: tried again until time.monotonic says `until`."""

    outcome: Outcome
    node: int
    error: Exception
    until: float


class NotSent(Exception):
    """A batch has not gone out: the worker that it was meant for has left, or the scheduler is out of reach."""


class Cluster:
    """The connection to a pool's Dask cluster. `start` opens it, `close` ends it; both belong to the pool.

    States: new -> open -> closed. While it is open the scheduler may go out of reach (`cut`): nothing is sent then, and nothing given up, until the
    pool says what has become of it: `resume` (the same scheduler answers again), `restart` (there is another one) or `give_up`.
    """

    def __init__(
        self,
        lease: Lease,
        certificate: PoolCertificate,
        reaches: Reaches,
        emit: Callable[[SkywardEvent], object],
        retries: int = 0,
        counts: Counts | None = None,
        secrets: SecretValues | None = None,
        wait_for_lines: Callable[[], object] = lambda: None,
    ) -> None:
        self._nodes = {node.rank: node for node in lease.nodes}
        self._ranks = sorted(self._nodes)
        """Those of the pool: one that is lost has somebody in its place before long."""
        self._workers_per_node = max((node.workers for node in lease.nodes), default=1)
        self._certificate = certificate
        self._reaches = reaches
        self._emit = emit
        self._wait_for_lines = wait_for_lines
        """Returns when what was emitted has been told, or shortly."""
        self._retries = retries
        self._counts = counts
        self._secrets = secrets
        """What each scheduler is told before any call; None for whoever has not opened the pool."""
        self._seen: dict[str, dict[str, float]] = {}
        """For how long slots were busy, by instance id and by worker process: one that has ended keeps its part."""
        self._client: distributed.Client | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._handle_inbox, name="skyward-inbox", daemon=True)
        self._takers = ThreadPoolExecutor(TAKERS, thread_name_prefix="skyward-take")
        self._lock = threading.RLock()
        self._queue = Queue("")
        self._queue.workers = ()
        self._given: dict[str, _Given] = {}
        self._taking: dict[str, _Given] = {}
        self._cut_off: dict[str, _CutOff] = {}
        """Those of `_taking` that wait for the way to their node."""
        self._workers: dict[str, str] = {}
        self._held: dict[str, int] = {}
        """Addresses of workers that are given no more calls, and how many slots of theirs are still at work."""
        self._to_stop: set[str] = set()
        self._is_stopping = False
        """Whether Dask's thread has been asked to tell the workers of those."""
        self._tasks: dict[int, distributed.Future[Any]] = {}
        self._shipments: dict[int, Shipment] = {}
        self._sent_to: dict[int, tuple[str, str]] = {}
        """Name and address of the worker that a shipment was sent to, or is being laid down for, where that is not the scheduler's choice."""
        self._putting = threading.Lock()
        self._functions_at: dict[tuple[str, str], Parcel] = {}
        """Large functions by instance id and name, as they lie in that node's memory."""
        self._before: list[Shipment] = []
        """Those that were out when the connection was cut, until the scheduler has said what it knows of them."""
        self._unheard: dict[int, Shipment] = {}
        self._lost: SkywardError | None = None
        self._drained: SkywardError | None = None
        self._submitted = self._done = self._failed = self._cancelled = 0
        self._progress_told = 0.0
        self._progress_counts = (0, 0, 0, 0)
        self._is_closing = False
        self._is_cut = False
        self._is_pinging = False
        self._pinged_at = 0.0
        self._unanswered = 0
        self._watcher: Watcher | None = None
        self._is_here = all(node.instance.endpoint is None for node in lease.nodes)
        self._listen_anew()
        self.busy_at = time.monotonic()
        """When a call was last known to be running or waiting, on time.monotonic's clock."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, address: str, deadline: float, check: Callable[[], None], patience_seconds: float = math.inf) -> None:
        """Connect to the scheduler and wait for all workers. `check` is called now and then and raises if a node will not come.

        Raises NodeLost at the deadline (of time.monotonic). Where the patience ends before, it goes on without those that are not there.
        """
        self._thread.start()
        self._connect(address, min(CONNECT_SECONDS, max(1.0, deadline - time.monotonic())))
        expected = set(self._names())
        checked = time.monotonic()
        patience = checked + patience_seconds
        while missing := expected - set(self._workers):
            self._count_in()
            if not missing - set(self._workers):
                continue
            if time.monotonic() > min(patience, deadline) and patience_seconds < math.inf:
                return
            if time.monotonic() > deadline:
                raise NodeLost(f"workers {', '.join(sorted(missing))} have not joined the pool in time")
            if time.monotonic() - checked > TICK_SECONDS:
                checked = time.monotonic()
                check()
            time.sleep(JOIN_POLL_SECONDS)

    def watch(self, watcher: Watcher) -> None:
        """Tell somebody, from now on, who comes and goes."""
        self._watcher = watcher

    def close(self, error: SkywardError) -> None:
        """End the connection; calls that have not ended raise this error. May be called twice, and after a start that failed."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._lost = self._lost or error
            left = self._queue.clear()
        if self._thread.is_alive():
            self._inbox.put(lambda: self._fail(left, error))
            self._inbox.put(lambda: self._abandon(error))
            self._inbox.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._takers.shutdown(wait=False, cancel_futures=True)
        self._disconnect()

    def leave(self, reason: str) -> None:
        """Close, stop what was submitted here, and have the scheduler drop what it keeps for this client: others go on using it."""
        self._tell_scheduler(self._following.leave())
        self.close(PoolClosed(reason))

    def drain(self, error: SkywardError | None) -> None:
        """Take no more calls, and give up those that are not begun, with this error; what runs may end. None: take calls again."""
        with self._lock:
            self._drained = error
            left = self._queue.withdraw() if error is not None else []
        if error is not None and left:
            self._inbox.put(lambda: self._fail(left, error))

    @property
    def client(self) -> distributed.Client:
        """The real Dask client of the pool's cluster. Raises PoolClosed after the end, NodeLost while the scheduler is out of reach."""
        if self._client is None:
            raise self._lost or NodeLost("the pool's scheduler is out of reach just now: try again")
        return self._client

    @property
    def slots(self) -> int:
        """How many calls run at once."""
        return sum(node.workers * node.slots for node in list(self._nodes.values()))

    @property
    def is_idle(self) -> bool:
        """True while no call runs or waits."""
        return not self._given

    def has_work(self) -> bool:
        """Tell whether anybody's call runs or waits: this client's, another's, a detached one, or a task of Dask's own. Asks the scheduler if need be."""
        if not self.is_idle:
            return True
        try:
            return bool(self._ask("skyward_busy", BUSY_SECONDS))  # whoever asks has leases to keep, and cannot wait for a silent head
        except (SkywardError, OSError):
            return False  # it is out of reach, which is noticed elsewhere

    def has(self, rank: int) -> bool:
        """Tell whether all workers of a node are there."""
        node = self._nodes.get(rank)
        return node is not None and sum(_rank(name)[0] == rank for name in list(self._workers)) == node.workers

    def missing(self, rank: int) -> list[int]:
        """Return the indexes of the workers of a node that are not there."""
        node = self._nodes.get(rank)
        return [index for index in range(node.workers if node else 0) if f"{rank}-{index}" not in self._workers]

    def hold(self, rank: int) -> int:
        """Give a node no more calls, whoever has them; return how many it still has. May be asked again, and must be for a worker that has come anew.

        Calls for that very node wait for whoever comes in its place. Raises NodeLost or PoolClosed if the scheduler is out of reach.
        """
        left = int(self._ask(HOLD, rank=rank))
        node = self._nodes.get(rank)
        heard = threading.Event()
        self._inbox.put(heard.set)  # after all that is there by now: what it leads to is counted too
        if not heard.wait(HEARD_SECONDS):
            left += 1
        return left + sum(node is not None and node.instance.id in given.lies_at for given in list(self._taking.values()))

    # ── when the scheduler is out of reach ───────────────────────────────────────────────────────────────────────────

    def resume(self, address: str, timeout_seconds: float) -> None:
        """Connect again to the same scheduler, and take in what it has to tell since. Raises NodeLost if it does not answer."""
        self._disconnect(is_to_return=True)
        with self._lock:
            self._before = list(self._shipments.values())
            self._unheard.clear()
        self._connect(address, timeout_seconds)
        self._count_in()
        self._stop_all_cancelled()
        self._inbox.put(self._ship)

    def restart(self, lease: Lease, address: str, timeout_seconds: float) -> None:
        """Connect to another scheduler. What was out is lost with the old one: it runs again, or raises NodeLost."""
        self._disconnect()
        with self._lock:
            self._nodes = {node.rank: node for node in lease.nodes}
            self._workers.clear()
            self._held.clear()
            self._sent_to.clear()
            self._count_slots()
            self._tasks.clear()
            self._shipments.clear()
            out = self._queue.all_out()
            self._queue.forget_shipments()
            self._before = []
            self._unheard.clear()
            self._listen_anew()
            gone = [call_id for call_id, given in self._given.items() if given.arguments.path and not os.path.exists(given.arguments.path)]
        self._inbox.put(lambda: self._lose_calls([*dict.fromkeys([*out, *gone])], "the head of the pool was lost"))
        self._connect(address, timeout_seconds)
        self._count_in()
        self._stop_all_cancelled()
        self._inbox.put(self._ship)

    def know(self, lease: Lease) -> None:
        """Take note of nodes that have come in the place of others."""
        with self._lock:
            self._nodes = {**self._nodes, **{node.rank: node for node in lease.nodes}}
            self._count_slots()

    def forget(self, rank: int) -> None:
        """Have nothing to do with a node that is not there, nor with whoever comes in its place."""
        with self._lock:
            self._nodes = {other: node for other, node in self._nodes.items() if other != rank}
            self._ranks = sorted(self._nodes)
            self._count_slots()

    def give_up(self, error: SkywardError, rank: int | None = None) -> None:
        """Wait no longer for a node that is not replaced, or (None) for any: the calls that only it could run raise the error."""
        if rank is None:
            self._inbox.put(lambda: self._lose(error))
            return
        names = self._names_at(rank)

        def fail() -> None:
            with self._lock:
                left = [call_id for name in names for call_id in self._queue.pinned_to(name)]
                self._queue.drop(set(left))
            self._fail(left, error)

        self._inbox.put(fail)

    def _connect(self, address: str, timeout_seconds: float) -> None:
        try:
            client = connect(address, self._certificate, timeout_seconds)
        except OSError as error:
            raise NodeLost(f"the pool's scheduler at {address} does not answer") from error
        with self._lock:
            is_late = self._is_closing
            if not is_late:
                self._client = client
                if self._secrets:  # with the connection, so that nobody's call can come before
                    self._tell_scheduler({"op": PUT_SECRETS, "secrets": to_serialize(self._secrets)})
        if is_late:
            client.close(timeout=2)
            raise PoolClosed("the pool is closing")
        self._is_cut, self._unanswered, self._pinged_at = False, 0, time.monotonic()
        client.subscribe_topic(self._topic, self._following.handler(client.id))
        client.subscribe_topic(POOL_TOPIC, lambda event: self._inbox.put(lambda: self._on_pool_news(event[1], client)))
        self._tell_scheduler(self._following.resume(client.id))

    def _listen_anew(self) -> None:
        """Take a topic of its own for what workers report from now on."""
        self._topic = self._queue.topic = f"skyward-{uuid.uuid4().hex}"
        self._acknowledged = 0
        self._following = Following(
            self._topic,
            deliver=lambda message: self._inbox.put(lambda: self._on_report(message)),
            resumed=self._on_resumed,
        )

    def _tell_scheduler(self, message: Mapping[str, Any]) -> None:
        """Send a message down the client's stream. From any thread; lost if the scheduler is out of reach."""
        if self._client is not None:
            cast(Any, self._client)._send_to_scheduler(message)

    def _disconnect(self, *, is_to_return: bool = False) -> None:
        """Close the connection. `is_to_return`: there will be another one to the same scheduler, which is to keep what it has for us."""
        with self._lock:  # what is sent has been noted by now, and nothing more is sent on this connection
            client, self._client = self._client, None
            if is_to_return and isinstance(client, PoolClient):
                client.is_to_return = True
            if client is not None:
                self._tasks.clear()
        if client is not None:
            with contextlib.suppress(Exception):  # the nodes may be gone already, and it is they who cost money
                client.close(timeout=2)

    def _count_in(self) -> None:
        known = list(self._workers.items())  # before asking: one that joins meanwhile misses in the answer, and has not left
        workers = members(self.client)
        there = {str(worker["name"]): address for address, worker in workers.items()}
        is_held = {str(worker["name"]): worker["status"] == HELD for worker in workers.values()}
        for name, address in known:
            if there.get(name) != address:
                self._leave(name, address)
        for name, address in there.items():
            self._join(name, address)
            if is_held[name]:
                self._on_held(address)

    # ── calls out ────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, calls: Iterable[PendingCompute[Any]], replace_object: pickling.Replace | None = None, *, is_awaited: bool = False
    ) -> list[CallFuture[Any]]:
        """Hand calls over, to run wherever a slot is free; returns their futures, in order. Raises NotPicklable, PoolClosed or NodeLost at once.

        `is_awaited`: the caller does nothing else until they have ended, so that large arguments need not be copied in order to stay as they are.
        """
        return self._take_in(((call, None) for call in calls), replace_object, None, is_awaited)

    def broadcast(self, call: PendingCompute[Any], replace_object: pickling.Replace | None = None) -> list[CallFuture[Any]]:
        """Hand a call over once for each worker of the pool; returns the futures in the order of the workers.

        Those of a node that is away wait for the one in its place: left out, they would take their share of the data along.
        """
        return self._take_in(((call, worker) for worker in self._names()), replace_object, uuid.uuid4().hex, is_awaited=True)

    def _names(self) -> list[str]:
        """Names of all workers of the pool, whether they are there or not, in their order."""
        return [name for rank in self._ranks for name in self._names_at(rank)]

    def _names_at(self, rank: int) -> list[str]:
        node = self._nodes.get(rank)
        return [f"{rank}-{index}" for index in range(node.workers if node is not None else self._workers_per_node)]

    # ── calls that outlive their client ──────────────────────────────────────────────────────────────────────────────

    def start_detached(self, pending: PendingCompute[Any], replace_object: pickling.Replace | None = None) -> str:
        """Hand a call over to the cluster, which keeps it and what becomes of it until it is to be forgotten; return its id.

        A scheduler that is out of reach is waited for, and asked again: it takes a call of an id in once. Raises NodeLost if that cannot be, which says
        whether the call may have begun.
        """
        if (refusal := self._lost or self._drained) is not None:
            raise refusal
        name, function = _packed_function(pending.fn, replace_object)
        pickled = sources.pack((pending.args, dict(pending.kwargs)), label=("args", "kwargs"), replace=replace_object)
        call_id = uuid.uuid4().hex
        key = detached_key(call_id)
        call = Call(call_id, name, Parcel(pickled.data, tuple(bytes(buffer) for buffer in pickled.buffers)), call_id)
        batch = pickle.dumps(Batch(key, (call,), {name: function}), protocol=5)
        self._hand_over(call_id, {"batch": batch, "annotations": {RETRIES: self._retries, NAME: getattr(pending.fn, "__name__", "")}})
        return call_id

    def _hand_over(self, call_id: str, message: Mapping[str, Any]) -> None:
        """Have the scheduler take a detached call in. Asked again on a connection to the same one only: with the one before, a call may have begun."""
        deadline = time.monotonic() + DETACH_SECONDS
        asked_at: str | None = None
        error: Exception | None = None
        while True:
            with self._lock:
                client, scheduler = self._client, self._topic  # a topic of its own for each scheduler
            if asked_at not in (None, scheduler) or self._lost is not None or time.monotonic() > deadline:
                break
            if client is not None:
                asked_at = scheduler
                try:
                    self._ask_on(client, START_DETACHED, deadline, {"call_id": call_id, **message})
                except NodeLost as failure:
                    error = failure
                else:
                    return
            time.sleep(JOIN_POLL_SECONDS)
        if asked_at is None:
            raise self._lost or NodeLost("the pool's scheduler is out of reach just now: try again")
        raise NodeLost(f"the pool's scheduler does not answer, and call {call_id} may have begun: look for it by this id (detached_call)") from (
            self._lost or error
        )

    def detached_calls(self) -> list[Mapping[str, Any]]:
        """Return what is known of the calls that were started detached, in the order in which they came."""
        return list(self._ask("skyward_calls"))

    def detached_call(self, call_id: str, after: int = 0) -> Mapping[str, Any]:
        """Return what is known of a detached call, and what it has reported after message number `after`. Raises BadRequest if there is none of this id."""
        known = self._ask("skyward_call", call_id=call_id, after=after)
        if known is None:
            raise BadRequest(f"the pool knows of no call {call_id!r}: it was forgotten, or started in another pool")
        return known

    def detached_value(self, outcome: Outcome, node: int) -> Any:
        """Return the result of a detached call that has ended, or raise its exception. The result stays where it is."""
        parcel = outcome.parcel if outcome.parcel.path is None else self._reach_of(outcome.parcel).take(outcome.parcel, keep=True)
        return _value(outcome, parcel, node)

    def cancel_detached(self, call_id: str) -> None:
        """Stop a detached call, or do not begin it. Raises NodeLost if the scheduler could not be told."""
        self._ask("skyward_cancel", call_id=call_id)

    def forget_detached(self, call_id: str, outcome: Outcome | None) -> None:
        """Drop all there is of a detached call, its result too."""
        if outcome is not None and outcome.parcel.path is not None:
            self._reach_of(outcome.parcel).release(outcome.parcel)
        self._ask("skyward_forget", call_id=call_id)

    def _ask(self, operation: str, timeout_seconds: float = math.inf, **what: Any) -> Any:
        return self._ask_on(self.client, operation, time.monotonic() + timeout_seconds, what)

    def _ask_on(self, client: distributed.Client, operation: str, until: float, what: Mapping[str, Any]) -> Any:
        return asked(client, operation, lambda: self._client is client and time.monotonic() < until, what)

    def _take_in(
        self, calls: Iterable[tuple[PendingCompute[Any], str | None]], replace_object: pickling.Replace | None, job_id: str | None, is_awaited: bool
    ) -> list[CallFuture[Any]]:
        if (refusal := self._lost or self._drained) is not None:
            raise refusal
        functions: dict[int, tuple[Any, str, Parcel]] = {}
        """By the function's id, with the function, so that no other one takes its id."""
        stop = self._cancel
        entries = list[Entry]()
        given = list[_Given]()
        with contextlib.ExitStack() as undo:
            for pending, worker in calls:
                if id(pending.fn) not in functions:
                    functions[id(pending.fn)] = (pending.fn, *_packed_function(pending.fn, replace_object))
                _, name, function = functions[id(pending.fn)]
                arguments = self._packed((pending.args, dict(pending.kwargs)), replace_object, is_awaited)
                if arguments.path is not None:
                    undo.callback(arguments.release)
                call_id = uuid.uuid4().hex
                entries.append(Entry(Call(call_id, name, arguments, job_id or call_id), function, worker))
                given.append(_Given(CallFuture(call_id, stop), arguments, entries[-1]))
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

    def _packed(self, value: object, replace_object: pickling.Replace | None, is_awaited: bool) -> Parcel:
        pickled = sources.pack(value, label=("args", "kwargs"), replace=replace_object)
        parcel = Parcel(pickled.data, pickled.buffers)
        if parcel.nbytes <= INLINE_BYTES:
            return parcel
        if self._is_here:
            with contextlib.suppress(OSError):  # no room: Dask carries it
                return self._reaches.to(self._nodes[0].instance).put(parcel)
        return parcel if is_awaited else Parcel(parcel.data, tuple(bytearray(buffer) for buffer in parcel.buffers))

    def _ship(self) -> None:
        with self._lock:
            self._to_stop -= self._queue.drop(self._to_stop) if self._to_stop else set()
            shipments = self._wanted() if not self._is_closing and not self._is_cut else []
        for shipment in shipments:
            try:
                self._send(shipment)
            except Exception as error:  # whoever waits for these calls must hear of it, whichever thread this is
                self._on_unsent(shipment, error)

    def _wanted(self) -> list[Shipment]:
        """What should go out now, without the calls that nobody waits for: cancelled while they were out, and handed back."""
        wanted = list[Shipment]()
        while shipments := self._queue.ship():
            for shipment in shipments:
                calls = shipment.batch.calls
                kept = tuple(call for call in calls if call.call_id in self._given)
                if len(kept) < len(calls):
                    shipment.batch = shipment.batch._replace(calls=kept)
                    for call_id in {call.call_id for call in calls} - {call.call_id for call in kept}:
                        self._queue.ended(call_id)
                if kept:
                    wanted.append(shipment)
        return wanted

    def _on_unsent(self, shipment: Shipment, error: Exception) -> None:
        """A batch has not gone out. It waits again, if it is not its own fault."""
        call_ids = [call.call_id for call in shipment.batch.calls]
        with self._lock:
            self._sent_to.pop(shipment.number, None)
        if self._is_cut or isinstance(error, NotSent | OSError | Unreachable):
            with self._lock:
                self._queue.returned(call_ids)
        else:
            failure = NodeLost(f"the call could not be sent: {error}")
            failure.__cause__ = error
            self._end_with(call_ids, failure)

    def _send(self, shipment: Shipment) -> None:
        """Send a batch. Whatever is raised, it has not gone out."""
        batch, worker = shipment.batch, shipment.worker
        if self._is_here:
            batch = self._with_functions_in(batch, self._reaches.to(self._nodes[0].instance))
        elif any(parcel.nbytes > INLINE_BYTES for parcel in (*batch.functions.values(), *(call.arguments for call in batch.calls))):
            batch, worker = self._laid_down(shipment)
        address = self._workers.get(worker) if worker else None
        if worker and address is None:
            raise NotSent
        message = {
            "op": RUN_BATCH,
            "key": self._key(shipment),
            "batch": pickle.dumps(batch, protocol=5),
            "annotations": {"workers": [address]} if address else {},
        }
        with self._lock:  # sent and noted at once: a connection that is cut leaves no batch of which it is not known whether it has gone out
            client = self._client
            if client is None or (worker and self._workers.get(worker) != address):
                raise NotSent
            task = distributed.Future[Any](self._key(shipment), client)
            try:
                cast(Any, client)._send_to_scheduler(message)  # hands it to Dask's thread, and does not wait
            except ClosedClientError as error:
                raise NotSent from error
            self._note(shipment, task)
            if worker and address:
                self._sent_to[shipment.number] = (worker, address)
        self._follow(shipment, task, client)

    def _key(self, shipment: Shipment) -> str:
        return f"skyward-{shipment.number}{self._key_end}"

    @property
    def _key_end(self) -> str:
        return f"-{self._topic[-8:]}"

    def _note(self, shipment: Shipment, task: distributed.Future[Any]) -> None:
        self._tasks[shipment.number] = task
        self._shipments[shipment.number] = shipment

    def _follow(self, shipment: Shipment, task: distributed.Future[Any], client: distributed.Client) -> None:
        # Not task.add_done_callback: that starts a thread which stays with the process for good.
        call: Callable[..., object] = cast(Any, client.loop).add_callback
        with contextlib.suppress(RuntimeError):  # its thread has ended: whoever connects next asks what has become of this one
            call(done_callback, task, lambda done: self._inbox.put(lambda: self._on_task_end(shipment, done)))

    def _laid_down(self, shipment: Shipment) -> tuple[Batch, str]:
        """Put the large arguments of a batch into the memory of the node that is to run it; return the batch without them, and that node's worker."""
        batch = shipment.batch
        load = self._load() if shipment.worker is None else {}
        with self._lock:
            worker = shipment.worker or self._freest(load)
            node = self._nodes.get(_rank(worker)[0]) if worker else None
            if worker is None or node is None:
                raise NotSent
            self._sent_to[shipment.number] = (worker, self._workers.get(worker, ""))
            reach = self._reaches.to(node.instance)
        calls = list[Call]()
        for call in batch.calls:
            if call.arguments.nbytes > INLINE_BYTES:
                there = reach.put(call.arguments)
                if (given := self._given.get(call.call_id)) is not None:
                    self._clear_aside(given)
                    given.aside = (reach, there)
                call = call._replace(arguments=there)  # noqa: PLW2901
            calls.append(call)
        return self._with_functions_in(batch._replace(calls=tuple(calls)), reach), worker

    def _load(self) -> Mapping[str, Sequence[str]]:
        """The keys of the batches that each worker has, as the scheduler knows it: asked only where some are out to workers of its own choice."""
        with self._lock:
            is_known = self._shipments.keys() <= self._sent_to.keys() or len(self._queue.workers or ()) < 2
        if is_known:
            return {}
        try:
            return self._ask("skyward_load", PING_SECONDS)
        except (SkywardError, OSError):
            return {}  # it is out of reach, which is noticed elsewhere

    def _freest(self, load: Mapping[str, Sequence[str]]) -> str | None:
        """The worker with most slots free, by what the scheduler has said, and by what is on its way there.

        Of a batch whose last call has ended we know before the scheduler does.
        """
        unended = {self._key(shipment) for shipment in self._shipments.values() if shipment.unended}
        ours = Counter(name for number, (name, _) in self._sent_to.items() if (shipment := self._shipments.get(number)) is None or shipment.unended)

        def free(name: str) -> int:
            node = self._nodes.get(_rank(name)[0])
            there = sum(key in unended or not key.endswith(self._key_end) for key in load.get(name, ()))
            return (node.slots if node is not None else 0) - max(there, ours[name])

        return max(self._queue.workers or (), key=free, default=None)

    def _clear_aside(self, given: _Given) -> None:
        """Remove arguments that lie on a node and are not needed there any more."""
        if given.aside is not None:
            reach, there = given.aside
            given.aside = None
            self._takers.submit(reach.release, there)

    def _with_functions_in(self, batch: Batch, reach: Reach) -> Batch:
        """Put large functions into the memory of a node, once each: they stay there for the calls to come. Those without room travel in the message."""
        functions = dict(batch.functions)
        for name, function in batch.functions.items():
            if function.nbytes <= INLINE_BYTES:
                continue
            place = (reach.instance.id, name)
            with self._putting:  # else several threads would put it there at once
                if place not in self._functions_at:
                    try:
                        self._functions_at[place] = reach.put(function)
                    except (OSError, CommandFailed):
                        continue
            functions[name] = self._functions_at[place]
        return batch._replace(functions=functions)

    def _cancel(self, call_id: str) -> None:
        with self._lock:
            self._to_stop.add(call_id)
        self._stop_soon()
        self._inbox.put(lambda: self._on_cancelled(call_id))

    def _stop_soon(self) -> None:
        with self._lock:
            client = self._client
            if client is None or self._is_stopping or self._is_cut or self._is_closing:
                return
            self._is_stopping = True
        cast(Any, client.loop).add_callback(self._stop_on_workers)

    def _stop_on_workers(self) -> None:
        """Stop all calls that are to be stopped by now, with one message, however many they are."""
        with self._lock:
            self._is_stopping = False
            if self._client is None or self._is_cut or self._is_closing:
                return  # told when the scheduler answers again
            calls = self._to_stop - self._queue.drop(self._to_stop)
            self._to_stop.clear()
            calls = {call_id for call_id in calls if self._queue.is_out(call_id)}
            if calls:
                self._tell_scheduler(cancel(calls))

    def _stop_all_cancelled(self) -> None:
        """The scheduler answers again: tell it of all calls that are out and nobody waits for, as it may have heard of none of them."""
        with self._lock:
            self._is_stopping = False  # by a thread that has ended with the connection before
            self._to_stop.update(call_id for call_id in self._queue.all_out() if call_id not in self._given)
            is_any = bool(self._to_stop)
        if is_any:
            self._stop_soon()

    # ── news in, all in the inbox thread ─────────────────────────────────────────────────────────────────────────────

    def _handle_inbox(self) -> None:
        ticked = time.monotonic()
        while True:
            try:
                items = [self._inbox.get(timeout=TICK_SECONDS)]
            except queue.Empty:
                items = [self._lose_unheard]
            if time.monotonic() - ticked > TICK_SECONDS:
                ticked = time.monotonic()
                items.append(self._tick)
            for item in items:
                if item is None:
                    return
                try:
                    item()
                except Exception:
                    _log.exception("a message from the pool could not be handled")
            self._tell_progress()

    def _on_report(self, message: bytes) -> None:
        report: Report = pickle.loads(message)
        usd_per_second = self._count(report.instance_id, report.news)
        for item in report.news:
            if isinstance(item, Output):
                for line in item.lines:
                    self._emit(LogLine(report.node, report.instance_id, line, item.timestamp, item.call_id, item.stream, item.level))
            elif item.ending is not Ending.RETURNED:
                self._wait_for_lines()
                self._on_outcome(item, report.node, usd_per_second)
        with self._lock:
            self._queue.returned([item.call_id for item in report.news if isinstance(item, Outcome) and item.ending is Ending.RETURNED])
        self._ship()
        if self._following.number - self._acknowledged > ACKNOWLEDGED_TOGETHER:
            self._acknowledge()

    def _count(self, instance_id: str, news: Iterable[Outcome | Output]) -> float | None:
        """Have the time of calls that have ended counted; return what a second of theirs costs, in USD, if anybody counts."""
        if self._counts is None:
            return None
        seconds = sum(item.seconds for item in news if isinstance(item, Outcome))
        return self._counts.ran(instance_id, seconds) / seconds if seconds else 0.0

    def _on_seen(self, seen: Iterable[Ran]) -> None:
        assert self._counts is not None
        for instance_id, process, seconds in seen:
            processes = self._seen.setdefault(instance_id, {})
            processes[process] = seconds
            self._counts.seen_running(instance_id, sum(processes.values()))

    def _on_outcome(self, outcome: Outcome, node: int, usd_per_second: float | None) -> None:
        self.busy_at = time.monotonic()
        with self._lock:
            self._queue.ended(outcome.call_id, outcome.seconds if outcome.ending is Ending.RESULT else None)
            given = self._given.pop(outcome.call_id, None)
        if given is not None:
            given.future.seconds = outcome.seconds
            given.future.cost = None if usd_per_second is None else outcome.seconds * usd_per_second
        if given is None or not (given.future.running() or given.future.set_running_or_notify_cancel()):
            self._drop(outcome)
            if given is not None:
                self._end(given)
        elif outcome.parcel.path is None or self._is_here:
            self._settle(given, outcome, outcome.parcel, node)
        else:
            given.lies_at = str(outcome.parcel.path)
            given.take_until = time.monotonic() + TAKE_SECONDS
            self._taking[outcome.call_id] = given
            self._takers.submit(self._take, given, outcome, node)  # it may take seconds, and other calls' news must not wait

    def _settle(self, given: _Given, outcome: Outcome, parcel: Parcel, node: int) -> None:
        try:
            value = _value(outcome, parcel, node)
        except BaseException as error:
            self._end(given, error=error)
        else:
            self._end(given, value=value)
        finally:
            outcome.parcel.release()

    def _take(self, given: _Given, outcome: Outcome, node: int) -> None:
        """Fetch a large outcome from the node's memory. In a thread of its own."""
        try:
            parcel = self._reach_of(outcome.parcel).take(outcome.parcel)
        except ConnectionLost as error:
            cut_off = _CutOff(outcome, node, error, given.take_until)
            self._inbox.put(lambda: self._cut_off.update({outcome.call_id: cut_off}))
        except Exception as error:
            cause = error
            self._inbox.put(lambda: self._on_untaken(given, cause))
        else:
            self._inbox.put(lambda: self._on_taken(given, outcome._replace(parcel=Parcel(b"")), parcel, node))

    def _on_taken(self, given: _Given, outcome: Outcome, parcel: Parcel, node: int) -> None:
        if self._taking.pop(outcome.call_id, None) is not None:
            self._settle(given, outcome, parcel, node)

    def _take_again(self) -> None:
        """Ask for the outcomes that could not be fetched once more, where the way to their node is there again; give up those whose node is lost."""
        for call_id, cut_off in list(self._cut_off.items()):
            given = self._taking.get(call_id)
            node = self._node_of(cut_off.outcome.parcel)
            if given is None or node is None or time.monotonic() > cut_off.until:
                del self._cut_off[call_id]
                if given is not None:
                    self._on_untaken(given, cut_off.error)
            elif self._reaches.to(node.instance).is_connected:
                del self._cut_off[call_id]
                self._takers.submit(self._take, given, cut_off.outcome, cut_off.node)
            elif not any(_rank(name)[0] == node.rank for name in list(self._workers)):
                del self._cut_off[call_id]
                self._on_untaken(given, cut_off.error)

    def _on_untaken(self, given: _Given, cause: BaseException) -> None:
        call_id, entry = given.future.call_id, given.entry
        reason = f"the call ended, but its result could not be fetched: {cause}"
        if self._taking.pop(call_id, None) is None:
            return
        entry.losses += 1
        if entry.losses <= self._retries and not self._is_closing:
            self._emit(CallRetrying(call_id, entry.losses + 1, self._retries + 1, reason))
            with self._lock:
                self._given[call_id] = given
                self._queue.add([entry])
            self._ship()
        else:
            self._end(given, error=self._node_lost(given, reason, cause))

    def _abandon(self, error: SkywardError) -> None:
        """The pool ends: results that are on their way come too late."""
        self._cut_off.clear()
        taking, self._taking = list(self._taking.values()), {}
        for given in taking:
            self._end(given, error=error)

    def _drop(self, outcome: Outcome) -> None:
        """Remove what nobody waits for any more."""
        if self._is_here:
            outcome.parcel.release()
        elif outcome.parcel.path is not None:
            reach = self._reach_of(outcome.parcel)
            self._takers.submit(reach.release, outcome.parcel)

    def _reach_of(self, parcel: Parcel) -> Reach:
        """The way to the node in whose memory a parcel lies: its folders bear the instance's id."""
        node = self._node_of(parcel)
        if node is None:
            raise NodeLost("the value lies on a node that this client does not know: it came in the place of another one, or is lost")
        return self._reaches.to(node.instance)

    def _node_of(self, parcel: Parcel) -> Node | None:
        path = str(parcel.path)
        return next((node for node in list(self._nodes.values()) if node.instance.id in path), None)

    def _on_task_end(self, shipment: Shipment, task: distributed.Future[Any]) -> None:
        """The truth about a batch: whatever its reports have not told is in the task's result, or lost with its worker."""
        if self._tasks.get(shipment.number) is not task:
            return
        if task.status in ("cancelled", "lost") and (self._client is None or self._client.status != "running"):
            return  # the connection is cut: what has become of the batch is not known
        with self._lock:
            self._tasks.pop(shipment.number, None)
            self._shipments.pop(shipment.number, None)
            self._sent_to.pop(shipment.number, None)
            left = self._queue.unended(shipment)
        if left and task.status == "finished":
            self._fetch(task, left)
        elif left and not self._is_closing:
            self._lose_calls(left, _cause(task))
        task.release()
        self._ship()

    def _fetch(self, task: distributed.Future[Any], call_ids: Sequence[str]) -> None:
        try:
            outcomes = cast(Told, self.client.gather(task, direct=self._is_here))
        except Exception as error:
            self._lose_calls(call_ids, f"the call ended, but its result could not be fetched: {error}", error)
            return
        with self._lock:
            self._queue.returned([call_id for call_id in call_ids if outcomes[call_id].ending is Ending.RETURNED])
        usd_per_second = self._count(outcomes.instance_id, [outcomes[call_id] for call_id in call_ids])
        for call_id in call_ids:
            if outcomes[call_id].ending is not Ending.RETURNED:
                self._on_outcome(outcomes[call_id], outcomes.node, usd_per_second)

    def _on_cancelled(self, call_id: str) -> None:
        with self._lock:
            given = self._given.pop(call_id, None)
        if given is not None:
            given.future.set_running_or_notify_cancel()
            self._end(given)

    def _on_pool_news(self, message: bytes, client: distributed.Client) -> None:
        if client is not self._client:
            return  # of a scheduler of before
        news = pickle.loads(message)
        if isinstance(news, dict):
            self._emit(Metrics(**cast("dict[str, Any]", news)))
        elif isinstance(news, WorkerJoined):
            self._join(news.name, news.address)
            self._ship()
        elif isinstance(news, WorkerHeld):
            self._on_held(news.address, news.left)
            self._ship()
        elif isinstance(news, WorkerLeft) and not self._is_closing:
            self._leave(news.name, news.address)

    def _join(self, name: str, address: str) -> None:
        rank = _rank(name)[0]
        with self._lock:
            was_complete = self.has(rank)
            if (before := self._workers.get(name)) not in (None, address):
                self._held.pop(str(before), None)
            self._workers[name] = address
            self._count_slots()
            node = self._nodes.get(rank)
            is_complete = self.has(rank)
        if node is not None and is_complete and not was_complete:
            self._emit(BootstrapCompleted(node.instance.id))
            if self._watcher is not None:
                self._watcher.joined(rank)

    def _leave(self, name: str, address: str) -> None:
        with self._lock:
            if self._workers.get(name) != address:
                return  # its successor is there already
            del self._workers[name]
            self._held.pop(address, None)
            self._count_slots()
        self._take_back_from(address)
        if self._watcher is not None:
            self._watcher.left(_rank(name)[0])

    def _take_back_from(self, address: str) -> None:
        """Calls meant for a worker that is gone wait in the scheduler for ever, if it had not begun them: give them up there, and wait here."""
        with self._lock:
            meant = [number for number, (_, sent_to) in self._sent_to.items() if sent_to == address]
            tasks = {number: self._tasks.get(number) for number in meant}
        for number, task in tasks.items():
            if task is None or task.status != "pending":
                continue  # it ends by itself
            with self._lock:
                shipment = self._shipments.pop(number, None)
                self._tasks.pop(number, None)
                self._sent_to.pop(number, None)
                left = self._queue.unended(shipment) if shipment is not None else []
            task.release()
            self._lose_calls(left, "its worker is gone")

    def _lose(self, error: SkywardError) -> None:
        with self._lock:
            self._lost = self._lost or error
            left = self._queue.clear()
        self._fail(left, error)
        for call_id in list(self._cut_off):
            self._cut_off.pop(call_id)
            if (given := self._taking.pop(call_id, None)) is not None:
                self._end(given, error=error)

    def _count_slots(self) -> None:
        here = {name: node for name in self._workers if (node := self._nodes.get(_rank(name)[0])) is not None}
        held = {name: self._held[address] for name in here if (address := self._workers[name]) in self._held}
        self._queue.workers = [name for name in here if name not in held]
        # What a held worker still has is out, as what others have: it must not take the place of a call that another slot is free for.
        self._queue.slots = max(1, sum(min(node.slots, held.get(name, node.slots)) for name, node in here.items()))

    def _on_held(self, address: str, left: int | None = None) -> None:
        """A worker is given no more calls. None: it is not known how many it has left."""
        with self._lock:
            if address in self._workers.values():
                self._held[address] = self._held.get(address, MANY) if left is None else left
                self._count_slots()

    def _lose_calls(self, call_ids: Collection[str], reason: str, cause: BaseException | None = None) -> None:
        """Calls went away with their node: those that may run again wait for another one, the others raise NodeLost."""
        again, lost = list[tuple[str, int]](), list[tuple[str, NodeLost]]()
        with self._lock:
            for call_id in call_ids:
                given = self._given.get(call_id)
                if given is None:
                    self._queue.ended(call_id)
                    continue
                losses = given.entry.losses = given.entry.losses + 1
                if losses <= self._retries and not self._is_closing and self._drained is None and given.arguments.path is None:
                    given.aside = None
                    again.append((call_id, losses + 1))
                else:
                    if not self._queue.ended(call_id):
                        self._queue.drop({call_id})
                    lost.append((call_id, self._node_lost(given, reason, cause)))
            self._queue.returned([call_id for call_id, _ in again])
        for call_id, attempt in again:
            self._emit(CallRetrying(call_id, attempt, self._retries + 1, reason))
        for call_id, error in lost:
            self._fail([call_id], error)
        self._ship()

    def _node_lost(self, given: _Given, reason: str, cause: BaseException | None) -> NodeLost:
        if not self._retries:
            advice = "submit it again if it may run twice, or open the pool with retries=1 or more"
        elif given.arguments.path is not None:
            advice = "its arguments went with it, being too large to be kept here: submit it again"
        else:
            advice = f"it was lost {given.entry.losses} times (ComputePool(retries={self._retries}))"
        error = NodeLost(f"{reason}; {advice}")
        error.__cause__ = cause
        return error

    def _end_with(self, call_ids: Sequence[str], error: SkywardError) -> None:
        with self._lock:
            for call_id in call_ids:
                self._queue.ended(call_id)
        self._fail(call_ids, error)

    def _fail(self, call_ids: Sequence[str], error: SkywardError) -> None:
        for call_id in call_ids:
            with self._lock:
                given = self._given.pop(call_id, None)
            if given is not None and (given.future.running() or given.future.set_running_or_notify_cancel()):
                self._end(given, error=error)

    def _end(self, given: _Given, value: Any = None, error: BaseException | None = None) -> None:
        if given.future.cancelled():
            self._cancelled += 1
        else:
            self._done += 1
        if given.future.cancelled():
            pass
        elif error is not None:
            self._failed += not isinstance(error, ResultNotLoaded)  # the call itself has not failed
            given.future.set_exception(error)
        else:
            given.future.set_result(value)
        given.arguments.release()  # last: freeing a hundred megabytes takes longer than the rest together
        self._clear_aside(given)

    def _tick(self) -> None:
        """Now and then: look whether the head is still there."""
        if self._given:
            self.busy_at = time.monotonic()
        self._acknowledge()
        self._ship()
        client = self._client
        if client is None or self._is_closing or self._is_cut:
            return
        self._take_again()
        if not self._is_pinging and time.monotonic() - self._pinged_at > PING_SECONDS:
            self._is_pinging, self._pinged_at = True, time.monotonic()
            cast(Any, client.loop).add_callback(self._ping, client)
        if client.status != "running" or self._unanswered >= PINGS:
            self._is_cut = True
            if self._watcher is not None:
                self._watcher.cut()

    async def _ping(self, client: distributed.Client) -> None:
        """Ask the scheduler for how long calls have run: one that stands still keeps its connections, and says nothing. In Dask's loop.

        Counted and not timed: a program that holds the interpreter for long misses one answer, not several in a row.
        """
        try:
            async with asyncio.timeout(PING_SECONDS):
                seen = await getattr(cast(Any, client.scheduler), RAN)()
            self._unanswered = 0
            if self._counts is not None:
                self._inbox.put(lambda: self._on_seen(seen))
        except Exception as error:
            _log.debug("the scheduler does not answer: %s", error)
            self._unanswered += 1
        finally:
            self._is_pinging = False

    def _on_resumed(self, resumed: Resumed) -> None:
        """The scheduler answers, again or for the first time: listen to the batches that were out, and let go of those that have ended meanwhile.

        Called in Dask's loop thread: what becomes of a task is told right after this, to futures that are there by then.
        """
        with self._lock:
            client = self._client
            if client is None:
                return  # it is cut again, and asked again
            out = {self._key(shipment): shipment for shipment in self._before}
            self._before = []
            tasks = {key: distributed.Future[Any](key, client) for key in out if key in resumed.tasks}
            for key, task in tasks.items():
                self._note(out[key], task)
            gone = {address for name, address in self._sent_to.values() if self._workers.get(name) != address}
        for key, shipment in out.items():
            if key in tasks:
                self._follow(shipment, tasks[key], client)
            elif resumed.is_known and key not in resumed.gone:
                self._inbox.put(lambda shipment=shipment: self._on_not_come(shipment))
            else:
                self._unheard[shipment.number] = shipment  # lost, unless what was reported of it is still on its way here
        for address in gone:  # their leaving was noticed before their tasks were here
            self._inbox.put(lambda address=address: self._take_back_from(address))
        if done := resumed.tasks.keys() - out.keys():
            self._tell_scheduler(let_go(done))

    def _on_not_come(self, shipment: Shipment) -> None:
        """A batch went out when nothing came through any more: the scheduler has never heard of it, and it is sent again."""
        with self._lock:
            if self._shipments.pop(shipment.number, None) is not None:
                self._sent_to.pop(shipment.number, None)
                self._queue.returned(self._queue.unended(shipment))
        self._ship()

    def _lose_unheard(self) -> None:
        unheard, self._unheard = self._unheard, {}
        for number, shipment in unheard.items():
            with self._lock:
                self._shipments.pop(number, None)
                self._sent_to.pop(number, None)
                left = self._queue.unended(shipment)
            self._lose_calls(left, "it was lost while its scheduler could not be reached")

    def _acknowledge(self) -> None:
        number = self._following.number
        if number != self._acknowledged:
            self._acknowledged = number
            self._tell_scheduler(self._following.acknowledge())

    def _tell_progress(self) -> None:
        now = time.monotonic()
        counts = (self._submitted, self._done, self._failed, self._cancelled)
        is_all = self._done + self._cancelled == self._submitted
        if counts != self._progress_counts and (now - self._progress_told > PROGRESS_SECONDS or is_all):
            self._progress_told, self._progress_counts = now, counts
            self._emit(CallProgress(*counts))


def _packed_function(fn: Callable[..., Any], replace_object: pickling.Replace | None) -> tuple[str, Parcel]:
    """The function's pickle, named by its content: a runner that has seen it is not sent it again, and keeps what the function keeps in its globals."""
    pickled = sources.pack(fn, label=getattr(fn, "__name__", "function"), replace=replace_object)
    digest = hashlib.sha256(pickled.data)
    for buffer in pickled.buffers:
        digest.update(buffer)
    return digest.hexdigest(), Parcel(pickled.data, pickled.buffers)


def _value(outcome: Outcome, parcel: Parcel, node: int) -> Any:
    """The call's result, which `parcel` holds, or its exception raised."""
    if outcome.ending is Ending.RESULT:
        data, buffers = parcel.contents()
        try:
            return pickling.loads(data, buffers)
        except MemoryError:
            raise
        except Exception as failure:  # loading runs the code of whatever types the result has
            raise _not_loaded(failure, data, buffers, node) from failure
    if outcome.ending is Ending.ERROR:
        raise _remote_exception(outcome, parcel, node)
    if outcome.ending is Ending.CANCELLED:
        raise CallCrashed(f"the call was stopped on node {node}", node, outcome.exit_code, outcome.output)
    if outcome.ending is Ending.OUT_OF_MEMORY:
        by = f" by {outcome.text}" if outcome.text else ""
        message = f"the call used more memory than its worker on node {node} has, and was killed{by}; ask for more with ComputePool(memory=...)"
        raise CallOutOfMemory(message, node, outcome.exit_code, outcome.output)
    raise CallCrashed(f"the process of the call died on node {node}: {outcome.text or _death(outcome.exit_code)}", node, outcome.exit_code, outcome.output)


def _not_loaded(failure: Exception, data: Bytes, buffers: Sequence[Bytes], node: int) -> ResultNotLoaded:
    missing = failure.name.partition(".")[0] if isinstance(failure, ModuleNotFoundError) and failure.name else ""
    if missing:
        why = f"its type is of {missing!r}, which is not installed here. Install the package that has it and take error.load()"
    else:
        why = f"{one_line(failure)}. Mend that and take error.load()"
    message = (
        f"the call succeeded on node {node}, but its result cannot be loaded here: {why}; or let the function return plain values (numbers, lists, "
        "dictionaries, NumPy arrays). There is no need to run it again: error.result_bytes keeps the result"
    )
    return ResultNotLoaded(message, node, missing, data, buffers)


def _remote_exception(outcome: Outcome, parcel: Parcel, node: int) -> BaseException:
    try:
        error = exceptions.unpack(*parcel.contents(), node, outcome.text)
    except Exception:
        return exceptions.remote_error(node, outcome.text)
    if note := note_for(error):
        bare_exceptions.add_note(error, note)
    return error


def _death(exit_code: int | None) -> str:
    if exit_code is None:
        return "nobody saw how"
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    return f"killed by {signal.Signals(-exit_code).name}{' (out of memory?)' if exit_code == -signal.SIGKILL else ''}"


def _cause(task: distributed.Future[Any]) -> str:
    error = task.exception(timeout=1) if task.status == "error" else None
    if error is None or isinstance(error, KilledWorker):  # whose own words are Dask's advice to look at logs that nobody has
        return "the worker that ran it is gone"
    return f"the scheduler could not take it: {error}"


def _rank(worker_name: str) -> tuple[int, int]:
    """Rank of the node and index of the worker, from a worker's name."""
    rank, _, index = worker_name.partition("-")
    return int(rank), int(index)
