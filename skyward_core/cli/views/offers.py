"""Offers as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skyward_core.cli.printing import duration, money

if TYPE_CHECKING:
    from skyward_core.machines.offers import Offer
    from skyward_core.provisioning.price_list import PriceList

HEADS = (
    "PROVIDER",
    "REGION",
    "TYPE",
    "MARKET",
    ">USD/H",
    ">OF IT BESIDE",
    ">CPUS",
    ">MEMORY GB",
    "ACCELERATORS",
    "PROCESSOR",
)


def as_json(found: PriceList, shown: Sequence[Offer]) -> dict[str, Any]:
    return {
        "age_seconds": round(found.age_seconds(), 1),
        "offers": [{**offer.model_dump(mode="json"), "total_per_hour": offer.total_per_hour} for offer in shown],
        "without": [asdict(refusal) for refusal in found.refusals],
    }


def table(shown: Sequence[Offer]) -> tuple[Sequence[str], list[list[str]]]:
    return HEADS, [_row(offer) for offer in shown]


def _row(offer: Offer) -> list[str]:
    from skyward_core.machines.offers import total_of

    return [
        offer.provider,
        offer.region,
        offer.instance_type,
        "spot" if offer.is_spot else "on demand",
        money(offer.total_per_hour),
        money(total_of(offer.extras_per_hour)) if offer.extras_per_hour else "",
        f"{offer.vcpus:g}",
        f"{offer.memory_gb:.0f}",
        _accelerators(offer),
        offer.architecture or "",
    ]


def _accelerators(offer: Offer) -> str:
    if not offer.accelerator:
        return ""
    return f"{offer.accelerators} x {offer.accelerator} {offer.accelerator_memory_gb or 0:.0f}GB"


def summary(found: PriceList, shown: Sequence[Offer]) -> str:
    """Return how many offers there are, and how old the answers are."""
    how_many = f"the cheapest {len(shown)} of {len(found)}" if len(found) > len(shown) else f"{len(found)} in all"
    return f"{how_many}; queried {duration(found.age_seconds())} ago"
