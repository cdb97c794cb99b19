"""The members of a pool: which nodes are complete, which workers are free, and how many calls may be in flight."""

import pytest

from skyward_core.engine.members import Members
from tests.engine.model import machine_id, node_of


def pool() -> Members:
    """Two nodes with two workers of four slots each; no worker is present."""
    return Members.of([node_of(rank, rank, 2, 4) for rank in range(2)])


def test_a_node_is_complete_with_its_last_worker() -> None:
    """It becomes complete once: a worker that joins again does not complete it."""
    members = pool()
    assert (members.missing(0), members.has(0)) == ([0, 1], False)
    assert not members.join("0-1", "tls://b")
    assert (members.missing(0), members.has(0)) == ([0], False)
    assert members.join("0-0", "tls://a")
    assert (members.missing(0), members.has(0), members.has(1)) == ([], True, False)
    assert not members.join("0-0", "tls://c")


def test_a_rank_without_a_node_is_not_complete() -> None:
    """It has as many names of workers as the other nodes, and a worker of it does not count."""
    members = pool()
    assert (members.missing(7), members.has(7)) == ([], False)
    assert (members.names_at(0), members.names_at(7)) == (["0-0", "0-1"], ["7-0", "7-1"])
    assert not members.join("7-0", "tls://a")
    assert (members.free, members.slots) == ([], 1)
    assert members.node_of("7-0") is None
    assert members.node_of("1-0") is members.nodes[1]


def test_a_node_may_have_fewer_workers_than_others() -> None:
    """An absent node may get as many as any."""
    members = Members.of([node_of(0, 0, 1, 4), node_of(1, 1, 2, 4)])
    assert [members.names_at(rank) for rank in range(3)] == [["0-0"], ["1-0", "1-1"], ["2-0", "2-1"]]
    assert members.join("0-0", "tls://a")


def test_a_held_worker_is_not_free_and_its_calls_count() -> None:
    members = pool()
    members.hold("tls://a", 0)
    assert members.held == {}
    members.join("0-0", "tls://a")
    members.join("0-1", "tls://b")
    assert (members.free, members.slots) == (["0-0", "0-1"], 8)
    members.hold("tls://a", 1)
    assert (members.free, members.slots) == (["0-1"], 5)
    members.hold("tls://a", None)
    assert members.slots == 5
    members.hold("tls://b", None)
    assert members.slots == 5


@pytest.mark.parametrize("returns", [False, True])
def test_a_worker_that_is_replaced_is_not_held_any_more(returns: bool) -> None:
    """A worker at the same address stays held, until it leaves."""
    members = pool()
    members.join("0-0", "tls://a")
    members.hold("tls://a", 0)
    members.join("0-0", "tls://a" if returns else "tls://b")
    assert (members.held == {}) is not returns
    assert not members.leave("0-0", "tls://old")
    assert members.leave("0-0", members.workers["0-0"])
    assert (members.workers, members.held) == ({}, {})


def test_an_instance_is_there_with_one_of_its_workers() -> None:
    members = pool()
    members.join("1-1", "tls://a")
    assert [members.is_there(machine_id(number)) for number in range(3)] == [False, True, False]
    assert [members.knows(machine_id(number)) for number in range(3)] == [True, True, False]
    members.clear()
    assert not members.is_there(machine_id(1))


def test_a_worker_on_an_unknown_machine_is_strange() -> None:
    """A new rank, or another machine in the place of a known one. A worker whose machine is unknown is trusted."""
    members = pool()
    members.join("0-0", "tls://a", machine_id(0))
    members.join("1-0", "tls://b", machine_id(7))
    members.join("1-1", "tls://c")
    members.join("2-0", "tls://d", machine_id(2))
    assert members.strange_nodes() == {1: machine_id(7), 2: machine_id(2)}
    assert [members.is_strange(name) for name in ("0-0", "1-0", "1-1", "2-0", "3-0")] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert [members.may_know(machine_id(number)) for number in (1, 2, 7, 8)] == [True, True, True, False]
    assert members.is_there(machine_id(7))
    members.nodes = {rank: node_of(serial, rank, 2, 4) for rank, serial in {0: 0, 1: 7, 2: 2}.items()}
    assert members.strange_nodes() == {}
    members.leave("2-0", "tls://d")
    assert (members.strange_nodes(), members.is_there(machine_id(2))) == ({}, False)


def test_a_rank_that_is_not_to_stay_has_left_with_its_last_worker() -> None:
    """Until then its held workers get the calls that may run nowhere else."""
    members = pool()
    for rank in (0, 1):
        members.join(f"{rank}-0", f"tls://{rank}")
        members.hold(f"tls://{rank}", 0)
    assert (members.leaving, members.left()) == ([], [])
    members.staying = frozenset({0})
    assert (members.leaving, members.left()) == (["1-0"], [])
    members.leave("1-0", "tls://1")
    assert (members.leaving, members.left()) == ([], [1])
