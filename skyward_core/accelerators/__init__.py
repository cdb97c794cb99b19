"""The accelerators that a machine needs: `Accelerator`, its factories, and `parse` for strings.

One value has several spellings: "A100-40GB", `NVIDIA.A100_40GB`, `A100(memory="40GB")`,
`Accelerator.NVIDIA.A100(memory="40GB")`. `catalog` has the facts about each chip, and `mig` its partitions. This module
has the names, and the checks that use both.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import EnumType, StrEnum
from typing import Any, Protocol, Self, cast

from skyward_core.accelerators.catalog import Chip, FormFactor, Vendor, find
from skyward_core.accelerators.mig import partitions, profiles, split
from skyward_core.errors import BadRequest, question
from skyward_core.written_numbers import shown, whole, whole_of_digits

MOST_COUNT = 100_000

__all__ = [
    "A10",
    "A10G",
    "A16",
    "A30",
    "A40",
    "A100",
    "B100",
    "B200",
    "B300",
    "GB200",
    "GB300",
    "GH200",
    "H100",
    "H200",
    "L4",
    "L40",
    "L40S",
    "MI",
    "MI300X",
    "MI325X",
    "MI350X",
    "MI355X",
    "NVIDIA",
    "P100",
    "RTX_3070",
    "RTX_3080",
    "RTX_3090",
    "RTX_4080",
    "RTX_4080_SUPER",
    "RTX_4090",
    "RTX_4090D",
    "RTX_5080",
    "RTX_5090",
    "RTX_A2000",
    "RTX_A4000",
    "RTX_A4500",
    "RTX_A5000",
    "RTX_A6000",
    "RTX_PRO_4500",
    "RTX_PRO_6000",
    "T4",
    "TPU",
    "V100",
    "Accelerator",
    "Inferentia",
    "Quadro_RTX_6000",
    "Quadro_RTX_8000",
    "RTX_2000_Ada",
    "RTX_3080_Ti",
    "RTX_3090_Ti",
    "RTX_4000_Ada",
    "RTX_4070_Ti",
    "RTX_5000_Ada",
    "RTX_6000_Ada",
    "RadeonPro",
    "T4g",
    "TPUSlice",
    "Trainium",
    "is_nvidia",
    "is_trainium",
    "parse",
    "partitions",
]


class _Gpu(Protocol):
    def __call__(
        self,
        count: int = 1,
        memory: str | None = None,
        mig: str | Sequence[str] | None = None,
        form_factor: FormFactor | None = None,
    ) -> "Accelerator": ...


def _gpu(name: str) -> _Gpu:
    """Return the factory of one chip of the catalogue."""

    def factory(
        count: int = 1,
        memory: str | None = None,
        mig: str | Sequence[str] | None = None,
        form_factor: FormFactor | None = None,
    ) -> "Accelerator":
        return _make(name, count, memory, mig, form_factor)

    factory.__name__ = factory.__qualname__ = re.sub(r"\W", "_", name)
    factory.__doc__ = (
        f'Require `count` {name} in each machine. `memory` ("80GB") chooses among the sizes that exist, `form_factor`'
        ' among "SXM", "PCIe" and "NVL"; `mig` splits each: one profile as often as it fits, or exactly the list.'
        " Raises BadRequest with the valid choices."
    )
    return factory


@dataclass(frozen=True, slots=True, init=False)
class Accelerator:
    """Accelerators of one machine: `count` chips with the catalogue's `name`, each with `memory_gb` (vendor's figure).

    `form_factor` None means any. `mig` has the partitions of each GPU, largest first; one name becomes as many
    partitions as fit. A value that does not exist raises BadRequest with the valid ones. Compares by value.

    >>> str(Accelerator.NVIDIA.H100(count=4)), str(Accelerator("A100", memory="40GB"))
    ('4 x H100 80GB', 'A100 40GB')
    """

    name: str
    memory_gb: int
    count: int = 1
    mig: tuple[str, ...] = ()
    form_factor: str | None = None

    def __init__(
        self,
        name: str,
        memory_gb: int | None = None,
        count: int = 1,
        mig: str | Sequence[str] | None = (),
        form_factor: str | None = None,
        *,
        memory: str | None = None,
    ) -> None:
        """`memory` ("80GB") is another way to write `memory_gb`; without both it is the catalogue's first size.

        Raises BadRequest.
        """
        chip = find(name)
        form_factor = _form_factor(chip, form_factor)
        what = f"a whole number of {chip.name} in each machine, 1 or more, at most {MOST_COUNT}"
        whole(count, "count", what, most=MOST_COUNT)
        if memory is not None and memory_gb is not None:
            raise BadRequest(
                f"memory={shown(memory)} and memory_gb={shown(memory_gb)} are the same setting: write one of them"
            )
        choices = chip.memory_choices(form_factor)
        size = _memory_gb(memory) if memory is not None else choices[0] if memory_gb is None else memory_gb
        if type(size) is not int or size not in choices:
            sizes = " or ".join(f"{gb}GB" for gb in choices)
            raise BadRequest(
                f"there is no {_called(chip, form_factor)} with memory_gb={shown(size)}; it comes with"
                f" {sizes}{_partition_of(chip.name, choices, size)}"
            )
        partitions_of_each = split(chip.name, size, cast("tuple[str, ...]", mig or ()))
        for field, value in zip(
            self.__dataclass_fields__, (chip.name, size, count, partitions_of_each, form_factor), strict=True
        ):
            object.__setattr__(self, field, value)

    @property
    def memory(self) -> str:
        """The memory of one chip, as "80GB"."""
        return f"{self.memory_gb}GB"

    @property
    def vendor(self) -> Vendor:
        """The manufacturer: "NVIDIA", "AMD", "AWS" or "Google"."""
        return find(self.name).vendor

    @property
    def cuda_capability(self) -> str | None:
        """The CUDA compute capability, as "9.0"; None for chips of other vendors."""
        return find(self.name).cuda_capability

    def __str__(self) -> str:
        many = f"{self.count} x " if self.count > 1 else ""
        cut = ", MIG " + " + ".join(self.mig) if self.mig else ""
        return f"{many}{self.name} {self.memory}{f' {self.form_factor}' if self.form_factor else ''}{cut}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads."""
        return {
            "name": self.name,
            "memory_gb": self.memory_gb,
            "count": self.count,
            "mig": list(self.mig),
            "form_factor": self.form_factor,
        }

    @classmethod
    def from_json(cls, data: "Mapping[str, Any] | str") -> Self:
        """Read what `to_json` writes, or a string as `parse` does. Only `name` must be given. Raises BadRequest."""
        if isinstance(data, str):
            return cls.from_json(parse(data).to_json())
        fields = tuple(cls.__dataclass_fields__)
        for unknown in data.keys() - set(fields):
            hint = question(str(unknown), fields) or f"known are {', '.join(fields)}"
            raise BadRequest(f"an accelerator has no {unknown!r}; {hint}")
        if not isinstance(data.get("name"), str):
            raise BadRequest(f'an accelerator needs a name, such as {{"name": "A100"}}, not {dict(data)!r}')
        return cls(**{field: value for field, value in data.items() if value is not None})

    class NVIDIA:
        """NVIDIA's GPUs, one factory each: `count`, `memory`, `mig`, `form_factor`."""

        T4 = staticmethod(_gpu("T4"))
        T4g = staticmethod(_gpu("T4g"))
        L4 = staticmethod(_gpu("L4"))
        L40 = staticmethod(_gpu("L40"))
        L40S = staticmethod(_gpu("L40S"))
        A10 = staticmethod(_gpu("A10"))
        A10G = staticmethod(_gpu("A10G"))
        A16 = staticmethod(_gpu("A16"))
        A30 = staticmethod(_gpu("A30"))
        A40 = staticmethod(_gpu("A40"))
        A100 = staticmethod(_gpu("A100"))
        H100 = staticmethod(_gpu("H100"))
        H200 = staticmethod(_gpu("H200"))
        B100 = staticmethod(_gpu("B100"))
        B200 = staticmethod(_gpu("B200"))
        B300 = staticmethod(_gpu("B300"))
        GB200 = staticmethod(_gpu("GB200"))
        GB300 = staticmethod(_gpu("GB300"))
        GH200 = staticmethod(_gpu("GH200"))
        V100 = staticmethod(_gpu("V100"))
        P100 = staticmethod(_gpu("P100"))
        RTX_3070 = staticmethod(_gpu("RTX 3070"))
        RTX_3080 = staticmethod(_gpu("RTX 3080"))
        RTX_3080_Ti = staticmethod(_gpu("RTX 3080 Ti"))
        RTX_3090 = staticmethod(_gpu("RTX 3090"))
        RTX_3090_Ti = staticmethod(_gpu("RTX 3090 Ti"))
        RTX_4070_Ti = staticmethod(_gpu("RTX 4070 Ti"))
        RTX_4080 = staticmethod(_gpu("RTX 4080"))
        RTX_4080_SUPER = staticmethod(_gpu("RTX 4080 SUPER"))
        RTX_4090 = staticmethod(_gpu("RTX 4090"))
        RTX_4090D = staticmethod(_gpu("RTX 4090D"))
        RTX_5080 = staticmethod(_gpu("RTX 5080"))
        RTX_5090 = staticmethod(_gpu("RTX 5090"))
        RTX_A2000 = staticmethod(_gpu("RTX A2000"))
        RTX_A4000 = staticmethod(_gpu("RTX A4000"))
        RTX_A4500 = staticmethod(_gpu("RTX A4500"))
        RTX_A5000 = staticmethod(_gpu("RTX A5000"))
        RTX_A6000 = staticmethod(_gpu("RTX A6000"))
        RTX_2000_Ada = staticmethod(_gpu("RTX 2000 Ada"))
        RTX_4000_Ada = staticmethod(_gpu("RTX 4000 Ada"))
        RTX_5000_Ada = staticmethod(_gpu("RTX 5000 Ada"))
        RTX_6000_Ada = staticmethod(_gpu("RTX 6000 Ada"))
        RTX_PRO_4500 = staticmethod(_gpu("RTX PRO 4500"))
        RTX_PRO_6000 = staticmethod(_gpu("RTX PRO 6000"))
        Quadro_RTX_6000 = staticmethod(_gpu("Quadro RTX 6000"))
        Quadro_RTX_8000 = staticmethod(_gpu("Quadro RTX 8000"))

    class AMD:
        """AMD's GPUs: `MI` and `RadeonPro` take the model; common ones have a factory of their own."""

        MI300X = staticmethod(_gpu("MI300X"))
        MI325X = staticmethod(_gpu("MI325X"))
        MI350X = staticmethod(_gpu("MI350X"))
        MI355X = staticmethod(_gpu("MI355X"))

        @staticmethod
        def MI(model: str, count: int = 1) -> "Accelerator":  # noqa: N802 - the name of the product
            """Require Instinct GPUs, by the part of their name after "MI": `MI("300X")`."""
            return _make(f"MI{model.upper().removeprefix('MI')}", count)

        @staticmethod
        def RadeonPro(model: str, count: int = 1) -> "Accelerator":  # noqa: N802 - the name of the product
            """Require Radeon Pro GPUs by model: `RadeonPro("V710")`."""
            return _make(f"Radeon Pro {model}", count)

    class AWS:
        """Amazon's chips."""

        @staticmethod
        def Trainium(version: int = 2, count: int = 1) -> "Accelerator":  # noqa: N802 - the name of the product
            """Require Trainium chips of the first or second generation."""
            return _make(f"Trainium{version}", count)

        @staticmethod
        def Inferentia(version: int = 2, count: int = 1) -> "Accelerator":  # noqa: N802 - the name of the product
            """Require Inferentia chips of the first or second generation."""
            return _make(f"Inferentia{version}", count)

    class Google:
        """Google's TPUs. None of the supported clouds rents them today."""

        @staticmethod
        def TPU(version: str = "v5p", count: int = 1) -> "Accelerator":  # noqa: N802 - the name of the product
            """Require single TPU chips: `TPU("v5p")`."""
            return _make(f"TPU-{version}", count)

        @staticmethod
        def TPUSlice(accelerator_type: str) -> "Accelerator":  # noqa: N802 - the name of the product
            """Require a slice by Google's accelerator type. `count` is in chips: "v5p-8" has 8 TensorCores, 4 chips.

            v2, v3, v4 and v5p count TensorCores, two to a chip; v5e and v6e count chips
            (docs.cloud.google.com/tpu/docs).
            """
            return _slice(accelerator_type)


