"""Which clouds rent which chips, and the tables of docs/accelerators.md.

To write the table of chips anew: WRITE=1 .venv/bin/pytest -k tables_of_the_docs tests/unit/accelerators
"""

import os
from pathlib import Path

import pytest

from skyward_core import accelerators
from skyward_core.accelerators import Accelerator, parse
from skyward_core.accelerators.catalog import CHIPS
from skyward_core.errors import NoCapacity
from skyward_core.machines.offers import Requirements
from skyward_core.providers import aws_offers
from skyward_core.providers.base import BUILT_IN, advice, kind_of, rank, rented_by
from skyward_core.providers.digitalocean import to_offers
from skyward_core.providers.runpod import accelerator_of as chip_of_runpod
from skyward_core.providers.vastai_market import GPU_NAMES
from skyward_core.providers.vastai_market import accelerator_of as chip_of_vastai
from skyward_core.providers.verda import to_offer
from tests.offers import offer

# fact sheet of 2026-11-20: the clouds' own names, sections 2.6, 3.6, 4.6 and 5.5; AWS's are in its own descriptions, of
# which moto has a copy
DIGITALOCEAN = "nvidia_rtx4000_ada nvidia_rtx6000_ada nvidia_l40s nvidia_h100 nvidia_h200 nvidia_b300 amd_mi300x amd_mi325x amd_mi350x amd_mi355x"
VERDA = (
    "Tesla V100 16GB, RTX A6000 48GB, RTX6000 Ada 48GB, L40S 48GB, RTX PRO 6000 96GB, A100 SXM4 40GB, A100 SXM4 80GB, H100 SXM5 80GB, H200 SXM5 141GB, "
    "B200 SXM6 180GB, B300 SXM6 268GB, GB300 288GB"
)
VAST = (
    "A10, A10g, A16, A30, A40, A100 PCIE, A100 SXM4, A100X, H100 PCIE, H100 NVL, H100 SXM, H200, H200 NVL, GH200 SXM, B200, B300, B300 PC, L4, L40, L40S, "
    "Tesla T4, Tesla V100, Tesla P100, RTX 3090, RTX 3090 Ti, RTX 4090, RTX 4090D, RTX 5090, RTX A4000, RTX A5000, RTX A6000, RTX 4000Ada, RTX 5000Ada, "
    "RTX 6000Ada, RTX PRO 6000 S, RTX PRO 6000 WS, RTX PRO 6000 Max-Q, Q RTX 6000, Q RTX 8000, InstinctMI50, InstinctMI100, InstinctMI210, InstinctMI250X, "
    "InstinctMI300X"
)
RUNPOD = (
    "NVIDIA A100 80GB PCIe, NVIDIA A100-SXM4-80GB, NVIDIA A100-SXM4-40GB, NVIDIA H100 PCIe, NVIDIA H100 NVL, NVIDIA H100 80GB HBM3, NVIDIA H200, "
    "NVIDIA H200 NVL, NVIDIA B200, NVIDIA B300 SXM6 AC, AMD Instinct MI300X OAM, NVIDIA L4, NVIDIA L40, NVIDIA L40S, NVIDIA A30, NVIDIA A40, "
    "NVIDIA RTX A4000, NVIDIA RTX A4500, NVIDIA RTX A5000, NVIDIA RTX A6000, NVIDIA RTX A2000, NVIDIA RTX 2000 Ada Generation, "
    "NVIDIA RTX 4000 Ada Generation, NVIDIA RTX 5000 Ada Generation, NVIDIA RTX 6000 Ada Generation, NVIDIA RTX PRO 6000 Blackwell Server Edition, "
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, NVIDIA RTX PRO 4500 Blackwell, NVIDIA GeForce RTX 3070, NVIDIA GeForce RTX 3080, "
    "NVIDIA GeForce RTX 3080 Ti, NVIDIA GeForce RTX 3090, NVIDIA GeForce RTX 3090 Ti, NVIDIA GeForce RTX 4070 Ti, NVIDIA GeForce RTX 4080, "
    "NVIDIA GeForce RTX 4080 SUPER, NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 5080, NVIDIA GeForce RTX 5090, Tesla V100-PCIE-16GB, Tesla V100-SXM2-16GB, "
    "Tesla V100-SXM2-32GB"
)


def of_digitalocean() -> set[str | None]:
    rows = [
        {"slug": model, "gpu_info": {"count": 1, "model": model, "vram": {"amount": 1}}}
        for model in DIGITALOCEAN.split()
    ]
    more = {"available": True, "price_hourly": 1.0, "vcpus": 8, "memory": 1024, "regions": ["nyc1"]}
    return {offer.accelerator for offer in to_offers([row | more for row in rows])}


