"""Which offers are tried for one more node of an open pool, in order. Pure.

The spot strategy decides as at the opening: the share of spot machines holds for the pool with the new node. So does
the size: no machine has more chips than those of the pool, unless it costs no more. Machines of the type that the pool
has come first, then the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyward_core.errors import BadRequest, NoCapacity
from skyward_core.events.narrator import usd
from skyward_core.machines import spot
from skyward_core.machines.offers import Offer
from skyward_core.providers.base import Provider
from skyward_core.provisioning.candidates import ProviderOffers, above_hourly_limit, candidates
from skyward_core.spec import PoolSpec

ENOUGH_SECONDS = 600.0
"""A pool grows only if its money lasts for so many seconds with the new node, because each node shortens the life of
all."""


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
    found, _ = candidates(spec.with_(spot=_only(kinds), max_hourly_cost=None), [ProviderOffers(provider, near)])
    types = {offer.instance_type for offer in present}
    return sorted(
        (part.offer for candidate in found for part in candidate.parts),
        key=lambda offer: (kinds.index(offer.is_spot), offer.instance_type not in types, offer.total_per_hour),
    )


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
