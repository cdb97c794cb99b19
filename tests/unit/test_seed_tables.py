"""Every row of the reference's tables is supported, or is refused with a message that says what to do.

Each row has the file of the reference (shared/seeds: 000 the guide to accelerators, 001 their reference, 003 the API)
and its line. If vendors and clouds contradict it, they are correct (fact sheet of 2026-11-20), and the row says so.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators.mig import TABLES
from skyward_core.machines.offers import matches
from skyward_core.machines.spot import Strategy, parse, split
from skyward_core.providers import aws_offers

NAMES: dict[str, Any] = {
    "sky": sky,
    "Accelerator": sky.Accelerator,
    "NVIDIA": sky.NVIDIA,
    "AWS": sky.AWS,
    "Spot": sky.Spot,
}


def read(code: str) -> Any:
    """Evaluate a piece of the reference's code."""
    return eval(code, dict(NAMES))


# written so in the reference: chip, GB, count, form factor, partitions
WRITTEN = [
    ("Accelerator.NVIDIA.T4()", "T4", 16, 1, None, ()),  # 001:72, 003:271
    ("Accelerator.NVIDIA.A100()", "A100", 80, 1, None, ()),  # 001:73
    ("Accelerator.NVIDIA.H100()", "H100", 80, 1, None, ()),  # 001:26 and 74, 003:267
    ("Accelerator.NVIDIA.A100(count=4)", "A100", 80, 4, None, ()),  # 001:32
    ("Accelerator.NVIDIA.A100(count=8)", "A100", 80, 8, None, ()),  # 001:77
    ("Accelerator.NVIDIA.H100(count=4)", "H100", 80, 4, None, ()),  # 003:268
    ('Accelerator.NVIDIA.A100(memory="40GB")', "A100", 40, 1, None, ()),  # 001:38 and 80, 003:270
    ('Accelerator.NVIDIA.V100(memory="32GB")', "V100", 32, 1, None, ()),  # 001:81
    ('Accelerator.NVIDIA.H100(form_factor="SXM")', "H100", 80, 1, "SXM", ()),  # 001:84
    ('Accelerator.NVIDIA.H100(form_factor="PCIe")', "H100", 80, 1, "PCIe", ()),  # 001:85
    ('Accelerator.NVIDIA.H100(form_factor="NVL")', "H100", 94, 1, "NVL", ()),  # 001:86; the NVL card has 94 GB
    # 001:129, 003:269: "creates 2 workers"
    ('Accelerator.NVIDIA.H100(mig="3g.40gb")', "H100", 80, 1, None, ("3g.40gb", "3g.40gb")),
    ('Accelerator.NVIDIA.A100(mig=["3g.40gb", "3g.40gb"])', "A100", 80, 1, None, ("3g.40gb", "3g.40gb")),  # 001:142
    ("Accelerator.AWS.Trainium(version=2)", "Trainium2", 96, 1, None, ()),  # 001:198, 003:274
    ("Accelerator.AWS.Inferentia(version=2)", "Inferentia2", 32, 1, None, ()),  # 001:218, 003:275
    ('Accelerator.Google.TPU(version="v5p")', "TPU-v5p", 95, 1, None, ()),  # 001:236, 003:278
    # 001:239, 003:279: eight TensorCores are four chips
    ('Accelerator.Google.TPUSlice("v5p-8")', "TPU-v5p", 95, 4, None, ()),
    ('Accelerator.AMD.MI("300X")', "MI300X", 192, 1, None, ()),  # 001:248, 003:282
    ('Accelerator.AMD.MI("250X")', "MI250X", 128, 1, None, ()),  # 001:249
    ('Accelerator.AMD.RadeonPro("V710")', "Radeon Pro V710", 28, 1, None, ()),  # 001:252
    ("sky.accelerators.A100()", "A100", 80, 1, None, ()),  # 000:20
    ("sky.accelerators.H100(count=4)", "H100", 80, 4, None, ()),  # 000:21
    ("sky.accelerators.H100()", "H100", 80, 1, None, ()),  # 000:24: "already knows it has 80GB"
    ("NVIDIA.A100", "A100", 80, 1, None, ()),  # 001:48
    ('"T4"', "T4", 16, 1, None, ()),  # 001:13
    ('"A100"', "A100", 80, 1, None, ()),  # 001:14, 000:17
    ('"H100"', "H100", 80, 1, None, ()),  # 001:15
]


