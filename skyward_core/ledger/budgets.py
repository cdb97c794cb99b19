"""What a pool may still spend: `max_cost`, and the account that `budget` names.

`max_cost`: the launch of a machine commits its cost up to its hard end. When the machine is known to be gone, the rest
is free again. Commitments never exceed the limit, so the nodes' own clocks keep it when the owner is dead. At its
hard end a machine must be gone. It begins to end itself earlier, by `ending_seconds` of its provider, because it is
billed until it is gone.

All machines share one hard end, up to which the money lasts for all of them. A new machine, for example the replacement
of a lost one, needs money too:

    committed ──a new machine is requested: the others get an earlier end──▶ shortened ──there is money again──▶ up to
    the first hard end, and no further
              a machine that does not receive the earlier end keeps its end, and its money

The commitment of a machine becomes smaller only after it has confirmed the earlier end. It becomes larger before the
machine receives a later end. A crash over-commits, never under-commits. The parts of a pool (spot and on-demand) are
committed together, all up to the same hard end.

`budget`: the cost of an interval is reserved in the ledger before the interval begins. Nodes receive the time up to
which they are paid, and end themselves then. The previous reservation is settled with the real cost.

    full ──80 %──▶ warned ──the margin is left──▶ drained ──nothing is left──▶ used up
                             no new calls            the pool closes

A pool goes from left to right. Only `drained` can go back, if there is money again: in the account, or because a
machine is gone earlier than its hard end.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from typing import Protocol

from skyward_core.errors import ZERO_USD, BudgetExceeded, LedgerError
from skyward_core.events.narrator import digits
from skyward_core.ledger.rows import SECONDS_PER_HOUR, Price, Reservation
from skyward_core.written_numbers import LONGEST_SECONDS

FIRST_MINUTE_SECONDS = 60.0
WARNING_SHARE = Decimal("0.8")
MARGIN_SHARE, LONGEST_MARGIN_SECONDS = 0.05, 30.0
"""How long before the end of the money the pool takes no more calls, as a share of the time that the money lasts. Half
of it is for the teardown.
"""
RENEW_LEASES = 1.5
"""More is reserved from the account when the reservation lasts for fewer leases than this."""
BOOT_SHARE, LONGEST_BOOT_SECONDS = 0.1, 120.0
"""The time between the request of a machine and the start of its guard, as a share of its life. The machine is billed
from the request on.
"""
ROUNDS = 3
"""How often machines receive an earlier end. A machine that does not confirm it is left out of the next round."""


class Fill(IntEnum):
    """How much is left."""

    FULL = 0
    WARNED = 1
    DRAINED = 2
    USED_UP = 3


class CostMeter(Protocol):
    """The methods of `metering.Meter` that a spending limit uses."""

    def now(self) -> float: ...
    def total(self) -> Decimal: ...
    def committed(self, hard_ends: dict[str, float]) -> Decimal: ...
    def projected(self, at: float) -> Decimal: ...
    def rate(self) -> Decimal: ...
    def rented(self) -> set[str]: ...


class BudgetAccounts(Protocol):
    """The method of `ledger.Ledger` that a spending limit uses. It may be done again: an answer may be lost."""

    def roll(self, account: str | None, pool_id: str, total_usd: Decimal, next_usd: Decimal) -> Reservation: ...


@dataclass(frozen=True, slots=True, eq=False)
class Commitment:
    """The lifetime for which the machines of one launch are paid; None for no limit.

    `lifetime_seconds` is for a machine's own clock, unless it receives another end later. `hard_end` and `latest_end`
    are on the meter's clock: when it must be gone now, and the latest that it may receive. `own_end`: when it ends
    itself because of the hard end, if it receives no other one.
    """

    lifetime_seconds: float | None = None
    hard_end: float | None = None
    latest_end: float | None = None
    own_end: float | None = None


@dataclass(frozen=True, slots=True)
class PendingLaunch:
    """Machines with a commitment that the meter does not count yet; requested at `at` on its clock."""

    machines: int
    price: Price
    at: float

    def cost(self, until: float) -> Decimal:
        return self.machines * self.price.cost(max(0.0, until - self.at))


class SpendingLimit:
    """The money of one session. Safe to use from several threads; times are on the meter's clock.

    Call `commit` before each launch, and `launched` or `returned` after it. If the answer of a launch was lost, call
    neither until it is known that none of its machines exists; then `returned`. Call `check` periodically. The journal
    settles the last reservations (`Journal.close`). The state is in memory only; after a crash the ledger's rows count.
    """

    def __init__(
        self,
        pool_id: str,
        meter: CostMeter,
        *,
        max_cost: float | None = None,
        account: str | None = None,
        accounts: BudgetAccounts | None = None,
        lease_seconds: float = 120.0,
    ) -> None:
        self._pool_id = pool_id
        self._meter = meter
        self._limit = None if max_cost is None or math.isinf(max_cost) else Decimal(repr(max_cost))
        self._account = account
        self._accounts = accounts
        self._lease_seconds = lease_seconds
        self._change_lock = threading.Lock()
        """Serializes changes of commitments and reservations. Held during messages and queries, up to half a minute."""
        self._lock = threading.Lock()
        """Guards the following fields. Never held while a thread waits, because `paid_seconds` keeps nodes alive."""
        self._hard_ends: dict[str, float] = {}
        """The hard end of each machine, as it has received it; its cost up to then is committed."""
        self._until: float | None = None
        """The hard end that all machines receive from now on."""
        self._horizon: float | None = None
        """The first hard end of the present machines. It is in their tags, so no machine may live longer."""
        self._ending_seconds = 0.0
        """How long a machine is billed after it begins to end."""
        self._own_ends: dict[str, float] = {}
        """The earliest time at which each machine ends itself if it receives no other end."""
        self._pending: dict[Commitment, PendingLaunch] = {}
        self._paid_until: float | None = None
        self._refusal: BudgetExceeded | None = None
        self._try_at = 0.0

    @property
    def account(self) -> str:
        """The account that refuses, or else pays; "" without a budget, and if the limit of the run refuses."""
        return (self._account or "") if self._refusal is None else self._refusal.account

    @property
    def limit_usd(self) -> Decimal | None:
        """The most that the pool may cost (`max_cost`)."""
        return self._limit

    # ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self,
        machines: int,
        price: Price,
        *,
        along: Sequence[tuple[int, Price]] = (),
        ending_seconds: float = 0.0,
        least_seconds: float = 0.0,
        notify: Callable[[], AbstractSet[str]] = frozenset[str],
    ) -> Commitment:
        """Commit money for machines that are about to be requested, in one commitment for each launch.

        Args:
            machines: their number.
            price: the price of each.
            along: numbers and prices of the launches that follow. Enough money is left to let those live as long.
            ending_seconds: how long a machine is billed after it begins to end.
            least_seconds: how long the new machines, and those that get an earlier end for them, must last before they
                begin to end: at least a minute. If the money lasts for less, no machine gets an earlier end. If it
                lasts for less because a machine does not confirm, the next `check` restores the others' ends.
            notify: sends all machines the time for which they are paid (`paid_seconds`), and returns the ids of those
                that have confirmed it.

        Raises BudgetExceeded if the money does not last for `least_seconds`, and errors of the ledger.
        """
        least_seconds = max(least_seconds, FIRST_MINUTE_SECONDS)
        with self._change_lock:
            self._ending_seconds = ending_seconds
            wanted = [(machines, price), *along]
            if self._limit is not None and price.per_hour:
                self._make_room(wanted, least_seconds, notify)
            now = self._meter.now()
            launch = PendingLaunch(machines, price, now)
            with self._lock:
                hard_end = self._hard_end_of(wanted, least_seconds, now)
            self._reserve(launch, [PendingLaunch(count, its, now) for count, its in along], least_seconds, hard_end)
            commitment = self._commitment(hard_end, now)
            with self._lock:
                self._pending[commitment] = launch
            return commitment

    def _commitment(self, hard_end: float | None, now: float) -> Commitment:
        if hard_end is None:
            return Commitment()
        seconds = own_seconds(hard_end - self._ending_seconds - now)
        with self._lock:
            self._horizon = hard_end if self._horizon is None else self._horizon
            return Commitment(seconds, hard_end, self._horizon, now + seconds)

    def launched(self, instance_ids: Iterable[str], commitment: Commitment) -> None:
        """The launch has created these machines, and the meter counts them. Unused money of the commitment is free."""
        with self._lock:
            launch = self._pending.pop(commitment, None)
            if launch is not None and commitment.hard_end is not None and commitment.own_end is not None:
                self._until = min(commitment.hard_end, math.inf if self._until is None else self._until)
                for instance_id in instance_ids:
                    self._hard_ends[instance_id] = commitment.hard_end
                    self._own_ends[instance_id] = commitment.own_end

    def returned(self, commitment: Commitment) -> None:
        """No machine of this launch exists, or all that existed are gone and the meter has counted them.

        The next commitment or renewal releases the money that the account has reserved for it. A teardown must not wait
        for the ledger.
        """
        with self._lock:
            self._pending.pop(commitment, None)

    # ── hard ends ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_room(
        self, wanted: Sequence[tuple[int, Price]], least: float, notify: Callable[[], AbstractSet[str]]
    ) -> None:
        """Give the present machines an earlier end, so that old and new ones last for the same time.

        A machine that does not confirm its earlier end keeps the old one.
        """
        movable: AbstractSet[str] | None = None
        for _ in range(ROUNDS):
            with self._lock:
                began = self._meter.now()
                launches = [PendingLaunch(count, price, began) for count, price in wanted]
                movable = self._bounded() if movable is None else self._bounded() & movable
                until = self._furthest(launches, movable, began, least=least)
                alone = self._furthest(launches, frozenset(), began, least=least)
                if until is None or (alone is not None and alone > until - 1.0):
                    return
                self._until = until if self._until is None else min(self._until, until)
                until = self._until
            confirmed = notify()
            with self._lock:
                # the messages may have taken longer than the machines were to live
                gone_by = max(until, self._meter.now() + self._ending_seconds)
                for instance_id in movable & confirmed:
                    self._hard_ends[instance_id] = min(self._hard_ends[instance_id], gone_by)
                    self._own_ends[instance_id] = min(self._own_ends[instance_id], until - self._ending_seconds)
            if movable <= confirmed:
                return
            movable &= confirmed

    def _make_longer(self) -> None:
        """Give the machines a later end if there is money for it: a machine is gone before its hard end.

        They receive it with the next lease renewal.
        """
        with self._lock:
            bounded = self._bounded()
            if self._until is None or self._horizon is None or self._until >= self._horizon or not bounded:
                return
            if self._limit is None or self._cost_until(self._until + 1.0, (), bounded, max) > self._limit:
                return
            until = self._furthest((), bounded, self._meter.now(), max)
            if until is not None and until > self._until:
                self._until = until
                for instance_id in bounded:
                    self._hard_ends[instance_id] = max(self._hard_ends[instance_id], until)
                    self._own_ends[instance_id] = until - self._ending_seconds

    def _hard_end_of(self, wanted: Sequence[tuple[int, Price]], least: float, now: float) -> float | None:
        """Return the hard end of new machines, after all other commitments; None for no end. With the lock held."""
        (_, price), *_ = wanted
        if self._limit is None or not price.per_hour:
            return None
        launches = [PendingLaunch(count, its, now) for count, its in wanted]
        hard_end = self._furthest(launches, frozenset(), now, least=least)
        if hard_end is not None:
            return hard_end
        seconds = least + self._ending_seconds
        if self._horizon is not None and now + seconds > self._horizon:
            raise _ends_soon(self._horizon - now, self._limit)
        if least > FIRST_MINUTE_SECONDS:
            raise BudgetExceeded(_growth_refused(wanted, least, self._limit))
        left = self._limit - self._cost_until(now, (), frozenset())
        cost = sum((launch.cost(now + seconds) for launch in launches), ZERO_USD)
        raise _too_little(wanted, cost, self._ending_seconds, self._limit, left)

    def _bounded(self) -> frozenset[str]:
        """Return the present machines with a hard end. With the lock held.

        Without such machines and launches, the common hard end is forgotten: the next launch begins a new one.
        """
        bounded = frozenset(self._meter.rented() & self._hard_ends.keys())
        if not bounded and not any(commitment.hard_end is not None for commitment in self._pending):
            self._until = self._horizon = None
        return bounded

    def _furthest(
        self,
        launches: Iterable[PendingLaunch],
        moved: AbstractSet[str],
        now: float,
        end_of: Callable[[float, float], float] = min,
        least: float = 0.0,
    ) -> float | None:
        """Return the latest common hard end of new launches and moved machines that the money covers.

        Returns None if it does not cover so many seconds of a launch at least, or a minute. With the lock held.
        """
        launches, least = list(launches), max(least, FIRST_MINUTE_SECONDS)

        def is_covered(seconds: float) -> bool:
            return self._limit is None or self._cost_until(now + seconds, launches, moved, end_of) <= self._limit

        low = math.ceil(least + self._ending_seconds) if launches else 0
        longest = LONGEST_SECONDS if self._horizon is None else self._horizon - now
        if low > longest or not is_covered(low):
            return None
        if is_covered(longest):
            return now + longest if self._horizon is None else self._horizon
        return now + last_covered(low, math.ceil(longest), is_covered)

    def _cost_until(
        self,
        until: float,
        launches: Iterable[PendingLaunch],
        moved: AbstractSet[str],
        end_of: Callable[[float, float], float] = min,
    ) -> Decimal:
        """Return the cost if new and moved machines live until `until`, and all others until their hard ends.

        With the lock held.
        """
        ends = {
            instance_id: end_of(end, until) if instance_id in moved else end
            for instance_id, end in self._hard_ends.items()
        }
        pending = sum(
            (its.cost(promise.hard_end) for promise, its in self._pending.items() if promise.hard_end is not None),
            ZERO_USD,
        )
        return self._meter.committed(ends) + pending + sum((launch.cost(until) for launch in launches), ZERO_USD)

    # ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reserve(
        self, launch: PendingLaunch, along: Sequence[PendingLaunch], least_seconds: float, hard_end: float | None
    ) -> None:
        """Reserve for new machines up to the time for which the others are paid, or for longer if that ends soon.

        Money that is still reserved for failed launches is freed.
        """
        if self._account is None:
            return
        until = self._paid_until
        if until is None:
            until = self._within_hard_ends(self._first_end(launch.at), hard_end)
        elif self._is_low(launch.at):
            until = self._two_leases_from(launch.at)
        cost = launch.cost(until)
        if not cost and self._paid_until is None:  # nothing to pay: the account need not exist
            self._paid_until = until
            return
        try:
            self._roll(until, cost)
        except BudgetExceeded as error:
            raise _account_refused(error, launch, until - launch.at) from error

    def _is_low(self, now: float) -> bool:
        assert self._paid_until is not None
        return self._paid_until - now < RENEW_LEASES * self._lease_seconds

    def _first_end(self, requested_at: float) -> float:
        """Return the latest end of a new machine whose lease is not renewed, plus one lease."""
        return requested_at + LONGEST_BOOT_SECONDS + 2 * self._lease_seconds

    def _within_hard_ends(self, until: float, hard_end: float | None) -> float:
        """No machine lives longer than the first hard end of the pool, or that of its first launch."""
        return min(until, *(end for end in (self._horizon, hard_end) if end is not None), math.inf)

    def _renew(self, now: float) -> None:
        """Reserve for two leases from now."""
        self._roll(self._two_leases_from(now))

    def _two_leases_from(self, now: float) -> float:
        assert self._paid_until is not None
        return max(self._paid_until, self._within_hard_ends(now + 2 * self._lease_seconds, None))

    def _roll(self, until: float, more: Decimal = ZERO_USD) -> None:
        """Settle the reservation with the real cost, and reserve for all machines until `until`, and `more`: both or
        neither.
        """
        assert self._accounts is not None
        spent, following = self._needed(until)
        following += more
        self._accounts.roll(self._account, self._pool_id, spent, following)
        with self._lock:
            self._paid_until = until

    def _needed(self, until: float) -> tuple[Decimal, Decimal]:
        """Return the cost so far, and the cost from now to `until`, with pending launches."""
        with self._lock:  # before the bill: a machine that is launched in between counts twice, not zero times
            pending = sum(
                (launch.cost(min(until, self._first_end(launch.at))) for launch in self._pending.values()), ZERO_USD
            )
        spent = self._meter.total()
        return spent, self._meter.projected(until) - spent + pending

    # ── while it is open ─────────────────────────────────────────────────────────────────────────────────────────────

    def paid_seconds(self) -> float | None:
        """Return for how many seconds from now the machines are paid; None for no end.

        A node must not live longer, even if its lease is renewed.
        """
        with self._lock:
            ends = (
                []
                if self._until is None or not self._meter.rented() & self._hard_ends.keys()
                else [self._until - self._ending_seconds]
            )
            if (paid_end := self._paid_end()) is not None:
                ends.append(paid_end)
            return max(0.0, min(ends) - self._meter.now()) if ends else None

    def pay_for(self, seconds: float) -> None:
        """Reserve for all machines for exactly so many seconds from now.

        BudgetExceeded, LedgerError and LeaseLost change nothing.
        """
        with self._change_lock:
            if self._paid_until is not None:
                self._roll(self._meter.now() + seconds)

    def check(self) -> tuple[Fill, str]:
        """Reserve for the next interval, and return how much is left, with the reason from `WARNED` on.

        Does not wait for a launch that is sending earlier ends to nodes: it then extends and reserves nothing.
        """
        if self._change_lock.acquire(blocking=False):
            try:
                self._make_longer()
                self._renew_if_low(self._meter.now())
            finally:
                self._change_lock.release()
        now = self._meter.now()
        return max(self._limit_fill(now), self._account_fill(now), key=lambda seen: seen[0])

    def _limit_fill(self, now: float) -> tuple[Fill, str]:
        if self._limit is None:
            return Fill.FULL, ""
        spent, rate = self._meter.total(), self._meter.rate()
        words = f"the pool has cost {digits(spent)} USD of max_cost={self._limit:f}"
        if rate:
            margin = min(MARGIN_SHARE * float(self._limit / rate * SECONDS_PER_HOUR), LONGEST_MARGIN_SECONDS)
            for fill, seconds in ((Fill.USED_UP, margin / 2), (Fill.DRAINED, margin)):
                if (
                    self._first_own_end() <= now + seconds
                    or self._meter.projected(now + seconds + self._ending_seconds) > self._limit
                ):
                    return fill, f"{words}, and the rest is for its machines' last seconds"
        return (Fill.WARNED, words) if spent >= WARNING_SHARE * self._limit else (Fill.FULL, "")

    def _first_own_end(self) -> float:
        """Return when the first machine may end itself. The pool closes before, with the reason."""
        rented = self._meter.rented()
        with self._lock:
            return min(
                (self._own_ends[instance_id] for instance_id in rented if instance_id in self._own_ends),
                default=math.inf,
            )

    def _renew_if_low(self, now: float) -> None:
        if self._paid_until is None or self._is_paid_whole() or not self._is_low(now) or now < self._try_at:
            return
        try:
            self._renew(now)
            self._refusal = None
        except BudgetExceeded as error:
            self._refusal = error
            self._try_at = now + 1.0
        except LedgerError:
            self._try_at = now + 1.0  # the reservation is still valid: try again until its end

    def _account_fill(self, now: float) -> tuple[Fill, str]:
        if (paid_end := self._paid_end()) is None or self._is_paid_whole():
            return Fill.FULL, ""
        margin, left, refusal = self._margin_seconds(), paid_end - now, self._refusal
        reason = f"nothing more could be reserved from {self._payer}" if refusal is None else str(refusal)
        if left <= margin / 2:
            return Fill.USED_UP, reason
        if left <= margin:
            return Fill.DRAINED, reason
        return (Fill.FULL, "") if refusal is None else (Fill.WARNED, reason)

    def _is_paid_whole(self) -> bool:
        """Whether the reservations last for as long as `max_cost`, which then ends the pool."""
        return self._paid_until is not None and self._horizon is not None and self._paid_until >= self._horizon

    @property
    def _payer(self) -> str:
        return f"account {self._account!r}"

    def _paid_end(self) -> float | None:
        """Return up to when nodes may live by the reservations; None without any."""
        return self._paid_until

    def _margin_seconds(self) -> float:
        return min(self._lease_seconds / 4, LONGEST_MARGIN_SECONDS)


def own_seconds(seconds: float) -> float:
    """Return how long a machine may live by its own clock, which starts after its request, if it is paid for so long
    from the request on.
    """
    return seconds - min(BOOT_SHARE * seconds, LONGEST_BOOT_SECONDS)


def last_covered(low: int, high: int, is_covered: Callable[[float], bool]) -> int:
    """Return the last second from `low` on that is covered; `high` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_covered(middle) else (low, middle)
    return low


