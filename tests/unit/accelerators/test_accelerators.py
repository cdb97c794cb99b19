"""Accelerators: spellings, meanings, MIG partitions, and refusals with their advice.

`tests/unit/test_seed_tables.py` has each factory and each spelling of the reference. Profiles and counts are those of
NVIDIA's MIG user guide.
"""

import copy
import dataclasses
import inspect
import json
import pickle

import pytest

from skyward_core import accelerators
from skyward_core.accelerators import NVIDIA, Accelerator, is_nvidia, is_trainium, parse
from skyward_core.accelerators.catalog import CHIPS
from skyward_core.accelerators.mig import TABLES, check, partitions, profiles, split
from skyward_core.errors import BadRequest

# seeds 001 and 003, "MIG Profiles": profile -> workers, memory each
MIG_80 = {
    "1g.10gb": (7, 10),
    "1g.20gb": (4, 20),
    "2g.20gb": (3, 20),
    "3g.40gb": (2, 40),
    "4g.40gb": (1, 40),
    "7g.80gb": (1, 80),
}
MIG_40 = {"1g.5gb": (7, 5), "2g.10gb": (3, 10), "3g.20gb": (2, 20), "4g.20gb": (1, 20)}
MIG_ROWS = [
    (name, gb, profile, *row)
    for name, gb, table in (("H100", 80, MIG_80), ("A100", 80, MIG_80), ("A100", 40, MIG_40))
    for profile, row in table.items()
]


@pytest.mark.parametrize(
    ("accelerator_type", "name", "chips"),
    [("v5p-8", "TPU-v5p", 4), ("v4-32", "TPU-v4", 16), ("v5litepod-16", "TPU-v5e", 16), ("v6e-8", "TPU-v6e", 8)],
)
def test_a_slice_is_counted_in_chips(accelerator_type, name, chips):
    """Google's names count TensorCores for v2 to v5p, two in each chip, and chips for v5e and v6e."""
    made = Accelerator.Google.TPUSlice(accelerator_type)
    assert (made.name, made.count) == (name, chips)


@pytest.mark.parametrize(
    ("requested", "meant"),
    [
        ("A100-40GB", Accelerator("A100", 40)),
        ("H100-SXM", Accelerator("H100", 80, form_factor="SXM")),
        ("H100-NVL", Accelerator("H100", 94, form_factor="NVL")),
        ("h100-pcie", Accelerator("H100", 80, form_factor="PCIe")),
        (" t4 ", Accelerator("T4", 16)),
        ("4xA100", Accelerator("A100", 80, 4)),
        ("8 x H100 80GB SXM", Accelerator("H100", 80, 8, form_factor="SXM")),
        ("A100-40GB:2", Accelerator("A100", 40, 2)),
        ("rtx_4090", Accelerator("RTX 4090", 24)),
        ("RTX 6000 Ada Generation", Accelerator("RTX 6000 Ada", 48)),
        ("NVIDIA H100 80GB HBM3", Accelerator("H100", 80)),
        ("NVIDIA A100-SXM4-40GB", Accelerator("A100", 40, form_factor="SXM")),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", Accelerator("RTX PRO 6000", 96)),
        ("AMD Instinct MI300X OAM", Accelerator("MI300X", 192)),
        ("Trainium", Accelerator("Trainium1", 32)),
        ("trn2", Accelerator("Trainium2", 96)),
        (NVIDIA.A100_40GB, Accelerator("A100", 40)),
        (Accelerator("L4", 24, 2), Accelerator("L4", 24, 2)),
    ],
)
def test_a_name_is_parsed(requested, meant):
    """The name may have memory, form factor and count, in any case, and the spelling of drivers and clouds."""
    assert parse(requested) == meant
    if isinstance(requested, str):
        assert parse(requested) is parse(requested), "orchestrators parse their files often"


LITERALS = "T4 L4 L40 L40S A10 A10G A100-40GB A100-80GB H100-80GB H100-SXM H100-PCIe H100-NVL H200 B100 B200 GB200 GH200 A100 H100"


@pytest.mark.parametrize("value", LITERALS.split())
def test_each_literal_of_the_reference_is_a_member(value):
    """It is found by value and by identifier, equals the string, and can be parsed. Others are a KeyError."""
    member = NVIDIA[value]
    assert member == value == str(member)
    assert member is NVIDIA(value) is getattr(NVIDIA, value.replace("-", "_"))
    assert parse(member) == parse(value)
    assert json.loads(json.dumps(member)) == value
    with pytest.raises(KeyError):
        NVIDIA["H10"]


