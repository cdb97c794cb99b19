"""`ComputePool.quote`: what a pool would rent, and for how much."""

import pytest

import skyward_core as sky
from skyward_core.machines.offers import Offer, Requirements
from tests.offers import offer


class NeverLaunched(sky.Local):
    def launch(self, *args: object) -> list[sky.Instance]:
        raise AssertionError(f"launched {args}")


def test_a_quote_names_the_ways_the_price_and_the_ceiling_and_rents_nothing() -> None:
    """`max_cost` limits it, or the lifetime at the dearest price; without both nothing does."""
    local = NeverLaunched(price_per_hour=1.2)
    quoted = sky.ComputePool(provider=local, nodes=2, max_cost=3.0, budget="team-a").quote()
    assert [one.price_per_hour for one in quoted.candidates] == [pytest.approx(2.4)]
    assert (quoted.price_per_hour, quoted.ceiling_usd, quoted.account) == (pytest.approx(2.4), 3.0, "team-a")
    assert "2 x local/" in str(quoted)
    assert "at $2.40 per hour; at most $3.00, paid by account 'team-a'" in str(quoted)
    assert sky.ComputePool(provider=local, max_lifetime=1800).quote().ceiling_usd == pytest.approx(0.6)
    assert sky.ComputePool(provider=local).quote().ceiling_usd is None


def test_the_hourly_limit_holds_in_quotes() -> None:
    """Candidates above it are none. It limits the cost of a pool that grows, with a lifetime."""
    local = NeverLaunched(price_per_hour=1.2)
    refused = sky.ComputePool(provider=local, nodes=2, max_hourly_cost=2).quote()
    assert refused.candidates == ()
    assert "costs $2.40 per hour (2 x local/local local), and max_hourly_cost=2 is less" in str(refused)
    grows = sky.ComputePool(provider=local, nodes=(1, 8), max_hourly_cost=6, max_lifetime=1800).quote()
    assert (grows.price_per_hour, grows.ceiling_usd) == (pytest.approx(1.2), pytest.approx(3.0))
    fixed = sky.ComputePool(provider=local, max_hourly_cost=6, max_lifetime=1800).quote()
    assert fixed.ceiling_usd == pytest.approx(0.6)


class Catalog(sky.Local):
    """Sells seven types, the dearest at seven times the price of the cheapest."""

    def offers(self, want: Requirements) -> list[Offer]:
        return [offer(f"type-{price}", float(price)) for price in range(1, 8)]


def test_a_quote_shows_the_dearest_candidate_that_could_be_taken() -> None:
    """What costs more than four times the first one is none; what is not shown may be the dearest."""
    quoted = sky.ComputePool(provider=Catalog(), max_lifetime=3600).quote()
    assert [candidate.price_per_hour for candidate in quoted.candidates] == [1.0, 2.0, 3.0, 4.0]
    assert quoted.ceiling_usd == 4.0
    quoted = sky.ComputePool(provider=Catalog(), max_price_ratio=10).quote()
    assert "and 2 more, the dearest 1 x local/r-1 type-7 at $7.00 per hour; no limit of the cost" in str(quoted)


def test_a_quote_without_a_way_says_why() -> None:
    quoted = sky.ComputePool(provider=sky.Local(), cpu=100_000).quote()
    assert (quoted.candidates, quoted.price_per_hour) == ((), None)
    assert str(quoted).startswith("nothing to rent: ")
    assert quoted.refusals


def test_more_nodes_than_there_are_hosts_are_refused_at_once() -> None:
    """A pool that grows may begin with fewer; a second provider may have them."""
    few = sky.Hosts("gpu-1", "gpu-2")
    with pytest.raises(sky.BadRequest, match="nodes=3, and hosts has 2: write nodes=2, or name 1 more"):
        sky.ComputePool(provider=few, nodes=3)
    with pytest.raises(sky.BadRequest, match="nodes=3, and hosts has 2"):
        sky.ComputePool(provider=few, nodes=(3, 4))
    assert sky.ComputePool(provider=few, nodes=(1, 4)).spec.most_nodes == 4
    assert sky.ComputePool(provider=[few, sky.Local()], nodes=3).spec.nodes == 3
