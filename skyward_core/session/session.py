"""One opening of a pool: what is rented, written down, running and told between `open` and `close`, and everything that must be undone.

States (`State`); one lock guards the changes, so that of two threads which want to end the pool one way each, one wins:

    new ── start ──> open ────────── stop ──────────> stopped ──> released ──> written down
     │                │ ^                             (by `release`, which is called again where it has failed)
     └─ all undone    │ └──── an error, or asked to stop: nodes and money are told as before; then stopped, if asked
                      └─ detach ──> detaching ──> leaving ──> detached
                         (the nodes are told)   (the ledger is told: whoever wants to stop the pool from here on does nothing)

`start` undoes everything if it fails; `stop` and `release` may be called again. Between any two lines the process may be killed: the reaper, which is started
before anything is asked for, then does what `release` would have done.

Threads of an open pool, beside the cluster's and the recovery's: "skyward-events" calls callbacks and displays, "skyward-lease" lengthens the lease in the
ledger, "skyward-node-lease" those of nodes of this machine, "skyward-clock" does the rest (`_watch_clock`). None of the last three waits for a callback, or
logs: a terminal may take nothing.

In a fork of the process an opening is nobody's: its threads, its reaper and its machines are those of the process that has opened it, and whatever would end
them does nothing there, however the fork ends.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, override

from skyward_core.cleanup.reaper import Charge, Reaper
from skyward_core.concurrency.periodic import Beat
from skyward_core.engine.recovery import Recovery
from skyward_core.engine.user_client import UserClient, user_client
from skyward_core.errors import BudgetExceeded, InstancesLeft, LeaseLost, LedgerError, NotPicklable, PoolClosed, SkywardError
from skyward_core.events import console
from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BudgetWarning,
    Callback,
    CostFinal,
    Error,
    InfraCreating,
    InstanceLost,
    InstancesUnconfirmed,
    PoolReady,
    PoolStopping,
    SkywardEvent,
    compose,
    registered_callback,
)
from skyward_core.events.queue import EventQueue
from skyward_core.ledger.budgets import Fill, Purse
from skyward_core.ledger.journal import Book
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import SECONDS_PER_HOUR, Bucket, ResourceKind
from skyward_core.machines.instances import Lease
from skyward_core.providers.base import Provider
from skyward_core.provisioning import lifecycle
from skyward_core.provisioning.detach import living_alone
from skyward_core.spec import PoolSpec
from skyward_core.work import NO_WORK, Work

if TYPE_CHECKING:
    from skyward_core.engine.certificates import PoolCertificate
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.worker.masking import SecretValues

CLOCK_SECONDS = 1.0
COST_SECONDS = 5.0
JOIN_SECONDS = 10.0
"""How long `stop` waits for another thread that is stopping the pool; not for ever, for that may wait for a callback in which this one is."""
LEDGER_BUSY_SECONDS = 10.0
"""How long a pool waits for a ledger that another process has locked, at each step; a write takes milliseconds."""
GONE_EVIDENCE = "it was confirmed gone when its pool was closed; the ledger could not be written then"


class State(Enum):
    """Where an opening stands; what comes after `STOPPED` is told by `is_released`."""

    NEW = auto()
    OPEN = auto()
    DETACHING = auto()
    """Open still: the nodes are being told that they live by their lease. Who wants to stop the pool is heard before the ledger is told."""
    LEAVING = auto()
    """Open still: the ledger is being told. If that succeeds the pool is detached, whatever anybody wants."""
    DETACHED = auto()
    STOPPED = auto()
    """By `stop`, which may be at it still."""


@dataclass(slots=True)
class _Clock:
    """What the pool's clock remembers from one look to the next; times are of `time.monotonic`, in seconds."""

    began: float
    told: float
    asked: float
    is_busy: bool = False
    busy_at: float = 0.0
    """When the clock last knew of work that is not this client's own."""
    trouble: str = ""
    """The last error that was told: one that comes with every look is told once."""


