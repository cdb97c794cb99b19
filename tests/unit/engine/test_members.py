"""Nodes and workers that come and leave: as the members of a pool count them, as the dispatcher of a process that does
not keep the pool sees them, and what a node that is to leave still has.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.calls import KNOWN_SECONDS
from skyward_core.engine.draining import BroadcastRanks, NodeDraining
from skyward_core.engine.state import Members
from skyward_core.wire.info import JOB_PLACE, InstanceInfo, of_call, to_env
from skyward_core.wire.protocol import HELD, PoolRanks, WorkerHeld, WorkerJoined, WorkerLeft
from tests.engine.dispatcher_pool import ADDRESSES, Pool, entry, value
from tests.engine.model import LARGE, machine_id, node_of


def members() -> Members:
    """Two nodes with two workers of four slots each; no worker is present."""
    return Members.of([node_of(rank, rank, 2, 4) for rank in range(2)])


def test_a_node_is_complete_with_its_last_worker() -> None:
    """Once: a worker that joins again does not complete it."""
    pool = members()
    assert (pool.missing(0), pool.has(0)) == ([0, 1], False)
    assert not pool.join("0-1", "tls://b")
    assert pool.missing(0) == [0]
    assert pool.join("0-0", "tls://a")
    assert (pool.missing(0), pool.has(0), pool.has(1)) == ([], True, False)
    assert not pool.join("0-0", "tls://c")
    uneven = Members.of([node_of(0, 0, 1, 4), node_of(1, 1, 2, 4)])
    assert [uneven.names_at(rank) for rank in range(3)] == [["0-0"], ["1-0", "1-1"], ["2-0", "2-1"]]


def test_a_rank_without_a_node_is_not_complete() -> None:
    pool = members()
    assert (pool.missing(7), pool.has(7), pool.names_at(7)) == ([], False, ["7-0", "7-1"])
    assert not pool.join("7-0", "tls://a")
    assert (pool.free, pool.slots, pool.node_of("7-0"), pool.node_of("1-0")) == ([], 1, None, pool.nodes[1])


def test_a_held_worker_is_not_free_and_its_calls_count() -> None:
    """Until it leaves; a worker at another address in its place is not held."""
    pool = members()
    pool.hold("tls://a", 0)
    pool.join("0-0", "tls://a")
    pool.join("0-1", "tls://b")
    assert (pool.held, pool.free, pool.slots) == ({}, ["0-0", "0-1"], 8)
    pool.hold("tls://a", 1)
    pool.hold("tls://b", None)
    assert (pool.free, pool.slots) == ([], 5)
    pool.join("0-0", "tls://a")
    pool.join("0-1", "tls://c")
    assert list(pool.held) == ["tls://a"]
    assert not pool.leave("0-0", "tls://old")
    assert pool.leave("0-0", "tls://a")
    assert pool.held == {}


def test_a_worker_on_an_unknown_machine_is_strange() -> None:
    """A new rank, or another machine in the place of a known one. A worker whose machine is unknown is trusted."""
    pool = members()
    for name, number in (("0-0", 0), ("1-0", 7), ("1-1", None), ("2-0", 2)):
        pool.join(name, f"tls://{name}", "" if number is None else machine_id(number))
    assert pool.strange_nodes() == {1: machine_id(7), 2: machine_id(2)}
    assert [name for name in ("0-0", "1-0", "1-1", "2-0", "3-0") if pool.is_strange(name)] == ["1-0", "2-0"]
    assert [pool.may_have_instance(machine_id(number)) for number in (1, 2, 7, 8)] == [True, True, True, False]
    assert [pool.is_there(machine_id(number)) for number in (0, 7, 8)] == [True, True, False]
    pool.nodes = {rank: node_of(serial, rank, 2, 4) for rank, serial in {0: 0, 1: 7, 2: 2}.items()}
    assert pool.strange_nodes() == {}
    pool.leave("2-0", "tls://2-0")
    assert not pool.is_there(machine_id(2))


def test_a_rank_that_is_not_to_stay_has_left_with_its_last_worker() -> None:
    """Until then its held workers get the calls that may run nowhere else."""
    pool = members()
    for rank in (0, 1):
        pool.join(f"{rank}-0", f"tls://{rank}")
        pool.hold(f"tls://{rank}", 0)
    assert (pool.leaving, pool.left()) == ([], [])
    pool.staying = frozenset({0})
    assert (pool.leaving, pool.left()) == (["1-0"], [])
    pool.leave("1-0", "tls://1")
    assert (pool.leaving, pool.left()) == ([], [1])


# ── a process that does not keep the pool ────────────────────────────────────────────────────────────────────────────


def used(pool: Pool) -> list[frozenset[int]]:
    return [action.ranks for action in pool.take(do.UseRanks)]


def with_a_new_node() -> Pool:
    """A pool whose third node this client does not know."""
    pool = Pool()
    pool.news(WorkerJoined("2-0", "tls://two", machine_id(2)))
    return pool


def test_broadcasts_use_the_ranks_that_stay_and_are_known() -> None:
    """Only in a process that follows another one, and again when it learns of a node."""
    pool = with_a_new_node()
    pool.news(PoolRanks(frozenset({0, 2})))
    assert used(pool) == []
    pool.dispatcher.follow(is_following=True)
    assert used(pool) == [frozenset({0})]
    pool.dispatcher.update_nodes([node_of(2, 2, 1, 1)])
    assert used(pool) == [frozenset({0, 2})]
    pool.dispatcher.follow(is_following=False)
    pool.news(PoolRanks(frozenset({0})))
    assert used(pool) == []


def test_the_answer_to_a_new_connection_has_the_ranks_and_the_machines() -> None:
    pool = Pool()
    pool.dispatcher.follow(is_following=True)
    pool.workers = {"0-0": "running", "1-0": HELD}
    instances = {ADDRESSES["0-0"]: machine_id(0), ADDRESSES["1-0"]: machine_id(5)}
    pool.connect(instances=instances, ranks=frozenset({0}))
    assert (pool.dispatcher.members.strange_nodes(), used(pool)) == ({1: machine_id(5)}, [frozenset({0})])


def test_a_broadcast_that_has_begun_goes_to_a_node_that_is_to_leave() -> None:
    """It waits for such calls, and none takes its place. Other calls do not go there."""
    pool = Pool(workers=["1-0"])
    pool.dispatcher.follow(is_following=True)
    pool.news(WorkerHeld(ADDRESSES["1-0"], 0))
    assert pool.submit(entry("bound", worker="1-0"), entry("other")) == []
    pool.news(PoolRanks(frozenset({0})))
    (sent,) = pool.take(do.Send)
    assert (sent.address, [call.call_id for call in sent.batch.calls]) == (ADDRESSES["1-0"], ["bound"])


def test_a_new_node_gives_its_slots_when_it_is_known() -> None:
    pool = with_a_new_node()
    assert len(pool.submit(*map(entry, "abc"))) == 2
    pool.dispatcher.update_nodes([node_of(2, 2, 1, 1)])
    assert len(pool.take(do.Send)) == 1


def test_a_large_result_of_a_new_node_waits_until_the_node_is_known() -> None:
    """The scheduler sends calls there at once. Later than KNOWN_SECONDS the result is lost."""
    for now, errors, fetches in ((KNOWN_SECONDS, [], 1), (KNOWN_SECONDS + 1, ["a"], 0)):
        pool = with_a_new_node()
        pool.submit(entry("a"))
        pool.report(value("a", f"/dev/shm/{machine_id(2)}/a"), node=2)
        (fetch,) = pool.take(do.Fetch)
        assert (fetch.instance_id, set(pool.dispatcher.fetches_by_instance)) == (machine_id(2), {machine_id(2)})
        pool.dispatcher.not_fetched("a", str(fetch.parcel.path), OSError("not known yet"), is_cut=True)
        pool.tick(KNOWN_SECONDS - 1, is_reachable=False)
        assert (pool.take(do.Fetch), pool.errors()) == ([], {})
        pool.dispatcher.update_nodes([node_of(2, 2, 1, 1)])
        pool.tick(now)
        assert (list(pool.errors()), len(pool.take(do.Fetch))) == (errors, fetches)


def test_large_values_go_to_no_machine_that_is_not_known() -> None:
    """Another machine has the rank of a known one: its worker is not chosen for them."""
    pool = Pool(workers=["0-0"])
    pool.news(WorkerJoined("1-0", "tls://other", machine_id(5)))
    pool.submit(entry("a"))
    pool.submit(entry("b", is_large=True))
    pool.dispatcher.load_known(pool.epoch, {"0-0": ["skyward-busy"]})
    assert [action.instance_id for action in pool.take(do.Upload)] == [machine_id(0)]


def test_a_node_that_has_left_is_forgotten_with_its_functions() -> None:
    pool = Pool()
    assert pool.run(entry("a", is_large=True, worker="1-0")) == []
    pool.news(WorkerLeft("1-0", ADDRESSES["1-0"]))
    pool.dispatcher.remove_node(1)
    pool.news(WorkerJoined("1-0", "tls://new", machine_id(1)))
    pool.dispatcher.update_nodes([node_of(1, 1, 1, 1)])
    pool.submit(entry("b", is_large=True, worker="1-0"))
    assert [bool(action.functions) for action in pool.take(do.Upload)] == [True], "the function goes there again"


# ── a node that is to leave ──────────────────────────────────────────────────────────────────────────────────────────


class Owner:
    """Does at once what the engine's thread would do."""

    def __init__(self, pool: Pool) -> None:
        self.dispatcher = pool.dispatcher
        self.asked = list[str]()

    def run(self, work: Callable[[], Any], timeout_seconds: float) -> Any:
        return work()

    def ask(self, operation: str, *_: Any, **__: Any) -> None:
        self.asked.append(operation)

    def ask_for(self, read: Callable[[object], int], operation: str, *_: Any, **__: Any) -> int:
        self.asked.append(operation)
        return read(0)

    def fetching_from(self, instance_id: str) -> int:
        return 0


