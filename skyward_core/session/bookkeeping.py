"""The books of one session: its events, counted in the meter, and its writes to the ledger.

    opened ──> the pool is in the ledger ──> its end is written ──> the ledger is closed
                                             └─ refused: repeated by the next `close_journal`, or by the reaper

`EventEmitter` counts each event in the meter, then queues it for callbacks and displays. `Bookkeeping` writes the pool,
its lease, its money and its end. SQLAlchemy is loaded when the ledger is opened, and not with this module. `Ledger`,
`Journal` and `SpendingLimit` have their own locks.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from skyward_core.errors import BudgetExceeded, LedgerError, SkywardError
from skyward_core.events import console
from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    Callback,
    CostFinal,
    Error,
    InfraCreating,
    InstanceLost,
    PoolLeft,
    SkywardEvent,
    compose,
    hide_other_nodes,
    registered_callback,
)
from skyward_core.events.queue import EventQueue
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import SECONDS_PER_HOUR, Bucket, ResourceKind
from skyward_core.ledger.shared_limits import RunLimit, StewardAccounts, StewardLimit
from skyward_core.providers.base import Provider
from skyward_core.session.steward_term import StewardTerm
from skyward_core.spec import PoolSpec
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

LEDGER_BUSY_SECONDS = 10.0
"""How long a pool waits for a ledger that another process has locked, at each step; a write takes milliseconds."""
GONE_EVIDENCE = "it was confirmed gone when its pool was closed; the ledger could not be written then"


class Bookkeeping:
    """Owns the connection of the ledger, journal, spending limit and receipt of one session."""

    def __init__(
        self, pool_id: str, meter: Meter, log: Callable[..., object], run_limit_usd: Decimal | None = None
    ) -> None:
        """`run_limit_usd` is for all pools of the work's run."""
        self._pool_id = pool_id
        self._meter = meter
        self._log = log
        self._run_limit_usd = run_limit_usd
        self.journal: Journal | None = None
        self.spending_limit: SpendingLimit | None = None
        self.receipt: Mapping[str, Any] | None = None
        self.epoch: int | None = None
        """With a name: the number of this steward."""
        self._ledger: Ledger | None = None
        self._usual_seconds = 0.0
        """For how long a pool with a client reserves."""
        self._refusal: LedgerError | None = None
        """The writes of the end that the ledger has refused, until they are repeated."""

    @property
    def ledger(self) -> Ledger | None:
        """The connection to the ledger; None before it is opened."""
        return self._ledger

    @property
    def is_refused(self) -> bool:
        """Whether the ledger has refused some writes of the pool's end."""
        return self._refusal is not None

    def open_ledger(
        self,
        undo: ExitStack,
        spec: PoolSpec,
        provider: Provider,
        emit: Callable[[SkywardEvent], object],
        work: Work,
        term: StewardTerm | None = None,
    ) -> tuple[str, Journal, StewardLimit]:
        """Connect to the ledger; return its URL, and the pool's journal and spending limit. Nothing is written yet.

        With a term, what only the steward of a named pool may write is refused when another process is the steward.
        """
        epoch, keeps = (None, lambda: True) if term is None else (term.epoch, lambda: term.is_certain)
        self.epoch = epoch
        ledger_module = importlib.import_module("skyward_core.ledger.ledger")
        url = ledger_module.default_url(must_last=spec.budget is not None)
        self._ledger = ledger = ledger_module.Ledger(url, busy_timeout_seconds=LEDGER_BUSY_SECONDS, may_migrate=True)
        undo.callback(ledger.close)
        if spec.budget is not None:
            # an unknown account is refused here: machines that cost nothing draw on none, and those of a cloud would
            ledger.left_usd(spec.budget, self._pool_id)
        self.journal = journal = Journal(
            ledger,
            self._pool_id,
            spec,
            provider,
            self._meter,
            emit,
            work=work,
            epoch=epoch,
            run_limit_usd=self._run_limit_usd,
        )
        run_limit = self._run_limit_usd
        limit = partial(StewardLimit, keeps) if run_limit is None else partial(RunLimit, run_limit)
        self.spending_limit = spending_limit = limit(
            self._pool_id,
            self._meter,
            max_cost=spec.max_cost,
            account=spec.budget,
            accounts=StewardAccounts(ledger, epoch),
            lease_seconds=spec.lease_seconds,
        )
        self._usual_seconds = 2 * spec.lease_seconds
        return url, journal, spending_limit

    def settle_others(self) -> None:
        """Settle pools of this computer that have ended themselves. Raises nothing."""
        assert self._ledger is not None
        importlib.import_module("skyward_core.cleanup.pool_record").settle_here(self._ledger)

    @contextlib.contextmanager
    def paid_for(self, seconds: float) -> Generator[float]:
        """Reserve for a lease of this length; yield for how many seconds the machines are paid: `max_cost` may end them
        earlier.

        If the block fails, the reservation is again that of a pool with a client.
        """
        assert self.spending_limit is not None
        try:
            self.spending_limit.pay_for(max(seconds, self._usual_seconds))
        except BudgetExceeded as error:
            rate = self._meter.rate()
            lasts = int(error.left_usd * SECONDS_PER_HOUR / rate) if rate else 0
            words = (
                f"the pool was not detached: {error} That pays for {lasts} s: detach(lease_seconds=...) for less, or"
                " raise the account's limit"
            )
            raise BudgetExceeded(words, error.account, error.left_usd) from error
        try:
            paid = self.spending_limit.paid_seconds()
            yield seconds if paid is None else min(seconds, paid)
        except BaseException:
            with contextlib.suppress(SkywardError):  # then the money is reserved until the pool is closed
                self.spending_limit.pay_for(self._usual_seconds)
            raise

    def note_cost(self, ended: threading.Event) -> None:
        """Record the cost so far, without waiting for the clock, unless the pool has ended.

        An error of the ledger is kept until the pool is closed.
        """
        if self.journal is not None and not ended.is_set():
            self.journal.note()

    def close_journal(self) -> None:
        """Write the end of the pool, and read its receipt.

        Raises LedgerError if the ledger still refuses some of it; the machines are gone. It may be called again then,
        and repeats the refused writes.
        """
        assert self.journal is not None
        assert self._ledger is not None
        try:
            if self._refusal is None:
                try:
                    self.journal.close()
                except LedgerError as error:  # it may be an old refusal: the ledger may have been repaired since
                    self._refusal = error
            if self._refusal is not None:
                self._write_anew(self.journal, self._ledger, self._refusal)
                self._refusal = None
        finally:
            self.take_receipt()  # the refusal of the ledger has been raised already

    def _write_anew(self, journal: Journal, ledger: Ledger, refusal: LedgerError) -> None:
        """Write the end of all entries that are still open in the ledger: the machines are gone, and the meter has the
        time.

        Raises `refusal` if it cannot.
        """
        try:
            open_still = [
                intent.id
                for intent in ledger.open_intents(pool_id=self._pool_id)
                if intent.kind is ResourceKind.INSTANCE
            ]
            if open_still:
                ledger.close_all(open_still, GONE_EVIDENCE)
            # after that: recorded seconds replace those that another process has written meanwhile
            journal.note()
            journal.close()
        except LedgerError as error:
            raise refusal from (None if error is refusal else error)
        self._log(
            logging.WARNING, "the ledger had refused some of the end of %s, and has it now: %s", self._pool_id, refusal
        )

    def note_what_is_left(self) -> None:
        """Record the cost so far, and read the receipt: machines are not confirmed gone, and its `left` names them."""
        assert self.journal is not None
        with contextlib.suppress(SkywardError):  # of a ledger that does not answer, or of another steward
            self.journal.note()
        self.take_receipt()

    def take_receipt(self) -> None:
        """Read the receipt, if the ledger can be read. Otherwise reaper and sweeps finish without this process."""
        if self._ledger is None:
            return
        receipt = importlib.import_module("skyward_core.ledger.receipt")
        with contextlib.suppress(SkywardError):
            self.receipt = receipt.receipt(self._ledger, self._pool_id)

    def close_ledger(self) -> None:
        """Close the connection."""
        if self._ledger is not None:
            self._ledger.close()


