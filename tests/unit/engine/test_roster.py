"""Nodes that come and leave, as the dispatcher of a process sees them that does not keep the pool."""

from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.fetches import KNOWN_SECONDS
from skyward_core.worker.scheduler_messages import HELD, PoolRanks, Resumed, WorkerHeld, WorkerJoined, WorkerLeft
from tests.engine.model import machine_id, node_of
from tests.unit.engine.test_dispatcher import ADDRESSES, Pool, entry, value


def news(pool: Pool, message: Any) -> None:
    pool.dispatcher.pool_news(pool.epoch, message, 0.0)


def with_a_new_node() -> Pool:
    """A pool whose third node this client does not know."""
    pool = Pool()
    news(pool, WorkerJoined("2-0", "tls://two", machine_id(2)))
    return pool


def test_broadcasts_use_the_ranks_that_stay_and_are_known() -> None:
    """Only in a process that follows another one, and again when it learns of a node."""
    pool = with_a_new_node()
    news(pool, PoolRanks(frozenset({0, 2})))
    assert pool.take(do.UseRanks) == []
    pool.dispatcher.follow(is_following=True)
    assert [action.ranks for action in pool.take(do.UseRanks)] == [frozenset({0})]
    pool.dispatcher.know([node_of(2, 2, 1, 1)])
    assert [action.ranks for action in pool.take(do.UseRanks)] == [frozenset({0, 2})]
    pool.dispatcher.follow(is_following=False)
    news(pool, PoolRanks(frozenset({0})))
    assert pool.take(do.UseRanks) == []


def test_the_answer_to_a_new_connection_has_the_ranks_and_the_machines() -> None:
    pool = Pool(workers=[])
    pool.dispatcher.follow(is_following=True)
    pool.epoch = pool.dispatcher.connected(0.0)
    workers = {"tls://zero": ("0-0", "running"), "tls://one": ("1-0", HELD)}
    instances = {"tls://zero": machine_id(0), "tls://one": machine_id(5)}
    pool.dispatcher.resumed(
        pool.epoch,
        Resumed(0, 0, is_known=True, tasks={}, workers=workers, instances=instances, ranks=frozenset({0})),
        0.0,
    )
    assert pool.dispatcher.members.strange_nodes() == {1: machine_id(5)}
    assert [action.ranks for action in pool.take(do.UseRanks)] == [frozenset({0})]


def test_a_broadcast_that_has_begun_goes_to_a_node_that_is_to_leave() -> None:
    """It waits for such calls, and none takes its place. Other calls do not go there."""
    pool = Pool(workers=["1-0"])
    pool.dispatcher.follow(is_following=True)
    news(pool, WorkerHeld(ADDRESSES["1-0"], 0))
    assert pool.submit(entry("bound", worker="1-0"), entry("other")) == []
    news(pool, PoolRanks(frozenset({0})))
    (sent,) = pool.take(do.Send)
    assert (sent.address, [call.call_id for call in sent.batch.calls]) == (ADDRESSES["1-0"], ["bound"])


def test_a_new_node_gives_its_slots_when_it_is_known() -> None:
    pool = with_a_new_node()
    assert len(pool.submit(*map(entry, "abc"))) == 2
    pool.dispatcher.know([node_of(2, 2, 1, 1)])
    assert len(pool.take(do.Send)) == 1


def test_a_large_value_of_a_new_node_waits_until_the_node_is_known() -> None:
    """The scheduler sends calls there at once, before this client knows how to reach it."""
    pool = with_a_new_node()
    pool.submit(entry("a"), entry("b"))
    pool.report(value("a", f"/dev/shm/{machine_id(2)}/a"), node=2)
    (fetch,) = pool.take(do.Fetch)
    assert (fetch.instance_id, pool.dispatcher.fetching_at()) == (machine_id(2), {machine_id(2)})
    pool.dispatcher.not_fetched("a", str(fetch.parcel.path), OSError("not known yet"), is_cut=True)
    pool.dispatcher.tick(KNOWN_SECONDS - 1, lambda instance_id: False)
    assert (pool.take(do.Fetch), pool.errors()) == ([], {})
    pool.dispatcher.know([node_of(2, 2, 1, 1)])
    pool.dispatcher.tick(KNOWN_SECONDS - 1, lambda instance_id: True)
    assert len(pool.take(do.Fetch)) == 1
    pool.report(value("b", f"/dev/shm/{machine_id(9)}/b"), node=9)
    assert list(pool.errors()) == ["b"]


def test_large_values_go_to_no_machine_that_is_not_known() -> None:
    """Another machine has the rank of a known one: its worker is not chosen for them."""
    pool = Pool(workers=["0-0"])
    news(pool, WorkerJoined("1-0", "tls://other", machine_id(5)))
    pool.submit(entry("a"))
    pool.submit(entry("b", is_large=True))
    pool.take(do.AskLoad)
    pool.dispatcher.load_known(pool.epoch, {"0-0": ["skyward-busy"]})
    assert [action.instance_id for action in pool.take(do.Upload)] == [machine_id(0)]


def test_a_node_that_has_left_is_forgotten_with_its_functions() -> None:
    pool = Pool()
    pool.submit(entry("a", is_large=True, worker="1-0"))
    (upload,) = pool.take(do.Upload)
    pool.upload(upload)
    pool.report(value("a"), node=1)
    pool.dispatcher.task_ended(pool.epoch, upload.number, is_finished=True, reason="")
    news(pool, WorkerLeft("1-0", ADDRESSES["1-0"]))
    pool.dispatcher.forget_node(1)
    news(pool, WorkerJoined("1-0", "tls://new", machine_id(1)))
    pool.dispatcher.know([node_of(1, 1, 1, 1)])
    pool.submit(entry("b", is_large=True, worker="1-0"))
    assert [bool(action.functions) for action in pool.take(do.Upload)] == [True], "the function goes there again"