class _ByValueToo(EnumType):
    # NVIDIA["A100-40GB"]: the values are the usual names, which are no identifiers
    def __getitem__[Member](cls: type[Member], name: str) -> Member:
        return cast(Any, cls)._value2member_map_.get(name) or cast(Any, EnumType).__getitem__(cls, name)


class NVIDIA(StrEnum, metaclass=_ByValueToo):
    """The names of NVIDIA's GPUs, for type hints and in place of strings: `NVIDIA.A100` is "A100"."""

    T4 = "T4"
    T4g = "T4g"
    L4 = "L4"
    L40 = "L40"
    L40S = "L40S"
    A10 = "A10"
    A10G = "A10G"
    A16 = "A16"
    A30 = "A30"
    A40 = "A40"
    A100 = "A100"
    A100_40GB = "A100-40GB"
    A100_80GB = "A100-80GB"
    H100 = "H100"
    H100_80GB = "H100-80GB"
    H100_SXM = "H100-SXM"
    H100_PCIe = "H100-PCIe"
    H100_NVL = "H100-NVL"
    H200 = "H200"
    B100 = "B100"
    B200 = "B200"
    B300 = "B300"
    GB200 = "GB200"
    GB300 = "GB300"
    GH200 = "GH200"
    V100 = "V100"
    V100_16GB = "V100-16GB"
    V100_32GB = "V100-32GB"
    P100 = "P100"
    RTX_3070 = "RTX 3070"
    RTX_3080 = "RTX 3080"
    RTX_3080_Ti = "RTX 3080 Ti"
    RTX_3090 = "RTX 3090"
    RTX_3090_Ti = "RTX 3090 Ti"
    RTX_4070_Ti = "RTX 4070 Ti"
    RTX_4080 = "RTX 4080"
    RTX_4080_SUPER = "RTX 4080 SUPER"
    RTX_4090 = "RTX 4090"
    RTX_4090D = "RTX 4090D"
    RTX_5080 = "RTX 5080"
    RTX_5090 = "RTX 5090"
    RTX_A2000 = "RTX A2000"
    RTX_A4000 = "RTX A4000"
    RTX_A4500 = "RTX A4500"
    RTX_A5000 = "RTX A5000"
    RTX_A6000 = "RTX A6000"
    RTX_2000_Ada = "RTX 2000 Ada"
    RTX_4000_Ada = "RTX 4000 Ada"
    RTX_5000_Ada = "RTX 5000 Ada"
    RTX_6000_Ada = "RTX 6000 Ada"
    RTX_PRO_4500 = "RTX PRO 4500"
    RTX_PRO_6000 = "RTX PRO 6000"
    Quadro_RTX_6000 = "Quadro RTX 6000"
    Quadro_RTX_8000 = "Quadro RTX 8000"


