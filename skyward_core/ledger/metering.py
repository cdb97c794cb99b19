"""The bill of one pool, from the moment machines are asked for until they are known to be gone, and what each second of
it went to.

Time is counted in whole milliseconds and money in whole micro-dollars, by the ledger's own arithmetic (`rows.Price`):
what `buckets` says of a machine is what the ledger is told, so the bill is the sum of the ledger's rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from skyward_core.errors import ZERO_USD
from skyward_core.events.events import CostFinal, CostUpdate
from skyward_core.ledger.rows import BILLING_ROUNDING, MICRO_USD, SECONDS_PER_HOUR, Bucket, Price, micro_usd
from skyward_core.machines.instances import Instance

PHASES = (Bucket.LAUNCHING, Bucket.BOOTSTRAPPING, Bucket.IDLE, Bucket.LOST, Bucket.TERMINATING)
"""A machine's life, which only goes forward: each phase is the bucket that its seconds fall into.

A node that is ready is `IDLE`, less what runs on it.
"""


@dataclass(slots=True)
class Rental:
    """One machine's time: `started` and `ended` (None: not yet) on the meter's clock, in seconds.

    `marks` are the phases entered, and how many milliseconds after the start. `ran_seconds` and `seen_seconds` are two
    counts of the same thing, the time that calls have kept slots busy: what ended calls have told, and what the node
    has counted, those included that still run.
    """

    instance_id: str
    price: Price
    per_slot_second: float
    started: float
    ended: float | None = None
    slots: int = 1
    ran_seconds: float = 0.0
    seen_seconds: float = 0.0
    marks: list[tuple[Bucket, int]] = field(default_factory=lambda: [(Bucket.LAUNCHING, 0)])

    def milliseconds(self, now: float) -> int:
        """How long it has been rented, until now or until the end."""
        return max(round(((now if self.ended is None else self.ended) - self.started) * 1000), self.marks[-1][1])

    def enter(self, phase: Bucket, at: float, now: float) -> None:
        """Go on to another phase; what would go back changes nothing."""
        last, mark = self.marks[-1]
        if self.ended is None and PHASES.index(phase) > PHASES.index(last):
            self.marks.append((phase, min(max(round((at - self.started) * 1000), mark), self.milliseconds(now))))

    def by_bucket(self, now: float) -> dict[Bucket, int]:
        """What its milliseconds went to; they add up to `milliseconds`."""
        spent = dict.fromkeys(Bucket, 0)
        ends = [mark for _, mark in self.marks[1:]]
        for (phase, mark), end in zip(self.marks, [*ends, self.milliseconds(now)], strict=True):
            spent[phase] = end - mark
        busy = min(int(max(self.ran_seconds, self.seen_seconds) * 1000 / self.slots), spent[Bucket.IDLE])
        spent[Bucket.RUNNING_CALLS] = busy
        spent[Bucket.IDLE] -= busy
        return spent

    def cost(self, at: float) -> Decimal:
        """What it costs, in USD, if it is rented until then, or was until its end."""
        return self.price.cost(self.milliseconds(at) / 1000)


class Meter:
    """Counts what a pool costs. Safe to use from several threads; `clock` counts seconds.

    `increment_seconds` and `minimum_seconds` are how the provider counts. What is said of machines that the meter does
    not know changes nothing.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, increment_seconds: int = 1, minimum_seconds: int = 0
    ) -> None:
        self._clock = clock
        self._increment_seconds = increment_seconds
        self._minimum_seconds = minimum_seconds
        self._lock = threading.Lock()
        self._opened = clock()
        self._rentals: dict[str, Rental] = {}
        self._before: list[Rental] = []
        """Earlier rentals of machines that were rented again: a host keeps its name."""
        self._is_final = False

    # ── what becomes of the machines ─────────────────────────────────────────────────────────────────────────────────

    def start(self, instance: Instance, at: float, price: Price | None = None) -> None:
        """Count a machine from `at`, the time when it was asked for, at its own price or the one given.

        One that is being counted is counted on.
        """
        price = price or self._price_of(instance)
        with self._lock:
            known = self._rentals.get(instance.id)
            if known is not None:
                if known.ended is None:
                    return
                self._before.append(known)
            self._rentals[instance.id] = Rental(instance.id, price, _usd_per_second(price), at)

    def enter(self, instance_id: str, phase: Bucket, at: float | None = None) -> None:
        """A machine's seconds go to another bucket of PHASES from `at` on (None: now).

        A life only goes forward: what would go back changes nothing.
        """
        if phase not in PHASES:
            raise ValueError(
                f"{phase!r} is no phase of a machine's life: a node that is ready is IDLE, and `ran` says for how long"
                " it was not"
            )
        with self._lock:
            if (rental := self._rentals.get(instance_id)) is not None:
                now = self._clock()
                rental.enter(phase, now if at is None else at, now)

    def slots(self, instance_id: str, slots: int) -> None:
        """So many calls run at once on this machine, with all its workers."""
        with self._lock:
            if (rental := self._rentals.get(instance_id)) is not None:
                rental.slots = max(1, slots)
                rental.per_slot_second = _usd_per_second(rental.price) / rental.slots

    def ran(self, instance_id: str, seconds: float) -> float:
        """Calls that have ended have kept slots of a machine busy for so many seconds in all; return their share of the
        bill, in USD.
        """
        with self._lock:
            rental = self._rentals.get(instance_id)
            if rental is None:
                return 0.0
            rental.ran_seconds += seconds
            return seconds * rental.per_slot_second

    def seen_running(self, instance_id: str, seconds: float) -> None:
        """A machine has counted so many seconds of busy slots since it was rented: anybody's calls, and those that
        still run.

        So a training of three hours is no idle time when its client is killed in the middle. What was seen does not
        shrink.
        """
        with self._lock:
            if (rental := self._rentals.get(instance_id)) is not None:
                rental.seen_seconds = max(rental.seen_seconds, seconds)

    def end(self, instance_id: str) -> None:
        """Stop counting a machine: it is known to be gone. A second time changes nothing."""
        with self._lock:
            rental = self._rentals.get(instance_id)
            if rental is not None and rental.ended is None:
                rental.ended = self._clock()

    # ── what is known ────────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        """Return the time on the meter's clock."""
        return self._clock()

    def rented(self) -> set[str]:
        """Return the ids of the machines that are being counted."""
        with self._lock:
            return {rental.instance_id for rental in self._rented()}

    def buckets(self) -> dict[str, dict[Bucket, float]]:
        """Return what the seconds of each machine went to so far, by its id; all buckets are there. Together they are
        its life so far, to the millisecond.

        What a node had counted reaches the meter some seconds late: until then it is idle time, so that one bucket may
        shrink, but never all together.
        """
        with self._lock:
            now = self._clock()
            return {
                instance_id: {bucket: spent / 1000 for bucket, spent in rental.by_bucket(now).items()}
                for instance_id, rental in self._rentals.items()
            }

    def total(self) -> Decimal:
        """Return the bill so far, in USD."""
        with self._lock:
            return self._total(self._clock())

    def rate(self) -> Decimal:
        """Return what the machines rented now cost in an hour, in USD."""
        with self._lock:
            return sum((rental.price.per_hour for rental in self._rented()), ZERO_USD)

    def projected(self, at: float) -> Decimal:
        """Return the bill as it will be at a later time, in USD, if nothing is launched or ended until then."""
        with self._lock:
            return self._total(max(at, self._clock()))

    def committed(self, hard_ends: Mapping[str, float]) -> Decimal:
        """Return what all machines cost, in USD, if each lives until its hard end, a time on the meter's clock.

        Those without one count until now.
        """
        with self._lock:
            now = self._clock()
            return sum(
                (rental.cost(max(now, hard_ends.get(rental.instance_id, now))) for rental in self._all()), ZERO_USD
            )

    def update(self) -> CostUpdate:
        """Return the bill so far; the rate and the counts are of the machines rented now."""
        with self._lock:
            now = self._clock()
            rented = list(self._rented())
            return CostUpdate(
                elapsed_seconds=now - self._opened,
                accumulated_cost=float(self._total(now)),
                hourly_rate=_rate(rented),
                spot_count=sum(rental.price.is_spot for rental in rented),
                ondemand_count=sum(not rental.price.is_spot for rental in rented),
            )

    def final(self) -> CostFinal | None:
        """Return the whole bill the first time, None ever after.

        The rate and the counts are of all machines there were.
        """
        with self._lock:
            if self._is_final:
                return None
            self._is_final = True
            now = self._clock()
            rentals, total = list(self._all()), self._total(now)
            on_demand = sum(
                (rental.price.on_demand_cost(rental.milliseconds(now) / 1000) for rental in rentals), ZERO_USD
            )
            return CostFinal(
                total_cost=float(total),
                total_seconds=now - self._opened,
                hourly_rate=_rate(rentals),
                spot_count=sum(rental.price.is_spot for rental in rentals),
                ondemand_count=sum(not rental.price.is_spot for rental in rentals),
                savings_vs_ondemand=float(on_demand - total),
                buckets={name: float(usd) for name, usd in self._bucket_costs(now).items() if usd},
            )

    # ── with the lock held ───────────────────────────────────────────────────────────────────────────────────────────

    def _all(self) -> Iterable[Rental]:
        return (*self._before, *self._rentals.values())

    def _rented(self) -> Iterable[Rental]:
        return (rental for rental in self._rentals.values() if rental.ended is None)

    def _total(self, at: float) -> Decimal:
        return sum((rental.cost(at) for rental in self._all()), ZERO_USD)

    def _bucket_costs(self, now: float) -> dict[str, Decimal]:
        costs = dict.fromkeys([*map(str, Bucket), BILLING_ROUNDING], ZERO_USD)
        for rental in self._all():
            for name, usd in cost_by_bucket(rental.price, rental.by_bucket(now)).items():
                costs[name] += usd
        return costs

    def _price_of(self, instance: Instance) -> Price:
        on_demand = instance.on_demand_price_per_hour
        beside = sum((Decimal(repr(extra.usd_per_hour)) for extra in instance.extras_per_hour), ZERO_USD)
        return Price(
            Decimal(repr(instance.price_per_hour)) + beside,
            None if on_demand is None else Decimal(repr(on_demand)) + beside,
            instance.is_spot,
            self._increment_seconds,
            self._minimum_seconds,
            extras=instance.extras_per_hour,
        )


def cost_by_bucket(price: Price, milliseconds: Mapping[Bucket, int]) -> dict[str, Decimal]:
    """Return what each bucket of one machine costs, in USD, and the rest of its bill as `BILLING_ROUNDING`; they add up
    to `price.cost`.

    A bucket costs what was reached with it less what was reached before it, in whole micro-dollars: as the ledger
    counts (`ledger.cost_rows`).
    """
    per_hour = micro_usd(price.per_hour)
    costs = dict[str, Decimal]()
    spent = reached = 0
    for bucket in Bucket:
        spent += milliseconds.get(bucket, 0)
        before, reached = reached, per_hour * (spent // 1000) // SECONDS_PER_HOUR
        costs[bucket] = (reached - before) * MICRO_USD
    costs[BILLING_ROUNDING] = price.cost(spent / 1000) - reached * MICRO_USD
    return costs


def _usd_per_second(price: Price) -> float:
    return float(price.per_hour) / SECONDS_PER_HOUR


def _rate(rentals: Iterable[Rental]) -> float:
    return float(sum((rental.price.per_hour for rental in rentals), ZERO_USD))
