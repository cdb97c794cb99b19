"""NeuronCores: the cores that a node's calls may use, and the environment of each call's process.

Expected numbers are those of AWS's Neuron documentation ("Neuron Runtime configuration", "Logical NeuronCore
configuration") and of EC2's own descriptions of its types. These tests have never run on a Trainium.
"""

import json
from itertools import pairwise
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators.catalog import CHIPS, find
from skyward_core.accelerators.neuron import slot_cores
from skyward_core.machines.offers import Offer
from skyward_core.wire.info import ENV, InstanceInfo, instance_info, to_env
from skyward_core.wire.settings import NodeSettings
from tests.accelerators.first_node import settings_of_first_node
from tests.offers import offer

Trainium, Inferentia = sky.Accelerator.AWS.Trainium, sky.Accelerator.AWS.Inferentia
NEURON = ("Trainium1", "Trainium2", "Inferentia1", "Inferentia2")


def numbers(*ends: int) -> tuple[tuple[int, ...], ...]:
    """Return the rows of numbers of the ranges."""
    return tuple(tuple(range(first, last)) for first, last in pairwise(ends))


# ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("accelerator", "environment", "slots", "cores"),
    [
        (Trainium(1), {}, 1, numbers(0, 2)),  # trn1.2xlarge
        (Trainium(1, 16), {}, 1, numbers(0, 32)),  # trn1.32xlarge
        (Trainium(2), {}, 1, numbers(0, 4)),  # trn2.3xlarge: 8 cores, two of which are one by default
        (Trainium(2, 16), {}, 1, numbers(0, 64)),  # trn2.48xlarge "presents 64 available NeuronCores"
        (Trainium(2, 16), {"NEURON_LOGICAL_NC_CONFIG": "1"}, 1, numbers(0, 128)),  # ... and 128
        (Trainium(2, 16), {"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, 1, numbers(0, 128)),
        (Trainium(2), {"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, 1, numbers(0, 4)),
        (Trainium(1), {"NEURON_LOGICAL_NC_CONFIG": "2"}, 1, numbers(0, 2)),  # for Trn2 and Trn3 only
        (Inferentia(1, 4), {}, 1, numbers(0, 16)),  # inf1.6xlarge, "16 NeuronCores maximum"
        (Inferentia(2, 12), {}, 1, numbers(0, 24)),  # inf2.48xlarge
        (Trainium(1, 16), {}, 4, numbers(0, 8, 16, 24, 32)),
        (Trainium(1, 16), {}, 3, numbers(0, 10, 21, 32)),
        (Trainium(1), {}, 2, numbers(0, 1, 2)),
        (Trainium(1, 16), {"NEURON_RT_VISIBLE_CORES": "4-7,9"}, 1, ((4, 5, 6, 7, 9),)),
        (Trainium(1, 16), {"NEURON_RT_VISIBLE_CORES": " 4-7, 9 , 2"}, 2, ((4, 5, 6), (7, 9, 2))),
        # exact values take precedence
        (Trainium(1, 16), {"NEURON_RT_VISIBLE_CORES": "3", "NEURON_RT_NUM_CORES": "2"}, 1, ((3,),)),
        (Trainium(1, 16), {"NEURON_RT_NUM_CORES": "2"}, 40, ()),  # "Neuron Runtime selects free NeuronCores"
        (sky.Accelerator.NVIDIA.H100(), {"NEURON_RT_VISIBLE_CORES": "0"}, 4, ()),
        (None, {"NEURON_RT_VISIBLE_CORES": "garbage"}, 4, ()),
    ],
    ids=str,
)
def test_the_cores_of_each_slot(
    accelerator: sky.Accelerator | None, environment: dict[str, str], slots: int, cores: tuple[tuple[int, ...], ...]
) -> None:
    """The environment has precedence."""
    assert slot_cores(accelerator, environment, slots) == cores


@pytest.mark.parametrize(
    ("accelerator", "environment", "slots", "advice"),
    [
        (Trainium(1), {}, 3, "concurrency=2 or less"),
        (Trainium(2), {}, 5, "Trainium2 96GB has 4 NeuronCores"),
        (Trainium(1, 16), {"NEURON_RT_VISIBLE_CORES": "5"}, 2, "5 has 1 NeuronCore:"),
        (Trainium(1), {}, 3, "NEURON_RT_NUM_CORES"),
        (Trainium(1), {"NEURON_RT_VISIBLE_CORES": ""}, 1, '"0-3"'),
        (Trainium(1), {"NEURON_RT_VISIBLE_CORES": "3-1"}, 1, '"0-3"'),
        (Trainium(1), {"NEURON_RT_VISIBLE_CORES": "0-3,2"}, 1, "twice"),
        (Trainium(2), {"NEURON_LOGICAL_NC_CONFIG": "4"}, 1, 'write "1"'),
    ],
)
def test_an_impossible_division_is_refused_before_anything_is_rented(
    accelerator: sky.Accelerator, environment: dict[str, str], slots: int, advice: str
) -> None:
    """The pool cannot be created, and the message has valid values."""
    with pytest.raises(sky.BadRequest) as refusal:
        sky.ComputePool(provider=sky.AWS(), accelerator=accelerator, env=environment, concurrency=slots)
    assert advice in str(refusal.value)


def test_the_cores_in_the_catalogue_match_ec2s_descriptions() -> None:
    """It covers each type with Neuron devices; other chips have no cores."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    described = {
        find(device["Name"]).name: device["CoreInfo"]["Count"]
        for kind in INSTANCE_TYPES.values()
        for device in (kind.get("NeuronInfo") or {}).get("NeuronDevices", [])
    }
    assert described == {chip.name: chip.neuron_cores for chip in CHIPS if chip.neuron_cores}
    assert {*described} == {*NEURON} == {chip.name for chip in CHIPS if chip.vendor == "AWS"}
    assert {chip.name for chip in CHIPS if chip.neuron_cores_in_one > 1} == {"Trainium2"}


CPUS = offer("c7i.large", provider="aws")
TRN1 = offer("trn1.32xlarge", provider="aws", accelerator="Trainium1", accelerators=16, accelerator_memory_gb=34.4)


# ── the settings of a node ───────────────────────────────────────────────────────────────────────────────────────────


def node_settings(offer: Offer = CPUS, **options: Any) -> NodeSettings:
    """Return the settings of the first node of a pool on a machine with these fields."""
    spec = sky.PoolSpec.of(provider=sky.AWS(), **options)
    settings = settings_of_first_node(spec, spec.accelerator_on(offer))
    assert NodeSettings.from_json(settings.to_json()) == settings
    return settings


def test_each_slot_gets_its_cores_in_the_runtimes_format() -> None:
    """Consecutive cores are a range, for older versions of the runtime. The pool's environment stands over the image's."""
    settings = node_settings(accelerator=Trainium(1, 16), concurrency=3)
    assert settings.accelerators == ("Trainium1",) * 16
    assert [settings.environment_of(0, slot) for slot in range(3)] == [
        {"NEURON_RT_VISIBLE_CORES": cores} for cores in ("0-9", "10-20", "21-31")
    ]
    image, own = ({"NEURON_RT_VISIBLE_CORES": cores} for cores in ("7", "0-2,5,7-8"))
    odd = node_settings(accelerator=Trainium(1, 16), image=sky.Image(env=image), env=own)
    assert odd.environment_of(0, 0) == own


def test_a_machine_chosen_by_its_type_gets_the_settings_of_its_chips() -> None:
    """With `machine=` alone its chips and their cores are used. Named accelerators have precedence."""
    settings = node_settings(TRN1, machine="trn1.32xlarge", concurrency=2)
    assert settings.accelerators == ("Trainium1",) * 16
    assert [settings.environment_of(0, slot)["NEURON_RT_VISIBLE_CORES"] for slot in range(2)] == ["0-15", "16-31"]
    assert node_settings(TRN1, machine="trn1.32xlarge", accelerator=Trainium(1, 2)).accelerators == ("Trainium1",) * 2
    assert node_settings(machine="c7i.large").accelerators == ()


@pytest.mark.parametrize(
    ("name", "memory_gb", "gb"), [("A100", 42.9, 40), ("A100", 80.0, 80), ("H100", None, 80), ("T4", 15.0, 16)]
)
def test_the_catalogue_determines_the_chips_of_a_machine(name: str, memory_gb: float | None, gb: int) -> None:
    """Clouds report their memory in other units, or not at all."""
    machine = offer(accelerator=name, accelerators=2, accelerator_memory_gb=memory_gb)
    assert sky.PoolSpec.of(machine="x").accelerator_on(machine) == sky.Accelerator(name, gb, 2)


def test_without_neuroncores_the_environment_is_unchanged() -> None:
    """It is also unchanged if the runtime chooses the cores."""
    for options in ({}, {"accelerator": "H100"}, {"accelerator": Trainium(), "env": {"NEURON_RT_NUM_CORES": "1"}}):
        settings = node_settings(**options, concurrency=2)
        assert (settings.neuron_cores, settings.cores_of(1), settings.environment_of(0, 1)) == ((), (), {})


def test_the_cores_survive_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cores the text is the one that older versions read."""
    place = {"node": 0, "total_nodes": 1, "is_head": True, "head_addr": "h", "head_port": 1, "job_id": "j"}
    info = InstanceInfo(**place, accelerators=["Trainium1"], worker=0, workers_per_node=1)
    assert "neuron_cores" not in json.loads(to_env(info))
    for one in (info, InstanceInfo(**{**json.loads(to_env(info)), "neuron_cores": [4, 5]})):
        monkeypatch.setenv(ENV, to_env(one))
        assert instance_info() == one