@pytest.mark.parametrize(
    ("code", "name", "memory_gb", "count", "form_factor", "mig"), WRITTEN, ids=[row[0] for row in WRITTEN]
)
def test_the_accelerators_of_the_reference_are_accepted(
    code: str, name: str, memory_gb: int, count: int, form_factor: str | None, mig: tuple
) -> None:
    accelerator = sky.PoolSpec.of(accelerator=read(code)).accelerator
    assert accelerator is not None
    assert (accelerator.name, accelerator.memory_gb, accelerator.count) == (name, memory_gb, count)
    assert (accelerator.memory, accelerator.form_factor, accelerator.mig) == (f"{memory_gb}GB", form_factor, mig)
    with pytest.raises(dataclasses.FrozenInstanceError):
        accelerator.count = 7  # pyright: ignore[reportAttributeAccessIssue]
    sky.ComputePool(provider=sky.AWS(), accelerator=read(code))


# 003:289-302: method, parameters, memory; and what is refused of it, with the choices that the refusal names
METHODS = [
    # 003:289 has a 40 GB H100, which there is not
    ("H100", ("count", "memory", "mig"), ("80GB",), ("40GB", "80GB or 94GB")),
    ("H200", ("count",), ("141GB",), None),  # 003:290
    ("A100", ("count", "memory", "mig"), ("80GB", "40GB"), None),  # 003:291
    ("B100", ("count",), ("192GB",), None),  # 003:292
    ("B200", ("count",), ("180GB",), ("192GB", "180GB")),  # 003:293 says 192 GB, NVIDIA 180
    # 003:294 says 384 GB, of two GPUs: each has 186, or 189 on the HGX board
    ("GB200", ("count",), ("186GB", "189GB"), ("384GB", "186GB or 189GB")),
    ("GH200", ("count",), ("96GB",), None),  # 003:295
    ("L4", ("count",), ("24GB",), None),  # 003:296
    ("L40", ("count",), ("48GB",), None),  # 003:297
    ("L40S", ("count",), ("48GB",), None),  # 003:298
    ("T4", ("count",), ("16GB",), None),  # 003:299
    ("A10", ("count",), ("24GB",), None),  # 003:300
    ("A10G", ("count",), ("24GB",), None),  # 003:301
    ("V100", ("count", "memory"), ("16GB", "32GB"), None),  # 003:302
]


@pytest.mark.parametrize(("name", "parameters", "memories", "refused"), METHODS, ids=[row[0] for row in METHODS])
def test_a_factory_method(
    name: str, parameters: tuple[str, ...], memories: tuple[str, ...], refused: tuple[str, str] | None
) -> None:
    factory = getattr(sky.Accelerator.NVIDIA, name)
    assert set(parameters) <= set(inspect.signature(factory).parameters)
    assert factory(count=2) == getattr(sky.accelerators, name)(2)
    assert (factory(count=2).count, factory().count, factory().memory) == (2, 1, memories[0])
    assert [factory(memory=memory).memory for memory in memories] == list(memories)
    assert "mig" not in parameters or any(table.chip == name for table in TABLES)
    if refused is not None:
        with pytest.raises(sky.BadRequest, match=refused[1]):
            factory(memory=refused[0])


# 001:57-64: GPU, memory, AWS's families; all families that have it, one of which need not be named there
AWS_FAMILIES = [
    ("T4", 16, {"g4dn"}),  # 001:57
    ("L4", 24, {"g6", "gr6"}),  # 001:58
    ("L40S", 48, {"g6e"}),  # 001:59
    ("A10G", 24, {"g5"}),  # 001:60
    ("A100-40GB", 40, {"p4d"}),  # 001:61 says p4de, which has those of 80 GB
    ("A100-80GB", 80, {"p4de"}),  # 001:62 says p4d as well, which has those of 40 GB
    ("H100-80GB", 80, {"p5"}),  # 001:63
    ("H200", 141, {"p5e", "p5en"}),  # 001:64
]


def aws_machines() -> list[sky.Offer]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    machines = [aws_offers.machine_of(kind, "us-east-1") for kind in INSTANCE_TYPES.values()]
    return [machine[0] for machine in machines if machine is not None]


@pytest.mark.parametrize(("requested", "gb", "families"), AWS_FAMILIES, ids=[row[0] for row in AWS_FAMILIES])
def test_a_gpu_is_an_instance_type_of_aws(requested: str, gb: int, families: set[str]) -> None:
    accelerator = sky.accelerators.parse(requested)
    assert accelerator.memory_gb == gb
    want = sky.Requirements(accelerator=accelerator)
    found = [offer.instance_type for offer in aws_machines() if matches(offer, want) is None]
    assert {name.split(".")[0] for name in found} == families


# 001:207-209, 227-228: type, chips, memory of all in GB
NEURON_MACHINES = [
    ("trn1.2xlarge", "Trainium1", 1, 32),  # 001:207
    ("trn1.32xlarge", "Trainium1", 16, 512),  # 001:208
    ("trn2.48xlarge", "Trainium2", 16, 1536),  # 001:209 says 1 TB, AWS 1.5
    ("inf2.xlarge", "Inferentia2", 1, 32),  # 001:227
    ("inf2.48xlarge", "Inferentia2", 12, 384),  # 001:228
]


