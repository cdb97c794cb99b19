"""Other clients use a pool: they attach, leave, and read calls that outlive their client. Here, and over SSH."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.machines.instances import Lease
from skyward_core.wire.settings import memory_directory
from tests.conftest import RecordedEvents, processes_by_tag, shared
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.testbed.rental import Cloud
from tests.waiting import wait_until

MEGABYTES = 100 << 20

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def doubled(number: int) -> int:
    print("twice", number)
    return 2 * number


@sky.compute
def rank() -> int:
    return sky.instance_info().node


@sky.compute
def runs_until(path: str) -> str:
    """Print a line and report, wait for a file to appear, do it again."""
    print("begun", flush=True)
    sky.report(step=1, loss=0.5)
    Path(f"{path}-begun").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    print("done")
    sky.report(step=2, loss=0.25, accuracy=1)
    return "end"


@sky.compute
def steps(count: int) -> str:
    for number in range(count):
        print("step", number, flush=True)
        time.sleep(0.1)
    return "walked"


@sky.compute
def failing() -> None:
    print("about to fail")
    raise LookupError("nothing here")


@sky.compute
def ones(nbytes: int) -> Any:
    import numpy as np

    return np.ones(nbytes // 8)


@sky.compute
def touched(path: str) -> None:
    Path(path).touch()


# ── pools that another process has opened ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def opened_pool() -> Iterator[sky.ComputePool]:
    """Two local nodes, opened by a pool that does not attach."""
    with shared(sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", lease_seconds=60)) as pool:
        yield pool


@pytest.fixture
def attached_pool(opened_pool: sky.ComputePool) -> Iterator[sky.ComputePool]:
    """The same pool, attached."""
    with sky.ComputePool.attach(opened_pool.lease) as pool:
        yield pool


@pytest.mark.parametrize(
    "form", [lambda lease: lease, lambda lease: lease.model_dump_json(), lambda lease: lease.model_dump(mode="json")]
)
def test_attached_pools_compute_and_get_only_their_own_results_and_lines(
    opened_pool: sky.ComputePool, form: Callable[[Lease], Any]
) -> None:
    recorders = [RecordedEvents() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        attach = lambda sink: stack.enter_context(sky.ComputePool.attach(form(opened_pool.lease), on_event=sink))
        pools = [attach(sink) for sink in recorders]
        bases = range(0, 3000, 1000)
        futures = [pool.submit_all(map(doubled, range(n, n + 100))) for pool, n in zip(pools, bases, strict=True)]
        for its, n in zip(futures, bases, strict=True):
            assert [future.result(60) for future in its] == [2 * number for number in range(n, n + 100)]
        pool = pools[0]
        assert (pool.is_active, pool.instance_count, pool.lease) == (True, 2, opened_pool.lease)
        assert doubled(4) >> pool == 8
        assert rank() @ pool == (0, 1)
        assert pool.map(doubled, range(50)) == [2 * number for number in range(50)]
    for sink, n in zip(recorders[1:], bases[1:], strict=True):
        assert {event.line for event in sink.of(sky.LogLine)} == {f"twice {number}" for number in range(n, n + 100)}
    assert not pool.is_active
    with pytest.raises(sky.PoolClosed):
        doubled(1) >> pool
    pool.close()
    assert doubled(5) >> opened_pool == 10


def test_the_calls_of_a_client_that_leaves_are_ended(opened_pool: sky.ComputePool, tmp_path: Path) -> None:
    """Calls that an attached client has submitted get PoolClosed when it leaves, running or not. The slots are free for
    the other clients then.
    """
    pool = sky.ComputePool.attach(opened_pool.lease)
    futures = pool.submit_all(
        [runs_until(str(tmp_path / str(number))) for number in range(2)] + [touched(str(tmp_path / "never"))]
    )
    wait_until(lambda: (tmp_path / "0-begun").exists() and (tmp_path / "1-begun").exists(), "both to run")
    pool.close()
    for future in futures:
        with pytest.raises(sky.PoolClosed):
            future.result(0)
    assert opened_pool.submit(doubled(3)).result(60) == 6
    assert not (tmp_path / "never").exists()


# ── detached calls ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_detached_call_has_state_lines_and_metrics(
    opened_pool: sky.ComputePool, attached_pool: sky.ComputePool, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    started = opened_pool.start_detached(runs_until(str(go)))
    found = attached_pool.detached_call(started.call_id)
    wait_until(lambda: found.log() == ["begun"] and found.metrics() == (1, {"loss": 0.5}), "the first line and report")
    assert (found.state, started.state) == ("running", "running")
    with pytest.raises(TimeoutError, match=r"is running after 0\.05 s"):
        found.result(0.05)
    go.touch()
    for call in (found, started, attached_pool.detached_call(started.call_id)):
        assert [call.result(60), call.result(60)] == ["end", "end"]
        assert (call.state, call.log(), call.log(1), call.log(2)) == ("ended", ["begun", "done"], ["done"], [])
        assert call.metrics() == (2, {"loss": 0.25, "accuracy": 1.0})
    assert started.call_id in [call.call_id for call in attached_pool.detached_calls()]
    assert started.call_id in repr(found)
    found.forget()
    for read in (found.result, started.log, lambda: started.state, lambda: opened_pool.detached_call(started.call_id)):
        with pytest.raises(sky.BadRequest, match="knows of no call"):
            read()
    assert attached_pool.detached_calls() == []


def test_a_detached_call_that_fails(opened_pool: sky.ComputePool, attached_pool: sky.ComputePool) -> None:
    call = opened_pool.start_detached(failing())
    for known in (call, attached_pool.detached_call(call.call_id)):
        with pytest.raises(LookupError, match="nothing here") as caught:
            known.result(60)
        assert "in failing" in str(caught.value.__cause__)
        assert (known.state, known.log()[0]) == ("ended", "about to fail")
    call.forget()
    dead = attached_pool.start_detached(sky.compute(os._exit)(3))
    with pytest.raises(sky.CallCrashed, match="exit code 3"):
        dead.result(60)
    dead.forget()


def test_a_detached_call_of_an_attached_process_is_for_its_work(opened_pool: sky.ComputePool) -> None:
    """Without one it is for the work of the pool."""
    work = sky.Work(system="attached", run="nightly", task="train", attempt="2")
    with sky.ComputePool.attach(opened_pool.lease, work=work) as pool:
        call = pool.start_detached(doubled(1))
        call.result(60)
        call.forget()
    with Ledger(default_url()) as ledger:
        (its,) = [one for one in ledger.calls(pool_id=opened_pool.id) if one.call_id == call.call_id]
    assert its.work == work


def test_any_client_can_read_a_large_result_until_it_is_forgotten(
    opened_pool: sky.ComputePool, attached_pool: sky.ComputePool
) -> None:
    call = opened_pool.start_detached(ones(MEGABYTES))
    for known in (call, attached_pool.detached_call(call.call_id)):
        for _ in range(2):
            array = known.result(60)
            assert (array.nbytes, array.sum()) == (MEGABYTES, MEGABYTES / 8)
            array += 1  # the reader's own copy
    assert held_bytes(opened_pool) >= MEGABYTES
    call.forget()
    wait_until(lambda: held_bytes(opened_pool) < MEGABYTES, "the memory to be free")


def test_a_detached_call_that_waits_is_cancelled(
    opened_pool: sky.ComputePool, attached_pool: sky.ComputePool, tmp_path: Path
) -> None:
    """It never begins. A running call is stopped; the others continue, and an ended call does not change."""
    running = [opened_pool.start_detached(runs_until(str(tmp_path / f"go{number}"))) for number in range(2)]
    wait_until(lambda: all(call.log() for call in running), "both to run")
    waiting = [opened_pool.start_detached(touched(str(tmp_path / f"never{number}"))) for number in range(3)]
    assert [call.state for call in waiting] == ["waiting"] * 3
    for call in waiting:
        attached_pool.detached_call(call.call_id).cancel()
    attached_pool.detached_call(running[0].call_id).cancel()
    for call in (running[0], *waiting):
        with pytest.raises(CancelledError, match=call.call_id):
            call.result(60)
        assert call.state == "cancelled"
    assert running[1].state == "running"
    (tmp_path / "go1").touch()
    assert running[1].result(60) == "end"
    running[1].cancel()
    assert (running[1].state, running[1].result(60)) == ("ended", "end")
    assert list(tmp_path.glob("never*")) == []
    assert doubled(1) @ opened_pool == (2, 2)
    for call in (*running, *waiting):
        call.forget()


def test_what_cannot_be_is_refused(opened_pool: sky.ComputePool, attached_pool: sky.ComputePool) -> None:
    """The check is before any action, so the pools do not change."""
    with pytest.raises(sky.BadRequest, match="knows of no call"):
        attached_pool.detached_call("0" * 32)
    with pytest.raises(TypeError, match="pending"):
        attached_pool.start_detached(doubled)  # pyright: ignore
    with pytest.raises(sky.PoolClosed, match="left by closing it"):
        attached_pool.detach()
    for lease_seconds in (0.0, -1.0, float("inf"), float("nan"), 1e12):
        with pytest.raises(sky.BadRequest, match="lease_seconds="):
            opened_pool.detach(lease_seconds)
    assert doubled(1) @ attached_pool == doubled(1) @ opened_pool == (2, 2)


def test_a_detached_pool_can_be_attached_to() -> None:
    pool = sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", lease_seconds=60).open()
    waiting = pool.submit(steps(600))
    kept = pool.start_detached(steps(10))
    lease = pool.detach()
    ids = {node.instance.id for node in lease.nodes}
    try:
        assert not pool.is_active
        assert lease.expires_at is not None
        assert 0 < (lease.expires_at - datetime.now(UTC)).total_seconds() <= 60
        for use in (lambda: waiting.result(0), pool.detach):
            with pytest.raises(sky.PoolClosed):
                use()
        assert living(ids) == ids
        with sky.ComputePool.attach(lease.model_dump_json()) as attached:
            call = attached.detached_call(kept.call_id)
            assert (call.result(60), call.log(8)) == ("walked", ["step 8", "step 9"])
            assert (rank() @ attached, attached.map(doubled, range(3))) == ((0, 1), [0, 2, 4])
    finally:
        sky.release(lease.pool_id)
    wait_until(lambda: not living(ids), "the nodes to end")


# ── over SSH ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def rented_pool(fleet: Fleet, mirror: Mirror) -> Iterator[sky.ComputePool]:
    """Two machines of a cloud."""
    cloud = Cloud(fleet, prepare=mirror.configure)
    with shared(sky.ComputePool(provider=cloud.provider(), nodes=2, display="quiet", provision_timeout=180)) as pool:
        yield pool
    cloud.close()


def test_over_ssh_a_wrong_key_is_refused(rented_pool: sky.ComputePool, tmp_path: Path) -> None:
    """A key that the nodes do not know is refused, and the error says what to check; so is a host key that differs from
    the lease.
    """
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    with pytest.raises(sky.CredentialsError, match="refuses our keys"):
        sky.ComputePool.attach(rented_pool.lease, key=key)
    endpoint = rented_pool.lease.nodes[1].instance.endpoint
    assert endpoint is not None and endpoint.host_key is not None
    other = " ".join(key.with_suffix(".pub").read_text().split()[:2])
    with pytest.raises(sky.HostKeyChanged):
        sky.ComputePool.attach(rented_pool.lease.model_dump_json().replace(endpoint.host_key, other), is_trusted=True)
    assert doubled(2) >> rented_pool == 4


def test_over_ssh_a_node_that_has_ended_is_left_out(
    rented_pool: sky.ComputePool, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease names a node that a machine does not run. Without the head NodeLost says that the lease has expired."""
    lease, nodes = rented_pool.lease.model_dump_json(), rented_pool.lease.nodes
    lease = lease.replace(nodes[1].instance.id, "rental-000000000000")
    with sky.ComputePool.attach(lease, is_trusted=True) as pool:
        assert [node.rank for node in pool.lease.nodes] == [0]
        assert rank() @ pool == (0,)
    assert "(rental-000000000000) is not there, and the pool is attached to without it" in caplog.text
    with pytest.raises(sky.NodeLost, match="is not there any more"):
        sky.ComputePool.attach(lease.replace(nodes[0].instance.id, "rental-000000000000"), is_trusted=True)
    assert rank() @ rented_pool == (0, 1)


def living(ids: set[str]) -> set[str]:
    """Return those instances of which any process lives."""
    return ids & {instance_id for _, instance_id in processes_by_tag("SKYWARD_INSTANCE_ID")}


def held_bytes(pool: sky.ComputePool) -> int:
    """Return how much memory the values of a local pool take on this machine."""
    held = 0
    for node in pool.lease.nodes:
        for path in Path(memory_directory(node.instance.id)).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a value is freed while the test reads
                held += path.stat().st_size
    return held