class _Undo(ExitStack[None]):
    """Undoes what was begun, but not when it is left in a fork, which a callback or a signal handler has made: its parent goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    @override
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            self.pop_all()
        super().__exit__(kind, error, trace)


class Opening:
    """One opening of a pool. Knows nothing of the pool object, so that a forgotten pool can be collected."""

    def __init__(
        self, spec: PoolSpec, providers: Sequence[Provider], on_event: Callback | None, work: Work = NO_WORK, secrets: SecretValues | None = None
    ) -> None:
        self.pool_id = f"sky-{uuid.uuid4().hex[:12]}"
        self.spec = spec
        self.work = work
        self.providers = tuple(providers)
        self._secrets = secrets
        self.meter = Meter()
        self.machines: lifecycle.Machines | None = None
        self.recovery: Recovery | None = None
        self.cluster: Cluster | None = None
        self.user_client: UserClient | None = None
        self.final: CostFinal | None = None
        self._state = State.NEW
        self._changing = threading.RLock()
        """Guards `_state` and what is written with it. Re-entrant: a forgotten pool is stopped by whichever thread collects it."""
        self._detacher = 0
        """The thread that detaches the pool."""
        self._asked_to_stop: tuple[str, SkywardError | None] | None = None
        """What somebody has wanted to stop the pool with while it was being detached."""
        self.has_detached = False
        """Whether a call was started detached: from then on nodes of this machine live by their lease and not with this process."""
        self.is_released = False
        """Whether the machines are gone, or live on by their lease."""
        self.unconfirmed: InstancesLeft | None = None
        """What could not be confirmed gone when the machines were given back last."""
        self.why_ended: SkywardError | None = None
        """Why the pool has ended itself, if it has: what its calls raise from then on."""
        self.receipt: Mapping[str, Any] | None = None
        self._ledger: Ledger | None = None
        self._book: Book | None = None
        self._purse: Purse | None = None
        self._reaper: Reaper | None = None
        self._charge: Charge | None = None
        self._fill = Fill.FULL
        self._process = os.getpid()
        self._is_to_end = False
        """Whether `terminate_now` was called."""
        self._is_written_down = False
        self._refusal: LedgerError | None = None
        """What the ledger has refused of the end, as long as it was not written anew."""
        display = console.display(spec.display)
        sinks = [callback for callback in (registered_callback(), on_event) if callback is not None]
        self.events = EventQueue(compose(*sinks, display), display.close)
        self._stopper = 0
        self._is_over = threading.Event()
        self._is_over.set()
        """Cleared while somebody stops the pool."""
        self._ended = threading.Event()
        self._beats: list[Beat] = []
        self._lease_lost: LeaseLost | None = None

    @property
    def is_running(self) -> bool:
        """Whether calls can be made."""
        return self._state in (State.OPEN, State.DETACHING, State.LEAVING)

    @property
    def is_fork(self) -> bool:
        """Whether this is another process than the one that has opened the pool, and uses it."""
        return os.getpid() != self._process

    @property
    def lease(self) -> Lease | None:
        """The claim on the machines that there are now; None before there are any."""
        return self.machines.lease if self.machines is not None and self.recovery is not None else None

    def emit(self, event: SkywardEvent) -> int:
        """Count one event, and put it on its way to the callbacks; return its number in `events`. Waits for no callback, but for the first event's.

        That one, `InfraCreating`, is told before anything is rented: who writes the pool's id down has it then, whatever happens to this process.
        """
        self._count(event)
        number = self.events.put(event)
        if isinstance(event, InfraCreating):
            self.events.flush()
        return number

    def start(self) -> None:
        """Open; on any error everything is undone and the bill is told before it is raised."""
        started = time.monotonic()
        deadline = started + self.spec.provision_timeout
        certificate: Future[PoolCertificate] = Future()
        dask = threading.Thread(target=_make_ready, args=(self.pool_id, certificate), name="skyward-import", daemon=True)
        try:
            with _Undo() as undo:
                undo.callback(self._settle_bill)
                undo.push(self._tell_error)
                dask.start()  # half a second that passes while the nodes come up
                if (image := self.spec.image.locked()) is not self.spec.image:
                    self.spec = self.spec.with_(image=image)  # before anything is rented, and the same for every machine that is rented later
                book, purse = self._open_book(undo)
                self.machines = machines = lifecycle.Machines(
                    self.spec, self.providers, self.pool_id, certificate, emit=self.emit, meter=self.meter, book=book, purse=purse
                )
                if self._is_to_end:  # the other half of this is in `terminate_now`
                    machines.launch_no_more()
                over = self._keep_while_opening(undo, machines)
                lease = machines.acquire(undo)
                dask.join()
                cluster_module = importlib.import_module("skyward_core.engine.cluster")
                self.cluster = cluster = cluster_module.Cluster(
                    lease, certificate.result(), machines.reaches, self.emit, self.spec.retries, self.meter, self._secrets, lambda: self.events.told
                )
                undo.callback(cluster.close, PoolClosed("the pool could not be opened"))
                cluster.start(machines.scheduler, deadline, machines.check)
                self.recovery = recovery = Recovery(machines, cluster, self.spec.nodes, self.spec.lease_seconds, self.emit)
                cluster.watch(recovery)
                self.user_client = user_client(lambda: machines.scheduler, certificate.result(), lambda: cluster.client)
                over()
                self._state = State.OPEN  # before the undo is let go: an asynchronous exception may come between any two lines, and then `stop` is the undo
                undo.pop_all()
        except BaseException as error:
            self.events.close()
            if self.why_ended is not None:
                raise self.why_ended from error
            raise
        atexit.register(self._at_exit)
        recovery.start()
        book.note()  # from here on a node that nobody notes was idle, not launching
        self.emit(PoolReady(self.pool_id, len(lease.nodes), cluster.slots, time.monotonic() - started))
        self._begin("skyward-node-lease", self._keep_here)
        threading.Thread(target=self._watch_clock, args=(started,), name="skyward-clock", daemon=True).start()

    def _open_book(self, undo: ExitStack) -> tuple[Book, Purse]:
        """Write the pool into the ledger, and give it a reaper: from here on a kill leaves nothing that nobody knows of."""
        ledger_module = importlib.import_module("skyward_core.ledger.ledger")
        url = ledger_module.default_url(must_last=self.spec.budget is not None)
        self._ledger = ledger = ledger_module.Ledger(url, busy_timeout_seconds=LEDGER_BUSY_SECONDS)
        undo.callback(ledger.close)
        self._book = book = Book(ledger, self.pool_id, self.spec, self.providers[0], self.meter, self.emit, work=self.work)
        self._purse = purse = Purse(
            self.pool_id, self.meter, max_cost=self.spec.max_cost, account=self.spec.budget, accounts=ledger, lease_seconds=self.spec.lease_seconds
        )
        undo.callback(self._let_reaper_go_or_work)  # after the book is closed: killed in between, the reaper finds that the pool has ended
        try:
            self._charge = Charge.of(self.providers, self.pool_id, url)
            self._reaper = Reaper.start(self._charge)
        except NotPicklable as error:
            words = "the pool has no reaper, for its provider cannot travel to another process (%s): after a kill, `skyward sweep` ends it"
            self.events.log(logging.WARNING, words, error)
        book.open()  # after the reaper is there: from the first word on somebody ends what is written down here
        undo.callback(self._close_book_unless_left)
        if self._is_to_end:
            raise PoolClosed("terminate_now() was called while the pool opened: nothing was rented")
        return book, purse

    def _keep_while_opening(self, undo: ExitStack, machines: lifecycle.Machines) -> Callable[[], None]:
        """Renew the lease and what is reserved while the machines come up, which may take half an hour; return how to end the latter."""
        undo.callback(self._end_beats)
        self._begin("skyward-lease", self._renew_lease)
        ended = threading.Event()
        keeper = threading.Thread(target=self._keep_until, args=(ended, machines), name="skyward-opening", daemon=True)

        def end() -> None:
            ended.set()
            keeper.join()

        keeper.start()
        undo.callback(end)
        return end

    def _keep_until(self, ended: threading.Event, machines: lifecycle.Machines) -> None:
        assert self._purse is not None
        while not ended.wait(min(self.spec.lease_seconds / 6, COST_SECONDS)):
            try:
                fill, reason = self._purse.turn()
            except Exception as error:  # whatever it is: who else would look at the money?
                self.events.log(logging.ERROR, "the money of a pool that opens could not be looked after, and is again in a moment", error=error)
                continue
            if self._lease_lost is not None:
                self.why_ended = self._lease_lost
            elif fill >= Fill.USED_UP:
                self.why_ended = BudgetExceeded(f"{reason}, and it was not open yet: its machines are given back", self.spec.budget or "")
            else:
                continue
            machines.stop()  # whoever waits for a machine waits no longer, and the undo gives all of them back
            return

    def _let_reaper_go_or_work(self) -> None:
        """After a start that has left machines, or books that are open, the reaper goes on as if this process were gone: nobody can close such a pool again.

        It may be InstancesLeft that has left machines, or a second interrupt that has cut off the giving back.
        """
        if self._are_machines_left or self._refusal is not None:
            self._leave_to_reaper()
        else:
            self._let_reaper_go()

    def _leave_to_reaper(self) -> None:
        if self._reaper is not None:
            if self.has_detached:  # it would take it for a pool that lives on by its lease
                self._reaper.terminate_now()
            self._reaper.hang_up()

    @property
    def _are_machines_left(self) -> bool:
        return self.machines is not None and self.machines.may_be_left

    def _let_reaper_go(self) -> None:
        if self._reaper is not None:
            self._reaper.leave()

    def _close_book_unless_left(self) -> None:
        if not self._are_machines_left:
            self._close_book()

    def _close_book(self) -> None:
        """Write down the end of the pool, and take its receipt. Raises LedgerError if the ledger still refuses some of it; the machines are gone.

        May be called again then. What was refused is written anew.
        """
        assert self._book is not None
        assert self._ledger is not None
        try:
            if self._refusal is None:
                try:
                    self._book.close()
                except LedgerError as error:  # of now, or of an hour ago: it may have been mended since then
                    self._refusal = error
            if self._refusal is not None:
                self._write_anew(self._book, self._ledger, self._refusal)
                self._refusal = None
        finally:
            receipt = importlib.import_module("skyward_core.ledger.receipt")
            with contextlib.suppress(SkywardError):  # what the ledger has refused is raised already
                self.receipt = receipt.receipt(self._ledger, self.pool_id)

    def _write_anew(self, book: Book, ledger: Ledger, refusal: LedgerError) -> None:
        """Write down the end of all that is open in the ledger still: it is gone, and the meter knows since when. Raises `refusal` if it cannot."""
        try:
            open_still = [intent.id for intent in ledger.open_intents(pool_id=self.pool_id) if intent.kind is ResourceKind.INSTANCE]
            if open_still:
                ledger.close_all(open_still, GONE_EVIDENCE)
            book.note()  # after that: seconds that are noted take the place of those that somebody else has filled in meanwhile
            book.close()
        except LedgerError as error:
            raise refusal from (None if error is refusal else error)
        self.events.log(logging.WARNING, "the ledger had refused some of the end of %s, and has it now: %s", self.pool_id, refusal)

    def stop(self, reason: str, error: SkywardError | None = None) -> None:
        """Close everything, in the order cluster, machines, bill; each is tried whatever happened to the one before.

        Calls that have not ended raise `error`, or PoolClosed with the reason. If another thread is at it (the clock, when the money has run out), it is
        waited for, so that bill and receipt are there. If another thread detaches the pool, that one stops it, as long as it can; this one does nothing.
        Nor does it in a fork: the pool is its parent's, who goes on to use it.
        """
        if self.is_fork:
            return
        with self._changing:
            # An interrupt may have cut the detaching off, in this thread: then it is open.
            is_cut_off = self._state in (State.DETACHING, State.LEAVING) and self._detacher == threading.get_ident()
            is_ours = is_cut_off or self._state is State.OPEN
            if is_ours:
                self._state = State.STOPPED
                self._is_over.clear()
                self._stopper = threading.get_ident()
                self.why_ended = error
            elif self._state is State.DETACHING:
                self._asked_to_stop = self._asked_to_stop or (reason, error)
        if not is_ours:
            if not self.is_running and self._stopper != threading.get_ident():
                self._is_over.wait(JOIN_SECONDS)
            return
        self._ended.set()
        self._end_beats()
        assert self.cluster is not None
        assert self.machines is not None
        assert self.recovery is not None
        try:
            self.emit(PoolStopping())
            self.recovery.stop()
            if self.user_client is not None:
                self.user_client.close()
            self.cluster.close(error or PoolClosed(reason))
            self.machines.stop()
            self.recovery.join()
        finally:
            try:
                self.release()
            finally:
                self._settle_bill()
                self.events.close()
                self._is_over.set()

    def terminate_now(self) -> None:
        """Have somebody else end the machines, and rent none from now on, if the pool is only about to open. Waits for nothing.

        Does nothing in a fork, which inherits its parent's signal handlers: whoever ends a forked helper does not mean the pool.
        """
        if self.is_fork:
            return
        self._is_to_end = True  # first: `start` makes the machines, then looks at this, so that one of the two sees the other
        if self.machines is not None:
            self.machines.launch_no_more()
        if self._reaper is not None and self._reaper.is_alive:
            self._reaper.terminate_now()
        elif self.machines is not None:
            threading.Thread(target=self.machines.end_now, name="skyward-terminate", daemon=True).start()

    def detach(self, lease_seconds: float) -> Lease:
        """Let the machines live on under their lease, and let go of them; after an error the pool is open as before.

        Killed between any two lines it is a pool that its reaper ends, or one that lives as long as its lease says (`provisioning.detach`). Raises
        Unreachable, BadRequest, LedgerError, LeaseLost, and BudgetExceeded if its account does not pay for the whole lease. If the pool has ended itself, or
        wants to before the ledger is told, it is stopped, and what its calls raise is raised: BudgetExceeded, LeaseLost or PoolClosed.
        """
        assert self.machines is not None
        assert self._book is not None
        longest = max(lease_seconds, self.spec.lease_seconds)  # a lease is never shortened: somebody else may be attached
        now = datetime.now(UTC)
        try:
            self._claim()
            with self._paid_for(longest) as paid_seconds, living_alone(self.machines, longest, self.spec.lease_seconds):
                self._pass_the_last_objection()
                self._book.live_by_lease(paid_seconds)
            self._let_go()
        except BaseException:
            self._go_on()
            raise
        return self._leave(now + timedelta(seconds=paid_seconds))

    def _claim(self) -> None:
        """Begin to detach. Raises what has ended the pool, if somebody was quicker."""
        with self._changing:
            is_ours = self._state is State.OPEN
            if is_ours:
                self._state, self._detacher, self._asked_to_stop = State.DETACHING, threading.get_ident(), None
        if not is_ours:
            self._is_over.wait(JOIN_SECONDS)  # then the machines are gone
            if self.why_ended is not None:
                raise type(self.why_ended)(*self.why_ended.args)
            raise PoolClosed("the pool has ended, or is being detached: there is nothing to detach")

    def _pass_the_last_objection(self) -> None:
        """Take the step after which nobody can stop the pool any more, unless the ledger refuses. Raises what somebody has asked for before it."""
        with self._changing:
            asked = self._asked_to_stop
            if asked is None and self._is_to_end:
                asked = "terminate_now() was called while the pool was detached: its machines are ended", None
            if asked is None and self._state is State.DETACHING:
                self._state = State.LEAVING
                return
        reason, error = asked or ("the pool was closed while it was detached", None)
        raise error or PoolClosed(reason)

    def _let_go(self) -> None:
        with self._changing:
            if self._state is not State.LEAVING:  # a signal handler has closed the pool
                raise PoolClosed("the pool was closed while it was detached")
            self._state = State.DETACHED
            self.is_released = self._is_written_down = True

    def _go_on(self) -> None:
        """It was not detached: the pool is open as before, or stopped, if somebody has wanted that meanwhile."""
        with self._changing:
            if self._state not in (State.DETACHING, State.LEAVING) or self._detacher != threading.get_ident():
                return
            self._state = State.OPEN
            asked, self._asked_to_stop = self._asked_to_stop, None
        if asked is not None:
            self.stop(*asked)

    def _leave(self, expires_at: datetime) -> Lease:
        """Let go of what is the nodes' from now on; return its lease."""
        assert self.cluster is not None
        assert self.machines is not None
        assert self.recovery is not None
        assert self._book is not None
        if self._reaper is not None:
            self._reaper.live_by_lease()
        self._ended.set()
        self._end_beats()
        atexit.unregister(self._at_exit)
        lease = self.machines.lease.model_copy(update={"expires_at": expires_at})
        try:
            self.recovery.stop()
            if self.user_client is not None:
                self.user_client.close()
            self.cluster.leave("the pool was detached: attach to it")
            self.machines.stop()
            self.recovery.join()
            self._book.note()
        finally:
            self._let_reaper_go()
            self._close_ledger()
            self._settle_bill()
            self.events.close()
        return lease

    @contextlib.contextmanager
    def _paid_for(self, seconds: float) -> Generator[float]:
        """Reserve for a lease of so many seconds; tell for how many of them the machines are paid: `max_cost` may end them earlier.

        If what is done within fails, as much is reserved again as an attended pool needs.
        """
        assert self._purse is not None
        usual = 2 * self.spec.lease_seconds
        try:
            self._purse.pay_for(max(seconds, usual))
        except BudgetExceeded as error:
            rate = self.meter.rate()
            lasts = int(error.left_usd * SECONDS_PER_HOUR / rate) if rate else 0
            words = f"the pool was not detached: {error} That pays for {lasts} s: detach(lease_seconds=...) for less, or raise the account's limit"
            raise BudgetExceeded(words, error.account, error.left_usd) from error
        try:
            paid = self._purse.paid_seconds()
            yield seconds if paid is None else min(seconds, paid)
        except BaseException:
            with contextlib.suppress(SkywardError):  # then it is reserved until the pool is closed
                self._purse.pay_for(usual)
            raise

    def live_by_lease(self) -> None:
        """From now on nodes of this machine live by their lease, and no longer with this process."""
        assert self._book is not None
        self._book.live_by_lease(self.spec.lease_seconds)
        if self._reaper is not None:
            self._reaper.live_by_lease()
        self.has_detached = True
        self._keep_here()

    def _begin(self, name: str, step: Callable[[], object]) -> None:
        """Have a thread of its own do this six times in each lease, and at least every few seconds, until the pool ends."""
        troubles: set[str] = set()

        def on_error(error: Exception) -> None:
            if repr(error) not in troubles:  # one that comes with every beat is told once
                troubles.add(repr(error))
                self.events.log(logging.ERROR, "%s of %s goes on", name, self.pool_id, error=error)

        beat = Beat(name, min(self.spec.lease_seconds / 6, COST_SECONDS), step, on_error)
        self._beats.append(beat)
        beat.start()

    def _end_beats(self) -> None:
        for beat in self._beats:
            beat.end()

    def _renew_lease(self) -> None:
        """Lengthen the pool's lease in the ledger: all that the thread "skyward-lease" does. That it is lost is dealt with by the clock, within a second."""
        assert self._book is not None
        try:
            self._book.renew()
        except LeaseLost as error:
            self._lease_lost = error

    def release(self) -> None:
        """Give the machines back and write that down, unless that was done; nothing in a fork.

        Called again, by `close` or at the interpreter's end, if a second interrupt has cut it off; and by `close` if the ledger has refused something: the
        reaper tries to write it down too, for two minutes. Machines that cannot be confirmed gone raise InstancesLeft, unless they cost nothing and end
        themselves: those are left to the reaper, with a warning.
        """
        if self.recovery is None or self.machines is None or self.is_running or self.is_fork:
            return
        if not self.is_released:
            try:
                self.machines.release()
            except InstancesLeft as error:
                self.unconfirmed = error
                self.emit(InstancesUnconfirmed(error.ids, str(error), self.machines.may_be_left_to_their_lease))
                if not self.machines.may_be_left_to_their_lease:
                    raise
                self.hand_over(error)
                return
            self.unconfirmed = None
            self.is_released = True
            atexit.unregister(self._at_exit)
        if not self._is_written_down:
            try:
                self._close_book()
            except LedgerError:
                self._leave_to_reaper()
                raise
            self._is_written_down = True
            self._let_reaper_go()  # after the book: killed in between, the reaper finds that the pool has ended
            self._close_ledger()

    def hand_over(self, left: InstancesLeft) -> None:
        """Leave machines that could not be confirmed gone to the reaper, as if this process were gone: it asks again, for half an hour, and sweeps do after it.

        Their entries stay open, and so does the pool's. Killed between any two lines, the pool is one whose owner is dead: the same two end it.
        """
        if self.is_released or self.machines is None or self._book is None or self._ledger is None:
            return
        is_free = self.machines.may_be_left_to_their_lease
        level = logging.WARNING if is_free else logging.ERROR
        self.events.log(level, "%s was closed, and some of its machines are not confirmed gone: %s", self.pool_id, left)
        self.is_released = self._is_written_down = True
        atexit.unregister(self._at_exit)
        self._book.note()
        receipt = importlib.import_module("skyward_core.ledger.receipt")
        with contextlib.suppress(SkywardError):  # a ledger that is away: the reaper and the sweeps do without this process
            self.receipt = receipt.receipt(self._ledger, self.pool_id)
        self._leave_to_reaper()
        self._close_ledger()

    def _close_ledger(self) -> None:
        for beat in self._beats:
            beat.join(LEDGER_BUSY_SECONDS)
        if self._ledger is not None:
            self._ledger.close()

    def _count(self, event: SkywardEvent) -> None:
        """Let the meter know what a machine's seconds go to from now on."""
        match event:
            case BootstrapProgress(instance_id):
                self.meter.enter(instance_id, Bucket.BOOTSTRAPPING)
            case BootstrapCompleted(instance_id):
                self.meter.slots(instance_id, self.spec.concurrency * self.spec.workers_per_node)
                self.meter.enter(instance_id, Bucket.IDLE)
            case InstanceLost(instance_id):
                self.meter.enter(instance_id, Bucket.LOST)
            case _:
                pass

    def _tell_error(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, SkywardError):
            self.emit(Error(str(error)))

    def _settle_bill(self) -> None:
        final = self.meter.final()
        if final is not None:
            self.final = final
            self.emit(final)

    def _watch_clock(self, began: float) -> None:
        """Look at the money, tell the cost now and then, and end a pool that has lost its lease, is too old, or was idle for too long.

        What goes wrong with one of these is told, and the others go on, and it is tried again.
        """
        now = time.monotonic()
        clock = _Clock(began, told=now, asked=now)
        while not self._ended.wait(CLOCK_SECONDS):
            for step in self._due(clock, time.monotonic()):
                self._take(step, clock)

    def _due(self, clock: _Clock, now: float) -> list[Callable[[], object]]:
        """Return what is to be done at this look."""
        assert self.cluster is not None
        assert self._book is not None
        steps: list[Callable[[], object]] = [self._mind_lease, partial(self._mind_money, self.cluster), partial(self._mind_work, self.cluster, clock)]
        if now - clock.told >= COST_SECONDS:
            clock.told = now
            steps += [self._mind_reaper, self._book.note, lambda: self.emit(self.meter.update())]
        return steps

    def _take(self, step: Callable[[], object], clock: _Clock) -> None:
        try:
            try:
                if not self._ended.is_set():
                    step()
            except LeaseLost as error:
                self.events.log(logging.ERROR, "%s", error)
                self.stop(str(error), error)
        except Exception as error:
            if repr(error) != clock.trouble:
                clock.trouble = repr(error)
                self.events.log(logging.ERROR, "the clock of %s goes on", self.pool_id, error=error)

    def _mind_lease(self) -> None:
        if self._lease_lost is not None:
            raise self._lease_lost

    def _mind_work(self, cluster: Cluster, clock: _Clock) -> None:
        """Let the nodes know whether there are calls; end the pool if it is too old, or was idle for too long.

        `busy_at` is read after `is_idle`: the cluster alone writes it, when work comes, and when the last has ended, before it is idle.
        """
        assert self.machines is not None
        now = time.monotonic()
        if now - clock.asked >= COST_SECONDS or cluster.is_idle == clock.is_busy:
            clock.asked, clock.is_busy = now, cluster.has_work()
            self.machines.reaches.is_busy = clock.is_busy
        if self.spec.max_lifetime is not None and now - clock.began > self.spec.max_lifetime:
            self.events.log(logging.WARNING, "the pool has lived for %.0f s (max_lifetime) and ends itself", self.spec.max_lifetime)
            self.stop(f"the pool has lived for {self.spec.max_lifetime:.0f} s (ComputePool(max_lifetime=...)) and has ended itself")
        elif clock.is_busy:
            clock.busy_at = now
        elif now - max(clock.busy_at, cluster.busy_at) > self.spec.timeout:
            self.events.log(logging.WARNING, "the pool was idle for %.0f s (timeout) and ends itself", self.spec.timeout)
            self.stop(f"the pool was idle for {self.spec.timeout:.0f} s (ComputePool(timeout=...)) and has ended itself")

    def _mind_money(self, cluster: Cluster) -> None:
        """Warn, take no more calls, or end the pool, as the money goes."""
        assert self._purse is not None
        fill, reason = self._purse.turn()
        before, self._fill = self._fill, fill
        if fill >= Fill.WARNED > before:
            self.emit(BudgetWarning(float(self.meter.total()), self.spec.max_cost, self.spec.budget, reason))
        if fill >= Fill.USED_UP:
            error = BudgetExceeded(f"{reason}: the pool has closed", self.spec.budget or "")
            self.events.log(logging.WARNING, "%s", error)
            self.stop(str(error), error)
        elif fill >= Fill.DRAINED:
            cluster.drain(BudgetExceeded(f"{reason}: calls that run may end, others are not begun any more", self.spec.budget or ""))
        elif before >= Fill.DRAINED:
            cluster.drain(None)

    def _mind_reaper(self) -> None:
        """Start another reaper if somebody has ended it."""
        if self._reaper is not None and self._charge is not None and not self._reaper.is_alive and self.is_running:
            self.events.log(logging.WARNING, "the pool's reaper is gone: another one is started")
            self._reaper.leave()
            self._reaper = Reaper.start(self._charge)
            if self.has_detached:
                self._reaper.live_by_lease()

    def _keep_here(self) -> None:
        """Signs of life for nodes of this machine: that the pool is busy, and, once a call was started detached, a lease that outlives this process."""
        assert self.machines is not None
        for reach in self.machines.reaches.here():
            with contextlib.suppress(OSError):  # it is lost, which is noticed elsewhere
                if self.has_detached:
                    reach.extend_lease(self.spec.lease_seconds)
                else:
                    reach.say_busy()

    def _at_exit(self) -> None:
        try:
            self.stop("the interpreter ends")
            self.release()
        except Exception as error:  # the interpreter would print its traceback, which tells nobody what to do
            words = "%s could not be closed at the program's end: %s. Its reaper tries again, and so does `skyward sweep`; `skyward ps` tells what is left"
            self.events.log(logging.ERROR, words, self.pool_id, error)
        finally:
            with contextlib.suppress(SystemExit):  # of a callback: the program ends already
                self.events.flush()


def _make_ready(pool_id: str, certificate: Future[PoolCertificate]) -> None:
    """Make the pool's certificate and import Dask: most of a second, which passes while the machines come up."""
    try:
        certificate.set_result(importlib.import_module("skyward_core.engine.certificates").make_certificate(pool_id))
    except BaseException as error:
        certificate.set_exception(error)
        return
    importlib.import_module("skyward_core.engine.cluster")