def _partition_of(name: str, sizes: Sequence[int], memory_gb: object) -> str:
    """Return which partition of the chip has this memory, for a message; "" if none has."""
    found = [profile.name for size in sizes for profile in profiles(name, size)]
    fitting = next((profile for profile in found if profile.endswith(f".{shown(memory_gb)}gb")), None)
    return f". A partition of it has {memory_gb}GB: mig={fitting!r}" if fitting else ""


def parse(requested: "str | NVIDIA | Accelerator") -> Accelerator:
    """Return an accelerator from its name, with memory, form factor or count: "A100-40GB", "H100-SXM", "4xA100".

    "A100:4" has a count too. Case and the separators of words do not matter. An `Accelerator` is returned unchanged.
    Raises BadRequest with the three nearest names.

    >>> parse("2xh100-nvl")
    Accelerator(name='H100', memory_gb=94, count=2, mig=(), form_factor='NVL')
    """
    if isinstance(requested, Accelerator):
        return requested
    if not isinstance(requested, str) or not requested.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(
            f'accelerator={shown(requested)} is not an accelerator: write a name such as "A100" or "4xH100", or use'
            " skyward_core.accelerators.A100()"
        )
    return _parsed(str(requested))


@functools.lru_cache(maxsize=128)
def _parsed(name: str) -> Accelerator:
    text, count = _count(name.strip())
    words = re.split(r"[\s_-]+", text)
    memory = _take(words, r"\d+GB")
    form_factor = _take(words, r"SXM\d?|PCIe|NVL")
    return _make(" ".join(words) or name, count, memory, None, cast("FormFactor | None", form_factor))


