"""A slot and its runner: which call a cancellation stops, and which process belongs to which request for a runner.

The runners here are separate processes that the tests start in place of the supervisor.
"""

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward_core.wire.messages import Batch, Call, Outcome, OutcomeKind, Output, Parcel
from skyward_core.worker import slot as slots
from skyward_core.worker.runner_process import RunnerExit
from skyward_core.worker.slot import News, Slot
from tests.waiting import wait_until

RUNNER = """
import os, socket, sys, time
from skyward_core.worker.runner import RunnerChannels, run_calls
while os.path.exists(f"{sys.argv[6]}/closed"):
    time.sleep(0.001)
calls, outcomes, stdout, stderr = map(int, sys.argv[1:5])
run_calls(RunnerChannels(socket.socket(fileno=calls), socket.socket(fileno=outcomes), stdout, stderr, bytes.fromhex(sys.argv[5]), "", (sys.argv[6],), {}))
"""


class Runners:
    """Replaces the supervisor: starts runners, and reports how they ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.is_out_of_memory = False
        self._watching: list[threading.Thread] = []

    def fork(self, descriptors: list[int], mark: bytes) -> int:
        arguments = [*map(str, descriptors), mark.hex(), str(self._directory)]
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, *arguments], pass_fds=descriptors, start_new_session=True, env=environ
        )
        self.processes[process.pid] = process
        return process.pid

    def exit_of(self, pid: int, timeout_seconds: float = 10.0) -> RunnerExit | None:
        return RunnerExit(pid, self.processes[pid].wait(timeout_seconds), is_out_of_memory=self.is_out_of_memory)

    def watch(self, pid: int, on_exit: Callable[[], object]) -> None:
        """With a thread that waits for the end and leaves the status to `exit_of`."""

        def wait() -> None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            on_exit()

        self._watching.append(threading.Thread(target=wait))
        self._watching[-1].start()

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for thread in self._watching:
            thread.join()


@pytest.fixture
def runners(tmp_path: Path) -> Iterator[Runners]:
    runners = Runners(tmp_path)
    yield runners
    runners.close()


@pytest.fixture
def slot(runners: Runners, tmp_path: Path) -> Iterator[Slot]:
    # runners that start as programs take longer than the time after which a call's batch is handed back
    slot = Slot(runners, (str(tmp_path),), patience_seconds=600.0)  # type: ignore[arg-type]
    yield slot
    slot.close()


def batch_of(**texts: str) -> Batch:
    """Calls that run these texts, by their ids."""
    calls = tuple(Call(call_id, "exec", Parcel(pickle.dumps(((text,), {}))), "job") for call_id, text in texts.items())
    return Batch("topic", calls, {"exec": Parcel(pickle.dumps(exec))})


class Run:
    """A batch that runs in a slot, in a thread of its own."""

    def __init__(self, slot: Slot, batch: Batch) -> None:
        self.news: list[News] = []
        self._thread = threading.Thread(target=lambda: slot.run(batch, self.news.extend), daemon=True)
        self._thread.start()

    def endings(self, seconds: float = 120.0) -> dict[str, OutcomeKind]:
        """Wait for the end; return how each call ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"after {seconds} s there is only {self.news}"
        return {news.call_id: news.kind for news in self.news if isinstance(news, Outcome)}


def waits_for(path: Path, begun: Path | None = None) -> str:
    """Return the text of a call that waits for a file, after it has made another one."""
    begin = f"open({str(begun)!r}, 'w').close()" if begun else "pass"
    return f"{begin}\nimport os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.001)"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


# ── cancellations ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_call_stops_and_those_behind_it_run(slot: Slot, tmp_path: Path) -> None:
    """The runner ends with its call; the other calls get another runner."""
    started, never = tmp_path / "started", tmp_path / "never"
    pid = slot.pid
    run = Run(slot, batch_of(wanted=waits_for(never, started), neighbour="pass"))
    wait_until(started.exists, "the first call to begin")
    slot.cancel("wanted")
    assert run.endings() == {"wanted": OutcomeKind.CANCELLED, "neighbour": OutcomeKind.RESULT}
    assert slot.pid != pid


