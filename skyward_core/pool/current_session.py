"""The session that a pool object has open, and what the session before it has left: bill, receipt, unconfirmed
machines.

States of a pool: new -> opening -> open -> closing -> closed. Only `open`, `attach`, `close` and `detach` change the
state; `close` may be called in any state and twice. If opening fails, `PoolMachines.acquire` ends the machines that
were rented; later `close` does. If this process is killed, the reaper does, which is started before anything is rented
(docs/decisions/0008).

A session belongs to the process that has opened it. In a fork of that process it raises PoolClosed when it is used;
closing or collecting it there does nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from skyward_core.concurrency import interrupts
from skyward_core.concurrency.threads import FINAL_WORK, refuse_greenlets
from skyward_core.errors import BadRequest, InstancesLeft, LedgerError, PoolClosed, SkywardError
from skyward_core.events import console
from skyward_core.events.events import Callback, CostFinal, PoolLeft
from skyward_core.ledger.names_policy import NOTHING_USED, Usage
from skyward_core.machines.instances import Lease
from skyward_core.machines.signing import secret_keys, signed
from skyward_core.pool.named_sessions import leave_named, open_named
from skyward_core.pool.preparation import Prepared
from skyward_core.providers.base import Provider
from skyward_core.session.attached import Attached
from skyward_core.session.bookkeeping import event_queue
from skyward_core.session.detached_call import CallLedger
from skyward_core.session.named_use import NamedUse, Successor
from skyward_core.session.pool_uses import PoolUses, UseBook, UseGauges
from skyward_core.session.sealed_lease import PoolKeys
from skyward_core.session.warm_pools import per_hour, what_may_run
from skyward_core.spec import PoolSpec
from skyward_core.work import NO_WORK, Work

ATTACH_SECONDS = 60.0
"""How long a process tries to reach the nodes of a pool that another one has opened."""

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.engine.connection import UserClient
    from skyward_core.events.utilisation import Utilisation
    from skyward_core.ledger.ledger import Ledger

    # what rents machines is loaded when some are rented: a process that joins a pool has its first result sooner
    from skyward_core.session.named_session import NamedSession
    from skyward_core.session.session import Session
    from skyward_core.session.stewardship import Stewardship
    from skyward_core.wire.masking import SecretValues


class CurrentSession:
    """What one pool object has open: a session, an attachment to another process's session, or nothing.

    If it is collected while open, the session is stopped, with a ResourceWarning, by a thread of its own
    (`concurrency.threads.FinalWork`). `open` and `close` have the contracts
    of the methods of `ComputePool`.
    """

    def __init__(self) -> None:
        self.own_id = ""
        """The id of the last pool that was opened here, by itself or by its name; "" before the first, and for an
        attachment by a lease.
        """
        self.was_opened = False
        self.final: CostFinal | None = None
        self._left: PoolLeft | None = None
        """What the last pool had cost when it was left to others."""
        self.receipt: Mapping[str, Any] | None = None
        self.unconfirmed: InstancesLeft | None = None
        self.still_running = ""
        """What the last session has left running, in words."""
        self._changing = threading.RLock()
        self._opened: Session | Attached | None = None
        self._use: NamedUse | None = None
        """This process as a client of the pool's name, while a pool with a name is open."""
        self._process = 0
        """The process that has opened the session."""
        self._terminations = 0
        """How often `terminate_now` was called."""
        self._why_ended: SkywardError | None = None
        self._finalizer: weakref.finalize[Any, CurrentSession] | None = None
        self._calls: CallLedger | None = None
        self._uses: PoolUses | None = None
        """Of the last session, also after its end."""
        self._has_a_part = False
        """Whether the pool has a name, and belongs to nobody or was opened by another process."""

    # ── open ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, prepared: Prepared) -> None:
        """Open a session, unless one is open."""
        self._raise_in_a_fork()
        refuse_greenlets()
        terminations = self._terminations
        begun: list[Session | Attached] = []
        try:
            with self._changing:
                if self._opened is not None and not self._opened.is_running:
                    raise PoolClosed(
                        "the pool has ended, and closing it has not succeeded yet: close it, and open it then"
                    )
                if self._opened is None:
                    secrets = prepared.read_secrets()
                    secret_keys()  # a malformed one is refused before anything is rented
                    self.was_opened = True
                    self.final = self.receipt = self._why_ended = self.unconfirmed = self._left = None
                    self.still_running = ""
                    self._process = os.getpid()
                    if prepared.spec.name is None:
                        self._open_own(prepared, secrets, terminations, begun)
                    else:
                        self._open_named(prepared, secrets, terminations, begun)
        finally:
            for opened in begun:  # also those that could not be opened: the callbacks get the error and the bill
                self._flush(opened)

    def _open_named(
        self, prepared: Prepared, secrets: SecretValues, terminations: int, begun: list[Session | Attached]
    ) -> None:
        """Open the pool of a name, or attach to it."""
        use = NamedUse(prepared.spec, prepared.providers, prepared.work)

        def attach(lease: Lease, keys: PoolKeys) -> Attached:
            return _attach(
                lease,
                None,
                keys,
                prepared.spec,
                prepared.on_event,
                ATTACH_SECONDS,
                log=use.log,
                work=prepared.work,
                ledger=use.ledger,
            )

        try:
            opened = open_named(
                use,
                lambda pool_id: self._open_first(prepared, secrets, terminations, begun, pool_id, use),
                attach,
                prepared.spec.provision_timeout,
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not begun:
                use.log(logging.INFO, interrupts.waiting_for(str(prepared.spec.name)))
            self._forget()
            use.left()
            raise
        self._opened, self._use = opened, use
        if isinstance(opened, Attached):
            self.own_id = opened.lease.pool_id
        self._uses = uses = _uses_of(opened, self.own_id, use.client_id, prepared.work)
        self._has_a_part = isinstance(opened, Attached) or not prepared.belongs_to.labels()
        if (cluster := opened.cluster) is not None:  # else it has ended itself meanwhile: calls raise why
            use.measure(lambda: _usage(opened.cluster), cluster)
            cluster.own_use = uses.pays
        if isinstance(opened, Attached):
            self._calls = _call_ledger(opened, self.own_id)
            use.succession = _successor(opened, use, prepared, secrets)
            opened.on_given_up = use.leave_unfinished  # a pool that it cannot reach must not be kept for it
        else:
            use.on_lost = opened.step_down
            if opened.term.is_lost:  # since the pool was opened; its renewal has not reported that to any object yet
                opened.step_down()
        self._when_collected(partial(_left_named, opened, use, uses, self._process))

    def _open_own(
        self, prepared: Prepared, secrets: SecretValues, terminations: int, begun: list[Session | Attached]
    ) -> None:
        """Rent the machines of a pool without a name. Its session is added to `begun` first."""
        from skyward_core.session.session import Session

        limit, owner = prepared.run_limit_usd, prepared.belongs_to
        opened = Session(*_values(prepared), secrets, run_limit_usd=limit, belongs_to=owner)
        begun.append(opened)
        self._start(opened, prepared, terminations)

    def _open_first(
        self,
        prepared: Prepared,
        secrets: SecretValues,
        terminations: int,
        begun: list[Session | Attached],
        pool_id: str,
        use: NamedUse,
    ) -> NamedSession:
        """Rent the machines of a pool with a name. Its session is added to `begun` first."""
        from skyward_core.session.named_session import NamedSession

        opened = NamedSession(*_values(prepared), secrets, pool_id, use, prepared.belongs_to)
        begun.append(opened)
        self._start(opened, prepared, terminations)
        return opened

    def _start(self, opened: Session, prepared: Prepared, terminations: int) -> None:
        self._opened, self.own_id = opened, opened.pool_id
        if self._terminations != terminations:  # by a signal handler, before there was a session
            opened.terminate_now()
        prepared.log_provider()
        try:
            opened.start()
        except BaseException:
            self._opened = None
            opened.stop("the pool could not be opened")
            self.final, self.receipt = opened.final, opened.receipt
            raise
        self._calls = _call_ledger(opened, opened.pool_id)
        self._uses, self._has_a_part = _uses_of(opened, opened.pool_id, "", prepared.work), False
        self._when_collected(partial(_collected, opened, self._uses))

    def _when_collected(self, leave: Callable[[], object], *, is_also_at_exit: bool = False) -> None:
        """Do this if the pool object is collected while it has something open."""
        if self._finalizer is None:
            FINAL_WORK.begin()
        else:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, FINAL_WORK.hand_over, leave)
        self._finalizer.atexit = is_also_at_exit

    def _flush(self, opened: Session | Attached) -> None:
        """Wait for the callbacks, without the lock, because one of them may be closing the pool.

        An interrupt closes the pool here: no `with` block has begun that would close it.
        """
        try:
            opened.events.flush()
        except BaseException as error:
            if (left := self.hand_over(self.close)) is not None:
                note_machines_left(error, left)
            raise

    def attach(
        self,
        lease: Lease,
        key: str | None,
        sealed: PoolKeys | None,
        spec: PoolSpec,
        on_event: Callback | None,
        timeout_seconds: float,
        *,
        pays: bool,
    ) -> None:
        """Connect to the nodes of a lease, with this SSH key, or the keys that the ledger had sealed."""
        log = console.log_of("log")  # an attachment shows no events, but its user has not asked for silence
        attached = _attach(lease, key, sealed, spec, on_event, timeout_seconds, pays=pays, log=log)
        self.was_opened = True
        self._opened = attached
        self._calls = _call_ledger(attached, lease.pool_id)
        self._process = os.getpid()
        self._uses = _uses_of(attached, lease.pool_id, "", NO_WORK)
        self._when_collected(partial(_left, attached, self._uses, self._process), is_also_at_exit=True)

    # ── close ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Stop the session and release its machines."""
        if self._is_in_a_fork:
            return
        opened = self._opened
        try:
            with self._changing:
                self._close()
        finally:
            if opened is not None:
                opened.events.flush()  # without the lock: a callback may be closing the pool too

    def _close(self) -> None:
        opened = self._opened
        if opened is None:
            return
        self._close_uses()  # before the end of the pool is in the ledger: then others settle them
        try:
            if self._use is None:
                opened.stop("the pool was closed")
                opened.release()
            else:
                leave_named(cast("NamedSession | Attached", opened), self._use)
            self.still_running = self._what_stays(opened)
        except BaseException:
            self.still_running = self._what_may_run(opened)
            raise
        finally:
            self.final, self.receipt, self._why_ended = opened.final, opened.receipt, opened.why_ended
            self._left = None if isinstance(opened, Attached) else opened.left
            self.unconfirmed = None if isinstance(opened, Attached) else opened.unconfirmed
        self._forget()

    def _what_stays(self, opened: Session | Attached) -> str:
        """Return in words what a session that was closed to its end leaves running."""
        if self._use is not None:
            return self._use.still_running
        return "" if isinstance(opened, Attached) or opened.unconfirmed is None else opened.what_may_run()

    def _what_may_run(self, opened: Session | Attached) -> str:
        """Return in words what a session that could not be closed, or not to its end, may leave running."""
        if not isinstance(opened, Attached):
            return opened.what_may_run()
        return "" if self._use is None else what_may_run(self._use.ledger, opened.lease.pool_id)

    def _forget(self) -> None:
        """Have nothing open.

        After all else: after an interrupt, InstancesLeft or LedgerError, closing again tries again.
        """
        self._close_uses()
        self._opened = self._use = None
        if self._calls is not None:
            self._calls.close()
        if self._finalizer is not None:
            if self._finalizer.detach() is not None:
                FINAL_WORK.end()
            self._finalizer = None

    def _close_uses(self) -> None:
        if self._uses is not None:
            self._uses.close()

    def hand_over(self, close: Callable[[], None]) -> InstancesLeft | None:
        """Call the pool's `close`; leave unconfirmed machines to its reaper, and return them instead of raising."""
        opened = self._opened
        try:
            close()
        except InstancesLeft as error:
            if opened is None or isinstance(opened, Attached):
                raise
            opened.hand_over(error)
            self.unconfirmed = error
            close()
        return self.unconfirmed

    def terminate_now(self, *, may_wait_at_exit: bool = True) -> None:
        """Leave the end of the machines to the reaper and return at once. A signal handler may call it.

        `may_wait_at_exit`: whether the interpreter's end waits until they are gone. A pool with a name may have other
        users. It ends when its lease does, soon after the last of them.
        """
        self._terminations += 1
        opened = self._opened
        if opened is not None and not isinstance(opened, Attached) and self._use is None:
            opened.terminate_now(may_wait_at_exit=may_wait_at_exit)

    # ── detach ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def live_by_lease(self) -> None:
        """Let the nodes of this machine outlive this process, until their lease ends; the others do anyway."""
        opened = self._opened
        if opened is not None and not isinstance(opened, Attached):
            opened.live_by_lease()

    def detach(self, lease_seconds: float) -> Lease:
        """Leave the machines running, for so long; return their signed lease."""
        self._raise_in_a_fork()
        with self._changing:
            opened = self._opened
            if opened is None or isinstance(opened, Attached):
                raise PoolClosed(self.why_closed if opened is None else "an attached pool is left by closing it")
            lease = signed(opened.detach(lease_seconds))
            self._left = opened.left
            until = lease.expires_at or datetime.now(UTC)
            rate = per_hour(opened.meter.rate())
            self.still_running = f"the pool {lease.pool_id} stays until {until:%H:%M:%S} UTC, by its lease, {rate}"
            self._forget()
        opened.events.flush()
        console.last_log_of(opened.spec.display)(logging.INFO, "%s", self.still_running)
        return lease

    # ── what is open ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def cluster(self) -> Cluster:
        """The cluster that runs calls.

        Raises PoolClosed if nothing is open, or again the error by which the session has ended itself.
        """
        self._raise_in_a_fork()
        opened = self._opened  # read once, because another thread may close the pool
        if opened is not None and (cluster := opened.cluster) is not None:
            return cluster
        if self._why_ended is not None:
            raise type(self._why_ended)(*self._why_ended.args)
        raise PoolClosed(self.why_closed)

    @property
    def calls(self) -> CallLedger:
        """The writer of detached calls into the ledger. Raises what `cluster` raises."""
        _, calls = self.cluster, self._calls
        if calls is None:
            raise PoolClosed(self.why_closed)
        return calls

    def scale(self, nodes: int | None, wait_seconds: float) -> int:
        """Set the number of nodes (`PoolSize.scale`). Raises BadRequest too, if another process keeps the machines,
        and LedgerError if it is not certain who that is.
        """
        _, opened, use = self.cluster, self._opened, self._use
        if opened is None:
            raise PoolClosed(self.why_closed)
        size = opened.own_size()
        if size is None and use is not None and use.succession is not None:
            size = use.succession.size
        if size is None:
            raise BadRequest(_refusal(use))
        return size.scale(nodes, wait_seconds)

    @property
    def user_client(self) -> UserClient:
        """The source of Dask clients for the user. Raises what `cluster` raises."""
        _, opened = self.cluster, self._opened
        if opened is None or opened.user_client is None:
            raise PoolClosed(self.why_closed)
        return opened.user_client

    def cancel_for(self, use: str) -> None:
        """Stop the calls for which a use pays (`PoolUse`); without an open pool there are none. In a fork, nothing."""
        if (cluster := self._cluster_here) is not None:
            cluster.cancel_for(use)

    def begin_use(self, use: str, utilisation: Utilisation) -> None:
        """Measure what the nodes do while calls run for which a use pays."""
        if self._uses is not None:
            self._uses.gauges.begin(use, utilisation)

    def end_use(self, use: str) -> None:
        """Stop the calls for which a use pays, and refuse others that it would have to pay for."""
        if (cluster := self._cluster_here) is not None:
            cluster.end_use(use)
        if self._uses is not None:
            self._uses.gauges.end(use)

    @property
    def _cluster_here(self) -> Cluster | None:
        opened = self._opened
        return None if opened is None or self._is_in_a_fork else opened.cluster

    @property
    def uses(self) -> UseBook:
        """The uses of the pool that is open. Raises PoolClosed."""
        _, uses = self.cluster, self._uses
        if uses is None:
            raise PoolClosed(self.why_closed)
        return uses.book

    @property
    def pool_id(self) -> str:
        """The id of the pool that is open, or was open last."""
        opened = self._opened
        return opened.lease.pool_id if isinstance(opened, Attached) else self.own_id

    @property
    def is_active(self) -> bool:
        """Whether calls can be made in this process."""
        opened = self._opened
        return opened is not None and opened.is_running and not self._is_in_a_fork

    @property
    def lease(self) -> Lease | None:
        """The claim on the present machines; None before there are any."""
        opened = self._opened
        return opened.lease if opened is not None else None

    @property
    def cost(self) -> float:
        """USD spent so far; after the end the whole bill, and after the pool was left to others what it had cost then.
        Of a pool that others may use too, what calls of no use have cost.
        """
        if self._has_a_part and self._uses is not None:
            return self._uses.cost_usd
        if self.final is not None:
            return self.final.total_cost
        if self._left is not None:
            return self._left.cost_so_far
        opened = self._opened
        return 0.0 if opened is None or isinstance(opened, Attached) else opened.meter.update().accumulated_cost

    def note_cost(self) -> None:
        """Record the cost so far in the ledger. Raises LedgerError and LeaseLost."""
        opened, use = self._opened, self._use
        if opened is None or self._is_in_a_fork:
            return
        if self._uses is not None:
            self._uses.note()
        if use is not None:
            use.note_cost()
        if not isinstance(opened, Attached):
            opened.note_cost()

    @property
    def why_closed(self) -> str:
        """The message of PoolClosed while nothing is open."""
        return (
            "the pool is closed: `with pool:` opens it again"
            if self.was_opened
            else "the pool is not open: write `with sky.ComputePool(...) as pool:`"
        )

    @property
    def _is_in_a_fork(self) -> bool:
        return self._opened is not None and self._process != os.getpid()

    def _raise_in_a_fork(self) -> None:
        if self._is_in_a_fork:
            raise PoolClosed(
                f"process {os.getpid()} is a fork of the one that has opened the pool, {self._process}, and has no"
                " connection to it. Make the calls there; or start this process anew (multiprocessing's 'spawn') and"
                " let it attach: ComputePool.attach(pool.lease)"
            )


