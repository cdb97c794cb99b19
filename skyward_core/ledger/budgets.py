"""What a pool may still spend: `max_cost`, and the account that `budget` names.

`max_cost`: each machine commits its cost up to its hard end when it is launched, and gives back what it did not use
when it is known to be gone; commitments never exceed the limit. So the nodes' own clocks hold it when nobody here is
left to do so. A hard end is when a machine must be gone: it is told to end so many seconds earlier as its provider
takes for that and goes on billing; what it takes to tell it is of these too.

All machines share one hard end, up to which the money lasts for all of them, so that none is left over for another one,
which a lost machine or one that is to be taken back needs all the same:

    granted ──another is asked for: the others are told an earlier end──▶ shortened ──there is money again──▶ up to the
    first hard end, and no further
              one that does not hear it keeps its end, and its money

Before a machine has said that it has heard of an earlier end its commitment stays; before it is told a later one that
is committed. What is killed between two lines commits too much, never too little. The parts of a pool, as that of spot
machines, are granted together, each up to the same hard end.

`budget`: before an interval begins its cost is reserved in the ledger; nodes are told until when they are paid for, and
end themselves then. The reservation before it is settled with what was spent.

    full ──80 %──▶ warned ──the margin is left──▶ drained ──nothing is left──▶ used up
                             no new calls            the pool closes

States only go to the right, but for `drained` when there is money again: in the account, or because a machine is gone
that would have cost more.
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

FIRST_MINUTE_SECONDS = 60.0
WARNING_SHARE = Decimal("0.8")
MARGIN_SHARE, LONGEST_MARGIN_SECONDS = 0.05, 30.0
"""Of the time that the money lasts: how long before its end no call is taken any more; half of it is for giving the
machines back.
"""
RENEW_LEASES = 1.5
"""An account is asked for more when what is reserved lasts for less than so many leases."""
BOOT_SHARE, LONGEST_BOOT_SECONDS = 0.1, 120.0
"""Of a machine's hard end: what may pass between the request, from which it is billed, and the start of its guard,
whose clock ends it.
"""
ROUNDS = 3
"""In which machines are told an earlier end: whoever has not heard it in one is not counted on in the next."""


LONGEST_SECONDS = 10 * 365 * 86_400
"""What lasts longer lasts so long: dates have an end."""


class Fill(IntEnum):
    """How much is left."""

    FULL = 0
    WARNED = 1
    DRAINED = 2
    USED_UP = 3


class Meter(Protocol):
    """What the purse needs of `metering.Meter`."""

    def now(self) -> float: ...
    def total(self) -> Decimal: ...
    def committed(self, hard_ends: dict[str, float]) -> Decimal: ...
    def projected(self, at: float) -> Decimal: ...
    def rate(self) -> Decimal: ...
    def rented(self) -> set[str]: ...


class Accounts(Protocol):
    """What the purse needs of `ledger.Ledger`."""

    def reserve(self, account: str, pool_id: str, usd: Decimal) -> Reservation: ...
    def roll(self, account: str, pool_id: str, spent_usd: Decimal, next_usd: Decimal) -> Reservation: ...


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """What machines may be launched with: how long each may live by its own clock unless it is told otherwise, None for
    no limit, and when it must be gone.

    `hard_end` and `latest_end` are on the meter's clock: as things stand, and at the very latest, whatever it will be
    told.
    """

    lifetime_seconds: float | None = None
    hard_end: float | None = None
    latest_end: float | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """Machines that money is set aside for and that the meter does not count yet, since `at` on its clock."""

    machines: int
    price: Price
    at: float

    def cost(self, until: float) -> Decimal:
        return self.machines * self.price.cost(max(0.0, until - self.at))


class Purse:
    """The money of one opening of a pool. Safe to use from several threads; times are on the meter's clock.

    `grant` before each launch, and `launched` or `returned` after it; of a launch whose answer was lost neither is
    said, for its machines may live as long as they were granted, until it is known that nothing of it is there any
    more: then `returned`. `turn` now and then. What is reserved at the end the book settles (`Book.close`). All that is
    kept here dies with the process: the ledger's rows are what others go by.
    """

    def __init__(
        self,
        pool_id: str,
        meter: Meter,
        *,
        max_cost: float | None = None,
        account: str | None = None,
        accounts: Accounts | None = None,
        lease_seconds: float = 120.0,
    ) -> None:
        self._pool_id = pool_id
        self._meter = meter
        self._limit = None if max_cost is None or math.isinf(max_cost) else Decimal(repr(max_cost))
        self._account = account
        self._accounts = accounts
        self._lease_seconds = lease_seconds
        self._asking = threading.Lock()
        """Held while the ledger is asked, which may take half a minute: one grant or turn after the other."""
        self._lock = threading.Lock()
        """Guards what follows, and is held by nobody who waits: `paid_seconds` keeps nodes alive."""
        self._hard_ends: dict[str, float] = {}
        """Until when a machine may be there, by what it was told last; what it costs until then is committed."""
        self._until: float | None = None
        """The hard end of all machines, as they are told it from now on."""
        self._horizon: float | None = None
        """The first hard end of the machines that there are: no machine may ever be there for longer, and its tags say
        so.
        """
        self._ending_seconds = 0.0
        """How long a machine that ends goes on being billed."""
        self._own_ends: dict[str, float] = {}
        """When a machine ends itself at the earliest, if nobody tells it anything else."""
        self._pending: dict[Grant, _Asked] = {}
        self._settled = ZERO_USD
        self._paid_until: float | None = None
        self._held = ZERO_USD
        """What the account holds for us beyond `_settled`."""
        self._refusal: BudgetExceeded | None = None
        self._try_at = 0.0

    @property
    def account(self) -> str | None:
        """The account that pays, if one does."""
        return self._account

    @property
    def limit_usd(self) -> Decimal | None:
        """What the pool may cost at most (`max_cost`)."""
        return self._limit

    # ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────

    def grant(
        self,
        machines: int,
        price: Price,
        *,
        along: Sequence[tuple[int, Price]] = (),
        ending_seconds: float = 0.0,
        tell: Callable[[], AbstractSet[str]] = frozenset[str],
    ) -> Grant:
        """Set money aside for machines that are about to be asked for, one grant for each call.

        Args:
            machines: how many.
            price: what each costs.
            along: how many at which price will be asked for next, with grants of their own: what is granted now leaves
                enough for as long a life of those.
            ending_seconds: for how long a machine that ends is billed.
            tell: tells all machines for how long they are paid (`paid_seconds`), and returns the ids of those that have
                heard it.

        Raises BudgetExceeded if it would not last for their first minute, and what the ledger raises.
        """
        with self._asking:
            self._ending_seconds = ending_seconds
            wanted = [(machines, price), *along]
            if self._limit is not None and price.per_hour:
                self._make_room(wanted, tell)
            now = self._meter.now()
            asked = _Asked(machines, price, now)
            with self._lock:
                hard_end = self._hard_end_of(wanted, now)
            if self._account is not None:
                self._reserve_for(asked, now)
            grant = Grant() if hard_end is None else self._granted(hard_end, now)
            with self._lock:
                self._pending[grant] = asked
            return grant

    def _granted(self, hard_end: float, now: float) -> Grant:
        seconds = hard_end - self._ending_seconds - now
        with self._lock:
            self._horizon = hard_end if self._horizon is None else self._horizon
            return Grant(seconds - min(BOOT_SHARE * seconds, LONGEST_BOOT_SECONDS), hard_end, self._horizon)

    def launched(self, instance_ids: Iterable[str], grant: Grant) -> None:
        """These came of it, and the meter counts them: what they do not need of the grant is free again."""
        with self._lock:
            asked = self._pending.pop(grant, None)
            if asked is not None and grant.hard_end is not None and grant.lifetime_seconds is not None:
                self._until = min(grant.hard_end, math.inf if self._until is None else self._until)
                for instance_id in instance_ids:
                    self._hard_ends[instance_id] = grant.hard_end
                    self._own_ends[instance_id] = asked.at + grant.lifetime_seconds

    def returned(self, grant: Grant) -> None:
        """Nothing of it is there, for certain: it was never asked for, the provider has refused, or what came is gone,
        and the meter has counted it.

        What is reserved for it in the account is free with the next grant or renewal: nobody who gives machines back
        should wait for the ledger.
        """
        with self._lock:
            self._pending.pop(grant, None)

    # ── until when ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_room(self, wanted: Sequence[tuple[int, Price]], tell: Callable[[], AbstractSet[str]]) -> None:
        """Have the machines that there are end earlier, so that those that are wanted last as long as they.

        What does not hear of it keeps its end.
        """
        may_hear: AbstractSet[str] | None = None
        for _ in range(ROUNDS):
            with self._lock:
                began = self._meter.now()
                asked = [_Asked(count, price, began) for count, price in wanted]
                may_hear = self._bounded() if may_hear is None else self._bounded() & may_hear
                until = self._furthest(asked, may_hear, began)
                alone = self._furthest(asked, frozenset(), began)
                if until is None or (alone is not None and alone > until - 1.0):
                    return
                self._until = until if self._until is None else min(self._until, until)
                until = self._until
            heard = tell()
            with self._lock:
                # telling them all may have taken longer than they had
                gone_by = max(until, self._meter.now() + self._ending_seconds)
                for instance_id in may_hear & heard:
                    self._hard_ends[instance_id] = min(self._hard_ends[instance_id], gone_by)
                    self._own_ends[instance_id] = min(self._own_ends[instance_id], until - self._ending_seconds)
            if may_hear <= heard:
                return
            may_hear &= heard

    def _make_longer(self) -> None:
        """Let the machines live longer again if there is money for it: one that would have cost more is gone.

        They hear of it with the next sign of life.
        """
        with self._lock:
            bounded = self._bounded()
            if self._until is None or self._horizon is None or self._until >= self._horizon or not bounded:
                return
            if not self._covers(self._until + 1.0, (), bounded, max):
                return
            until = self._furthest((), bounded, self._meter.now(), max)
            if until is not None and until > self._until:
                self._until = until
                for instance_id in bounded:
                    self._hard_ends[instance_id] = max(self._hard_ends[instance_id], until)
                    self._own_ends[instance_id] = until - self._ending_seconds

    def _hard_end_of(self, wanted: Sequence[tuple[int, Price]], now: float) -> float | None:
        """Return until when new machines may be there, with all that is not committed to others; None: without end.

        With the lock held.
        """
        (machines, price), *_ = wanted
        if self._limit is None or not price.per_hour:
            return None
        asked = [_Asked(count, its, now) for count, its in wanted]
        hard_end = self._furthest(asked, frozenset(), now)
        if hard_end is None:
            if self._horizon is not None and now + FIRST_MINUTE_SECONDS + self._ending_seconds > self._horizon:
                raise BudgetExceeded(
                    f"the machines of the pool end in {self._horizon - now:.0f} s, when max_cost={self._limit:f} is"
                    " used up: none is rented for so short a time"
                )
            seconds = FIRST_MINUTE_SECONDS + self._ending_seconds
            left = self._limit - self._cost_until(now, (), frozenset())
            cost = sum((one.cost(now + seconds) for one in asked), ZERO_USD)
            what = f"{machines} x {price.per_hour} USD per hour"
            ending = (
                f" and the {self._ending_seconds:.0f} s that giving them back may take" if self._ending_seconds else ""
            )
            billed = (
                f", of which they are billed {price.minimum_seconds} s at least"
                if price.minimum_seconds > seconds
                else ""
            )
            words = (
                f"{''.join(f' and {count} x {its.per_hour}' for count, its in wanted[1:])} cost {cost:f} USD in their"
                " first minute"
                f"{ending}{billed};"
            )
            raise BudgetExceeded(
                f"{what}{words} of max_cost={self._limit:f} {left:f} USD are left. Raise max_cost, or ask for fewer or"
                " cheaper machines",
                left_usd=left,
            )
        return hard_end

    def _bounded(self) -> frozenset[str]:
        """The machines that are there and have a hard end; without any, and none on its way, the next ones begin anew.

        With the lock held.
        """
        bounded = frozenset(self._meter.rented() & self._hard_ends.keys())
        if not bounded and not any(grant.hard_end is not None for grant in self._pending):
            self._until = self._horizon = None
        return bounded

    def _furthest(
        self,
        asked: Iterable[_Asked],
        moved: AbstractSet[str],
        now: float,
        end_of: Callable[[float, float], float] = min,
    ) -> float | None:
        """Return the last moment up to which the money lasts, with the machines that are moved up to there too; None if
        that is not even the first minute.

        With the lock held.
        """
        asked = list(asked)

        def is_covered(seconds: float) -> bool:
            return self._covers(now + seconds, asked, moved, end_of)

        low = math.ceil(FIRST_MINUTE_SECONDS + self._ending_seconds) if asked else 0
        longest = LONGEST_SECONDS if self._horizon is None else self._horizon - now
        if low > longest or not is_covered(low):
            return None
        if is_covered(longest):
            return now + longest if self._horizon is None else self._horizon
        high = math.ceil(longest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_covered(middle) else (low, middle)
        return now + low

    def _covers(
        self, until: float, asked: Iterable[_Asked], moved: AbstractSet[str], end_of: Callable[[float, float], float]
    ) -> bool:
        return self._limit is None or self._cost_until(until, asked, moved, end_of) <= self._limit

    def _cost_until(
        self,
        until: float,
        asked: Iterable[_Asked],
        moved: AbstractSet[str],
        end_of: Callable[[float, float], float] = min,
    ) -> Decimal:
        """What all costs if new machines are there until then, those that are moved too, and all others until their
        hard end. With the lock held.
        """
        ends = {
            instance_id: end_of(end, until) if instance_id in moved else end
            for instance_id, end in self._hard_ends.items()
        }
        pending = sum(
            (its.cost(grant.hard_end) for grant, its in self._pending.items() if grant.hard_end is not None), ZERO_USD
        )
        return self._meter.committed(ends) + pending + sum((one.cost(until) for one in asked), ZERO_USD)

    # ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reserve_for(self, asked: _Asked, now: float) -> None:
        """Reserve for new machines up to where the others are paid for, with what is held for launches that came to
        nothing first.
        """
        assert self._account is not None
        assert self._accounts is not None
        if self._paid_until is not None and self._is_low(now):
            self._renew(now)
        elif self._paid_until is not None:
            spent, following = self._needed(self._paid_until)
            if spent - self._settled + following < self._held:
                self._roll(self._paid_until)
        until = self._first_end(now) if self._paid_until is None else self._paid_until
        if usd := asked.cost(until):
            self._accounts.reserve(self._account, self._pool_id, usd)
            self._held += usd
        with self._lock:
            self._paid_until = until

    def _is_low(self, now: float) -> bool:
        assert self._paid_until is not None
        return self._paid_until - now < RENEW_LEASES * self._lease_seconds

    def _first_end(self, asked_at: float) -> float:
        """Until when a new machine lives at most if nobody keeps its lease, and as long again as a lease."""
        return asked_at + LONGEST_BOOT_SECONDS + 2 * self._lease_seconds

    def _renew(self, now: float) -> None:
        """Reserve for two leases from now."""
        assert self._paid_until is not None
        self._roll(max(self._paid_until, now + 2 * self._lease_seconds))

    def _roll(self, until: float) -> None:
        """Settle what is reserved with what was spent, and reserve for what there is until then; both or neither."""
        assert self._account is not None
        assert self._accounts is not None
        spent, following = self._needed(until)
        self._accounts.roll(self._account, self._pool_id, spent - self._settled, following)
        with self._lock:
            self._paid_until, self._settled, self._held = until, spent, following

    def _needed(self, until: float) -> tuple[Decimal, Decimal]:
        """Return what was spent so far, and what is spent from now on until then, with launches that are on their
        way.
        """
        with self._lock:  # before the bill: what is launched meanwhile is counted twice rather than not at all
            pending = sum(
                (asked.cost(min(until, self._first_end(asked.at))) for asked in self._pending.values()), ZERO_USD
            )
        spent = self._meter.total()
        return spent, self._meter.projected(until) - spent + pending

    # ── while it is open ─────────────────────────────────────────────────────────────────────────────────────────────

    def paid_seconds(self) -> float | None:
        """Return for how many seconds from now the machines are paid; None: without end.

        A node must not live longer, whoever keeps its lease.
        """
        with self._lock:
            ends = (
                []
                if self._until is None or not self._meter.rented() & self._hard_ends.keys()
                else [self._until - self._ending_seconds]
            )
            if self._paid_until is not None:
                ends.append(self._paid_until)
            return max(0.0, min(ends) - self._meter.now()) if ends else None

    def pay_for(self, seconds: float) -> None:
        """Reserve for all that there is for so many seconds from now, no more and no less.

        After BudgetExceeded, LedgerError or LeaseLost all is as before.
        """
        with self._asking:
            if self._account is not None and self._paid_until is not None:
                self._roll(self._meter.now() + seconds)

    def turn(self) -> tuple[Fill, str]:
        """Look at the clock: reserve what is next, and return how much is left and, from `WARNED` on, the reason in
        words.
        """
        with self._asking:
            self._make_longer()
            now = self._meter.now()
            by_limit, by_account = self._look_at_limit(now), self._look_at_account(now)
            return max(by_limit, by_account, key=lambda seen: seen[0])

    def _look_at_limit(self, now: float) -> tuple[Fill, str]:
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
        """When the first machine may end itself, on the meter's clock: the pool should have closed by then, and say
        why.
        """
        rented = self._meter.rented()
        with self._lock:
            return min(
                (self._own_ends[instance_id] for instance_id in rented if instance_id in self._own_ends),
                default=math.inf,
            )

    def _look_at_account(self, now: float) -> tuple[Fill, str]:
        if self._account is None or self._paid_until is None:
            return Fill.FULL, ""
        if self._is_low(now) and now >= self._try_at:
            try:
                self._renew(now)
                self._refusal = None
            except BudgetExceeded as error:
                self._refusal = error
                self._try_at = now + 1.0
            except LedgerError:
                self._try_at = now + 1.0  # what is reserved is still ours; it is tried again until that has run out
        margin = min(self._lease_seconds / 4, LONGEST_MARGIN_SECONDS)
        left = self._paid_until - now
        reason = (
            str(self._refusal)
            if self._refusal is not None
            else f"nothing more could be reserved from account {self._account!r}"
        )
        if left <= margin / 2:
            return Fill.USED_UP, reason
        if left <= margin:
            return Fill.DRAINED, reason
        return (Fill.WARNED, reason) if self._refusal is not None else (Fill.FULL, "")
