"""The money of a detached pool, which a process that is attached to it reserves, as its opener did.

    paid until T ──fewer than RENEW_LEASES leases are left──▶ reserved for PAID_LEASES from now ──▶ paid until a later T
                    └──the account has less──▶ as far as the rest pays ──▶ nothing is left: the nodes end at T

The state is that of the ledger: what is reserved, and the requests and prices of the machines. So two processes may pay
at once: each sees what the other has reserved. After a kill between a reservation and the message to the nodes, these
end at the earlier T, and the rest of the money is free when the pool is settled. No node lives beyond `max_cost`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, cast

from skyward_core.errors import BudgetExceeded
from skyward_core.events.events import BudgetWarning, SkywardEvent
from skyward_core.ledger.budgets import LONGEST_SECONDS, RENEW_LEASES, last_covered
from skyward_core.ledger.metering import Projection, projection_of
from skyward_core.ledger.rows import PoolEntry
from skyward_core.providers.base import load
from skyward_core.spec import PoolSpec

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

PAID_LEASES = 2.0
"""For how many leases from now is reserved."""
LAST_SECONDS = 30.0
"""How long before the end of the money there is a `BudgetWarning`, at most."""
ROUNDS = 3
"""How often a smaller sum is tried: another pool may take money from the account in between."""


class LeasePayments:
    """What one attached process pays for one pool. `renew` periodically, from one thread; `close` at the end."""

    def __init__(
        self,
        pool_id: str,
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        open_ledger: Callable[[], Ledger] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool_id = pool_id
        self._lease_seconds = lease_seconds
        self._emit = emit
        self._open_ledger = open_ledger or _open
        self._monotonic = monotonic
        self._ledger: Ledger | None = None
        self._paid_until: float | None = None
        """On the monotonic clock; None for no limit, or if that is not known yet."""
        self._refusal: BudgetExceeded | None = None
        self._has_warned = False
        self.beat_seconds = min(LAST_SECONDS / 6, lease_seconds / 6)

    def paid_seconds(self) -> float | None:
        """Return for how many seconds from now the nodes are paid; None for no end. Waits for nothing."""
        until = self._paid_until
        return None if until is None else max(0.0, until - self._monotonic())

    def renew(self) -> None:
        """Reserve for the next time if little is left. Raises LedgerError; what is reserved then is still valid."""
        ledger, since = self._opened(), self._monotonic()
        entry = ledger.pool(self._pool_id)
        if entry is None or entry.ended_at is not None or entry.condemned_at is not None:
            return
        max_cost = PoolSpec.model_validate_json(entry.spec_json).max_cost
        payers = [account for account in (entry.account, entry.run_account) if account is not None]
        if max_cost is None and not payers:
            return
        now, projection = ledger.names.now(), projection_of(ledger, self._pool_id)
        seconds = float(LONGEST_SECONDS)
        if max_cost is not None:
            covered = seconds_covered(projection, now, Decimal(repr(max_cost)))
            seconds = max(0.0, covered - load(entry.provider).ending_seconds)
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