def draining_of(pool: Pool) -> tuple[NodeDraining, list[str]]:
    """A draining whose scheduler knows of no call; and what it was asked."""
    owner: Any = Owner(pool)
    return NodeDraining(owner, BroadcastRanks(range(2))), owner.asked


@pytest.mark.parametrize(("worker", "bound"), [("1-0", 1), (None, 0)])
def test_a_call_counts_from_the_choice_of_its_node_on(worker: str | None, bound: int) -> None:
    """Its large arguments go there first, and the scheduler does not know it yet. Until its end the node stays."""
    pool = Pool(workers=["1-0"])
    draining, asked = draining_of(pool)
    pool.submit(entry("a", arguments=LARGE, worker=worker))
    (upload,) = pool.take(do.Upload)
    assert (draining.drain(1), draining.drain(0)) == ((1, bound), (0, 0))
    pool.upload(upload)
    assert [action.address for action in pool.take(do.Send)] == [ADDRESSES["1-0"]]
    assert draining.drain(1) == (1, bound), "its message may be slower than the question"
    pool.end("a", upload.number, node=1)
    assert draining.drain(1) == (0, 0)
    assert "skyward_free" not in asked


def test_a_node_is_not_held_while_a_call_of_a_broadcast_waits_for_it() -> None:
    pool = Pool(workers=["0-0"])
    draining, asked = draining_of(pool)
    pool.submit(entry("a", worker="1-0"))
    assert (draining.drain(1), asked) == ((1, 1), ["skyward_free"])