def _attach(
    claim: Lease,
    key: str | None,
    sealed: PoolKeys | None,
    spec: PoolSpec,
    on_event: Callback | None,
    timeout_seconds: float,
    *,
    pays: bool = False,
    log: Callable[..., object],
    work: Work = NO_WORK,
    ledger: Ledger | None = None,
) -> Attached:
    """Connect to the nodes of a lease; nothing stays open if that fails. `log` as in `EventQueue`."""
    events = event_queue(spec, on_event, log, claim.pool_id)
    attached = Attached(
        claim, key, sealed, spec.lease_seconds, spec.retries, events, pays=pays, work=work, ledger=ledger
    )
    attached.name = spec.name or claim.pool_id
    try:
        attached.start(timeout_seconds)
        attached.events.flush()
    except BaseException:
        attached.stop("the pool could not be attached to")
        attached.events.flush()
        raise
    return attached


def _values(prepared: Prepared) -> tuple[PoolSpec, tuple[Provider, ...], Callback | None, Work]:
    return prepared.spec, prepared.providers, prepared.on_event, prepared.work


def _successor(attached: Attached, use: NamedUse, prepared: Prepared, secrets: SecretValues) -> Successor:
    """Return what makes this process the steward of a named pool, when it has none."""

    def new() -> Stewardship:
        from skyward_core.session.stewardship import Stewardship

        return Stewardship(attached, prepared.spec, prepared.providers, secrets, use, use.ledger)

    return Successor(use, new, attached.events.log)


