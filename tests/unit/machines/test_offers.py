"""Which offers match requirements, in which order they are tried, and what is said if none matches."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import Accelerator
from skyward_core.errors import NoCapacity
from skyward_core.image.image import runtime_pins
from skyward_core.machines.offers import (
    Extra,
    Offer,
    Requirements,
    architecture_beside,
    by_month,
    describe,
    matches,
    total_of,
)
from skyward_core.providers.base import MOST_REASONS, rank, select_instance, why_none
from skyward_core.provisioning.candidates import ProviderOffers, candidates
from tests.offers import offer

H100 = Accelerator("H100", 80)


def gpus(kind: str = "g", price: float = 1.0, **fields: Any) -> Offer:
    return offer(
        kind, price, **{"accelerator": "H100", "accelerators": 1, "accelerator_memory_gb": 80, "vcpus": 8, **fields}
    )


def types(offers: list[Offer]) -> list[str]:
    return [one.instance_type for one in offers]


SXM = {"accelerator": Accelerator.NVIDIA.H100(form_factor="SXM")}


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
        (gpus(form_factor="SXM"), SXM, None),
        (gpus(form_factor="PCIe"), SXM, "has them as PCIe"),
        (gpus(form_factor=None), SXM, "does not report their form factor"),
        (offer(architecture="arm64"), {"architecture": "arm64"}, None),
        (offer(architecture="arm64"), {"architecture": "x86_64"}, "is arm64"),
        (offer(), {"architecture": "arm64"}, "does not report its architecture"),
    ],
)
def test_an_offer_matches_or_the_reason_says_what_it_lacks(
    sold: Offer, want: dict[str, Any], reason: str | None
) -> None:
    """As much as is required is enough. Chips may report up to 7.5 % more or less memory than their data sheet."""
    assert matches(sold, Requirements(**want)) == reason


def test_the_cheapest_offer_is_first_and_of_equal_prices_the_smallest() -> None:
    """CPUs decide before memory."""
    offers = [
        offer("more memory", 2.0, memory_gb=32),
        offer("more CPUs", 2.0, vcpus=8, memory_gb=8),
        offer("small", 2.0),
        offer("cheapest", 1.9, vcpus=64),
    ]
    assert types(rank(offers, Requirements())) == ["cheapest", "small", "more memory", "more CPUs"]


def test_the_smallest_instance_is_selected() -> None:
    """By accelerators, CPUs, memory, and then the price. NoCapacity has the reasons if no offer fits."""
    offers = [
        gpus("big", 1.0, vcpus=64, memory_gb=256, accelerators=8),
        gpus("right", 9.0, vcpus=48, memory_gb=128),
        gpus("small", 0.5, vcpus=16, memory_gb=128),
        offer("none", 0.1, vcpus=64, memory_gb=256),
        offer("dear", 2.0),
        offer("cheap", 1.0),
    ]
    assert sky.select_instance(offers, accelerator="H100", cpu=32, memory="128GB").instance_type == "right"
    assert sky.select_instance(offers, cpu=50).instance_type == "none"
    assert select_instance(offers).instance_type == "cheap"
    with pytest.raises(NoCapacity, match="small has 16 CPUs"):
        sky.select_instance(offers, accelerator="H100", cpu=100)


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
    assert (len(reasons), reasons[-1]) == (MOST_REASONS + 1, "and 2 others")
    assert "others" not in why_none(others, want)
    assert why_none([], Requirements()) == "there are no offers at all"


def test_without_any_offer_of_the_accelerator_the_reasons_say_where_to_get_it() -> None:
    """The clouds that rent it, and the simulation if this computer was asked."""
    want = Requirements(accelerator=H100)
    here, elsewhere = why_none([offer()], want), why_none([offer(provider="aws")], want)
    assert "H100 is rented by" in here
    assert "H100 is rented by" in elsewhere
    assert ('Local(simulate="H100")' in here, "simulate" in elsewhere) == (True, False)
    assert "rented by" not in why_none([gpus()], want)
    assert "rented by" not in why_none([offer()], Requirements(vcpus=99))


def test_a_refusal_of_aws_says_which_type_has_which_a100() -> None:
    sold = [offer("p4d.24xlarge", provider="aws", accelerator="A100", accelerators=8, accelerator_memory_gb=40.0)]
    words = why_none(sold, Requirements(accelerator=Accelerator("A100")))
    assert "p4d.24xlarge has them with 40 GB" in words
    assert 'On AWS A100 80GB is a p4de.24xlarge; a p4d.24xlarge has A100 40GB: write "A100-40GB"' in words
    elsewhere = [one.model_copy(update={"provider": "runpod"}) for one in sold]
    assert "AWS A100" not in why_none(elsewhere, Requirements(accelerator=Accelerator("A100")))


def test_no_match_is_no_capacity_with_what_was_wanted() -> None:
    """The message has each requirement, and why each offer does not match. A spot offer says so in its name."""
    want = Requirements(
        accelerator=H100, instance_type="p5", vcpus=64, memory_gb=512, max_price_per_hour=9.5, architecture="x86_64"
    )
    assert describe(want) == f"machine 'p5', {H100}, x86_64, 64 CPUs, 512 GB of memory, at most $9.5 an hour"
    assert describe(Requirements()) == "a machine"
    with pytest.raises(NoCapacity, match="no provider offers 64 CPUs: local/r-1 a spot has 4 CPUs"):
        rank([offer(is_spot=True)], Requirements(vcpus=64))


def test_a_price_by_the_month_is_counted_for_a_month_of_thirty_days() -> None:
    """An hour then costs most, so that no month costs more than its price."""
    disk = by_month("disk", 72.0, "a price page", "2026-11-22")
    assert disk == Extra(name="disk", usd_per_hour=0.1, source="a price page", checked="2026-11-22")
    assert by_month("address", 1.0, "", "").usd_per_hour == 0.001389
    assert (total_of([disk, disk]), total_of([])) == (0.2, 0.0)


# ── the architecture ─────────────────────────────────────────────────────────────────────────────────────────────────

T4G, T3 = offer("t4g.small", 0.0168, architecture="arm64"), offer("t3.small", 0.0208, architecture="x86_64")


@pytest.mark.parametrize(
    ("requested", "kept"),
    [("arm64", "arm64"), ("aarch64", "arm64"), ("amd64", "x86_64"), ("x86_64", "x86_64"), (None, None)],
)
def test_a_pool_accepts_all_names_of_an_architecture(requested: str | None, kept: str | None) -> None:
    """It is in the spec, also after JSON, and decides which machines are candidates. By default any will do."""
    spec = sky.PoolSpec.of(architecture=requested) if requested else sky.PoolSpec()
    assert sky.PoolSpec.model_validate_json(spec.model_dump_json()) == spec
    found, _ = candidates(spec, [ProviderOffers(sky.Local(), (T3, T4G))])
    expected = {"arm64": [T4G], "x86_64": [T3], None: [T4G, T3]}[kept]
    assert [part.offer for one in found for part in one.parts] == expected


def test_the_runtime_pins_have_wheels_for_both_architectures() -> None:
    """Each has a wheel for arm64, for both versions of Python (`uv.lock`)."""
    locked = {
        package["name"]: package
        for package in tomllib.loads((Path(__file__).parents[3] / "uv.lock").read_text())["package"]
    }
    needed, found = [pin.partition("==")[0] for pin in runtime_pins()], set[str]()
    while needed:
        name = needed.pop()
        if name not in found:
            found.add(name)
            needed += [one["name"] for one in locked[name].get("dependencies", []) if "marker" not in one]
    for name in sorted(found):
        files = [wheel["url"].rpartition("/")[2] for wheel in locked[name]["wheels"]]
        arm = [file for file in files if "linux" in file and "aarch64" in file]
        for version in ("cp312", "cp313"):
            fits = any("-none-any" in file for file in files) or any(version in file or "abi3" in file for file in arm)
            assert fits, f"{name} has no wheel for {version} on aarch64"
    assert len(found) > 10


@pytest.mark.parametrize(
    ("accelerator", "architecture"), [("GH200", "arm64"), ("GB200", "arm64"), ("H100", "x86_64"), (None, "x86_64")]
)
def test_a_cloud_that_reports_no_processor_has_arm64_beside_grace_chips_only(
    accelerator: str | None, architecture: str
) -> None:
    assert architecture_beside(accelerator) == architecture
