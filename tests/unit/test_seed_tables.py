"""Every row of the reference's tables is supported, or is refused with a message that says what to do.

The tables are those of accelerators, providers, machines, images, volumes and spot strategies. The rows are data here,
each with the file of the reference (shared/seeds: 000 the guide to accelerators, 001 their reference, 003 the API) and
its line. If vendors and clouds contradict the reference, they are correct (fact sheet of 2026-11-20), and the row says
so.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators import partitions
from skyward_core.accelerators.mig import TABLES, profiles
from skyward_core.machines.offers import matches
from skyward_core.machines.spot import Strategy, parse, split
from skyward_core.providers.aws import offers as aws_offers
from skyward_core.worker.info import ENV, to_env

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


# ── accelerators ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
    """A frozen value with name, memory and count. A pool of any provider, or of several, accepts it without any
    request.
    """
    accelerator = sky.PoolSpec.of(accelerator=read(code)).accelerator
    assert accelerator is not None
    assert (accelerator.name, accelerator.memory_gb, accelerator.memory, accelerator.count) == (
        name,
        memory_gb,
        f"{memory_gb}GB",
        count,
    )
    assert (accelerator.form_factor, accelerator.mig) == (form_factor, mig)
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
    """It has its parameters. The first memory is the default, and the others can be chosen; those with profiles are
    "MIG capable".
    """
    factory = getattr(sky.Accelerator.NVIDIA, name)
    assert set(parameters) <= set(inspect.signature(factory).parameters)
    assert factory(count=2) == getattr(sky.accelerators, name)(2)
    assert (factory(count=2).count, factory().count, factory().memory) == (2, 1, memories[0])
    assert [factory(memory=memory).memory for memory in memories] == list(memories)
    assert "mig" not in parameters or any(table.chip == name for table in TABLES)
    if refused is not None:
        with pytest.raises(sky.BadRequest, match=refused[1]):
            factory(memory=refused[0])


# 003:335-342
LITERALS = (
    "T4 L4 L40 L40S A10 A10G A100-40GB A100-80GB H100-80GB H100-SXM H100-PCIe H100-NVL H200 B100 B200 GB200 GH200"
)


@pytest.mark.parametrize("value", LITERALS.split())
def test_a_literal(value: str) -> None:
    """A member that is the string, is accepted as an accelerator, and is a valid type hint (003:332)."""
    assert sky.NVIDIA(value) == value
    assert sky.PoolSpec.of(accelerator=sky.NVIDIA(value)) == sky.PoolSpec.of(accelerator=value)

    def train(gpu: sky.NVIDIA) -> None: ...

    assert typing.get_type_hints(train, {"sky": sky})["gpu"] is sky.NVIDIA


# 001:101-119, 003:306-324: profile, workers, memory; of 001 "Compute", 1/4 of 1g.20gb being of the memory: it has one
# compute slice of seven
PROFILES_80 = [
    ("1g.10gb", 7, 10, 1),
    ("1g.20gb", 4, 20, 1),
    ("2g.20gb", 3, 20, 2),
    ("3g.40gb", 2, 40, 3),
    ("4g.40gb", 1, 40, 4),
    ("7g.80gb", 1, 80, 7),
]
PROFILES_40 = [("1g.5gb", 7, 5, 1), ("2g.10gb", 3, 10, 2), ("3g.20gb", 2, 20, 3), ("4g.20gb", 1, 20, 4)]


@pytest.mark.parametrize(
    ("chip", "gb", "row"),
    [
        *(("H100", 80, row) for row in PROFILES_80),
        *(("A100", 80, row) for row in PROFILES_80),
        *(("A100", 40, row) for row in PROFILES_40),
    ],
)
def test_a_profile(chip: str, gb: int, row: tuple[str, int, int, int]) -> None:
    """One GPU has this many workers with this memory and this many of its seven compute slices; `@` returns one result
    for each (001:133).
    """
    name, workers, memory, slices = row
    accelerator = getattr(sky.Accelerator.NVIDIA, chip)(memory=f"{gb}GB", mig=name)
    assert partitions(accelerator) == (name,) * workers
    assert sky.PoolSpec.of(accelerator=accelerator).workers_per_node == workers
    profile = next(each for each in profiles(chip, gb) if each.name == name)
    assert (profile.memory_gb, profile.slices) == (memory, slices)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ('Accelerator.NVIDIA.T4(mig="1g.5gb")', "T4 has no MIG.*A100, H100"),  # 001:154: not all GPUs support MIG
        # 001:155: the profile must match the memory
        ('Accelerator.NVIDIA.A100(memory="40GB", mig="3g.40gb")', "A100 80GB"),
        ('Accelerator.NVIDIA.H100(mig=["4g.40gb", "4g.40gb"])', "would fit"),
    ],
)
def test_a_limit_of_mig(code: str, advice: str) -> None:
    """Refused when the spec is made, with a valid alternative. (For errors of a driver on the machine see
    tests/system/accelerators/test_mig.py.)
    """
    with pytest.raises(sky.BadRequest, match=advice):
        read(code)


@pytest.mark.parametrize("provider", [sky.RunPod(), sky.VastAI()])
def test_containers_have_no_mig(provider: sky.Provider) -> None:
    """A provider of containers refuses partitions before any request, and names an alternative."""
    with pytest.raises(sky.NotYetSupported, match="ask for a smaller GPU"):
        sky.ComputePool(provider=provider, accelerator=sky.accelerators.H100(mig="3g.40gb"))


# 001:160-179: what is recommended for a workload or a model's size
RECOMMENDED = [
    *("T4", "L4"),  # 001:164
    *("L40S", "A10G"),  # 001:165
    "A100-40GB",  # 001:166
    *("A100-80GB", "H100"),  # 001:167
    "8x H100",  # 001:168
    "T4",  # 001:169
    *("T4", "A10G", "A100-40GB", "A100-80GB"),  # 001:175-177
    *("2x H100", "4x H100", "8x H100"),  # 001:178-179
]


@pytest.mark.parametrize("requested", RECOMMENDED)
def test_the_recommended_accelerators_are_accepted(requested: str) -> None:
    """With the name and the count of the reference."""
    count = int(requested[0]) if " " in requested else 1
    accelerator = sky.accelerators.parse(requested)
    assert accelerator.count == count
    assert accelerator.name == re.sub(r"^\dx |-\d+GB$", "", requested)
    assert "-" not in requested or requested.endswith(accelerator.memory)


# 001:277-289, 003:714-735
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ('sky.is_nvidia("H100")', True),  # 001:280, 003:717
        ('sky.is_nvidia("MI300X")', False),  # 001:281, 003:718
        ('sky.is_trainium("Trainium2")', True),  # 001:282, 003:726
        ('sky.is_trainium("H100")', False),  # 003:727
        ("sky.current_accelerator()", None),  # 001:287, 003:735; outside a pool
    ],
)
def test_a_helper(code: str, answer: object) -> None:
    """Its results are those of the reference."""
    assert read(code) is answer


def test_a_call_gets_its_instance_info_and_its_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """003:490-500: the fields of InstanceInfo, their types, and `current_accelerator` in a call (001:284-288)."""
    documented = {
        "node": "int",  # 003:491
        "total_nodes": "int",  # 003:492
        "is_head": "bool",  # 003:493
        "accelerators": "list[str]",  # 003:494
        "head_addr": "str",  # 003:495
        "head_port": "int",  # 003:496
        "job_id": "str",  # 003:497
        "worker": "int",  # 003:498
        "workers_per_node": "int",  # 003:499
    }
    hints = typing.get_type_hints(sky.InstanceInfo)
    assert {
        name: getattr(hints[name], "__name__", "") if not typing.get_args(hints[name]) else str(hints[name])
        for name in documented
    } == documented
    info = sky.InstanceInfo(
        node=1,
        total_nodes=2,
        is_head=False,
        accelerators=["H100"] * 8,
        head_addr="10.0.0.1",
        head_port=29500,
        job_id="j",
        worker=0,
        workers_per_node=1,
    )
    monkeypatch.setenv(ENV, to_env(info))
    assert sky.instance_info() == info
    assert sky.current_accelerator() == "H100"
    assert sky.instance_info().is_head == (sky.instance_info().node == 0)


# ── what the clouds have ─────────────────────────────────────────────────────────────────────────────────────────────

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

    return [
        machine[0]
        for kind in INSTANCE_TYPES.values()
        if (machine := aws_offers.machine_of(kind, "us-east-1")) is not None
    ]


@pytest.mark.parametrize(("requested", "gb", "families"), AWS_FAMILIES, ids=[row[0] for row in AWS_FAMILIES])
def test_a_gpu_is_an_instance_type_of_aws(requested: str, gb: int, families: set[str]) -> None:
    """By AWS's own descriptions of all its types."""
    accelerator = sky.accelerators.parse(requested)
    assert accelerator.memory_gb == gb
    found = {
        offer.instance_type.split(".")[0]
        for offer in aws_machines()
        if matches(offer, sky.Requirements(accelerator=accelerator)) is None
    }
    assert found == families


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
    """It has them, matches a spec with them, and has a Neuron image."""
    (offer,) = (offer for offer in aws_machines() if offer.instance_type == instance_type)
    assert (offer.accelerator, offer.accelerators, offer.accelerators * (offer.accelerator_memory_gb or 0)) == (
        name,
        count,
        gb,
    )
    version = int(name[-1])
    factory = sky.accelerators.Trainium if name.startswith("Trainium") else sky.accelerators.Inferentia
    assert matches(offer, sky.Requirements(accelerator=factory(version, count))) is None
    assert name not in aws_offers.WITHOUT_IMAGE


