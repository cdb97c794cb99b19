"""Questions to all nodes of a pool at the same time."""

from skyward_core.errors import Unreachable
from skyward_core.provisioning.nodes import LIVES_SECONDS
from tests.unit.provisioning.test_nodes import Pool


def test_nodes_that_do_not_answer_are_not_among_those_that_live() -> None:
    """Only a machine that answers can say that its processes have died. All nodes get a longer lease."""
    pool = Pool()
    pool.nodes.extend_leases(60)
    assert pool.head.asked == pool.other.asked == [60]
    pool.head.answer, pool.other.answer = False, True
    assert pool.nodes.lives([0, 1, 2]) == {0: False, 2: True}
    assert pool.nodes.lives([2]) == {2: True}
    assert pool.head.asked == [60, LIVES_SECONDS]
    pool.head.answer, pool.other.answer = Unreachable("silent"), None
    assert pool.nodes.lives([0, 2]) == {}
