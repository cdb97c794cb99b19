"""Futures of calls: they behave as Python's, and are small, because a map of 100,000 calls has 100,000 of them."""

import threading
import time
import tracemalloc
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import UTC, datetime
from typing import Any

import pytest

from skyward_core.compute import PendingCompute
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.cluster import Cluster
from skyward_core.engine.futures import CallFuture, SmallCondition
from skyward_core.machines.instances import Lease
from skyward_core.transport.transport import Transports
from tests.conftest import wait_until

CALLS = 5_000
BYTES_PER_CALL = 1_100  # 900 now; 2,200 before
BYTES_PER_FUTURE = 600  # 420 on Python 3.13; with a threading.Condition of its own 1,700


def test_a_future_is_small() -> None:
    """The memory of one call until its result is read, without the result."""
    ids = [str(number) for number in range(CALLS)]
    stop = ids.append
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        futures = [CallFuture[int](call_id, stop) for call_id in ids]
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / len(futures) < BYTES_PER_FUTURE


def test_a_call_that_waits_is_small() -> None:
    """The client's memory for a tiny call that was not sent yet: its arguments, its place in the queue, its future."""
    lease = Lease(pool_id="p", provider={"name": "local"}, created_at=datetime.now(UTC))
    cluster = Cluster(lease, PoolCertificate("", ""), Transports(60.0, lambda _: None), lambda _: None)
    cluster.submit(PendingCompute(abs, (number,)) for number in range(10))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        futures = cluster.submit(PendingCompute(abs, (number,)) for number in range(CALLS))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / len(futures) < BYTES_PER_CALL


def test_several_threads_wait_for_one_future() -> None:
    """All are woken, also one with a short timeout; the future is then done for later callers.

    Looks inside: only the condition knows who waits.
    """
    future = CallFuture[int]("a", print)
    got = list[int]()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    threads = [threading.Thread(target=lambda: got.append(future.result(timeout=30))) for _ in range(5)]
    for thread in threads:
        thread.start()
    condition: Any = future._condition
    wait_until(lambda: len(condition._waiters) == 5, "all to wait")
    assert future.set_running_or_notify_cancel()
    future.set_result(7)
    for thread in threads:
        thread.join()
    assert got == [7] * 5
    assert condition._waiters == ()
    assert future.result() == 7


def test_waiting_for_some_futures_of_many_works() -> None:
    """`wait`, callbacks and cancelling are those of Python."""
    stopped = list[str]()
    ours, theirs = [CallFuture[int](str(number), stopped.append) for number in range(3)], Future[int]()
    called = list[object]()
    ours[0].add_done_callback(called.append)
    timer = threading.Timer(0.05, lambda: ours[0].set_result(1))
    timer.start()
    done, _ = wait([*ours, theirs], timeout=30, return_when=FIRST_COMPLETED)
    timer.join()
    assert done == {ours[0]}
    assert called == [ours[0]]
    assert ours[1].cancel()
    assert stopped == ["1"]
    assert ours[1].cancelled()
    assert not ours[0].cancel()


def test_an_interrupted_wait_leaves_no_waiter() -> None:
    """The lock is held again after a wait, in whatever way it ended, and no waiter is left.

    Looks inside: only the condition knows who waits.
    """
    condition = SmallCondition()
    with condition:
        started = time.monotonic()
        assert not condition.wait(0.02)
        assert time.monotonic() - started >= 0.02
        assert condition._waiters == ()
        condition.notify_all()
