"""The reaper ends the pool when the driver has ended in any way, and in no other case."""

import contextlib
import errno
import fcntl
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_state_path
from pydantic import PrivateAttr

from skyward_core.cleanup import reaper as reaper_module
from skyward_core.cleanup.reaper import Reaper, ReaperInput
from skyward_core.errors import NotPicklable
from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import Owner
from skyward_core.serialization.pickling import dumps
from tests.cleanup.reaping_provider import SECRET, FolderProvider, LockingProvider, Pool, in_an_hour
from tests.conftest import wait_until

ROOT = Path(__file__).parents[3]

type Start = Callable[[ReaperInput], Reaper]

DRIVER = """
import os, signal, sys
from skyward_core.cleanup.reaper import ReaperInput, Reaper
from tests.cleanup.reaping_provider import Pool

pool = Pool.at(sys.argv[1])
pool.open()
pool.launch()
reaper = Reaper.start(pool.reaper_input())
{more}
print(reaper.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    pool = Pool(tmp_path)
    pool.open()
    pool.launch()
    return pool


@pytest.fixture
def start() -> Iterator[Start]:
    """Start reapers that are released when the test has ended."""
    with contextlib.ExitStack() as undo:

        def started(reaper_input: ReaperInput) -> Reaper:
            reaper = Reaper.start(reaper_input)
            undo.callback(reaper.leave)
            return reaper

        yield started


@pytest.fixture(autouse=True)
def no_reaper_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give each test its own log, and check that no reaper outlives the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    log = str(tmp_path / "state")
    with contextlib.suppress(AssertionError):
        _wait_for_no(log)
        return
    left = _reapers(log)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    pytest.fail(f"reapers {left} outlive the test")


def _wait_for_no(state: str) -> None:
    deadline = time.monotonic() + 30
    while _reapers(state):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _reapers(state: str) -> list[int]:
    """Return the reapers whose environment names this folder."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if (
                b"reaper_process" in Path(f"/proc/{entry}/cmdline").read_bytes()
                and state.encode() in Path(f"/proc/{entry}/environ").read_bytes()
            ):
                found.append(int(entry))
    return found


