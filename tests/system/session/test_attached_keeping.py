"""How an attached process finds its scheduler again, and what it has after it was the steward for a while."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.compute import PendingCompute
from skyward_core.engine import cluster as engine_cluster
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.cluster import Cluster
from skyward_core.errors import BudgetExceeded, NodeLost, PoolClosed
from skyward_core.events.queue import EventQueue
from skyward_core.session.attached import Attached
from skyward_core.worker.scheduler_messages import Resumed
from tests.conftest import wait_until
from tests.session.attached import RANKS, lease

KEEPER: Any = SimpleNamespace(cut=lambda: None)
"""Handles the loss of the scheduler while this process keeps the pool; it does nothing."""


@pytest.fixture
def attached() -> Iterator[Attached]:
    """An attachment that has no connection to its three nodes."""
    it = Attached(lease(), None, None, 1.0, 0, EventQueue(lambda _: None))
    it.cluster = Cluster(it.lease, PoolCertificate("", ""), it.transports, it.emit)
    it.is_running = True
    yield it
    it.stop("the test has ended")


@pytest.fixture
def cluster(attached: Attached) -> Cluster:
    assert attached.cluster is not None
    return attached.cluster


@pytest.fixture
def resumed(attached: Attached, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The head is reached, and its scheduler does not answer: a list of the attempts."""
    attempts: list[str] = []

    def resume(address: str, _: float) -> None:
        attempts.append(address)
        raise NodeLost("the scheduler does not answer")

    head = SimpleNamespace(is_connected=True, address=lambda address: address)
    monkeypatch.setattr(attached.transports, "to", lambda _: head)
    monkeypatch.setattr(cluster, "resume", resume)
    return attempts


def searches() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "skyward-resume"]


def refusal(cluster: Cluster) -> str:
    """Return why a call is refused; "" if it is not."""
    try:
        cluster.submit([PendingCompute(abs, (1,))])
    except NodeLost as error:
        return str(error)
    return ""


def test_a_process_that_keeps_the_pool_no_more_uses_all_nodes_and_looks_for_the_scheduler(
    attached: Attached, cluster: Cluster, resumed: list[str]
) -> None:
    """The steward's recovery would have done it. If it does not answer, calls raise NodeLost after the lease."""
    given_up: list[Exception] = []
    attached.on_given_up = given_up.append
    cluster.keep(None, None, RANKS)
    attached.keep(KEEPER)
    attached.keep_no_more()
    assert len(cluster.broadcast(PendingCompute(abs, (1,)))) == len(RANKS)
    wait_until(lambda: resumed, "an attempt")
    assert not refusal(cluster)
    wait_until(lambda: refusal(cluster), "the end of the lease")
    assert "the head of the pool is gone" in refusal(cluster)
    wait_until(lambda: [str(error) for error in given_up] == [refusal(cluster)], "the news of it")


def test_a_connection_that_was_cut_is_none(
    attached: Attached, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before its end is tidied up: a steward that begins then must reach the scheduler again."""
    monkeypatch.setattr(cluster.owner, "connection", SimpleNamespace(send=lambda _: None))
    epoch = cluster.dispatcher.connected(0.0)
    assert cluster.is_connected
    cluster.dispatcher.cut(epoch)
    assert not cluster.is_connected
    cuts: list[int] = []
    attached.keep(SimpleNamespace(cut=lambda: cuts.append(1)))  # type: ignore[arg-type]
    assert cuts == [1]


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
        return it


@pytest.fixture
def connections(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Connections:
    return Connections(cluster, monkeypatch)


def test_of_two_that_connect_at_once_the_later_one_stays(
    cluster: Any, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process begins to keep the pool: the search and the recovery. The earlier one must not close the later's.

    Looks inside: the earlier one is slow to disconnect.
    """
    connections.answers = [False, True]
    failures: list[Exception] = []

    def first() -> None:
        try:
            cluster.resume("tls://a", 60.0)
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


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_pool_that_is_left_during_a_search_says_so(
    attached: Attached, cluster: Cluster, connections: Connections, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    """Its calls raise why it has ended, and not that the head is gone. The connection of that moment is closed."""
    head = SimpleNamespace(is_connected=True, address=lambda address: address)
    monkeypatch.setattr(attached.transports, "to", lambda _: head)
    connections.answers = [False]
    given_up: list[Exception] = []
    attached.on_given_up = given_up.append
    [future] = cluster.submit([PendingCompute(abs, (1,))])
    attached.cut()
    wait_until(lambda: connections.made, "the search to wait for its answer")
    if is_ended:
        attached.end("no money", BudgetExceeded("no money"), lambda: None)
    else:
        attached.stop("left")
    with pytest.raises(BudgetExceeded if is_ended else PoolClosed):
        future.result(60)
    wait_until(lambda: not searches(), "the end of the search")
    assert (connections.closed, given_up) == (connections.made, [])


def test_a_search_that_ends_before_the_pool_is_left_says_nothing_of_the_head(
    attached: Attached, cluster: Cluster, resumed: list[str]
) -> None:
    """The user's client is closed first, which may take seconds."""
    cluster.owner.start()
    [future] = cluster.submit([PendingCompute(abs, (1,))])
    attached.user_client = SimpleNamespace(  # type: ignore[assignment]
        close=lambda: wait_until(lambda: not searches(), "the end of the search")
    )
    attached.cut()
    attached.stop("left")
    with pytest.raises(PoolClosed, match="left"):
        future.result(60)