@pytest.mark.parametrize("requested", ["TPU-v5p", "Radeon Pro V710", "B100", "GB200"])
def test_accelerators_without_a_provider_are_refused_with_the_alternatives(requested: str) -> None:
    """001:232-253: TPUs, the V710 and others are specifications only.

    Providers that search for machines refuse them and name a substitute.
    """
    sky.PoolSpec.of(accelerator=requested)
    with pytest.raises(
        sky.NoCapacity, match=r"rented by none of the built-in clouds; nearest to it in memory is .+ \(.+\)"
    ):
        sky.select_instance(aws_machines(), accelerator=requested)


# ── providers ────────────────────────────────────────────────────────────────────────────────────────────────────────

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
    """By its name and with its default. A lease or a spec does not include the default, but includes any
    other value.
    """
    kind = getattr(sky, provider)
    assert getattr(kind(), parameter) == default
    assert parameter not in kind().to_json()
    other = {"region": "us-west-2", "use_ssm": True}[parameter]
    assert getattr(kind(**{parameter: other}), parameter) == other
    assert kind(**{parameter: other}).to_json()[parameter] == other


@pytest.mark.parametrize("provider", ["AWS", "DigitalOcean", "Verda", "VastAI", "RunPod"])
def test_a_provider_is_a_value_and_needs_no_credentials(provider: str) -> None:
    """000:17, 001:13, 002:38, 003:75: `AWS()` and the like are values, and read credentials at their first request.
    Alone, by name, and in a list.
    """
    kind = getattr(sky, provider)
    assert kind() == kind()
    assert sky.PoolSpec.of(provider=kind(), accelerator="A100").providers == (kind(),)
    assert sky.PoolSpec.of(provider=provider.casefold()).providers == (kind(),)
    assert sky.PoolSpec.of(provider=[kind(), sky.Local()]).providers == (kind(), sky.Local())


