"""Which offers are tried for one more node of an open pool."""

from __future__ import annotations

from skyward_core.machines import spot
from skyward_core.machines.offers import Offer
from skyward_core.provisioning.growth import offers_for_one_more


def offer(name: str, price: float = 1.0, *, is_spot: bool = False, region: str = "here") -> Offer:
    return Offer(
        provider="local",
        region=region,
        instance_type=name,
        is_spot=is_spot,
        price_per_hour=price,
        vcpus=4,
        memory_gb=16,
    )


HEAD, CHEAP, SPOT = offer("a", 2.0), offer("b", 1.0), offer("a", 0.5, is_spot=True)
ELSEWHERE = offer("a", 0.1, region="there")


def test_the_type_that_the_pool_has_comes_first_and_then_the_cheapest() -> None:
    """Only in the region of the head: nodes must reach each other."""
    sold = [offer("c", 1.5), CHEAP, ELSEWHERE, HEAD]
    assert offers_for_one_more(spot.Never(), [HEAD], sold) == [HEAD, CHEAP, offer("c", 1.5)]


def test_without_a_strategy_a_spot_machine_is_tried_before_one_on_demand() -> None:
    for strategy in (None, spot.IfAvailable()):
        assert offers_for_one_more(strategy, [HEAD], [HEAD, SPOT]) == [SPOT, HEAD]
        assert offers_for_one_more(strategy, [HEAD], [HEAD]) == [HEAD]


def test_a_strategy_that_allows_no_offer_gets_none() -> None:
    assert offers_for_one_more(spot.Always(), [SPOT], [HEAD]) == []
    assert offers_for_one_more(spot.Always(), [SPOT], [HEAD, SPOT]) == [SPOT]
    assert offers_for_one_more(spot.Never(), [HEAD], [HEAD, SPOT]) == [HEAD]


def test_the_share_of_spot_machines_holds_with_the_new_node() -> None:
    """Half of four nodes are spot machines; the fifth makes it three of five, rounded up."""
    half = spot.Percent(0.5)
    assert offers_for_one_more(half, [HEAD, HEAD, SPOT], [HEAD, SPOT]) == [SPOT]
    assert offers_for_one_more(half, [HEAD, SPOT, SPOT], [HEAD, SPOT]) == [HEAD]
    assert offers_for_one_more(half, [HEAD, HEAD, SPOT, SPOT], [HEAD, SPOT]) == [SPOT]
