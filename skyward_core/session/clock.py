"""What repeats in the process of an open pool, until the pool ends: steps, renewals of leases, and limits.

`Clock` repeats several small steps in the thread "skyward-clock". `Renewal` renews leases, each in a separate thread,
so that nothing else can delay it: "skyward-lease" renews the pool's lease in the ledger, "skyward-node-lease" those of
nodes of this machine. None of them waits for a callback, or logs to a terminal, because a terminal may block.

Money, lifetime and idle time are limits: a pool that exceeds one of them ends itself. `OpeningLimits` checks them while
the pool opens, in the thread "skyward-opening". `Limits` checks them while it is open, in the clock's thread. Each is
used by one thread only, and has no lock.

`LeasePayments` is the money of a detached pool, which a process that is attached to it reserves, as its opener did:

    paid until T ──fewer than RENEW_LEASES leases are left──▶ reserved for PAID_LEASES from now ──▶ paid until a later T
                    └──the account has less──▶ as far as the rest pays ──▶ nothing is left: the nodes end at T

The state is that of the ledger: what is reserved, and the requests and prices of the machines. So two processes may pay
at once: each sees what the other has reserved. After a kill between a reservation and the message to the nodes, these
end at the earlier T, and the rest of the money is free when the pool is settled. No node lives beyond `max_cost`.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, cast

from skyward_core.concurrency.threads import LoopThread, PeriodicThread
from skyward_core.config.own_providers import kind_of_pool
from skyward_core.errors import BudgetExceeded, LeaseLost, SkywardError
from skyward_core.events.events import BudgetWarning, SkywardEvent
from skyward_core.ledger.budgets import RENEW_LEASES, Fill, SpendingLimit, last_covered
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.lease_clock import boot_seconds
from skyward_core.ledger.metering import Meter, Projection, projection_of
from skyward_core.ledger.rows import PoolEntry
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import Transports
from skyward_core.written_numbers import LONGEST_SECONDS

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger

CLOCK_SECONDS = 1.0
SELDOM_SECONDS = 5.0
MOST_BEAT_SECONDS = 5.0
ASK_SECONDS = 5.0
PAID_LEASES = 2.0
"""For how many leases from now is reserved."""
LAST_SECONDS = 30.0
"""How long before the end of the money there is a `BudgetWarning`, at most."""
ROUNDS = 3
"""How often a smaller sum is tried: another pool may take money from the account in between."""


type Step = Callable[[], object]
type Stop = Callable[[str, SkywardError | None], None]


class Clock:
    """Takes some steps every second, and others every few seconds.

    A step that fails is logged once, does not prevent others, and is tried again. A step that raises LeaseLost stops
    the pool. Times are of `time.monotonic`, in seconds.
    """

    def __init__(
        self,
        pool_id: str,
        often: Sequence[Step],
        seldom: Sequence[Step],
        stop: Stop,
        log: Callable[..., object],
        now: float,
    ) -> None:
        self._pool_id = pool_id
        self._often = list(often)
        self._seldom = list(seldom)
        self._stop = stop
        self._log = log
        self._seldom_at = now
        """When the other steps were last taken."""
        self._trouble = ""
        """The last error that was logged."""

    def run(self, ended: threading.Event) -> None:
        """Take the due steps every CLOCK_SECONDS until the pool has ended."""
        while not ended.wait(CLOCK_SECONDS):
            for step in self.due(time.monotonic()):
                self.take(step, ended)

    def due(self, now: float) -> list[Step]:
        """Return the steps that are due now."""
        if now - self._seldom_at < SELDOM_SECONDS:
            return self._often
        self._seldom_at = now
        return [*self._often, *self._seldom]

    def take(self, step: Step, ended: threading.Event) -> None:
        """Take a step, unless the pool has ended. Raises no Exception."""
        try:
            try:
                if not ended.is_set():
                    step()
            except LeaseLost as error:
                self._log(logging.ERROR, "%s", error)
                self._stop(str(error), error)
        except Exception as error:
            if repr(error) != self._trouble:
                self._trouble = repr(error)
                self._log(logging.ERROR, "the clock of %s goes on", self._pool_id, error=error)


class Renewal:
    """Owns the threads that renew leases, and the error that the pool's lease is lost."""

    def __init__(self, pool_id: str, lease_seconds: float, log: Callable[..., object]) -> None:
        self._pool_id = pool_id
        self.beat_seconds = min(lease_seconds / 6, MOST_BEAT_SECONDS)
        self._log = log
        self._beats: list[PeriodicThread] = []
        self._lost: LeaseLost | None = None

    @property
    def lost(self) -> LeaseLost | None:
        """The error that the pool's lease is lost, because a sweep has condemned the pool; else None."""
        return self._lost

    def begin(self, name: str, step: Callable[[], object]) -> None:
        """Start a thread that takes this step until the pool ends: six times in each lease, and at least every few
        seconds.
        """
        troubles: set[str] = set()

        def on_error(error: BaseException) -> None:
            if repr(error) not in troubles:  # an error that repeats with every renewal is logged once
                troubles.add(repr(error))
                self._log(logging.ERROR, "%s of %s goes on", name, self._pool_id, error=error)

        beat = PeriodicThread(name, self.beat_seconds, step, on_error)
        self._beats.append(beat)
        beat.start()

    def renew(self, journal: Journal) -> None:
        """Extend the pool's lease in the ledger. If it is lost, the clock acts within a second."""
        try:
            journal.renew()
        except LeaseLost as error:
            self._lost = error

    def raise_if_lost(self) -> None:
        """Raise LeaseLost if the pool's lease is lost."""
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Stop renewing. Does not wait for a renewal that runs."""
        for beat in self._beats:
            beat.end()

    def join(self, timeout_seconds: float) -> None:
        """Wait for renewals that run, at most this long for each."""
        for beat in self._beats:
            beat.join(timeout_seconds)


class OpeningLimits:
    """Checks the money and the lease while machines start, which may take half an hour.

    `end` ends the thread, and waits for it.
    """

    def __init__(
        self,
        spending_limit: SpendingLimit,
        renewal: Renewal,
        fail: Callable[[SkywardError], None],
        log: Callable[..., object],
    ) -> None:
        self._spending_limit = spending_limit
        self._renewal = renewal
        self._fail = fail
        self._log = log
        self._ended = threading.Event()
        self._thread = LoopThread("skyward-opening", self._run)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop checking. May be called twice."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._renewal.beat_seconds):
            try:
                fill, reason = self._spending_limit.check()
            except Exception as error:  # any error ends the pool, because no other thread checks the money
                self._log(
                    logging.ERROR,
                    "the money of a pool that opens could not be checked; it is checked again in a moment",
                    error=error,
                )
                continue
            if self._renewal.lost is not None:
                self._fail(self._renewal.lost)
            elif fill >= Fill.USED_UP:
                self._fail(
                    BudgetExceeded(f"{reason} before the pool was open: its machines end", self._spending_limit.account)
                )
            else:
                continue
            return


class Limits:
    """Warns, drains or stops an open pool. Times are of `time.monotonic`, in seconds.

    `began`, when it began to live, is of `boot_seconds`: the machines live on while this computer sleeps.
    """

    def __init__(
        self,
        spec: PoolSpec,
        cluster: Cluster,
        transports: Transports,
        spending_limit: SpendingLimit,
        meter: Meter,
        *,
        emit: Callable[[SkywardEvent], object],
        stop: Stop,
        log: Callable[..., object],
        began: float,
        busy_at: float = 0.0,
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._transports = transports
        self._spending_limit = spending_limit
        self._meter = meter
        self._emit = emit
        self._stop = stop
        self._log = log
        self._began = began
        self._fill = Fill.FULL
        self._sent_at = time.monotonic()
        self._is_busy = False
        self._busy_at = busy_at
        """When there was last work of another client."""

    @property
    def is_busy(self) -> bool:
        """Whether any call of any client ran or waited when that was last looked at."""
        return self._is_busy

    def check_money(self) -> None:
        """Warn, refuse new calls, or end the pool, depending on the money that is left."""
        fill, reason = self._spending_limit.check()
        account = self._spending_limit.account
        before, self._fill = self._fill, fill
        if fill >= Fill.WARNED > before:
            self._emit(BudgetWarning(float(self._meter.total()), self._spec.max_cost, account or None, reason))
        if fill >= Fill.USED_UP:
            error = BudgetExceeded(f"{reason}: the pool has closed", account)
            self._log(logging.WARNING, "%s", error)
            self._stop(str(error), error)
        elif fill >= Fill.DRAINED:
            self._cluster.drain(BudgetExceeded(f"{reason}: running calls may end, and no others begin", account))
        elif before >= Fill.DRAINED:
            self._cluster.drain(None)

    def check_work(self) -> None:
        """Send the nodes whether there are calls; end the pool if it is too old, or was idle for too long.

        `busy_at` is read after `is_idle`: only the cluster writes it, when work comes, and when the last call has
        ended, before it is idle.
        """
        now = time.monotonic()
        max_lifetime, timeout = self._spec.max_lifetime, self._spec.timeout
        if now - self._sent_at >= ASK_SECONDS or self._cluster.is_idle == self._is_busy:
            self._sent_at, self._is_busy = now, self._cluster.has_work()
            self._transports.is_busy = self._is_busy
        if max_lifetime is not None and boot_seconds() - self._began > max_lifetime:
            self._log(logging.WARNING, "the pool has lived for %.0f s (max_lifetime) and ends itself", max_lifetime)
            self._stop(
                f"the pool has lived for {max_lifetime:.0f} s (ComputePool(max_lifetime=...)) and has ended itself",
                None,
            )
        elif self._is_busy:
            self._busy_at = now
        elif now - max(self._busy_at, self._cluster.busy_at) > timeout:
            self._log(logging.WARNING, "the pool was idle for %.0f s (timeout) and ends itself", timeout)
            self._stop(f"the pool was idle for {timeout:.0f} s (ComputePool(timeout=...)) and has ended itself", None)


class LeasePayments:
    """What one attached process pays for one pool. `renew` periodically, from one thread; `close` at the end."""

    def __init__(
        self,
        pool_id: str,
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        open_ledger: Callable[[], Ledger] | None = None,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self._pool_id = pool_id
        self._lease_seconds = lease_seconds
        self._emit = emit
        self._open_ledger = open_ledger or _open
        self._clock = clock
        self._ledger: Ledger | None = None
        self._paid_until: float | None = None
        """On the clock; None for no limit, or if that is not known yet."""
        self._refusal: BudgetExceeded | None = None
        self._has_warned = False
        self.beat_seconds = min(LAST_SECONDS / 6, lease_seconds / 6)

    def paid_seconds(self) -> float | None:
        """Return for how many seconds from now the nodes are paid; None for no end. Waits for nothing."""
        until = self._paid_until
        return None if until is None else max(0.0, until - self._clock())

    def renew(self) -> None:
        """Reserve for the next time if little is left. Raises LedgerError; what is reserved then is still valid."""
        ledger, since = self._opened(), self._clock()
        entry = ledger.pool(self._pool_id)
        if entry is None or entry.ended_at is not None or entry.condemned_at is not None:
            return
        max_cost = entry.max_cost
        payers = [account for account in (entry.account, entry.run_account) if account is not None]
        if max_cost is None and not payers:
            return
        now, projection = ledger.names.now(), projection_of(ledger, self._pool_id)
        seconds = float(LONGEST_SECONDS)
        if max_cost is not None:
            covered = seconds_covered(projection, now, Decimal(repr(max_cost)))
            seconds = max(0.0, covered - kind_of_pool(entry).ending_seconds)
        if payers:
            seconds = min(seconds, self._paid_by(ledger, entry, payers, projection, now, seconds))
        self._paid_until = since + seconds
        if seconds <= min(LAST_SECONDS, self._lease_seconds / 4) and not self._has_warned:
            self._has_warned = True
            self._emit(_last_warning(float(projection.at(now)), max_cost, entry.account, self._refusal, seconds))

    def close(self) -> None:
        """Close the connection to the ledger. What is reserved stays so."""
        if self._ledger is not None:
            self._ledger.close()

    def _opened(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self._open_ledger()
        return self._ledger

    def _paid_by(
        self,
        ledger: Ledger,
        entry: PoolEntry,
        payers: Sequence[str],
        projection: Projection,
        now: datetime,
        most_seconds: float,
    ) -> float:
        """Reserve if little is left; return for how many seconds from now the accounts have paid."""
        committed = min(_committed(ledger, entry.id, account) for account in payers)
        paid = wanted = seconds_covered(projection, now, committed)
        if paid < RENEW_LEASES * self._lease_seconds:
            wanted = min(PAID_LEASES * self._lease_seconds, most_seconds)
        for _ in range(ROUNDS):
            if wanted <= paid:
                break
            try:
                ledger.reserve(entry.account, entry.id, projection.at(now + timedelta(seconds=wanted)) - committed)
            except BudgetExceeded as error:
                self._refusal = error
                wanted = min(wanted - 1.0, seconds_covered(projection, now, committed + error.left_usd))
            else:
                return wanted
        return paid


def seconds_covered(projection: Projection, now: datetime, limit_usd: Decimal) -> float:
    """Return for how many seconds from now the pool costs at most this much, if its machines live on."""

    def is_covered(seconds: float) -> bool:
        return projection.at(now + timedelta(seconds=seconds)) <= limit_usd

    if not is_covered(0):
        return 0.0
    return float(LONGEST_SECONDS if is_covered(LONGEST_SECONDS) else last_covered(0, LONGEST_SECONDS, is_covered))


def _committed(ledger: Ledger, pool_id: str, account: str) -> Decimal:
    """Return what an account has paid for a pool, and what is reserved there for it."""
    open_ones = [one for one in ledger.open_reservations(pool_id=pool_id) if one.account == account]
    return sum((one.reserved_usd for one in open_ones), ledger.settled_usd(pool_id, account))


def _last_warning(
    spent: float, max_cost: float | None, account: str | None, refusal: BudgetExceeded | None, seconds: float
) -> BudgetWarning:
    why = f"max_cost={max_cost:g} is nearly used up" if refusal is None else str(refusal)
    return BudgetWarning(spent, max_cost, account, f"{why}: the machines of the pool end in {seconds:.0f} s")


def _open() -> Ledger:
    module = importlib.import_module("skyward_core.ledger.ledger")
    return cast("Ledger", module.Ledger(module.default_url()))
