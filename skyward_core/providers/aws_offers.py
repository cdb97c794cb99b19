"""Offers of EC2: types, on-demand prices, and spot prices by zone. "Fact sheet" is the one of 2026-11-20."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from skyward_core.accelerators.catalog import find
from skyward_core.errors import BadRequest, SkywardError
from skyward_core.machines.offers import Extra, Offer, by_month
from skyward_core.providers.aws_account import PAGE, AwsAccount, each, number
from skyward_core.shown_text import visible_logger

GB = 1e9
MIB = 1024**2
MOST_PRICED_ONE_BY_ONE = 16
NO_SPOT_POOL = 0.95
"""A spot price at or above this share of the on-demand price means hardly any spot capacity (fact sheet, 1.2)."""

MOST_OTHER_TYPES = 8
"""The most types that may replace another one: a fleet names each of them in each zone."""

OTHER_DEVICES = ("FpgaInfo", "MediaAcceleratorInfo", "InferenceAcceleratorInfo")
UNLISTED_CHIPS: Mapping[str, tuple[str, int]] = {"trn2u.48xlarge": ("Trainium2", 16)}
"""Chips that DescribeInstanceTypes leaves out (fact sheet, 1.2)."""

SXM = ("V100", "A100", "H100", "H200")
"""Chips that EC2 has as SXM boards, in its families p3 to p5 (fact sheet, section 6). No API reports it."""


WITHOUT_IMAGE: Mapping[str, str] = {
    "V100": "the driver of AWS's images, branch 595, no longer knows Volta",
    "Inferentia1": "AWS's Neuron images no longer support it",
    "Radeon Pro V520": "AWS keeps no image with AMD's driver",
}

GP3_USD_PER_GB_MONTH = 0.08
LEAST_CHIP_DISK_GB = 100
"""About the least root disk of AWS's images with drivers; `disk_gb` cannot make it smaller (fact sheet, 1.7)."""
PUBLIC_IPV4 = Extra(name="public IPv4", usd_per_hour=0.005, source="AWS's price page of VPC", checked="2026-11-22")

type Prices = dict[tuple[str, str], float]
"""Present spot prices, in USD per hour, by type and zone."""

log = visible_logger(__name__)


def machine_of(kind: Mapping[str, Any], region: str) -> tuple[Offer, frozenset[str]] | None:
    """Return a type of DescribeInstanceTypes as an offer without a price, and its usage classes.

    Returns None for chips that the catalogue does not know, and for parts of a chip.
    """
    chip = _chip(kind)
    if chip is None:
        return None
    accelerator, accelerators, accelerator_memory_gb = chip
    offer = Offer(
        provider="aws",
        instance_type=kind["InstanceType"],
        region=region,
        price_per_hour=0.0,
        vcpus=kind["VCpuInfo"]["DefaultVCpus"],
        memory_gb=kind["MemoryInfo"]["SizeInMiB"] * MIB / GB,
        accelerator=accelerator,
        accelerators=accelerators,
        accelerator_memory_gb=accelerator_memory_gb,
        architecture="arm64" if "arm64" in kind["ProcessorInfo"]["SupportedArchitectures"] else "x86_64",
        form_factor="SXM" if kind["InstanceType"].startswith("p") and accelerator in SXM else None,
    )
    return offer, frozenset(kind.get("SupportedUsageClasses", []))


def _chip(kind: Mapping[str, Any]) -> tuple[str | None, int, float | None] | None:
    """Return name, number and memory of a type's chips.

    The name is None for a type without chips. The result is None for chips that cannot be offered. The memory is the
    catalogue's size that is nearest to AWS's figure: 22888 MiB are the L4's 24 GB, p4d and p4de are both "A100", and
    the 524288 MiB of a Trainium2 are wrong (fact sheet, 1.2).
    """
    devices = [*(kind.get("GpuInfo") or {}).get("Gpus", []), *(kind.get("NeuronInfo") or {}).get("NeuronDevices", [])]
    name, count = UNLISTED_CHIPS.get(kind["InstanceType"], ("", 0))
    if devices:
        name, count = str(devices[0]["Name"]), int(devices[0].get("Count") or 0)
    elif not count:
        return None if any(kind.get(other) for other in OTHER_DEVICES) else (None, 0, None)
    try:
        chip = find(name)
    except BadRequest:
        return None
    reported_gb = (devices[0].get("MemoryInfo", {}).get("SizeInMiB", 0) if devices else 0) * MIB / GB
    return (chip.name, count, min(chip.memory_gb, key=lambda size: abs(size - reported_gb))) if count else None


