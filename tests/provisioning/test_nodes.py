"""The nodes of a pool by rank. A replacement and a restart of the cluster may drop a node at the same time."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import Unreachable
from skyward_core.provisioning.head_restart import HeadRestart
from skyward_core.provisioning.nodes import Nodes


class FakeRental:
    """A rental that rents nothing. It records the nodes that it must end."""

    def __init__(self) -> None:
        self.provider = SimpleNamespace(is_here=False)
        self.ended: list[Any] = []

    def end(self, node: Any) -> None:
        self.ended.append(node)


@pytest.fixture
def rental() -> FakeRental:
    return FakeRental()


@pytest.fixture
def nodes(rental: FakeRental) -> Nodes:
    return Nodes(sky.PoolSpec.of(provider=sky.Local(), nodes=2), "sky-test", rental, Future(), lambda event: None)  # type: ignore[arg-type]


def test_only_the_given_node_is_dropped(nodes: Nodes) -> None:
    """Another node may have its rank by now."""
    first: Any = object()
    second: Any = object()
    nodes.all[1] = second
    assert not nodes.drop(1, first)
    assert nodes.all == {1: second}
    assert nodes.drop(1, second)
    assert not nodes.drop(1, second)
    assert nodes.all == {}


def test_a_node_dropped_by_a_failed_replacement_does_not_fail_the_restart(
    nodes: Nodes, rental: FakeRental, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart sends the new head's address to all nodes.

    Meanwhile the replacement of one node fails, and drops and ends that node.

    Looks inside: the drop comes between two steps of a restart.
    """

    class Dropped:
        def send_settings(self, settings: object) -> None:
            nodes.all.clear()
            raise Unreachable("it does not answer")

    node: Any = Dropped()
    nodes.all[1] = node
    monkeypatch.setattr(nodes, "settings", lambda *_: None)
    restart = HeadRestart.__new__(HeadRestart)
    vars(restart).update(_nodes=nodes, _rental=rental)
    restart._send_or_drop(1, node)
    assert rental.ended == []
