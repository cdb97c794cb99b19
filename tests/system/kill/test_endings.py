"""However a program ends, no machine stays alive, and the output says what happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward_core.ledger.ledger import Ledger
from tests.conftest import processes_by_tag
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[3]
INTERRUPTED = -signal.SIGINT
COMES = "the program to come to its point"

CALLS = """
with pool() as p:
    long_call(str(HOME)) >> p
"""

pytestmark = [pytest.mark.timeout(300)]


class Program:
    """A script in its own process and session, with its own ledger, reaper's log and provider.

    Its nodes are processes of this machine, and its bill is a folder of files that outlives them (`billed.py`): a
    machine lives as long as either exists.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.bill, self.ledger_file = home, home / "billed", home / "ledger.db"
        self.ledger_url = f"sqlite:///{self.ledger_file}"
        self._state = home / "state"
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._stdout, self._stderr = list[str](), list[str]()
        self.bill.mkdir()

    def start(self, text: str) -> Program:
        """Run the script; `ending_scripts.py` has the names that it can use."""
        script = self.home / "program.py"
        script.write_text(f"from tests.kill.ending_scripts import *\n{text}")
        environ = os.environ | {
            "ENDINGS_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "SKYWARD_LEDGER": self.ledger_url,
            "XDG_STATE_HOME": str(self._state),
        }
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)  # a full disk must not stop the output
        command = [sys.executable, str(script)]
        self._process = subprocess.Popen(
            command, cwd=self.home, env=environ, text=True, start_new_session=True, **pipes
        )
        for stream, lines in ((self._process.stdout, self._stdout), (self._process.stderr, self._stderr)):
            assert stream is not None
            self._readers.append(threading.Thread(target=lines.extend, args=(iter(stream.readline, ""),), daemon=True))
            self._readers[-1].start()
        return self

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return "".join(self._stdout)

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    @property
    def reaper_log(self) -> str:
        """The reaper's log; "" if the reaper had nothing to do."""
        log = self._state / "skyward" / "reaper.log"
        return log.read_text() if log.exists() else ""

    def has_said(self, word: str) -> bool:
        return word in self.stdout

    def is_running_a_call(self) -> bool:
        return (self.home / "running").exists()

    def has_met(self, fault: str) -> bool:
        return (self.bill / f"{fault}.met").exists()

    def lay(self, *faults: str) -> Program:
        for fault in faults:
            (self.bill / fault).touch()
        return self

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def status(self, seconds: float = WAIT_SECONDS) -> int:
        """Wait until the program has ended; return its exit status."""
        self.wait_for(lambda: self.process.poll() is not None, "the program to end", seconds)
        for reader in self._readers:
            reader.join()
        return self.process.returncode

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until the condition holds, else fail with all output; also if the program ends before its point."""
        deadline = time.monotonic() + seconds
        while not condition():
            is_over = what == COMES and self.process.poll() is not None
            if is_over or time.monotonic() > deadline:
                said = f"{self.stdout}\n{self.stderr}\n{self.reaper_log}\nliving: {self.living()}"
                pytest.fail(f"waited {seconds} s for {what}\n{said}")
            time.sleep(0.01)

    def come_to(self, condition: Callable[[], object]) -> Program:
        """Wait until the program has reached the point that the test needs."""
        self.wait_for(condition, COMES)
        return self

    def _pids(self) -> set[int]:
        return {pid for pid, home in processes_by_tag("XDG_STATE_HOME") if home == str(self._state)}

    def living(self) -> list[str]:
        """The machines on the bill, and the processes that live: nodes, reapers, the program itself."""
        billed = sorted(file.name for file in self.bill.glob("local-*"))
        return billed + [f"process {pid}" for pid in sorted(self._pids())]

    def nodes(self) -> set[int]:
        return self._pids() & {pid for pid, _ in processes_by_tag("SKYWARD_INSTANCE_ID")}

    def leaves_nothing(self) -> None:
        """Wait until no machine, process or reaper is left; the ledger then has nothing open."""
        self.wait_for(lambda: not self.living(), "everything to be gone")
        with Ledger(self.ledger_url) as ledger:
            assert ledger.pools() == []
            assert ledger.open_intents() == []

    def machines(self) -> list[str]:
        """Return the ids of all machines that the ledger has ever recorded."""
        with Ledger(self.ledger_url) as ledger:
            return [intent.cloud_id for intent in ledger.intents() if intent.cloud_id is not None]

    def is_clean(self) -> bool:
        """Return whether the machines have left no folder after their termination."""
        return not any((self._state / "skyward" / "nodes" / machine).exists() for machine in self.machines())

    def close(self) -> None:
        if self._process is not None:
            for file in self.bill.iterdir():
                file.unlink(missing_ok=True)  # a living reaper finds nothing to do
            for pid in self._pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            for reader in self._readers:
                reader.join()
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    with contextlib.closing(made):
        yield made


def reaped(program: Program) -> None:
    """The program has ended without a teardown; its reaper has done it and logged each step in order."""
    program.leaves_nothing()
    log = program.reaper_log
    assert "its process is gone: ending its machines" in log
    assert log.splitlines()[-1].endswith("its machines are gone")
    assert program.is_clean()


def tidied(program: Program) -> None:
    """The program has done the teardown before it ended: the reaper had nothing to do."""
    assert not list(program.bill.glob("local-*"))
    program.leaves_nothing()
    assert program.reaper_log == ""
    assert program.is_clean()


@pytest.mark.parametrize(
    "sig", [signal.SIGKILL, *(pytest.param(sig, marks=pytest.mark.nightly) for sig in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_signal_without_a_handler(program: Program, sig: signal.Signals) -> None:
    program.start(CALLS).come_to(program.is_running_a_call)
    assert len(list(program.bill.glob("local-*"))) == 1
    os.kill(program.pid, sig)
    assert program.status() == -sig
    reaped(program)


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        pytest.param(CALLS, INTERRUPTED, "KeyboardInterrupt", id="Ctrl-C"),
        pytest.param(
            f"signal.signal(signal.SIGINT, lambda *_: sys.exit(143)){CALLS}",
            143,
            "",
            id="a handler that exits",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_interrupt(program: Program, text: str, status: int, words: str) -> None:
    program.start(text).come_to(program.is_running_a_call)
    os.kill(program.pid, signal.SIGINT)
    assert program.status() == status
    tidied(program)
    assert words in program.stderr