def sold_as(offer: Offer, classes: frozenset[str], price: float | None, spot: Collection[float]) -> list[Offer]:
    """Return the offers of one type: on demand if it has such a price, and spot at each of these prices (`spread`)."""
    sold: list[Offer] = []
    if price is not None and "on-demand" in classes:
        sold.append(offer.model_copy(update={"price_per_hour": price, "on_demand_price_per_hour": price}))
    for cost in sorted(spot):
        if price is not None and cost >= NO_SPOT_POOL * price:
            log.debug(
                "spot %s costs $%g of $%g in %s: little capacity is left",
                offer.instance_type,
                cost,
                price,
                offer.region,
            )
        dear = price if price is not None and price >= cost else None  # an estimate from another region may be too low
        sold.append(
            offer.model_copy(update={"is_spot": True, "price_per_hour": cost, "on_demand_price_per_hour": dear})
        )
    return sold


def billed_beside(disk_gb: float, *, has_chips: bool, is_public: bool) -> tuple[Extra, ...]:
    """Return what is billed beside a machine: its disk and its public address.

    Prices are those of us-east-1; in other regions disks cost up to twice as much. Traffic is left out because its
    amount is unknown, and kept images because they outlive machines.
    """
    disk_gb = max(disk_gb, LEAST_CHIP_DISK_GB) if has_chips else disk_gb
    disk = by_month(
        "disk",
        disk_gb * GP3_USD_PER_GB_MONTH,
        "AWS's price page of EBS: gp3 in us-east-1, $0.08 per GB and month",
        "2026-11-22",
    )
    return (disk, PUBLIC_IPV4) if is_public else (disk,)


def spread(prices: Iterable[float], share: float) -> list[float]:
    """Group the spot prices of one type: prices within a share above the cheapest one become the highest of them.

    >>> spread([0.31, 0.2, 0.22, 0.3], 0.1)
    [0.22, 0.31]
    """
    sold: list[float] = []
    cheapest = 0.0
    for price in sorted(set(prices)):
        if sold and price <= cheapest * (1 + share):
            sold[-1] = price
        else:
            sold.append(price)
            cheapest = price
    return sold


def with_others(
    sold: Sequence[Offer], spot: Mapping[str, Collection[float]], alike: Mapping[str, Hashable]
) -> list[Offer]:
    """Give each spot offer the cheapest equivalent types that cost at most its price.

    All offers of `sold` match the requirements; `spot` has the prices of each type. Equivalent types have the same
    chips and the same value in `alike`: machines of one pool must fit together and start from the same image.
    """

    def equivalence(offer: Offer) -> Hashable:
        return (
            offer.region,
            offer.accelerator,
            offer.accelerators,
            offer.accelerator_memory_gb,
            offer.form_factor,
            alike.get(offer.instance_type),
        )

    types: dict[Hashable, dict[str, float]] = {}
    for offer in sold:
        if offer.is_spot:
            types.setdefault(equivalence(offer), {})[offer.instance_type] = min(spot[offer.instance_type])
    cheapest = {
        key: sorted(some, key=lambda name: (some[name], name))[: MOST_OTHER_TYPES + 1] for key, some in types.items()
    }

    def widened(offer: Offer) -> Offer:
        key = equivalence(offer)
        others = [
            name for name in cheapest[key] if name != offer.instance_type and types[key][name] <= offer.price_per_hour
        ]
        return offer.model_copy(update={"or_types": tuple(others[:MOST_OTHER_TYPES])}) if others else offer

    return [widened(offer) if offer.is_spot else offer for offer in sold]


def prices_of(account: AwsAccount, region: str, types: Sequence[str]) -> dict[str, float]:
    """Return on-demand prices, in USD per hour, from AWS's price list; from our table if the list cannot be read."""
    table = {name: PRICES[name] for name in types if name in PRICES}
    if not types:
        return table
    few = len(types) <= MOST_PRICED_ONE_BY_ONE
    try:
        products = (
            each(types, lambda name: _products(account, region, instanceType=name))
            if few
            else [_products(account, region)]
        )
    except SkywardError as error:
        log.info("AWS's price list cannot be read, our own table of %s is used: %s", REGION, error)
        return table
    return {name: price for some in products for item in some for name, price in _listed(json.loads(item))}


