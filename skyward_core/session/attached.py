"""A pool that another process has opened: this process uses it, keeps it alive and leaves it.

It neither replaces nodes nor pays, unless it becomes the steward of a named pool. Then `stewardship.Stewardship` does
both, with the same connection and the same transports.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyward_core.concurrency.loading import load
from skyward_core.concurrency.threads import PeriodicThread, side_by_side
from skyward_core.config.own_providers import provider_of_lease
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.errors import (
    CommandFailed,
    CommandTimedOut,
    CredentialsError,
    HostKeyChanged,
    LeaseLost,
    LedgerError,
    NodeLost,
    PoolClosed,
    SkywardError,
    Unreachable,
)
from skyward_core.events.events import CostFinal, SkywardEvent
from skyward_core.events.queue import EventQueue
from skyward_core.machines.instances import Lease, Node
from skyward_core.session.client_watch import LOOK_SECONDS, ClientWatcher, Follower, words_of_end
from skyward_core.session.sealed_lease import KeysInMemory, PoolKeys, find_lease
from skyward_core.transport.transport import Transport, Transports
from skyward_core.wire.checks import Unreadable
from skyward_core.wire.private_folders import NotPrivate, check_private
from skyward_core.wire.settings import SeenSettings
from skyward_core.work import NO_WORK, Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.engine.connection import UserClient
    from skyward_core.engine.owner import Watcher
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.session.clock import LeasePayments

_log = logging.getLogger("skyward")
KEY_BEGINS = "-----BEGIN "
MOST_BEAT_SECONDS = 5.0
LEDGER_BEATS = 24.0
"""How often a lease is renewed in the ledger while it lasts, at least; a lease of two minutes every five seconds."""
GUARD_SECONDS = 2.0  # an open node has started its guard long ago
JOIN_SECONDS = 5.0  # a worker that has crashed is back in one or two
ALL_AT_ONCE = 1000
LIVES_SECONDS = 5.0
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""This process, or this machine, has too much open; it says nothing of the pool."""
REACH_SECONDS = 20.0  # for a node that has just joined


