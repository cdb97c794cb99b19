"""MIG without a GPU: specs, settings of nodes, and the script that partitions and restores, with a fake nvidia-smi."""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.accelerators.mig import CHANGED_BY_RESET, TABLES, profiles
from skyward_core.image import shell
from skyward_core.image.mig_shell import partition_gpus
from skyward_core.machines.offers import Offer
from skyward_core.providers import termination_shell
from skyward_core.provisioning.bootstrap import node_script
from skyward_core.provisioning.selection import refuse, warn
from skyward_core.worker.settings import NodeSettings, with_partitions
from skyward_core.worker.supervisor import read_settings
from tests.accelerators.first_node import settings_of_first_node
from tests.testbed.fakegpu import install

HALVES = ("3g.40gb", "3g.40gb")
MIXED = ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")
WHOLE = [[], []]
DISABLED = ["Disabled", "Disabled"]

# ── specs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def spec(**options: Any) -> sky.PoolSpec:
    return sky.PoolSpec.of(provider=sky.Hosts("gpu-1"), **options)


@pytest.mark.parametrize(
    ("accelerator", "workers"),
    [
        (None, 1),
        (sky.Accelerator.NVIDIA.H100(count=2), 1),
        (sky.Accelerator.NVIDIA.H100(mig="3g.40gb"), 2),
        (sky.Accelerator.NVIDIA.H100(mig=["3g.40gb"]), 1),
        (sky.Accelerator.NVIDIA.H100(count=2, mig=["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]), 8),
    ],
)
def test_a_partition_is_a_worker(accelerator: sky.Accelerator | None, workers: int) -> None:
    """There is one worker for each partition of each GPU, else one worker.

    The machine must have CPUs and memory for all workers.
    """
    wanted = spec(accelerator=accelerator, cpu=3, memory="5GB", concurrency=2)
    assert wanted.workers_per_node == workers
    assert (wanted.requirements.vcpus, wanted.requirements.memory_gb) == (3 * workers, 5.0 * workers)
    assert (spec(accelerator=accelerator).requirements.vcpus, spec(accelerator=accelerator).requirements.memory_gb) == (
        None,
        None,
    )
    wanted.refuse_what_cannot_be()


def node_settings(wanted: sky.PoolSpec, ports: tuple[int, ...] = ()) -> NodeSettings:
    """Return the settings of the first node of a pool with these fields."""
    return settings_of_first_node(wanted, wanted.accelerator, ports)


def test_limits_of_one_worker_do_not_change_with_partitions() -> None:
    """These are the memory limit, the number of calls at the same time, and the accelerators.

    A worker has one chip and sees a part of it.
    """
    settings = node_settings(
        spec(accelerator=sky.Accelerator.NVIDIA.H100(count=2, mig="3g.40gb"), memory="5GB", concurrency=3),
        (1, 2, 3, 4, 5),
    )
    assert (settings.memory_limit_bytes, settings.slots, settings.accelerators) == (5 * 10**9, 3, ("H100",))
    assert settings.workers == ({}, {}, {}, {})
    assert (settings.scheduler_port, settings.worker_ports) == (1, (2, 3, 4, 5))
    whole = node_settings(spec(accelerator=sky.Accelerator.NVIDIA.H100(count=2)))
    assert (whole.workers, whole.accelerators, whole.memory_limit_bytes) == (({},), ("H100", "H100"), None)


def test_this_machine_is_not_partitioned() -> None:
    """Local refuses before the start and names a provider that supports partitions. Hosts accepts everything."""
    requested = sky.PoolSpec.of(provider=sky.Local(), accelerator=sky.Accelerator.NVIDIA.H100(mig="3g.40gb"))
    with pytest.raises(sky.NotYetSupported, match=r"local does not do mig: .*use Hosts with its address"):
        refuse(requested, sky.Local())
    refuse(requested, sky.Hosts("gpu-1"))
    refuse(sky.PoolSpec.of(accelerator="H100"), sky.Local())


@pytest.mark.parametrize("chip", [sky.Accelerator.NVIDIA.A100(mig="3g.40gb"), sky.Accelerator.NVIDIA.A30(mig="1g.6gb")])
def test_amperes_on_rented_machines_cause_a_warning(caplog: pytest.LogCaptureFixture, chip: sky.Accelerator) -> None:
    """A virtual machine may refuse their reset, so the warning comes before one is billed.

    A user's own machines, whole chips and later chips cause no warning.
    """
    warn(sky.PoolSpec.of(accelerator=chip), [sky.Hosts("gpu-1")])
    warn(sky.PoolSpec.of(accelerator=sky.Accelerator(chip.name, chip.memory_gb, 1)), [sky.AWS()])
    warn(sky.PoolSpec.of(accelerator=sky.Accelerator.NVIDIA.H100(mig="3g.40gb")), [sky.AWS()])
    assert caplog.messages == []
    warn(sky.PoolSpec.of(accelerator=chip), [sky.Hosts("gpu-1"), sky.AWS()])
    assert "H100, H200 and B200 need no reset" in caplog.text


@pytest.mark.parametrize("provider", [sky.AWS(), sky.Verda(), sky.DigitalOcean()])
@pytest.mark.parametrize("chip", ["H100", "H200", "B200", "B300", "RTX_PRO_6000"])
def test_later_chips_are_partitioned_on_rented_machines(provider: sky.Provider, chip: str) -> None:
    """They change to MIG mode without a reset."""
    make = getattr(sky.Accelerator.NVIDIA, chip)
    name, memory = make().name, make().memory_gb
    refuse(sky.PoolSpec.of(accelerator=make(mig=profiles(name, memory)[0].name)), provider)


def test_the_special_chips_exist_in_the_catalogue() -> None:
    """The lists of special chips use existing names."""
    assert set(CHANGED_BY_RESET) < {table.chip for table in TABLES}


def test_a_local_pool_with_partitions_is_refused_before_it_starts() -> None:
    """Opening the pool raises an error and launches nothing."""
    events: list[object] = []
    with pytest.raises(sky.NotYetSupported, match="use Hosts"):
        sky.ComputePool(
            provider=sky.Local(),
            accelerator=sky.Accelerator.NVIDIA.H100(mig="3g.40gb"),
            on_event=events.append,
            display="quiet",
        ).open()
    assert not [event for event in events if isinstance(event, sky.InstanceProvisioned)]


# ── partitions of a worker ───────────────────────────────────────────────────────────────────────────────────────────


def test_each_worker_sees_one_partition() -> None:
    """The order is that of the list. The setting replaces the client's for the worker, and other settings stay."""
    settings = replace(
        node_settings(spec(accelerator=sky.Accelerator.NVIDIA.H100(mig="3g.40gb"))),
        workers=({"A": "1", "CUDA_VISIBLE_DEVICES": "0"}, {}),
    )
    shown = with_partitions(settings, "MIG-a\nMIG-b\n")
    assert shown.workers == ({"A": "1", "CUDA_VISIBLE_DEVICES": "MIG-a"}, {"CUDA_VISIBLE_DEVICES": "MIG-b"})
    assert replace(shown, workers=settings.workers) == settings
    assert NodeSettings.from_json(shown.to_json()) == shown


@pytest.mark.parametrize("text", ["", "MIG-a\n", "MIG-a\nMIG-b\nMIG-c\n"])
def test_a_wrong_number_of_partitions_is_an_error(text: str) -> None:
    """With another number two workers could share a partition, or one worker could see the whole GPU."""
    with pytest.raises(ValueError, match=f"{len(text.split())} partitions of GPUs for 2 workers"):
        with_partitions(node_settings(spec(accelerator=sky.Accelerator.NVIDIA.H100(mig="3g.40gb"))), text)


def test_a_node_reads_its_partitions_beside_its_settings(tmp_path: Path) -> None:
    """If the file is missing, the settings are those of the client."""
    settings = node_settings(spec(accelerator=sky.Accelerator.NVIDIA.H100(mig="3g.40gb")))
    (tmp_path / "settings.json").write_text(settings.to_json())
    assert read_settings(tmp_path) == settings
    (tmp_path / "partitions").write_text("MIG-a\nMIG-b\n")
    assert read_settings(tmp_path) == with_partitions(settings, "MIG-a MIG-b")


# ── the script, with fake GPUs ───────────────────────────────────────────────────────────────────────────────────────


class Machine:
    """This machine with other GPUs, and the directory of a node on it."""

    def __init__(self, folder: Path, **gpus: Any) -> None:
        self.gpus = install(folder / "bin", **{"count": 2, **gpus})
        self.directory = folder / "it's an instance"
        self.directory.mkdir()
        self.prefix: list[str] = []
        """The command that runs the shells, for example as another user."""
        self.environ = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SKYWARD_INSTANCE_DIRECTORY": str(self.directory),
            "SKYWARD_KEEP_DIRECTORY": "1",
        }

    def start(self, profiles: Sequence[str], gpus: int = 2) -> "subprocess.Popen[str]":
        """Start to partition, in a separate process group."""
        script = shell.script(shell.prelude(), partition_gpus(profiles, gpus), shell.done("mig"))
        (self.directory / "script").write_text(script)
        argv = [*self.prefix, "bash", str(self.directory / "script")]
        return subprocess.Popen(
            argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def partition(self, profiles: Sequence[str], gpus: int = 2) -> tuple[int, str]:
        """Partition the GPUs; return the exit code and the output."""
        with self.start(profiles, gpus) as process:
            said, _ = process.communicate(timeout=30)
            return process.returncode, said

    def give_back(self, **environ: str) -> str:
        """Restore the GPUs as guard and provider do; return the output."""
        script = f'set -u\n{termination_shell.ENDING}\nskyward_clean host-000000000000 "$SKYWARD_INSTANCE_DIRECTORY"\n'
        done = subprocess.run(
            [*self.prefix, "dash", "-c", script],
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == ""
        return done.stdout

    @property
    def partitions(self) -> list[str]:
        return (self.directory / "partitions").read_text().split()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with two H100 without partitions."""
    return Machine(tmp_path)


def test_without_profiles_there_is_no_script() -> None:
    """There is no phase either."""
    assert partition_gpus((), 2) == ""
    assert "mig" not in node_script(spec(accelerator="H100")).partition("::skyward phase skyward")[2]


@pytest.mark.parametrize("profiles", [HALVES, MIXED, ("7g.80gb",)])
def test_gpus_are_split_and_restored(machine: Machine, profiles: tuple[str, ...]) -> None:
    """Each partition has a line, in the order of the GPUs. Later all GPUs are as before, without output."""
    code, said = machine.partition(profiles)
    assert (code, said.splitlines()) == (0, ["::skyward phase mig", "::skyward done phase=mig"])
    assert machine.gpus.partitions == [list(profiles)] * 2
    assert machine.partitions == machine.gpus.uuids
    assert len(set(machine.partitions)) == 2 * len(profiles)
    assert machine.give_back() == ""
    assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)
    assert not (machine.directory / "mig").exists()
    seen = machine.gpus.changes
    assert machine.give_back() == ""  # another user may use the GPUs by now
    assert machine.gpus.changes == seen


def test_partitions_of_another_user_are_not_changed(machine: Machine) -> None:
    """The second GPU has another user's partitions, without a compute instance.

    The message names it, and the first GPU is restored.
    """
    machine.gpus.set(1, current="Enabled", pending="Enabled")
    machine.gpus.run("mig", "-i", "1", "-cgi", "4g.40gb")
    code, said = machine.partition(HALVES)
    assert code != 0
    assert "GPU 1 is partitioned already; if no other user needs that: sudo nvidia-smi mig -i 1 -dci" in said
    assert "::skyward failed phase=mig exit=1 command=partition 2 3g.40gb,3g.40gb" in said
    machine.give_back()
    assert (machine.gpus.modes, machine.gpus.partitions) == (["Disabled", "Enabled"], [[], ["4g.40gb"]])


def test_after_a_reboot_only_the_mode_is_restored(tmp_path: Path) -> None:
    """Partitions after the reboot belong to another user.

    A mode that persists, as an A100's does, is restored if the GPU is unused.
    """
    machine = Machine(tmp_path)
    (machine.directory / "mig").write_text("0 Disabled another-boot\n1 Disabled another-boot\n")
    for gpu in (0, 1):
        machine.gpus.set(gpu, current="Enabled", pending="Enabled")
    machine.gpus.run("mig", "-i", "1", "-cgi", "7g.80gb")
    assert machine.give_back() == ""
    assert (machine.gpus.modes, machine.gpus.partitions) == (["Disabled", "Enabled"], [[], ["7g.80gb"]])


def test_without_a_process_to_name_there_is_advice(machine: Machine) -> None:
    """The command fails and lists no process: monitoring is the usual reason."""
    machine.gpus.set(fails="-mig")
    code, said = machine.partition(HALVES)
    assert code != 0
    assert (
        "Unknown Error\nGPU 0 cannot change to MIG mode. Something may hold it that is no process of its list: stop monitoring"
        in said
    )


@pytest.mark.parametrize(
    ("program", "gpus", "words"),
    [
        (None, 2, "there is no nvidia-smi here"),
        (
            "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9\n",
            2,
            "NVIDIA-SMI has failed",
        ),
        ("", 3, "there are 2 GPUs here, and 3 are to be partitioned"),
        (
            "#!/bin/sh\ncase $* in *index*) echo 0 ;; *mig.mode*) echo '[N/A], [N/A]' ;; esac\n",
            1,
            "GPU 0 cannot be partitioned: its MIG mode is [N/A] [N/A]",
        ),
    ],
)
def test_a_machine_that_cannot_be_partitioned_reports_the_reason(
    machine: Machine, program: str | None, gpus: int, words: str
) -> None:
    """No driver, a driver that does not answer, too few GPUs, or GPUs without MIG.

    Nothing is recorded, so nothing is restored.
    """
    if program is None:
        machine.gpus.program.unlink()
    elif program:
        machine.gpus.program.write_text(program)
    code, said = machine.partition(HALVES, gpus)
    assert code != 0
    assert words in said
    assert "::skyward failed phase=mig" in said
    assert not (machine.directory / "mig").exists()


def test_an_incomplete_list_of_partitions_is_an_error(machine: Machine) -> None:
    """The driver lists one of two partitions: no worker gets any."""
    machine.gpus.set(hides=1)
    code, said = machine.partition(HALVES, 1)
    assert code != 0
    assert '2 partitions were made, and "nvidia-smi -L" lists 1' in said
    assert not (machine.directory / "partitions").exists()


def test_a_driver_that_hangs_does_not_block_the_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its time limit the restoration stops, and the output has the command. The clean-up continues."""
    monkeypatch.setattr(
        termination_shell,
        "ENDING",
        termination_shell.ENDING.replace(f"seconds={termination_shell.UNPARTITION_SECONDS}\n", "seconds=1\n"),
    )
    machine.partition(HALVES)
    machine.gpus.set(hangs="-dgi")
    began = time.monotonic()
    said = machine.give_back(SKYWARD_KEEP_DIRECTORY="")
    assert time.monotonic() - began < 20
    assert "the GPUs could not be restored in 1 s: they may still be partitioned" in said
    assert not machine.directory.exists()


def test_an_offer_must_have_cpus_for_all_its_workers() -> None:
    """Two workers with 8 CPUs each do not fit on a machine with 8."""
    small = Offer(
        provider="p",
        instance_type="t",
        region="r",
        price_per_hour=1.0,
        vcpus=8,
        memory_gb=64,
        accelerator="H100",
        accelerators=1,
        accelerator_memory_gb=80,
    )
    requested = spec(accelerator=sky.Accelerator.NVIDIA.H100(mig="3g.40gb"), cpu=8).requirements
    with pytest.raises(sky.NoCapacity, match="has 8 CPUs"):
        sky.select_instance([small], requested.accelerator, cpu=requested.vcpus)
