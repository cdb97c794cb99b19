"""Offers of RunPod's catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator

from skyward_core.accelerators import Accelerator, parse
from skyward_core.errors import (
    BadRequest,
)
from skyward_core.machines.offers import Extra, Offer, architecture_beside, by_month
from skyward_core.providers._http import Row

IN_STOCK = {"include": "AVAILABILITY", "product": "POD"}
"""Without these the catalogue returns prices only."""
USUAL_COUNTS = (1, 2, 4, 8)
"""A pod may have any number of GPUs up to the type's `maxCount`.

A required chip is offered in the required number; others in these.
"""
LEAST_CPU_COUNT = 2
OTHER_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H200": "H200-SXM",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000",
}
FLOORS = {
    "NVIDIA A100 80GB PCIe": (6, 80),
    "NVIDIA A100-SXM4-80GB": (6, 80),
    "NVIDIA H100 80GB HBM3": (14, 90),
    "NVIDIA H200": (16, 180),
    "NVIDIA B200": (20, 180),
    "NVIDIA B300 SXM6 AC": (20, 180),
}
"""Requested vCPUs and GB for each GPU: about two thirds of RunPod's figures for the type (fact sheet, 5.5).

Less than the figures, because hosts differ.
"""
FLOOR = (2, 8)
"""The same for all other types: the defaults of the API's version 1."""
DISK_USD_PER_GB_MONTH = 0.10
SECURE, COMMUNITY = "SECURE", "COMMUNITY"
ANYWHERE = "any"
"""The region of machines that RunPod places freely. Community machines are in no data centre."""
GPU_TYPE = re.compile(r"(?P<id>.+) x(?P<count>[1-9][0-9]*)(?P<community> community)?")
CPU_TYPE = re.compile(r"(?P<id>[a-z0-9]+)-(?P<count>[1-9][0-9]*)-(?P<memory>[0-9.]+)")


def accelerator_of(gpu_id: str) -> Accelerator | None:
    """Return the chip with this id; None if the catalogue has none, as for a fixed slice ("... MIG 1g.24gb")."""
    try:
        return parse(OTHER_NAMES.get(gpu_id, gpu_id))
    except BadRequest:
        return None


def regions_of(row: Row, cloud: str) -> list[str]:
    """Return the regions in which a type is in stock."""
    if row.get("availability") == "NONE":
        return []
    places: list[Row] = row.get("dataCenters") or []
    if cloud == COMMUNITY or not places:
        return [ANYWHERE]
    return [place["id"] for place in places if place.get("availability") != "NONE"]


def cpu_offers(row: Row) -> Iterator[Offer]:
    """Yield the offers of a flavour without GPU, with each number of vCPUs, which is a power of two."""
    price, limits, ratio = (row.get("price") or {}).get("securePerVcpu"), row.get("vcpu") or {}, row.get("ramGbPerVcpu")
    count = LEAST_CPU_COUNT
    while price and ratio and count <= int(limits.get("max") or 0):
        for region in regions_of(row, SECURE) if count >= int(limits.get("min") or 0) else ():
            yield Offer(
                provider="runpod",
                instance_type=cpu_type(row["id"], count, ratio * count),
                region=region,
                price_per_hour=price * count,
                on_demand_price_per_hour=price * count,
                vcpus=count,
                memory_gb=ratio * count,
                architecture=architecture_beside(None),
            )
        count *= 2


def extras_of(disk_gb: object) -> tuple[Extra, ...]:
    """Return the cost of a pod's disk.

    The catalogue's prices exclude it. RunPod does not document whether a pod's `cost` includes it.
    """
    gb = float(disk_gb) if isinstance(disk_gb, int | float) else 0.0
    return (
        (
            by_month(
                "disk",
                gb * DISK_USD_PER_GB_MONTH,
                "docs.runpod.io/pods/storage: container disk, $0.10 per GB and month",
                "2026-11-22",
            ),
        )
        if gb
        else ()
    )


def gpu_type(gpu_id: str, count: int, cloud: str) -> str:
    return f"{gpu_id} x{count}{' community' if cloud == COMMUNITY else ''}"


def cpu_type(flavor: str, count: int, memory_gb: float) -> str:
    """Return RunPod's own name, "cpu3c-2-4"."""
    return f"{flavor}-{count}-{memory_gb:g}"


def gpu_of(offer: Offer) -> re.Match[str]:
    """Return the parts of a type with GPUs. Raises BadRequest."""
    if gpu := GPU_TYPE.fullmatch(offer.instance_type):
        return gpu
    raise BadRequest(
        f'{offer.instance_type!r} is no type of RunPod: write "NVIDIA A100 80GB PCIe x2", with " community" behind it,'
        ' or "cpu3c-2-4"'
    )
