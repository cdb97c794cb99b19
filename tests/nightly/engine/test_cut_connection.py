"""Calls, cancels and large values while the connection to the scheduler, or to a node, is cut. The nodes are processes of this machine."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine import calls
from skyward_core.engine import detached_calls as module
from skyward_core.engine.connection import SchedulerConnection
from skyward_core.engine.owner import EngineThread
from skyward_core.errors import BudgetExceeded, ConnectionLost
from skyward_core.wire.messages import Parcel
from tests.conftest import members
from tests.waiting import wait_until


@pytest.fixture
def lone() -> Iterator[sky.ComputePool]:
    """One node with two slots. No call runs twice."""
    with sky.ComputePool(
        provider=sky.Local(), nodes=1, concurrency=2, retries=0, display="quiet", collect_metrics=False
    ) as pool:
        yield pool


def cluster_of(pool: sky.ComputePool) -> Any:
    return pool._session.cluster


def cut(pool: sky.ComputePool) -> Callable[[], None]:
    """Cut a pool's client off from its scheduler; return a function that connects it again."""
    cluster: Any = cluster_of(pool)
    address = cluster.client.scheduler.address
    cluster._disconnect()
    return lambda: cluster.resume(address, 20)


@sky.compute
def note_and_wait(folder: str, name: str) -> str:
    """Leave a note of this run, wait for the file `go`."""
    Path(folder, f"{name}-{time.monotonic_ns()}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return name


def runs(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}-*")))


@pytest.mark.parametrize("is_healed", [True, False])
def test_a_detached_call_is_taken_in_once(
    lone: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_healed: bool
) -> None:
    """The answer is lost with the connection: the request is repeated, and is idempotent.

    If that fails, the error has the call's id.

    Looks inside: the connection is cut between two steps that are private.
    """
    ask_on, heals = EngineThread.ask_on, list[Callable[[], None]]()

    def interrupted(*args: Any) -> Any:
        answer = ask_on(*args)
        if not heals:
            heals.append(cut(lone))
            if is_healed:
                heals[0]()
            raise sky.NodeLost("cut")
        return answer

    monkeypatch.setattr(EngineThread, "ask_on", interrupted)
    monkeypatch.setattr(module, "DETACH_SECONDS", 30 if is_healed else 0.1)
    if is_healed:
        call = lone.start_detached(note_and_wait(str(tmp_path), "call"))
    else:
        with pytest.raises(sky.NodeLost, match=r"call \w{32} may have begun") as caught:
            lone.start_detached(note_and_wait(str(tmp_path), "call"))
        heals[0]()
        call = lone.detached_call(str(caught.value).partition("call ")[2].partition(" ")[0])
    (tmp_path / "go").touch()
    assert call.result(60) == "call"
    assert [known.call_id for known in lone.detached_calls()] == [call.call_id]
    assert runs(tmp_path, "call") == 1


LARGE = 300_000


@pytest.fixture
def far() -> Iterator[sky.ComputePool]:
    """Two nodes with one slot each. The client reaches their memory only through their `Transport`, as over SSH."""
    with sky.ComputePool(provider=sky.Local(), nodes=2, retries=0, display="quiet", collect_metrics=False) as pool:
        cluster_of(pool).dispatcher.members.is_local = False
        yield pool


@sky.compute
def where(_: bytes = b"") -> int:
    return sky.instance_info().node


@sky.compute
def much() -> bytes:
    return os.urandom(LARGE)


@sky.compute
def total(rows: list[int]) -> int:
    return sum(sky.shard(rows))


# ── cancels ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_that_is_cancelled_during_a_cut_is_stopped_after_it(lone: sky.ComputePool, tmp_path: Path) -> None:
    """A call that is cancelled later is stopped too: no cancelled call keeps its slot. A call that runs meanwhile goes
    on.
    """
    kept = lone.submit(note_and_wait(str(tmp_path), "kept"))
    cancelled = lone.submit(note_and_wait(str(tmp_path), "first"))
    wait_until(lambda: runs(tmp_path, "kept") and runs(tmp_path, "first"), "both to run")
    heal = cut(lone)
    assert cancelled.cancel()
    heal()
    later = lone.submit(note_and_wait(str(tmp_path), "later"))
    wait_until(lambda: runs(tmp_path, "later"), "a slot to be free again")
    assert later.cancel()
    assert where() >> lone == 0
    (tmp_path / "go").touch()
    assert kept.result(60) == "kept"
    assert runs(tmp_path, "kept") == 1


def lose_messages(pool: sky.ComputePool) -> list[Any]:
    """Lose the client's messages from now on, as on a broken connection that is not noticed yet; return them."""
    lost = list[Any]()
    cluster_of(pool).client._send_to_scheduler = lost.append
    return lost


def test_the_cancel_of_a_detached_call_is_acknowledged_or_raises(lone: sky.ComputePool, tmp_path: Path) -> None:
    """While the scheduler is out of reach it raises, and can be repeated."""
    call = lone.start_detached(note_and_wait(str(tmp_path), "d"))
    wait_until(lambda: runs(tmp_path, "d"), "the call to run")
    heal = cut(lone)
    with pytest.raises(sky.NodeLost, match="try again"):
        call.cancel()
    heal()
    call.cancel()
    wait_until(lambda: call.state == "cancelled", "the call to be stopped")


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_that_never_reached_the_scheduler_is_sent_again(lone: sky.ComputePool, tmp_path: Path) -> None:
    """Also if no call may run twice: the scheduler knows which calls have arrived."""
    (tmp_path / "go").touch()
    lost = lose_messages(lone)
    future = lone.submit(note_and_wait(str(tmp_path), "call"))
    wait_until(lambda: "skyward-run-batch" in [message["op"] for message in lost], "the call to be sent")
    cut(lone)()
    assert future.result(60) == "call"
    assert runs(tmp_path, "call") == 1
    assert "client-releases-keys" not in [message["op"] for message in lost]


def test_no_detached_call_is_taken_in_when_the_money_is_gone(pool: sky.ComputePool) -> None:
    """It is refused like any other call."""
    cluster = cluster_of(pool)
    cluster.drain(BudgetExceeded("it is spent", ""))
    try:
        with pytest.raises(BudgetExceeded):
            pool.start_detached(where())
    finally:
        cluster.drain(None)


def test_a_broadcast_waits_for_a_worker_that_is_away() -> None:
    """Without it, its share of the data would be missing."""
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", collect_metrics=False) as pool:
        pids = {
            info["name"]: pool.dask_client().run(os.getpid, workers=[address])[address]
            for address, info in members(pool.dask_client()).items()
        }
        os.kill(pids["1-0"], signal.SIGKILL)
        wait_until(lambda: not cluster_of(pool).has(1), "the worker to be missed")
        assert sum(total(list(range(100))) @ pool) == 4950


# ── large values ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Flaky:
    """A node's `Transport` whose connection fails in the first `take` and the first `put`, and is back after a while."""

    def __init__(self, transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes = self.puts = 0
        self._take, self._put = transport.take, transport.put
        self._transport = transport
        monkeypatch.setattr(transport, "is_connected", True, raising=False)
        monkeypatch.setattr(transport, "take", self.take)
        monkeypatch.setattr(transport, "put", self.put)

    def take(self, parcel: Parcel, *, keep: bool = False) -> Parcel:
        self.takes += 1
        if self.takes == 1:
            self._transport.is_connected = False
            raise ConnectionLost("reset")
        return self._take(parcel, keep=keep)

    def put(self, parcel: Parcel) -> Parcel:
        self.puts += 1
        if self.puts == 1:
            raise ConnectionLost("reset")
        return self._put(parcel)

    def heal(self) -> None:
        self._transport.is_connected = True


def waits_for_wire(pool: sky.ComputePool) -> bool:
    """Return whether a fetch waits for the connection to its node."""
    return any(fetching.error for fetching in list(cluster_of(pool).dispatcher.fetching.values()))


def flaky(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> list[Flaky]:
    return [Flaky(cluster_of(pool)._transports.to(node.instance), monkeypatch) for node in pool.lease.nodes]


def test_a_result_is_fetched_when_the_wire_to_its_node_is_back(
    far: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays on the node meanwhile; nothing is lost, and reports of other calls do not wait for it."""
    transports = flaky(far, monkeypatch)
    future = far.submit(much())
    wait_until(lambda: waits_for_wire(far), "the wire to be cut")
    assert where() >> far in (0, 1)
    assert not future.done()
    for transport in transports:
        transport.heal()
    assert len(future.result(60)) == LARGE
    assert sorted(transport.takes for transport in transports) == [0, 2]


@pytest.mark.parametrize("end", ["closed", "lost", "given up", "late"])
def test_a_result_that_cannot_be_fetched_raises(
    far: sky.ComputePool, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """That happens when the pool is closed, the node is lost, the pool is abandoned, or the fetch takes too long."""
    flaky(far, monkeypatch)
    cluster = cluster_of(far)
    if end == "late":
        monkeypatch.setattr(calls, "FETCH_SECONDS", 0.0)
    future = far.submit(much())
    if end != "late":
        wait_until(lambda: waits_for_wire(far), "the wire to be cut")
    if end == "lost":
        cluster.owner.run(cluster.dispatcher.members.clear)
    elif end == "given up":
        cluster.fail_calls(sky.NodeLost("no node is left"))
    elif end == "closed":
        far.close()
    with pytest.raises(sky.PoolClosed if end == "closed" else sky.NodeLost):
        future.result(60)
    assert not cluster.dispatcher.fetching


# ── waits and deadlines ───────────────────────────────────────────────────────────────────────────────────────────────


def test_connecting_to_a_frozen_scheduler_ends_in_time(lone: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen scheduler has accepted the connection and does not answer: connecting ends at its deadline.

    When it runs again, the next attempt succeeds.
    """
    cluster = cluster_of(lone)
    scheduler: Any = lone.dask_client().run_on_scheduler(os.getpid)
    address = cluster.client.scheduler.address
    listen = SchedulerConnection.listen

    def freeze(self: SchedulerConnection, *args: Any) -> None:
        os.kill(scheduler, signal.SIGSTOP)
        listen(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SchedulerConnection, "listen", freeze)
        try:
            with pytest.raises(sky.NodeLost, match="takes connections and does not answer"):
                cluster.resume(address, 3.0)
        finally:
            os.kill(scheduler, signal.SIGCONT)
    cluster.resume(address, 60.0)
    assert where() >> lone == 0


def test_a_slow_callback_delays_no_result(lone: sky.ComputePool) -> None:
    """A callback that blocks delays only other callbacks; it may wait for another call of the pool."""
    done = threading.Event()
    got = list[int]()
    first = lone.submit(where())
    first.add_done_callback(lambda _: (done.wait(60), got.append(where() >> lone)))
    assert first.result(60) == 0
    assert lone.map(abs, range(-100, 0)) == list(range(100, 0, -1))
    done.set()
    wait_until(lambda: got == [0], "the callback to end")


def test_a_result_in_transit_keeps_the_pool_busy(far: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle `timeout` does not run meanwhile, and a held node has one call more.

    Looks inside: the way to a node is held up, which no caller can do.
    """
    going, began = threading.Event(), threading.Event()
    for node in far.lease.nodes:
        transport = cluster_of(far)._transports.to(node.instance)
        take = transport.take
        monkeypatch.setattr(transport, "take", lambda parcel, take=take: (began.set(), going.wait(60), take(parcel))[2])
    future = far.submit(much())
    assert began.wait(60)
    cluster = cluster_of(far)
    wait_until(lambda: not cluster.owner.ask("skyward_busy"), "the scheduler to have nothing to do")
    assert not cluster.is_idle
    assert cluster.busy_at >= time.monotonic() - 1
    assert sum(cluster.draining.hold(rank) for rank in (0, 1)) == 1
    going.set()
    assert len(future.result(60)) == LARGE
    assert cluster.is_idle
