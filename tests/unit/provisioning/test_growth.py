"""Which offers are tried for one more node of an open pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import skyward_core as sky
from skyward_core.machines import spot
from skyward_core.machines.offers import Offer
from skyward_core.provisioning import growth
from tests.offers import offer

HEAD, CHEAP, SPOT = offer("a", 2.0), offer("b", 1.0), offer("a", 0.5, is_spot=True)
ELSEWHERE = offer("a", 0.1, region="r-2")


def offers_for_one_more(
    strategy: spot.Strategy | None, present: Sequence[Offer], sold: Sequence[Offer], accelerator: str | None = None
) -> list[Offer]:
    options = {} if strategy is None else {"spot": strategy}
    spec = sky.PoolSpec.of(nodes=(1, 9), accelerator=accelerator, **options)
    return growth.offers_for_one_more(spec, sky.Local(), present, sold)


def test_the_type_that_the_pool_has_comes_first_and_then_the_cheapest() -> None:
    """Only in the region of the head: nodes must reach each other."""
    sold = [offer("c", 1.5), CHEAP, ELSEWHERE, HEAD]
    assert offers_for_one_more(spot.Never(), [HEAD], sold) == [HEAD, CHEAP, offer("c", 1.5)]


def test_each_offer_is_tried_once() -> None:
    """Those of the opening are given once for each node."""
    assert offers_for_one_more(None, [HEAD, HEAD], [HEAD, HEAD, CHEAP, HEAD]) == [HEAD, CHEAP]


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


# ── the size ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def chips(count: int, price: float, *, is_spot: bool = False) -> Offer:
    return offer(f"{count}x", price, is_spot=is_spot, accelerator="H100", accelerators=count)


ONE, TWO, EIGHT = chips(1, 2.0), chips(2, 4.0), chips(8, 16.0)


@pytest.mark.parametrize("strategy", [None, spot.IfAvailable(), spot.Never()])
def test_no_machine_has_more_chips_than_those_of_the_pool(strategy: spot.Strategy | None) -> None:
    """Whether a small one is listed or not. One that costs no more may have more."""
    assert offers_for_one_more(strategy, [ONE], [EIGHT, ONE, TWO], "H100") == [ONE]
    assert offers_for_one_more(strategy, [ONE], [EIGHT], "H100") == []
    assert offers_for_one_more(strategy, [ONE], [chips(8, 2.0), ONE], "H100") == [ONE, chips(8, 2.0)]
    assert offers_for_one_more(strategy, [ONE], [chips(8, 2.0)], "H100") == [chips(8, 2.0)]


def test_a_pool_of_large_machines_gets_small_ones_if_there_are_any() -> None:
    """As at the opening: the large ones were the only ones then."""
    assert offers_for_one_more(None, [EIGHT], [EIGHT, ONE], "H100") == [ONE]
    assert offers_for_one_more(None, [EIGHT], [EIGHT], "H100") == [EIGHT]


def test_the_share_of_spot_machines_holds_for_machines_of_one_size() -> None:
    """A large spot machine is compared with small spot machines, although a pool of one has none on demand."""
    half, large = spot.Percent(0.5), chips(8, 1.5, is_spot=True)
    small = chips(1, 0.5, is_spot=True)
    assert offers_for_one_more(half, [ONE], [ONE, small, large], "H100") == [small]
    assert offers_for_one_more(half, [small], [ONE, small, large], "H100") == [ONE]


def test_without_chips_machines_of_all_sizes_are_alike() -> None:
    """The opening would take them too."""
    large = HEAD.model_copy(update={"instance_type": "l", "vcpus": 64, "price_per_hour": 9.0, "accelerators": 8})
    assert offers_for_one_more(None, [HEAD], [large, HEAD]) == [HEAD, large]
