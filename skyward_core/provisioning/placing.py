"""Where a pool's machines may come from: what several providers sell, made into candidates, the cheapest first.

    providers --ask--> what each sells, or why it could not be asked --candidates--> candidates and refusals --order--> those that failed of late go last

A candidate is one provider, region and type for all machines of the pool, on-demand ones at the lower ranks if it is mixed. Only `ask` has effects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import nsmallest

from skyward_core import spot
from skyward_core.entries import Attempt
from skyward_core.errors import BadRequest, CredentialsError, NoCapacity, ProviderFailed, Refusal, SkywardError
from skyward_core.market import Offer, Requirements, describe, matches, why_none
from skyward_core.providers.base import Provider
from skyward_core.side_by_side import side_by_side
from skyward_core.spec import PoolSpec

MOST_CANDIDATES = 200
"""Each try takes seconds: nobody waits for more."""
MOST_TOLD = 20
FAILURES_TO_REST = 3
"""So many failures of a candidate in a row, and it is put aside."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 60.0, 1800.0
MEMORY_SECONDS = 3600.0
"""How far back attempts are looked at."""


@dataclass(frozen=True, slots=True)
class Sold:
    """What one provider sells, and to whom; or why it could not be asked. `seconds` is how long that took."""

    provider: Provider
    offers: tuple[Offer, ...] = ()
    account: str = ""
    error: SkywardError | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """Machines of one offer: `count` from rank `first_rank` on."""

    offer: Offer
    count: int
    first_rank: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to rent all machines of a pool. `account` is whose they would be, in the provider's words."""

    provider: Provider
    account: str
    parts: tuple[Part, ...]

    @property
    def price_per_hour(self) -> float:
        """What all machines cost, in USD."""
        return sum(part.offer.price_per_hour * part.count for part in self.parts)

    @property
    def region(self) -> str:
        """Where they are."""
        return self.parts[0].offer.region

    @property
    def keys(self) -> frozenset[Key]:
        """What attempts at it are known by."""
        return frozenset(key_of(part.offer) for part in self.parts)


type Key = tuple[str, str, str, bool]
"""Provider, region, type and whether it is spot."""


def key_of(thing: Offer | Attempt) -> Key:
    """Return what tells an offer from others in what is remembered of attempts."""
    return thing.provider, thing.region, thing.instance_type, thing.is_spot


def ask(providers: Sequence[Provider], want: Requirements, clock: Callable[[], float] = time.monotonic) -> list[Sold]:
    """Ask all providers at once what they sell, and whose account it is; the answers in the order of the providers.

    An error that mending credentials or waiting may end is kept with its provider; any other is raised.
    """
    return side_by_side(lambda provider: _asked(provider, want, clock), providers, "skyward-offers", len(providers))


def _asked(provider: Provider, want: Requirements, clock: Callable[[], float]) -> Sold:
    began = clock()
    try:
        account = provider.account()
        return Sold(provider, tuple(provider.offers(want)), account, seconds=clock() - began)
    except (CredentialsError, NoCapacity, ProviderFailed) as error:
        return Sold(provider, error=error, seconds=clock() - began)


def candidates(spec: PoolSpec, sold: Iterable[Sold]) -> tuple[list[Candidate], list[Refusal]]:
    """Return the ways to rent what the spec asks for, cheapest first and then the smallest, and for each provider that has none the reason.

    Without a strategy, and with "if-available", a type that is sold both ways is a candidate both ways. Raises BadRequest if spot is demanded and nobody
    sells it.
    """
    want = spec.requirements
    found: list[Candidate] = []
    refusals: list[Refusal] = []
    has_offers = False
    for one in sold:
        good = [offer for offer in one.offers if matches(offer, want) is None]
        if one.error is not None:
            refusals.append(refusal(one.provider, None, one.error, one.seconds))
        elif not good:
            why = NoCapacity(f"nothing fits {describe(want)}: {why_none(one.offers, want)}")
            refusals.append(refusal(one.provider, None, why, one.seconds))
        else:
            has_offers = True
            ways = _ways(spec, _groups(good))
            found += [Candidate(one.provider, one.account, _parts(group, *counts)) for group, counts in nsmallest(MOST_CANDIDATES, ways, key=_weight)]
            if not ways:
                refusals.append(refusal(one.provider, None, NoCapacity(f"it sells no spot machine that fits {describe(want)}"), one.seconds))
    if has_offers and not found:
        spot.split(spec.spot, spec.nodes, spot_sold=False)
    return sorted(found, key=lambda candidate: _total(candidate.parts))[:MOST_CANDIDATES], refusals


type _Group = Mapping[bool, Offer]
"""Offers of one type in one region, by whether they are spot."""


def _groups(offers: Iterable[Offer]) -> list[_Group]:
    """The cheapest of each type and region together, and each dearer one alone: a market has one type at many prices, and few machines at each."""
    groups: dict[tuple[str, str], dict[bool, Offer]] = {}
    dearer: list[_Group] = []
    for offer in offers:
        group = groups.setdefault((offer.region, offer.instance_type), {})
        known = group.get(offer.is_spot)
        if known is None or offer.price_per_hour < known.price_per_hour:
            group[offer.is_spot] = offer
        if known is not None:
            dearer.append({offer.is_spot: known if offer.price_per_hour < known.price_per_hour else offer})
    return [*groups.values(), *dearer]