def test_a_rank_that_is_left_out_waits_for_broadcasts_that_have_begun() -> None:
    """A rank that comes meanwhile is in the next one."""
    ranks = BroadcastRanks([2, 0])
    with ranks.begin() as begun, ranks.begin():
        ranks.leave_out(2)
        ranks.take_in(1)
        ranks.take_in(1)
        assert begun == [0, 2]
        assert [ranks.beginning_at(rank) for rank in (0, 1, 2)] == [2, 0, 2]
    assert (ranks.all, ranks.beginning_at(2)) == ([0, 1], 0)
    ranks.set([3, 1])
    assert ranks.all == [1, 3]


@pytest.mark.parametrize(("place", "expected"), [((1, 3), (1, 3, 3, 6)), (None, (5, 8, 11, 16))])
def test_a_call_of_a_broadcast_counts_the_nodes_of_the_broadcast(
    place: tuple[int, int] | None, expected: tuple[int, ...]
) -> None:
    """Without a place it has the numbers of its node."""
    here = InstanceInfo(
        5, 8, is_head=False, accelerators=[], head_addr="", head_port=1, job_id=JOB_PLACE, worker=1, workers_per_node=2
    )
    more = {"place": place} if place else {}
    info = InstanceInfo(**json.loads(of_call(to_env(here), "job", is_broadcast=place is not None, **more)))
    assert (info.node, info.total_nodes, info.rank, info.world_size) == expected
    assert (info.job_id, info.is_broadcast) == ("job", place is not None)
