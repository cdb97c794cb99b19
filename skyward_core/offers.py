"""What is wanted, what is sold, and which of it is taken. Pure functions over frozen values."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from skyward_core.accelerators import Accelerator
from skyward_core.errors import NoCapacity

MEMORY_TOLERANCE = 0.075


class Requirements(BaseModel):
    """The hardware part of a wish. Memory in GB = 10⁹ bytes, prices in USD per hour for one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    accelerator: Accelerator | None = None
    instance_type: str | None = None
    vcpus: int | None = Field(default=None, ge=1)
    memory_gb: float | None = Field(default=None, gt=0)
    max_price_per_hour: float | None = Field(default=None, gt=0)


class Offer(BaseModel):
    """One thing a provider sells now. `accelerators` is the number of chips, each with `accelerator_memory_gb`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: str
    instance_type: str
    region: str
    is_spot: bool = False
    price_per_hour: float
    on_demand_price_per_hour: float | None = None
    vcpus: float
    memory_gb: float
    accelerator: str | None = None
    accelerators: int = 0
    accelerator_memory_gb: float | None = None


def matches(offer: Offer, want: Requirements) -> str | None:
    """Return None if the offer is good enough, else the reason why it is not."""
    accelerator = want.accelerator
    checks = (
        (want.instance_type not in (None, offer.instance_type), f"is no {want.instance_type}"),
        (accelerator is not None and offer.accelerator != accelerator.name, f"has {offer.accelerator or 'no accelerator'}"),
        (accelerator is not None and offer.accelerators < accelerator.count, f"has {offer.accelerators} of them"),
        (accelerator is not None and _has_other_memory(offer, accelerator), f"has them with {offer.accelerator_memory_gb or 0:g} GB"),
        (want.vcpus is not None and offer.vcpus < want.vcpus, f"has {offer.vcpus:g} CPUs"),
        (want.memory_gb is not None and offer.memory_gb < want.memory_gb, f"has {offer.memory_gb:.1f} GB of memory"),
        (want.max_price_per_hour is not None and offer.price_per_hour > want.max_price_per_hour, f"costs ${offer.price_per_hour:.2f} an hour"),
    )
    return next((reason for failed, reason in checks if failed), None)


def _has_other_memory(offer: Offer, accelerator: Accelerator) -> bool:
    """Whether the offer's chips are another variant. Drivers and clouds tell up to 7 % less than the data sheet (GiB for GB, reserved parts)."""
    told = offer.accelerator_memory_gb
    return told is not None and abs(told - accelerator.memory_gb) > MEMORY_TOLERANCE * accelerator.memory_gb


def rank(offers: Iterable[Offer], want: Requirements) -> list[Offer]:
    """Return the offers that match, cheapest first, then the smallest. Raises NoCapacity with each rejection's reason when none does."""
    offers = list(offers)
    reasons = {offer: matches(offer, want) for offer in offers}
    good = [offer for offer in offers if reasons[offer] is None]
    if not good:
        told = "; ".join(f"{offer.provider}/{offer.region} {offer.instance_type} {reason}" for offer, reason in reasons.items())
        raise NoCapacity(f"nobody offers {describe(want)}: {told or 'there are no offers at all'}")
    return sorted(good, key=lambda offer: (offer.price_per_hour, offer.vcpus, offer.memory_gb))


def describe(want: Requirements) -> str:
    """Say in words what is wanted."""
    parts = [
        (want.instance_type, f"machine {want.instance_type!r}"),
        (want.accelerator, str(want.accelerator)),
        (want.vcpus, f"{want.vcpus} CPUs"),
        (want.memory_gb, f"{want.memory_gb or 0:g} GB of memory"),
        (want.max_price_per_hour, f"at most ${want.max_price_per_hour or 0:g} an hour"),
    ]
    return ", ".join(words for wish, words in parts if wish is not None) or "a machine"
