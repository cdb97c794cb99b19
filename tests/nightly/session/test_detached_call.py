"""Calls with an identity: one run for each id, numbered lines, and what is left when a call is forgotten.

Run as a program, this file is another process, which attaches to a pool and starts a call.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from tests.conftest import shared
from tests.pool.local import double
from tests.system.session.test_attached import held_bytes
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
MEGABYTES = 20 << 20

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def notes_and_waits(folder: str) -> str:
    """Print a line, add a line to a file, wait for another file, print another line."""
    print("begun", flush=True)
    with Path(folder, "runs").open("a") as file:
        file.write("run\n")
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    print("done")
    return "end"


@pytest.fixture(scope="module")
def opened_pool() -> Iterator[sky.ComputePool]:
    """Two local nodes."""
    with shared(sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", lease_seconds=30)) as pool:
        yield pool


def test_a_start_is_repeated_after_its_process_was_killed(opened_pool: sky.ComputePool, tmp_path: Path) -> None:
    """Another process starts the same id, gets the same call, and goes on from the log's cursor. The call runs once.

    When it is forgotten its id still begins nothing.
    """
    with another_process(str(tmp_path), opened_pool.lease.model_dump_json()) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "started True\n"
        starter.send_signal(signal.SIGKILL)
        starter.wait(60)
    with sky.ComputePool.attach(opened_pool.lease) as pool:
        wait_until(lambda: opened_pool.detached_call("dag/run/task:1").log() == ["begun"], "the call to run")
        lines, cursor = opened_pool.detached_call("dag/run/task:1").log_from()
        call = pool.start_detached(double(1), call_id="dag/run/task:1")
        assert (call.is_new, call.name, call.state) == (False, "notes_and_waits", "running")
        (tmp_path / "go").touch()
        assert cast(str, call.result(60)) == "end"
        assert (lines, *call.log_from(cursor)) == (["begun"], ["done"], 2)
        (attempt,) = call.attempts
        assert (attempt.node in {0, 1}, attempt.why_lost) == (True, "")
        assert attempt.ended_at is not None
        call.forget()
        again = pool.start_detached(notes_and_waits(str(tmp_path)), call_id="dag/run/task:1")
        assert (again.is_new, again.state, again.is_forgotten) == (False, "ended", True)
        for read in (again.result, again.log):
            with pytest.raises(sky.BadRequest, match="is ended, and its result was forgotten"):
                read()
    assert (tmp_path / "runs").read_text() == "run\n"
    with Ledger(default_url()) as ledger:
        (entry,) = ledger.calls(pool_id=opened_pool.id, owner="dag/run")
    found = (entry.call_id, entry.state, entry.generation, entry.name)
    assert found == ("dag/run/task:1", "ended", 1, "notes_and_waits")
    assert entry.seconds > 0


def test_the_closing_of_a_pool_writes_what_no_client_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    price = sky.Local(price_per_hour=3600.0)
    with sky.ComputePool(provider=price, display="quiet", concurrency=2, work=sky.Work(run="r1")) as pool:
        pool.start_detached(double(1), call_id="short")
        running = pool.start_detached(notes_and_waits(str(tmp_path)), call_id="long", owner="dag/run/long")
        wait_until(lambda: (tmp_path / "runs").exists() and running.log(), "the other one to run")
        with monkeypatch.context() as patch:
            patch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/another.db")
            with sky.ComputePool.attach(pool.lease) as stranger:  # its ledger does not know the pool
                assert stranger.detached_call("short").result(60) == 2
    with Ledger(default_url()) as ledger:
        short, long = ledger.calls(pool_id=pool.id)
    assert (short.state, short.owner, long.state, long.owner) == ("ended", "r1", "running", "dag/run/long")
    assert 0 < float(short.cost_usd) <= short.seconds / 2 + 0.01
    assert (short.has_unknown_end, long.has_unknown_end) == (False, True)


def test_a_large_result_is_dropped_after_its_time(opened_pool: sky.ComputePool) -> None:
    """No client asks for that: the file of the result is removed by the node that has it."""
    call = opened_pool.start_detached(sky.compute(bytes)(MEGABYTES), call_id="large", result_ttl=2)
    wait_until(lambda: call.state == "ended", "the call to end")
    assert held_bytes(opened_pool) >= MEGABYTES
    wait_until(lambda: call.is_forgotten, "the time of its result to be over")
    wait_until(lambda: held_bytes(opened_pool) < MEGABYTES, "the memory to be free")


@contextlib.contextmanager
def another_process(folder: str, lease: str) -> Iterator["subprocess.Popen[str]"]:
    """Run this file as a program; it does not outlive the block."""
    argv = [sys.executable, "-m", "tests.nightly.session.test_detached_call", folder, lease]
    process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def start_and_wait(folder: str, lease: str) -> None:
    """Attach, start a call with an id, say so, and wait to be killed."""
    with sky.ComputePool.attach(lease) as pool:
        call = pool.start_detached(notes_and_waits(folder), call_id="dag/run/task:1", owner="dag/run")
        print("started", call.is_new, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    start_and_wait(*sys.argv[1:])
