"""Other processes use a pool: they attach, leave, and read calls that outlive their client. Here, and over SSH.

Run as a program, this file is another process: one that opens a pool and starts a call detached, or one that attaches.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.machines.instances import Lease
from skyward_core.worker.node_clocks import kill_instance, members, uptime, write_paid
from tests.system.session.test_attached import doubled, living, rank, rented_pool, runs_until  # noqa: F401 - a fixture
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.waiting import wait_until

LEASE_SECONDS = 10
REPOSITORY = Path(__file__).parents[3]

pytestmark = [pytest.mark.timeout(240)]


def orphaned(folder: Path) -> tuple[Lease, str]:
    """Return the lease of a pool whose opener was killed, and the id of a call that waits for the file "go"."""
    with other_process("open", str(folder / "go")) as opener:
        assert opener.stdout is not None
        lease, call_id = opener.stdout.readline(), opener.stdout.readline().strip()
        opener.kill()
        opener.wait(60)
    return Lease.model_validate_json(lease), call_id


def test_a_call_outlives_its_killed_submitter(tmp_path: Path) -> None:
    lease, call_id = orphaned(tmp_path)
    ids = {node.instance.id for node in lease.nodes}
    with sky.ComputePool.attach(lease, lease_seconds=LEASE_SECONDS) as pool:
        attached_at = time.monotonic()
        call = pool.detached_call(call_id)
        assert call.state == "running"
        wait_until(lambda: time.monotonic() > attached_at + LEASE_SECONDS + 2, "the opener's lease to run out")
        assert living(ids) == ids
        assert call.state == "running"
        (tmp_path / "go").touch()
        assert call.result(30) == "end"
        assert call.log() == ["begun", "done"]
        assert doubled(4) >> pool == 8
        left_at = time.monotonic()
    assert living(ids) == ids
    wait_until(lambda: not living(ids), "the nodes to end themselves", LEASE_SECONDS + 25)
    assert time.monotonic() - left_at > LEASE_SECONDS / 2
    with pytest.raises(sky.NodeLost, match="is not there any more"):
        sky.ComputePool.attach(lease, timeout_seconds=5)


def test_a_client_that_attaches_is_told_that_the_money_is_used_up(tmp_path: Path) -> None:
    """The head has written it. Without the reason the client would open the pool again, or search for its name."""
    lease, _ = orphaned(tmp_path)
    with sky.ComputePool.attach(lease, lease_seconds=LEASE_SECONDS) as pool:
        for node in lease.nodes:
            write_paid(Path(str(node.instance.directory)), uptime())
        with pytest.raises(sky.NodeLost, match=r"it has written that it ended at .*: the money is used up \(max_cost"):
            runs_until(str(tmp_path / "never")) >> pool


def test_a_node_is_lost_after_the_opener(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lease, call_id = orphaned(tmp_path)
    ids = {node.instance.id for node in lease.nodes}
    (tmp_path / "go").touch()
    with sky.ComputePool.attach(lease, lease_seconds=LEASE_SECONDS) as pool:  # else the nodes end while the test checks
        supervisor_of(lease, 1, signal.SIGKILL)
        wait_until(lambda: len(living(ids)) == 1, "the node to be gone")
        with sky.ComputePool.attach(lease, lease_seconds=30) as another:
            assert another.detached_call(call_id).result(30) == "end"
            assert [node.rank for node in another.lease.nodes] == [0]
            assert rank() @ another == (0,)
            assert doubled(4) >> another == 8
        assert "node 1 of pool" in caplog.text
        assert "is not there, and the pool is attached to without it" in caplog.text
        assert pool.detached_call(call_id).result(30) == "end"
        supervisor_of(lease, 0, signal.SIGKILL)
        with pytest.raises(sky.NodeLost, match="is not there any more, or has another head"):
            sky.ComputePool.attach(lease, timeout_seconds=5)


def test_after_the_loss_of_the_head_no_lease_is_renewed(tmp_path: Path) -> None:
    """A client that cannot use the nodes does not renew their lease. When no node has answered for one lease the nodes
    end, although the client is still attached.
    """
    lease, _ = orphaned(tmp_path)
    ids = {node.instance.id for node in lease.nodes}
    with sky.ComputePool.attach(lease, lease_seconds=LEASE_SECONDS):
        supervisor_of(lease, 0, signal.SIGKILL)
        wait_until(lambda: not living(ids), "the other node to end itself", 3 * LEASE_SECONDS + 40)


def test_the_calls_of_a_killed_client_free_their_slots(tmp_path: Path) -> None:
    with sky.ComputePool(provider=sky.Local(), display="quiet", lease_seconds=LEASE_SECONDS) as pool:
        with other_process("attach-and-wait", str(tmp_path / "never")) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(pool.lease.model_dump_json() + "\n")
            client.stdin.flush()
            assert client.stdout.readline() == "attached\n"
            wait_until(lambda: (tmp_path / "never-begun").exists(), "its call to run")
            client.send_signal(signal.SIGKILL)
            client.wait(60)
            assert pool.submit(doubled(4)).result(LEASE_SECONDS + 40) == 8


def supervisor_of(lease: Lease, node: int, number: signal.Signals) -> None:
    """Send a signal to a node's first process."""
    os.kill(int(Path(str(lease.nodes[node].instance.directory), "supervisor").read_text()), number)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "its head was killed"])
