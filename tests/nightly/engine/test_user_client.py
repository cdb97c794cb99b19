"""The client that `pool.dask_client()` returns: it is independent of the pool's own connection."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import joblib
import numpy as np
import pytest

import skyward_core as sky
from tests.conftest import RecordedEvents, wait_until
from tests.system.engine.test_user_client import (
    SOON_SECONDS,
)

FROZEN_SECONDS = 20.0
BUSY_PROCESSES = 16


# ── on a real pool ───────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def double(n: int) -> int:
    return 2 * n


def open_pool(recorded: RecordedEvents | None = None, **options: Any) -> sky.ComputePool:
    options = {"nodes": 2, "display": "quiet", "collect_metrics": False, **options}
    return sky.ComputePool(provider=sky.Local(), on_event=recorded or RecordedEvents(), **options)


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
