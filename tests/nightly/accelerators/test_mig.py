"""The script that partitions GPUs is killed at each of its commands, with a fake nvidia-smi."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.system.accelerators.test_mig import DISABLED, HALVES, WHOLE, Machine, machine  # noqa: F401 - a fixture
from tests.waiting import wait_until


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("needs_reset", [False, True])
def test_after_sigkill_at_any_command_all_can_be_restored(tmp_path: Path, when: str, needs_reset: bool) -> None:
    """SIGKILL comes just before or just after each command that changes something."""
    for number in range(1, (6 if needs_reset else 4) + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        machine = Machine(folder, needs_reset=needs_reset, stops_at=number, stops_when=when)
        assert machine.partition(HALVES)[0] == -signal.SIGKILL
        assert len(machine.gpus.changes) == number
        assert machine.gpus.modes != DISABLED or machine.gpus.partitions != WHOLE or (number, when) == (1, "before")
        assert not (machine.directory / "partitions").exists()
        machine.gpus.set(stops_at=0)
        assert machine.give_back() == ""
        assert machine.is_whole(), f"command {number}"


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
    assert machine.is_whole()
