"""The script that partitions GPUs and restores them, with a fake nvidia-smi."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.image import shell
from skyward_core.image.shell import UNPARTITION, partition_gpus
from skyward_core.providers import hosts, termination_shell
from skyward_core.provisioning.bootstrap import guard_script, node_script
from tests.testbed.fakegpu import install

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
HALVES = ("3g.40gb", "3g.40gb")
MIXED = ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")
WHOLE = [[], []]
DISABLED = ["Disabled", "Disabled"]
SUDO = """\
#!/bin/sh
[ "$1" = -n ] && shift
[ "$1" != -- ] || shift
[ ! -e "$0.refuses" ] || { echo 'sudo: a password is required' >&2; exit 1; }
FAKE_ROOT=1 exec "$@"
"""


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
            said, _ = process.communicate(timeout=120)
            return process.returncode, said

    def refuses(self, gpus: int = 2) -> str:
        """Partition the GPUs, which fails; return the output."""
        code, said = self.partition(HALVES, gpus)
        assert code != 0
        assert "::skyward failed phase=mig" in said
        return said

    def give_back(self, ending: str = termination_shell.ENDING, **environ: str) -> str:
        """Restore the GPUs as guard and provider do; return the output."""
        script = f'set -u\n{ending}\nskyward_clean host-000000000000 "$SKYWARD_INSTANCE_DIRECTORY"\n'
        argv = [*self.prefix, "dash", "-c", script]
        environment = self.environ | environ
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.stderr == ""
        return done.stdout

    def is_whole(self) -> bool:
        return (self.gpus.modes, self.gpus.partitions) == (DISABLED, WHOLE)

    @property
    def partitions(self) -> list[str]:
        return (self.directory / "partitions").read_text().split()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with two H100 without partitions."""
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("dialect", "script"),
    [
        ("bash", lambda: shell.script(shell.prelude(), partition_gpus(MIXED, 8))),
        # it makes the archive of our code, which costs a second in each process that collects this file
        ("bash", lambda: node_script(sky.PoolSpec.of(accelerator=sky.Accelerator.NVIDIA.A100(mig="2g.20gb")))),
        ("sh", lambda: UNPARTITION),
        ("sh", lambda: guard_script(60, None)),
        ("sh", lambda: hosts.END),
    ],
    ids=["MIG", "a node", "the end of MIG", "the guard", "the end of a host"],
)
def test_the_text_passes_shellcheck(dialect: str, script: Callable[[], str]) -> None:
    """Functions and variables that a part does not use are ignored. A single quote would end the program's own quoting."""
    argv = [SHELLCHECK, f"--shell={dialect}", "--exclude=SC2329,SC2317,SC2034", "-"]
    assert subprocess.run(argv, input=script(), capture_output=True, text=True, check=False).stdout == ""
    assert "'" not in UNPARTITION


@pytest.mark.parametrize("profiles", [HALVES, MIXED])
@pytest.mark.parametrize("needs_reset", [False, True])
def test_gpus_are_split_and_restored(tmp_path: Path, profiles: tuple[str, ...], needs_reset: bool) -> None:
    """Each partition has a line, in the order of the GPUs. An A100's mode changes with a reset only, both ways."""
    machine = Machine(tmp_path, needs_reset=needs_reset)
    code, said = machine.partition(profiles)
    assert (code, said.splitlines()[0], said.splitlines()[-1]) == (0, "::skyward phase mig", "::skyward done phase=mig")
    assert machine.gpus.partitions == [list(profiles)] * 2
    assert machine.partitions == machine.gpus.uuids
    assert len(set(machine.partitions)) == 2 * len(profiles)
    assert machine.give_back() == ""
    assert machine.is_whole()
    assert not (machine.directory / "mig").exists()
    seen = machine.gpus.changes
    assert sum("--gpu-reset" in change for change in seen) == (4 if needs_reset else 0)
    assert machine.give_back() == ""  # another user may use the GPUs by now
    assert machine.gpus.changes == seen


def test_only_the_first_gpus_are_changed_and_a_mode_that_was_on_stays_on(tmp_path: Path) -> None:
    """The partitions of the fourth are neither used nor removed."""
    machine = Machine(tmp_path, count=4)
    machine.gpus.set(0, current="Enabled", pending="Enabled")
    machine.gpus.run("-i", "3", "-mig", "1")
    machine.gpus.run("mig", "-i", "3", "-cgi", "7g.80gb", "-C")
    assert machine.partition(HALVES)[0] == 0
    assert machine.partitions == machine.gpus.uuids[:4]
    machine.give_back()
    assert machine.gpus.modes == ["Enabled", "Disabled", "Disabled", "Enabled"]
    assert machine.gpus.partitions == [[], [], [], ["7g.80gb"]]


def test_a_second_run_starts_again(machine: Machine) -> None:
    """The partitions of the first run are removed, and the first recorded mode is kept."""
    machine.partition(HALVES)
    first = machine.partitions
    assert machine.partition(MIXED)[0] == 0
    assert machine.gpus.partitions == [list(MIXED)] * 2
    assert not set(first) & set(machine.partitions)
    machine.give_back()
    assert machine.is_whole()


