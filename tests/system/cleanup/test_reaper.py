"""The reaper ends the pool when the driver has ended in any way, and in no other case."""

import contextlib
import errno
import fcntl
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import termios
import threading
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
from tests.ledger.fixtures import open_pool
from tests.waiting import wait_until

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
    state = str(tmp_path / "state")
    monkeypatch.setenv("XDG_STATE_HOME", state)
    yield
    try:
        wait_until(lambda: not _reapers(state), "the reapers to go")
    finally:
        for pid in _reapers(state):
            os.kill(pid, signal.SIGKILL)


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


ENDS = """
import sys, time
sys.path.insert(0, {root!r})
from skyward_core.cleanup import reaper_process as reaping

calls, now = [], [0.0]

def end_pool(ledger, provider, pool_id, *, why):
    calls.append(why)
    number = len(calls)
    print("call", pool_id, type(provider).__name__, ledger is not None, why, flush=True)
    {body}
    provider.terminate([instance.id for instance in provider.instances(pool_id)])
    if ledger is not None and {closes}:
        ledger.end_pool(pool_id)

def pause(seconds):
    now[0] += seconds
    print("pause", seconds, flush=True)

import os
os._exit(reaping.main(lambda reaper_input: reaping.PoolTeardown(reaper_input, end_pool, try_seconds={seconds}, clock=lambda: now[0], pause=pause)))
"""


def framed(reaper_input: ReaperInput) -> bytes:
    body = pickle.dumps(tuple(getattr(reaper_input, name) for name in ReaperInput.__slots__))
    return len(body).to_bytes(8, "big") + body


@dataclass
class Ended:
    """What a reaper has done whose driver has ended and whose teardown is `body`, and what it has logged."""

    status: int
    calls: list[str]
    pauses: list[float]
    log: list[str]

    @classmethod
    def by(cls, body: str, reaper_input: ReaperInput, *, closes: bool = True, seconds: float = 60) -> "Ended":
        text = ENDS.format(root=str(ROOT), body=body, closes=closes, seconds=seconds)
        command = [sys.executable, "-c", text, "sky-p", str(os.getpid())]
        done = subprocess.run(command, input=framed(reaper_input), capture_output=True, check=False, timeout=110)
        said = [line.split(" ", 1) for line in done.stdout.decode().splitlines()]
        pauses = [float(rest) for what, rest in said if what == "pause"]
        log = [line.split(" ", 2)[-1] for line in done.stderr.decode().splitlines()]
        return cls(done.returncode, [rest for what, rest in said if what == "call"], pauses, log)


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["the process", "its whole group"])
def test_the_machines_of_a_killed_driver_end(tmp_path: Path, kill: Callable[[int, int], None]) -> None:
    """No machine, no open entry and no reaper is left, and the log has a line about it."""
    with driving(tmp_path) as (driver, reaper):
        pool = Pool(tmp_path)
        assert len(pool.living()) == 2
        kill(driver.pid, signal.SIGKILL)
        wait_until(pool.is_ended, "the machines to end")
        wait_until(lambda: is_gone(reaper), "the reaper to go")
    assert [line.split(" ", 2)[1:] for line in log_text().splitlines() if "machines" in line] == [
        [pool.pool_id, "its process is gone: ending its machines"],
        [pool.pool_id, "its machines are gone"],
    ]


@pytest.mark.parametrize("why", ["it has ended", "it lives by its lease", "it lives by its lease, and has no ledger"])
def test_the_reaper_leaves_a_pool_that_has_ended_or_outlives_its_driver(tmp_path: Path, why: str) -> None:
    """Detached, or with detached calls: the ledger says so, or the driver has said it to the reaper."""
    with driving(tmp_path, more="reaper.live_by_lease()" if "ledger" in why else "") as (driver, reaper):
        pool = Pool(tmp_path)
        with Ledger(pool.url) as ledger:
            if why == "it has ended":
                ledger.end_pool(pool.pool_id)
            elif "ledger" not in why:
                ledger.live_by_lease(pool.pool_id, in_an_hour())
        if "ledger" in why:
            (tmp_path / "ledger.db").write_bytes(b"no database " * 100)
        driver.kill()
        wait_until(lambda: is_gone(reaper), "the reaper to go")
    assert len(pool.living()) == 2
    reason = "the pool has ended" if why == "it has ended" else "the pool lives on by its lease"
    assert f"its process is gone, and {reason}: nothing to do" in log_text()


def test_an_incomplete_input_ends_no_machine(pool: Pool) -> None:
    """A driver that was killed while it wrote the input has requested nothing yet: the reaper exits without a message."""
    whole = framed(pool.reaper_input())
    for part in (b"", whole[:5], whole[:-1]):
        command = [sys.executable, "-I", "-S", str(reaper_module.SCRIPT), pool.pool_id, str(os.getpid())]
        assert subprocess.run(command, input=part, capture_output=True, check=True).stderr == b""
    assert len(pool.living()) == 2


def test_the_machines_end_while_the_driver_lives(pool: Pool, start: Start) -> None:
    """The reaper stays until its release, and repeats the teardown on each request."""
    reaper = start(pool.reaper_input())
    for time_asked in (1, 2):
        reaper.terminate_now()
        wait_until(lambda asked=time_asked: log_text().count("its machines are gone") == asked, "the machines to end")
        assert pool.is_ended()
        assert reaper.is_alive
        pool.launch(1)
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


