"""A slot and its runner: which call a cancellation stops, and which process belongs to which request for a runner.

The runners here are separate processes that the tests start in place of the supervisor.
"""

from pathlib import Path

import psutil
import pytest

from skyward_core.wire.messages import OutcomeKind
from skyward_core.worker import slot as slots
from skyward_core.worker.slot import Slot
from tests.system.worker.test_slot import (  # noqa: F401 - fixtures
    Run,
    batch_of,
    limited,
    runners,
    slot,
    waits_for,
)
from tests.waiting import wait_until

CHILD = "subprocess.Popen(['sleep', '1000'])"
SESSION = "subprocess.Popen(['setsid', 'sleep', '1000'])"
CHILD_OF_A_SESSION = "subprocess.Popen(['setsid', 'sh', '-c', 'sleep 1000 & wait'])"


@pytest.mark.parametrize("start", [CHILD, SESSION, CHILD_OF_A_SESSION], ids=["child", "session", "child of a session"])
@pytest.mark.parametrize("how", ["cancelled", "cancelled, signal ignored", "deadline", "deadline, signal ignored"])
def test_processes_that_a_call_has_started_end_with_a_call_that_is_stopped(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, start: str
) -> None:
    """Also a server or a launcher with its own session: it would keep its memory and its GPU."""
    monkeypatch.setattr(slots, "TERM_SECONDS", 0.2)
    begun = tmp_path / "begun"
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if "ignored" in how else ""
    text = f"import signal, subprocess; {ignores}{start}\n{waits_for(tmp_path / 'never', begun)}"
    batch = batch_of(wanted=text)
    run = Run(slot, limited(batch, "wanted", 2.0) if "deadline" in how else batch)
    wait_until(begun.exists, "the call to begin")
    runner = psutil.Process(slot.pid)
    wait_until(lambda: "sleep" in [process.name() for process in runner.children(recursive=True)], "the sleeper")
    sleepers = [process for process in runner.children(recursive=True) if process.name() == "sleep"]
    if "cancelled" in how:
        slot.cancel("wanted")
    assert run.endings() == {"wanted": OutcomeKind.CANCELLED if "cancelled" in how else OutcomeKind.TIMED_OUT}
    wait_until(lambda: not any(has_not_ended(process) for process in sleepers), "the sleeper to end")


def has_not_ended(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