def is_nvidia(name: str | Accelerator | None) -> bool:
    """Return whether this is a chip of NVIDIA, by the catalogue, or else by "nvidia" in a driver's name.

    >>> is_nvidia("H100"), is_nvidia("MI300X"), is_nvidia(None)
    (True, False, False)
    """
    return _known(name, lambda accelerator: accelerator.vendor == "NVIDIA") or (
        isinstance(name, str) and "nvidia" in name.casefold()
    )


def is_trainium(name: str | Accelerator | None) -> bool:
    """Return whether this is a Trainium of any generation.

    >>> is_trainium("Trainium2"), is_trainium("H100")
    (True, False)
    """
    return _known(name, lambda accelerator: accelerator.name.startswith("Trainium"))


T4 = Accelerator.NVIDIA.T4
T4g = Accelerator.NVIDIA.T4g
L4 = Accelerator.NVIDIA.L4
L40 = Accelerator.NVIDIA.L40
L40S = Accelerator.NVIDIA.L40S
A10 = Accelerator.NVIDIA.A10
A10G = Accelerator.NVIDIA.A10G
A16 = Accelerator.NVIDIA.A16
A30 = Accelerator.NVIDIA.A30
A40 = Accelerator.NVIDIA.A40
A100 = Accelerator.NVIDIA.A100
H100 = Accelerator.NVIDIA.H100
H200 = Accelerator.NVIDIA.H200
B100 = Accelerator.NVIDIA.B100
B200 = Accelerator.NVIDIA.B200
B300 = Accelerator.NVIDIA.B300
GB200 = Accelerator.NVIDIA.GB200
GB300 = Accelerator.NVIDIA.GB300
GH200 = Accelerator.NVIDIA.GH200
V100 = Accelerator.NVIDIA.V100
P100 = Accelerator.NVIDIA.P100
RTX_3070 = Accelerator.NVIDIA.RTX_3070
RTX_3080 = Accelerator.NVIDIA.RTX_3080
RTX_3080_Ti = Accelerator.NVIDIA.RTX_3080_Ti
RTX_3090 = Accelerator.NVIDIA.RTX_3090
RTX_3090_Ti = Accelerator.NVIDIA.RTX_3090_Ti
RTX_4070_Ti = Accelerator.NVIDIA.RTX_4070_Ti
RTX_4080 = Accelerator.NVIDIA.RTX_4080
RTX_4080_SUPER = Accelerator.NVIDIA.RTX_4080_SUPER
RTX_4090 = Accelerator.NVIDIA.RTX_4090
RTX_4090D = Accelerator.NVIDIA.RTX_4090D
RTX_5080 = Accelerator.NVIDIA.RTX_5080
RTX_5090 = Accelerator.NVIDIA.RTX_5090
RTX_A2000 = Accelerator.NVIDIA.RTX_A2000
RTX_A4000 = Accelerator.NVIDIA.RTX_A4000
RTX_A4500 = Accelerator.NVIDIA.RTX_A4500
RTX_A5000 = Accelerator.NVIDIA.RTX_A5000
RTX_A6000 = Accelerator.NVIDIA.RTX_A6000
RTX_2000_Ada = Accelerator.NVIDIA.RTX_2000_Ada
RTX_4000_Ada = Accelerator.NVIDIA.RTX_4000_Ada
RTX_5000_Ada = Accelerator.NVIDIA.RTX_5000_Ada
RTX_6000_Ada = Accelerator.NVIDIA.RTX_6000_Ada
RTX_PRO_4500 = Accelerator.NVIDIA.RTX_PRO_4500
RTX_PRO_6000 = Accelerator.NVIDIA.RTX_PRO_6000
Quadro_RTX_6000 = Accelerator.NVIDIA.Quadro_RTX_6000
Quadro_RTX_8000 = Accelerator.NVIDIA.Quadro_RTX_8000
MI300X = Accelerator.AMD.MI300X
MI325X = Accelerator.AMD.MI325X
MI350X = Accelerator.AMD.MI350X
MI355X = Accelerator.AMD.MI355X
MI = Accelerator.AMD.MI
RadeonPro = Accelerator.AMD.RadeonPro
Trainium = Accelerator.AWS.Trainium
Inferentia = Accelerator.AWS.Inferentia
TPU = Accelerator.Google.TPU
TPUSlice = Accelerator.Google.TPUSlice