@pytest.mark.parametrize(
    "code", ['AWS(region="us-east-1", use_ssm=False)', 'sky.DigitalOcean(region="nyc1")', 'sky.Verda(region="us-east")']
)
def test_an_example_of_a_provider(code: str) -> None:
    """003:208-211, 226-228, 244-246."""
    assert read(code).to_json()["region"]


# ── machines ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# 003:91-105: parameter, what the reference calls its default, what is written for it there, and what that becomes
FIELDS = [
    ("image", sky.Image(), sky.Image(pip=["torch"]), sky.Image(pip=("torch",))),  # 003:92
    ("nodes", 1, 2, 2),  # 003:93
    ("machine", None, "p5.48xlarge", "p5.48xlarge"),  # 003:94
    ("accelerator", None, "A100", sky.Accelerator("A100", 80)),  # 003:95
    ("cpu", None, 8, 8),  # 003:96
    ("memory", None, "32GB", "32GB"),  # 003:97
    ("timeout", 3600, 60, 60),  # 003:100
    ("env", None, {"A": "1"}, {"A": "1"}),  # 003:101
    ("concurrency", 1, 4, 4),  # 003:102
    ("display", "log", "spinner", "spinner"),  # 003:103
    ("display", "log", "quiet", "quiet"),  # 003:103
    ("collect_metrics", True, False, False),  # 003:105
]


