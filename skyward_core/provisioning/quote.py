"""What a pool would rent now, before it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyward_core.errors import Refusal
from skyward_core.events.narrator import usd
from skyward_core.providers.base import Provider
from skyward_core.provisioning.abilities import questions
from skyward_core.provisioning.alternatives import ask_each, rank_all
from skyward_core.spec import PoolSpec

SECONDS_PER_HOUR = 3600
SHOWN = 5


@dataclass(frozen=True, slots=True)
class QuotedWay:
    """One way to rent all machines: what it is, and the price of all of them with all extras, in USD per hour."""

    name: str
    price_per_hour: float


@dataclass(frozen=True, slots=True)
class Quote:
    """The ways to rent the machines of a pool now, in the order in which they would be tried.

    `ceiling_usd` is the most that the pool may cost: `max_cost`, or what the most expensive way (of a pool that
    grows: `max_hourly_cost`) costs for `max_lifetime`; None if nothing limits it. `account` is the account that pays.
    `refusals` are the reasons of the providers without a way. Prices are present prices: they may differ when a pool is
    opened later.
    """

    ways: tuple[QuotedWay, ...]
    ceiling_usd: float | None = None
    account: str | None = None
    refusals: tuple[Refusal, ...] = ()

    @property
    def price_per_hour(self) -> float | None:
        """The price of the way that would be tried first, in USD; None if there is none."""
        return self.ways[0].price_per_hour if self.ways else None

    def __str__(self) -> str:
        if not self.ways:
            return "nothing to rent: " + ("; ".join(str(one) for one in self.refusals) or "no provider sells it")
        shown = ", ".join(f"{way.name} at {usd(way.price_per_hour)} per hour" for way in self.ways[:SHOWN])
        more = f" and {len(self.ways) - SHOWN} more" if len(self.ways) > SHOWN else ""
        ceiling = "no limit of the cost" if self.ceiling_usd is None else f"at most {usd(self.ceiling_usd)}"
        payer = f", paid by account {self.account!r}" if self.account else ""
        return f"{shown}{more}; {ceiling}{payer}"


def quote(spec: PoolSpec, providers: Sequence[Provider]) -> Quote:
    """Query the providers for their present offers. Rents nothing, and leaves no trace in the ledger.

    Raises BadRequest if no provider can do what the spec asks for.
    """
    asked = questions(spec, providers)
    found, refusals = rank_all(asked, ask_each(asked))
    ways = tuple(QuotedWay(candidate.machines, candidate.price_per_hour) for candidate in found)
    return Quote(ways, ceiling_of(spec, ways), spec.budget, tuple(refusals))


def ceiling_of(spec: PoolSpec, ways: Sequence[QuotedWay], seconds: float | None = None) -> float | None:
    """Return the most that the pool may cost, in USD; None if nothing limits it.

    `seconds` is after how long the pool's user ends it, such as an orchestrator.
    """
    ends = [end for end in (spec.max_lifetime, seconds) if end is not None]
    dearest = max(way.price_per_hour for way in ways) if ways and not spec.is_elastic else spec.max_hourly_cost
    of_life = dearest * min(ends) / SECONDS_PER_HOUR if ends and dearest is not None else None
    limits = [limit for limit in (spec.max_cost, of_life) if limit is not None]
    return min(limits, default=None)