def test_every_chip_has_a_factory_and_a_member():
    """Each row of the catalogue is complete, and each factory can be completed by an editor."""
    factories = {name: made for name, made in vars(Accelerator.NVIDIA).items() if isinstance(made, staticmethod)}
    nvidia = {chip.name for chip in CHIPS if chip.vendor == "NVIDIA"}
    assert {made().name for made in factories.values()} == {parse(member).name for member in NVIDIA} == nvidia
    assert all(getattr(accelerators, name)() == made() for name, made in factories.items())
    assert {parse(chip.name).name for chip in CHIPS} == {chip.name for chip in CHIPS}
    assert all(getattr(accelerators, name) for name in accelerators.__all__)
    for factory in (Accelerator.NVIDIA.H100, accelerators.H100):
        assert list(inspect.signature(factory).parameters) == ["count", "memory", "mig", "form_factor"]
        assert "H100" in (factory.__name__ + (factory.__doc__ or ""))
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
    for chip in CHIPS:
        assert chip.source
        assert chip.checked == "2026-11"
        assert all(gb > 0 for gb in chip.memory_gb)
        assert {form for form, _ in chip.memory_of} <= set(chip.form_factors)
        assert (chip.cuda_capability is None) == (chip.vendor != "NVIDIA")
        sizes = {table.memory_gb for table in TABLES if table.chip == chip.name}
        assert sizes == (set(chip.memory_gb) if chip.mig else set())
    assert all(table.source for table in TABLES)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("requested", "near"),
    [
        ("A1000", ["A100"]),
        ("H10O", ["H100"]),
        ("RTX 4O90", ["RTX 4090"]),
        ("MI300", ["MI300X", "MI300A"]),
        ("Trainium9", ["Trainium1", "Trainium2"]),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(requested, near):
    """The message has three chips, with the likely one, and the location of the catalogue."""
    with pytest.raises(BadRequest) as refusal:
        parse(requested)
    assert all(repr(name) in str(refusal.value) for name in near)
    assert sum(repr(chip.name) in str(refusal.value) for chip in CHIPS) == 3
    assert "skyward_core.accelerators.catalog.CHIPS" in str(refusal.value)


@pytest.mark.parametrize(
    ("ask", "advice"),
    [
        (lambda: parse("H100-40GB"), "80GB or 94GB. A partition of it has 40GB: mig='3g.40gb'"),
        (lambda: Accelerator.NVIDIA.H100(memory="94GB", form_factor="PCIe"), "comes with 80GB"),
        (lambda: Accelerator.NVIDIA.A100(memory="lots"), '"80GB"'),
        (lambda: Accelerator.NVIDIA.A100(form_factor="NVL"), "SXM or PCIe"),
        (lambda: Accelerator.NVIDIA.T4(form_factor="SXM"), "leave form_factor out"),
        (lambda: Accelerator.NVIDIA.T4(count=0), "1 or more"),
        (lambda: Accelerator("T4", 16, count=True), "1 or more"),
        (lambda: Accelerator("T4", 16, 1.5), "1 or more"),
        (lambda: Accelerator("A100", 80.0), "80GB or 40GB"),
        (lambda: Accelerator("A100", 80, memory="80GB"), "the same setting"),
        (lambda: Accelerator("H100", memory="40GB"), "80GB or 94GB"),
        (lambda: Accelerator(None, 80), "CHIPS"),
        (lambda: parse("0xA100"), "1 or more"),
        (lambda: parse(""), '"A100"'),
        (lambda: parse("80GB"), "CHIPS"),
        (lambda: parse(4), '"A100"'),
        (lambda: Accelerator.Google.TPUSlice("v5p"), '"v5p-8"'),
        (lambda: Accelerator.Google.TPUSlice("v5p-7"), "2 to a chip"),
        (lambda: Accelerator.Google.TPU("v9"), "TPU-v"),
        (lambda: Accelerator.AWS.Trainium(version=7), "Trainium2"),
        # at construction, before anything is rented
        (lambda: Accelerator.NVIDIA.A100(memory="40GB", mig="3g.40gb"), "A100 40GB has no MIG profile"),
        (lambda: accelerators.T4(mig="1g.5gb"), "T4 has no MIG"),
        (lambda: Accelerator.from_json({"name": "A100", "cuont": 2}), "'count'"),
        (lambda: Accelerator.from_json({"count": 2}), "needs a name"),
        (lambda: Accelerator.from_json({"name": "A100", "memory_gb": "40"}), "40GB"),
    ],
)
def test_a_nonexistent_variant_is_refused_with_the_existing_ones(ask, advice):
    with pytest.raises(BadRequest) as refusal:
        ask()
    assert advice in str(refusal.value)


# ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "memory_gb", "profile", "workers", "each_gb"), MIG_ROWS)
def test_each_profile_of_the_reference_determines_the_workers(name, memory_gb, profile, workers, each_gb):
    """A single profile splits a GPU into as many workers as fit, each with its memory."""
    made = getattr(Accelerator.NVIDIA, name)(memory=f"{memory_gb}GB", mig=profile)
    assert partitions(made) == (profile,) * workers
    assert next(each.memory_gb for each in profiles(name, memory_gb) if each.name == profile) == each_gb
    with pytest.raises(BadRequest):
        split(name, memory_gb, [profile] * (workers + 1))


def test_a_list_of_profiles_means_exactly_those():
    """One name is as many as fit. A list stays as it is, largest first. The whole GPU has no partitions."""
    h100 = Accelerator.NVIDIA.H100
    halves = ("3g.40gb", "3g.40gb")
    assert h100(mig="3g.40gb") == h100(mig=[*halves]) == Accelerator("H100", 80, mig=halves)
    assert partitions(h100(mig=["3g.40gb"])) == ("3g.40gb",)
    mixed = ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")
    assert partitions(h100(mig=["1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb"])) == mixed
    assert partitions(h100()) == partitions(h100(mig=[])) == ()


# counts: user guide, column "Number of Instances Available"; 4g+3g, 3g+2g+2x1g (all-balanced of mig-parted), 3x2g+1g
# are named there as layouts
@pytest.mark.parametrize(
    ("name", "memory_gb", "requested"),
    [
        ("A100", 80, "4g.40gb 3g.40gb"),
        ("A100", 80, "3g.40gb 2g.20gb 1g.10gb 1g.10gb"),
        ("A100", 40, "2g.10gb 2g.10gb 2g.10gb 1g.5gb"),
        ("H100", 94, "3g.47gb 2g.24gb 1g.12gb 1g.12gb"),
        ("H200", 141, "3g.71gb 2g.35gb 1g.18gb 1g.18gb"),
        ("GH200", 96, "3g.48gb 2g.24gb 1g.12gb 1g.12gb"),
        ("B200", 180, "3g.90gb 2g.45gb 1g.23gb 1g.23gb"),
        ("B300", 288, "3g.135gb 2g.67gb 1g.34gb 1g.34gb"),
        ("GB200", 189, "3g.95gb 2g.47gb 1g.24gb 1g.24gb"),
        ("A30", 24, "2g.12gb 1g.6gb 1g.6gb"),
        ("RTX PRO 6000", 96, "2g.48gb 1g.24gb 1g.24gb"),
        ("RTX PRO 6000", 96, "1g.24gb+me.all 1g.24gb-me 1g.24gb-me 1g.24gb-me"),
        ("H100", 80, "1g.10gb+me" + " 1g.10gb" * 6),
        ("RTX PRO 4500", 32, "1g.16gb 1g.16gb"),
    ],
)
def test_the_layouts_of_the_vendor_fit(name, memory_gb, requested):
    """In any order."""
    wanted = requested.split()
    check(name, memory_gb, wanted)
    assert split(name, memory_gb, wanted) == split(name, memory_gb, wanted[::-1])


@pytest.mark.parametrize(
    ("name", "memory_gb", "requested", "advice"),
    [
        # two 3g take all 8 memory slices: the seventh compute slice is lost
        ("A100", 80, "3g.40gb 3g.40gb 1g.10gb", "2 x 3g.40gb would fit"),
        ("A100", 80, "4g.40gb 4g.40gb", "1 x 4g.40gb would fit"),
        ("H100", 80, "7g.80gb 1g.10gb", "1 x 7g.80gb would fit"),
        # six compute slices and eight of memory: the sum would allow a 2g in the middle, its starts do not
        ("A100", 40, "4g.20gb 2g.10gb 2g.10gb", "1 x 4g.20gb + 1 x 2g.10gb would fit"),
        ("H100", 80, "1g.10gb+me 1g.10gb+me", "1 x 1g.10gb+me would fit"),
        ("A30", 24, "2g.12gb+me 1g.6gb+me", "1 x 2g.12gb+me would fit"),
        ("RTX PRO 6000", 96, "2g.48gb+me.all 1g.24gb", "1 x 2g.48gb+me.all would fit"),
        ("A100", 80, "3g.20gb", "one of the A100 40GB"),
        ("H100", 80, "3g.4gb", "'3g.40gb'"),
        ("H200", 141, "3g.40gb", "3g.71gb"),
        ("H100", 94, "3g.40gb", "one of the H100 80GB"),
        ("L40S", 48, "1g.5gb", "A100, H100"),
        ("MI300X", 192, "1g.5gb", "has no MIG"),
        ("B200", 192, "1g.23gb", "180GB"),
    ],
)
def test_impossible_partitions_are_refused(name, memory_gb, requested, advice):
    """The chip has no MIG, the profile has another memory size, or the set does not fit."""
    with pytest.raises(BadRequest) as refusal:
        check(name, memory_gb, requested.split())
    assert advice in str(refusal.value)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("accelerator", "text"),
    [
        (Accelerator.NVIDIA.H100(count=4), "4 x H100 80GB"),
        (Accelerator.NVIDIA.T4(), "T4 16GB"),
        (Accelerator.NVIDIA.H100(form_factor="NVL"), "H100 94GB NVL"),
        (Accelerator.NVIDIA.H100(mig="3g.40gb"), "H100 80GB, MIG 3g.40gb + 3g.40gb"),
        (Accelerator.Google.TPUSlice("v5p-8"), "4 x TPU-v5p 95GB"),
    ],
    ids=str,
)
def test_an_accelerator_is_a_readable_value(accelerator, text):
    """It survives JSON, pickle and copy. Its text can be parsed, without partitions."""
    for again in (
        Accelerator.from_json(json.loads(json.dumps(accelerator.to_json()))),
        pickle.loads(pickle.dumps(accelerator)),
        copy.deepcopy(accelerator),
    ):
        assert (again, hash(again)) == (accelerator, hash(accelerator))
    assert str(accelerator) == text
    assert accelerator.mig or parse(text) == accelerator
    with pytest.raises(AttributeError):
        accelerator.count = 2
    assert not hasattr(accelerator, "__dict__")


