"""The market of Vast.ai: searching it, and what a machine costs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from skyward_core.accelerators import Accelerator, parse
from skyward_core.accelerators.catalog import find
from skyward_core.errors import BadRequest
from skyward_core.machines.offers import ARCHITECTURES, Extra, Offer, architecture_beside, by_month, total_of
from skyward_core.providers._http import Api, Row, rows_of
from skyward_core.shown_text import visible_logger

log = visible_logger(__name__)

GB_OF_A_MB = 1e-3
SEARCH = "/api/v0/bundles/"
SEARCH_ROWS = 64
"""The most rows of one search, also with a higher limit. The next page begins at the price of the last row."""
SEARCH_PAGES = 4
"""Rows have a daily quota, and a search for one accelerator needs fewer pages."""

type Filters = Mapping[str, Mapping[str, Any]]
"""Field to {operator: value}."""

COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "gte": operator.ge,
    "lte": operator.le,
    "in": lambda value, values: value in values,
}


@dataclass(frozen=True, slots=True)
class Billing:
    """What is billed beside a machine: its disk, and the expected traffic."""

    disk_gb: int
    traffic_down_gb_per_hour: float
    traffic_up_gb_per_hour: float

    def extras_of(self, row: Row, *, is_spot: bool) -> tuple[Extra, ...]:
        """Return the extra costs of a machine.

        The price on demand includes the disk (`allocated_storage`); a bid does not.
        """
        down, up = (float(row.get(f"inet_{way}_cost") or 0) for way in ("down", "up"))
        traffic = down * self.traffic_down_gb_per_hour + up * self.traffic_up_gb_per_hour
        found_rows = (
            f"an estimate: {self.traffic_down_gb_per_hour:g} GB an hour in and {self.traffic_up_gb_per_hour:g} GB out,"
            " at the host's prices"
        )
        disk = by_month(
            "disk",
            float(row.get("storage_cost") or 0) * self.disk_gb,
            "the host's price by GB and month, as its offer says",
            "at launch",
        )
        parts = (
            disk if is_spot else None,
            Extra(name="traffic", usd_per_hour=round(traffic, 6), source=found_rows, checked="at launch"),
        )
        return tuple(part for part in parts if part is not None and part.usd_per_hour)


@dataclass(frozen=True, slots=True)
class MarketOffer:
    """One machine, or a part of one, that can be rented once. Vast.ai calls it an ask.

    For spot, the offer's price is the lowest bid. Machines with the same `place` are neighbours.
    """

    id: int
    machine: int
    place: str
    offer: Offer

    def as_bid(self, margin: float, regular: float | None) -> Offer:
        """Return the offer with our bid as its price."""
        return self.offer.model_copy(
            update={"price_per_hour": self.offer.price_per_hour * (1 + margin), "on_demand_price_per_hour": regular}
        )


def search(api: Api, filters: Filters, most: float | None, billing: Billing, *, is_spot: bool) -> list[MarketOffer]:
    """Return the offers of the market that match, cheapest first, read in pages.

    Filters are checked here too, because Vast.ai does not always apply them.
    """
    price = "min_bid" if is_spot else "dph_total"
    found: dict[int, MarketOffer | None] = {}
    limits: dict[str, float] = {} if most is None else {"lte": most}
    for _ in range(SEARCH_PAGES):
        fitting = {**filters, **({price: limits} if limits else {})}
        rest = {
            "type": "bid" if is_spot else "on-demand",
            "order": [[price, "asc"]],
            "limit": SEARCH_ROWS,
            "allocated_storage": billing.disk_gb,
        }
        found_rows = rows_of(
            api.request("POST", SEARCH, body={**fitting, **rest}, is_repeatable=True),
            "offers",
            f"Vast.ai answered POST {SEARCH}",
        )
        rows = [row for row in found_rows if row["id"] not in found]
        found |= {
            row["id"]: (
                to_market_offer(row, billing.extras_of(row, is_spot=is_spot), is_spot=is_spot)
                if _matches(row, fitting)
                else None
            )
            for row in rows
        }
        if len(found_rows) < SEARCH_ROWS or not rows:
            break
        limits = {**limits, "gte": rows[-1][price]}
    choices = [choice for choice in found.values() if choice is not None]
    log.debug(
        "%d of %d offers of the market do not match, or have a chip that is in no catalogue",
        len(found) - len(choices),
        len(found),
    )
    return sorted(choices, key=lambda choice: choice.offer.total_per_hour)


def to_market_offer(row: Row, extras: tuple[Extra, ...], *, is_spot: bool) -> MarketOffer | None:
    """Return an offer of the market; None for a chip that the catalogue does not know, and without a price."""
    accelerator, price = (
        accelerator_of(str(row.get("gpu_name") or "")),
        float(row.get("min_bid" if is_spot else "dph_total") or 0),
    )
    if accelerator is None or price <= 0:
        return None
    cores, effective = float(row.get("cpu_cores") or 0), float(row.get("cpu_cores_effective") or 0)
    cluster, machine = row.get("cluster_id"), int(row.get("machine_id") or 0)
    offer = Offer(
        provider="vastai",
        instance_type=instance_type_of(row),
        region=country_of(row),
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        vcpus=effective,
        # the row has the memory of the whole machine
        memory_gb=float(row.get("cpu_ram") or 0) * GB_OF_A_MB * (effective / cores if cores else 1.0),
        accelerator=accelerator.name,
        accelerators=int(row.get("num_gpus") or 1),
        accelerator_memory_gb=chip_memory_gb(row, accelerator),
        form_factor=accelerator.form_factor,
        architecture=ARCHITECTURES.get(str(row.get("cpu_arch")), architecture_beside(accelerator.name)),
        extras_per_hour=extras,
    )
    return MarketOffer(
        int(row["id"]), machine, f"machine {machine}" if cluster is None else f"cluster {cluster}", offer
    )


def merge(offers: Iterable[Offer]) -> list[Offer]:
    """Merge offers of one class at the same price.

    The result has the least vCPUs and memory, and the highest extra costs, of its offers.
    """
    merged: dict[tuple[str, str, str | None, bool, float], Offer] = {}
    for offer in offers:
        key = (offer.instance_type, offer.region, offer.architecture, offer.is_spot, offer.price_per_hour)
        other = merged.setdefault(key, offer)
        least = {"vcpus": min(offer.vcpus, other.vcpus), "memory_gb": min(offer.memory_gb, other.memory_gb)}
        least |= {"extras_per_hour": max(offer.extras_per_hour, other.extras_per_hour, key=total_of)}
        merged[key] = other.model_copy(update=least)
    return list(merged.values())


def _matches(row: Row, filters: Filters) -> bool:
    """Return whether a row matches the filters. Fields that the row lacks, such as `verified`, are not compared."""
    found_rows = {**row, "geolocation": country_of(row)}
    return all(
        COMPARED[comparison](found_rows[name], value)
        for name, conditions in filters.items()
        if found_rows.get(name) is not None
        for comparison, value in conditions.items()
    )


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────

TYPE = re.compile(r"(?P<gpu>.+?)(?:_[0-9]+GB)?x(?P<gpus>[0-9]+)")
UNKNOWN_REGION = "unknown"
COUNTRY_LIST = """
AE United Arab Emirates, AR Argentina, AT Austria, AU Australia, BE Belgium, BG Bulgaria, BR Brazil, CA Canada,
CH Switzerland, CL Chile, CN China, CO Colombia, CY Cyprus, CZ Czechia / Czech Republic, DE Germany, DK Denmark,
EE Estonia, ES Spain, FI Finland, FR France, GB United Kingdom, GE Georgia, GR Greece, HK Hong Kong, HR Croatia,
HU Hungary, ID Indonesia, IE Ireland, IL Israel, IN India, IS Iceland, IT Italy, JP Japan,
KR South Korea / Korea, KZ Kazakhstan, LT Lithuania, LU Luxembourg, LV Latvia, MD Moldova, MX Mexico,
MY Malaysia, NL Netherlands / The Netherlands, NO Norway, NZ New Zealand, PH Philippines, PL Poland,
PT Portugal, QA Qatar, RO Romania, RS Serbia, RU Russia, SA Saudi Arabia, SE Sweden, SG Singapore, SI Slovenia,
SK Slovakia, TH Thailand, TR Turkey / Türkiye, TW Taiwan, UA Ukraine,
US United States / United States of America, VN Vietnam, ZA South Africa
"""
COUNTRIES: Mapping[str, str] = {
    name: row[:2] for row in re.split(r",\s+", COUNTRY_LIST.strip()) for name in row[3:].split(" / ")
}
"""Code (ISO 3166-1) of each country by the names in Vast.ai's listings. Offers have the code.

