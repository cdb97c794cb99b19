"""The nodes of a pool by rank. A replacement and a restart of the cluster may drop a node at the same time."""

from skyward_core.errors import Unreachable
from skyward_core.provisioning.nodes import LIVES_SECONDS
from tests.unit.provisioning.test_nodes import (  # noqa: F401 - fixtures
    Pool,
    machine,
    nodes,
    rental,
)


def test_all_nodes_get_a_longer_lease() -> None:
    """The time counts from now."""
    pool = Pool()
    pool.nodes.extend_leases(60)
    assert pool.head.transport.asked == pool.other.transport.asked == [60]


def test_nodes_that_do_not_answer_are_not_among_those_that_live() -> None:
    """Only a machine that answers can say that its processes have died."""
    pool = Pool()
    pool.head.transport.answer, pool.other.transport.answer = False, True
    assert pool.nodes.lives([0, 1, 2]) == {0: False, 2: True}
    assert pool.nodes.lives([2]) == {2: True}
    assert pool.head.transport.asked == [LIVES_SECONDS]
    pool.head.transport.answer, pool.other.transport.answer = Unreachable("silent"), None
    assert pool.nodes.lives([0, 2]) == {}
