"""An owner is one process; another process with the same pid is a different owner."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from skyward_core.machines.owner import Owner, OwnerState

TELL = "from skyward_core.machines.owner import Owner; o = Owner.here(); print(o.name); print(o.process)"


def test_this_process_is_alive_and_survives_its_text_form() -> None:
    """The text in tags is read back as the same owner."""
    here = Owner.here()
    assert here.state() is OwnerState.ALIVE
    assert Owner.parse(here.name, here.process) == here
    assert " " not in here.name + here.process


def test_a_process_that_has_ended_is_dead() -> None:
    """Another process of the same host sees it."""
    words = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True).stdout.split()
    assert Owner.parse(*words).state() is OwnerState.DEAD


@pytest.mark.parametrize("elsewhere", [{"host": "other"}, {"boot": "b"}, {"boot": ""}, {"namespace": "1"}], ids=str)
def test_an_invisible_owner_is_unknown_not_dead(elsewhere: dict[str, str]) -> None:
    """It is on another host, or in another boot or container, even if no process here has its pid and start."""
    assert replace(Owner.here(), started="1", **elsewhere).state() is OwnerState.UNKNOWN


def test_a_reused_pid_is_another_owner() -> None:
    """A process with the same pid and another start time is a different owner."""
    assert replace(Owner.here(), started="1").state() is OwnerState.DEAD


AS_ANOTHER_USER = """
import os, subprocess, sys
from skyward_core.machines.owner import Owner
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=" + sys.argv[1], "proc", "/proc"], check=True)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
here = Owner.here()
states = [Owner.parse(*words.split()).state().value for words in sys.argv[2:]]
print(*states, here.state().value)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root mounts /proc")
@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_hidden_owner_is_unknown_not_dead(hidepid: int) -> None:
    """With `hidepid` on /proc, other users cannot see a process. The kernel still reports whether it has ended."""
    dead = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True).stdout
    here = Owner.here()
    command = [
        "unshare",
        "--mount",
        sys.executable,
        "-c",
        AS_ANOTHER_USER,
        str(hidepid),
        f"{here.name} {here.process}",
        dead,
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount" in completed.stderr or "unshare" in completed.stderr:
        pytest.skip(completed.stderr)
    assert completed.stdout.split() == ["unknown", "dead", "alive"], completed.stderr


@pytest.mark.parametrize("pid", [0, -1, 10**30, 2**22 + 1])
def test_an_impossible_pid_is_not_a_living_owner(pid: int) -> None:
    """A tag of another user may contain it."""
    assert replace(Owner.here(), pid=pid).state() is OwnerState.DEAD


def test_an_owner_without_a_start_time_is_unknown_not_dead() -> None:
    """/proc did not have its start time when it was written."""
    assert replace(Owner.here(), started="").state() is OwnerState.UNKNOWN


def test_a_malformed_owner_is_refused() -> None:
    """A tag of another user may contain it."""
    with pytest.raises(ValueError, match="unpack"):
        Owner.parse("ada@host", "nonsense")
