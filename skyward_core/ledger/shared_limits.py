"""The spending limits of pools whose money others may keep or use: named pools, and pools of one run.

Another process may keep the money of a named pool from one moment to the next (docs/decisions/0028): `StewardLimit`.
A pool whose run has a limit for all its pools (docs/decisions/0037) reserves from the account of its run, lease by
lease, as from that of a budget. There is one difference: if the account has less than the usual interval, the pool gets
the time that the rest pays for. So a run can spend its limit to the last minute, and a limit may be small: `RunLimit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, override

from skyward_core.errors import ZERO_USD, BudgetExceeded
from skyward_core.ledger.budgets import (
    MARGIN_SHARE,
    ROUNDS,
    WARNING_SHARE,
    Commitment,
    Fill,
    PendingLaunch,
    SpendingLimit,
    last_covered,
    own_seconds,
)
from skyward_core.ledger.rows import SECONDS_PER_HOUR, Price, Reservation

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


SHORTEST_EXTENSION_SECONDS = 1.0
SHORTEST_MARGIN_SECONDS = 4.0
"""The money is looked at once a second, and half of the margin is for the end of the machines."""


class StewardAccounts:
    """The accounts of a ledger for one steward: after another one they refuse, with NotSteward."""

    def __init__(self, ledger: Ledger, epoch: int | None) -> None:
        """`epoch` is the number of the steward; None for a pool without a name."""
        self._ledger = ledger
        self._epoch = epoch

    def roll(self, account: str | None, pool_id: str, total_usd: Decimal, next_usd: Decimal) -> Reservation:
        """As `Ledger.roll`, with the epoch."""
        return self._ledger.roll(account, pool_id, total_usd, next_usd, epoch=self._epoch)


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
            self._ending_seconds = ending_seconds
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


class RunLimit(StewardLimit):
    """The spending limit of one pool of such a run. It has no name, so its steward is always this process."""

    def __init__(self, run_limit_usd: Decimal, *arguments: Any, **more: Any) -> None:
        """Use the other arguments as `SpendingLimit` does."""
        super().__init__(lambda: True, *arguments, **more)
        self._run_limit = run_limit_usd

    @override
    def _reserve(
        self, launch: PendingLaunch, along: Sequence[PendingLaunch], least_seconds: float, hard_end: float | None
    ) -> None:
        """Reserve for new machines, and for those that follow, so that these find their money later.

        An open pool gets more machines only if the money pays for all of them up to the time for which it is paid, and
        for `least_seconds`.
        """
        if not launch.price.per_hour:
            return
        now = launch.at
        least = now + least_seconds + self._ending_seconds
        if self._paid_until is None:
            floor, usual = least, self._first_end(now)
        else:
            floor, usual = max(self._paid_until, least), now + (2 * self._lease_seconds if self._is_low(now) else 0.0)
        self._pay(max(floor, self._within_hard_ends(usual, hard_end)), floor, [launch, *along])

    @override
    def _commitment(self, hard_end: float | None, now: float) -> Commitment:
        """The machine's own clock also ends it when the reservation ends, if it hears nothing."""
        commitment = super()._commitment(hard_end, now)
        if (paid_end := self._paid_end()) is None:
            return commitment
        seconds = own_seconds(paid_end - now)
        if commitment.lifetime_seconds is not None:
            seconds = min(seconds, commitment.lifetime_seconds)
        return replace(commitment, lifetime_seconds=seconds)

    @override
    def _renew(self, now: float) -> None:
        """Reserve for two leases from now, or for as long as there is money. Raises BudgetExceeded if that is shorter,
        also after it has reserved.
        """
        assert self._paid_until is not None
        until = self._within_hard_ends(now + 2 * self._lease_seconds, None)
        if until <= self._paid_until:
            return
        floor = self._paid_until + SHORTEST_EXTENSION_SECONDS
        if (shortened := self._pay(max(until, floor), floor)) is not None:
            raise shortened

    def _pay(self, until: float, floor: float, launches: Sequence[PendingLaunch] = ()) -> BudgetExceeded | None:
        """Settle, and reserve for all machines and these launches until `until`, or as far as the limit of the run
        allows, but not before `floor`. Return the error by which the time was shortened.

        Raises BudgetExceeded if there is not so much, or if another account has refused; then nothing has changed.
        """
        assert self._accounts is not None
        shortened: BudgetExceeded | None = None
        for left_rounds in reversed(range(ROUNDS)):  # another pool of the run may take money in between
            spent, following = self._needed(until)
            following += _cost(launches, until)
            try:
                self._accounts.roll(self._account, self._pool_id, spent, following)
            except BudgetExceeded as error:
                if error.account or not left_rounds:
                    raise
                shortened, until = error, self._covered_until(floor, until, launches, error)
            else:
                with self._lock:
                    self._paid_until = until
                break
        return shortened

    def _covered_until(
        self, floor: float, until: float, launches: Sequence[PendingLaunch], error: BudgetExceeded
    ) -> float:
        """Return the latest time from `floor` on that the rest pays for; `until` is too late. Raises `error` if there
        is none.
        """

        def is_covered(seconds: float) -> bool:
            return self._needed(floor + seconds)[1] + _cost(launches, floor + seconds) <= error.left_usd

        if not is_covered(0):
            raise error
        return floor + last_covered(0, math.ceil(until - floor), is_covered)

    @property
    @override
    def _payer(self) -> str:
        return super()._payer if self._account else f"max_cost={self._run_limit:f}, which is for all pools of the run"

    @override
    def _paid_end(self) -> float | None:
        """A machine is gone when its money is used up: it begins to end before."""
        return None if self._paid_until is None else self._paid_until - self._ending_seconds

    @override
    def _account_fill(self, now: float) -> tuple[Fill, str]:
        """Warn only when this pool's reservation is the last fifth of the limit, and nothing more can be reserved."""
        fill, reason = super()._account_fill(now)
        is_run_s = self._refusal is not None and not self._refusal.account
        if fill is Fill.WARNED and is_run_s and (paid_end := self._paid_end()) is not None:
            held = self._meter.rate() * Decimal(paid_end - now) / SECONDS_PER_HOUR
            if held > (1 - WARNING_SHARE) * self._run_limit:
                return Fill.FULL, ""
        return fill, reason

    @override
    def _margin_seconds(self) -> float:
        usual, rate = super()._margin_seconds(), self._meter.rate()
        if not rate:
            return usual
        share = MARGIN_SHARE * float(self._run_limit / rate * SECONDS_PER_HOUR)
        return min(usual, max(share, SHORTEST_MARGIN_SECONDS))


def _cost(launches: Sequence[PendingLaunch], until: float) -> Decimal:
    return sum((launch.cost(until) for launch in launches), ZERO_USD)
