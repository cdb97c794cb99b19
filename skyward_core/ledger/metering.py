"""The bill of one pool, from the request of its machines until they are known to be gone, by bucket.

Time is counted in whole milliseconds and money in whole micro-dollars, with the ledger's own arithmetic (`rows.Price`).
The ledger gets what `buckets` returns, so the bill is the sum of the ledger's rows.
`metered_of` goes on from what an earlier process has counted. `Projection` is what a pool will have cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from skyward_core.errors import ZERO_USD
from skyward_core.events.events import CostFinal, CostUpdate, PoolLeft
from skyward_core.ledger.lease_clock import boot_seconds
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    MICRO_USD,
    SECONDS_PER_HOUR,
    Bucket,
    CostBy,
    Intent,
    Price,
    micro_usd,
)
from skyward_core.machines.instances import Instance

PHASES = (Bucket.LAUNCHING, Bucket.BOOTSTRAPPING, Bucket.IDLE, Bucket.LOST, Bucket.TERMINATING)
"""The phases of a machine's life, in their order. The seconds of a phase are in the bucket of that name.

A node that is ready is `IDLE`; the time of its calls is subtracted.
"""

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


@dataclass(slots=True)
class MeteredInstance:
    """One machine's time: `started` and `ended` (None: not yet) on the meter's clock, in seconds.

    `marks` are the phases, with the milliseconds between the start and each. `ran_seconds` and `seen_seconds` both
    count how long calls have kept slots busy: the first as ended calls have reported, the second as the node has
    counted, with the calls that still run.
    """

    instance_id: str
    price: Price
    per_slot_second: float
    started: float
    ended: float | None = None
    slots: int = 1
    ran_seconds: float = 0.0
    seen_seconds: float = 0.0
    seen_before: float = 0.0
    """What was seen of the same id before: a provider may give a machine that is rented again its earlier id."""
    marks: list[tuple[Bucket, int]] = field(default_factory=lambda: [(Bucket.LAUNCHING, 0)])

    def milliseconds(self, now: float) -> int:
        """Return how long it has been rented, until now or until its end."""
        return max(round(((now if self.ended is None else self.ended) - self.started) * 1000), self.marks[-1][1])

    def enter(self, phase: Bucket, at: float, now: float) -> None:
        """Enter a phase. An earlier phase than the present one changes nothing."""
        last, mark = self.marks[-1]
        if self.ended is None and PHASES.index(phase) > PHASES.index(last):
            self.marks.append((phase, min(max(round((at - self.started) * 1000), mark), self.milliseconds(now))))

    def by_bucket(self, now: float) -> dict[Bucket, int]:
        """Return its milliseconds by bucket. Their sum is `milliseconds`."""
        spent = dict.fromkeys(Bucket, 0)
        ends = [mark for _, mark in self.marks[1:]]
        for (phase, mark), end in zip(self.marks, [*ends, self.milliseconds(now)], strict=True):
            spent[phase] = end - mark
        busy = min(int(max(self.ran_seconds, self.seen_seconds) * 1000 / self.slots), spent[Bucket.IDLE])
        spent[Bucket.RUNNING_CALLS] = busy
        spent[Bucket.IDLE] -= busy
        return spent

    def cost(self, at: float) -> Decimal:
        """Return its cost in USD until `at`, or until its end."""
        return self.price.cost(self.milliseconds(at) / 1000)


class Meter:
    """Counts what a pool costs. Safe to use from several threads; `clock` counts seconds, also while this computer
    sleeps.

    `increment_seconds` and `minimum_seconds` are the provider's billing rules. Calls with an unknown machine change
    nothing.
    """

    def __init__(
        self, clock: Callable[[], float] = boot_seconds, increment_seconds: int = 1, minimum_seconds: int = 0
    ) -> None:
        self._clock = clock
        self._increment_seconds = increment_seconds
        self._minimum_seconds = minimum_seconds
        self._lock = threading.Lock()
        self._opened = clock()
        self._metered: dict[str, MeteredInstance] = {}
        self._before: list[MeteredInstance] = []
        """Earlier rentals of machines that were rented again, because a host keeps its name."""
        self._is_final = False

    # ── changes of machines ──────────────────────────────────────────────────────────────────────────────────────────

    def start(self, instance: Instance, at: float, price: Price | None = None) -> None:
        """Count a machine from `at`, the time of its request, at `price` or its own price.

        If the machine is already counted, nothing changes.
        """
        price = price or self._price_of(instance)
        with self._lock:
            known = self._metered.get(instance.id)
            if known is not None:
                if known.ended is None:
                    return
                self._before.append(known)
            seen_before = 0.0 if known is None else known.seen_before + known.seen_seconds
            self._metered[instance.id] = MeteredInstance(
                instance.id, price, _usd_per_second(price), at, seen_before=seen_before
            )

    def adopt(self, metered: MeteredInstance) -> None:
        """Count a machine as an earlier process has counted it, also one that is gone."""
        with self._lock:
            if metered.ended is not None:
                self._before.append(metered)
            elif metered.instance_id not in self._metered:
                self._metered[metered.instance_id] = metered

    def enter(self, instance_id: str, phase: Bucket, at: float | None = None) -> None:
        """Put a machine's seconds into the bucket of this phase from `at` on (None: now).

        An earlier phase than the present one changes nothing.
        """
        if phase not in PHASES:
            raise ValueError(
                f"{phase!r} is no phase of a machine: a ready node is IDLE, and `ran` adds the time of its calls"
            )
        with self._lock:
            if (metered := self._metered.get(instance_id)) is not None:
                now = self._clock()
                metered.enter(phase, now if at is None else at, now)

    def slots(self, instance_id: str, slots: int) -> None:
        """Set how many calls can run at once on this machine, in all its workers."""
        with self._lock:
            if (metered := self._metered.get(instance_id)) is not None:
                metered.slots = max(1, slots)
                metered.per_slot_second = _usd_per_second(metered.price) / metered.slots

    def ran(self, instance_id: str, seconds: float) -> float:
        """Add the seconds for which ended calls have kept slots busy, and return their share of the bill in USD."""
        with self._lock:
            metered = self._metered.get(instance_id)
            if metered is None:
                return 0.0
            metered.ran_seconds += seconds
            return seconds * metered.per_slot_second

    def seen_running(self, instance_id: str, seconds: float) -> None:
        """Set how many seconds of busy slots a machine has counted: calls of all clients, and those that still run. Of
        an id that comes again, those of its earlier rentals are in the number.

        So a training of three hours is not idle time if its client is killed before its end. A smaller number changes
        nothing.
        """
        with self._lock:
            if (metered := self._metered.get(instance_id)) is not None:
                metered.seen_seconds = max(metered.seen_seconds, seconds - metered.seen_before)

    def end(self, instance_id: str) -> None:
        """Stop counting a machine, because it is known to be gone. A second call changes nothing."""
        with self._lock:
            metered = self._metered.get(instance_id)
            if metered is not None and metered.ended is None:
                metered.ended = self._clock()

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        """Return the time on the meter's clock."""
        return self._clock()

    def rented(self) -> set[str]:
        """Return the ids of the machines that are being counted."""
        with self._lock:
            return {metered.instance_id for metered in self._rented()}

    def buckets(self) -> dict[str, dict[Bucket, float]]:
        """Return the seconds of each machine by bucket. All buckets are there, and their sum is its life so far.

        The count of a node arrives some seconds late. Before that the time counts as idle, so one bucket may shrink;
        the sum never shrinks.
        """
        with self._lock:
            now = self._clock()
            return {
                instance_id: {bucket: spent / 1000 for bucket, spent in metered.by_bucket(now).items()}
                for instance_id, metered in self._metered.items()
            }

    def total(self) -> Decimal:
        """Return the bill so far, in USD."""
        with self._lock:
            return self._total(self._clock())

    def rate(self) -> Decimal:
        """Return the cost per hour of the machines that are rented now, in USD."""
        with self._lock:
            return sum((metered.price.per_hour for metered in self._rented()), ZERO_USD)

    def projected(self, at: float) -> Decimal:
        """Return the bill at a later time, in USD, if no machine is launched or ended before."""
        with self._lock:
            return self._total(max(at, self._clock()))

    def committed(self, hard_ends: Mapping[str, float]) -> Decimal:
        """Return the cost of all machines in USD if each lives until its hard end, a time on the meter's clock.

        A machine without a hard end counts until now.
        """
        with self._lock:
            now = self._clock()
            return sum(
                (metered.cost(max(now, hard_ends.get(metered.instance_id, now))) for metered in self._all()), ZERO_USD
            )

    def update(self) -> CostUpdate:
        """Return the bill so far, with the rate and the numbers of the machines that are rented now."""
        with self._lock:
            now = self._clock()
            rented = list(self._rented())
            return CostUpdate(
                elapsed_seconds=now - self._opened,
                accumulated_cost=float(self._total(now)),
                hourly_rate=_rate(rented),
                spot_count=sum(metered.price.is_spot for metered in rented),
                ondemand_count=sum(not metered.price.is_spot for metered in rented),
            )

    def final(self) -> CostFinal | None:
        """Return the whole bill at the first call, then None. Rate and numbers cover all past machines too."""
        with self._lock:
            if self._is_final:
                return None
            self._is_final = True
            now = self._clock()
            all_metered, total = list(self._all()), self._total(now)
            on_demand = sum(
                (metered.price.on_demand_cost(metered.milliseconds(now) / 1000) for metered in all_metered), ZERO_USD
            )
            return CostFinal(
                total_cost=float(total),
                total_seconds=now - self._opened,
                hourly_rate=_rate(all_metered),
                spot_count=sum(metered.price.is_spot for metered in all_metered),
                ondemand_count=sum(not metered.price.is_spot for metered in all_metered),
                savings_vs_ondemand=float(on_demand - total),
                buckets={name: float(usd) for name, usd in self._bucket_costs(now).items() if usd},
            )

    def left(self, pool_id: str) -> PoolLeft | None:
        """Return the bill so far of a pool that this process leaves to others; None at a later call, or after `final`,
        which returns None from then on.
        """
        update = self.update()
        with self._lock:
            if self._is_final:
                return None
            self._is_final = True
        return PoolLeft(pool_id, update.accumulated_cost, update.elapsed_seconds, update.hourly_rate)

    # ── with the lock held ───────────────────────────────────────────────────────────────────────────────────────────

    def _all(self) -> Iterable[MeteredInstance]:
        return (*self._before, *self._metered.values())

    def _rented(self) -> Iterable[MeteredInstance]:
        return (metered for metered in self._metered.values() if metered.ended is None)

    def _total(self, at: float) -> Decimal:
        return sum((metered.cost(at) for metered in self._all()), ZERO_USD)

    def _bucket_costs(self, now: float) -> dict[str, Decimal]:
        costs = dict.fromkeys([*map(str, Bucket), BILLING_ROUNDING], ZERO_USD)
        for metered in self._all():
            for name, usd in cost_by_bucket(metered.price, metered.by_bucket(now)).items():
                costs[name] += usd
        return costs

    def _price_of(self, instance: Instance) -> Price:
        on_demand = instance.on_demand_price_per_hour
        extras = sum((Decimal(repr(extra.usd_per_hour)) for extra in instance.extras_per_hour), ZERO_USD)
        return Price(
            Decimal(repr(instance.price_per_hour)) + extras,
            None if on_demand is None else Decimal(repr(on_demand)) + extras,
            instance.is_spot,
            self._increment_seconds,
            self._minimum_seconds,
            extras=instance.extras_per_hour,
        )


