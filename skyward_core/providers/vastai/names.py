"""What Vast.ai calls chips, countries and classes of machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from skyward_core.accelerators import Accelerator, parse
from skyward_core.accelerators.catalog import find
from skyward_core.errors import (
    BadRequest,
)
from skyward_core.providers._http import Row

TYPE = re.compile(r"(?P<gpu>.+?)(?:_[0-9]+GB)?x(?P<gpus>[0-9]+)")
UNKNOWN_REGION = "unknown"
COUNTRIES: Mapping[str, str] = {
    "United Arab Emirates": "AE",
    "Argentina": "AR",
    "Austria": "AT",
    "Australia": "AU",
    "Belgium": "BE",
    "Bulgaria": "BG",
    "Brazil": "BR",
    "Canada": "CA",
    "Switzerland": "CH",
    "Chile": "CL",
    "China": "CN",
    "Colombia": "CO",
    "Cyprus": "CY",
    "Czechia": "CZ",
    "Czech Republic": "CZ",
    "Germany": "DE",
    "Denmark": "DK",
    "Estonia": "EE",
    "Spain": "ES",
    "Finland": "FI",
    "France": "FR",
    "United Kingdom": "GB",
    "Georgia": "GE",
    "Greece": "GR",
    "Hong Kong": "HK",
    "Croatia": "HR",
    "Hungary": "HU",
    "Indonesia": "ID",
    "Ireland": "IE",
    "Israel": "IL",
    "India": "IN",
    "Iceland": "IS",
    "Italy": "IT",
    "Japan": "JP",
    "South Korea": "KR",
    "Korea": "KR",
    "Kazakhstan": "KZ",
    "Lithuania": "LT",
    "Luxembourg": "LU",
    "Latvia": "LV",
    "Moldova": "MD",
    "Mexico": "MX",
    "Malaysia": "MY",
    "Netherlands": "NL",
    "The Netherlands": "NL",
    "Norway": "NO",
    "New Zealand": "NZ",
    "Philippines": "PH",
    "Poland": "PL",
    "Portugal": "PT",
    "Qatar": "QA",
    "Romania": "RO",
    "Serbia": "RS",
    "Russia": "RU",
    "Saudi Arabia": "SA",
    "Sweden": "SE",
    "Singapore": "SG",
    "Slovenia": "SI",
    "Slovakia": "SK",
    "Thailand": "TH",
    "Turkey": "TR",
    "Türkiye": "TR",
    "Taiwan": "TW",
    "Ukraine": "UA",
    "United States": "US",
    "United States of America": "US",
    "Vietnam": "VN",
    "South Africa": "ZA",
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
GPU_NAMES = (
    *OTHER_NAMES,
    *(
        "A10",
        "A10g",
        "A16",
        "A30",
        "A40",
        "A100 PCIE",
        "A100 SXM4",
        "H100 PCIE",
        "H100 NVL",
        "H100 SXM",
        "H200",
        "H200 NVL",
        "B200",
        "B300",
    ),
    *("L4", "L40", "L40S", "Tesla T4", "Tesla V100", "Tesla P100"),
    *(
        "RTX 3070",
        "RTX 3080",
        "RTX 3080 Ti",
        "RTX 3090",
        "RTX 3090 Ti",
        "RTX 4070 Ti",
        "RTX 4080",
        "RTX 4090",
        "RTX 4090D",
        "RTX 5080",
        "RTX 5090",
    ),
    *(
        "RTX A2000",
        "RTX A4000",
        "RTX A4500",
        "RTX A5000",
        "RTX A6000",
        "RTX 2000Ada",
        "RTX 4000Ada",
        "RTX 5000Ada",
        "RTX 6000Ada",
    ),
    *("InstinctMI50", "InstinctMI100", "InstinctMI210", "InstinctMI250X", "InstinctMI300X"),
)
"""Vast.ai's names of the catalogue's chips. A search accepts no other spelling, and finds nothing for one.

`accelerators.cloud_catalogs` has the same chips by our names, because it may import no provider. A test compares both.
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
