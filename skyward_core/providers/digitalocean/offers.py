"""Offers of DigitalOcean's sizes, and the image that suits each."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from skyward_core.accelerators.catalog import Chip, find
from skyward_core.errors import (
    BadRequest,
)
from skyward_core.machines.offers import Offer, architecture_beside
from skyward_core.providers._http import Row

log = logging.getLogger(__name__)

LEAST_MEMORY_GB = 2.0
"""The least memory of a machine without a memory requirement. System, node and call need some."""
SPOT_SUFFIX = "-spot"
SPOT_CHIPS = ("B300", "MI350X", "MI355X")
"""All chips that are sold as spot (fact sheet, 2.4). They are listed only while they can be ordered."""
CPU_IMAGE, NVIDIA_IMAGE, NVIDIA_8_IMAGE, AMD_IMAGE = (
    "ubuntu-24-04-x64",
    "gpu-h100x1-base",
    "gpu-h100x8-base",
    "gpu-amd-base",
)
"""The image for one H100 also serves every other single NVIDIA GPU. The one for eight has the fabric manager.

All of them accept root.
"""


def to_offers(sizes: Iterable[Row]) -> list[Offer]:
    """Return an offer for each size and each region in which it can be ordered.

    A spot offer has the instance type of its on-demand offer.
    """
    sizes = list(sizes)
    prices = {size["slug"]: size["price_hourly"] for size in sizes}
    offers: list[Offer] = []
    unknown: list[str] = []
    for size in sizes:
        gpus = size.get("gpu_info") or {}
        count = int(gpus.get("count") or 0)
        chip = _chip(str(gpus.get("model"))) if count else None
        if count and chip is None:
            unknown.append(size["slug"])
        elif size["available"] and size["price_hourly"]:  # an empty `regions` means that none can be ordered
            slug = size["slug"].removesuffix(SPOT_SUFFIX)
            is_spot = slug != size["slug"]
            offers += [
                Offer(
                    provider="digitalocean",
                    instance_type=slug,
                    region=region,
                    is_spot=is_spot,
                    price_per_hour=size["price_hourly"],
                    on_demand_price_per_hour=prices.get(slug) if is_spot else size["price_hourly"],
                    vcpus=size["vcpus"],
                    memory_gb=size["memory"] * 1024**2 / 1e9,  # "MB"
                    accelerator=chip.name if chip else None,
                    accelerators=count,
                    architecture=architecture_beside(chip.name if chip else None),
                    # the row has the memory of all of them together
                    accelerator_memory_gb=gpus["vram"]["amount"] / count if chip else None,
                )
                for region in size["regions"]
            ]
    if unknown:
        log.debug(
            "DigitalOcean sells %d sizes with chips that the catalogue does not know: %s",
            len(unknown),
            ", ".join(unknown),
        )
    return offers


def _chip(model: str) -> Chip | None:
    """Return the catalogue's chip, for example for "nvidia_rtx4000_ada"."""
    try:
        return find(model)
    except BadRequest:
        return None


def image_of(offer: Offer) -> str:
    """Return the slug of the image with the drivers of the offer's chips."""
    if offer.accelerator is None:
        return CPU_IMAGE
    if find(offer.accelerator).vendor == "AMD":
        return AMD_IMAGE
    return NVIDIA_IMAGE if offer.accelerators == 1 else NVIDIA_8_IMAGE
