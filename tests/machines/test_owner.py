"""An owner is one process, and no other that has its pid."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from skyward_core.machines.owner import Owner, OwnerState

TELL = "from skyward_core.machines.owner import Owner; o = Owner.here(); print(o.name); print(o.process)"


def test_this_process_is_alive_and_travels_as_two_words() -> None:
    """What is written into tags is read back as the same owner."""
    here = Owner.here()
    assert here.state() is OwnerState.ALIVE
    assert Owner.parse(here.name, here.process) == here
    assert " " not in here.name + here.process


def test_a_process_that_has_ended_is_dead() -> None:
    """Seen from another process of the same host."""
    told = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True).stdout.split()
    assert Owner.parse(*told).state() is OwnerState.DEAD


@pytest.mark.parametrize("elsewhere", [{"host": "other"}, {"boot": "b"}, {"boot": ""}, {"namespace": "1"}], ids=str)
def test_nobody_is_called_dead_who_cannot_be_seen(elsewhere: dict[str, str]) -> None:
    """Of another host, another boot or another container nothing is known, though no process here has that pid and
    start.
    """
    assert replace(Owner.here(), started="1", **elsewhere).state() is OwnerState.UNKNOWN


def test_a_pid_that_was_given_anew_is_another_owner() -> None:
    """The same pid with another start is not the process that it was."""
    assert replace(Owner.here(), started="1").state() is OwnerState.DEAD


AS_NOBODY = """
import os, subprocess, sys
from skyward_core.machines.owner import Owner
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=" + sys.argv[1], "proc", "/proc"], check=True)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
here = Owner.here()
told = [Owner.parse(*words.split()).state().value for words in sys.argv[2:]]
print(*told, here.state().value)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root mounts /proc")
@pytest.mark.parametrize("hidepid", [1, 2])
def test_who_is_hidden_is_not_called_dead(hidepid: int) -> None:
    """Where /proc is mounted with `hidepid`, other users see nothing of a process; that it has ended the kernel tells
    all the same.
    """
    dead = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True).stdout
    here = Owner.here()
    command = ["unshare", "--mount", sys.executable, "-c", AS_NOBODY, str(hidepid), f"{here.name} {here.process}", dead]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount" in told.stderr or "unshare" in told.stderr:
        pytest.skip(told.stderr)
    assert told.stdout.split() == ["unknown", "dead", "alive"], told.stderr


@pytest.mark.parametrize("pid", [0, -1, 10**30, 2**22 + 1])
def test_a_pid_that_cannot_be_is_nobody(pid: int) -> None:
    """As a tag may name that somebody else wrote."""
    assert replace(Owner.here(), pid=pid).state() is OwnerState.DEAD


def test_an_owner_without_a_start_is_not_called_dead() -> None:
    """It was written down where /proc did not tell it."""
    assert replace(Owner.here(), started="").state() is OwnerState.UNKNOWN


def test_what_is_no_owner_is_refused() -> None:
    """A tag that somebody else wrote."""
    with pytest.raises(ValueError, match="unpack"):
        Owner.parse("ada@host", "nonsense")
