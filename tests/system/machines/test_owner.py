"""An owner is one process; another process with the same pid is a different owner."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from skyward_core.machines.owner import Owner, OwnerState
from tests.waiting import wait_until

TELL = "from skyward_core.machines.owner import Owner; o = Owner.here(); print(o.name); print(o.process)"


def test_only_a_process_that_has_ended_is_dead() -> None:
    """The text in tags is read back as the same owner. A reused pid, with another start time, is another owner."""
    here = Owner.here()
    assert here.state() is OwnerState.ALIVE
    assert Owner.parse(here.name, here.process) == here
    assert " " not in here.name + here.process
    words = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True).stdout.split()
    assert Owner.parse(*words).state() is OwnerState.DEAD
    assert replace(here, started="1").state() is OwnerState.DEAD


def test_a_stopped_process_is_neither_dead_nor_alive() -> None:
    """It renews nothing, and may go on: only its lease shows for how long that is waited for."""
    tell = [sys.executable, "-c", f"{TELL}; import sys; sys.stdout.flush(); sys.stdin.read()"]
    with subprocess.Popen(tell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        owner = Owner.parse(process.stdout.readline().strip(), process.stdout.readline().strip())
        assert owner.state() is OwnerState.ALIVE
        for sent, state in ((signal.SIGSTOP, OwnerState.STOPPED), (signal.SIGCONT, OwnerState.ALIVE)):
            process.send_signal(sent)
            wait_until(lambda state=state: owner.state() is state, f"the process to be {state}")
        process.communicate()
    assert owner.state() is OwnerState.DEAD


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "other", "started": "1"},
        {"boot": "b", "started": "1"},
        {"boot": "", "started": "1"},
        {"namespace": "1", "started": "1"},
        {"started": ""},
    ],
    ids=str,
)
def test_an_invisible_owner_is_unknown_not_dead(fields: dict[str, str]) -> None:
    """It is on another host, in another boot or container, or /proc did not have its start time."""
    assert replace(Owner.here(), **fields).state() is OwnerState.UNKNOWN


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
def test_a_tag_of_another_user_may_contain_anything(pid: int) -> None:
    """An impossible pid is not a living owner; a malformed owner is refused."""
    assert replace(Owner.here(), pid=pid).state() is OwnerState.DEAD
    with pytest.raises(ValueError, match="unpack"):
        Owner.parse("ada@host", "nonsense")
