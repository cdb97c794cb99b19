"""What an attached process has after it was the steward of its pool for a while (`Attached.keep`, `keep_no_more`)."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.compute import PendingCompute
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.cluster import Cluster
from skyward_core.errors import NodeLost
from skyward_core.events.queue import EventQueue
from skyward_core.machines.instances import Instance, InstanceState, Lease, Node
from skyward_core.session.attached import Attached
from tests.conftest import wait_until

RANKS = [0, 1, 2]
LEASE_SECONDS = 1.0
KEEPER: Any = SimpleNamespace(cut=lambda: None)
"""Handles the loss of the scheduler while this process keeps the pool; it does nothing."""


def lease() -> Lease:
    nodes = tuple(
        Node(
            instance=Instance(
                id=f"i-{rank}",
                provider="local",
                pool_id="p",
                rank=rank,
                state=InstanceState.RUNNING,
                region="here",
                instance_type="process",
            ),
            rank=rank,
        )
        for rank in RANKS
    )
    return Lease(pool_id="p", provider={"name": "local"}, nodes=nodes, created_at=datetime.now(UTC))


@pytest.fixture
def attached() -> Iterator[Attached]:
    """An attachment that has no connection to its three nodes."""
    it = Attached(lease(), None, None, LEASE_SECONDS, 0, EventQueue(lambda _: None))
    it.cluster = Cluster(it.lease, PoolCertificate("", ""), it.transports, it.emit)
    it.is_running = True
    yield it
    it.stop("the test has ended")


@pytest.fixture
def resumed(attached: Attached, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The head is reached, and its scheduler does not answer: a list of the attempts."""
    attempts: list[str] = []

    def resume(address: str, _: float) -> None:
        attempts.append(address)
        raise NodeLost("the scheduler does not answer")

    head = SimpleNamespace(is_connected=True, address=lambda address: address)
    monkeypatch.setattr(attached.transports, "to", lambda _: head)
    monkeypatch.setattr(attached.cluster, "resume", resume)
    return attempts


@pytest.mark.usefixtures("resumed")
def test_broadcasts_use_all_nodes_after_another_process_has_taken_the_pool(attached: Attached) -> None:
    """They would return no result at all, and no error, if they had no ranks."""
    cluster = attached.cluster
    assert cluster is not None
    cluster.keep(None, None, RANKS)
    attached.keep(KEEPER)
    attached.keep_no_more()
    assert len(cluster.broadcast(PendingCompute(abs, (1,)))) == len(RANKS)


def refusal(cluster: Cluster) -> str:
    """Return why a call is refused; "" if it is not."""
    try:
        cluster.submit([PendingCompute(abs, (1,))])
    except NodeLost as error:
        return str(error)
    return ""


def test_a_scheduler_that_was_out_of_reach_is_looked_for_by_the_process_that_keeps_the_pool_no_more(
    attached: Attached, resumed: list[str]
) -> None:
    """The steward's recovery would have done it. If it does not answer, calls raise NodeLost after the lease."""
    cluster = attached.cluster
    assert cluster is not None
    given_up: list[Exception] = []
    attached.on_given_up = given_up.append
    attached.keep(KEEPER)
    attached.keep_no_more()
    wait_until(lambda: resumed, "an attempt")
    assert not refusal(cluster)
    wait_until(lambda: refusal(cluster), "the end of the lease")
    assert "the head of the pool is gone" in refusal(cluster)
    wait_until(lambda: [str(error) for error in given_up] == [refusal(cluster)], "the news of it", 5)


def test_a_connection_that_was_cut_is_none(attached: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its end is tidied up: a steward that begins then must reach the scheduler again."""
    cluster = attached.cluster
    assert cluster is not None
    monkeypatch.setattr(cluster.owner, "connection", SimpleNamespace(send=lambda _: None))
    epoch = cluster.dispatcher.connected(0.0)
    assert cluster.is_connected
    cluster.dispatcher.cut(epoch)
    assert not cluster.is_connected
    cuts: list[int] = []
    attached.keep(SimpleNamespace(cut=lambda: cuts.append(1)))  # type: ignore[arg-type]
    assert cuts == [1]


def test_two_cuts_make_one_search(attached: Attached, resumed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds the connection of the first."""
    cluster = attached.cluster
    assert cluster is not None

    def resume(address: str, _: float) -> None:
        resumed.append(address)
        cluster.dispatcher.connected(0.0)

    monkeypatch.setattr(cluster, "resume", resume)
    attached.cut()
    attached.cut()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "skyward-resume"], "the searches")
    assert len(resumed) == 1
