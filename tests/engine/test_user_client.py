"""The client that `pool.dask_client()` returns: it is independent of the pool's own connection."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import dask
import distributed
import joblib
import numpy as np
import pytest

import skyward_core as sky
from skyward_core.engine.user_client import UserClient
from skyward_core.errors import NodeLost, PoolClosed
from tests.conftest import RecordedEvents, wait_until

FROZEN_SECONDS = 20.0
BUSY_PROCESSES = 16
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


# ── on a real pool ───────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def double(n: int) -> int:
    return 2 * n


def open_pool(recorded: RecordedEvents | None = None, **options: Any) -> sky.ComputePool:
    options = {"nodes": 2, "display": "quiet", "collect_metrics": False, **options}
    return sky.ComputePool(provider=sky.Local(), on_event=recorded or RecordedEvents(), **options)


def test_it_is_not_dasks_default_client(pool: sky.ComputePool) -> None:
    """Dask's functions use it only if the program says so."""
    client = pool.dask_client()
    assert pool.dask_client() is client
    with pytest.raises(ValueError):
        distributed.default_client()
    with client.as_current():
        assert distributed.default_client() is client
        assert dask.compute(dask.delayed(pow)(2, 5)) == (32,)


@pytest.mark.slow
def test_an_attached_pool_has_a_separate_client() -> None:
    """Leaving closes only that one, and not the opener's."""
    with open_pool(nodes=1) as pool:
        with pool.dask_client() as closed:
            assert closed.submit(pow, 2, 2).result(30) == 4
        client = pool.dask_client()
        with sky.ComputePool.attach(pool.lease) as attached:
            theirs = attached.dask_client()
            assert theirs is not client
            assert theirs.submit(pow, 3, 2).result(30) == 9
        assert theirs.status == "closed"
        assert client.submit(pow, 2, 3).result(30) == 8
    assert client.status == "closed"


def stream_of(client: Any) -> tuple[str, int]:
    """Return the class of the stream to the scheduler, and the silence in seconds that its connection tolerates."""
    connection = client.scheduler_comm.comm.stream.socket
    return type(client.scheduler_comm).__name__, connection.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    ) // 1000


@pytest.mark.slow
def test_the_stream_of_a_reconnect_is_like_the_first() -> None:
    """Dask reconnects with a stream of its class, which waits 10 ms with each message, and 30 s for a frozen
    scheduler.
    """
    with open_pool(nodes=1) as pool:
        client: Any = pool.dask_client()
        first, was = client.scheduler_comm, stream_of(client)
        client.loop.add_callback(first.abort)
        wait_until(
            lambda: client.scheduler_comm not in (first, None) and client.status == "running",
            "the client to connect again",
            SOON_SECONDS,
        )
        assert client.submit(pow, 2, 3).result(30) == 8
        assert (was, stream_of(client)) == (("PromptStream", 120), ("PromptStream", 120))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler_is", ["there", "frozen", "flooded", "gone"])
def test_closing_neither_hangs_nor_logs(scheduler_is: str, caplog: pytest.LogCaptureFixture) -> None:
    """In every state of the scheduler. A thread that waits for a future gets an error.

    Sleeps: a thread that is about to wait shows nothing. Looks inside: a pool closes this client as the last of several
    things.
    """
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        pool = stack.enter_context(open_pool(nodes=1))
        client: Any = pool.dask_client()
        future = client.submit(time.sleep, 600)
        waits = threads.submit(future.result)
        scheduler = client.run_on_scheduler(os.getpid)
        if scheduler_is != "there":
            os.kill(scheduler, signal.SIGKILL if scheduler_is == "gone" else signal.SIGSTOP)
        if scheduler_is == "flooded":  # more than the kernel takes
            for _ in range(4):
                client.loop.add_callback(client.scheduler_comm.send, {"op": "none", "much": bytes(16 << 20)})
            time.sleep(0.2)
        if scheduler_is == "gone":
            wait_until(lambda: client.status == "connecting", "the client to notice", SOON_SECONDS)
        caplog.clear()
        began = time.monotonic()
        pool._session._opened.user_client.close()
        took = time.monotonic() - began
        with pytest.raises(CancelledError):
            waits.result(SOON_SECONDS)
        noise = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [(record.name, record.getMessage()) for record in noise] == []
        assert took < SOON_SECONDS
        assert client.status == "closed"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_new_head_has_a_new_client() -> None:
    """The futures of the old head's client are cancelled; the next `dask_client()` works."""
    recorded = RecordedEvents()
    with open_pool(recorded, retries=2) as pool:
        client = pool.dask_client()
        future = client.submit(time.sleep, 600)
        done = client.submit(pow, 2, 3)
        assert done.result(30) == 8
        scheduler: Any = client.run_on_scheduler(os.getppid)
        os.kill(scheduler, signal.SIGKILL)
        wait_until(lambda: recorded.of(sky.ClusterRestarting), "the loss of the head")
        assert pool.submit(double(2)).result(60) == 4
        with pytest.raises(CancelledError):
            future.result(30)
        anew = pool.dask_client()
        assert anew is not client
        assert anew.submit(pow, 2, 5).result(60) == 32
        assert client.status == "closed"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the machine busy with this many processes that only compute."""
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-IS", "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_futures_outlive_a_freeze_of_the_scheduler() -> None:
    """The pool closes its own connection after some seconds and makes another; the user's client waits.

    Sleeps: the freeze has to last.
    """
    with open_pool() as pool:
        client = pool.dask_client()
        scheduler: Any = client.run_on_scheduler(os.getpid)
        futures = client.map(lambda n: time.sleep(1.0) or n * n, range(8))
        os.kill(scheduler, signal.SIGSTOP)
        try:
            time.sleep(FROZEN_SECONDS)  # the freeze that is tested
            assert pool.dask_client() is client
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert client.gather(futures) == [n * n for n in range(8)]
        assert pool.submit(double(21)).result(timeout=120) == 42


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_grid_search_on_a_busy_machine() -> None:
    """Workers import scikit-learn in the loop that sends their heartbeats: with a sixteenth of a processor that takes
    half a minute.
    """
    # imported here: it takes longer than the other tests of this file
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    images, labels = load_digits(return_X_y=True)
    search = GridSearchCV(SVC(), {"C": [0.1, 1.0, 10.0], "gamma": [1e-4, 1e-3, 1e-2]}, cv=3)
    expected = np.array(search.fit(images, labels).cv_results_["mean_test_score"])
    with open_pool() as pool, busy(BUSY_PROCESSES):
        with joblib.parallel_config("dask", client=pool.dask_client(), wait_for_workers_timeout=120):
            search.fit(images, labels)
        assert np.array_equal(search.cv_results_["mean_test_score"], expected)
        assert pool.submit(double(21)).result(timeout=180) == 42
