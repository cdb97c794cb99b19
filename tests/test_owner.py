"""An owner is one process, and no other that has its pid."""

import subprocess
import sys
from dataclasses import replace

import pytest

from skyward_core.owner import Owner, OwnerState


def test_this_process_is_alive_and_travels_as_two_words() -> None:
    """What is written into tags is read back as the same owner."""
    here = Owner.here()
    assert here.state() is OwnerState.ALIVE
    assert Owner.parse(here.name, here.process) == here
    assert " " not in here.name + here.process


def test_a_process_that_has_ended_is_dead() -> None:
    """Seen from another process of the same host."""
    told = subprocess.run(
        [sys.executable, "-c", "from skyward_core.owner import Owner; o = Owner.here(); print(o.name); print(o.process)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert Owner.parse(*told).state() is OwnerState.DEAD


@pytest.mark.parametrize("elsewhere", [{"host": "other"}, {"boot": "b"}, {"boot": ""}, {"namespace": "1"}], ids=str)
def test_nobody_is_called_dead_who_cannot_be_seen(elsewhere: dict[str, str]) -> None:
    """Of another host, another boot or another container nothing is known, though no process here has that pid and start."""
    assert replace(Owner.here(), started="1", **elsewhere).state() is OwnerState.UNKNOWN


def test_a_pid_that_was_given_anew_is_another_owner() -> None:
    """The same pid with another start is not the process that it was."""
    assert replace(Owner.here(), started="1").state() is OwnerState.DEAD


def test_what_is_no_owner_is_refused() -> None:
    """A tag that somebody else wrote."""
    with pytest.raises(ValueError, match="unpack"):
        Owner.parse("ada@host", "nonsense")