class Attached:
    """One attachment to an open pool; the counterpart of the opener's `Session`.

    The pool object calls `start` and `stop`.
    """

    final: CostFinal | None = None
    receipt: Mapping[str, Any] | None = None
    why_ended: SkywardError | None = None

    def __init__(
        self,
        lease: Lease,
        key: str | None,
        sealed: PoolKeys | None,
        lease_seconds: float,
        retries: int,
        events: EventQueue,
        *,
        pays: bool = False,
        work: Work = NO_WORK,
        ledger: Ledger | None = None,
    ) -> None:
        """`pays`: this process reserves the money of a detached pool, as its opener did. `ledger` is that of this
        process as a client of the pool's name, which closes it; None: one of its own.
        """
        self.lease = lease
        self._given_lease = lease
        """As it was signed: `lease` has other paths of keys, and later other nodes."""
        self.name = lease.pool_id
        """What the pool is called in events: its name, or its id."""
        self._key = key
        self._sealed = sealed
        """What the ledger had for this lease; `key` goes before its SSH keys."""
        self._in_memory = KeysInMemory()
        self.cluster: Cluster | None = None
        self.user_client: UserClient | None = None
        self.is_running = False
        self.events = events
        self._lease_seconds = lease_seconds
        self._retries = retries
        self._work = work
        self.paid_seconds: Callable[[], float | None] = lambda: None
        """For how many seconds from now the nodes are paid; the steward sets it."""
        self.transports = Transports(lease_seconds, self.emit, lambda: self.paid_seconds())
        self.transports.lives_by_lease = True
        self._is_steward = False
        """Whether this process is the steward, which replaces lost nodes."""
        self.on_given_up: Callable[[SkywardError], object] = lambda _: None
        """Called with the error of its calls when the pool cannot be reached again; not when it is left."""
        self._stopping = threading.Lock()
        self._ended = threading.Event()
        self.watcher = ClientWatcher(
            lambda: self.cluster,
            self._resume,
            lease_seconds,
            self._ended,
            events.log,
            self._give_up,
            self._why_gone,
        )
        self._entry = KeptEntry(lease.pool_id, lease_seconds, events.log, ledger)
        self._follower = Follower(
            lambda: self.lease, self._reach_new, self._use, partial(find_lease, has_key=key is not None)
        )
        # one thread for each: a scheduler or a ledger that does not answer must not delay a sign of life to the nodes
        beat_seconds = min(MOST_BEAT_SECONDS, lease_seconds / 6)
        self._beats = [
            PeriodicThread(name, seconds, step, self._on_trouble)
            for name, seconds, step in (
                ("skyward-node-lease", beat_seconds, self.transports.renew_local_leases),
                ("skyward-clock", beat_seconds, self._look),
            )
        ]
        # hundreds of processes, or attachments of one triggerer, may write to one ledger
        seconds = max(beat_seconds, lease_seconds / LEDGER_BEATS)
        renew = self._entry.renew
        self._beats.append(PeriodicThread("skyward-lease", seconds, renew, self._on_trouble, is_at_once=True))
        self._beats.append(PeriodicThread("skyward-learn", LOOK_SECONDS, self._learn, self._on_trouble))
        self._payments: LeasePayments | None = None
        if pays:
            from skyward_core.session.clock import LeasePayments

            self._payments = payments = LeasePayments(lease.pool_id, lease_seconds, self.emit)
            self.paid_seconds = payments.paid_seconds
            self._beats.append(PeriodicThread("skyward-money", payments.beat_seconds, payments.renew, self._on_trouble))

    def own_size(self) -> None:
        """None: the process that keeps the pool sets its size."""

    def emit(self, event: SkywardEvent) -> int:
        """Queue an event for the callbacks; return its number in `events`."""
        return self.events.put(event)

    def start(self, timeout_seconds: float) -> None:
        """Reach the nodes and connect. Absent nodes are left out. The head must answer, because it has the scheduler
        and its records.

        Raises Unreachable (also if the scheduler of a head that lives does not answer in time), CredentialsError,
        HostKeyChanged or NodeLost; then nothing is left open.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            self.lease = self._with_keys(self.lease)
            settings = self._reach_all(deadline)
            certificate = self._sealed.certificate if self._sealed is not None else _certificate_of(settings)
            module = load("skyward_core.engine.cluster")
            self.cluster = cluster = cast(
                "Cluster",
                module.Cluster(
                    self.lease,
                    certificate,
                    self.transports,
                    self.emit,
                    self._retries,
                    None,
                    None,
                    lambda: self.events.delivered,
                    self._work,
                ),
            )
            cluster.owner.pool = self.name
            cluster.draining.set_steward(None)
            patience = min(JOIN_SECONDS, self._lease_seconds / 2)
            with _busy_is_no_loss(self.transports.to(self.lease.nodes[0].instance)):
                cluster.start(self._scheduler_from_here(), deadline, lambda: None, patience)
            for node in self.lease.nodes:
                if node.rank and len(cluster.missing(node.rank)) == node.workers:
                    cluster.remove_node(node.rank)
                    self._go_on_without(node, "its workers are not in the pool")
            for transport in self.transports.all():
                transport.opened()
            cluster.watch(self.watcher)
            self.user_client = cluster.user_client(self._scheduler_from_here)
            self._pay_at_once()
            for beat in self._beats:
                beat.start()
            self.is_running = True
        except BaseException as error:
            self._leave("the pool could not be attached to")
            if isinstance(error, NodeLost):
                raise NodeLost(
                    f"pool {self.lease.pool_id} is not there any more, or has another head than its lease names:"
                    f" {error}"
                ) from error
            raise

    def _pay_at_once(self) -> None:
        """Reserve what is missing, and send it to the nodes: their money may end before the first beat."""
        if self._payments is not None:
            try:
                self._payments.renew()
                self.transports.send_paid_time()
            except LedgerError as error:  # the next beat tries again; until then the earlier reservation is valid
                self._on_trouble(error)

    def _scheduler_from_here(self) -> str:
        """Return the address of the scheduler for this client."""
        return self.transports.to(self.lease.nodes[0].instance).address(self.lease.scheduler)

    def _with_keys(self, lease: Lease) -> Lease:
        """Return the lease with the paths of the SSH keys that this process has.

        A key that is given as text, or was sealed, stays in this process's memory.
        """
        if self._key is not None:
            return lease.with_key(self._in_memory.path_of(self._key) if KEY_BEGINS in self._key else self._key)
        if self._sealed is None:
            return lease
        return self._in_memory.with_keys(lease, self._sealed.ssh_keys)

    def _reach_all(self, deadline: float) -> SeenSettings:
        """Reach the head, then the others; return the settings that the head has from its owner.

        Raises NodeLost if the head has ended; its machine may still answer.
        """
        if not self.lease.nodes:
            raise NodeLost("its lease names no node")
        head, *others = self.lease.nodes
        try:
            self._reach(head, deadline - time.monotonic())
            _refuse_dead(self.transports.to(head.instance))
            settings = SeenSettings.of(self.transports.to(head.instance).read("settings.json"))
            _refuse_anothers(head, settings)
        except NotPrivate as error:
            raise CredentialsError(
                f"the lease leads to a folder that another user can change, and is not followed: {error}"
            ) from error
        except (CommandFailed, OSError, Unreadable) as error:
            raise _why_unread(error) from error
        seconds = (deadline - time.monotonic()) / 2  # the other half is for the scheduler
        for node, failure in zip(
            others,
            side_by_side(lambda node: self._why_out_of_reach(node, seconds), others, "skyward-attach", ALL_AT_ONCE),
            strict=True,
        ):
            if failure is not None:
                self._go_on_without(node, str(failure))
        self.transports.renew_local_leases()
        return settings

    def _reach(self, node: Node, seconds: float) -> None:
        if node.instance.endpoint is None:
            _verify_folder(node)
        self.transports.to(node.instance).join(timeout_seconds=max(1.0, seconds), guard_seconds=GUARD_SECONDS)

    def _why_out_of_reach(self, node: Node, seconds: float) -> Exception | None:
        """Reach a node that is not the head; return why it cannot be reached.

        Raises errors of our key, or of the host's key.
        """
        try:
            self._reach(node, seconds)
        except (CredentialsError, HostKeyChanged):
            raise
        except NotPrivate as error:
            raise CredentialsError(
                f"the lease leads to a folder that another user can change, and is not followed: {error}"
            ) from error
        except (SkywardError, OSError) as error:
            self.transports.forget(node.instance)
            return error
        return None

    def _go_on_without(self, node: Node, why: str) -> None:
        _log.warning(
            "node %d of pool %s (%s) is not there, and the pool is attached to without it: %s",
            node.rank,
            self.lease.pool_id,
            node.instance.id,
            why,
        )
        self.lease = self.lease.model_copy(
            update={"nodes": tuple(other for other in self.lease.nodes if other is not node)}
        )

    def stop(self, reason: str) -> None:
        """Leave; the pool lives on until its lease runs out."""
        with self._stopping:
            if not self.is_running:
                return
            self.is_running = False
        self._leave(reason)

    def end(self, reason: str, error: SkywardError | None, end_machines: Callable[[], object]) -> None:
        """End the pool, as its steward: calls raise `error`, or PoolClosed; then `end_machines` is called."""
        with self._stopping:
            if not self.is_running:
                return
            self.is_running, self.why_ended = False, error
        self._leave(reason, error or PoolClosed(reason), end_machines)

    def release(self) -> None:
        """Do nothing: the machines belong to their opener."""

    def extend_leases(self, seconds: float) -> None:
        """Extend the leases of all nodes to so many seconds from now, unless they are longer already. Raises
        Unreachable.
        """
        side_by_side(
            lambda transport: transport.extend_lease(seconds), self.transports.all(), "skyward-attach", ALL_AT_ONCE
        )

    def _leave(
        self, reason: str, error: SkywardError | None = None, end_machines: Callable[[], object] = lambda: None
    ) -> None:
        self._ended.set()
        for beat in self._beats:
            beat.end()
        try:
            if self.user_client is not None:
                self.user_client.close()
            if self.cluster is not None and error is not None:
                self.cluster.close(error)
            elif self.cluster is not None:
                self.cluster.leave(reason)
            end_machines()
        finally:
            self.transports.close()
            self._entry.close()
            if self._payments is not None:
                self._payments.close()
            self._in_memory.close()
            self.events.close()

    def _on_trouble(self, error: BaseException) -> None:
        self.events.log(
            logging.ERROR, "pool %s could not be kept alive; it is tried again", self.lease.pool_id, error=error
        )

    def _look(self) -> None:
        """Send the nodes whether there are calls, and stop waiting for lost nodes that are not replaced."""
        self.transports.is_busy = self.cluster is not None and self.cluster.has_work()
        self.watcher.look()

    # ── nodes that come and leave ────────────────────────────────────────────────────────────────────────────────────

    def _learn(self) -> None:
        """Follow the nodes of a pool that another process keeps."""
        if self.cluster is not None and self.cluster.is_connected and not self._is_steward:
            self._follower.look(self.cluster)

    def _reach_new(self, lease: Lease, keys: PoolKeys) -> list[Node]:
        """Connect to the nodes of a newer lease; return those that answer. Raises errors of keys."""
        if self._key is None:
            self._sealed = keys
        nodes = list(self._with_keys(lease).nodes)
        failures = side_by_side(
            lambda node: self._why_out_of_reach(node, REACH_SECONDS), nodes, "skyward-attach", ALL_AT_ONCE
        )
        reached = [node for node, failure in zip(nodes, failures, strict=True) if failure is None]
        for node in reached:
            self.transports.to(node.instance).opened()
        return reached

    def _use(self, lease: Lease, gone: list[Node]) -> None:
        """Go on with these nodes, and without those that have left the pool or were replaced."""
        if not self._is_steward:
            self.lease = lease
            for node in gone:
                self.watcher.joined(node.rank)
                self.transports.forget(node.instance)

    # ── the steward of a named pool ──────────────────────────────────────────────────────────────────────────────────

    def reach(self, lease: Lease, keys: PoolKeys | None, seconds: float) -> Lease:
        """Connect to the nodes of a newer lease; return it with this process's keys. Raises errors of keys.

        Some nodes may not answer; their transports are not connected.
        """
        if keys is not None:
            self._sealed = keys
        lease = self._with_keys(lease)
        known = {transport.instance.id for transport in self.transports.all()}
        new = [node for node in lease.nodes if node.instance.id not in known]
        side_by_side(lambda node: self._why_out_of_reach(node, seconds), new, "skyward-attach", ALL_AT_ONCE)
        self.lease = lease
        return lease

    def begin_stewardship(self, watcher: Watcher) -> None:
        """This process is the steward from now on: `watcher` handles the loss of nodes and of the connection."""
        assert self.cluster is not None
        self._is_steward = True
        self.watcher.pause()
        self.cluster.watch(watcher)
        if not self.cluster.is_connected:
            watcher.cut()

    def end_stewardship(self) -> None:
        """Another process keeps the pool: go on as a client of it."""
        self.paid_seconds = lambda: None
        self._is_steward = False
        if self.cluster is not None:
            self.cluster.set_steward(None, None, None)
            self.watcher.go_on(self.lease)

    def reconnect(self) -> None:
        """Reach the scheduler again if it was cut off while this process kept the pool. Does not wait."""
        if self.cluster is not None and not self.cluster.is_connected:
            self.watcher.cut()

    def _resume(self, seconds: float) -> bool:
        """Connect to the scheduler again, if its machine is connected; return whether that is so. Raises LeaseLost if
        the ledger has said that the pool has ended, or is being ended.
        """
        assert self.cluster is not None
        if self._entry.lost is not None:
            raise self._entry.lost
        head = self.transports.to(self.lease.nodes[0].instance)
        if head.is_connected:
            self.cluster.resume(head.address(self.lease.scheduler), seconds)
        return head.is_connected

    def _why_gone(self) -> str:
        """Return what the head has written about its end; "" if it cannot be found out.

        The lease names the provider. It is asked only if the lease was sealed, or is signed.
        """
        try:
            provider = provider_of_lease(self._given_lease, is_sealed=self._sealed is not None)
        except SkywardError as error:
            _log.debug("the provider is not asked why the head has ended: %s", error)
            return ""
        return words_of_end(provider, self.lease.nodes[0].instance.id)

    def _give_up(self, lost: SkywardError) -> None:
        if not self._ended.is_set():
            self.on_given_up(lost)
        self._ended.set()
        for beat in self._beats:
            beat.end()
        self.transports.close()  # this process cannot use the nodes any more, and does not renew their leases


def _certificate_of(settings: SeenSettings) -> PoolCertificate:
    return PoolCertificate(settings.tls_certificate, settings.tls_key)


def _verify_folder(node: Node) -> None:
    """Refuse a node of this machine whose folder another user could have made or changed.

    Raises NotPrivate, or another OSError if it is not there.
    """
    directory, instance_id = Path(node.instance.directory or ""), node.instance.id
    if not directory.is_absolute() or directory.name != instance_id:
        raise NotPrivate(f"{str(directory)!r} is not the folder of {instance_id!r}")
    check_private(directory)


def _refuse_dead(head: Transport) -> None:
    """Raise NodeLost if the head's supervisor has died. Otherwise this process would wait long for a scheduler that is
    gone.
    """
    lives: bool | None = None
    with contextlib.suppress(Unreachable, CommandFailed):  # not known: the scheduler may answer
        lives = head.lives(LIVES_SECONDS)
    if lives is False:
        raise NodeLost("the first process of its head has died")


@contextlib.contextmanager
def _busy_is_no_loss(head: Transport) -> Generator[None]:
    """Raise Unreachable for a scheduler that does not answer in time although its head lives: it ends with its head."""
    try:
        yield
    except NodeLost as error:
        _refuse_dead(head)
        raise Unreachable(f"{error}, although its head lives: it may be busy, so try again") from error


def _why_unread(error: CommandFailed | OSError | Unreadable) -> SkywardError:
    if isinstance(error, CommandTimedOut) or (isinstance(error, OSError) and error.errno in EXHAUSTED):
        return Unreachable(f"the head cannot be asked just now, so try again: {error}")
    return NodeLost("its head has ended: the pool was closed, its lease has expired, or only the head was lost")


def _refuse_anothers(head: Node, settings: SeenSettings) -> None:
    if (settings.instance_id, settings.pool_id) != (head.instance.id, head.instance.pool_id):
        raise NodeLost(f"its head is {settings.instance_id} of pool {settings.pool_id} now")


class KeptEntry:
    """The pool's entry in this process's ledger: its renewal shows sweeps that the pool is in use.

    Each renewal tries a ledger again that did not answer. Only two answers end that: it has no such pool, or the pool
    may not spend any more.
    """

    def __init__(
        self,
        pool_id: str,
        lease_seconds: float,
        log: Callable[..., object] = _log.log,
        ledger: Ledger | None = None,
    ) -> None:
        """`ledger`: this one, which stays open; None: one of its own."""
        self._log = log
        """Takes a level, a message and its arguments, and does not wait for a terminal."""
        self._pool_id = pool_id
        self._lease_seconds = lease_seconds
        self._given = ledger
        self._ledger: Ledger | None = None
        self._is_known = False
        self._has_warned = False
        self._is_over = False
        self.lost: LeaseLost | None = None
        """The error that the pool may not spend any more."""

    def renew(self) -> None:
        """Extend the pool's lease. Raises nothing."""
        if self._is_over:
            return
        was_known = self._is_known
        try:
            ledger = self._opened()
            if self._is_over:
                return
            self._is_known = was_known or ledger.pool(self._pool_id) is not None
            if self._is_known:
                ledger.renew(self._pool_id, datetime.now(UTC) + timedelta(seconds=self._lease_seconds))
            else:
                self.close()
        except LeaseLost as error:
            self.lost = error
            self._log(logging.ERROR, "%s", error)
            self.close()
        except LedgerError as error:  # the next renewal tries again
            level = logging.DEBUG if was_known or self._has_warned else logging.WARNING
            self._log(
                level,
                "pool %s is not kept alive in the ledger, and a sweep may take it for dead: %s",
                self._pool_id,
                error,
            )
            self._has_warned = True
        finally:
            # closed meanwhile, by a thread that could not see the ledger being opened
            if self._is_over and self._ledger is not None:
                self._ledger.close()

    def _opened(self) -> Ledger:
        if self._given is not None:
            return self._given
        if self._ledger is None:
            module = importlib.import_module("skyward_core.ledger.ledger")
            self._ledger = cast("Ledger", module.Ledger(module.default_url()))
        return self._ledger

    def close(self) -> None:
        """Stop renewing. May be called twice, and from another thread."""
        self._is_over = True
        if self._ledger is not None:
            self._ledger.close()