@pytest.mark.parametrize(("name", "default", "written", "meant"), FIELDS, ids=[f"{row[0]}-{row[2]}" for row in FIELDS])
def test_a_parameter_of_a_pool(name: str, default: object, written: Any, meant: object) -> None:
    """By its name and with its default; it is equal after JSON."""
    assert getattr(sky.PoolSpec.of(), name) == default
    spec = sky.PoolSpec.of(**{name: written})
    assert getattr(spec, name) == meant
    assert sky.PoolSpec.model_validate_json(spec.model_dump_json()) == spec
    sky.ComputePool(**{name: written})


def test_the_other_parameters_of_a_pool() -> None:
    """`provider` is one value or several, and may be omitted (003:91); no volume is none (003:98); `on_event` is the
    pool's (003:104).

    `spot` (003:99): "always" is the default, but then it is spot if spot is sold, and on demand otherwise (issue 5).
    """
    assert sky.PoolSpec.of().providers == ()
    assert sky.PoolSpec.of(volume=None).volume == sky.PoolSpec.of().volume == ()
    assert "on_event" in inspect.signature(sky.ComputePool).parameters
    sky.ComputePool(on_event=lambda event: None)
    assert [split(sky.PoolSpec.of().spot, 3, spot_sold=is_sold) for is_sold in (True, False)] == [(0, 3), (3, 0)]


# 001, 003: pools as the reference writes them
POOLS = [
    # 003:75-82
    'sky.ComputePool(provider=AWS(), nodes=2, accelerator="A100", image=sky.Image(pip=["torch"]), spot="always", timeout=3600)',
    "sky.ComputePool(provider=AWS(), accelerator=Accelerator.NVIDIA.H100())",  # 001:24
    "sky.ComputePool(provider=AWS(), accelerator=NVIDIA.A100)",  # 001:48
    'sky.ComputePool(provider=AWS(), accelerator=Accelerator.NVIDIA.H100(mig="3g.40gb"))',  # 001:127
    'sky.ComputePool(provider=AWS(), accelerator=Accelerator.NVIDIA.A100(mig=["3g.40gb", "3g.40gb"]))',  # 001:140
    "sky.ComputePool(provider=sky.AWS(), accelerator=sky.accelerators.A100())",  # 000:20, 002:38
    # 003:135-138
    'sky.MultiPool(sky.ComputePool(provider=AWS(), accelerator="T4"), sky.ComputePool(provider=AWS(), accelerator="A100"))',
    'sky.ComputePool(provider=AWS(), accelerator="H100", cpu=32, memory="128GB", machine="p5.48xlarge")',  # 003:94-97
]


@pytest.mark.parametrize("code", POOLS)
def test_an_example_of_a_pool(code: str) -> None:
    """It can be created, and makes no request before it is opened."""
    read(code)


@pytest.mark.parametrize("family", ["Trainium", "Inferentia"])
def test_packages_belong_to_the_image(family: str) -> None:
    """001:196-200, 216-220: `pip=` of a pool is in no table of parameters.

    It is refused, with the image as the correct place, and that works.
    """
    accelerator = f"Accelerator.AWS.{family}(version=2)"
    with pytest.raises(sky.BadRequest, match=re.escape("write image=Image(pip=...)")):
        read(f'sky.ComputePool(provider=AWS(), accelerator={accelerator}, pip=["torch-neuronx"])')
    read(f'sky.ComputePool(provider=AWS(), accelerator={accelerator}, image=sky.Image(pip=["torch-neuronx"]))')


def test_an_instance_type_has_priority() -> None:
    """003:94: the provider gets a request for it, and offers of other types do not match."""
    want = sky.PoolSpec.of(machine="p5.48xlarge", accelerator="H100").requirements
    assert [offer.instance_type for offer in aws_machines() if matches(offer, want) is None] == ["p5.48xlarge"]


def test_cpu_and_memory_are_those_of_a_worker() -> None:
    """003:96-97: "per worker"; a machine with two partitions must have them twice."""
    want = sky.PoolSpec.of(cpu=8, memory="32GB", accelerator=sky.accelerators.H100(mig="3g.40gb")).requirements
    assert (want.vcpus, want.memory_gb) == (16, 64.0)


# 003:109-126: method or property
@pytest.mark.parametrize("name", ["run", "run_batch", "broadcast", "is_active", "instance_count"])
def test_a_member_of_a_pool(name: str) -> None:
    """It exists; a pool that is not open has no instances."""
    assert hasattr(sky.ComputePool, name)
    pool = sky.ComputePool()
    assert (pool.is_active, pool.instance_count) == (False, 0)