def event_queue(spec: PoolSpec, on_event: Callback | None, log: Callable[..., object], pool_id: str = "") -> EventQueue:
    """Return the queue of a pool's events: to the registered callback, `on_event` and the display, in this order.

    `pool_id` is that of a pool which is open already, `log` as in `EventQueue`.
    """
    display = console.display(spec.display, pool_id=pool_id)
    first = hide_other_nodes if spec.output == "head" else None
    sinks = [callback for callback in (first, registered_callback(), on_event) if callback is not None]
    return EventQueue(compose(*sinks, display), display.close, log=log)


class EventEmitter:
    """Owns the queue, the meter and the bill of one session. Any thread may emit."""

    def __init__(self, spec: PoolSpec, on_event: Callback | None, queue: EventQueue | None = None) -> None:
        """Use this queue, or one for all callbacks and the display."""
        self.meter = Meter()
        self.final: CostFinal | None = None
        """The bill, once it was emitted."""
        self.left: PoolLeft | None = None
        """What the pool had cost when this process left it to others."""
        self._slots = spec.concurrency * spec.workers_per_node
        self.queue = queue or event_queue(spec, on_event, console.log_of(spec.display))

    def emit(self, event: SkywardEvent) -> int:
        """Count one event, and queue it for the callbacks; return its number in `queue`.

        Waits for no callback, except for the first event, `InfraCreating`. It is delivered before anything is rented: a
        callback can store the pool's id then, in case this process dies.
        """
        self._count(event)
        number = self.queue.put(event)
        if isinstance(event, InfraCreating):
            self.queue.flush()
        return number

    def _count(self, event: SkywardEvent) -> None:
        """Set in the meter the bucket of a machine's seconds from now on."""
        match event:
            case BootstrapProgress(instance_id):
                self.meter.enter(instance_id, Bucket.BOOTSTRAPPING)
            case BootstrapCompleted(instance_id):
                self.meter.slots(instance_id, self._slots)
                self.meter.enter(instance_id, Bucket.IDLE)
            case InstanceLost(instance_id):
                self.meter.enter(instance_id, Bucket.LOST)
            case _:
                pass

    def emit_error(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Emit an error of ours; the exit callback of an ExitStack."""
        if isinstance(error, SkywardError):
            self.emit(Error(str(error)))

    def emit_bill(self, receipt: Mapping[str, Any] | None = None) -> None:
        """Emit the bill, unless that was done or the pool was left: that of the receipt, if that has the end."""
        final = self.meter.final()
        if final is not None:
            self.final = _as_in(receipt, final)
            self.emit(self.final)

    def emit_left(self, pool_id: str) -> None:
        """Emit that this process leaves the pool to others, in place of the bill."""
        if (left := self.meter.left(pool_id)) is not None:
            self.left = left
            self.emit(left)


def _as_in(receipt: Mapping[str, Any] | None, final: CostFinal) -> CostFinal:
    """Return the bill with the figures of a receipt: the ledger may know more than the meter of this process."""
    if receipt is None or receipt["ended_at"] is None or receipt["left"]:
        return final
    buckets = {name: its["cost_usd"] for name, its in receipt["buckets"].items() if its["cost_usd"]}
    saved = receipt["saved_usd"]
    return replace(final, total_cost=receipt["total_cost_usd"], savings_vs_ondemand=saved, buckets=buckets)
