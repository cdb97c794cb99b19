"""An attached process that keeps a named pool: it replaces lost nodes, pays, and ends the pool at its limits.

    vacant ──taken (ledger)──▶ adopting ──▶ keeping ──the process leaves──▶ left: another client may take it
                                 │             ├──another process has taken it──▶ lost: goes on as a client
                                 │             └──a limit is reached──▶ the pool is ended
                                 └──an error──▶ released (ledger); a later beat of any client tries again

The steward uses the connection and the transports of its `Attached`, so that its calls wait for new nodes and are
drained at a limit. From the ledger it takes over the earlier steward's newest lease, reservations, and entries of
machines with their time. It has no reaper: the pool lives by its lease. After a kill at any line, the next client that
renews its row takes over. docs/decisions/0028 has what each kill leaves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING

from skyward_core.cleanup.policy import unsure_seconds
from skyward_core.concurrency.threads import LoopThread
from skyward_core.config.own_providers import same_as
from skyward_core.engine.recovery import Recovery
from skyward_core.errors import CredentialsError, InstancesLeft, LeaseTampered, NodeLost, SkywardError
from skyward_core.events.events import InstancesUnconfirmed, PoolStopping
from skyward_core.ledger.lease_clock import boot_seconds
from skyward_core.ledger.rows import Intent, PoolEntry
from skyward_core.ledger.shared_limits import StewardLimit
from skyward_core.machines.instances import Lease
from skyward_core.providers.base import EXPIRES_TAG, Provider
from skyward_core.provisioning.lifecycle import PoolMachines, disown
from skyward_core.session.attached import Attached
from skyward_core.session.bookkeeping import Bookkeeping, EventEmitter
from skyward_core.session.clock import Clock, Limits
from skyward_core.session.detached_call import note_all
from skyward_core.session.sealed_lease import PoolKeys, SharedLease, find_lease, lock_hash
from skyward_core.session.session_engine import PoolSize, free_all, policy_of, ranks_of
from skyward_core.session.steward_term import StewardUse
from skyward_core.spec import PoolSpec

if TYPE_CHECKING:
    from skyward_core.engine.certificates import PoolCertificate
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.wire.masking import SecretValues


REACH_SECONDS = 20.0
"""For how long a new steward tries to reach nodes that it does not know yet."""


class Stewardship:
    """One time in which this process keeps the pool. `start` once, then `leave` or `lose`."""

    def __init__(
        self,
        attached: Attached,
        spec: PoolSpec,
        providers: Sequence[Provider],
        secrets: SecretValues | None,
        use: StewardUse,
        ledger: Ledger,
        on_end: Callable[[str, SkywardError | None], object] = lambda *_: None,
    ) -> None:
        self._attached = attached
        self._pool_id = attached.lease.pool_id
        self._spec = spec
        self._providers = providers
        self._secrets = secrets
        self._use = use
        self._term = use.term
        self._ledger = ledger
        self._on_end = on_end
        """Called with the reason and the error when this process ends the pool at a limit, before its machines."""
        self._log = attached.events.log
        self._emitter = EventEmitter(spec, None, attached.events)
        self._bookkeeping = Bookkeeping(self._pool_id, self._emitter.meter, self._log)
        self._certificate: Future[PoolCertificate] = Future()
        self._shared = SharedLease(self._pool_id, self._certificate, self._bookkeeping, self._log, lambda: self._spec)
        self._machines: PoolMachines | None = None
        self._recovery: Recovery | None = None
        self.size: PoolSize | None = None
        """The number of nodes, once the pool is adopted."""
        self._ending = threading.RLock()
        """Held while the stewardship ends, for each of the reasons."""
        self._ended = threading.Event()

    # ── adopt ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Adopt the pool. After an error nothing has changed, and this process goes on as a client.

        Raises LedgerError, LeaseLost, NodeLost, CredentialsError, NotSteward, and what the provider raises.
        """
        lease, keys = find_lease(self._pool_id)
        entry = self._ledger.pool(self._pool_id)
        if entry is None:
            raise NodeLost(f"the ledger has no pool {self._pool_id}")
        self._spec = _with_its_lock(self._spec, entry, keys)
        self._certificate.set_result(keys.certificate)
        with ExitStack() as undo:
            limits = self._adopt(undo, entry, self._attached.reach(lease, keys, REACH_SECONDS))
            undo.pop_all()
        self._begin(limits)

    def _adopt(self, undo: ExitStack, entry: PoolEntry, lease: Lease) -> Limits:
        provider, emit, meter = _provider_of(entry, self._providers), self._emitter.emit, self._emitter.meter
        _, journal, spending_limit = self._bookkeeping.open_ledger(
            undo, self._spec, provider, emit, entry.work, self._term
        )
        slots = self._spec.concurrency * self._spec.workers_per_node
        journal.adopt(self._ledger.intents(pool_id=self._pool_id), entry.provider_account, slots)
        listed = provider.instances(self._pool_id)
        journal.found(listed)
        open_still = self._ledger.open_intents(pool_id=self._pool_id)
        self._machines = machines = PoolMachines(
            self._spec,
            [provider],
            self._pool_id,
            self._certificate,
            emit=emit,
            meter=meter,
            journal=journal,
            spending_limit=spending_limit,
            transports=self._attached.transports,
            may_act=self._term.check,
        )
        undo.callback(machines.stop)
        undo.callback(machines.leave)
        self._adopt_money(spending_limit, provider, open_still)
        self._term.check()  # the steps above may have taken long
        unanswered = any(intent.cloud_id is None for intent in open_still)
        machines.adopt(lease, listed, is_launch_unsure=unanswered)
        self._shared.adopt(lease)
        # the last thing that may fail: from here on this process acts as the steward
        began = boot_seconds() - (self._ledger.names.now() - entry.created_at).total_seconds()
        cluster = self._cluster
        ranks = ranks_of(self._spec, lease)
        policy = policy_of(self._spec, len(ranks))
        self._recovery = Recovery(machines, cluster, ranks, self._spec.lease_seconds, emit, scaling=policy)
        cluster.set_steward(meter, self._secrets, ranks)
        if policy is not None:
            free_all(cluster, ranks)
        cluster.update_nodes(lease)
        self._attached.paid_seconds = spending_limit.paid_seconds
        return Limits(
            self._spec,
            cluster,
            self._attached.transports,
            spending_limit,
            meter,
            emit=emit,
            stop=self.stop,
            log=self._log,
            began=began,
            busy_at=time.monotonic(),
        )

    def _adopt_money(self, spending_limit: StewardLimit, provider: Provider, open_still: Sequence[Intent]) -> None:
        """Go on with the money: that of the machines, and that of launches that may still be answered."""
        meter, now = self._emitter.meter, self._ledger.names.now()
        ages = {intent.id: (now - intent.intended_at).total_seconds() for intent in open_still}
        ends = {
            intent.cloud_id: meter.now() + _seconds_to(intent, now)
            for intent in open_still
            if intent.cloud_id is not None and EXPIRES_TAG in intent.tags and intent.price.per_hour
        }
        longest = unsure_seconds(provider)
        unsure = [
            (meter.now() - ages[intent.id], intent.price)
            for intent in open_still
            if intent.cloud_id is None and intent.price.per_hour and ages[intent.id] < longest
        ]
        settled = held = Decimal(0)
        if self._spec.budget is not None:
            settled = self._ledger.settled_usd(self._pool_id, self._spec.budget)
            reserved = self._ledger.open_reservations(pool_id=self._pool_id)
            held = sum((one.reserved_usd for one in reserved), Decimal(0))
        spending_limit.adopt(ends, unsure, settled, held, provider.ending_seconds)

    def _begin(self, limits: Limits) -> None:
        assert self._recovery is not None
        assert self._bookkeeping.journal is not None
        self._recovery.start()
        self._attached.begin_stewardship(self._recovery)
        journal = self._bookkeeping.journal
        self.size = PoolSize(self._spec, self._cluster, self._recovery, lambda: limits.is_busy)
        often = [
            self._give_lease_to_attached,
            lambda: self._term.is_certain and self._shared.keep_current(self._attached.lease),
            limits.check_money,
            limits.check_work,
            self.size.look,
        ]
        seldom = [
            lambda: self._term.is_certain and journal.note(),
            lambda: self._emitter.emit(self._emitter.meter.update()),
        ]
        clock = Clock(self._pool_id, often, seldom, self.stop, self._log, time.monotonic())
        LoopThread("skyward-clock", partial(clock.run, self._ended)).start()
        self._log(logging.INFO, "this process keeps the pool %s from now on", self._pool_id)

    def _give_lease_to_attached(self) -> None:
        if self._machines is not None and self._machines.lease.nodes:
            self._attached.lease = self._machines.lease

    @property
    def _cluster(self) -> Cluster:
        assert self._attached.cluster is not None
        return self._attached.cluster

    # ── leave ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep_warm(self, seconds: float) -> float:
        """Let the nodes live for so long without a client, and reserve the money for it; return for how many seconds
        they are paid: `max_cost` may end them earlier.

        Raises BudgetExceeded if the account does not pay for it, LedgerError, Unreachable if a node does not answer.
        """
        with self._bookkeeping.paid_for(max(seconds, self._spec.lease_seconds)) as paid_seconds:
            self._attached.extend_leases(seconds)
            return paid_seconds

    def note_cost(self) -> None:
        """Record the cost so far in the ledger, without waiting for the clock."""
        if self._term.is_certain:
            self._bookkeeping.note_cost(self._ended)

    def leave(self) -> None:
        """Stop keeping the pool; its machines go on. Idempotent."""
        with self._ending:
            if not self._ended.is_set():
                self._cluster.take_sample()
            if not self._stop_working():
                return
            assert self._machines is not None
            assert self._bookkeeping.journal is not None
            if self._machines.lease.nodes:
                self._shared.keep_at_last(self._machines.lease)
            self._bookkeeping.journal.note()
            self._finish()

    def lose(self) -> None:
        """Another process keeps the pool: go on as a client, and end what was rented here and is not in its lease."""
        with self._ending:
            if not self._stop_working(self._newest_lease()):
                return
            self._log(logging.WARNING, "another process keeps the pool %s from now on", self._pool_id)
            self._finish()

    def _newest_lease(self) -> Lease | None:
        with contextlib.suppress(SkywardError):
            return find_lease(self._pool_id)[0]
        return None

    def _stop_working(self, newest: Lease | None = None) -> bool:
        """Stop all threads; return whether that was still to do."""
        if self._ended.is_set() or self._machines is None or self._recovery is None:
            return False
        self._ended.set()
        self._recovery.stop()
        self._attached.end_stewardship()
        self._machines.leave()
        if newest is not None:
            self._machines.leave_without(newest)
        disown(self._machines)
        self._machines.stop()
        self._recovery.join()
        self._attached.reconnect()  # recovery may have had the connection until now
        return True

    def _finish(self) -> None:
        self._bookkeeping.close_ledger()

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self, reason: str, error: SkywardError | None = None) -> None:
        """End the pool, if this process still keeps it: its calls raise `error`, or PoolClosed with the reason."""
        with self._ending:
            if self._ended.is_set():
                return
            try:
                self._use.begin_to_end()
            except SkywardError as refusal:
                self._log(logging.WARNING, "%s is not ended here (%s): %s", self._pool_id, reason, refusal)
                return
            self._ended.set()
            assert self._recovery is not None
            self._emitter.emit(PoolStopping())
            self._recovery.stop()
            self._cluster.take_sample()
            note_all(self._cluster, self._pool_id, self._log)
            try:
                self._on_end(reason, error)  # before the machines end: otherwise its calls would be repeated on them
            finally:
                try:
                    self._attached.end(reason, error, self._end_machines)
                finally:
                    self._use.release_stewardship()  # if machines are left, the next process that comes ends them

    def _end_machines(self) -> None:
        assert self._machines is not None
        assert self._recovery is not None
        try:
            try:
                self._machines.stop()
                self._recovery.join()
            finally:
                self._machines.release()
            self._bookkeeping.close_journal()
        except InstancesLeft as left:
            self._emitter.emit(InstancesUnconfirmed(left.ids, str(left), self._machines.may_be_left_to_their_lease))
            self._log(logging.ERROR, "%s was ended, and some machines are not confirmed gone: %s", self._pool_id, left)
            self._bookkeeping.note_what_is_left()
        except SkywardError as error:
            self._log(logging.ERROR, "the end of %s is not in the ledger: %s", self._pool_id, error)
        self._emitter.emit_bill(self._bookkeeping.receipt)
        self._attached.final, self._attached.receipt = self._emitter.final, self._bookkeeping.receipt
        self._finish()


