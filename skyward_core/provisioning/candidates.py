"""Candidates for a pool's machines, from the offers of several providers, the cheapest first.

    providers --ask--> offers of each, or an error --candidates--> candidates and refusals --order--> in this order

A candidate is one provider, region and type for all machines of the pool. If it is mixed, the lower ranks are on
demand. `order` puts candidates that have failed recently behind others. Only `ask` has effects.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from heapq import nsmallest

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    BudgetExceeded,
    CredentialsError,
    NoCapacity,
    OfferGone,
    ProviderFailed,
    QuotaExceeded,
    RateLimited,
    Refusal,
    SkywardError,
)
from skyward_core.events.narrator import usd
from skyward_core.ledger.rows import Attempt
from skyward_core.machines import spot
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, Requirements, describe, matches, total_of
from skyward_core.providers.base import Provider, Sale, why_none
from skyward_core.spec import MOST_RATIO, PoolSpec

MOST_CANDIDATES = 200
"""Each try takes seconds, so more of them would not help a user."""
MOST_SHOWN = 20
FAILURES_TO_REST = 3
"""After failures at so many pools in a row a candidate rests: it is tried after others."""
COUNTED = frozenset(kind.__name__ for kind in (NoCapacity, QuotaExceeded, RateLimited, ProviderFailed))
"""The errors that matter to other pools. Wrong requests, credentials and used-up money concern one pool only, and an
offer that is gone is one of many.
"""
SAME_TO_BE_OURS = 3
"""After so many refusals with the same message that may be about the request, it is an error of the request."""
WORTH_A_REST = 1.5
"""A candidate that rests is tried after candidates that cost at most so many times as much. A refused request costs a
second; a more expensive machine costs money for as long as it runs.
"""
TOO_DEAR = "max_price_ratio"
"""The code of the refusal of a candidate that nobody was asked for, because it is too dear."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 60.0, 1800.0
MEMORY_SECONDS = 3600.0
"""The age of the oldest attempts that count."""
ENOUGH_SECONDS = 600.0
"""A pool grows only if its money lasts for so many seconds with the new node, because each node shortens the life of
all."""


@dataclass(frozen=True, slots=True)
class ProviderOffers:
    """The offers of one provider to an account, or the error of the request. `seconds` is how long that took."""

    provider: Provider
    offers: tuple[Offer, ...] = ()
    account: str = ""
    error: SkywardError | None = None
    seconds: float = 0.0
    unasked: Mapping[str, SkywardError] = field(default_factory=dict[str, SkywardError])
    """The regions that have not answered, if others have."""
    elsewhere: tuple[Offer, ...] = ()
    """Offers of regions that the provider's settings exclude."""

    @property
    def errors(self) -> tuple[SkywardError, ...]:
        """The errors of the provider and of its regions."""
        return (*self.unasked.values(), *([self.error] if self.error is not None else []))


@dataclass(frozen=True, slots=True)
class Part:
    """Machines of one offer: `count` from rank `first_rank` on."""

    offer: Offer
    count: int
    first_rank: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to rent all machines of a pool. `account` is the provider's name of the account that would have them."""

    provider: Provider
    account: str
    parts: tuple[Part, ...]
    spec: PoolSpec
    """The spec with the accelerator of this candidate alone."""
    place: int = 0
    """The place of that accelerator among the alternatives of the pool."""
    too_dear: str = ""
    """Why it is refused for its price when its turn comes (`max_price_ratio`); "" for all others."""

    @property
    def weight(self) -> tuple[float, float, float]:
        """The sort key: the price of all machines, then their size."""
        return _total(self.parts)

    @property
    def price_per_hour(self) -> float:
        """The price of all machines with all extras, in USD."""
        return sum(part.offer.total_per_hour * part.count for part in self.parts)

    @property
    def on_demand_price_per_hour(self) -> float:
        """The price of all machines with spot machines rented on demand, in USD, or as spot where that is unknown."""
        return sum(on_demand_total(part.offer) * part.count for part in self.parts)

    @property
    def machines(self) -> str:
        """The machines in words: how many of which offers."""
        return " + ".join(f"{part.count} x {part.offer.name}" for part in self.parts)

    @property
    def region(self) -> str:
        """The region of the machines."""
        return self.parts[0].offer.region

    @property
    def keys(self) -> frozenset[Key]:
        """The keys of its offers, by which attempts are found."""
        return frozenset(key_of(part.offer) for part in self.parts)