def test_a_released_reaper_changes_nothing(pool: Pool, start: Start) -> None:
    """It has exited and is reaped when `leave` returns, also if it is at work: the driver has ended the pool itself
    meanwhile, while the provider was down. A process under SIGSTOP does not react, and is killed.
    """
    reaper = start(pool.reaper_input())
    assert reaper.is_alive
    reaper.leave()
    reaper.leave()
    assert not Path(f"/proc/{reaper.pid}").exists()
    assert not reaper.is_alive
    assert (pool.entry().ended_at, log_text()) == (None, "")
    stopped = start(pool.reaper_input())
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.leave(timeout_seconds=0.05)
    assert not Path(f"/proc/{stopped.pid}").exists()
    (pool.folder / "is-down").touch()
    working = start(pool.reaper_input())
    working.terminate_now()
    wait_until(lambda: "ending its machines" in log_text(), "the reaper to begin")
    working.leave()
    assert is_gone(working.pid)
    (pool.folder / "is-down").unlink()
    assert len(pool.living()) == 2


def _unheard(reaper: Reaper) -> int:
    """Return how many bytes the pipe holds."""
    return int.from_bytes(fcntl.ioctl(reaper._pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_machines_end_while_the_ledger_is_locked(pool: Pool, start: Start) -> None:
    locker = sqlite3.connect(pool.folder / "ledger.db", isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")
    try:
        start(pool.reaper_input()).terminate_now()
        wait_until(lambda: not pool.living(), "the machines to end")
        locker.execute("ROLLBACK")
        wait_until(lambda: pool.entry().ended_at is not None, "the entries to be closed")
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


def test_a_failed_teardown_is_tried_again(pool: Pool) -> None:
    """After failures of any kind: pauses grow, each failure is a line of the log, and the entry is closed."""
    fails = "if number <= 3: raise [ConnectionError, KeyError, RuntimeError][number - 1]('no. %d\\nmore' % number)"
    ended = Ended.by(fails, pool.reaper_input())
    assert (ended.status, ended.pauses) == (0, [1.0, 2.0, 4.0])
    assert ended.calls == [f"{pool.pool_id} FolderProvider True its process is gone"] * 4
    assert "ConnectionError: no. 1" in ended.log
    assert "more" not in ended.log
    assert pool.is_ended()


def test_a_provider_call_that_hangs_is_abandoned(pool: Pool) -> None:
    """It may never return. The next attempt begins without it, and the process can exit."""
    ended = Ended.by("if number == 1: time.sleep(3600)", pool.reaper_input(), seconds=1)
    assert ended.status == 0
    assert "TimeoutError: no answer within 1 s" in ended.log
    assert pool.is_ended()


@pytest.mark.parametrize(
    ("body", "closes", "seconds", "words"),
    [
        ("pass", False, 120, "the ledger has other things of it that are not"),
        (
            "from skyward_core.errors import LedgerError; raise LedgerError('the disk is full')",
            True,
            120,
            "this could not be recorded: the disk is full",
        ),
        ("raise ConnectionError('503')", True, 1800, "ConnectionError: 503"),
    ],
    ids=["open entries", "an error of the ledger", "an outage of the provider"],
)
def test_how_long_the_reaper_tries(pool: Pool, body: str, closes: bool, seconds: int, words: str) -> None:
    """Two minutes for the ledger once the machines are gone, else half an hour. Then a sweep must do it."""
    ended = Ended.by(body, pool.reaper_input(), closes=closes)
    assert ended.status == 1
    assert seconds < sum(ended.pauses) < seconds + 100
    assert max(ended.pauses) == 30
    assert any(words in line for line in ended.log)
    assert "`skyward sweep` tries again" in ended.log[-1]
    assert pool.entry().ended_at is None


def test_a_provider_that_cannot_be_rebuilt_comes_from_the_ledger(tmp_path: Path) -> None:
    """Its code is missing or of another version. The entry suffices if the environment has the credentials."""
    pool = Pool(tmp_path)
    with Ledger(pool.url) as ledger:
        open_pool(ledger, pool.pool_id, Owner.here(), provider={"name": "local"}, lease_expires_at=in_an_hour())
    ended = Ended.by("pass", pool.reaper_input(providers=b"nonsense"))
    assert (ended.status, ended.calls) == (0, [f"{pool.pool_id} Local True its process is gone"])


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


def test_a_provider_that_cannot_be_pickled_by_value_is_pickled_by_name(pool: Pool, start: Start) -> None:
    """Its module holds a lock; the reaper, on the same machine and with the same path, imports it. One that cannot be
    pickled at all is refused: the pool decides what to do without a reaper.
    """
    with pytest.raises(NotPicklable):
        ReaperInput.of([Live(folder=str(pool.folder))], "p", "sqlite://")
    locking = LockingProvider(folder=str(pool.folder))
    with pytest.raises(NotPicklable):
        dumps(locking)
    start(ReaperInput.of([locking], pool.pool_id, pool.url)).terminate_now()
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


def test_a_large_log_is_rotated(pool: Pool, start: Start) -> None:
    directory = user_state_path("skyward")
    (directory / "reaper.log").write_text("old\n" * 300_000)
    start(pool.reaper_input()).leave()
    assert log_text() == ""
    assert (directory / "reaper.log.old").stat().st_size == 1_200_000
    assert (directory / "reaper.log").stat().st_mode & 0o777 == 0o600


def test_a_reaper_needs_no_log(pool: Pool, start: Start) -> None:
    shutil.rmtree(user_state_path("skyward"))
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
