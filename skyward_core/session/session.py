"""One session of a pool, from `open` to `close`: composes machines, cluster, recovery, ledger, reaper and clock, and
undoes them in the right order.

The states and their changes are in `state.py`. `start` undoes everything if it fails; `stop` and `release` may be
called again. Between any two lines the process may be killed: the reaper, which is started before anything is
requested, then does what `release` would have done.

    state             the states, and the claims to stop and to detach      one lock, under which nothing else is called
    event_emitter     events for callbacks and displays, the meter, the bill
    session_engine    cluster, recovery, Dask clients; thread "skyward-import"
    bookkeeping       ledger, journal, budget, receipt
    sealed_lease      the lease in the ledger for other machines, with sealed keys
    session_reaper    the connection to the reaper
    renewal           threads "skyward-lease" and "skyward-node-lease"
    departure         leaves the machines to others
    limits, clock     money, lifetime, idle time; threads "skyward-opening" and "skyward-clock"

The thread "skyward-events" calls callbacks and displays. No other thread waits for a callback, or logs to a terminal: a
terminal may take nothing.

In a fork of the process no object owns the session: its threads, reaper and machines belong to the process that has
opened it. Methods that end them do nothing in a fork, and neither does the end of the fork.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from decimal import Decimal
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, override

from skyward_core.concurrency import interrupts
from skyward_core.concurrency.threads import LoopThread, in_thread
from skyward_core.errors import InstancesLeft, LedgerError, PoolClosed, SkywardError
from skyward_core.events.events import (
    Callback,
    CostFinal,
    Error,
    InstancesUnconfirmed,
    PoolLeft,
    PoolReady,
    PoolStopping,
)
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.lease_clock import boot_seconds
from skyward_core.machines.instances import Lease, new_pool_id
from skyward_core.providers.base import Provider
from skyward_core.provisioning import lifecycle
from skyward_core.session.bookkeeping import Bookkeeping, EventEmitter
from skyward_core.session.clock import Clock, Limits, OpeningLimits, Renewal, Step
from skyward_core.session.departure import Departure, SessionReaper
from skyward_core.session.sealed_lease import SharedLease
from skyward_core.session.session_engine import PoolSize, SessionEngine
from skyward_core.session.state import Claims, SessionState
from skyward_core.session.steward_term import StewardTerm
from skyward_core.session.warm_pools import what_may_run
from skyward_core.spec import PoolSpec
from skyward_core.work import NO_WORK, Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.engine.connection import UserClient
    from skyward_core.wire.masking import SecretValues


class _Undo(ExitStack[None]):
    """Undoes steps in reverse order, but not in a fork that a callback or a signal handler has made: its parent still
    runs. `tell` gets what an interrupt means, at once.
    """

    def __init__(self, tell: Callable[[str], object] | None = None) -> None:  # `pop_all` makes one without
        super().__init__()
        self._process = os.getpid()
        self._tell = tell

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            self.pop_all()
        elif isinstance(error, KeyboardInterrupt) and self._tell is not None:
            self._tell(interrupts.OPENING)
        super().__exit__(kind, error, trace)


class Session:
    """One opening of a pool. Knows nothing of the pool object, so that a forgotten pool can be collected."""

    def __init__(
        self,
        spec: PoolSpec,
        providers: Sequence[Provider],
        on_event: Callback | None,
        work: Work = NO_WORK,
        secrets: SecretValues | None = None,
        pool_id: str = "",
        term: StewardTerm | None = None,
        run_limit_usd: Decimal | None = None,
        belongs_to: Work | None = None,
    ) -> None:
        """`work` is that of this process; `belongs_to` bears what no call uses (None: the same)."""
        self.pool_id = pool_id or new_pool_id()
        self.spec = spec
        self._belongs_to = work if belongs_to is None else belongs_to
        self.providers = tuple(providers)
        self.machines: lifecycle.PoolMachines | None = None
        self._emitter = EventEmitter(spec, on_event)
        self.emit = self._emitter.emit
        self.events = self._emitter.queue
        self.meter = self._emitter.meter
        self._engine = SessionEngine(self.pool_id, spec, self._emitter, secrets, work)
        self._term = term
        """With a name: whether this process keeps the pool."""
        self._claims = Claims()
        self._bookkeeping = Bookkeeping(self.pool_id, self.meter, self.events.log, run_limit_usd)
        self._reaper = SessionReaper(self.pool_id, self.events.log)
        self._shared = SharedLease(
            self.pool_id, self._engine.certificate, self._bookkeeping, self.events.log, lambda: self.spec
        )
        self._renewal = Renewal(self.pool_id, spec.lease_seconds, self.events.log)
        self._limits: Limits | None = None
        self.size: PoolSize | None = None
        self.unconfirmed: InstancesLeft | None = None
        """The machines that were not confirmed gone at the last teardown."""
        self._is_cut_off = False
        """Whether the last end was interrupted, and not waited for."""
        self._process = os.getpid()
        self._ended = threading.Event()
        self._departure = Departure(
            self.pool_id,
            self._claims,
            self._bookkeeping,
            self._reaper,
            self._renewal,
            self._shared,
            self._engine,
            self._emitter,
            self._ended,
        )

    def own_size(self) -> PoolSize | None:
        """The size of the pool, if this process may set it; None before the pool is open."""
        return self.size

    @property
    def is_running(self) -> bool:
        """Whether calls can be made."""
        return self._claims.is_running

    @property
    def is_released(self) -> bool:
        """Whether the machines are gone, or go on running by their lease."""
        return self._claims.is_released

    @property
    def why_ended(self) -> SkywardError | None:
        """The error by which the pool has ended itself, if it has: its calls raise it from then on."""
        return self._claims.why_ended

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that runs calls; None before there are nodes."""
        return self._engine.cluster

    @property
    def user_client(self) -> UserClient | None:
        """The source of Dask clients for the user; None before there are nodes."""
        return self._engine.user_client

    @property
    def final(self) -> CostFinal | None:
        """The bill, once it was emitted."""
        return self._emitter.final

    @property
    def left(self) -> PoolLeft | None:
        """What the pool had cost when this process left it to others, once it has."""
        return self._emitter.left

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        """The ledger's receipt of the pool, once it has ended, or could not be ended (`left`)."""
        return self._bookkeeping.receipt

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that has opened the pool."""
        return os.getpid() != self._process

    @property
    def lease(self) -> Lease | None:
        """The claim on the present machines; None before there are any."""
        return self.machines.lease if self.machines is not None and self._engine.is_connected else None

    # ── open ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Open; on any error everything is undone, and the bill is emitted before the error is raised."""
        started, began = time.monotonic(), boot_seconds()
        try:
            with _Undo(partial(self.events.log, logging.INFO)) as undo:
                undo.push(self._emit_bill_of_failure)
                undo.push(self._emitter.emit_error)
                self._engine.start_import()
                self._lock_image()
                journal, spending_limit = self._open_ledger(undo)
                self.machines = machines = self._pool_machines(journal, spending_limit)
                if self._claims.is_to_end:  # `terminate_now` does the other half of this
                    machines.launch_no_more()
                opening = self._keep_while_opening(undo, machines, journal, spending_limit)
                lease = machines.acquire(undo)
                cluster = self._engine.connect(undo, machines, lease, started + self.spec.provision_timeout)
                self._limits = limits = self._new_limits(cluster, machines, spending_limit, began)
                opening.end()
                self._raise_if_given_up()
                # before the undo is dropped: an asynchronous exception may come between any two lines, and then `stop`
                # undoes
                self._claims.state = SessionState.OPEN
                undo.pop_all()
        except BaseException as error:
            if interrupts.is_again(error):
                self._note_cut_off(error)
            self.events.close()
            if self.why_ended is not None:
                raise self.why_ended from error
            raise
        atexit.register(self._at_exit)
        self.size = self._engine.start_recovery(lambda: limits.is_busy)
        journal.note()  # from here on a node without recorded seconds was idle, not launching
        self.emit(PoolReady(self.pool_id, len(lease.nodes), cluster.slots, time.monotonic() - started))
        self._renewal.begin("skyward-node-lease", self._renew_local_leases)
        clock = self._clock(limits, journal, self.size)
        LoopThread("skyward-clock", partial(clock.run, self._ended)).start()

    def _lock_image(self) -> None:
        """Choose the versions of the image's packages: before anything is rented, and for all machines of the pool."""
        if (image := self.spec.image.locked()) is not self.spec.image:
            self.spec = self.spec.with_(image=image)

    def _pool_machines(self, journal: Journal, spending_limit: SpendingLimit) -> lifecycle.PoolMachines:
        return lifecycle.PoolMachines(
            self.spec,
            self.providers,
            self.pool_id,
            self._engine.certificate,
            emit=self.emit,
            meter=self.meter,
            journal=journal,
            spending_limit=spending_limit,
            may_act=self._may_act,
        )

    def _may_act(self) -> None:
        """Raise if another process keeps the pool; only a pool with a name may have another one."""

    def _stop_at_limit(self, reason: str, error: SkywardError | None) -> None:
        """End the pool at one of its limits."""
        self.stop(reason, error)

    def _new_limits(
        self, cluster: Cluster, machines: lifecycle.PoolMachines, spending_limit: SpendingLimit, began: float
    ) -> Limits:
        return Limits(
            self.spec,
            cluster,
            machines.transports,
            spending_limit,
            self.meter,
            emit=self.emit,
            stop=self._stop_at_limit,
            log=self.events.log,
            began=began,
        )

    def _raise_if_given_up(self) -> None:
        """Raise if money or lease was lost in the last moment of `start`. Its undo then terminates the machines."""
        if self.why_ended is not None:
            raise PoolClosed("the pool was given up while it opened")

    def _open_ledger(self, undo: ExitStack) -> tuple[Journal, SpendingLimit]:
        """Write the pool into the ledger, and start its reaper. After a kill from here on, reaper and sweeps know every
        machine.
        """
        url, journal, spending_limit = self._bookkeeping.open_ledger(
            undo, self.spec, self.providers[0], self.emit, self._belongs_to, self._term
        )
        # after the journal is closed: if killed in between, the reaper finds that the pool has ended
        undo.callback(self._leave_reaper_or_hang_up)
        self._reaper.start(self.providers, url)
        journal.open()  # after the reaper runs: it ends every machine that is written here, from the first entry on
        undo.callback(self._close_journal_unless_left)
        self._bookkeeping.settle_others()
        if self._claims.is_to_end:
            raise PoolClosed("terminate_now() was called while the pool opened: nothing was rented")
        return journal, spending_limit

    def _leave_reaper_or_hang_up(self) -> None:
        """Let the reaper act as if this process were dead, after a start that has left machines or open entries.

        This pool cannot be closed again. The cause is InstancesLeft, or a second interrupt that has cut off the
        teardown.
        """
        if self._are_machines_left or self._bookkeeping.is_refused:
            self._reaper.hang_up()
        else:
            self._reaper.leave()

    def _close_journal_unless_left(self) -> None:
        if not self._are_machines_left:
            self._bookkeeping.close_journal()

    @property
    def _are_machines_left(self) -> bool:
        return self.machines is not None and self.machines.may_be_left

    def _keep_while_opening(
        self, undo: ExitStack, machines: lifecycle.PoolMachines, journal: Journal, spending_limit: SpendingLimit
    ) -> OpeningLimits:
        """Renew the lease, and the reservation, while the machines start; return the object that does the latter."""

        def fail(error: SkywardError) -> None:
            self._claims.why_ended = error
            machines.stop()  # no thread waits for a machine any more, and the undo terminates all of them

        undo.callback(self._renewal.end)
        self._renewal.begin("skyward-lease", partial(self._renewal.renew, journal))
        opening = OpeningLimits(spending_limit, self._renewal, fail, self.events.log)
        opening.start()
        undo.callback(opening.end)
        return opening

    def _clock(self, limits: Limits, journal: Journal, size: PoolSize) -> Clock:
        """Check lease, money, work and size each second, and the reaper every few seconds; then also send the cost to
        the ledger and the callbacks.
        """
        often: list[Step] = [self._renewal.raise_if_lost, limits.check_money, limits.check_work, size.look]
        often.append(self._share_current)  # other processes learn from it of new nodes
        restart = partial(self._reaper.restart_if_gone, lambda: self.is_running)
        return self._new_clock(often, [restart, journal.note, lambda: self.emit(self.meter.update())])

    def note_cost(self) -> None:
        """Record the cost so far in the ledger. Of a named pool only its steward does."""
        self._bookkeeping.note_cost(self._ended)

    def _share_current(self) -> None:
        self._shared.keep_current(self.lease)

    def _new_clock(self, often: list[Step], seldom: list[Step]) -> Clock:
        return Clock(self.pool_id, often, seldom, self.stop, self.events.log, time.monotonic())

    def _renew_local_leases(self) -> None:
        """Send signs of life to nodes of this machine; over SSH each transport does it itself."""
        assert self.machines is not None
        self.machines.transports.renew_local_leases()

    # ── stop and release ─────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self, reason: str, error: SkywardError | None = None) -> None:
        """Close everything, in the order cluster, machines, bill; each step is taken even if the one before failed.

        Calls that have not ended raise `error`, or PoolClosed with the reason. If another thread is stopping the pool
        (the clock, when the money has run out), this waits for it, so that bill and receipt exist. If another thread
        detaches the pool, the request is left to that thread, and this one does nothing. It also does nothing in a fork
        of the owner.
        """
        if self.is_fork or not self._claims.claim_stop(reason, error):
            return
        self._ended.set()
        self._renewal.end()
        assert self.machines is not None
        try:
            self.emit(PoolStopping())
            self._engine.end(self.machines, lambda cluster: cluster.close(error or PoolClosed(reason)))
        finally:
            try:
                self.release()
            finally:
                self._emit_bill()
                if self.final is not None or self.left is not None:  # else there is more to come: the bill
                    self.events.close()
                self._claims.end_stop()

    def release(self) -> None:
        """Terminate the machines and write that into the ledger, unless that was done; does nothing in a fork.

        It is called again, by `close` or at the interpreter's end, if a second interrupt has cut it off. `close` also
        calls it again if the ledger has refused something; the reaper tries to write that for two minutes. Raises
        InstancesLeft if machines cannot be confirmed gone. Machines that cost nothing and end themselves are left to
        the reaper instead, with a warning.
        """
        if not self._engine.is_connected or self.machines is None or self.is_running or self.is_fork:
            return
        if not self.is_released:
            try:
                self.machines.release()
            except InstancesLeft as error:
                self.unconfirmed = error
                self.emit(InstancesUnconfirmed(error.ids, str(error), self.machines.may_be_left_to_their_lease))
                if not self.machines.may_be_left_to_their_lease:
                    self._bookkeeping.note_what_is_left()
                    raise
                self.hand_over(error)
                return
            except (KeyboardInterrupt, SystemExit) as interrupt:  # the program may go on, as a notebook does
                self._bookkeeping.take_receipt()
                self._note_cut_off(interrupt)
                raise
            except Exception:  # nobody knows what is left: closing the pool again tries again, and so does the reaper
                self._reaper.hang_up()
                raise
            self.unconfirmed = None
            self._claims.is_released = True
            atexit.unregister(self._at_exit)
        if not self._claims.is_written_down:
            try:
                self._bookkeeping.close_journal()
            except LedgerError:
                self._reaper.hang_up()
                raise
            self._claims.is_written_down = True
            self._reaper.leave()  # after the journal: if killed in between, the reaper finds that the pool has ended
            self._departure.close_ledger()
            if self._is_cut_off:  # by an earlier end: what that has left is gone now
                self._emit_bill()
                self.events.close()

    def what_may_run(self) -> str:
        """Return in words which machines may still run, by the ledger; "" if all are gone."""
        return what_may_run(self._bookkeeping.ledger, self.pool_id)

    def _emit_bill_of_failure(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_cut_off = interrupts.is_again(error)
        self._emit_bill()

    def _note_cut_off(self, interrupt: BaseException) -> None:
        """Say what an end that was not waited for may have left. There is no bill until all machines are gone."""
        self._is_cut_off = True
        words = interrupts.cut_off(self.pool_id, self.what_may_run())
        interrupt.add_note(words)
        self.emit(Error(words))

    def _emit_bill(self) -> None:
        if not (self._is_cut_off and self._are_machines_left):
            self._emitter.emit_bill(self._bookkeeping.receipt)

    def hand_over(self, left: InstancesLeft) -> None:
        """Leave unconfirmed machines to the reaper, as if this process were dead (`Departure.hand_over`)."""
        if not self.is_released and self.machines is not None:
            atexit.unregister(self._at_exit)
            self._departure.hand_over(self.machines, left)

    def terminate_now(self, *, may_wait_at_exit: bool = True) -> None:
        """Let another process end the machines, and stop renting if the pool is still opening. Waits for nothing.

        `may_wait_at_exit`: whether the interpreter's end waits until they are gone. It does in any case if there is no
        reaper. Does nothing in a fork: a signal that ends a forked helper is not meant for the pool.
        """
        if self.is_fork:
            return
        # first: `start` makes the machines, then checks this, so that one of the two sees the other
        self._claims.is_to_end = True
        if self.machines is not None:
            self.machines.launch_no_more()
        if self._reaper.terminate_now():
            if not may_wait_at_exit:
                atexit.unregister(self._at_exit)
                self.events.close()
        elif self.machines is not None:
            in_thread("skyward-terminate", self.machines.end_now)

    def _at_exit(self) -> None:
        try:
            self.stop("the interpreter ends")
            self.release()
        except Exception as error:  # the interpreter would print only its traceback, which does not say what to do
            words = (
                "%s could not be closed at the program's end: %s. Its reaper tries again, and so does `skyward sweep`;"
                " `skyward ps` shows what is left"
            )
            self.events.log(logging.ERROR, words, self.pool_id, error)
        finally:
            with contextlib.suppress(SystemExit):  # of a callback: the program is ending already
                self.events.flush()

    # ── detach ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_left_to_lease(self) -> bool:
        """Whether the machines were left to their lease, by `detach` or `leave_to_lease`."""
        return self._departure.is_left_to_lease

    def live_by_lease(self) -> None:
        """From now on nodes of this machine live by their lease, not with this process."""
        assert self.machines is not None
        self._departure.live_by_lease(self.lease, self.spec.lease_seconds)
        self.machines.transports.lives_by_lease = True
        self._renew_local_leases()

    def share(self) -> None:
        """From now on other processes may use the pool: the end of this process does not end it.

        The nodes then live by their lease, which each process renews.
        """
        self.live_by_lease()
        atexit.unregister(self._at_exit)

    def detach(self, lease_seconds: float) -> Lease:
        """Leave the machines running under their lease, and release them; after an error the pool is open as before.

        If this process is killed here, the reaper ends the pool, or the pool lives as long as its lease
        (`lifecycle.detached_nodes`). Raises Unreachable, BadRequest, LedgerError, LeaseLost, and BudgetExceeded if its
        account does not pay for the whole lease. The pool may have ended itself, or may have to end before the ledger
        is written. Then it is stopped, and the error of its calls is raised: BudgetExceeded, LeaseLost or PoolClosed.
        """
        assert self.machines is not None
        self._may_act()
        try:
            # a lease is never shortened: another process may be attached
            longest = max(lease_seconds, self.spec.lease_seconds)
            expires_at = self._departure.detach(self.machines, longest, self.spec.lease_seconds)
        except BaseException:
            if (request := self._claims.go_on()) is not None:
                self.stop(*request)
            raise
        atexit.unregister(self._at_exit)
        return self._departure.leave(self.machines, expires_at)

    def leave_to_lease(self, reason: str, error: SkywardError | None = None) -> None:
        """Stop using and renewing a shared pool that could not be detached. Nodes that no other process keeps end with
        their leases. Sends nothing to ledger and machines. `error` is what has ended the pool.
        """
        if not self.is_fork and self._claims.claim_stop(reason, error):
            assert self.machines is not None
            atexit.unregister(self._at_exit)
            self._departure.leave_to_lease(self.machines, reason, error)
