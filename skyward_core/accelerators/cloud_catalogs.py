"""The chips in the catalogues of the built-in clouds.

Only a cloud's API reports whether a machine is free now, and its price.
"""

from collections.abc import Mapping

from skyward_core.accelerators import Accelerator
from skyward_core.accelerators.catalog import CHIPS, Chip

CLOUDS: Mapping[str, str] = {
    "aws": "AWS",
    "digitalocean": "DigitalOcean",
    "verda": "Verda",
    "vastai": "Vast.ai",
    "runpod": "RunPod",
}
"""Names of the providers, and the clouds' names for messages."""

RENTED: Mapping[str, tuple[str, ...]] = {
    "aws": (
        *(
            "T4",
            "T4g",
            "L4",
            "L40S",
            "A10G",
            "A100",
            "H100",
            "H200",
            "B200",
            "B300",
            "V100",
            "RTX PRO 4500",
            "RTX PRO 6000",
            "Radeon Pro V520",
        ),
        *("Trainium1", "Trainium2", "Inferentia1", "Inferentia2"),
    ),
    "digitalocean": (
        "L40S",
        "H100",
        "H200",
        "B300",
        "RTX 4000 Ada",
        "RTX 6000 Ada",
        "MI300X",
        "MI325X",
        "MI350X",
        "MI355X",
    ),
    "verda": (
        "L40S",
        "A100",
        "H100",
        "H200",
        "B200",
        "B300",
        "GB300",
        "V100",
        "RTX A6000",
        "RTX 6000 Ada",
        "RTX PRO 6000",
    ),
    "vastai": (
        *(
            "T4",
            "L4",
            "L40",
            "L40S",
            "A10",
            "A10G",
            "A16",
            "A30",
            "A40",
            "A100",
            "H100",
            "H200",
            "B200",
            "B300",
            "GH200",
            "V100",
            "P100",
        ),
        *(
            "RTX 3070",
            "RTX 3080",
            "RTX 3080 Ti",
            "RTX 3090",
            "RTX 3090 Ti",
            "RTX 4070 Ti",
            "RTX 4080",
            "RTX 4080 SUPER",
            "RTX 4090",
            "RTX 4090D",
        ),
        *(
            "RTX 5080",
            "RTX 5090",
            "RTX A2000",
            "RTX A4000",
            "RTX A4500",
            "RTX A5000",
            "RTX A6000",
            "RTX 2000 Ada",
            "RTX 4000 Ada",
            "RTX 5000 Ada",
        ),
        *(
            "RTX 6000 Ada",
            "RTX PRO 6000",
            "Quadro RTX 6000",
            "Quadro RTX 8000",
            "MI50",
            "MI100",
            "MI210",
            "MI250X",
            "MI300X",
        ),
    ),
    "runpod": (
        *("L4", "L40", "L40S", "A30", "A40", "A100", "H100", "H200", "B200", "B300", "V100"),
        *(
            "RTX 3070",
            "RTX 3080",
            "RTX 3080 Ti",
            "RTX 3090",
            "RTX 3090 Ti",
            "RTX 4070 Ti",
            "RTX 4080",
            "RTX 4080 SUPER",
            "RTX 4090",
            "RTX 5080",
            "RTX 5090",
        ),
        *(
            "RTX A2000",
            "RTX A4000",
            "RTX A4500",
            "RTX A5000",
            "RTX A6000",
            "RTX 2000 Ada",
            "RTX 4000 Ada",
            "RTX 5000 Ada",
            "RTX 6000 Ada",
        ),
        *("RTX PRO 4500", "RTX PRO 6000", "MI300X"),
    ),
}
"""The chips of each cloud, as of 2026-11-20: fact sheet, sections 1.11, 2.6, 3.6, 4.6 and 5.5.

Tests compare it with those lists, and with AWS's own.
"""


def rented_by(name: str) -> tuple[str, ...]:
    """Return the clouds that rent this chip of the catalogue, by their names in `CLOUDS`.

    >>> rented_by("MI325X")
    ('DigitalOcean',)
    """
    return tuple(CLOUDS[cloud] for cloud, chips in RENTED.items() if name in chips)


A100_ON_AWS: Mapping[int, str] = {80: "p4de.24xlarge", 40: "p4d.24xlarge"}
"""The types with A100, by the memory of each chip in GB. AWS's API names both chips A100, and reports 40960 and 81920
MiB (DescribeInstanceTypes, checked 2026-11).
"""


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