def cost_by_bucket(price: Price, milliseconds: Mapping[Bucket, int]) -> dict[str, Decimal]:
    """Return the cost of each bucket of one machine in USD, and the rest of its bill as `BILLING_ROUNDING`.

    Their sum is `price.cost`. The cost of a bucket is the difference of two running totals in whole micro-dollars, as
    in the ledger (`ledger.cost_rows`).
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


def _rate(all_metered: Iterable[MeteredInstance]) -> float:
    return float(sum((metered.price.per_hour for metered in all_metered), ZERO_USD))


def metered_of(intent: Intent, now: datetime, at: float, slots: int) -> MeteredInstance:
    """Return the time of a machine as it would be if this process had counted it from its request on.

    Args:
        intent: the entry, with the seconds that were recorded.
        now: the time of day.
        at: the same time on the meter's clock.
        slots: how many calls run at once on the machine.

    The time after the last record belongs to the phase that was recorded last. A machine that is gone has its recorded
    time only. The time is never shorter than the recorded one, which the ledger would refuse.
    """
    spent = {bucket: round(intent.seconds.get(bucket, 0.0) * 1000) for bucket in Bucket}
    recorded = sum(spent.values())
    lived = recorded
    if intent.gone_at is None:
        lived = max(recorded, round((now - intent.intended_at).total_seconds() * 1000))
    busy = spent[Bucket.RUNNING_CALLS]
    marks = [(Bucket.LAUNCHING, 0)]
    reached = spent[Bucket.LAUNCHING]
    for phase, length in (
        (Bucket.BOOTSTRAPPING, spent[Bucket.BOOTSTRAPPING]),
        (Bucket.IDLE, spent[Bucket.IDLE] + spent[Bucket.WARM] + busy),  # the ledger takes warm time out again
        (Bucket.LOST, spent[Bucket.LOST]),
        (Bucket.TERMINATING, spent[Bucket.TERMINATING]),
    ):
        if length:
            marks.append((phase, reached))
            reached += length
    return MeteredInstance(
        intent.cloud_id or "",
        intent.price,
        float(intent.price.per_hour) / SECONDS_PER_HOUR / max(1, slots),
        at - lived / 1000,
        None if intent.gone_at is None else at,
        max(1, slots),
        busy * max(1, slots) / 1000,
        marks=marks,
    )


@dataclass(frozen=True, slots=True)
class Projection:
    """The cost of the machines that are gone, in USD, and price and request of those that live."""

    gone_usd: Decimal
    living: tuple[tuple[Price, datetime], ...]

    def at(self, until: datetime) -> Decimal:
        """Return the cost in USD if all machines that live now do so up to that time."""
        return self.gone_usd + sum(
            (price.cost(max(0.0, (until - since).total_seconds())) for price, since in self.living), ZERO_USD
        )


def projection_of(ledger: Ledger, pool_id: str) -> Projection:
    """Return the projection of a pool, by its entries in the ledger. Raises LedgerError."""
    recorded = {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.RESOURCE, pool_id=pool_id)}
    intents = ledger.intents(pool_id=pool_id)
    return Projection(
        sum((recorded.get(str(one.id), ZERO_USD) for one in intents if one.gone_at is not None), ZERO_USD),
        tuple((one.price, one.intended_at) for one in intents if one.gone_at is None),
    )