def note_machines_left(error: BaseException, left: InstancesLeft) -> None:
    """Name unconfirmed machines in a note of an exception, which they must not hide."""
    error.add_note(f"besides, machines are not confirmed gone: {left}")


def _left_named(opened: NamedSession | Attached, use: NamedUse, uses: PoolUses, process: int) -> None:
    """Leave a pool with a name. Also called in forks of the process, when they end."""
    if process == os.getpid():
        uses.close()
        leave_named(opened, use)


def _left(attached: Attached, uses: PoolUses, process: int) -> None:
    """Close an attachment. Also called in forks of the process, when they end."""
    if process == os.getpid():
        uses.close()
        attached.stop("the pool object was collected")


def _call_ledger(opened: Session | Attached, pool_id: str) -> CallLedger:
    def slots_at(rank: int) -> int:
        return opened.cluster.slots_at(rank) if opened.cluster is not None else 1

    return CallLedger(pool_id, slots_at, opened.events.log)


def _uses_of(opened: Session | Attached, pool_id: str, client_id: str, work: Work) -> PoolUses:
    def make_book() -> UseBook:
        if (cluster := opened.cluster) is None:
            raise PoolClosed("the pool has ended: its uses have ended too")
        return UseBook(pool_id, client_id, cluster, lambda: opened.lease)

    return PoolUses(make_book, work, opened.events.log, UseGauges(opened.events, lambda: opened.cluster))