def test_a_pool_without_a_head_cannot_be_attached_to(is_closed: bool) -> None:
    """The error comes at once: no time is spent on its scheduler."""
    with sky.ComputePool(provider=sky.Local(), retries=0, display="quiet") as pool:
        lease = pool.lease if is_closed else pool.detach()
    head = lease.nodes[0].instance.id
    kill_instance(head)
    wait_until(lambda: not members(head), "the end of the killed processes")
    words = "is not there any more" if is_closed else r"the first process of its head has died|its head has ended"
    started = time.monotonic()
    with pytest.raises(sky.NodeLost, match=words):
        sky.ComputePool.attach(lease)
    assert time.monotonic() - started < 15
    if not is_closed:
        sky.release(lease.pool_id)


def test_over_ssh_the_key_may_be_given(rented_pool: sky.ComputePool, fleet: Fleet) -> None:
    """`key=` may be the key itself. It is in no file, which a kill could leave, and not in the lease."""
    with sky.ComputePool.attach(rented_pool.lease.with_key("/nonexistent"), key=fleet.key_path.read_text()) as pool:
        assert rank() @ pool == (0, 1)
        (path,) = {str(node.instance.endpoint.key) for node in pool.lease.nodes if node.instance.endpoint}
        assert os.readlink(path).startswith("/memfd:")
        assert "PRIVATE" not in pool.lease.model_dump_json()
    assert not os.path.exists(path)


@contextlib.contextmanager
def other_process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run this file as a program; it does not outlive the block."""
    argv = [sys.executable, "-m", "tests.nightly.session.test_attached", *arguments]
    process = subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def open_and_wait(path: str) -> None:
    """Open a pool, start a call detached, print both, and wait to be killed."""
    pool = sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", lease_seconds=LEASE_SECONDS).open()
    call = pool.start_detached(runs_until(path))
    wait_until(lambda: call.log(), "the call to run")
    print(f"{pool.lease.model_dump_json()}\n{call.call_id}", flush=True)
    time.sleep(60)


def attach_and_wait(path: str) -> None:
    """Attach to the pool whose lease is on the first line of stdin, start a call that does not end, print a line, and
    wait to be killed.
    """
    with sky.ComputePool.attach(sys.stdin.readline()) as pool:
        pool.submit(runs_until(path))
        print("attached", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    {"open": open_and_wait, "attach-and-wait": attach_and_wait}[sys.argv[1]](*sys.argv[2:])
