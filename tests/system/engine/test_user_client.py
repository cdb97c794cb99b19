"""The client that `pool.dask_client()` returns: it is independent of the pool's own connection."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import dask
import distributed
import pytest

import skyward_core as sky
from skyward_core.engine.user_client import UserClient
from skyward_core.errors import NodeLost, PoolClosed
from tests.conftest import wait_until

SOON_SECONDS = 10.0


# ── which client there is ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FakeClient:
    address: str
    status: str = "running"


class Cluster:
    """A scheduler at `address`, which may be out of reach, and its clients."""

    def __init__(self) -> None:
        self.address = "tls://a"
        self.refusal: Exception | None = None
        self.made = list[FakeClient]()
        self.gate = threading.Event()
        self.gate.set()
        self.holder = UserClient(lambda: self.address, self.check, self.connect, self.end)  # type: ignore[arg-type]

    def check(self) -> None:
        if isinstance(self.refusal, NodeLost):
            raise self.refusal

    def connect(self, address: str) -> FakeClient:
        self.made.append(FakeClient(address))
        assert self.gate.wait(SOON_SECONDS)
        if isinstance(self.refusal, OSError):
            raise self.refusal
        return self.made[-1]

    @staticmethod
    def end(client: FakeClient) -> None:
        client.status = "closed"

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(client.address, client.status) for client in self.made]


def test_it_is_the_same_client_as_long_as_it_is_open() -> None:
    """Even while the pool itself has no connection: the scheduler may only be slow."""
    cluster = Cluster()
    client = cluster.holder.get()
    cluster.refusal = NodeLost("out of reach")
    assert cluster.holder.get() is client
    assert cluster.states == [("tls://a", "running")]


def test_a_client_that_reconnects_is_kept() -> None:
    """`get` returns it if the pool reaches the scheduler, and raises otherwise."""
    cluster = Cluster()
    client: Any = cluster.holder.get()
    client.status = "connecting"
    assert cluster.holder.get() is client
    cluster.refusal = NodeLost("out of reach")
    with pytest.raises(NodeLost, match="out of reach"):
        cluster.holder.get()
    cluster.refusal, client.status = None, "running"
    assert cluster.holder.get() is client


def test_there_is_another_client_when_the_user_has_closed_it() -> None:
    """A `with` block on the client closes it."""
    cluster = Cluster()
    cluster.end(cluster.holder.get())  # type: ignore[arg-type]
    assert cluster.holder.get() is cluster.made[1]
    assert cluster.states == [("tls://a", "closed"), ("tls://a", "running")]


@pytest.mark.parametrize("status", ["running", "connecting"])
def test_there_is_another_client_when_the_head_has_another_address(status: str) -> None:
    """The client of the old head is closed, even if it has not noticed the loss yet."""
    cluster = Cluster()
    cluster.holder.get().status = status
    cluster.address = "tls://b"
    assert cluster.holder.get() is cluster.made[1]
    assert cluster.states == [("tls://a", "closed"), ("tls://b", "running")]


def test_a_scheduler_that_does_not_answer() -> None:
    """The caller gets NodeLost; the next attempt may succeed."""
    cluster = Cluster()
    cluster.refusal = NodeLost("try again")
    with pytest.raises(NodeLost, match="try again"):
        cluster.holder.get()
    assert cluster.made == []
    cluster.refusal = OSError("refused")
    with pytest.raises(NodeLost, match="tls://a does not answer"):
        cluster.holder.get()
    cluster.refusal = None
    assert cluster.holder.get() is cluster.made[-1]


def test_closing_ends_it_permanently() -> None:
    """A client that is just being made ends too; closing waits for neither."""
    cluster = Cluster()
    cluster.holder.get()
    cluster.address = "tls://b"
    cluster.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(cluster.holder.get)
        wait_until(lambda: len(cluster.made) == 2, "the second to be begun")
        cluster.holder.close()
        cluster.gate.set()
        with pytest.raises(PoolClosed):
            late.result(SOON_SECONDS)
    cluster.holder.close()
    with pytest.raises(PoolClosed):
        cluster.holder.get()
    assert cluster.states == [("tls://a", "closed"), ("tls://b", "closed")]


def test_two_threads_get_one_client() -> None:
    cluster = Cluster()
    cluster.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        got = [threads.submit(cluster.holder.get) for _ in range(2)]
        wait_until(lambda: cluster.made, "one to be begun")
        cluster.gate.set()
        assert got[0].result(SOON_SECONDS) is got[1].result(SOON_SECONDS)
    assert cluster.states == [("tls://a", "running")]


def test_it_is_not_dasks_default_client(pool: sky.ComputePool) -> None:
    """Dask's functions use it only if the program says so."""
    client = pool.dask_client()
    assert pool.dask_client() is client
    with pytest.raises(ValueError):
        distributed.default_client()
    with client.as_current():
        assert distributed.default_client() is client
        assert dask.compute(dask.delayed(pow)(2, 5)) == (32,)