def _too_little(
    wanted: Sequence[tuple[int, Price]], cost: Decimal, ending_seconds: float, limit: Decimal, left: Decimal
) -> BudgetExceeded:
    """Return the error of launches whose first minute costs more than is left of a `max_cost`."""
    words = _first_minute(wanted, cost, ending_seconds)
    return BudgetExceeded(
        f"{words}; {left:f} USD of max_cost={limit:f} are left. Raise max_cost, or ask for fewer or cheaper machines",
        left_usd=left,
    )


def _account_refused(error: BudgetExceeded, launch: PendingLaunch, seconds: float) -> BudgetExceeded:
    """Return the error of an account that does not pay for a launch, with what the money is for."""
    return BudgetExceeded(
        f"{error} It must pay for {seconds:.0f} s of {launch.machines} x {launch.price.per_hour} USD per hour"
        " before they are rented: for so long they may live if their owner dies. Raise the limit of the account, set a"
        " lower max_cost, or ask for fewer or cheaper machines.",
        error.account,
        error.left_usd,
    )


def _ends_soon(seconds: float, limit: Decimal) -> BudgetExceeded:
    return BudgetExceeded(
        f"the machines of the pool end in {seconds:.0f} s, when max_cost={limit:f} is used up: no machine is rented for"
        " so short a time"
    )


def _growth_refused(wanted: Sequence[tuple[int, Price]], least: float, limit: Decimal) -> str:
    """Return in words why an open pool gets no more machines."""
    ((machines, price), *_) = wanted
    return (
        f"max_cost={limit:f} would not last for {least:.0f} s with {machines} x {price.per_hour} USD per hour more, and"
        " a pool grows only while it does: raise max_cost"
    )


def _first_minute(wanted: Sequence[tuple[int, Price]], cost: Decimal, ending_seconds: float) -> str:
    """Return in words what the first minute of launches costs, and why."""
    (machines, price), *others = wanted
    more = "".join(f" and {count} x {its.per_hour}" for count, its in others)
    ending = f" and the {ending_seconds:.0f} s that their termination may take" if ending_seconds else ""
    billed = (
        f", of which they are billed {price.minimum_seconds} s at least"
        if price.minimum_seconds > FIRST_MINUTE_SECONDS + ending_seconds
        else ""
    )
    return f"{machines} x {price.per_hour} USD per hour{more} cost {cost:f} USD in their first minute{ending}{billed}"
