"""The choice of an offer: which match, why none does, and which of the built-in clouds rent a chip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skyward_core.accelerators import Accelerator, parse
from skyward_core.accelerators.catalog import CHIPS, Chip
from skyward_core.errors import NoCapacity
from skyward_core.machines.offers import Architecture, Offer, Requirements, describe, matches, memory_gb
from skyward_core.providers.base import BUILT_IN, kind_of

MOST_REASONS = 20
A100_ON_AWS: Mapping[int, str] = {80: "p4de.24xlarge", 40: "p4d.24xlarge"}
"""The types with A100, by the memory of each chip in GB. AWS's API names both chips A100, and reports 40960 and 81920
MiB (DescribeInstanceTypes, checked 2026-11).
"""


def rank(offers: Iterable[Offer], want: Requirements) -> list[Offer]:
    """Return the offers that match, cheapest first, then the smallest.

    Raises NoCapacity with the reasons if no offer matches.
    """
    offers = list(offers)
    good = [offer for offer in offers if matches(offer, want) is None]
    if not good:
        raise NoCapacity(f"no provider offers {describe(want)}: {why_none(offers, want)}")
    return sorted(good, key=lambda offer: (offer.total_per_hour, offer.vcpus, offer.memory_gb))


def why_none(offers: Sequence[Offer], want: Requirements) -> str:
    """Return why each of the first offers does not match, those with the right accelerator first.

    If no offer has the accelerator, the text names the clouds that rent it.
    """
    wanted = want.accelerator.name if want.accelerator is not None else None
    near = sorted(offers, key=lambda offer: (offer.accelerator != wanted, offer.total_per_hour))[:MOST_REASONS]
    reasons = [f"{offer.name} {matches(offer, want)}" for offer in near]
    more = [f"and {len(offers) - len(near)} others"] if len(offers) > len(near) else []
    text = "; ".join([*reasons, *more]) or "there are no offers at all"
    is_aws = any(offer.provider == "aws" for offer in offers)
    if want.accelerator is not None and is_aws and (sizes := sizes_on_aws(want.accelerator)):
        text += f". {sizes[0].upper()}{sizes[1:]}"
    if want.accelerator is None or any(offer.accelerator == wanted for offer in offers):
        return text
    simulation = (
        f'. Local(simulate="{want.accelerator.name}") simulates one here.'
        if any(offer.provider == "local" for offer in offers)
        else ""
    )
    return f"{text}. {advice(want.accelerator)}{simulation}"


def select_instance(
    available: Iterable[Offer],
    accelerator: Accelerator | str | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    architecture: Architecture | None = None,
) -> Offer:
    """Return the smallest of these offers with the accelerator, CPU cores and memory ("128GB"); of equals the cheaper.

    The smallest has the fewest accelerators, then CPUs, then memory. Raises NoCapacity with the reasons if none
    matches.
    """
    wanted = parse(accelerator) if isinstance(accelerator, str) else accelerator
    want = Requirements(
        accelerator=wanted,
        vcpus=cpu,
        memory_gb=None if memory is None else memory_gb(memory),
        architecture=architecture,
    )
    return min(
        rank(available, want),
        key=lambda offer: (offer.accelerators, offer.vcpus, offer.memory_gb, offer.total_per_hour),
    )


def rented_by(name: str) -> tuple[str, ...]:
    """Return the built-in clouds that rent this chip of the catalogue, by their names in messages.

    >>> rented_by("MI325X")
    ('DigitalOcean',)
    """
    return tuple(kind.display_name for kind in map(kind_of, BUILT_IN) if name in kind.rents)


def sizes_on_aws(accelerator: Accelerator) -> str:
    """Return which AWS type has this size of the chip, and how to get the other one; "" if all types have the same.

    >>> sizes_on_aws(Accelerator("A100"))
    'on AWS A100 80GB is a p4de.24xlarge; a p4d.24xlarge has A100 40GB: write "A100-40GB"'
    """
    if accelerator.name != "A100" or accelerator.memory_gb not in A100_ON_AWS:
        return ""
    ((other, its_type),) = [one for one in A100_ON_AWS.items() if one[0] != accelerator.memory_gb]
    return (
        f"on AWS A100 {accelerator.memory} is a {A100_ON_AWS[accelerator.memory_gb]}; a {its_type} has A100 {other}GB:"
        f' write "A100-{other}GB"'
    )


def advice(accelerator: Accelerator) -> str:
    """Return which clouds rent the accelerator, as text; if none does, the most similar chip that is rented.

    It has at least as much memory, if possible the same vendor, and the nearest size.

    >>> advice(Accelerator("GB200", 186))
    'GB200 is rented by none of the built-in clouds; nearest to it in memory is B300 288GB (AWS, DigitalOcean, Verda,
    Vast.ai, RunPod)'
    """
    if clouds := rented_by(accelerator.name):
        return f"{accelerator.name} is rented by {', '.join(clouds)}"
    known = [(memory_gb, chip) for chip in CHIPS if rented_by(chip.name) for memory_gb in chip.memory_gb]

    def distance(one: tuple[int, Chip]) -> tuple[bool, bool, int, int]:
        memory_gb, chip = one
        return (
            memory_gb < accelerator.memory_gb,
            chip.vendor != accelerator.vendor,
            abs(memory_gb - accelerator.memory_gb),
            -len(rented_by(chip.name)),
        )

    memory_gb, chip = min(known, key=distance)
    clouds = ", ".join(rented_by(chip.name))
    return (
        f"{accelerator.name} is rented by none of the built-in clouds; nearest to it in memory is {chip.name}"
        f" {memory_gb}GB ({clouds})"
    )
