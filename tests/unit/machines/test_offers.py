"""Which offers match requirements, in which order they are tried, and what is said if none matches."""

from __future__ import annotations

from typing import Any

import pytest

from skyward_core.accelerators import Accelerator
from skyward_core.errors import NoCapacity
from skyward_core.machines.offers import (
    MOST_REASONS,
    Extra,
    Offer,
    Requirements,
    by_month,
    describe,
    matches,
    rank,
    select_instance,
    total_of,
    why_none,
)
from tests.offers import offer

H100 = Accelerator("H100", 80)


def gpus(kind: str = "g", price: float = 1.0, **fields: Any) -> Offer:
    return offer(
        kind, price, **{"accelerator": "H100", "accelerators": 1, "accelerator_memory_gb": 80, "vcpus": 8, **fields}
    )


@pytest.mark.parametrize(
    ("sold", "want", "reason"),
    [
        (offer("a"), {"instance_type": "a"}, None),
        (offer("a"), {"instance_type": "b"}, "is no b"),
        (offer(vcpus=4), {"vcpus": 4}, None),
        (offer(vcpus=3.5), {"vcpus": 4}, "has 3.5 CPUs"),
        (offer(memory_gb=16), {"memory_gb": 16}, None),
        (offer(memory_gb=15.96), {"memory_gb": 16}, "has 16.0 GB of memory"),
        (offer(price=2.0), {"max_price_per_hour": 2.0}, None),
        (offer(price=2.01), {"max_price_per_hour": 2.0}, "costs $2.01 an hour"),
        (gpus(), {"accelerator": H100}, None),
        (gpus(accelerators=8), {"accelerator": H100}, None),
        (offer(), {"accelerator": H100}, "has no accelerator"),
        (gpus(accelerator="A100"), {"accelerator": H100}, "has A100"),
        (gpus(accelerators=2), {"accelerator": Accelerator("H100", 80, count=2)}, None),
        (gpus(accelerators=2), {"accelerator": Accelerator("H100", 80, count=4)}, "has 2 of them"),
        (gpus(accelerator_memory_gb=None), {"accelerator": H100}, None),
        (gpus(accelerator_memory_gb=74.0), {"accelerator": H100}, None),
        (gpus(accelerator_memory_gb=73.9), {"accelerator": H100}, "has them with 73.9 GB"),
        (gpus(accelerator_memory_gb=86.0), {"accelerator": H100}, None),
        (gpus(accelerator_memory_gb=94.0), {"accelerator": H100}, "has them with 94 GB"),
    ],
)
def test_an_offer_matches_or_the_reason_says_what_it_lacks(
    sold: Offer, want: dict[str, Any], reason: str | None
) -> None:
    """As much as is required is enough, and a price of the limit is not over it. Chips may report up to 7.5 % more or
    less memory than their data sheet.
    """
    assert matches(sold, Requirements(**want)) == reason


def test_the_cheapest_offer_is_first_and_of_equal_prices_the_smallest() -> None:
    """CPUs decide before memory. The extras of a machine count in its price."""
    disk = Extra(name="disk", usd_per_hour=0.5)
    offers = [
        offer("more memory", 2.0, memory_gb=32),
        offer("more CPUs", 2.0, vcpus=8, memory_gb=8),
        offer("small", 2.0),
        offer("cheap but for its disk", 1.6, extras_per_hour=(disk,)),
        offer("cheapest", 1.9, vcpus=64),
    ]
    assert [one.instance_type for one in rank(offers, Requirements())] == [
        "cheapest",
        "small",
        "more memory",
        "more CPUs",
        "cheap but for its disk",
    ]


def test_of_machines_of_one_size_the_cheaper_is_selected() -> None:
    """Less memory and fewer CPUs decide before the price."""
    offers = [offer("dear", 2.0), offer("cheap", 1.0), offer("large", 0.1, memory_gb=32), offer("fast", 0.1, vcpus=8)]
    assert select_instance(offers).instance_type == "cheap"
    assert select_instance(offers, memory="20GB").instance_type == "large"


def test_the_reasons_begin_with_the_offers_of_the_accelerator() -> None:
    """Among those the cheapest is first. All are counted, and only the first are named."""
    want = Requirements(accelerator=Accelerator("H100", 80, count=4))
    others = [offer(f"t{number:02}", 1.0 + number) for number in range(MOST_REASONS)]
    reasons = why_none([*others, gpus("dear", 9.0), gpus("cheap", 8.0)], want).split("; ")
    assert reasons[:3] == [
        "local/r-1 cheap has 1 of them",
        "local/r-1 dear has 1 of them",
        "local/r-1 t00 has no accelerator",
    ]
    assert len(reasons) == MOST_REASONS + 1
    assert reasons[-1] == "and 2 others"
    assert "others" not in why_none(others, want)
    assert why_none([], Requirements()) == "there are no offers at all"


def test_without_any_offer_of_the_accelerator_the_reasons_say_where_to_get_it() -> None:
    """The clouds that rent it, and the simulation if this computer was asked."""
    want = Requirements(accelerator=H100)
    here = why_none([offer()], want)
    assert "H100 is rented by" in here
    assert 'Local(simulate="H100")' in here
    elsewhere = why_none([offer(provider="aws")], want)
    assert "H100 is rented by" in elsewhere
    assert "simulate" not in elsewhere
    assert "rented by" not in why_none([gpus()], want)
    assert "rented by" not in why_none([offer()], Requirements(vcpus=99))


def test_no_match_is_no_capacity_with_what_was_wanted() -> None:
    """The message has each requirement, and why each offer does not match."""
    want = Requirements(
        accelerator=H100, instance_type="p5", vcpus=64, memory_gb=512, max_price_per_hour=9.5, architecture="x86_64"
    )
    assert describe(want) == (f"machine 'p5', {H100}, x86_64, 64 CPUs, 512 GB of memory, at most $9.5 an hour")
    assert describe(Requirements()) == "a machine"
    with pytest.raises(NoCapacity, match="no provider offers 64 CPUs: local/r-1 a has 4 CPUs"):
        rank([offer()], Requirements(vcpus=64))


def test_a_price_by_the_month_is_counted_for_a_month_of_thirty_days() -> None:
    """An hour then costs most, so that no month costs more than its price."""
    disk = by_month("disk", 72.0, "a price page", "2026-11-22")
    assert disk == Extra(name="disk", usd_per_hour=0.1, source="a price page", checked="2026-11-22")
    assert by_month("address", 1.0, "", "").usd_per_hour == 0.001389
    assert total_of([disk, disk]) == 0.2
    assert total_of([]) == 0.0


def test_a_spot_offer_says_so_in_its_name() -> None:
    """Refusals and reasons name offers."""
    assert (offer().name, offer(is_spot=True).name) == ("local/r-1 a", "local/r-1 a spot")
