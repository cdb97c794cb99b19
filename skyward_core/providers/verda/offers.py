"""Offers of Verda, and the image that suits each."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from typing import Any, cast

from skyward_core.accelerators.catalog import find
from skyward_core.errors import (
    BadRequest,
)
from skyward_core.machines.offers import Extra, Offer, architecture_beside, by_month
from skyward_core.providers._http import Row
from skyward_core.providers.verda.api import Json

log = logging.getLogger(__name__)

NVME_USD_PER_GB_MONTH = 0.20
"""The price of disks where `/volume-types` does not tell it in USD (fact sheet, 3.2)."""
OLD_CHIPS = frozenset({"V100", "RTX A6000"})
"""Verda's images with CUDA 13 do not support these."""
OPEN_CHIPS = frozenset({"B200", "B300", "GB200", "GB300", "RTX PRO 6000"})
"""Blackwell: needs the open kernel module and CUDA 12.8."""


def image_of(images: Sequence[Json], accelerator: str | None) -> str:
    """Return the slug of the best image: Ubuntu 24.04, and for GPUs the newest CUDA that supports them, with Docker."""
    fitting = [str(image["image_type"]) for image in images if not image.get("is_cluster")]
    if not fitting:
        raise BadRequest("Verda names no image for this type of machine: give one with Verda(image=...)")

    def worth(slug: str) -> tuple[Any, ...]:
        cuda = re.search(r"cuda-?(\d+)\.(\d+)", slug)
        version: tuple[int, ...] = (int(cuda[1]), int(cuda[2])) if cuda else ()
        if accelerator is None:
            return (not cuda, "24.04" in slug, "docker" not in slug)
        suits = version < (13, 0) if accelerator in OLD_CHIPS else version >= (12, 8) or accelerator not in OPEN_CHIPS
        is_open = "open" in slug or not slug.startswith("ubuntu")  # newer slugs do not say so
        return (
            bool(cuda) and suits,
            accelerator not in OPEN_CHIPS or is_open,
            "jupyter" not in slug,
            "24.04" in slug,
            version,
            "docker" in slug,
        )

    return max(fitting, key=worth)


def disk_of(types: Sequence[Row], gb: int) -> Extra:
    """Return the cost of a disk, by Verda's list of volume types (`price.price_per_month_per_gb`, as its SDKs read)."""
    prices = [one.get("price") or {} for one in types if one.get("type") == "NVMe"]
    monthly = [usd(price.get("price_per_month_per_gb")) for price in prices if price.get("currency", "usd") == "usd"]
    if monthly and monthly[0]:
        return by_month("disk", gb * monthly[0], "Verda's /volume-types, NVMe", "at launch")
    return by_month(
        "disk", gb * NVME_USD_PER_GB_MONTH, "Verda's price of NVMe, about $0.20 per GB and month", "2026-11-20"
    )


def to_offer(sold: Json, location: str, *, is_spot: bool) -> Offer | None:
    """Return the offer; None without a price, for confidential machines, and for unknown chips.

    CUDA is reported to fail on confidential machines.
    """
    on_demand, price = usd(sold.get("price_per_hour")), usd(sold.get("spot_price" if is_spot else "price_per_hour"))
    name = str(sold["instance_type"])
    if not price or name.endswith(".CC"):
        return None
    gpu = cast("Json", sold.get("gpu") or {})
    chips = int(gpu.get("number_of_gpus") or 0)
    chip = form_factor = None
    if chips:
        text = re.sub(r"^\d+\s*x\s*|\s*\d+\s*GB$", "", str(gpu.get("description") or sold.get("model") or ""))
        found = re.search(r"\b(SXM|PCIe|NVL)\d*\b", text)
        form_factor = found[1] if found else None
        try:
            chip = find(re.sub(r"\s*\b(SXM|PCIe|NVL)\d*\b", "", text)).name
        except BadRequest:
            log.debug("Verda sells %s with %r, which the catalogue does not know", name, text)
            return None
    return Offer(
        provider="verda",
        instance_type=name,
        region=location,
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=on_demand,
        vcpus=float(sold["cpu"]["number_of_cores"]),
        memory_gb=float(sold["memory"]["size_in_gigabytes"]),
        accelerator=chip,
        accelerators=chips,
        # the row has the memory of all chips together
        accelerator_memory_gb=float(sold["gpu_memory"]["size_in_gigabytes"]) / chips if chips else None,
        form_factor=form_factor,
        architecture=architecture_beside(chip),
    )


def usd(price: object) -> float | None:
    """Return a price, which Verda writes as a string."""
    with contextlib.suppress(TypeError, ValueError):
        return float(cast("str", price))
    return None