type _Way = tuple[_Group, tuple[int, int]]
"""A group, and how many of the machines are on demand and how many spot."""


def _ways(spec: PoolSpec, groups: Iterable[_Group]) -> list[_Way]:
    """The ways to rent all machines from one type in one region."""
    counts = {has_spot: _counts(spec, has_spot=has_spot) for has_spot in (False, True)}
    return [
        (group, (on_demand, spot_nodes))
        for group in groups
        for on_demand, spot_nodes in counts[True in group]
        if not (on_demand and False not in group) and not (spot_nodes and True not in group)
    ]


def _counts(spec: PoolSpec, *, has_spot: bool) -> list[tuple[int, int]]:
    """How many on demand and how many spot, as the strategy has it; both kinds where it leaves the choice."""
    try:
        counts = [spot.split(spec.spot, spec.nodes, spot_sold=has_spot)]
    except BadRequest:
        return []
    is_free = spec.spot is None or isinstance(spec.spot, spot.IfAvailable)
    return list(dict.fromkeys([*counts, (spec.nodes, 0)])) if is_free else counts


def _parts(group: _Group, on_demand: int, spot_nodes: int) -> tuple[Part, ...]:
    parts = (Part(group[False], on_demand, 0) if on_demand else None, Part(group[True], spot_nodes, on_demand) if spot_nodes else None)
    return tuple(part for part in parts if part is not None)


def _weight(way: _Way) -> tuple[float, float, float]:
    """What a way is ranked by: the price of all machines, then their size."""
    group, (on_demand, spot_nodes) = way
    if not (on_demand and spot_nodes):  # nearly always: fifty thousand of them are weighed in a tenth of a second
        offer, count = group[bool(spot_nodes)], on_demand or spot_nodes
        return offer.price_per_hour * count, offer.vcpus * count, offer.memory_gb * count
    return _total(_parts(group, on_demand, spot_nodes))


def _total(parts: Iterable[Part]) -> tuple[float, float, float]:
    columns = ((part.offer.price_per_hour * part.count, part.offer.vcpus * part.count, part.offer.memory_gb * part.count) for part in parts)
    price, vcpus, memory = (sum(column) for column in zip(*columns, strict=True))
    return price, vcpus, memory


def resting(attempts: Iterable[Attempt], now: datetime) -> dict[Key, datetime]:
    """Return until when each candidate that has failed again and again is put aside: from its last failure on, twice as long with each further one.

    Attempts in any order; a success ends it.
    """
    failures: dict[Key, list[datetime]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.at):
        if attempt.error:
            failures.setdefault(key_of(attempt), []).append(attempt.at)
        else:
            failures.pop(key_of(attempt), None)
    ends = {
        key: times[-1] + timedelta(seconds=min(FIRST_REST_SECONDS * 2 ** (len(times) - FAILURES_TO_REST), LONGEST_REST_SECONDS))
        for key, times in failures.items()
        if len(times) >= FAILURES_TO_REST
    }
    return {key: until for key, until in ends.items() if until > now}


def order(found: Sequence[Candidate], rest: Mapping[Key, datetime]) -> list[Candidate]:
    """Put those that rest at the end, in their own order: they are tried when all others have refused, for somebody wants these machines now."""
    return sorted(found, key=lambda candidate: bool(candidate.keys & rest.keys()))


def refusal(provider: Provider, offer: Offer | None, error: SkywardError, seconds: float) -> Refusal:
    """Return what is kept of a candidate that was not taken; without an offer it is the provider as a whole."""
    return Refusal(
        provider=provider.name,
        region="" if offer is None else offer.region,
        instance_type="" if offer is None else offer.instance_type,
        spot=False if offer is None else offer.is_spot,
        error=type(error).__name__,
        code=error.code,
        message=str(error).partition("\n")[0],
        seconds=seconds,
    )


def none_left(want: Requirements, nodes: int, refusals: Sequence[Refusal], errors: Sequence[SkywardError]) -> SkywardError:
    """Return what to raise when all candidates have refused: the error of one that was alone, the kind that all have, or NoCapacity; with all reasons."""
    if len(refusals) == 1 and len(errors) == 1:
        error = errors[0]
    else:
        told = [str(one) for one in refusals[:MOST_TOLD]]
        more = [f"and {len(refusals) - MOST_TOLD} others"] if len(refusals) > MOST_TOLD else []
        kinds = {type(error) for error in errors}
        kind = next(iter(kinds)) if len(kinds) == 1 and len(errors) == len(refusals) else NoCapacity
        error = kind(f"nobody rents out {nodes} x {describe(want)}:\n  " + "\n  ".join([*told, *more]))
        error.code = errors[-1].code if errors else ""
    if isinstance(error, NoCapacity):
        error.refusals = tuple(refusals)
    return error
