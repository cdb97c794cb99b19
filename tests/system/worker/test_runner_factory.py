"""Runners that start late or die, and processes that outlive them."""

import os
import pickle
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward_core.errors import NodeLost
from skyward_core.serialization import exceptions
from skyward_core.wire.messages import Outcome, OutcomeKind, Parcel
from skyward_core.worker.runner_process import Forked, RunnerExit, RunnerFactory
from skyward_core.worker.slot import News, Slot
from tests.system.worker.test_slot import Run, Runners, batch_of, runners, slot  # noqa: F401 - fixtures
from tests.waiting import wait_until


def request(supervisor: socket.socket) -> int:
    """Take a request for a runner; return its number."""
    message, ancillary, _, _ = supervisor.recvmsg(4096, socket.CMSG_SPACE(64))
    for descriptor in memoryview(bytearray(ancillary[0][2])).cast("i"):
        os.close(descriptor)
    return int.from_bytes(message[:8])


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_runner_that_starts_late_is_ended_and_not_given_to_the_next_request(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Otherwise each later request would get the process of the one before."""
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, supervisor, (tmp_path / "file").open("w") as file:
        factory = RunnerFactory(ours)
        with pytest.raises(ConnectionError, match="did not start a process"):
            factory.fork([file.fileno()] * 4, b"mark", timeout_seconds=0.05)
        first = request(supervisor)
        supervisor.send(pickle.dumps(Forked(first, sleeper.pid)))

        def answer() -> None:
            supervisor.send(pickle.dumps(Forked(request(supervisor), 4321)))

        answering = threading.Thread(target=answer)
        answering.start()
        assert factory.fork([file.fileno()] * 4, b"mark") == 4321
        answering.join()
        assert sleeper.wait(10) == -signal.SIGKILL
        supervisor.send(pickle.dumps(RunnerExit(sleeper.pid, -9)))
        supervisor.send(pickle.dumps(RunnerExit(4321, 5)))
        assert factory.exit_of(4321) == RunnerExit(4321, 5)
        assert factory.exit_of(sleeper.pid, 0.0) is None  # no caller waits for it: it is not kept
        supervisor.close()


def test_a_runner_that_starts_late_takes_no_call(runners: Runners, tmp_path: Path) -> None:
    """Each runner has its own queue: a runner that its slot has abandoned finds the queue closed, and ends, whatever
    the slot does then.

    The crash before it is reported. No late message that stops its client stops the client's next batch.
    """
    late = list[int]()
    really = runners.fork

    def too_late(descriptors: list[int], mark: bytes) -> int:
        late.append(really(descriptors, mark))
        raise ConnectionError("too late")

    slot = Slot(runners, (str(tmp_path),), patience_seconds=600.0)  # type: ignore[arg-type]
    try:
        assert Run(slot, batch_of(first="pass")).endings() == {"first": OutcomeKind.RESULT}
        runners.fork = too_late  # type: ignore[method-assign]
        descriptors = len(os.listdir("/proc/self/fd"))
        news = list[News]()
        batch = batch_of(crash="import os; os._exit(3)", second="pass")._replace(topic="skyward-client")
        with pytest.raises(ConnectionError):
            slot.run(batch, news.extend)
        endings = [(item.call_id, item.kind, item.exit_code) for item in news if isinstance(item, Outcome)]
        assert endings == [("crash", OutcomeKind.CRASH, 3)]
        assert runners.exit_of(late[0]) == RunnerExit(late[0], 0)
        runners.fork = really  # type: ignore[method-assign]
        slot.cancel("skyward-client")
        third = batch_of(third="pass")._replace(topic="skyward-client")
        assert Run(slot, third).endings() == {"third": OutcomeKind.RESULT}
        # other tests of this process may have a thread that opens one for a moment; one that is lost here stays
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "the end of the channels")
    finally:
        slot.close()


def test_the_exit_of_an_earlier_process_does_not_count_for_a_runner_with_the_same_pid(tmp_path: Path) -> None:
    """The kernel reuses pids. An exit that was reported too late belongs to the earlier process."""
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, supervisor, (tmp_path / "file").open("w") as file:
        factory = RunnerFactory(ours)
        supervisor.send(pickle.dumps(RunnerExit(4321, -9, is_out_of_memory=True)))

        def answer() -> None:
            supervisor.send(pickle.dumps(Forked(request(supervisor), 4321)))

        answering = threading.Thread(target=answer)
        answering.start()
        assert factory.fork([file.fileno()] * 4, b"mark") == 4321
        answering.join()
        assert factory.exit_of(4321, 0.0) is None
        supervisor.close()


@pytest.mark.parametrize("ending", ["pass", "import sys; sys.exit(3)", "raise ValueError"])
def test_a_forked_child_that_leaves_the_call_takes_no_other_calls(slot: Slot, tmp_path: Path, ending: str) -> None:
    """A program that forks and forgets os._exit.

    The child would answer too, and would take calls: each call would get the answer of another one.
    """
    pids = tmp_path / "pids"
    text = f"import os; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')"
    forks = f"import os\nif os.fork() == 0:\n    {ending}\nelse:\n    os.wait()"
    calls = {"forks": forks, **{f"other{number}": text for number in range(20)}}
    run = Run(slot, batch_of(**calls))
    assert run.endings() == dict.fromkeys(calls, OutcomeKind.RESULT)
    assert [news.call_id for news in run.news if isinstance(news, Outcome)] == list(calls)
    assert set(pids.read_text().split()) == {str(slot.pid)}


def test_a_runner_that_dies_is_noticed_though_a_process_holds_its_sockets(slot: Slot, tmp_path: Path) -> None:
    """A process that a call has forked, and that outlives the call: the sockets do not end with the runner."""
    child = tmp_path / "child"
    # the call ends when the child has its own session: one in the runner's group would be killed with the runner
    leaves = (
        "import os, pathlib, signal, time\n"
        f"child = pathlib.Path({str(child)!r})\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); child.write_text(str(os.getpid())); signal.pause()\n"
        "while not (child.exists() and child.read_text()): time.sleep(0.001)"
    )
    try:
        run = Run(slot, batch_of(leaves=leaves, dies="import os; os.abort()", next="pass"))
        assert run.endings() == {"leaves": OutcomeKind.RESULT, "dies": OutcomeKind.CRASH, "next": OutcomeKind.RESULT}
        pid = slot.pid
        os.kill(pid, signal.SIGKILL)  # between two batches
        wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), "the runner to die")
        run = Run(slot, batch_of(later="pass"))
        assert (run.endings(), slot.pid != pid) == ({"later": OutcomeKind.RESULT}, True)
    finally:
        wait_until(lambda: child.exists() and child.read_text(), "the child to start")
        os.kill(int(child.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("lost", ["arguments", "function"])
def test_large_values_of_a_lost_machine_are_reported_as_lost(slot: Slot, tmp_path: Path, lost: str) -> None:
    """A batch was sent when the machine that has its large values in memory died: the call does not begin."""
    batch = batch_of(call="pass")
    gone = Parcel(b"", (), str(tmp_path / "gone"), ((0, 10),))
    if lost == "arguments":
        batch = batch._replace(calls=(batch.calls[0]._replace(arguments=gone),))
    else:
        batch = batch._replace(functions={"exec": gone})
    run = Run(slot, batch)
    assert run.endings() == {"call": OutcomeKind.ERROR}
    (outcome,) = (news for news in run.news if isinstance(news, Outcome))
    error = exceptions.unpack(*outcome.parcel.contents(), 0, outcome.text)
    assert isinstance(error, NodeLost)
    assert "submit it again" in str(error)