@contextlib.contextmanager
def driving(folder: Path, more: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a driver of a pool in this folder, as leader of a session; yield it and the pid of its reaper."""
    command = [sys.executable, "-c", DRIVER.format(more=more), str(folder)]
    driver = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    try:
        yield driver, int(driver.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        driver.stdout.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in "ZX"
    except OSError:
        return True


def log_text() -> str:
    path = user_state_path("skyward") / "reaper.log"
    return path.read_text() if path.exists() else ""


def test_the_reaper_does_nothing_for_an_ended_pool(tmp_path: Path) -> None:
    with driving(tmp_path) as (driver, reaper):
        pool = Pool(tmp_path)
        with Ledger(pool.url) as ledger:
            ledger.end_pool(pool.pool_id)
        driver.kill()
        wait_until(lambda: is_gone(reaper), "the reaper to go")
    assert len(pool.living()) == 2
    assert "its process is gone, and the pool has ended: nothing to do" in log_text()


def test_a_pool_that_lives_by_its_lease_stays(tmp_path: Path) -> None:
    with driving(tmp_path) as (driver, reaper):
        pool = Pool(tmp_path)
        with Ledger(pool.url) as ledger:
            ledger.live_by_lease(pool.pool_id, in_an_hour())
        driver.kill()
        wait_until(lambda: is_gone(reaper), "the reaper to go")
    assert len(pool.living()) == 2
    assert pool.entry().ended_at is None


def test_an_incomplete_input_ends_no_machine(pool: Pool) -> None:
    body = pickle.dumps(tuple(getattr(pool.reaper_input(), name) for name in ReaperInput.__slots__))
    for part in (b"", len(body).to_bytes(8, "big")[:5], len(body).to_bytes(8, "big") + body[:-1]):
        command = [sys.executable, "-I", "-S", str(reaper_module.SCRIPT), pool.pool_id, str(os.getpid())]
        assert subprocess.run(command, input=part, capture_output=True, check=True).stderr == b""
    assert len(pool.living()) == 2


def test_the_machines_end_while_the_driver_lives(pool: Pool, start: Start) -> None:
    reaper = start(pool.reaper_input())
    took = []
    for time_asked in (1, 2):
        began = time.perf_counter()
        reaper.terminate_now()
        took.append(time.perf_counter() - began)
        wait_until(lambda asked=time_asked: log_text().count("its machines are gone") == asked, "the machines to end")
        assert pool.is_ended()
        assert reaper.is_alive
        pool.launch(1)
    assert min(took) < 0.05
    assert log_text().count("ending its machines") == 2
    assert len(pool.living()) == 1


def test_a_machine_that_comes_late_ends_with_the_driver(tmp_path: Path) -> None:
    with driving(tmp_path, more="reaper.terminate_now()") as (driver, reaper):
        pool = Pool(tmp_path)
        wait_until(lambda: "its machines are gone" in log_text(), "the machines to end")
        pool.launch(1)
        driver.kill()
        wait_until(lambda: is_gone(reaper), "the reaper to go")
    assert pool.living() == []


def test_a_signal_handler_may_request_the_end(tmp_path: Path) -> None:
    more = "signal.signal(signal.SIGTERM, lambda *_: (reaper.terminate_now(), os.kill(os.getpid(), signal.SIGKILL)))"
    with driving(tmp_path, more=more) as (driver, _):
        driver.terminate()
        wait_until(Pool(tmp_path).is_ended, "the machines to end")


def test_a_request_never_blocks_and_never_raises(pool: Pool, start: Start) -> None:
    reaper = start(pool.reaper_input(providers=b""))
    os.kill(reaper.pid, signal.SIGSTOP)
    began = time.perf_counter()
    for _ in range(10_000):  # more than a pipe holds
        reaper.terminate_now()
    assert time.perf_counter() - began < 5
    os.kill(reaper.pid, signal.SIGKILL)
    wait_until(lambda: not reaper.is_alive, "the reaper to be gone")
    reaper.terminate_now()
    reaper.leave()
    with open(pool.folder / "stranger", "w+b", buffering=0) as stranger:
        reaper.terminate_now()
        reaper.leave()
        assert stranger.read() == b""


def test_a_released_reaper_changes_nothing(pool: Pool, start: Start) -> None:
    reaper = start(pool.reaper_input())
    assert reaper.is_alive
    reaper.leave()
    reaper.leave()
    assert not Path(f"/proc/{reaper.pid}").exists()
    assert not reaper.is_alive
    assert (len(pool.living()), pool.entry().ended_at, log_text()) == (2, None, "")


def test_a_reaper_can_be_released_during_its_work(pool: Pool, start: Start) -> None:
    """The driver has ended the pool itself meanwhile. The reaper, which retries because the provider is down, stops."""
    (pool.folder / "is-down").touch()
    reaper = start(pool.reaper_input())
    reaper.terminate_now()
    wait_until(lambda: "ending its machines" in log_text(), "the reaper to begin")
    reaper.leave()
    assert is_gone(reaper.pid)
    (pool.folder / "is-down").unlink()
    assert len(pool.living()) == 2


def test_a_stopped_reaper_is_released_too(pool: Pool, start: Start) -> None:
    reaper = start(pool.reaper_input())
    os.kill(reaper.pid, signal.SIGSTOP)
    reaper.leave(timeout_seconds=0.05)
    assert not Path(f"/proc/{reaper.pid}").exists()
    assert len(pool.living()) == 2


def _unheard(reaper: Reaper) -> int:
    """Return how many bytes the pipe holds."""
    return int.from_bytes(fcntl.ioctl(reaper._pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_machines_end_while_the_ledger_is_locked(pool: Pool, start: Start) -> None:
    locker = sqlite3.connect(pool.folder / "ledger.db", isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")
    try:
        start(pool.reaper_input()).terminate_now()
        wait_until(lambda: not pool.living(), "the machines to end", seconds=60)
        locker.execute("ROLLBACK")
        wait_until(lambda: pool.entry().ended_at is not None, "the entries to be closed", seconds=60)
    finally:
        locker.close()


def test_a_ledger_and_a_provider_are_found_relative_to_the_drivers_directory(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.chdir(pool.folder)
    reaper = start(ReaperInput.of([FolderProvider(folder=".")], pool.pool_id, "sqlite:///ledger.db"))
    assert os.readlink(f"/proc/{reaper.pid}/cwd") == "/"
    reaper.terminate_now()
    wait_until(pool.is_ended, "the machines to end")


STAND_IN = """
import sys, time
sys.path.insert(0, {root!r})
from skyward_core.cleanup import reaper_process as reaping

calls = []

def end_pool(ledger, provider, pool_id, *, why):
    calls.append(why)
    number = len(calls)
    with open({folder!r} + "/calls", "a") as file:
        file.write(f"{{pool_id}} {{type(provider).__name__}} {{ledger is not None}} {{why}}\\n")
    {body}
    provider.terminate([instance.id for instance in provider.instances(pool_id)])
    if ledger is not None and {closes}:
        ledger.end_pool(pool_id)

now = [0.0]

def pause(seconds):
    now[0] += seconds
    with open({folder!r} + "/pauses", "a") as file:
        file.write(f"{{seconds}}\\n")

import os
os._exit(reaping.main(lambda reaper_input: reaping.PoolTeardown(reaper_input, end_pool, try_seconds={try_seconds}, clock=lambda: now[0], pause=pause)))
"""


@dataclass
class StandIn:
    """A reaper whose teardown is `body`, and its results."""

    pool: Pool

    def run(
        self,
        body: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        closes: bool = True,
        try_seconds: float = 60,
        reaper_input: ReaperInput | None = None,
    ) -> int:
        """Start it, and end as its driver (the pipe ends without a message); return its exit status."""
        script = self.pool.folder / "reaper_process_stand_in.py"
        script.write_text(
            STAND_IN.format(
                root=str(ROOT), folder=str(self.pool.folder), body=body, closes=closes, try_seconds=try_seconds
            )
        )
        monkeypatch.setattr(reaper_module, "SCRIPT", script)
        reaper = Reaper.start(reaper_input or self.pool.reaper_input())
        monkeypatch.setattr(reaper, "_send_command", lambda line: None)
        process = reaper._process
        assert process is not None
        reaper.leave(timeout_seconds=100)
        assert process.returncode is not None
        return process.returncode

    def lines(self, name: str) -> list[str]:
        file = self.pool.folder / name
        return file.read_text().splitlines() if file.exists() else []


def test_a_failed_teardown_is_tried_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(pool)
    assert (
        stand_in.run(
            "if number <= 3: raise [ConnectionError, KeyError, RuntimeError][number - 1]('no. %d\\nmore' % number)",
            monkeypatch,
        )
        == 0
    )
    assert stand_in.lines("calls") == [f"{pool.pool_id} FolderProvider True its process is gone"] * 4
    assert stand_in.lines("pauses") == ["1.0", "2.0", "4.0"]
    messages = [line.split(" ", 2)[2] for line in log_text().splitlines()]
    assert "ConnectionError: no. 1" in messages
    assert "more" not in messages
    assert pool.is_ended()


def test_a_provider_call_that_hangs_is_abandoned(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert StandIn(pool).run("if number == 1: time.sleep(3600)", monkeypatch, try_seconds=1) == 0
    assert pool.is_ended()
    assert "TimeoutError: no answer within 1 s" in log_text()


def test_open_entries_without_machines_are_tried_for_two_minutes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(pool)
    assert stand_in.run("pass", monkeypatch, closes=False) == 1
    assert 120 < sum(float(line) for line in stand_in.lines("pauses")) < 160
    assert pool.living() == []


def test_an_error_of_the_ledger_is_retried_for_two_minutes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(pool)
    assert (
        stand_in.run("from skyward_core.errors import LedgerError; raise LedgerError('the disk is full')", monkeypatch)
        == 1
    )
    assert sum(float(line) for line in stand_in.lines("pauses")) < 160
    assert "this could not be recorded: the disk is full" in log_text()


def test_a_provider_that_cannot_be_rebuilt_comes_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(tmp_path)
    with Ledger(pool.url) as ledger:
        ledger.open_pool(
            pool.pool_id, owner=Owner.here(), provider={"name": "local"}, spec_json="{}", lease_expires_at=in_an_hour()
        )
    stand_in = StandIn(pool)
    assert stand_in.run("pass", monkeypatch, reaper_input=pool.reaper_input(providers=b"nonsense")) == 0
    assert stand_in.lines("calls") == [f"{pool.pool_id} Local True its process is gone"]


def test_no_secret_is_visible(pool: Pool, start: Start) -> None:
    reaper_input = ReaperInput.of(
        [pool.provider], pool.pool_id, f"postgresql+psycopg://ada:{SECRET}@127.0.0.1:1/ledger"
    )
    assert SECRET.encode() in reaper_input.providers
    assert SECRET not in repr(reaper_input)
    reaper = start(reaper_input)
    reaper.terminate_now()
    wait_until(lambda: not pool.living(), "the machines to end")
    seen = Path(f"/proc/{reaper.pid}/cmdline").read_text() + Path(f"/proc/{reaper.pid}/environ").read_text()
    wait_until(lambda: "the ledger cannot be used" in log_text(), "the log to tell it")
    reaper.leave()
    assert SECRET not in seen + log_text()


def test_a_reaper_is_not_a_process_of_a_node(pool: Pool, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setenv("SKYWARD_INSTANCE_ID", "local-0123456789ab")
    monkeypatch.setenv("SKYWARD_POOL_ID", "outer")
    monkeypatch.setenv("A_CREDENTIAL", "of the environment")
    reaper = start(pool.reaper_input())
    place = Path(f"/proc/{reaper.pid}/environ")
    wait_until(place.read_text, "the process to have begun")
    environ = place.read_text().split("\0")
    reaper.leave()
    assert "A_CREDENTIAL=of the environment" in environ
    assert [item for item in environ if item.startswith(("SKYWARD_INSTANCE", "SKYWARD_POOL"))] == []


class Live(FolderProvider):
    """Holds an object that no other process can have."""

    _lock: Any = PrivateAttr(default_factory=threading.Lock)


def test_a_provider_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotPicklable):
        ReaperInput.of([Live(folder=str(tmp_path))], "p", "sqlite://")


def test_a_provider_that_cannot_be_pickled_by_value_is_pickled_by_name(pool: Pool, start: Start) -> None:
    with pytest.raises(NotPicklable):
        dumps(LockingProvider(folder=str(pool.folder)))
    start(ReaperInput.of([LockingProvider(folder=str(pool.folder))], pool.pool_id, pool.url)).terminate_now()
    wait_until(pool.is_ended, "the machines to end")


@pytest.mark.parametrize("how", ["no such program", "no process", "no descriptor"])
def test_a_reaper_that_cannot_be_started_is_not_alive(
    pool: Pool, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: Start
) -> None:

    def none_left(flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    if how == "no descriptor":
        monkeypatch.setattr(os, "pipe2", none_left)
    else:
        monkeypatch.setattr(sys, "executable", "/nonexistent" if how == "no such program" else "")
    reaper = start(pool.reaper_input())
    assert (reaper.is_alive, reaper.pid) == (False, 0)
    reaper.terminate_now()
    reaper.live_by_lease()
    reaper.hang_up()
    reaper.leave()
    assert "could not be started" in caplog.text


def test_a_reaper_that_dies_at_once_is_not_alive(pool: Pool, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    reaper = start(pool.reaper_input(providers=b"x" * 1_000_000))
    assert not reaper.is_alive
    reaper.leave()


def test_a_reaper_that_does_not_read_its_input_is_killed(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    """It would be alive for the pool, and could end nothing."""
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 600\n")
    deaf.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(deaf))
    monkeypatch.setattr(reaper_module, "SEND_SECONDS", 0.05)
    reaper = start(pool.reaper_input(providers=b"x" * 1_000_000))
    assert not reaper.is_alive
    assert not Path(f"/proc/{reaper.pid}").exists()


def test_a_large_log_is_rotated(pool: Pool, start: Start) -> None:
    directory = user_state_path("skyward")
    directory.mkdir(parents=True)
    (directory / "reaper.log").write_text("old\n" * 300_000)
    start(pool.reaper_input()).leave()
    assert log_text() == ""
    assert (directory / "reaper.log.old").stat().st_size == 1_200_000
    assert (directory / "reaper.log").stat().st_mode & 0o777 == 0o600


def test_a_reaper_needs_no_log(pool: Pool, start: Start) -> None:
    user_state_path("skyward").parent.mkdir(parents=True)
    user_state_path("skyward").write_text("a file, where a directory should be")
    reaper = start(pool.reaper_input())
    reaper.terminate_now()
    wait_until(pool.is_ended, "the machines to end")


def test_a_waiting_reaper_has_not_imported_skyward_core() -> None:
    text = (
        f"import sys; exec(open({str(reaper_module.SCRIPT)!r}).read(), {{'__name__': 'waiting'}}); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, text=True, check=True)
    assert {"skyward_core", "pickle", "typing", "dataclasses", "logging", "re", "site"}.isdisjoint(run.stdout.split())