@pytest.mark.parametrize(
    ("instance_type", "name", "count", "gb"), NEURON_MACHINES, ids=[row[0] for row in NEURON_MACHINES]
)
def test_a_machine_with_chips_of_amazons(instance_type: str, name: str, count: int, gb: int) -> None:
    (offer,) = (offer for offer in aws_machines() if offer.instance_type == instance_type)
    assert (offer.accelerator, offer.accelerators) == (name, count)
    assert offer.accelerators * (offer.accelerator_memory_gb or 0) == gb
    version = int(name[-1])
    factory = sky.accelerators.Trainium if name.startswith("Trainium") else sky.accelerators.Inferentia
    assert matches(offer, sky.Requirements(accelerator=factory(version, count))) is None
    assert name not in aws_offers.WITHOUT_IMAGE


@pytest.mark.parametrize("requested", ["TPU-v5p", "Radeon Pro V710", "B100", "GB200"])
def test_accelerators_without_a_provider_are_refused_with_the_alternatives(requested: str) -> None:
    sky.PoolSpec.of(accelerator=requested)
    with pytest.raises(
        sky.NoCapacity, match=r"rented by none of the built-in clouds; nearest to it in memory is .+ \(.+\)"
    ):
        sky.select_instance(aws_machines(), accelerator=requested)


# 000, 002:20 and 60, 003:91 and 201-253, 004:13: provider, parameter, default
PARAMETERS = [
    ("AWS", "region", "us-east-1"),  # 003:218
    ("AWS", "use_ssm", False),  # 003:219; what it does: tests/system/providers/test_aws_ssm.py
    # 003:235 says "nyc1", which hides the H100s of nyc2, tor1 and ams3: decisions/0009
    ("DigitalOcean", "region", None),
    ("Verda", "region", None),  # 003:253: "auto-discovers if None"
]


@pytest.mark.parametrize(
    ("provider", "parameter", "default"), PARAMETERS, ids=[f"{row[0]}-{row[1]}" for row in PARAMETERS]
)
def test_a_parameter_of_a_provider(provider: str, parameter: str, default: object) -> None:
    kind = getattr(sky, provider)
    assert getattr(kind(), parameter) == default
    assert parameter not in kind().to_json()
    other = {"region": "us-west-2", "use_ssm": True}[parameter]
    assert getattr(kind(**{parameter: other}), parameter) == other
    assert kind(**{parameter: other}).to_json()[parameter] == other


def test_an_instance_type_has_priority() -> None:
    want = sky.PoolSpec.of(machine="p5.48xlarge", accelerator="H100").requirements
    assert [offer.instance_type for offer in aws_machines() if matches(offer, want) is None] == ["p5.48xlarge"]


def test_cpu_and_memory_are_those_of_a_worker() -> None:
    want = sky.PoolSpec.of(cpu=8, memory="32GB", accelerator=sky.accelerators.H100(mig="3g.40gb")).requirements
    assert (want.vcpus, want.memory_gb) == (16, 64.0)


# 003:694-705: what is written, the strategy, and (on demand, spot) of ten machines where spot is sold and where it is
# not; None: refused
STRATEGIES = [
    ('"always"', sky.Spot.Always(), (0, 10), None),  # 003:694: "must use spot"
    ('"if-available"', sky.Spot.IfAvailable(), (0, 10), (10, 0)),  # 003:695: "try spot, fallback"
    ('"never"', sky.Spot.Never, (10, 0), (10, 0)),  # 003:696: "always on-demand"
    ("0.8", sky.Spot.Percent(0.8), (2, 8), None),  # 003:699: "at least 80% spot"
    ("Spot.Always(retries=10, interval=1.0)", sky.Spot.Always(), (0, 10), None),  # 003:702, and the defaults
    ("Spot.IfAvailable()", sky.Spot.IfAvailable(), (0, 10), (10, 0)),  # 003:703
    ("Spot.Never", sky.Spot.Never, (10, 0), (10, 0)),  # 003:704
    ("Spot.Percent(0.8)", sky.Spot.Percent(0.8), (2, 8), None),  # 003:705
]


@pytest.mark.parametrize(("code", "strategy", "sold", "not_sold"), STRATEGIES, ids=[row[0] for row in STRATEGIES])
def test_a_spot_strategy(
    code: str, strategy: Strategy, sold: tuple[int, int], not_sold: tuple[int, int] | None
) -> None:
    assert parse(read(code)) == sky.PoolSpec.of(spot=read(code)).spot == strategy
    assert split(strategy, 10, spot_sold=True) == sold
    if not_sold is None:
        with pytest.raises(sky.BadRequest, match='try spot="if-available" or spot="never"'):
            split(strategy, 10, spot_sold=False)
    else:
        assert split(strategy, 10, spot_sold=False) == not_sold
