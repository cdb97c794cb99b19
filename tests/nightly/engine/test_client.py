"""Dask's client for the user, callbacks, and kept values on real pools: closing, freezes, another head."""

import contextlib
import logging
import os
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from skyward_core.engine import connection
from skyward_core.engine.futures import Callbacks
from tests.conftest import RecordedEvents
from tests.system.engine.test_client import connected, gate, loops  # noqa: F401 - fixtures
from tests.waiting import wait_until


def test_a_callback_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """They run in their order; after the end of the thread in the thread that adds them."""
    callbacks, called = Callbacks(), list[int]()

    def fail() -> None:
        raise SystemExit

    for call in (lambda: called.append(1), fail, lambda: called.append(2)):
        callbacks.put(call)
    callbacks.close()
    callbacks.put(lambda: called.append(3))
    wait_until(lambda: len(called) == 3, "the callbacks")
    assert [number for number in called if number != 3] == [1, 2]
    assert "a callback of a call's future has failed" in caplog.text


# ── on this machine: the result may take over the file that the arguments came in
# ────────────────────────────────────────────────────────────

_kept: list[Any] = []


@sky.compute
def keep_and_return(array: Any = None) -> Any:
    if array is None:
        return float(_kept[0][0])
    _kept.append(array)
    return array


def test_a_value_kept_on_a_node_is_not_shared_with_the_client() -> None:
    """A function that keeps its argument and returns it has its own copy: changes of the result by the client do not
    reach it.
    """
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        back = keep_and_return(np.ones(200_000)) >> pool
        back[:] = 5
        assert keep_and_return() >> pool == 1.0


FROZEN_SECONDS, SOON_SECONDS = 20.0, 10.0


# ── on a real pool ───────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def double(n: int) -> int:
    return 2 * n


def open_pool(recorded: RecordedEvents | None = None, **options: Any) -> sky.ComputePool:
    options = {"nodes": 2, "display": "quiet", "collect_metrics": False, **options}
    return sky.ComputePool(provider=sky.Local(), on_event=recorded or RecordedEvents(), **options)


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


def test_a_thread_that_begins_too_late_is_an_error_of_the_connection(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OSError: another try may have more luck. The thread ends when it begins at last."""
    monkeypatch.setattr(connection, "START_SECONDS", 0.01)
    before = loops()
    with pytest.raises(OSError, match="has not begun"):
        connected()
    assert loops() - before
    gate.set()
    wait_until(lambda: not loops() - before, "the late thread to end")
