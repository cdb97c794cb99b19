"""MIG without a GPU: specs, settings of nodes, and the script that partitions and restores, with a fake nvidia-smi."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import skyward_core as sky
from skyward_core.image import shell
from skyward_core.image.mig_shell import UNPARTITION, partition_gpus
from skyward_core.providers import hosts
from skyward_core.provisioning.bootstrap import node_script
from skyward_core.provisioning.guard import guard_script
from tests.conftest import wait_until
from tests.system.accelerators.test_mig import (  # noqa: F401 - fixtures
    DISABLED,
    HALVES,
    MIXED,
    WHOLE,
    Machine,
    machine,
    spec,
)

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
SUDO = """\
#!/bin/sh
[ "$1" = -n ] && shift
[ "$1" != -- ] || shift
[ ! -e "$0.refuses" ] || { echo 'sudo: a password is required' >&2; exit 1; }
FAKE_ROOT=1 exec "$@"
"""

# ── specs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dialect", "script"),
    [
        ("bash", shell.script(shell.prelude(), partition_gpus(MIXED, 8))),
        ("bash", node_script(spec(accelerator=sky.Accelerator.NVIDIA.A100(mig="2g.20gb")))),
        ("sh", UNPARTITION),
        ("sh", guard_script(60, None)),
        ("sh", hosts.END),
    ],
)
def test_the_text_passes_shellcheck(dialect: str, script: str) -> None:
    """Functions and variables that a part does not use are ignored.

    The program has no single quotes, which would end its own quoting.
    """
    argv = [SHELLCHECK, f"--shell={dialect}", "--exclude=SC2329,SC2317,SC2034", "-"]
    assert subprocess.run(argv, input=script, capture_output=True, text=True, check=False).stdout == ""
    assert "'" not in UNPARTITION


def test_other_gpus_of_the_machine_are_not_changed(tmp_path: Path) -> None:
    """Two of four GPUs are used: the partitions of the fourth are neither used nor removed."""
    machine = Machine(tmp_path, count=4)
    machine.gpus.run("-i", "3", "-mig", "1")
    machine.gpus.run("mig", "-i", "3", "-cgi", "7g.80gb", "-C")
    assert machine.partition(HALVES)[0] == 0
    assert machine.partitions == machine.gpus.uuids[:4]
    machine.give_back()
    assert machine.gpus.modes == [*DISABLED, "Disabled", "Enabled"]
    assert machine.gpus.partitions == [[], [], [], ["7g.80gb"]]


def test_small_profiles_first_would_not_fit(machine: Machine) -> None:
    """The order of `Accelerator` matters: in the reverse order the driver finds no space.

    The partitions created until then are removed.
    """
    requested = sky.Accelerator.NVIDIA.H100(count=2, mig=["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"])
    code, said = machine.partition(MIXED[::-1])
    assert code != 0
    assert "Insufficient Resources" in said
    assert "GPU 0 cannot be split into 1g.10gb,1g.10gb,2g.20gb,3g.40gb" in said
    assert machine.gpus.partitions[0] == ["1g.10gb", "1g.10gb", "2g.20gb"]
    machine.give_back()
    assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)
    (machine.directory / "partitions").unlink(missing_ok=True)
    assert machine.partition(requested.mig)[0] == 0
    assert machine.gpus.partitions == [list(MIXED)] * 2


def test_an_earlier_mig_mode_is_restored(machine: Machine) -> None:
    """A GPU in MIG mode without partitions is the same afterwards."""
    machine.gpus.set(0, current="Enabled", pending="Enabled")
    assert machine.partition(HALVES)[0] == 0
    assert (machine.directory / "mig").read_text() == f"0 Enabled {BOOT}\n1 Disabled {BOOT}\n"
    machine.give_back()
    assert (machine.gpus.modes, machine.gpus.partitions) == (["Enabled", "Disabled"], WHOLE)


def test_a_second_run_starts_again(machine: Machine) -> None:
    """The partitions of the first run are removed, and the first recorded mode is kept."""
    machine.partition(HALVES)
    first = machine.partitions
    assert machine.partition(MIXED)[0] == 0
    assert machine.gpus.partitions == [list(MIXED)] * 2
    assert not set(first) & set(machine.partitions)
    assert (machine.directory / "mig").read_text() == f"0 Disabled {BOOT}\n1 Disabled {BOOT}\n"
    machine.give_back()
    assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("needs_reset", [False, True])
def test_after_sigkill_at_any_command_all_can_be_restored(tmp_path: Path, when: str, needs_reset: bool) -> None:
    """SIGKILL comes just before or just after each command that changes something."""
    commands = 6 if needs_reset else 4
    for number in range(1, commands + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        machine = Machine(folder, needs_reset=needs_reset, stops_at=number, stops_when=when)
        assert machine.partition(HALVES)[0] == -signal.SIGKILL
        assert len(machine.gpus.changes) == number
        assert machine.gpus.modes != DISABLED or machine.gpus.partitions != WHOLE or (number, when) == (1, "before")
        assert not (machine.directory / "partitions").exists()
        machine.gpus.set(stops_at=0)
        assert machine.give_back() == ""
        assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE), f"command {number}"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_sudo_is_used_if_the_user_is_not_root() -> None:
    """It needs no password. Without sudo the error comes before anything is changed."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        sudo = machine.gpus.program.with_name("sudo")
        sudo.write_text(SUDO)
        sudo.chmod(0o755)
        for path in (Path(folder), machine.directory, machine.gpus.program.with_name("nvidia-smi.json")):
            path.chmod(0o777)
        machine.prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        assert machine.partition(HALVES) == (0, "::skyward phase mig\n::skyward done phase=mig\n")
        assert machine.gpus.partitions == [list(HALVES)] * 2
        assert machine.give_back() == ""
        assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)
        sudo.with_name("sudo.refuses").touch()
        code, said = machine.partition(HALVES)
        assert code != 0
        assert (
            "a password is required\nGPUs are partitioned by root only: log in as root, or let sudo run nvidia-smi without a password"
            in said
        )
        assert not (machine.directory / "mig").exists()


