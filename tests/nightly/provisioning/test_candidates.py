"""Candidates for a pool's machines: their order, those that are delayed, and the error if all refuse."""

from __future__ import annotations

import skyward_core as sky
from skyward_core.provisioning import candidates as placing
from skyward_core.provisioning.candidates import (
    ProviderOffers,
    candidates,
)
from tests.offers import offer
from tests.unit.provisioning.test_candidates import (
    CHEAP,
)


def test_only_the_cheapest_of_many_offers_are_ranked() -> None:
    """Of 50,000 offers it returns the number that a pool may try, the cheapest first. The benchmarks measure the time."""
    offers = tuple(offer(f"t{n % 500}", 1 + (n * 7919) % 50_000 / 1000, region=f"r-{n // 500}") for n in range(50_000))
    found, _ = candidates(sky.PoolSpec.of(nodes=2, spot="never"), [ProviderOffers(CHEAP, offers)])
    assert len(found) == placing.MOST_CANDIDATES
    assert [one.price_per_hour for one in found] == [
        2 * price for price in sorted(offer.price_per_hour for offer in offers)[: len(found)]
    ]
