"""Which offers are tried for one more node of an open pool, in order. Pure.

The spot strategy decides as at the opening: the share of spot machines holds for the pool with the new node. Machines
of the type that the pool has come first, then the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skyward_core.errors import BadRequest
from skyward_core.machines import spot
from skyward_core.machines.offers import Offer

ENOUGH_SECONDS = 600.0
"""A pool grows only while its money lasts for so long with the new node: each node makes the life of all shorter."""


def offers_for_one_more(strategy: spot.Strategy | None, present: Sequence[Offer], sold: Iterable[Offer]) -> list[Offer]:
    """Return the offers for one more node, the best first; none if the strategy allows none.

    `present` are the offers of the pool's nodes, the head's first; `sold` may have offers of other regions, which are
    left out.
    """
    head = present[0]
    near = [offer for offer in sold if offer.region == head.region]
    kinds = _kinds(strategy, present, has_spot=any(offer.is_spot for offer in near))
    types = {offer.instance_type for offer in present}
    fitting = [offer for offer in near if offer.is_spot in kinds]
    return sorted(
        fitting,
        key=lambda offer: (kinds.index(offer.is_spot), offer.instance_type not in types, offer.total_per_hour),
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