type Key = tuple[str, str, str, bool]
"""Provider, region, type and whether it is spot."""


def on_demand_total(machine: Offer | Instance) -> float:
    """Return the price of a machine on demand with its extras, in USD per hour; if that is unknown, its own."""
    price = max(machine.price_per_hour or 0.0, machine.on_demand_price_per_hour or 0.0)
    return price + total_of(machine.extras_per_hour)


def key_of(thing: Offer | Attempt) -> Key:
    """Return the key of an offer or of an attempt; attempts at the same offer have the same key."""
    return thing.provider, thing.region, thing.instance_type, thing.is_spot


def ask(
    providers: Sequence[Provider], want: Requirements, clock: Callable[[], float] = time.monotonic
) -> list[ProviderOffers]:
    """Ask all providers at once for their offers and their account. Return the answers in the order of the providers.

    An error of one provider is part of its answer, so that the others' answers are not lost. Examples are an outage,
    refused credentials, and a spec that it does not support.
    """
    return side_by_side(lambda provider: query(provider, want, clock), providers, "skyward-offers", len(providers))


def query(provider: Provider, want: Requirements, clock: Callable[[], float] = time.monotonic) -> ProviderOffers:
    """Ask one provider. An error is part of the answer."""
    began = clock()
    try:
        account = provider.account()
        offers = provider.offers(want)
        return ProviderOffers(
            provider,
            tuple(offers),
            account,
            seconds=clock() - began,
            unasked=offers.unasked if isinstance(offers, Sale) else {},
            elsewhere=offers.elsewhere if isinstance(offers, Sale) else (),
        )
    except (BadRequest, CredentialsError, NoCapacity, ProviderFailed) as error:
        return ProviderOffers(provider, error=error, seconds=clock() - began)


def candidates(spec: PoolSpec, sold: Iterable[ProviderOffers], place: int = 0) -> tuple[list[Candidate], list[Refusal]]:
    """Return the candidates for a spec, the cheapest first and then the smallest, and the reason of each provider that
    has none. The spec has one accelerator, at this place among its alternatives. The last candidates may be too dear:
    one of each provider that has such ones.

    Without a strategy, and with "if-available", a type that is sold on demand and as spot is two candidates. Raises
    BadRequest if the spec demands spot, all providers have answered, and none of them sells it at any time.
    """
    want = spec.requirements
    found: list[Candidate] = []
    refusals: list[Refusal] = []
    has_offers = has_mixes = may_be_sold = False
    for one in sold:
        may_be_sold |= bool(one.errors) or one.provider.may_sell_spot(want)
        refusals += refusals_of(one)
        if one.error is not None:
            continue
        good = fitting(one.offers, want)
        if not good:
            why = _nothing_fits(one, want)
            refusals.append(refusal(one.provider, None, why, one.seconds))
        else:
            has_offers = True
            mixes = _of_one_size(_mixes(spec, _groups(good)), want)
            has_mixes |= bool(mixes)
            cheapest = [
                Candidate(one.provider, one.account, _parts(group, *counts), spec, place)
                for group, counts in nsmallest(MOST_CANDIDATES, mixes, key=_weight)
            ]
            found += [candidate for candidate in cheapest if spec.may_cost(candidate.price_per_hour)]
            if mixes and not spec.may_cost(cheapest[0].price_per_hour):
                refusals.append(refusal(one.provider, None, _too_dear(spec, cheapest[0]), one.seconds))
            if not mixes:
                why = "it has no spot machine free" if one.provider.may_sell_spot(want) else "it sells no spot machine"
                refusals.append(
                    refusal(one.provider, None, NoCapacity(f"{why} that fits {describe(want)}"), one.seconds)
                )
    if has_offers and not has_mixes and not may_be_sold:
        spot.split(spec.spot, spec.least_nodes, spot_sold=False)
    return _within_ratio(spec, sorted(found, key=lambda candidate: candidate.weight)), refusals