def partitioning(machine: Machine) -> list[int]:
    """Return the commands that partition a GPU of this machine now."""
    found = [
        (one.pid, one.info["cmdline"] or [], one.info["status"]) for one in psutil.process_iter(["cmdline", "status"])
    ]
    return [
        pid
        for pid, words, status in found
        if "-cgi" in words and machine.environ["HOME"] in " ".join(words) and status != psutil.STATUS_ZOMBIE
    ]


def test_a_command_that_survives_the_node_is_waited_for(machine: Machine) -> None:
    """The script dies, its command under sudo does not: the restoration begins after the command."""
    machine.gpus.set(seconds=3.0)
    process = machine.start(HALVES, 1)
    wait_until(lambda: any("-cgi" in change for change in machine.gpus.changes), "the partitions to be on their way")
    process.kill()
    process.communicate()
    assert partitioning(machine)
    assert machine.gpus.partitions == WHOLE
    machine.gpus.set(seconds=0.0)
    assert machine.give_back() == ""
    assert partitioning(machine) == []
    assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_ampere_gpu_is_reset(tmp_path: Path) -> None:
    """It is reset if the mode needs it, also for the restoration."""
    machine = Machine(tmp_path, needs_reset=True)
    assert machine.partition(HALVES)[0] == 0
    assert machine.gpus.partitions == [list(HALVES)] * 2
    assert machine.give_back() == ""
    assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)
    assert sum("--gpu-reset" in change for change in machine.gpus.changes) == 4


def test_a_refused_reset_is_reported_with_a_remedy(tmp_path: Path) -> None:
    """A virtual machine may refuse it; the pending mode is removed.

    After a reboot in MIG mode it works, and the mode stays.
    """
    machine = Machine(tmp_path, needs_reset=True, refuses_reset=True)
    code, said = machine.partition(HALVES)
    assert code != 0
    assert "pending enable state" in said
    assert "could not be reset" in said
    assert 'Run "sudo nvidia-smi -i 0 -mig 1", reboot the machine, and open the pool again' in said
    assert "there, choose an H100 or a later chip" in said
    assert machine.give_back() == ""
    assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)
    for gpu in (0, 1):
        machine.gpus.set(gpu, current="Enabled", pending="Enabled")
    assert machine.partition(HALVES)[0] == 0
    machine.give_back()
    assert machine.gpus.modes == ["Enabled", "Enabled"]


@pytest.mark.parametrize("needs_reset", [False, True])
def test_the_processes_of_a_busy_gpu_are_named(machine: Machine, needs_reset: bool) -> None:
    """They prevent the change of the mode, and are not ended."""
    machine.gpus.set(needs_reset=needs_reset)
    machine.gpus.set(0, processes=[(4711, "/usr/bin/train"), (4712, "python")])
    code, said = machine.partition(HALVES)
    assert code != 0
    assert (
        "GPU 0 cannot change to MIG mode while processes use it: 4711, /usr/bin/train; 4712, python. End them and open the pool again"
        in said
    )
    machine.give_back()
    assert (machine.gpus.modes, machine.gpus.partitions) == (DISABLED, WHOLE)


# ── failed restorations ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gpu_that_cannot_be_restored_is_reported(machine: Machine) -> None:
    """The other one is restored, and the clean-up continues."""
    machine.partition(HALVES)
    machine.gpus.set(1, processes=[(4711, "somebody")])
    said = machine.give_back(SKYWARD_KEEP_DIRECTORY="")
    assert said.startswith("GPU 1 is not as it was before (MIG mode Disabled, not partitioned): ")
    assert "In use by another client" in said
    assert said.count("\n") == 1
    assert (machine.gpus.modes, machine.gpus.partitions) == (["Disabled", "Enabled"], [[], list(HALVES)])
    assert not machine.directory.exists()
