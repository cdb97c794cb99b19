"""Pools of MIG partitions as specs and settings: a partition is a worker."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators.mig import CHANGED_BY_RESET, TABLES, profiles
from skyward_core.image.shell import partition_gpus
from skyward_core.provisioning.bootstrap import node_script
from skyward_core.provisioning.quote import refuse
from skyward_core.provisioning.selection import warn
from skyward_core.wire.settings import NodeSettings, with_partitions
from skyward_core.worker.supervisor import read_settings
from tests.accelerators.first_node import settings_of_first_node
from tests.offers import offer

H100, A100, A30 = sky.Accelerator.NVIDIA.H100, sky.Accelerator.NVIDIA.A100, sky.Accelerator.NVIDIA.A30
HALVES = H100(mig="3g.40gb")


def spec(**options: Any) -> sky.PoolSpec:
    return sky.PoolSpec.of(provider=sky.Hosts("gpu-1"), **options)


def node_settings(wanted: sky.PoolSpec, ports: tuple[int, ...] = ()) -> NodeSettings:
    """Return the settings of the first node of a pool with these fields."""
    return settings_of_first_node(wanted, wanted.accelerator, ports)


@pytest.mark.parametrize(
    ("accelerator", "workers"),
    [
        (None, 1),
        (H100(count=2), 1),
        (HALVES, 2),
        (H100(mig=["3g.40gb"]), 1),
        (H100(count=2, mig=["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]), 8),
    ],
)
def test_a_partition_is_a_worker(accelerator: sky.Accelerator | None, workers: int) -> None:
    """The machine must have CPUs and memory for all workers."""
    wanted = spec(accelerator=accelerator, cpu=3, memory="5GB", concurrency=2)
    assert wanted.workers_per_node == workers
    assert (wanted.requirements.vcpus, wanted.requirements.memory_gb) == (3 * workers, 5.0 * workers)
    bare = spec(accelerator=accelerator).requirements
    assert (bare.vcpus, bare.memory_gb) == (None, None)
    wanted.refuse_what_cannot_be()


def test_an_offer_must_have_cpus_for_all_its_workers() -> None:
    small = offer(vcpus=8, memory_gb=64, accelerator="H100", accelerators=1, accelerator_memory_gb=80)
    requested = spec(accelerator=HALVES, cpu=8).requirements
    with pytest.raises(sky.NoCapacity, match="has 8 CPUs"):
        sky.select_instance([small], requested.accelerator, cpu=requested.vcpus)


def test_limits_of_one_worker_do_not_change_with_partitions() -> None:
    """A worker has one chip and sees a part of it. Each has a port of its own."""
    wanted = spec(accelerator=H100(count=2, mig="3g.40gb"), memory="5GB", concurrency=3)
    settings = node_settings(wanted, (1, 2, 3, 4, 5))
    assert (settings.memory_limit_bytes, settings.slots, settings.accelerators) == (5 * 10**9, 3, ("H100",))
    assert settings.workers == ({}, {}, {}, {})
    assert (settings.scheduler_port, settings.worker_ports) == (1, (2, 3, 4, 5))
    whole = node_settings(spec(accelerator=H100(count=2)))
    assert (whole.workers, whole.accelerators, whole.memory_limit_bytes) == (({},), ("H100", "H100"), None)


def test_this_machine_is_not_partitioned() -> None:
    """Local refuses before the start and names a provider that supports partitions."""
    with pytest.raises(sky.NotYetSupported, match=r"local does not do mig: .*use Hosts with its address"):
        refuse(sky.PoolSpec.of(provider=sky.Local(), accelerator=HALVES), sky.Local())
    with pytest.raises(sky.NotYetSupported, match="use Hosts"):
        sky.ComputePool(provider=sky.Local(), accelerator=HALVES).open()
    refuse(sky.PoolSpec.of(accelerator="H100"), sky.Local())


@pytest.mark.parametrize("chip", [A100(mig="3g.40gb"), A30(mig="1g.6gb")])
def test_amperes_on_rented_machines_cause_a_warning(caplog: pytest.LogCaptureFixture, chip: sky.Accelerator) -> None:
    """A virtual machine may refuse their reset, so the warning comes before one is billed."""
    warn(sky.PoolSpec.of(accelerator=chip), [sky.Hosts("gpu-1")])
    warn(sky.PoolSpec.of(accelerator=sky.Accelerator(chip.name, chip.memory_gb, 1)), [sky.AWS()])
    warn(sky.PoolSpec.of(accelerator=HALVES), [sky.AWS()])
    assert caplog.messages == []
    warn(sky.PoolSpec.of(accelerator=chip), [sky.Hosts("gpu-1"), sky.AWS()])
    assert "H100, H200 and B200 need no reset" in caplog.text
    assert set(CHANGED_BY_RESET) < {table.chip for table in TABLES}


@pytest.mark.parametrize("provider", [sky.AWS(), sky.Verda(), sky.DigitalOcean(), sky.Hosts("gpu-1")])
def test_later_chips_are_partitioned_on_rented_machines(provider: sky.Provider) -> None:
    """They change to MIG mode without a reset."""
    for name in ("H100", "H200", "B200", "B300", "RTX_PRO_6000"):
        make = getattr(sky.Accelerator.NVIDIA, name)
        profile = profiles(make().name, make().memory_gb)[0].name
        refuse(sky.PoolSpec.of(accelerator=make(mig=profile)), provider)


def test_each_worker_sees_one_partition(tmp_path: Path) -> None:
    """In the order of the list. A node reads it beside its settings; it replaces the client's own setting."""
    settings = node_settings(spec(accelerator=HALVES))
    own = replace(settings, workers=({"A": "1", "CUDA_VISIBLE_DEVICES": "0"}, {}))
    shown = with_partitions(own, "MIG-a\nMIG-b\n")
    assert shown.workers == ({"A": "1", "CUDA_VISIBLE_DEVICES": "MIG-a"}, {"CUDA_VISIBLE_DEVICES": "MIG-b"})
    assert replace(shown, workers=own.workers) == own
    assert NodeSettings.from_json(shown.to_json()) == shown
    (tmp_path / "settings.json").write_text(settings.to_json())
    assert read_settings(tmp_path) == settings
    (tmp_path / "partitions").write_text("MIG-a\nMIG-b\n")
    assert read_settings(tmp_path) == with_partitions(settings, "MIG-a MIG-b")


@pytest.mark.parametrize("text", ["", "MIG-a\n", "MIG-a\nMIG-b\nMIG-c\n"])
def test_a_wrong_number_of_partitions_is_an_error(text: str) -> None:
    """With another number two workers could share a partition, or one worker could see the whole GPU."""
    with pytest.raises(ValueError, match=f"{len(text.split())} partitions of GPUs for 2 workers"):
        with_partitions(node_settings(spec(accelerator=HALVES)), text)


def test_without_profiles_there_is_no_script() -> None:
    """There is no phase either."""
    assert partition_gpus((), 2) == ""
    assert "mig" not in node_script(spec(accelerator="H100")).partition("::skyward phase skyward")[2]
