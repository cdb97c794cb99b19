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


@pytest.fixture
def connections(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """The connections that the cluster makes, without a scheduler and without an answer, and those that it closes."""
    made: list[Any] = []
    closed: list[Any] = []

    def connection(_: None) -> Any:
        it = SimpleNamespace(is_open=True, epoch=0, send=lambda _: None, ping=lambda _: None)
        it.close, it.listen = lambda: closed.append(it), lambda *_: made.append(it)
        return it

    monkeypatch.setattr(engine_cluster, "connect", lambda *_: None)
    monkeypatch.setattr(engine_cluster, "SchedulerConnection", connection)
    cluster.owner.start()
    return made, closed


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_pool_that_is_left_during_a_search_says_so(
    attached: Attached,
    cluster: Cluster,
    connections: tuple[list[Any], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    is_ended: bool,
) -> None:
    """Its calls raise why it has ended, and not that the head is gone. The connection of that moment is closed."""
    head = SimpleNamespace(is_connected=True, address=lambda address: address)
    monkeypatch.setattr(attached.transports, "to", lambda _: head)
    made, closed = connections
    given_up: list[Exception] = []
    attached.on_given_up = given_up.append
    [future] = cluster.submit([PendingCompute(abs, (1,))])
    attached.cut()
    wait_until(lambda: made, "the search to wait for its answer")
    if is_ended:
        attached.end("no money", BudgetExceeded("no money"), lambda: None)
    else:
        attached.stop("left")
    with pytest.raises(BudgetExceeded if is_ended else PoolClosed):
        future.result(60)
    wait_until(lambda: not searches(), "the end of the search")
    assert (closed, given_up) == (made, [])
