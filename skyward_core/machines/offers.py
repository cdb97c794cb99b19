"""Requirements, offers, and the choice of an offer. Pure functions over frozen values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from skyward_core.accelerators import Accelerator
from skyward_core.errors import BadRequest
from skyward_core.events.narrator import usd
from skyward_core.written_numbers import shown

MEMORY_TOLERANCE = 0.075


MOST_USD_PER_HOUR = 100_000.0
"""The highest price of one machine that is accepted: a hundred times that of the dearest one of any cloud. The ledger
counts whole micro-dollars in 64 bits.
"""
MOST_MEMORY = 1e6
"""Of any unit: no machine has more, and a longer number is a mistake."""
GB_PER_UNIT = {"mb": 1e-3, "gb": 1.0, "tb": 1e3, "mib": 2**20 / 1e9, "gib": 2**30 / 1e9, "tib": 2**40 / 1e9}


type Architecture = Annotated[
    Literal["x86_64", "arm64"],
    BeforeValidator(lambda name: ARCHITECTURES.get(name, name) if isinstance(name, str) else name),
]
"""The processor of a machine, by AWS's name; other names of it are accepted."""

ARCHITECTURES: Mapping[str, Literal["x86_64", "arm64"]] = {
    "x86_64": "x86_64",
    "amd64": "x86_64",
    "arm64": "arm64",
    "aarch64": "arm64",
}
"""Names of `uname -m`, Debian, Vast.ai and AWS."""

GRACE = ("GH200", "GB200", "GB300")
"""Chips that sit on a board with NVIDIA's own processor, which is arm64 (data sheets of the GH200, GB200 NVL72 and
GB300 NVL72, checked 2026-11).
"""


def architecture_beside(accelerator: str | None) -> Literal["x86_64", "arm64"]:
    """Return the processor of machines with this chip, or without one.

    It is for providers that do not report it, and have arm64 machines only with these chips.
    """
    return "arm64" if accelerator in GRACE else "x86_64"


class Requirements(BaseModel):
    """The hardware that a spec needs. Memory in GB = 10⁹ bytes, prices in USD per hour for one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    accelerator: Accelerator | None = None
    instance_type: str | None = None
    vcpus: int | None = Field(default=None, ge=1)
    memory_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_price_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    architecture: Architecture | None = None
    nodes: int = Field(default=1, ge=1)
    """How many machines work together: a provider may give them a special network."""
    min_cuda: float | None = None
    """The CUDA version that NVIDIA's driver must support for the image's packages; None if they do not name one."""


class Extra(BaseModel):
    """Something that is billed beside a machine as long as the machine exists, in USD per hour for one machine.

    `source` is the source of the price, and `checked` its date.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    usd_per_hour: float = Field(ge=0, allow_inf_nan=False)
    source: str = ""
    checked: str = ""


HOURS_PER_MONTH = 720
"""For prices by the month: 30 days, the month in which an hour costs most."""


def by_month(name: str, usd_per_month: float, source: str, checked: str) -> Extra:
    """Return an extra with a price by the month."""
    return Extra(name=name, usd_per_hour=round(usd_per_month / HOURS_PER_MONTH, 6), source=source, checked=checked)


def total_of(extras: Iterable[Extra]) -> float:
    """Return the sum of the extras, in USD per hour."""
    return sum((extra.usd_per_hour for extra in extras), 0.0)


class Offer(BaseModel):
    """One thing a provider sells now. `accelerators` is the number of chips, each with `accelerator_memory_gb`.

    `price_per_hour` is the price of the machine itself, in the provider's own terms; `total_per_hour` is the full cost.
    """

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
    form_factor: str | None = None
    """"SXM", "PCIe" or "NVL", if the provider reports it."""
    architecture: Architecture | None = None
    """The machine's processor; None if it is unknown, or may be either."""
    or_types: tuple[str, ...] = ()
    """Other types that match the same requirements, with the same chips and at most this price.

    All machines of a launch have this type, or all have one of those.
    """
    nodes: int = 1
    """How many machines work together, from the requirements."""
    min_cuda: float | None = None
    """The CUDA version that the driver must support, from the requirements."""
    extras_per_hour: tuple[Extra, ...] = ()
    """What is billed beside the machine: its disk, its address, an estimate of its traffic."""

    @property
    def total_per_hour(self) -> float:
        """The cost of one machine with its extras, in USD. Offers are ranked, limited and counted by it."""
        return self.price_per_hour + total_of(self.extras_per_hour) if self.extras_per_hour else self.price_per_hour

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.provider}/{self.region} {self.instance_type}{' spot' if self.is_spot else ''}"


def matches(offer: Offer, want: Requirements) -> str | None:
    """Return None if the offer matches, else the reason why it does not."""
    if want.instance_type is not None and offer.instance_type != want.instance_type:
        return f"is no {want.instance_type}"
    if want.architecture not in {None, offer.architecture}:
        return f"is {offer.architecture}" if offer.architecture else "does not report its architecture"
    if (accelerator := want.accelerator) is not None:
        if offer.accelerator != accelerator.name:
            return f"has {offer.accelerator or 'no accelerator'}"
        if offer.accelerators < accelerator.count:
            return f"has {offer.accelerators} of them"
        if _has_other_memory(offer, accelerator):
            return f"has them with {offer.accelerator_memory_gb or 0:g} GB"
        if accelerator.form_factor is not None and offer.form_factor != accelerator.form_factor:
            return f"has them as {offer.form_factor}" if offer.form_factor else "does not report their form factor"
    if want.vcpus is not None and offer.vcpus < want.vcpus:
        return f"has {offer.vcpus:g} CPUs"
    if want.memory_gb is not None and offer.memory_gb < want.memory_gb:
        return f"has {offer.memory_gb:.1f} GB of memory"
    if want.max_price_per_hour is not None and offer.total_per_hour > want.max_price_per_hour:
        return (
            f"costs {usd(offer.total_per_hour)} an"
            f" hour{' with all that is billed beside it' if offer.extras_per_hour else ''}"
        )
    return None


def _has_other_memory(offer: Offer, accelerator: Accelerator) -> bool:
    """Return whether the offer's chips are another variant.

    Drivers and clouds report up to 7 % less than the data sheet (GiB for GB, reserved parts).
    """
    reported = offer.accelerator_memory_gb
    return reported is not None and abs(reported - accelerator.memory_gb) > MEMORY_TOLERANCE * accelerator.memory_gb


def memory_gb(text: str) -> float:
    """Read an amount of memory such as "32GB" or "512 MiB"; returns GB = 10⁹ bytes. Raises BadRequest."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text, re.IGNORECASE | re.ASCII)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in GB_PER_UNIT or not 0 < float(match.group(1)) <= MOST_MEMORY:
        raise BadRequest(
            f'memory={shown(text)} is no amount of memory: write a number and a unit, such as "32GB" or "512MiB"'
            f" ({', '.join(GB_PER_UNIT)})"
        )
    return float(match.group(1)) * GB_PER_UNIT[unit]


def describe(want: Requirements) -> str:
    """Return the requirements as text."""
    parts = [
        (want.instance_type, f"machine {want.instance_type!r}"),
        (want.accelerator, str(want.accelerator)),
        (want.architecture, f"{want.architecture}"),
        (want.vcpus, f"{want.vcpus} CPUs"),
        (want.memory_gb, f"{want.memory_gb or 0:g} GB of memory"),
        (want.max_price_per_hour, f"at most ${want.max_price_per_hour or 0:g} an hour"),
    ]
    return ", ".join(text for value, text in parts if value is not None) or "a machine"