def test_the_smallest_instance_that_fits_is_selected() -> None:
    """003:739-751: of the given instances, by accelerator, processors and memory."""
    available = aws_machines()
    assert sky.select_instance(available, accelerator="H100", cpu=32, memory="128GB").instance_type == "p5.48xlarge"
    assert sky.select_instance(available, accelerator="H100", cpu=16, memory="128GB").instance_type == "p5.4xlarge"
    assert sky.select_instance(available, accelerator="T4").instance_type == "g4dn.xlarge"
    with pytest.raises(sky.NoCapacity, match="CPUs"):
        sky.select_instance(available, accelerator="H100", cpu=1000)


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# 003:181-185: parameter, default, what is written for it
IMAGES = [
    # 003:181; without it the version of this interpreter, for functions travel between equal ones
    ("python", "3.13", "3.13"),
    ("pip", [], ["torch", "numpy"]),  # 003:182
    ("pip_extra_index_url", None, "https://download.pytorch.org/whl/cu128"),  # 003:183
    ("apt", [], ["ffmpeg"]),  # 003:184
    ("env", {}, {"CUDA_VISIBLE_DEVICES": "0"}),  # 003:185
]


@pytest.mark.parametrize(("name", "default", "written"), IMAGES, ids=[row[0] for row in IMAGES])
def test_a_parameter_of_an_image(name: str, default: Any, written: Any) -> None:
    """By its name and with its default; all but `env` determine what is installed, and so the hash."""
    plain, image = sky.Image(python="3.13"), sky.Image(**{"python": "3.13", name: written})
    found, given = getattr(plain, name), getattr(image, name)
    assert (list(found) if isinstance(default, list) else found) == default
    assert (list(given) if isinstance(written, list) else given) == written
    installs_more = name in ("pip", "apt") or name == "pip_extra_index_url"
    assert (image.content_hash() != plain.content_hash()) == installs_more
    assert sky.Image(python="3.12").content_hash() != plain.content_hash()


def test_the_methods_of_an_image() -> None:
    """003:189-197: a hash of 12 characters, and a shell script with the time after which the machine is turned off; 0
    means never.
    """
    image = sky.Image(pip=["torch"], apt=["ffmpeg"])
    assert re.fullmatch(r"[0-9a-f]{12}", image.content_hash())
    assert image.bootstrap() == image.bootstrap(ttl=0)
    assert image.bootstrap(ttl=600) != image.bootstrap()
    assert "torch" in image.bootstrap()


# ── volumes ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# 003:681-684: parameter, default, what is written for it
VOLUMES = [
    ("mount_path", None, "/data"),
    ("bucket", None, "my-bucket"),
    ("prefix", "", "datasets/"),
    ("read_only", True, False),
]


@pytest.mark.parametrize(("name", "default", "written"), VOLUMES, ids=[row[0] for row in VOLUMES])
def test_a_parameter_of_a_volume(name: str, default: object, written: Any) -> None:
    """By its name and with its default; the two without a default are required.

    A pool accepts the volume (003:98), a container refuses it with the alternative.
    """
    needed = {"mount_path": "/data", "bucket": "my-bucket"}
    volume = sky.S3Volume(**{**needed, name: written})
    assert getattr(volume, name) == written
    assert sky.PoolSpec.of(volume=[volume]).volume == sky.PoolSpec.of(volume=volume).volume == (volume,)
    if default is None:
        with pytest.raises(ValueError, match=name):
            sky.S3Volume(**{key: value for key, value in needed.items() if key != name})
    else:
        assert getattr(sky.S3Volume(**needed), name) == default
    for provider in (sky.VastAI(), sky.RunPod()):
        with pytest.raises(sky.NotYetSupported, match="from your functions"):
            sky.ComputePool(provider=provider, volume=[volume])


# ── spot ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

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
    """The pool's strategy is the written one: this many machines are on demand and come first, and this many are spot.

    Or it is refused with the valid choices.
    """
    assert parse(read(code)) == sky.PoolSpec.of(spot=read(code)).spot == strategy
    assert split(strategy, 10, spot_sold=True) == sold
    if not_sold is None:
        with pytest.raises(sky.BadRequest, match='try spot="if-available" or spot="never"'):
            split(strategy, 10, spot_sold=False)
    else:
        assert split(strategy, 10, spot_sold=False) == not_sold