def test_partitions_of_another_user_are_not_changed(machine: Machine) -> None:
    """The message names the GPU and the commands that free it, and the first GPU is restored."""
    machine.gpus.set(1, current="Enabled", pending="Enabled")
    machine.gpus.run("mig", "-i", "1", "-cgi", "4g.40gb")
    said = machine.refuses()
    assert "GPU 1 is partitioned already; if no other user needs that: sudo nvidia-smi mig -i 1 -dci" in said
    assert "::skyward failed phase=mig exit=1 command=partition 2 3g.40gb,3g.40gb" in said
    machine.give_back()
    assert (machine.gpus.modes, machine.gpus.partitions) == (["Disabled", "Enabled"], [[], ["4g.40gb"]])


def test_after_a_reboot_only_the_mode_is_restored(machine: Machine) -> None:
    """Partitions after the reboot belong to another user. The mode of an unused A100 persists, and is restored."""
    (machine.directory / "mig").write_text("0 Disabled another-boot\n1 Disabled another-boot\n")
    for gpu in (0, 1):
        machine.gpus.set(gpu, current="Enabled", pending="Enabled")
    machine.gpus.run("mig", "-i", "1", "-cgi", "7g.80gb")
    assert machine.give_back() == ""
    assert (machine.gpus.modes, machine.gpus.partitions) == (["Disabled", "Enabled"], [[], ["7g.80gb"]])


@pytest.mark.parametrize(
    ("program", "gpus", "words"),
    [
        (None, 2, "there is no nvidia-smi here"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", 2, "NVIDIA-SMI has failed"),
        ("", 3, "there are 2 GPUs here, and 3 are to be partitioned"),
        (
            "case $* in *index*) echo 0 ;; *mig.mode*) echo '[N/A], [N/A]' ;; esac",
            1,
            "GPU 0 cannot be partitioned: its MIG mode is [N/A] [N/A]",
        ),
    ],
)
def test_a_machine_that_cannot_be_partitioned_reports_the_reason(
    machine: Machine, program: str | None, gpus: int, words: str
) -> None:
    """Nothing is recorded, so nothing is restored."""
    if program is None:
        machine.gpus.program.unlink()
    elif program:
        machine.gpus.program.write_text(f"#!/bin/sh\n{program}\n")
    assert words in machine.refuses(gpus)
    assert not (machine.directory / "mig").exists()


@pytest.mark.parametrize(
    ("state", "processes", "words"),
    [
        (
            {"fails": "-mig"},
            [],
            "GPU 0 cannot change to MIG mode. Something may hold it that is no process of its list: stop monitoring",
        ),
        (
            {},
            [(4711, "/usr/bin/train"), (4712, "python")],
            "cannot change to MIG mode while processes use it: 4711, /usr/bin/train; 4712, python. End them and open",
        ),
        ({"needs_reset": True}, [(4711, "/usr/bin/train")], "processes use it: 4711, /usr/bin/train"),
        ({"hides": 1}, [], '4 partitions were made, and "nvidia-smi -L" lists 2'),
    ],
    ids=["monitoring", "busy", "busy A100", "an incomplete list"],
)
def test_a_gpu_that_cannot_change_is_reported_with_advice(
    machine: Machine, state: dict[str, Any], processes: list[tuple[int, str]], words: str
) -> None:
    """No worker gets a partition, and the processes are not ended."""
    machine.gpus.set(**state)
    machine.gpus.set(0, processes=processes)
    assert words in machine.refuses()
    assert not (machine.directory / "partitions").exists()
    machine.gpus.set(fails="", hides=0)
    machine.give_back()
    assert machine.is_whole()


def test_a_refused_reset_is_reported_with_a_remedy(tmp_path: Path) -> None:
    """A virtual machine may refuse it; the pending mode is removed. After a reboot in MIG mode it works."""
    machine = Machine(tmp_path, needs_reset=True, refuses_reset=True)
    said = machine.refuses()
    assert "could not be reset" in said
    assert 'Run "sudo nvidia-smi -i 0 -mig 1", reboot the machine, and open the pool again' in said
    assert "there, choose an H100 or a later chip" in said
    assert machine.give_back() == ""
    assert machine.is_whole()
    for gpu in (0, 1):
        machine.gpus.set(gpu, current="Enabled", pending="Enabled")
    assert machine.partition(HALVES)[0] == 0
    machine.give_back()
    assert machine.gpus.modes == ["Enabled", "Enabled"]


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


def test_a_driver_that_hangs_does_not_block_the_end(machine: Machine) -> None:
    """At its time limit the restoration stops, and the clean-up continues."""
    limit = f"seconds={termination_shell.UNPARTITION_SECONDS}\n"
    assert limit in termination_shell.ENDING
    machine.partition(HALVES)
    machine.gpus.set(hangs="-dgi")
    said = machine.give_back(termination_shell.ENDING.replace(limit, "seconds=1\n"), SKYWARD_KEEP_DIRECTORY="")
    assert "the GPUs could not be restored in 1 s: they may still be partitioned" in said
    assert not machine.directory.exists()


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
        assert machine.is_whole()
        sudo.with_name("sudo.refuses").touch()
        said = machine.refuses()
        assert "a password is required\nGPUs are partitioned by root only: log in as root, or let sudo run" in said
        assert not (machine.directory / "mig").exists()