def of_verda() -> set[str | None]:
    more = {
        "instance_type": "x",
        "price_per_hour": "1",
        "cpu": {"number_of_cores": 1},
        "memory": {"size_in_gigabytes": 1},
    }
    rows = [
        {"gpu": {"number_of_gpus": 1, "description": f"1x {name}"}, "gpu_memory": {"size_in_gigabytes": 1}, **more}
        for name in VERDA.split(", ")
    ]
    offers = [to_offer(row, "FIN-01", is_spot=False) for row in rows]
    return {offer.accelerator if offer is not None else None for offer in offers}


def of_aws() -> set[str | None]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    machines = [aws_offers.machine_of(kind, "us-east-1") for kind in INSTANCE_TYPES.values()]
    assert "g4ad.xlarge" in aws_offers.PRICES  # of the Radeon Pro V520; newer copies of AWS's descriptions lack it
    return {offer.accelerator for offer, _ in filter(None, machines) if offer.accelerator is not None} | {
        "Radeon Pro V520"
    }


@pytest.mark.parametrize(
    ("cloud", "sold"),
    [
        ("aws", of_aws),
        ("digitalocean", of_digitalocean),
        ("verda", of_verda),
        ("vastai", lambda: {getattr(chip_of_vastai(name), "name", name) for name in GPU_NAMES}),
        ("runpod", lambda: {getattr(chip_of_runpod(name), "name", name) for name in RUNPOD.split(", ")}),
    ],
)
def test_the_table_of_rented_chips_matches_the_clouds_names(cloud, sold):
    """It has exactly the chips that our providers read from the names in the cloud's catalogue."""
    assert kind_of(cloud).rents == sold()


def test_the_clouds_are_the_built_in_ones():
    """`Hosts` is not a cloud. Each name of Vast.ai's fact sheet can be used in a search there."""
    clouds = {name for name in BUILT_IN if kind_of(name).rents and kind_of(name).display_name}
    assert clouds == set(BUILT_IN) - {"local", "hosts"}
    assert set(VAST.split(", ")) <= set(GPU_NAMES)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("MI325X", "MI325X is rented by DigitalOcean"),
        ("Trainium2", "Trainium2 is rented by AWS"),
        ("A10G", "A10G is rented by AWS, Vast.ai"),
        ("B100", "none of the built-in clouds; nearest to it in memory is B300 288GB (AWS, "),
        ("TPU-v5p", "none of the built-in clouds; nearest to it in memory is RTX PRO 6000 96GB (AWS, "),
        ("Radeon Pro V710", "none of the built-in clouds; nearest to it in memory is MI50 32GB (Vast.ai)"),
    ],
)
def test_a_refusal_names_the_clouds_that_rent_the_chip(requested, expected):
    """If no offer has the chip, the message names its clouds, or a similar chip."""
    for offers in ([], [offer(accelerator="T4", accelerators=1)]):
        with pytest.raises(NoCapacity) as refusal:
            rank(offers, Requirements(accelerator=parse(requested)))
        assert expected in str(refusal.value)


def test_a_substitute_is_never_smaller_if_there_is_a_larger_one():
    """At least one cloud rents the substitute."""
    for chip in CHIPS:
        if not rented_by(chip.name):
            name, memory = (
                advice(Accelerator(chip.name, chip.memory_gb[0]))
                .split(" in memory is ")[1]
                .split(" (")[0]
                .rsplit(" ", 1)
            )
            assert rented_by(name)
            assert int(memory.removesuffix("GB")) >= chip.memory_gb[0]


def row_of(chip):
    memory = ", ".join(str(gb) for gb in chip.memory_gb)
    for form, sizes in chip.memory_of:
        memory += f"; {form} {', '.join(str(gb) for gb in sizes)}"
    clouds = [
        f"{cloud} ¹" if cloud == "AWS" and chip.name in aws_offers.WITHOUT_IMAGE else cloud
        for cloud in rented_by(chip.name)
    ]
    facts = chip.name, chip.vendor, memory, chip.cuda_capability or "", ", ".join(chip.form_factors)
    return f"| {' | '.join(facts)} | {'yes' if chip.mig else ''} | {', '.join(clouds) or 'no cloud'} |"


def test_the_tables_of_the_docs_are_the_catalogue():
    """One row for each chip in the catalogue's order, and one for each chip with NeuronCores."""
    place = Path(accelerators.__file__).parents[2] / "docs/accelerators.md"
    page = place.read_text()
    head = "| name | by | GB | CUDA ² | form factors | MIG | rented by |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    table = head + "\n".join(row_of(chip) for chip in CHIPS) + "\n\n"
    if os.environ.get("WRITE"):
        before, _, after = page.partition(head)
        place.write_text(page := before + table + after.partition("\n\n")[2])
    assert table in page
    for chip in CHIPS:
        cores = f"| {chip.name} | {chip.neuron_cores} | {chip.neuron_cores // chip.neuron_cores_in_one}"
        assert (cores in page) == bool(chip.neuron_cores)
