"""Price x time. The bill of one pool, from the moment machines are asked for until they are known to be gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from skyward_core.events import CostFinal, CostUpdate
from skyward_core.instances import Instance

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Rental:
    """One machine's time: `started` and `ended` (None: not yet) on the meter's clock, in seconds; prices in USD per hour."""

    instance_id: str
    is_spot: bool
    price_per_hour: float
    on_demand_price_per_hour: float
    started: float
    ended: float | None = None

    def hours(self, now: float) -> float:
        """Hours rented until now, or until the end."""
        return ((now if self.ended is None else self.ended) - self.started) / SECONDS_PER_HOUR


class Meter:
    """Counts what a pool costs. Safe to use from several threads; `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._opened = clock()
        self._rentals: dict[str, Rental] = {}
        self._is_final = False

    def start(self, instance: Instance, at: float) -> None:
        """Count a machine from `at`, the time when it was asked for."""
        on_demand = instance.on_demand_price_per_hour
        with self._lock:
            self._rentals[instance.id] = Rental(
                instance.id, instance.is_spot, instance.price_per_hour, instance.price_per_hour if on_demand is None else on_demand, at
            )

    def now(self) -> float:
        """Return the time on the meter's clock."""
        return self._clock()

    def end(self, instance_id: str) -> None:
        """Stop counting a machine: it is known to be gone. A second time changes nothing."""
        with self._lock:
            rental = self._rentals.get(instance_id)
            if rental is not None and rental.ended is None:
                self._rentals[instance_id] = replace(rental, ended=self._clock())

    def end_all(self) -> None:
        """Stop counting all machines."""
        for instance_id in list(self._rentals):
            self.end(instance_id)

    def rented(self) -> set[str]:
        """Return the ids of the machines that are being counted."""
        with self._lock:
            return {instance_id for instance_id, rental in self._rentals.items() if rental.ended is None}

    def update(self) -> CostUpdate:
        """Return the bill so far; the rate and the counts are of the machines rented now."""
        with self._lock:
            now = self._clock()
            rented = [rental for rental in self._rentals.values() if rental.ended is None]
            return CostUpdate(
                elapsed_seconds=now - self._opened,
                accumulated_cost=self._cost(now),
                hourly_rate=sum(rental.price_per_hour for rental in rented),
                spot_count=sum(rental.is_spot for rental in rented),
                ondemand_count=sum(not rental.is_spot for rental in rented),
            )

    def final(self) -> CostFinal | None:
        """Return the whole bill the first time, None ever after. The rate and the counts are of all machines there were."""
        with self._lock:
            if self._is_final:
                return None
            self._is_final = True
            now = self._clock()
            rentals = self._rentals.values()
            total = self._cost(now)
            return CostFinal(
                total_cost=total,
                total_seconds=now - self._opened,
                hourly_rate=sum(rental.price_per_hour for rental in rentals),
                spot_count=sum(rental.is_spot for rental in rentals),
                ondemand_count=sum(not rental.is_spot for rental in rentals),
                savings_vs_ondemand=sum(rental.hours(now) * rental.on_demand_price_per_hour for rental in rentals) - total,
            )

    def _cost(self, now: float) -> float:
        return sum(rental.hours(now) * rental.price_per_hour for rental in self._rentals.values())
