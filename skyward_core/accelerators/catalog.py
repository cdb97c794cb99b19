"""One row for each chip that the supported clouds rent, or that the documents name.

This is the only place for facts about a chip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from skyward_core.errors import BadRequest

_MIG_GUIDE = (
    "NVIDIA MIG User Guide, Supported GPUs, docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-gpus.html"
)
_EC2 = "AWS EC2 DescribeInstanceTypes, "
_RUNPOD = "RunPod documentation, docs.runpod.io/references/gpu-types.md"
_GPUHUNT = "dstackai/gpuhunt, src/gpuhunt/_internal/constraints.py"
_VAST = (
    "Vast.ai, GPU names of the offers API (fact sheet of 2026-11-20, section 4.6); size as on NVIDIA's product page,"
    " not checked again"
)
_ROCM = "AMD ROCm, GPU hardware specifications, rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
_NEURON = "; cores: AWS Neuron documentation, NeuronCore architecture, and EC2 DescribeInstanceTypes, CoreInfo"
_TPU = "Google Cloud, TPU system architecture, docs.cloud.google.com/tpu/docs/"
_CUDA_CAPABILITIES: Mapping[str, frozenset[str]] = {
    "6.0": frozenset({"P100"}),
    "7.0": frozenset({"V100"}),
    "7.5": frozenset({"T4", "T4g", "Quadro RTX 6000", "Quadro RTX 8000"}),
    "8.0": frozenset({"A30", "A100"}),
    "8.6": frozenset({"A10", "A10G", "A16", "A40", "RTX 3070", "RTX 3080", "RTX 3080 Ti", "RTX 3090", "RTX 3090 Ti"})
    | {"RTX A2000", "RTX A4000", "RTX A4500", "RTX A5000", "RTX A6000"},
    "8.9": frozenset({"L4", "L40", "L40S", "RTX 4070 Ti", "RTX 4080", "RTX 4080 SUPER", "RTX 4090", "RTX 4090D"})
    | {"RTX 2000 Ada", "RTX 4000 Ada", "RTX 5000 Ada", "RTX 6000 Ada"},
    "9.0": frozenset({"H100", "H200", "GH200"}),
    "10.0": frozenset({"B100", "B200", "GB200"}),
    "10.3": frozenset({"B300", "GB300"}),
    "12.0": frozenset({"RTX 5080", "RTX 5090", "RTX PRO 4500", "RTX PRO 6000"}),
}
"""NVIDIA's list of compute capabilities, developer.nvidia.com/cuda-gpus; P100 and V100: cuda-legacy-gpus. A10G, T4g and
the variants that are not listed have that of their architecture; B100 as B200.
"""
# words in drivers' and clouds' names ("NVIDIA H100 80GB HBM3") that do not identify the chip
_NOISE = frozenset(
    {
        "nvidia",
        "geforce",
        "tesla",
        "amd",
        "instinct",
        "oam",
        "generation",
        "blackwell",
        "edition",
        "server",
        "workstation",
        "hbm3",
    }
)
CUDA = re.compile(r"(?<![a-z0-9])cu(?:da)?[-:]?(1[0-9])[.-]?([0-9])?")
"""As in cu128, cu1281, cuda12x, cuda:12.4.1, cuda-13.0, nvidia-cublas-cu12.

