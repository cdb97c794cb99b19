"""The search of an attached process for its scheduler, which ends: with a connection, with the pool, or with NodeLost."""

import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.compute import PendingCompute
from skyward_core.engine import cluster as engine_cluster
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.cluster import Cluster
from skyward_core.errors import BudgetExceeded, NodeLost, PoolClosed
from skyward_core.events.queue import EventQueue
from skyward_core.session import client_watch
from skyward_core.session.attached import Attached
from skyward_core.wire.protocol import Resumed
from tests.session.attached import lease
from tests.waiting import wait_until


class Connections:
    """The connections that a cluster makes, without a scheduler. `answers`: whether each of them gets an answer."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.closed: list[Any] = []
        self.answers: list[bool] = []
        monkeypatch.setattr(engine_cluster, "connect", lambda *_: None)
        monkeypatch.setattr(engine_cluster, "SchedulerConnection", self.connection)
        cluster.owner.start()

    def connection(self, _: None) -> Any:
        it = SimpleNamespace(is_open=True, epoch=0, send=lambda _: None, ping=lambda _: None)
        it.close = lambda: self.closed.append(it)

        def listen(epoch: int, topic: str, after: int, inbox: Any) -> None:
            it.epoch = epoch
            if self.answers.pop(0):
                inbox.on_resumed(epoch, Resumed(number=0, missed=0, is_known=True, tasks={}))
            self.made.append(it)

        it.listen = listen
        it.introduce = lambda who: None
        return it


class Pool:
    """An attachment whose head is reached, and which has no connection to its scheduler yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attached = Attached(lease(), None, None, 60.0, 0, EventQueue(lambda _: None))
        self.cluster = Cluster(
            self.attached.lease, PoolCertificate("", ""), self.attached.transports, self.attached.emit
        )
        self.attached.cluster, self.attached.is_running = self.cluster, True
        self.given_up: list[str] = []
        self.attached.on_given_up = lambda error: self.given_up.append(str(error))
        head = SimpleNamespace(is_connected=True, address=str)
        monkeypatch.setattr(self.attached.transports, "to", lambda _: head)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    pool = Pool(monkeypatch)
    yield pool
    pool.attached.stop("the test has ended")


def test_a_process_that_keeps_the_pool_no_more_looks_for_the_scheduler_for_one_lease(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steward's recovery would have done it. Then its calls raise NodeLost, and do not wait for ever."""
    tries: list[str] = []

    def resume(address: str, _: float) -> None:
        tries.append(address)
        raise NodeLost("the scheduler does not answer")

    times = count(0.0, 25.0)
    monkeypatch.setattr(client_watch, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(pool.cluster, "resume", resume)
    pool.attached.begin_stewardship(SimpleNamespace(cut=lambda: None))  # type: ignore[arg-type]
    pool.attached.end_stewardship()
    wait_until(lambda: pool.given_up, "the end of the search")
    assert tries
    with pytest.raises(NodeLost, match="the head of the pool is gone") as caught:
        pool.cluster.submit([PendingCompute(abs, (1,))])
    assert pool.given_up == [str(caught.value)]


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_pool_that_is_left_during_a_search_says_so(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    """Its calls raise why it has ended, and not that the head is gone. The connection of that moment is closed."""
    connections = Connections(pool.cluster, monkeypatch)
    connections.answers = [False]
    [future] = pool.cluster.submit([PendingCompute(abs, (1,))])
    pool.attached.watcher.cut()
    wait_until(lambda: connections.made, "the search to wait for its answer")
    if is_ended:
        pool.attached.end("no money", BudgetExceeded("no money"), lambda: None)
    else:
        pool.attached.stop("left")
    with pytest.raises(BudgetExceeded if is_ended else PoolClosed):
        future.result(60)
    names = lambda: [thread.name for thread in threading.enumerate()]
    wait_until(lambda: "skyward-resume" not in names(), "the end of the search")
    assert (connections.closed, pool.given_up) == (connections.made, [])


def test_of_two_that_connect_at_once_the_later_one_stays(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process begins to keep the pool: the search and the recovery. The earlier one must not close the later's.

    Looks inside: the earlier one is slow to disconnect.
    """
    cluster: Any = pool.cluster
    connections = Connections(cluster, monkeypatch)
    connections.answers = [False, True]
    failures: list[Exception] = []

    def first() -> None:
        try:
            cluster.resume("tls://a", 0.5)
        except NodeLost as error:
            failures.append(error)

    thread = threading.Thread(target=first)
    disconnect = cluster._disconnect

    def slow(*only: Any) -> None:
        if threading.current_thread() is thread and connections.made:
            wait_until(lambda: len(connections.made) == 2, "the later connection")
        disconnect(*only)

    monkeypatch.setattr(cluster, "_disconnect", slow)
    thread.start()
    wait_until(lambda: connections.made, "the first one to wait for its answer")
    cluster.resume("tls://a", 60.0)
    thread.join()
    earlier, later = connections.made
    assert (connections.closed, cluster.owner.connection, len(failures)) == ([earlier], later, 1)