Names that are missing here stay as they are.
"""
OTHER_NAMES = {
    "A100X": "A100",
    "B300 PC": "B300",
    "GH200 SXM": "GH200",
    "Q RTX 6000": "Quadro RTX 6000",
    "Q RTX 8000": "Quadro RTX 8000",
    "RTX 4080S": "RTX 4080 SUPER",
    "RTX PRO 6000 Max-Q": "RTX PRO 6000",
    "RTX PRO 6000 S": "RTX PRO 6000",
    "RTX PRO 6000 WS": "RTX PRO 6000",
}
NAME_LIST = """
A10, A10g, A16, A30, A40, A100 PCIE, A100 SXM4, H100 PCIE, H100 NVL, H100 SXM, H200, H200 NVL, B200, B300, L4,
L40, L40S, Tesla T4, Tesla V100, Tesla P100, RTX 3070, RTX 3080, RTX 3080 Ti, RTX 3090, RTX 3090 Ti,
RTX 4070 Ti, RTX 4080, RTX 4090, RTX 4090D, RTX 5080, RTX 5090, RTX A2000, RTX A4000, RTX A4500, RTX A5000,
RTX A6000, RTX 2000Ada, RTX 4000Ada, RTX 5000Ada, RTX 6000Ada, InstinctMI50, InstinctMI100, InstinctMI210,
InstinctMI250X, InstinctMI300X
"""
GPU_NAMES = (*OTHER_NAMES, *re.split(r",\s+", NAME_LIST.strip()))
"""Vast.ai's names of the catalogue's chips. A search accepts no other spelling, and finds nothing for one.