Versions before 10 work with every driver.
"""


type Vendor = Literal["NVIDIA", "AMD", "AWS", "Google"]
type FormFactor = Literal["SXM", "PCIe", "NVL"]


@dataclass(frozen=True, slots=True)
class Chip:
    """The facts about one chip.

    `memory_gb` has the existing sizes, in the vendor's figure for one chip, the default first. `form_factors` are those
    that offers distinguish; `memory_of` has those with fewer sizes. `mig` means that the driver can partition it.
    `aliases` are other names. `cores` is how many TensorCores a TPU slice's name counts for this chip. `neuron_cores`
    is the number of physical NeuronCores; by default AWS's runtime treats `neuron_cores_in_one` of them as one.
    `source` and `checked` are the source of the row and its date.
    """

    name: str
    vendor: Vendor
    memory_gb: tuple[int, ...]
    source: str
    form_factors: tuple[FormFactor, ...] = ()
    mig: bool = False
    memory_of: tuple[tuple[FormFactor, tuple[int, ...]], ...] = ()
    aliases: tuple[str, ...] = ()
    cores: int = 1
    neuron_cores: int = 0
    neuron_cores_in_one: int = 1
    checked: str = "2026-11"

    @property
    def cuda_capability(self) -> str | None:
        """The CUDA compute capability, as "9.0"; None for chips of other vendors."""
        return next((capability for capability, names in _CUDA_CAPABILITIES.items() if self.name in names), None)

    def memory_choices(self, form_factor: str | None = None) -> tuple[int, ...]:
        """Return the sizes, in GB, that exist in this form factor; the default first."""
        return dict[str, tuple[int, ...]](self.memory_of).get(form_factor or "", self.memory_gb)


CHIPS: tuple[Chip, ...] = (
    Chip("T4", "NVIDIA", (16,), _EC2 + "g4dn"),
    Chip("T4g", "NVIDIA", (16,), _EC2 + "g5g"),
    Chip("L4", "NVIDIA", (24,), _EC2 + "g6 (22888 MiB); " + _GPUHUNT),
    Chip("L40", "NVIDIA", (48,), _GPUHUNT),
    Chip("L40S", "NVIDIA", (48,), _EC2 + "g6e (45776 MiB); " + _GPUHUNT),
    Chip("A10", "NVIDIA", (24,), _GPUHUNT),
    Chip("A10G", "NVIDIA", (24,), _EC2 + "g5 (22888 MiB); " + _GPUHUNT),
    Chip("A16", "NVIDIA", (16,), _GPUHUNT + ": one of the four chips of a board"),
    Chip("A30", "NVIDIA", (24,), _MIG_GUIDE, mig=True),
    Chip("A40", "NVIDIA", (48,), _RUNPOD),
    Chip("A100", "NVIDIA", (80, 40), _MIG_GUIDE, ("SXM", "PCIe"), mig=True),
    Chip(
        "H100",
        "NVIDIA",
        (80, 94),
        _MIG_GUIDE + "; NVL is the 94 GB PCIe card, RunPod's H100 NVL",
        ("SXM", "PCIe", "NVL"),
        mig=True,
        memory_of=(("PCIe", (80,)), ("NVL", (94,))),
    ),
    Chip("H200", "NVIDIA", (141,), _MIG_GUIDE, ("SXM", "NVL"), mig=True),
    Chip("B100", "NVIDIA", (192,), "fact sheet of 2026-11-20, section 6: announced, sold by no cloud"),
    Chip("B200", "NVIDIA", (180,), _MIG_GUIDE + "; EC2 p6-b200: 183359 MiB", mig=True),
    Chip(
        "B300",
        "NVIDIA",
        (288,),
        _RUNPOD + "; EC2 p6-b300: 275040 MiB = 288 GB, which other lists give as 268 or 270 GiB",
        mig=True,
    ),
    Chip(
        "GB200",
        "NVIDIA",
        (186, 189),
        _MIG_GUIDE + "; 189 GB on the HGX board, NVIDIA/mig-parted, config-default.yaml; one GPU of a superchip's two",
        mig=True,
    ),
    Chip(
        "GB300",
        "NVIDIA",
        (288,),
        "Verda 1GB300.32V (fact sheet of 2026-11-20, section 3); one GPU of a superchip's two",
        mig=True,
    ),
    Chip("GH200", "NVIDIA", (96, 144), _MIG_GUIDE + "; 144 GB HBM3e: NVIDIA/mig-parted, config-default.yaml", mig=True),
    Chip("V100", "NVIDIA", (16, 32), _RUNPOD + "; " + _GPUHUNT, ("SXM", "PCIe")),
    Chip("P100", "NVIDIA", (16,), _GPUHUNT),
    Chip("RTX 3070", "NVIDIA", (8,), _RUNPOD),
    Chip("RTX 3080", "NVIDIA", (10,), _RUNPOD),
    Chip("RTX 3080 Ti", "NVIDIA", (12,), _RUNPOD),
    Chip("RTX 3090", "NVIDIA", (24,), _GPUHUNT),
    Chip("RTX 3090 Ti", "NVIDIA", (24,), _RUNPOD),
    Chip("RTX 4070 Ti", "NVIDIA", (12,), _RUNPOD),
    Chip("RTX 4080", "NVIDIA", (16,), _RUNPOD),
    Chip("RTX 4080 SUPER", "NVIDIA", (16,), _RUNPOD),
    Chip("RTX 4090", "NVIDIA", (24,), _GPUHUNT),
    Chip("RTX 4090D", "NVIDIA", (24,), _VAST),
    Chip("RTX 5080", "NVIDIA", (16,), _RUNPOD),
    Chip("RTX 5090", "NVIDIA", (32,), _RUNPOD),
    Chip("RTX A2000", "NVIDIA", (6,), _RUNPOD),
    Chip("RTX A4000", "NVIDIA", (16,), _GPUHUNT, aliases=("A4000",)),
    Chip("RTX A4500", "NVIDIA", (20,), _GPUHUNT, aliases=("A4500",)),
    Chip("RTX A5000", "NVIDIA", (24,), _GPUHUNT, aliases=("A5000",)),
    Chip("RTX A6000", "NVIDIA", (48,), _GPUHUNT, aliases=("A6000",)),
    Chip("RTX 2000 Ada", "NVIDIA", (16,), _GPUHUNT),
    Chip("RTX 4000 Ada", "NVIDIA", (20,), "DigitalOcean /v2/sizes, gpu-4000adax1-20gb; " + _GPUHUNT),
    Chip("RTX 5000 Ada", "NVIDIA", (32,), _RUNPOD),
    Chip("RTX 6000 Ada", "NVIDIA", (48,), "DigitalOcean /v2/sizes, gpu-6000adax1-48gb; " + _GPUHUNT),
    Chip("RTX PRO 4500", "NVIDIA", (32,), _MIG_GUIDE + " (R610); EC2 g7: 32768 MiB", mig=True),
    Chip("RTX PRO 6000", "NVIDIA", (96,), _MIG_GUIDE + "; EC2 g7e: 98304 MiB", mig=True),
    Chip("Quadro RTX 6000", "NVIDIA", (24,), _VAST + "; " + _GPUHUNT),
    Chip("Quadro RTX 8000", "NVIDIA", (48,), _VAST),
    Chip("MI50", "AMD", (32, 16), _ROCM),
    Chip("MI100", "AMD", (32,), _ROCM),
    Chip("MI210", "AMD", (64,), _ROCM),
    Chip("MI250", "AMD", (128,), _ROCM + "; " + _GPUHUNT),
    Chip("MI250X", "AMD", (128,), _ROCM),
    Chip("MI300A", "AMD", (128,), _ROCM + "; " + _GPUHUNT),
    Chip("MI300X", "AMD", (192,), _RUNPOD + "; DigitalOcean gpu-mi300x1-192gb"),
    Chip("MI325X", "AMD", (256,), "DigitalOcean /v2/sizes, gpu-mi325x1-256gb"),
    Chip("MI350X", "AMD", (288,), "DigitalOcean /v2/sizes, gpu-mi350x1-288gb"),
    Chip("MI355X", "AMD", (288,), "DigitalOcean /v2/sizes, gpu-mi355x1-288gb"),
    Chip("Radeon Pro V520", "AMD", (8,), _EC2 + "g4ad", aliases=("V520",)),
    Chip("Radeon Pro V710", "AMD", (28,), _ROCM, aliases=("V710",)),
    Chip("Trainium1", "AWS", (32,), _EC2 + "trn1" + _NEURON, aliases=("Trainium", "Trn1"), neuron_cores=2),
    Chip(
        "Trainium2",
        "AWS",
        (96,),
        "AWS, trn2: 1.5 TB over 16 chips; DescribeInstanceTypes' 524288 MiB for one is wrong"
        + _NEURON
        + "; Logical NeuronCore configuration: 2 by default",
        aliases=("Trn2",),
        neuron_cores=8,
        neuron_cores_in_one=2,
    ),
    Chip("Inferentia1", "AWS", (8,), _EC2 + "inf1" + _NEURON, aliases=("Inferentia", "Inf1"), neuron_cores=4),
    Chip("Inferentia2", "AWS", (32,), _EC2 + "inf2" + _NEURON, aliases=("Inf2",), neuron_cores=2),
    Chip(
        "TPU-v2",
        "Google",
        (16,),
        "gpuhunt's 8 GB for each of two TensorCores (fact sheet of 2026-11-20, section 6: from 8 GB up); page "
        + _TPU
        + "v2 not seen",
        cores=2,
    ),
    Chip("TPU-v3", "Google", (32,), _TPU + "v3", cores=2),
    Chip("TPU-v4", "Google", (32,), _TPU + "v4", cores=2),
    Chip("TPU-v5e", "Google", (16,), _TPU + "v5e", aliases=("TPU-v5litepod",)),
    Chip("TPU-v5p", "Google", (95,), _TPU + "v5p", cores=2),
    Chip("TPU-v6e", "Google", (32,), _TPU + "v6e"),
)


def find(name: str) -> Chip:
    """Return the row of a chip by its name, in any case and with any separator of words, or none.

    Raises BadRequest with the three nearest names.

    >>> find("rtx_4090").name
    'RTX 4090'
    """
    if found := _BY_KEY.get(_key(name)):
        return found
    near = ", ".join(repr(each) for each in nearest(name, tuple(chip.name for chip in CHIPS)))
    raise BadRequest(
        f"there is no accelerator {name!r}; the nearest are {near}. The catalogue is"
        " skyward_core.accelerators.catalog.CHIPS"
    )


def nearest(name: str, choices: tuple[str, ...], count: int = 3) -> list[str]:
    """Return the `count` choices that are most similar to this name, the most similar first."""
    from difflib import get_close_matches

    keys = {_key(choice): choice for choice in choices}
    return [keys[key] for key in get_close_matches(_key(name), keys, count, cutoff=0.0)]


def _key(name: str) -> str:
    return "".join(word for word in re.split(r"[\s_-]+", str(name).casefold()) if word not in _NOISE)


_BY_KEY = {_key(name): chip for chip in CHIPS for name in (chip.name, *chip.aliases)}


def cuda_of(text: str) -> float | None:
    """Return the newest CUDA version in a requirement, an index's URL or an image's name; None if it has none.

    >>> [cuda_of(text) for text in ("torch==2.9.1+cu128", "cupy-cuda12x", "nvidia/cuda:12.4.1-ubuntu22.04", "torch")]
    [12.8, 12.0, 12.4, None]
    """
    found = [(int(major), int(minor or 0)) for major, minor in CUDA.findall(text.casefold())]
    major, minor = max(found, default=(0, 0))
    return float(f"{major}.{minor}") if found else None