def _products(account: AwsAccount, region: str, **conditions: str) -> list[str]:
    # locations have other names than regions, but for `regionCode`
    wanted = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        **conditions,
    }
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    return account.pages("us-east-1", "pricing", "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters)


def _listed(item: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield type and price of a product that is sold by the hour in a region.

    Local Zones, which cost more, and Capacity Blocks are separate products, and are left out.
    """
    attributes = item["product"]["attributes"]
    if (
        attributes.get("locationType", "AWS Region") != "AWS Region"
        or attributes.get("marketoption", "OnDemand") != "OnDemand"
    ):
        return
    for term in item.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            if (price := number(dimension["pricePerUnit"].get("USD"))) and dimension.get("unit", "Hrs") == "Hrs":
                yield attributes["instanceType"], price


def spot_prices(account: AwsAccount, region: str, types: Sequence[str]) -> Prices:
    """Return present spot prices, in USD per hour, by type and zone, without Local Zones and similar zones."""
    chunks = [types[start : start + PAGE] for start in range(0, len(types), PAGE)]

    def ask(chunk: Sequence[str]) -> list[dict[str, Any]]:
        return account.pages(
            region,
            "ec2",
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=list(chunk),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),
        )

    found: dict[tuple[str, str], tuple[datetime, float]] = {}
    for entry in (entry for entries in each(chunks, ask) for entry in entries):
        place, price = (entry["InstanceType"], entry["AvailabilityZone"]), number(entry["SpotPrice"])
        is_usual = re.fullmatch(rf"{re.escape(region)}[a-z]", entry["AvailabilityZone"])
        if is_usual and price and (place not in found or found[place][0] < entry["Timestamp"]):
            found[place] = (entry["Timestamp"], price)
    return {place: price for place, (_, price) in found.items()}


# ── our own table of prices ──────────────────────────────────────────────────────────────────────────────────────────

SOURCE = "Karpenter's static price list, us-east-1 (fact sheet of 2026-11-20, section 1.11)"
CHECKED = "2026-07-20"
REGION = "us-east-1"

PRICE_LIST = """
g4dn.xlarge 0.526, g4dn.2xlarge 0.752, g4dn.4xlarge 1.204, g4dn.8xlarge 2.176, g4dn.12xlarge 3.912,
g4dn.16xlarge 4.352, g4dn.metal 7.824, g4ad.xlarge 0.3785, g4ad.2xlarge 0.5412, g4ad.4xlarge 0.867,
g4ad.8xlarge 1.734, g4ad.16xlarge 3.468, g5.xlarge 1.006, g5.2xlarge 1.212, g5.4xlarge 1.624, g5.8xlarge 2.448,
g5.12xlarge 5.672, g5.16xlarge 4.096, g5.24xlarge 8.144, g5.48xlarge 16.29, g5g.xlarge 0.42, g5g.2xlarge 0.556,
g5g.4xlarge 0.828, g5g.8xlarge 1.372, g5g.16xlarge 2.744, g5g.metal 2.744, g6.xlarge 0.8048, g6.2xlarge 0.9776,
g6.4xlarge 1.323, g6.8xlarge 2.014, g6.12xlarge 4.602, g6.16xlarge 3.397, g6.24xlarge 6.675, g6.48xlarge 13.35,
gr6.4xlarge 1.539, gr6.8xlarge 2.446, g6e.xlarge 1.861, g6e.2xlarge 2.242, g6e.4xlarge 3.004, g6e.8xlarge 4.529,
g6e.12xlarge 10.49, g6e.16xlarge 7.577, g6e.24xlarge 15.07, g6e.48xlarge 30.13, g7.2xlarge 2.52,
g7.4xlarge 3.042, g7.8xlarge 4.086, g7.12xlarge 7.128, g7.24xlarge 14.26, g7.48xlarge 28.51, g7e.2xlarge 3.363,
g7e.4xlarge 3.998, g7e.8xlarge 5.268, g7e.12xlarge 8.286, g7e.24xlarge 16.57, g7e.48xlarge 33.14,
p3dn.24xlarge 31.21, p4d.24xlarge 21.96, p4de.24xlarge 27.45, p5.4xlarge 6.88, p5.48xlarge 55.04,
p5en.48xlarge 63.3, p6-b200.48xlarge 113.9, p6-b300.48xlarge 142.4, trn1.2xlarge 1.344, trn1.32xlarge 21.5,
trn1n.32xlarge 24.78, inf1.xlarge 0.228, inf1.2xlarge 0.362, inf1.6xlarge 1.18, inf1.24xlarge 4.721,
inf2.xlarge 0.7582, inf2.8xlarge 1.968, inf2.24xlarge 6.491, inf2.48xlarge 12.98, t3.micro 0.0104,
t3.large 0.0832, m7i.large 0.1008, m7i.4xlarge 0.8064, c7i.xlarge 0.1785, c7i.4xlarge 0.714, c8g.4xlarge 0.638
"""
PRICES: Mapping[str, float] = {name: float(usd) for name, usd in map(str.split, PRICE_LIST.split(","))}
