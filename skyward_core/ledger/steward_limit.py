"""The money of a named pool, which another process may keep from one moment to the next (docs/decisions/0028)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, override

from skyward_core.ledger.budgets import Commitment, Fill, PendingLaunch, SpendingLimit, last_covered
from skyward_core.ledger.rows import Price, Reservation

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


class StewardAccounts:
    """The accounts of a ledger for one steward: after another one they refuse, with NotSteward."""

    def __init__(self, ledger: Ledger, epoch: int | None) -> None:
        """`epoch` is the number of the steward; None for a pool without a name."""
        self._ledger = ledger
        self._epoch = epoch

    def reserve(self, account: str | None, pool_id: str, usd: Decimal) -> Reservation:
        """As `Ledger.reserve`, with the epoch."""
        return self._ledger.reserve(account, pool_id, usd, epoch=self._epoch)

    def roll(self, account: str | None, pool_id: str, spent_usd: Decimal, next_usd: Decimal) -> Reservation:
        """As `Ledger.roll`, with the epoch."""
        return self._ledger.roll(account, pool_id, spent_usd, next_usd, epoch=self._epoch)


class StewardLimit(SpendingLimit):
    """The spending limit of one steward.

    It says nothing to nodes and reserves nothing while `keeps` is false: a steward that was stopped for some time would
    send the end of its money, and the nodes would end.
    """

    def __init__(self, keeps: Callable[[], bool], *arguments: Any, **more: Any) -> None:
        """Use the other arguments as `SpendingLimit` does. `keeps` returns whether this process is certainly the
        steward now; it waits for nothing.
        """
        super().__init__(*arguments, **more)
        self._keeps = keeps

    @override
    def paid_seconds(self) -> float | None:
        """Return for how many seconds the machines are paid; None for no end, or if another process keeps the pool."""
        return super().paid_seconds() if self._keeps() else None

    @override
    def check(self) -> tuple[Fill, str]:
        """Reserve for the next interval, and return how much is left; FULL if another process keeps the pool."""
        return super().check() if self._keeps() else (Fill.FULL, "")

    def adopt(
        self,
        latest_ends: Mapping[str, float],
        unsure: Iterable[tuple[float, Price]],
        settled: Decimal,
        held: Decimal,
        ending_seconds: float,
    ) -> None:
        """Go on with the money of an earlier steward. The meter has its machines.

        Args:
            latest_ends: by machine, the latest hard end that it may receive, on the meter's clock.
            unsure: when a launch without an answer was requested, and the price of its machine.
            settled: what the account has paid for the pool so far, in USD.
            held: what is reserved beyond that, in USD.
            ending_seconds: how long a machine is billed after it begins to end.
        """
        with self._change_lock, self._lock:
            now = self._meter.now()
            self._ending_seconds, self._settled, self._held = ending_seconds, settled, held
            if self._limit is not None and latest_ends:
                self._horizon = min(latest_ends.values())
                for at, price in unsure:
                    self._pending[Commitment(None, self._horizon, self._horizon)] = PendingLaunch(1, price, at)
                self._hard_ends = dict.fromkeys(latest_ends, now)
                until = self._furthest((), frozenset(latest_ends), now, max) or now
                self._until = until
                self._hard_ends = dict.fromkeys(latest_ends, until)
                self._own_ends = dict.fromkeys(latest_ends, until - ending_seconds)
            if self._account is not None:
                longest = math.ceil(self._first_end(0.0))
                self._paid_until = now + last_covered(
                    0, longest, lambda seconds: self._meter.projected(now + seconds) - settled <= held
                )