def test_the_catalogue_knows_what_is_not_said():
    """Memory, CUDA's compute capability and vendor, as for the factories."""
    assert Accelerator("h100") == Accelerator.NVIDIA.H100() == Accelerator("H100", 80)
    assert Accelerator("A100", memory="40GB", count=2) == Accelerator.NVIDIA.A100(count=2, memory="40GB")
    assert (Accelerator("H100").memory, Accelerator("H100").cuda_capability) == ("80GB", "9.0")
    assert dataclasses.replace(Accelerator("H100"), count=4) == Accelerator.NVIDIA.H100(count=4)
    assert Accelerator("MI300X").cuda_capability is None


def test_json_may_be_short():
    """A name or a string is enough, a single profile is as many as fit, and null means not given."""
    assert Accelerator.from_json({"name": "a100"}) == Accelerator.from_json("A100") == Accelerator("A100", 80)
    nvl = Accelerator.from_json({"name": "H100", "form_factor": "NVL", "memory_gb": None})
    assert nvl == Accelerator("H100", 94, form_factor="NVL")
    assert Accelerator.from_json({"name": "H100", "mig": "3g.40gb"}) == Accelerator.NVIDIA.H100(mig="3g.40gb")


@pytest.mark.parametrize(
    ("name", "nvidia", "trainium"),
    [
        ("H100", True, False),
        ("MI300X", False, False),
        ("Trainium2", False, True),
        ("4xA100", True, False),
        ("NVIDIA GeForce GTX 1080", True, False),
        ("abacus", False, False),
        ("", False, False),
        (None, False, False),
        (Accelerator.NVIDIA.T4(), True, False),
        (Accelerator.AWS.Trainium(1), False, True),
        (Accelerator.AWS.Inferentia(2), False, False),
    ],
)
def test_vendors_are_distinguished(name, nvidia, trainium):
    """Names, accelerators and names that only a driver uses have a vendor. None has no vendor."""
    assert (is_nvidia(name), is_trainium(name)) == (nvidia, trainium)