def fitting(offers: Iterable[Offer], want: Requirements) -> list[Offer]:
    """Return the offers of one provider that match. Machines with accelerators are no fallback for machines without:
    if none is wanted they are left out, unless the type is named, they cost nothing, or the provider sells no others.
    """
    offers = list(offers)
    good = [offer for offer in offers if matches(offer, want) is None]
    if want.accelerator is not None or want.instance_type is not None or all(offer.accelerators for offer in offers):
        return good
    return [offer for offer in good if not (offer.accelerators and offer.total_per_hour)]


def _nothing_fits(answer: ProviderOffers, want: Requirements) -> NoCapacity:
    with_chips = [offer for offer in answer.offers if matches(offer, want) is None]
    if not with_chips:
        return NoCapacity(f"nothing fits {describe(want)}: {why_none(answer.offers, want)}{_elsewhere(answer, want)}")
    cheapest = min(with_chips, key=lambda offer: offer.total_per_hour)
    return NoCapacity(
        f"nothing without an accelerator fits {describe(want)}. {cheapest.name} fits, with {cheapest.accelerators} x"
        f" {cheapest.accelerator} at {usd(cheapest.total_per_hour)} an hour: to rent it all the same, write"
        f" machine={cheapest.instance_type!r}"
    )


def _within_ratio(spec: PoolSpec, ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that cost at most `max_price_ratio` times the first one, then the cheapest dearer one of
    each provider, which says why it is too dear. `max_hourly_cost` takes the place of the ratio. Of a spot machine the
    price on demand counts: a large discount is no reason to refuse others.

    A candidate that is refused makes the next one likelier. Without a limit that ends at eight MI355X.
    """
    first = next((candidate for candidate in ranked if candidate.price_per_hour), None)
    if first is None or spec.max_hourly_cost is not None:
        return list(ranked[:MOST_CANDIDATES])
    most = spec.max_price_ratio * first.on_demand_price_per_hour * (1 + 1e-9)
    good = [candidate for candidate in ranked if candidate.price_per_hour <= most]
    dear: dict[int, Candidate] = {}
    for candidate in ranked[len(good) :]:
        dear.setdefault(id(candidate.provider), replace(candidate, too_dear=_above_ratio(spec, candidate, first)))
    return [*good[:MOST_CANDIDATES], *dear.values()]


def _above_ratio(spec: PoolSpec, candidate: Candidate, first: Candidate) -> str:
    price = candidate.price_per_hour
    return (
        f"{candidate.machines} costs {usd(price)} per hour, more than {spec.max_price_ratio:g} times the"
        f" {usd(first.on_demand_price_per_hour)} of {first.machines}: to allow it, write"
        f" max_hourly_cost={_enough(price)}"
    )


def _too_dear(spec: PoolSpec, cheapest: Candidate) -> NoCapacity:
    """Return the error of a provider whose cheapest candidate is above `max_hourly_cost`."""
    price = cheapest.price_per_hour
    why = f"the cheapest that fits costs {usd(price)} per hour ({cheapest.machines})"
    return NoCapacity(f"{why}, and {above_hourly_limit(spec, price)}, or ask for fewer or cheaper machines")


def above_hourly_limit(spec: PoolSpec, price_per_hour: float) -> str:
    """Return the words for a price of all machines that is above `max_hourly_cost`, with the number to write."""
    return f"max_hourly_cost={spec.max_hourly_cost:g} is less: write max_hourly_cost={_enough(price_per_hour)}"


def _enough(price_per_hour: float) -> str:
    """Return a limit that allows this price, in whole cents."""
    return f"{math.ceil(round(price_per_hour * 100, 6)) / 100:.10g}"


def _elsewhere(one: ProviderOffers, want: Requirements) -> str:
    """Return the regions beyond the provider's `region=` that sell what is wanted, for a message; "" if none does."""
    regions = sorted({offer.region for offer in one.elsewhere if matches(offer, want) is None})
    if not regions:
        chip = None if want.accelerator is None else want.accelerator.name
        is_missing = all(offer.accelerator != chip for offer in one.offers)
        may_be = chip in one.provider.rents and is_missing and getattr(one.provider, "region", None)
        return f". Other regions of {one.provider.name} may sell it: name several as region=" if may_be else ""
    more = f" and {len(regions) - MOST_SHOWN} others" if len(regions) > MOST_SHOWN else ""
    return (
        f". {one.provider.name} sells it now in {', '.join(regions[:MOST_SHOWN])}{more}: write one of them as region="
    )


type _Group = Mapping[bool, Offer]
"""Offers of one type in one region, by whether they are spot."""


def _groups(offers: Iterable[Offer]) -> list[_Group]:
    """Group the cheapest offers of each type and region; each more expensive offer is a separate group.

    A market has one type at many prices, and few machines at each.
    """
    groups: dict[tuple[str, str], dict[bool, Offer]] = {}
    dearer: list[_Group] = []
    for offer in offers:
        group = groups.setdefault((offer.region, offer.instance_type), {})
        known = group.get(offer.is_spot)
        if known is None or offer.total_per_hour < known.total_per_hour:
            group[offer.is_spot] = offer
        if known is not None:
            dearer.append({offer.is_spot: known if offer.total_per_hour < known.total_per_hour else offer})
    return [*groups.values(), *dearer]


type _Mix = tuple[_Group, tuple[int, int]]
"""A group, and how many of the machines are on demand and how many spot."""


def _mixes(spec: PoolSpec, groups: Iterable[_Group]) -> list[_Mix]:
    """Return the mixes that make up all machines from one type in one region."""
    counts = {has_spot: _counts(spec, has_spot=has_spot) for has_spot in (False, True)}
    return [
        (group, (on_demand, spot_nodes))
        for group in groups
        for on_demand, spot_nodes in counts[True in group]
        if not (on_demand and False not in group) and not (spot_nodes and True not in group)
    ]


def _counts(spec: PoolSpec, *, has_spot: bool) -> list[tuple[int, int]]:
    """Return the possible counts of on-demand and spot machines under the strategy."""
    try:
        counts = [spot.split(spec.spot, spec.least_nodes, spot_sold=has_spot)]
    except BadRequest:
        return []
    is_free = spec.spot is None or isinstance(spec.spot, spot.IfAvailable)
    return list(dict.fromkeys([*counts, (spec.least_nodes, 0)])) if is_free else counts


def _of_one_size(mixes: list[_Mix], want: Requirements) -> list[_Mix]:
    """Leave out offers with more chips than the fewest of this provider, unless they cost no more.

    A user who wants one H100 does not want to pay for eight. A type that the spec names is not left out.
    """
    if want.accelerator is None or want.instance_type is not None or not mixes:
        return mixes
    chips = [(group[False] if False in group else group[True]).accelerators for group, _ in mixes]
    fewest = min(chips)
    if max(chips) == fewest:
        return mixes
    dearest = max(_price(mix) for mix, number in zip(mixes, chips, strict=True) if number == fewest)
    return [mix for mix, number in zip(mixes, chips, strict=True) if number == fewest or _price(mix) <= dearest]


def _price(mix: _Mix) -> float:
    """Return the price of all machines. It must be fast, because there may be fifty thousand mixes."""
    group, (on_demand, spot_nodes) = mix
    return (group[False].total_per_hour * on_demand if on_demand else 0.0) + (
        group[True].total_per_hour * spot_nodes if spot_nodes else 0.0
    )


def _parts(group: _Group, on_demand: int, spot_nodes: int) -> tuple[Part, ...]:
    parts = (
        Part(group[False], on_demand, 0) if on_demand else None,
        Part(group[True], spot_nodes, on_demand) if spot_nodes else None,
    )
    return tuple(part for part in parts if part is not None)


def _weight(mix: _Mix) -> tuple[float, float, float]:
    """Return the sort key of a mix: the price of all machines, then their size."""
    group, (on_demand, spot_nodes) = mix
    if not (on_demand and spot_nodes):  # nearly always; fifty thousand of them take a tenth of a second
        offer, count = group[bool(spot_nodes)], on_demand or spot_nodes
        return offer.total_per_hour * count, offer.vcpus * count, offer.memory_gb * count
    return _total(_parts(group, on_demand, spot_nodes))


def _total(parts: Iterable[Part]) -> tuple[float, float, float]:
    columns = (
        (part.offer.total_per_hour * part.count, part.offer.vcpus * part.count, part.offer.memory_gb * part.count)
        for part in parts
    )
    price, vcpus, memory = (sum(column) for column in zip(*columns, strict=True))
    return price, vcpus, memory


def resting(attempts: Iterable[Attempt], now: datetime, nodes: int = 1) -> dict[Key, datetime]:
    """Return the end of the rest of each candidate that has failed at FAILURES_TO_REST pools in a row. The rest begins
    at its last failure, and doubles with each further failure.

    The attempts may be in any order. Each pool counts once, and only if it wanted no more than `nodes` machines: a
    refusal of sixty-four machines proves nothing about one. A success of any pool ends the rest.
    """
    failures: dict[Key, dict[str, datetime]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.at):
        if not attempt.error:
            failures.pop(key_of(attempt), None)
        elif attempt.error in COUNTED and attempt.nodes <= nodes:
            failures.setdefault(key_of(attempt), {})[attempt.pool_id] = attempt.at
    backoff = Backoff(FIRST_REST_SECONDS, LONGEST_REST_SECONDS)
    ends = {
        key: max(times.values()) + timedelta(seconds=backoff.seconds(len(times) - FAILURES_TO_REST + 1))
        for key, times in failures.items()
        if len(times) >= FAILURES_TO_REST
    }
    return {key: until for key, until in ends.items() if until > now}


def order(found: Sequence[Candidate], rest: Mapping[Key, datetime]) -> list[Candidate]:
    """Sort candidates that rest behind those that cost little more (WORTH_A_REST). Resting candidates are still
    tried. With selection="first" they stay before the candidates of later alternatives.
    """

    def rank(candidate: Candidate) -> tuple[int, float, bool]:
        rests = bool(candidate.keys & rest.keys())
        place = 0 if candidate.spec.selection == "cheapest" else candidate.place
        return place, candidate.price_per_hour * (WORTH_A_REST if rests else 1.0), rests

    return sorted(found, key=rank) if rest else list(found)


def may_come(
    providers: Iterable[Provider], found: Sequence[Candidate], want: Requirements, errors: Iterable[SkywardError]
) -> bool:
    """Return whether another round may succeed: a provider had no machine or did not answer, or lists spot machines
    only while some are free.
    """
    if any(isinstance(error, (NoCapacity, ProviderFailed, OfferGone)) for error in errors):
        return True
    return any(
        provider.may_sell_spot(want) and all(one.provider is not provider or one.too_dear for one in found)
        for provider in providers
    )


def is_sold_as_spot(one: Candidate, found: Iterable[Candidate]) -> bool:
    """Return whether the candidate's type is a spot machine, or is one of the candidates as spot in the same region."""
    kinds = {key_of(part.offer)[:3] for part in one.parts}
    return any(
        key_of(part.offer)[:3] in kinds and part.offer.is_spot
        for other in found
        if other.provider is one.provider
        for part in other.parts
    )


def refusal(provider: Provider, offer: Offer | None, error: SkywardError, seconds: float) -> Refusal:
    """Return the refusal of an offer, or without an offer that of the whole provider."""
    return Refusal(
        provider=provider.name,
        region="" if offer is None else offer.region,
        instance_type="" if offer is None else offer.instance_type,
        spot=False if offer is None else offer.is_spot,
        error=type(error).__name__,
        code=error.code,
        # of a refusal among several the next candidate is the advice
        message=(error.without_advice if type(error) is NoCapacity else str(error)).partition("\n")[0],
        seconds=seconds,
    )


def refusals_of(one: ProviderOffers) -> list[Refusal]:
    """Return the refusals of a provider that has not answered, or of such regions."""
    whole = [] if one.error is None else [refusal(one.provider, None, one.error, one.seconds)]
    return [
        *(
            replace(refusal(one.provider, None, error, one.seconds), region=region)
            for region, error in one.unasked.items()
        ),
        *whole,
    ]


def none_left(
    wanted: Sequence[Requirements], nodes: int, refusals: Sequence[Refusal], errors: Sequence[SkywardError]
) -> SkywardError:
    """Return the error to raise when all candidates have refused, with all reasons.

    It is the error itself if there was one candidate, else an error of the class that all have, else NoCapacity.
    BudgetExceeded if only the money is missing. Candidates that were too dear have no error of their own.
    """
    if (alike := _if_all(errors)) is not None:
        return alike
    if len(refusals) == 1 and len(errors) == 1:
        error = errors[0]
    else:
        shown = [str(one) for one in refusals[:MOST_SHOWN]]
        more = [f"and {len(refusals) - MOST_SHOWN} others"] if len(refusals) > MOST_SHOWN else []
        error = _all_of_a_kind(
            f"no provider rents out {nodes} x {', else '.join(map(describe, wanted))}:\n  "
            + "\n  ".join([*shown, *more]),
            errors,
            sum(refused.code != TOO_DEAR for refused in refusals),
        )
        error.code = errors[-1].code if errors else ""
    if isinstance(error, NoCapacity):
        error.refusals = tuple(refusals)
    return error


def _if_all(errors: Sequence[SkywardError]) -> SkywardError | None:
    """Return what the refusals mean together (`NoCapacity.if_all`), if all of them are of that kind."""
    meanings = [error.if_all if isinstance(error, NoCapacity) else None for error in errors]
    return meanings[-1] if meanings and None not in meanings else None


def own_mistake(errors: Sequence[SkywardError], least: int = SAME_TO_BE_OURS) -> BadRequest | None:
    """Return the error to raise if the last `least` refusals are the same and may be about the request
    (`NoCapacity.mistake`), else None.
    """
    last = errors[-least:]
    mistakes = {error.mistake if isinstance(error, NoCapacity) else "" for error in last}
    if not last or len(last) < least or len(mistakes) > 1 or "" in mistakes:
        return None
    return BadRequest(
        f"{len(last)} offers in stock were refused, so the request is wrong: {last[-1].without_advice}"
    ).coded(last[-1].code)


def _all_of_a_kind(message: str, errors: Sequence[SkywardError], refusals: int) -> SkywardError:
    """Return an error with this message, of the class that all these errors have, else NoCapacity."""
    last = errors[-1] if errors else None
    kinds = {type(error) for error in errors}
    if isinstance(last, BudgetExceeded) and len(kinds) == 1:
        return BudgetExceeded(message, last.account, last.left_usd)
    if last is None or len(errors) < refusals:
        return NoCapacity(message)
    kind = (
        type(last)
        if len(kinds) == 1
        else BadRequest
        if all(isinstance(error, BadRequest) for error in errors)
        else NoCapacity
    )
    return kind(message)


# Which offers are tried for one more node of an open pool, in order. Pure.
#
# The spot strategy decides as at the opening: the share of spot machines holds for the pool with the new node. So
# does the size: no machine has more chips than those of the pool, unless it costs no more. Machines of the type that
# the pool has come first, then the cheapest.


def offers_for_one_more(
    spec: PoolSpec, provider: Provider, present: Sequence[Offer], sold: Iterable[Offer]
) -> list[Offer]:
    """Return the offers for one more node, the best first; none if the strategy or the size allows none.

    `present` are the offers of the pool's nodes, the head's first; `sold` are the provider's that fit the spec. Those
    of other regions are left out.
    """
    head = present[0]
    fitting = (offer for offer in sold if offer.region == head.region and not _is_too_large(offer, spec, present))
    near = tuple(dict.fromkeys(fitting))
    kinds = _kinds(spec.spot, present, has_spot=any(offer.is_spot for offer in near))
    if not kinds:
        return []
    # the price of the pool with the new node is `within_hourly_limit`'s: these candidates are one node each
    free = spec.with_(spot=_only(kinds), max_hourly_cost=None, max_price_ratio=MOST_RATIO)
    found, _ = candidates(free, [ProviderOffers(provider, near)])
    types = {offer.instance_type for offer in present}
    return sorted(
        comparable(spec, present, (part.offer for candidate in found for part in candidate.parts)),
        key=lambda offer: (kinds.index(offer.is_spot), offer.instance_type not in types, offer.total_per_hour),
    )


def comparable(spec: PoolSpec, present: Iterable[Offer | Instance], offers: Iterable[Offer]) -> list[Offer]:
    """Return the offers that cost at most `max_price_ratio` times the dearest machine of the pool; all of them if the
    pool has `max_hourly_cost`, or its machines cost nothing.
    """
    dearest = max(map(on_demand_total, present), default=0.0)
    if not dearest or spec.max_hourly_cost is not None:
        return list(offers)
    return [offer for offer in offers if offer.total_per_hour <= spec.max_price_ratio * dearest * (1 + 1e-9)]


def within_hourly_limit(spec: PoolSpec, present: Sequence[Offer], offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers with which the pool costs no more than `max_hourly_cost`. Raises NoCapacity if there is none.

    `present` are the offers of the other nodes, also of those that are coming.
    """
    costs = sum(offer.total_per_hour for offer in present)
    good = [offer for offer in offers if spec.may_cost(costs + offer.total_per_hour)]
    if offers and not good:
        cheapest = min(offers, key=lambda offer: offer.total_per_hour)
        price = costs + cheapest.total_per_hour
        raise NoCapacity(
            f"with 1 x {cheapest.name} more the pool costs {usd(price)} per hour, and {above_hourly_limit(spec, price)}"
        )
    return good


def _is_too_large(offer: Offer, spec: PoolSpec, present: Sequence[Offer]) -> bool:
    """Return whether an offer has more chips than any machine of the pool, and costs more than the dearest.

    The opening leaves those out beside smaller ones; the smaller ones may not be listed any more.
    """
    if spec.first_accelerator is None:
        return False
    return offer.accelerators > max(its.accelerators for its in present) and offer.total_per_hour > max(
        its.total_per_hour for its in present
    )


def _kinds(strategy: spot.Strategy | None, present: Sequence[Offer], *, has_spot: bool) -> list[bool]:
    """Return whether the new node is a spot machine: one possibility, or two in their order."""
    try:
        _, spots = spot.split(strategy, len(present) + 1, spot_sold=has_spot)
    except BadRequest:
        return []
    is_spot = spots > sum(offer.is_spot for offer in present)
    if strategy is None or isinstance(strategy, spot.IfAvailable):
        return [True, False] if has_spot else [False]
    return [is_spot]


def _only(kinds: Sequence[bool]) -> spot.Strategy:
    """Return the strategy whose candidates are of these kinds."""
    if len(kinds) > 1:
        return spot.IfAvailable()
    return spot.Always() if kinds[0] else spot.Never()