def _provider_of(entry: PoolEntry, providers: Sequence[Provider]) -> Provider:
    """Return this process's provider that has the pool's machines. Raises CredentialsError if none has them.

    It rents, so a row cannot add one.
    """
    same = same_as(entry, providers)
    if not same:
        raise CredentialsError(
            f"the ledger says that the machines of pool {entry.id!r} are at another provider than those of this"
            f" process: {entry.provider_name}. Its row may have been altered"
        )
    return same[0]


def _with_its_lock(spec: PoolSpec, entry: PoolEntry, keys: PoolKeys) -> PoolSpec:
    """Return the spec with the versions of packages that the pool was opened with: new nodes get the same.

    Nothing else of the row's spec is used. Raises LeaseTampered if these are not the versions that were sealed.
    """
    if keys.lock_hash in ("", lock_hash(spec.image.lock)):
        return spec
    try:
        lock = json.loads(entry.spec_json)["image"]["lock"]
        is_sealed = lock_hash(lock) == keys.lock_hash
    except (ValueError, TypeError, KeyError, AttributeError):
        lock, is_sealed = None, False
    if not is_sealed:
        raise LeaseTampered(
            f"the versions of packages of pool {entry.id!r} in the ledger are not those with which it was opened"
        )
    return spec.with_(image=spec.image.model_copy(update={"pip": (), "lock": lock}))


def _seconds_to(intent: Intent, now: datetime) -> float:
    """Return how long a machine may live at most by its tags, in seconds; the tag is rounded up to a whole second."""
    return float(intent.tags[EXPIRES_TAG]) - 1 - now.timestamp()
