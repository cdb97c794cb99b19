"""Dask on the nodes, seen from the client: the face of the engine, which any thread may call.

    cluster ──messages──▶ owner (one thread) ──▶ dispatcher (pure: what becomes of calls)
                            │ ▲
                            ▼ │ posts
                          connection (Dask's thread), transfers, results, callbacks

The caller's thread packs calls and posts them; the owner's thread decides everything else about them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from types import MappingProxyType
from typing import Any

import distributed  # noqa: TID253 - with connection.py owns Dask in this package

from skyward_core.compute import PendingCompute
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.connection import NotSent, SchedulerConnection, UserClient, connect
from skyward_core.engine.detached_calls import DetachedCalls
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.draining import BroadcastRanks, NodeDraining
from skyward_core.engine.futures import CallFuture, ItemFuture
from skyward_core.engine.owner import Counts, EngineThread, Watcher
from skyward_core.engine.packing import ArgumentPacker, packed_entries, surroundings_of_calls
from skyward_core.errors import NodeLost, PoolClosed, SkywardError
from skyward_core.events.events import CallRetrying, SkywardEvent
from skyward_core.machines.instances import Lease
from skyward_core.serialization import pickling
from skyward_core.transport.transport import Transports
from skyward_core.wire import answers
from skyward_core.wire import protocol as messages
from skyward_core.wire.masking import SecretValues
from skyward_core.wire.messages import Call, Parcel
from skyward_core.wire.protocol import BUSY_TIMES_NOW, END_CLIENT
from skyward_core.wire.shared_values import SharedValue
from skyward_core.work import NO_WORK, Work

TICK_SECONDS = 0.5
JOIN_POLL_SECONDS = 0.01
CONNECT_SECONDS = 30.0
BUSY_SECONDS = 2.0
SAMPLE_SECONDS = 2.0
"""How long the end of a pool or a use waits for a head that does not answer, and may be dead."""
LOOK_SECONDS = 0.5
"""How much longer the question itself may take."""

_log = logging.getLogger("skyward")


class Cluster:
    """The connection to a pool's Dask cluster. The pool calls `start`, which opens it, and `close`.

    States: new -> open -> closed. While it is open the scheduler may become unreachable (`Watcher.cut`). Then nothing
    is sent and no call is lost. The pool calls `resume` if the same scheduler answers again, `restart` if there is
    another one, or `fail_calls`.

    `delivered` returns the number of the last event that callbacks and displays have taken. `work` is that of this
    client.
    """

    def __init__(
        self,
        lease: Lease,
        certificate: PoolCertificate,
        transports: Transports,
        emit: Callable[[SkywardEvent], object],
        retries: int = 0,
        counts: Counts | None = None,
        secrets: SecretValues | None = None,
        delivered: Callable[[], int] = lambda: 0,
        work: Work = NO_WORK,
    ) -> None:
        is_local = all(node.instance.endpoint is None for node in lease.nodes)
        self.dispatcher = Dispatcher(lease.nodes, f"skyward-{uuid.uuid4().hex}", retries, is_local=is_local)
        self.owner = EngineThread(self.dispatcher, transports, emit, delivered, counts, secrets, work)
        self.owner.pool = lease.pool_id
        self._certificate = certificate
        self._transports = transports
        self._ranks = BroadcastRanks(node.rank for node in lease.nodes)
        """The pool's ranks: a node that is lost is soon replaced under its rank."""
        # nodes that come and leave
        self.draining = NodeDraining(self.owner, self._ranks)
        self.retries = retries
        self.own_use: Callable[[], str] = str
        """Returns the id of the use that pays for calls which name none; "" if there is none."""
        self._emit = emit
        self._ended_uses = set[str]()
        """The uses of the pool that pay for no call any more."""
        self._is_closing = False
        self._shared: weakref.WeakSet[SharedValue] = weakref.WeakSet()
        """The scattered values that nodes may have."""
        self.detached = DetachedCalls(self.owner, transports, retries)
        """The calls that outlive their client."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(
        self, address: str, deadline: float, check: Callable[[], None], patience_seconds: float = math.inf
    ) -> None:
        """Connect to the scheduler and wait for all workers. `check` is called from time to time, and raises if a node
        cannot join.

        Raises NodeLost at the deadline (of time.monotonic). If the patience ends earlier, it returns without the
        missing workers.
        """
        self.owner.start()
        self._connect(address, min(CONNECT_SECONDS, max(1.0, deadline - time.monotonic())), deadline)
        checked = time.monotonic()
        patience = checked + patience_seconds
        while missing := [name for name in self._names(self._ranks.all) if name not in self.dispatcher.members.workers]:
            if time.monotonic() > min(patience, deadline) and patience_seconds < math.inf:
                return
            if time.monotonic() > deadline:
                raise NodeLost(f"workers {', '.join(sorted(missing))} have not joined the pool in time")
            if time.monotonic() - checked > TICK_SECONDS:
                checked = time.monotonic()
                check()
            time.sleep(JOIN_POLL_SECONDS)

    def watch(self, watcher: Watcher) -> None:
        """Report workers that join and leave to this watcher from now on."""
        self.owner.watcher = watcher

    def set_steward(self, counts: Counts | None, secrets: SecretValues | None, ranks: Iterable[int] | None) -> None:
        """Count the cost of calls, and let broadcasts use these ranks: this process keeps the pool from now on.

        None: it does not any more (`NodeDraining.set_steward`).
        """
        self.owner.post(lambda: self.owner.set_counts(counts, secrets))
        self.draining.set_steward(ranks)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the scheduler, as far as is known: no longer from `Watcher.cut` on."""
        return self.dispatcher.is_connected

    def close(self, error: SkywardError) -> None:
        """End the connection; calls that have not ended raise this error.

        May be called twice, and after a start that failed.
        """
        if self._is_closing:
            return
        self._is_closing = True
        self.owner.lost = self.owner.lost or error
        connection: list[SchedulerConnection | None] = []

        def end() -> None:
            self.dispatcher.close(error)
            connection.append(self.owner.disconnect())

        self.owner.close(end)
        for it in filter(None, connection):
            it.close()

    def leave(self, reason: str, error: SkywardError | None = None) -> None:
        """Close, stop the calls of this client, and let the scheduler drop what it keeps for it.

        The calls raise `error`, or PoolClosed with the reason.

        Other clients go on using the pool.
        """
        if (connection := self.owner.connection) is not None:
            with contextlib.suppress(NotSent):
                connection.send(messages.leave(self.dispatcher.topic))
        self.close(error or PoolClosed(reason))

    def drain(self, error: SkywardError | None) -> None:
        """Take no more calls. Those that have not begun raise this error; those that run may end.

        None: take calls again.
        """
        self.owner.drained = error
        self.owner.post(lambda: self.dispatcher.drain(error))

    @property
    def refusal(self) -> SkywardError | None:
        """Why the pool takes no more calls (`drain`); None if it takes them."""
        return self.owner.drained

    @property
    def client(self) -> distributed.Client:
        """The engine's own Dask client.

        Raises PoolClosed after the end, NodeLost while the scheduler is out of reach.
        """
        return self.owner.present_connection.client

    def user_client(self, address: Callable[[], str]) -> UserClient:
        """Return the owner of the user's Dask client, not connected so far. `address` returns the scheduler's."""
        return UserClient(address, self._certificate, lambda: self.owner.present_connection)

    @property
    def slots(self) -> int:
        """How many calls run at once."""
        return sum(node.workers * node.slots for node in self.dispatcher.members.nodes.values())

    @property
    def is_idle(self) -> bool:
        """True while no call runs or waits, and no result is on its way here."""
        return not self.owner.futures

    @property
    def busy_at(self) -> float:
        """When a call was last known to be running or waiting, on time.monotonic's clock."""
        return self.owner.ended_at if self.is_idle else time.monotonic()

    @property
    def topic(self) -> str:
        """By what the scheduler knows this client."""
        return self.dispatcher.topic

    def end_client(self, topic: str, seconds: float) -> tuple[bool, dict[str, dict[str, float]]]:
        """End the calls of another client, whose process is dead or was replaced, and wait until they hold no slot any
        more, for so many seconds at most.

        Return whether that is so, and for how many seconds they have held slots, by use and instance id. Raises
        NodeLost or PoolClosed if the scheduler is out of reach.
        """
        is_free, spent = self.owner.ask_for(
            lambda answer: answers.ended_client(answer, self.owner.note_unreadable),
            END_CLIENT,
            seconds + BUSY_SECONDS,
            topic=topic,
            seconds=seconds,
        )
        found: dict[str, dict[str, float]] = {}
        for instance_id, by_use in spent:
            for use, its_seconds in by_use.items():
                its = found.setdefault(use, {})
                its[instance_id] = its.get(instance_id, 0.0) + its_seconds
        return is_free, found

    def take_sample(self, seconds: float = SAMPLE_SECONDS) -> None:
        """Count for how long calls have held slots until now, those that run too: the last report of the workers may be
        some seconds old. Waits so long at most for the head. Raises nothing: without its answer that report counts.
        """
        try:
            told = self.owner.ask_for(
                lambda answer: answers.busy_times(answer, self.owner.note_unreadable),
                BUSY_TIMES_NOW,
                seconds + LOOK_SECONDS,
                topic=self.topic,
                seconds=seconds,
            )
            self.owner.run(lambda: self.owner.on_seen(told), seconds)
        except Exception as error:  # also of a head of an earlier release, which knows no such question
            _log.debug("the last seconds of running calls of %s are not counted: %r", self.owner.pool, error)

    def slots_held(self) -> dict[str, int]:
        """Return how many slots the calls of each use hold now, as far as is known here, also while they stop."""
        return {use: min(self.slots, batches) for use, batches in self.dispatcher.queue.batches_by_use().items()}

    def slots_at(self, rank: int) -> int:
        """Return how many calls run at once on a node; if it is not known, how many on the first one."""
        nodes = self.dispatcher.members.nodes
        node = nodes.get(rank) or nodes[min(nodes)]
        return node.workers * node.slots

    def has_work(self) -> bool:
        """Return whether any call runs or waits: of any client, a detached one, or a task of Dask's own.

        Asks the scheduler if this client has none.
        """
        if not self.is_idle:
            return True
        try:
            # the caller renews leases, and cannot wait for a silent head
            return self.owner.ask_for(answers.yes_or_no, "skyward_busy", BUSY_SECONDS)
        except (SkywardError, OSError):
            return False  # the scheduler is out of reach; pings notice that

    def has(self, rank: int) -> bool:
        """Return whether all workers of a node are present."""
        return self.dispatcher.members.has(rank)

    def missing(self, rank: int) -> list[int]:
        """Return the indexes of the workers of a node that are absent."""
        return self.dispatcher.members.missing(rank)

    # ── when the scheduler is out of reach ───────────────────────────────────────────────────────────────────────────

    def resume(self, address: str, timeout_seconds: float) -> None:
        """Connect again to the same scheduler; it sends the messages that were missed.

        Raises NodeLost if it does not answer in time.
        """
        self._disconnect()
        self._connect(address, timeout_seconds, time.monotonic() + timeout_seconds)

    def restart(self, lease: Lease, address: str, timeout_seconds: float) -> None:
        """Connect to another scheduler.

        Calls in flight are kept by workers that outlive the old one, or lost with it: they run again, or raise
        NodeLost.
        """
        self._disconnect()
        self.detached.schedulers += 1
        self.owner.run(
            lambda: self.dispatcher.restarted(
                lease.nodes, lambda parcel: os.path.exists(str(parcel.path)), time.monotonic()
            )
        )
        self._connect(address, timeout_seconds, time.monotonic() + timeout_seconds)

    def update_nodes(self, lease: Lease) -> None:
        """Note the nodes of the lease: some have replaced others."""
        self.owner.post(lambda: self.dispatcher.update_nodes(lease.nodes))

    def remove_node(self, rank: int) -> None:
        """Go on without the node of this rank, which is absent, and without a replacement."""
        self._ranks.leave_out(rank)
        self.owner.run(lambda: self.dispatcher.remove_node(rank))

    def fail_calls(self, error: SkywardError, rank: int | None = None) -> None:
        """Wait no longer for a node that is not replaced, or (None) for any: calls that need it raise the error."""
        if rank is None:
            self.owner.lost = self.owner.lost or error
        self.owner.post(lambda: self.dispatcher.fail_calls(error, rank))

    def _connect(self, address: str, timeout_seconds: float, deadline: float) -> None:
        """Connect, and wait for the scheduler's answer until the deadline: a frozen scheduler accepts connections and
        does not answer.
        """
        try:
            client = connect(address, self._certificate, timeout_seconds)
        except OSError as error:
            raise NodeLost(f"the pool's scheduler at {address} does not answer") from error
        connection = SchedulerConnection(client)
        try:
            answer = self.owner.run(lambda: self.owner.connect(connection))
        except BaseException as error:
            connection.close()
            if not isinstance(error, NotSent | PoolClosed):
                raise
            if self._is_closing:
                raise PoolClosed("the pool is closing") from error
            raise NodeLost(f"the pool's scheduler at {address} has closed the connection") from error
        try:
            answer.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, CancelledError) as error:
            if self._is_closing:
                raise PoolClosed("the pool is closing") from error
            self._disconnect(connection)
            raise NodeLost(f"the pool's scheduler at {address} takes connections and does not answer") from error

    def _disconnect(self, only: SchedulerConnection | None = None) -> None:
        """Close the connection. `only`: if it is this one; another thread may have made a newer one."""
        connection = self.owner.run(lambda: self.owner.disconnect(only))
        if connection is not None:
            connection.close()

    # ── calls out ────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        calls: Iterable[PendingCompute[Any]],
        replace_object: pickling.Replace | None = None,
        *,
        is_awaited: bool = False,
    ) -> list[CallFuture[Any]]:
        """Submit calls to any free slots; return their futures, in order. Raises NotPicklable, PoolClosed or NodeLost
        at once.

        `is_awaited`: the caller only waits until they have ended. It cannot change large arguments meanwhile, so they
        are not copied.
        """
        return self._take_in(((call, None) for call in calls), replace_object, None, is_awaited)

    def stream(self, call: PendingCompute[Any], replace_object: pickling.Replace | None, ahead: int) -> ItemFuture:
        """Submit a call whose items its consumer takes one by one; return its future. Raises as `submit` does."""
        (future,) = self._take_in([(call, None)], replace_object, None, is_awaited=False, ahead=ahead)
        assert isinstance(future, ItemFuture)
        return future

    def broadcast(
        self, call: PendingCompute[Any], replace_object: pickling.Replace | None = None, *, is_awaited: bool = True
    ) -> list[CallFuture[Any]]:
        """Submit a call once for each worker of the pool; return the futures in the order of the workers.

        The calls of a node that is away wait for its replacement: without them their share of the data would be
        missing. A node that joins later, or is to leave, is no part of it. If the function forms a group, a call that
        is lost raises NodeLost: it is not repeated alone.
        """
        with self._ranks.begin() as ranks:
            calls = ((call, worker) for worker in self._names(ranks))
            places = {name: (place, len(ranks)) for place, rank in enumerate(ranks) for name in self._names([rank])}
            return self._take_in(calls, replace_object, uuid.uuid4().hex, is_awaited, places=places)

    def note_retry(self, call_id: str, attempt: int, loss: NodeLost) -> None:
        """Emit that a group of calls runs again as a whole, by the first one's id; `attempt` counts from 1."""
        self._emit(CallRetrying(call_id, attempt, self.retries + 1, str(loss)))

    def _names(self, ranks: Iterable[int]) -> list[str]:
        """Names of all workers of these ranks, whether they are there or not, in their order."""
        return [name for rank in ranks for name in self.dispatcher.members.names_at(rank)]

    def _take_in(
        self,
        calls: Iterable[tuple[PendingCompute[Any], str | None]],
        replace_object: pickling.Replace | None,
        job_id: str | None,
        is_awaited: bool,
        ahead: int = 0,
        places: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> list[CallFuture[Any]]:
        """Pack calls, each with the name of its worker (None: any), and post them; `places` are the places of the
        workers' nodes in a broadcast.
        """
        self.owner.raise_if_refused()
        surroundings = surroundings_of_calls(self.own_use)
        if surroundings.use in self._ended_uses:
            raise PoolClosed("the use of the pool that would pay for the call has ended: open another one")
        with contextlib.ExitStack() as undo:
            place = self._place if self.dispatcher.is_local else None
            pack = ArgumentPacker(replace_object, place, is_copied=not is_awaited, surroundings=surroundings)
            entries = packed_entries(calls, pack, job_id, ahead, undo)
            for entry in entries if places else ():
                entry.call = entry.call._replace(place=places.get(entry.worker or ""))
            now = time.monotonic()
            for entry in entries:
                entry.submitted_at = now
            futures = [self._future(entry.call) for entry in entries]
            if self.owner.lost is not None:
                raise self.owner.lost
            undo.pop_all()
        self.owner.futures.update((future.call_id, future) for future in futures)
        for value in {value.name: value for entry in entries for value in entry.shared.values()}.values():
            self._keep_until_released(value)
        self.owner.post(lambda: self.dispatcher.submit(entries))
        if self._is_closing:  # the pool was closed meanwhile, perhaps without these calls
            self._end_late(futures)
        if surroundings.use in self._ended_uses:  # the use has ended meanwhile, perhaps without these calls
            self.cancel_for(surroundings.use)
        return futures

    def _future(self, call: Call) -> CallFuture[Any]:
        own = (self._cancel, self.owner.callbacks.put)
        future: CallFuture[Any] = (
            ItemFuture(call.call_id, call.ahead, *own, self._give_credit, self.owner.post)
            if call.ahead
            else CallFuture(call.call_id, *own)
        )
        future.use = call.use
        return future

    def _give_credit(self, call_id: str, below: int) -> None:
        self.owner.post(lambda: self.dispatcher.give_credit(call_id, below))

    def _keep_until_released(self, value: SharedValue) -> None:
        """Remove a scattered value from the nodes when nothing refers to it any more."""
        if value not in self._shared:
            self._shared.add(value)
            weakref.finalize(value, _release, weakref.ref(self), value.name).atexit = False

    def _end_late(self, futures: Iterable[CallFuture[Any]]) -> None:
        """Calls came in while the pool closed: those that it has not taken in raise its error."""
        self.owner.wait_for_end()
        for future in futures:
            if self.owner.futures.pop(future.call_id, None) is not None and future.claim():
                future.set_exception(self.owner.lost or PoolClosed("the pool is closed"))

    def _place(self, parcel: Parcel) -> Parcel:
        """Put large arguments into a file in this machine's memory. Raises OSError if there is no room."""
        nodes = self.dispatcher.members.nodes
        return self._transports.to(nodes[min(nodes)].instance).put(parcel)

    def cancel_for(self, use: str) -> None:
        """Stop the calls for which a use pays. A signal handler may call it."""
        for future in list(self.owner.futures.values()):  # callers add
            if future.use == use:
                future.cancel()

    def end_use(self, use: str) -> None:
        """Stop the calls for which a use pays, and take in no more of them."""
        self._ended_uses.add(use)
        self.cancel_for(use)

    def cancel_waiting(self, futures: Iterable[CallFuture[Any]]) -> None:
        """Cancel the calls that wait here; those that are on their way to a worker, or run, go on."""

        def cancel() -> None:
            self.dispatcher.flush(time.monotonic())  # calls for which a slot is free are sent first
            for future in futures:
                if not self.dispatcher.is_out(future.call_id):
                    future.cancel()

        with contextlib.suppress(PoolClosed):  # then none waits
            self.owner.run(cancel)

    def _cancel(self, call_id: str) -> None:
        self.owner.post(lambda: self.dispatcher.cancel(call_id))


def _release(cluster: weakref.ref[Cluster], name: str) -> None:
    """A scattered value was collected, in any thread: remove it from the nodes of a pool that is still open."""
    if (it := cluster()) is not None:
        it.owner.post(lambda: it.dispatcher.release_shared(name))