def _collected(opened: Session, uses: PoolUses) -> None:
    if opened.is_running and not opened.is_fork:
        ids = ", ".join(node.instance.id for node in opened.lease.nodes) if opened.lease else "none"
        try:
            warnings.warn(
                f"a ComputePool was collected while open ({ids}): use `with`, or close() it",
                ResourceWarning,
                stacklevel=2,
            )
        finally:  # the warning is an error under `python -W error`
            uses.close()
            opened.stop("the pool object was collected")


def _usage(cluster: Cluster | None) -> Usage:
    """Return what the calls of this process have of a pool."""
    if cluster is None:
        return NOTHING_USED
    return Usage(len(cluster.owner.futures), time.monotonic() - cluster.busy_at)


def _refusal(use: NamedUse | None) -> str:
    if use is None:
        return "only the process that has opened the pool rents and ends its machines: call scale() there"
    try:
        steward = use.steward()
    except LedgerError:
        steward = None
    if steward is None:
        return (
            f"this process does not keep the pool {use.name!r}, and cannot see which one does: call scale() in the"
            " process that has opened it, or try again in some seconds"
        )
    where = f"process {steward.pid} of {steward.name}" if steward.pid else f"a process of {steward.name}"
    return f"{where} keeps the pool {use.name!r}, rents and ends its machines: call scale() there"
