"""No process that a call has started outlives its node: the keeper, with real processes and real kills."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.worker import keeper, node_clocks
from tests.system.worker.test_keeper import (  # noqa: F401 - fixtures
    EMPTY_GROUP,
    EMPTY_TREE,
    mark,
    running,
)
from tests.waiting import wait_until

# ── in a pool ────────────────────────────────────────────────────────────────────────────────────────────────────────

CLIENT = """
import os, subprocess, sys, time
import skyward_core as sky

def run_away(seconds):
    subprocess.run(["sh", "-c", "env -i setsid /bin/sleep $0 </dev/null >/dev/null 2>&1 &", seconds], check=True)
    return os.getpid()

def stay(seconds):
    time.sleep(1000)

pool = sky.ComputePool(provider=sky.Local(), display="quiet").open()
runner = pool.run(sky.compute(run_away)(os.environ["MARK"]))
pool.submit(sky.compute(stay)(0))
print(pool.lease.nodes[0].instance.id, pool.lease.pool_id, runner, flush=True)
if sys.argv[1] == "close":
    pool.close()
    print(pool.receipt["left"], pool.receipt["resources"][0]["evidence"], flush=True)
else:
    time.sleep(1000)
"""


def client(mark: str, ending: str = "stay") -> "tuple[subprocess.Popen[str], str, str, int]":
    """A process with a pool, in which a call has left a process; the node's id, the pool's id, and the pid of the
    runner.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, ending], env={**os.environ, "MARK": mark}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    instance_id, pool_id, runner = process.stdout.readline().split()
    return process, instance_id, pool_id, int(runner)


def is_gone(pool_id: str, mark: str) -> bool:
    return sky.Local().instances(pool_id) == [] and running(mark) == []


def test_close_ends_processes_that_a_call_has_left(mark: str) -> None:
    """The receipt has the evidence that nothing is left."""
    process, _, pool_id, _ = client(mark, "close")
    output, _ = process.communicate(timeout=60)
    assert output in {f"[] local lists it no more: {proof}\n" for proof in (EMPTY_GROUP, EMPTY_TREE)}
    assert is_gone(pool_id, mark)


@pytest.mark.parametrize(
    "killed",
    [
        "client",
        "reaper and client",
        "runner",
        "worker",
        "supervisor",
        "first keeper",
        "second keeper",
        "supervisor and first keeper",
    ],
)
def test_after_any_kill_nothing_outlives_the_pool(killed: str, mark: str) -> None:
    """SIGKILL to one or two of the processes that could have ended what a call has left; then to the client."""
    process, instance_id, pool_id, runner = client(mark)
    try:
        assert len(running(mark)) == 1
        first, second = (
            pid
            for pid in sorted(
                pids_named(keeper.KEEPER, instance_id), key=lambda pid: keeper.parent_of(pid) != process.pid
            )
        )
        supervisor = keeper.parent_of(runner)
        worker = next(pid for pid in keeper.children_of(supervisor) if pid != runner)
        reaper = next(pid for pid in keeper.children_of(process.pid) if keeper.name_of(pid) == keeper.REAPER)
        assert keeper.parent_of(supervisor) == second
        known = {"client": process.pid, "reaper": reaper, "runner": runner, "worker": worker, "supervisor": supervisor}
        known |= {"first keeper": first, "second keeper": second}
        for who in killed.split(" and "):
            os.kill(known[who], signal.SIGKILL)
        if "supervisor" in killed or "second" in killed:
            wait_until(
                lambda: instance_id not in {found.id for found in sky.Local().instances(pool_id)}, "the node to end"
            )
            assert running(mark) == []
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: is_gone(pool_id, mark), "the node and what its call has left to end")


NESTED = """
import sys
import skyward_core as sky

def open_another():
    inner = sky.ComputePool(provider=sky.Local(), display="quiet").open()
    globals()["kept"] = inner
    return inner.lease.pool_id, inner.lease.nodes[0].instance.id

pool = sky.ComputePool(provider=sky.Local(), display="quiet").open()
print(*pool.run(sky.compute(open_another)()), flush=True)
sys.stdin.readline()
pool.close()
print("closed", flush=True)
sys.stdin.readline()
"""


def test_the_reaper_of_a_pool_that_a_call_has_opened_is_spared(tmp_path: Path) -> None:
    """It outlives the node, because it waits for the node's end. It terminates the machines that the call has
    rented, and ends.
    """
    process = subprocess.Popen([sys.executable, "-c", NESTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    inner_pool, _ = process.stdout.readline().split()
    (reaper,) = reapers_of(inner_pool)
    os.kill(reaper, signal.SIGSTOP)  # so that it exists when the node ends
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "closed\n"
    assert reapers_of(inner_pool) == [reaper]
    assert sky.Local().instances(inner_pool) == []
    os.kill(reaper, signal.SIGCONT)
    process.communicate("\n", timeout=60)
    wait_until(lambda: reapers_of(inner_pool) == [], "the reaper to end")


def reapers_of(pool_id: str) -> list[int]:
    return [pid for pid in running(pool_id) if keeper.name_of(pid) == keeper.REAPER]


def pids_named(name: str, instance_id: str) -> list[int]:
    return [pid for pid, is_keeper in node_clocks.members(instance_id).items() if is_keeper == (name == keeper.KEEPER)]