def _make(
    name: str,
    count: int = 1,
    memory: str | None = None,
    mig: str | Sequence[str] | None = None,
    form_factor: FormFactor | None = None,
) -> Accelerator:
    return Accelerator(name, None, count, mig, form_factor, memory=memory)


def _memory_gb(text: object) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*GB\s*", text, re.IGNORECASE | re.ASCII) if isinstance(text, str) else None
    if match is None:
        raise BadRequest(
            f'memory={shown(text)} is not the memory of an accelerator: write the vendor figure, such as "80GB"'
        )
    return whole_of_digits(match.group(1))


def _form_factor(chip: Chip, wanted: str | None) -> str | None:
    if wanted is None:
        return None
    plain = re.sub(r"\d$", "", str(wanted)).casefold()  # SXM4, SXM5: the chip determines the number
    for known in chip.form_factors:
        if known.casefold() == plain:
            return known
    advice = (
        f"it comes as {' or '.join(chip.form_factors)}"
        if chip.form_factors
        else "leave form_factor out, there is only one"
    )
    raise BadRequest(f"there is no {chip.name} with form factor {wanted!r}; {advice}")


def _called(chip: Chip, form_factor: str | None) -> str:
    return f"{chip.name} {form_factor}" if form_factor else chip.name


def _slice(accelerator_type: str) -> Accelerator:
    match = re.fullmatch(r"(?:TPU-)?(v\d\w*)-(\d+)", str(accelerator_type), re.IGNORECASE | re.ASCII)
    if match is None:
        raise BadRequest(f'{accelerator_type!r} is not a TPU slice: write version and size, such as "v5p-8"')
    chip, size = find(f"TPU-{match.group(1)}"), whole_of_digits(match.group(2))
    if size < 1 or size % chip.cores:
        raise BadRequest(
            f"there is no slice {accelerator_type!r}: {chip.name} counts TensorCores, {chip.cores} to a chip"
        )
    return Accelerator(chip.name, chip.memory_gb[0], size // chip.cores)


def _count(text: str) -> tuple[str, int]:
    for pattern in (r"(?P<count>\d+)\s*[x×]\s*(?P<name>\S.*)", r"(?P<name>.*\S)\s*:\s*(?P<count>\d+)"):
        if match := re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII):
            return match["name"], whole_of_digits(match["count"])
    return text, 1


def _take(words: list[str], pattern: str) -> str | None:
    """Remove and return the first word after the name that matches."""
    for index, word in enumerate(words[1:], start=1):
        if re.fullmatch(pattern, word, re.IGNORECASE | re.ASCII):
            return words.pop(index)
    return None


def _known(name: str | Accelerator | None, holds: Callable[[Accelerator], bool]) -> bool:
    """Return whether the name is in the catalogue and `holds` is true for it; drivers may report other names."""
    try:
        return name is not None and holds(parse(name))
    except BadRequest:
        return False
