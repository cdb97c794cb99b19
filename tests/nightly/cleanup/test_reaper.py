"""The reaper ends the pool when the driver has ended in any way, and in no other case."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyward_core.cleanup import reaper as reaper_module
from skyward_core.cleanup.reaper import ReaperInput
from tests.cleanup.reaping_provider import SECRET, FolderProvider, Pool
from tests.system.cleanup.test_reaper import (  # noqa: F401 - fixtures
    DRIVER,
    ROOT,
    Start,
    driving,
    is_gone,
    log_text,
    no_reaper_stays,
    pool,
    start,
)
from tests.waiting import wait_until


def test_machines_end_although_a_fork_keeps_the_pipe_open(tmp_path: Path) -> None:
    with driving(tmp_path, more="if os.fork() == 0: signal.pause()") as (driver, _):
        pool = Pool(tmp_path)
        killed_at = time.time()
        os.kill(driver.pid, signal.SIGKILL)
        wait_until(pool.is_ended, "the machines to end")
        assert pool.first_end() - killed_at < 10  # 1 s until the reaper checks, and the imports, on a busy machine


@pytest.mark.parametrize("way", ["os._exit(3)", "os.execv('/bin/true', ['true'])"])
def test_machines_end_however_the_driver_ends(tmp_path: Path, way: str) -> None:
    with driving(tmp_path, more=f"print(reaper.pid, flush=True)\n{way}"):
        wait_until(Pool(tmp_path).is_ended, "the machines to end")


def test_a_driver_that_ends_normally_prints_no_warning(tmp_path: Path) -> None:
    text = DRIVER.format(more="").replace("signal.pause()", "del reaper")
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", text, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    wait_until(Pool(tmp_path).is_ended, "the machines to end")


def test_a_reaper_left_to_finish_alone_ends_the_pool(pool: Pool, start: Start) -> None:
    reaper = start(pool.reaper_input())
    reaper.hang_up()
    reaper.leave(timeout_seconds=0)
    assert not reaper.is_alive
    wait_until(pool.is_ended, "the machines to end")
    wait_until(lambda: is_gone(reaper.pid), "the reaper to go")
    start(pool.reaper_input()).leave()
    assert not Path(f"/proc/{reaper.pid}").exists(), "it is buried"


def test_a_fork_of_the_driver_has_no_reaper(tmp_path: Path) -> None:
    # a separate process, because a fork of this one, with its many threads, may hang
    with driving(tmp_path, FORKS) as (driver, reaper):
        assert not is_gone(reaper)
        assert driver.poll() is None
        assert (len(Pool.at(tmp_path).living()), log_text()) == (2, "")


FORKS = """
from tests.system.cleanup.test_reaper import _unheard

while _unheard(reaper):  # it does not listen yet
    pass
os.kill(reaper.pid, signal.SIGSTOP)  # what comes now is not heard
child = os.fork()
if child == 0:
    reaper.terminate_now()
    reaper.live_by_lease()
    reaper.leave()
    os._exit(3 if reaper.is_alive else 0)
assert os.waitpid(child, 0)[1] == 0, "in a fork it is alive"
assert _unheard(reaper) == 0, "the fork has said something"
os.kill(reaper.pid, signal.SIGCONT)
"""


def test_only_sigkill_ends_a_reaper_that_waits(tmp_path: Path) -> None:
    with driving(tmp_path) as (driver, reaper):
        wait_until(lambda: _caught(reaper) >> (signal.SIGUSR2 - 1) & 1, "the reaper to have begun")
        assert os.getsid(reaper) == reaper != os.getsid(driver.pid)
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGQUIT,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGPIPE,
            signal.SIGTSTP,
        ):
            os.kill(reaper, number)
            os.killpg(reaper, number)
        driver.kill()
        wait_until(Pool(tmp_path).is_ended, "the machines to end")


def _caught(pid: int) -> int:
    """Return the signals that a process handles, as a mask."""
    return int(
        next(
            line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
        ).split()[1],
        16,
    )


def _corrupt(pool: Pool) -> None:
    (pool.folder / "ledger.db").write_bytes(b"no database " * 1000)
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (pool.folder / name).unlink(missing_ok=True)


def _away(pool: Pool) -> None:
    (pool.folder / "ledger.db").unlink()
    (pool.folder / "ledger.db").mkdir()


@pytest.mark.parametrize("spoil", [_corrupt, _away])
def test_machines_end_without_a_ledger(pool: Pool, spoil: Callable[[Pool], None], start: Start) -> None:
    spoil(pool)
    reaper = start(pool.reaper_input())
    reaper.terminate_now()
    wait_until(lambda: not pool.living(), "the machines to end")
    wait_until(lambda: "its machines are gone; the ledger cannot be used" in log_text(), "the log to tell it")
    reaper.leave()


@pytest.mark.parametrize("has_ledger", [True, False], ids=["the ledger names one", "there is no ledger"])
def test_only_providers_that_may_have_machines_are_used(
    pool: Pool, tmp_path: Path, start: Start, *, has_ledger: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = FolderProvider(folder=str(elsewhere), secret=SECRET)
    other.launch(None, 1, {"skyward-pool": pool.pool_id, "skyward-rank": "0"})
    url = pool.url if has_ledger else f"sqlite:///{tmp_path}/none.db"
    start(ReaperInput.of([other, pool.provider], pool.pool_id, url)).terminate_now()
    wait_until(lambda: not pool.living(), "the machines to end")
    if has_ledger:
        wait_until(lambda: "its machines are gone" in log_text(), "the work at all providers to end")
        assert pool.is_ended()
        assert len(other.instances()) == 1
    else:
        wait_until(lambda: not other.instances(), "the machines of the other one to end")


def test_an_outage_of_one_provider_does_not_delay_another(pool: Pool, tmp_path: Path, start: Start) -> None:
    down = tmp_path / "down"
    down.mkdir()
    (down / "is-down").touch()
    broken = FolderProvider(folder=str(down), secret=SECRET)
    start(ReaperInput.of([broken, pool.provider], pool.pool_id, f"sqlite:///{tmp_path}/none.db")).terminate_now()
    wait_until(lambda: not pool.living(), "the machines of the one that answers to end")
    (down / "is-down").unlink()


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


def test_an_input_larger_than_a_pipe_arrives(pool: Pool, start: Start) -> None:
    reaper = start(pool.reaper_input(path=(*sys.path, *(f"/nowhere/{number}" for number in range(20_000)))))
    reaper.terminate_now()
    wait_until(pool.is_ended, "the machines to end")


@pytest.mark.parametrize("program", ["exit 1", "exec sleep 600"], ids=["dies at once", "is deaf"])
def test_a_reaper_that_does_not_read_its_input_is_not_alive(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start, program: str
) -> None:
    """The input is larger than a pipe holds: `start` returns. A deaf one would be alive for the pool, and is killed."""
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(reaper_module, "SEND_SECONDS", 0.05)
    reaper = start(pool.reaper_input(providers=b"x" * 1_000_000))
    assert not reaper.is_alive
    assert program == "exit 1" or not Path(f"/proc/{reaper.pid}").exists()