def test_a_call_that_did_not_use_the_memory_is_spared(
    runners: Runners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that used too much memory has ended when the slot checks again: the call that runs then is not at
    fault.
    """
    go, begun, end, started = (tmp_path / name for name in ("go", "begun", "end", "started"))
    slot = Slot(runners, (str(tmp_path),), memory_limit_bytes=1 << 30, patience_seconds=600.0)  # type: ignore[arg-type]
    pid = slot.pid
    looks = list[int]()

    def resident_bytes(_: int) -> int:
        if not started.exists():
            return 0
        looks.append(1)
        if len(looks) > 1:
            return 1 << 20
        go.touch()
        wait_until(begun.exists, "the next call to begin")
        return 2 << 30

    monkeypatch.setattr(slots, "resident_bytes", resident_bytes)
    run = Run(slot, batch_of(large=waits_for(go, started), neighbour=waits_for(end, begun)))
    wait_until(lambda: len(looks) > 1 or slot.pid != pid, "the slot to look again")
    end.touch()
    try:
        assert run.endings() == {"large": OutcomeKind.RESULT, "neighbour": OutcomeKind.RESULT}
        assert slot.pid == pid
    finally:
        slot.close()


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_call_that_ends_just_before_it_is_stopped_spares_the_next_one(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """When the slot takes the queue back, the first call has ended, its outcome is unread, and the next one runs.

    Looks inside: nothing else happens between the two.
    """
    started, go, begun, end = (tmp_path / name for name in ("started", "go", "begun", "end"))
    pid, really, clock = slot.pid, slots._BatchRun._take_back, MovedClock()
    monkeypatch.setattr(slots, "time", clock)

    def take_back(run: Any) -> Any:
        if not go.exists():
            go.touch()
            wait_until(begun.exists, "the next call to begin")
        return really(run)

    monkeypatch.setattr(slots._BatchRun, "_take_back", take_back)
    batch = batch_of(first=waits_for(go, started), next=waits_for(end, begun))
    run = Run(slot, limited(batch, "first", 300.0) if how == "deadline" else batch)
    wait_until(started.exists, "the first call to begin")
    clock.moved_seconds = 400.0 if how == "deadline" else 0.0
    slot.cancel("first" if how == "cancelled" else "unknown")
    wait_until(lambda: any(isinstance(news, Outcome) for news in run.news), "the outcome of the first call")
    end.touch()
    assert run.endings() == {"first": OutcomeKind.RESULT, "next": OutcomeKind.RESULT}
    assert slot.pid == pid


# ── calls taken back ─────────────────────────────────────────────────────────────────────────────────────────────────


class Contended:
    """The end of the queue from which a slot takes packets back; after the first packet the runner is faster."""

    def __init__(self, take: Any, meanwhile: Callable[[], object]) -> None:
        self._take = take
        self._meanwhile = [meanwhile]

    def recv(self, size: int, flags: int) -> bytes:
        packet = self._take.recv(size, flags)
        if self._meanwhile:
            self._meanwhile.pop()()
        return packet

    def close(self) -> None:
        self._take.close()


@pytest.mark.parametrize("secrets", [None, {"TOKEN": "abc"}])
def test_a_runner_returns_a_call_without_its_function(
    runners: Runners, tmp_path: Path, secrets: dict[str, str] | None
) -> None:
    """The function and the secrets come with the first call: the slot takes that call back, and meanwhile the runner
    takes the one behind it.
    """
    closed = tmp_path / "closed"
    closed.touch()
    slot: Any = Slot(runners, (str(tmp_path),), patience_seconds=600.0)  # type: ignore[arg-type]
    if secrets:
        slot.furnish(secrets)
    outcomes = slot.outcomes

    def let_the_runner_be_faster() -> None:
        closed.unlink()
        ready, _, _ = select.select([outcomes], [], [], 60.0)
        assert ready

    slot.take = Contended(slot.take, let_the_runner_be_faster)
    say = "import os; print(os.environ.get('TOKEN', 'none') == 'abc')"
    run = Run(slot, batch_of(first=say, second=say, third="pass", fourth=say))
    wait_until(lambda: len(slot.known) == 1, "the calls to be sent")
    slot.cancel("third")
    try:
        assert run.endings() == {
            "first": OutcomeKind.RESULT,
            "second": OutcomeKind.RESULT,
            "third": OutcomeKind.CANCELLED,
            "fourth": OutcomeKind.RESULT,
        }
        assert sum(isinstance(news, Outcome) for news in run.news) == 4
        lines = {news.call_id: news.lines for news in run.news if isinstance(news, Output)}
        assert lines == dict.fromkeys(("first", "second", "fourth"), (str(bool(secrets)),))
    finally:
        slot.close()


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


class MovedClock:
    """The clock of slots, which a test moves."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.moved_seconds = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.moved_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    return clock


def limited(batch: Batch, call_id: str, timeout_seconds: float) -> Batch:
    """Return the batch with a deadline for one call."""
    seconds = {call_id: timeout_seconds}
    return batch._replace(calls=tuple(call._replace(timeout_seconds=seconds.get(call.call_id)) for call in batch.calls))


def test_a_call_is_ended_at_its_deadline_and_those_behind_it_run(slot: Slot, tmp_path: Path, clock: MovedClock) -> None:
    """Its outcome has the time that it had, and its last lines; the others get another runner."""
    started, pid = tmp_path / "started", slot.pid
    batch = batch_of(late=f"print('begun')\n{waits_for(tmp_path / 'never', started)}", neighbour="pass")
    run = Run(slot, limited(batch, "late", 300.0))
    wait_until(started.exists, "the call to begin")
    clock.moved_seconds = 400.0
    slot.cancel("unknown")  # it looks again
    assert run.endings() == {"late": OutcomeKind.TIMED_OUT, "neighbour": OutcomeKind.RESULT}
    outcome = next(news for news in run.news if isinstance(news, Outcome) and news.call_id == "late")
    assert (outcome.text, outcome.output) == ("300.0", ("begun",))
    assert 400 < outcome.seconds < 500
    assert slot.pid != pid


@pytest.mark.parametrize("answer", ["1 / 0", "raise SystemExit", "returns"])
def test_a_call_that_handles_the_signal_of_its_deadline_is_late_all_the_same(
    slot: Slot, tmp_path: Path, clock: MovedClock, answer: str
) -> None:
    """What it returns or raises then is dropped, and its runner ends."""
    started, go, pid = tmp_path / "started", tmp_path / "go", slot.pid
    handler = f"open({str(go)!r}, 'w').close()" if answer == "returns" else f"exec({answer!r})"
    text = f"import signal; signal.signal(signal.SIGTERM, lambda *_: {handler})\n{waits_for(go, started)}"
    run = Run(slot, limited(batch_of(late=text, neighbour="pass"), "late", 300.0))
    wait_until(started.exists, "the call to begin")
    clock.moved_seconds = 400.0
    slot.cancel("unknown")
    assert run.endings() == {"late": OutcomeKind.TIMED_OUT, "neighbour": OutcomeKind.RESULT}
    assert slot.pid != pid


def test_the_time_of_a_call_begins_when_the_call_before_it_has_ended(
    slot: Slot, tmp_path: Path, clock: MovedClock
) -> None:
    """Both are in the runner's queue; the first takes longer than the second one may."""
    started, go, begun, end = (tmp_path / name for name in ("started", "go", "begun", "end"))
    batch = batch_of(first=waits_for(go, started), second=waits_for(end, begun))
    run = Run(slot, limited(batch, "second", 300.0))
    wait_until(started.exists, "the first call to begin")
    clock.moved_seconds = 400.0
    go.touch()
    wait_until(lambda: begun.exists() and run.news, "the second call to begin")
    end.touch()
    assert run.endings() == {"first": OutcomeKind.RESULT, "second": OutcomeKind.RESULT}


def test_a_slot_counts_the_time_of_each_client(slot: Slot, tmp_path: Path) -> None:
    """Ended calls and the one that runs; a call that dies counts too."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    assert slot.ran_by_topic == {}
    run = Run(slot, batch_of(first=waits_for(go, begun)))
    wait_until(begun.exists, "the call to begin")
    running = slot.ran_by_topic["topic"]
    assert running > 0
    go.touch()
    run.endings()
    ended = slot.ran_by_topic["topic"]
    assert ended >= sum(news.seconds for news in run.news if isinstance(news, Outcome)) > 0
    Run(slot, batch_of(second="import os; os._exit(3)")._replace(topic="other")).endings()
    assert slot.ran_by_topic["topic"] == ended
    assert slot.ran_by_topic["other"] > 0
    assert sum(slot.ran_by_topic.values()) == pytest.approx(slot.ran_seconds)