`VastAI.rents` has the same chips by our names. A test compares both.
"""


@lru_cache
def accelerator_of(gpu_name: str) -> Accelerator | None:
    """Return the chip with this name at Vast.ai; None if the catalogue has none. Memory and count come from the row."""
    try:
        return parse(OTHER_NAMES.get(gpu_name, gpu_name.removeprefix("Instinct")))
    except BadRequest:
        return None


def gpu_names(accelerator: Accelerator) -> list[str]:
    """Return Vast.ai's names of a chip; with a form factor only the names of that one."""
    known = [
        (name, chip)
        for name in GPU_NAMES
        if (chip := accelerator_of(name)) is not None and chip.name == accelerator.name
    ]
    names = [name for name, chip in known if accelerator.form_factor in (None, chip.form_factor)]
    return sorted({*names, accelerator.name})


def chip_memory_gb(row: Row, accelerator: Accelerator) -> float:
    """Return the memory of one chip by the vendor's figure.

    Vast.ai reports what the driver sees, in units of 1024², up to a tenth less.
    """
    listed = float(row.get("gpu_ram") or 0) / 1024
    choices = find(accelerator.name).memory_choices(accelerator.form_factor)
    nearest = min(choices, key=lambda choice: abs(choice - listed))
    return float(nearest) if abs(nearest - listed) <= nearest / 10 else round(listed, 1)


def instance_type_of(row: Row) -> str:
    """Return the class of a machine: "RTX_4090x2", or "A100_SXM4_40GBx8" for a chip with several memory sizes."""
    gpu_name = str(row.get("gpu_name") or "unknown")
    accelerator = accelerator_of(gpu_name)
    has_choice = (
        accelerator is not None
        and row.get("gpu_ram")
        and len(find(accelerator.name).memory_choices(accelerator.form_factor)) > 1
    )
    memory = f"_{chip_memory_gb(row, accelerator):.0f}GB" if accelerator is not None and has_choice else ""
    return f"{gpu_name.replace(' ', '_')}{memory}x{row.get('num_gpus') or 1}"


def spaced(gpu_name: str) -> str:
    return gpu_name.replace("_", " ")


def country_of(row: Row) -> str:
    """Return the country of a place, which is "Texas, US" in offers or "California, United States" in listings."""
    listed = str(row.get("geolocation") or "").rpartition(",")[2].strip()
    return COUNTRIES.get(listed, listed) or UNKNOWN_REGION


def country_names(countries: Iterable[str]) -> list[str]:
    """Return all names of these countries that a place may have."""
    wanted = list(countries)
    return [*wanted, *(name for name, code in COUNTRIES.items() if code in wanted)]
