"""Ranks that come and leave, message by message, beside the states of nodes (`membership`)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from skyward_core.engine.elastic_ranks import ElasticRanks
from skyward_core.engine.membership import (
    FIRST_PAUSE_SECONDS,
    HOLD_SECONDS,
    JOIN_ANEW_SECONDS,
    LATE_SECONDS,
    REJOIN_SECONDS,
    Membership,
)
from skyward_core.engine.membership_actions import (
    AddNode,
    DrainNode,
    EmitMembershipEvent,
    Free,
    LeaveOut,
    MembershipAction,
    RemoveNode,
    ReplaceNode,
    Restart,
    Retire,
    TakeIn,
)
from skyward_core.engine.scaling import RESTS, Load, ScalingPolicy
from skyward_core.errors import NoCapacity, PoolClosed
from skyward_core.events.events import Error, InstanceLost, NodesScaled
from skyward_core.machines.instances import Lease
from tests.engine.model import machine_id, node_of
from tests.unit.engine.test_membership import View

SOLD_OUT = NoCapacity("sold out")


class Pool:
    """A pool of one to five nodes, with one slot each; a new node is in the view when it has come."""

    def __init__(self, nodes: int = 1, least: int = 1, most: int = 5) -> None:
        self.view = View(nodes)
        self.now = 0.0
        self.membership = Membership(nodes, lease_seconds=600.0)
        self.policy = ScalingPolicy(least, most, 1, 30.0, 300.0)
        if nodes > least:
            self.policy.fix(nodes)
        self.ranks = ElasticRanks(self.membership, self.policy)

    def turn(self, seconds: float = 0.0) -> list[MembershipAction]:
        """Let time pass, take one turn of both, and return what is to be done; events are left out."""
        self.now += seconds
        self.membership.turn(self.now, self.view)
        actions = list(iter(self.membership.next_action, None))
        self.ranks.turn(self.now, self.view)
        actions += [*iter(self.membership.next_action, None), *iter(self.ranks.next_action, None)]
        self.events = [action.event for action in actions if isinstance(action, EmitMembershipEvent)]
        return [action for action in actions if not isinstance(action, EmitMembershipEvent)]

    def comes(self, rank: int) -> None:
        self.view.nodes = [*(node for node in self.view.nodes if node.rank != rank), node_of(rank, rank, 1, 1)]
        self.ranks.added(rank, None, self.now)

    def goes(self, rank: int) -> None:
        """The workers of a node have ended."""
        self.view.away |= {rank}

    def is_gone(self, rank: int) -> None:
        self.view.nodes = [node for node in self.view.nodes if node.rank != rank]
        self.view.away -= {rank}
        self.ranks.removed(rank)

    def scale(self, nodes: int | None) -> list[MembershipAction]:
        self.ranks.fix(nodes)
        return self.turn()

    def drain(self, rank: int, left: int | None = 0, bound: int = 0) -> list[MembershipAction]:
        """Answer a request to drain, and take the next turn that may ask again."""
        self.ranks.drained(rank, machine_id(rank), left, bound)
        return self.turn(HOLD_SECONDS)

    def lose_head(self) -> Restart:
        """The head is lost, and the cluster is up again; return the restart that was requested."""
        self.view.ended = {0: "gone"}
        self.membership.turn(self.now, self.view, is_cut=True)
        self.ranks.turn(self.now, self.view)
        assert self.ranks.next_action() is None
        return self.come_back()

    def come_back(self) -> Restart:
        """The cluster is up again with the same nodes; return the restart that was requested."""
        (restart,) = [one for one in iter(self.membership.next_action, None) if isinstance(one, Restart)]
        nodes = tuple(self.view.nodes)
        lease = Lease(pool_id="sky-1", provider={}, nodes=nodes, created_at=datetime(2026, 1, 1, tzinfo=UTC))
        self.view.ended = {}
        self.membership.restarted(restart.before, (), lease, 1, self.now)
        return restart

    def leave(self, rank: int) -> None:
        """A node that is draining leaves."""
        assert self.drain(rank) == [DrainNode(rank, machine_id(rank))]
        assert self.drain(rank) == [Retire(rank, machine_id(rank))]
        self.ranks.retired(rank, machine_id(rank), self.now, is_retired=True)
        self.goes(rank)
        assert self.turn() == [RemoveNode(rank, machine_id(rank))]
        self.is_gone(rank)


# ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_grows_by_the_lowest_ranks_that_it_lacks() -> None:
    """The event says so once. A node is in broadcasts when its workers have joined; from then on it is replaced."""
    pool = Pool()
    assert pool.scale(3) == [AddNode(1), AddNode(2)]
    assert pool.events == [NodesScaled(3, 1, "pool.scale()")]
    assert pool.turn(100.0) == []
    assert pool.events == []
    pool.comes(2)
    assert pool.turn() == [TakeIn(2)]
    assert pool.membership.ranks == {0, 2}
    pool.goes(2)
    pool.turn()
    assert pool.turn(REJOIN_SECONDS + 0.1) == [ReplaceNode(2)]


def test_a_queue_lets_the_pool_grow() -> None:
    pool = Pool()
    for now in (0.0, 30.0):
        pool.ranks.observe(now, Load(2, is_busy=True))
    assert pool.turn() == [AddNode(1), AddNode(2)]


def test_a_machine_that_is_not_to_be_had_is_tried_again_while_the_number_is_fixed() -> None:
    """After growing pauses, each with an error that says when."""
    pool = Pool()
    pool.scale(2)
    for pause in (FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS):
        pool.ranks.added(1, SOLD_OUT, pool.now)
        assert pool.turn(pause - 0.1) == []
        assert pool.events == [
            Error(
                f"the pool cannot grow, and goes on with 1 node; it tries again in {pause:.0f} s at the earliest: sold out"
            )
        ]
        assert pool.turn(0.1) == [AddNode(1)]


def test_after_a_failure_a_pool_that_grows_by_itself_goes_on_with_what_it_has() -> None:
    """One error for one growth; the machines that do come stay."""
    pool = Pool()
    for now in (0.0, 30.0):
        pool.ranks.observe(now, Load(3, is_busy=True))
    assert pool.turn(30.0) == [AddNode(1), AddNode(2), AddNode(3)]
    pool.ranks.added(1, SOLD_OUT, pool.now)
    pool.ranks.added(3, SOLD_OUT, pool.now)
    assert pool.turn() == []
    assert [event for event in pool.events if isinstance(event, Error)] == [
        Error(
            f"the pool cannot grow, and goes on with 1 node; it tries again in {RESTS.seconds(1):.0f} s at the earliest:"
            " sold out"
        )
    ]
    pool.comes(2)
    assert pool.turn(1000.0) == [TakeIn(2)]
    assert (pool.policy.target, pool.membership.ranks) == (2, {0, 2})


def test_a_rank_that_waits_for_its_next_try_is_called_off() -> None:
    pool = Pool()
    pool.scale(2)
    pool.ranks.added(1, SOLD_OUT, pool.now)
    assert pool.scale(1) == []
    assert pool.turn(1000.0) == []
    assert pool.ranks.is_at_rest


def test_a_node_that_comes_too_late_is_drained() -> None:
    pool = Pool()
    pool.scale(2)
    assert pool.scale(1) == []
    pool.comes(1)
    assert pool.turn() == [TakeIn(1), LeaveOut(1), DrainNode(1, machine_id(1))]


def test_a_closing_pool_tries_no_more() -> None:
    pool = Pool()
    pool.scale(2)
    pool.ranks.added(1, PoolClosed("the pool is closing"), pool.now)
    assert pool.turn(FIRST_PAUSE_SECONDS) == []
    assert pool.events == []


# ── shrinking ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_highest_rank_leaves_first_and_the_head_never() -> None:
    pool = Pool(3)
    assert pool.scale(2) == [LeaveOut(2), DrainNode(2, machine_id(2))]
    assert pool.events == [NodesScaled(2, 3, "pool.scale()")]
    assert pool.scale(1) == [LeaveOut(1), DrainNode(1, machine_id(1))]
    assert pool.membership.ranks == {0}
    pool.policy.fix(0)
    assert LeaveOut(0) not in pool.turn()


def test_a_node_leaves_when_it_was_at_rest_twice_in_a_row() -> None:
    """A call that comes in between, or no answer, begins that again."""
    pool = Pool(2)
    pool.scale(1)
    ask = [DrainNode(1, machine_id(1))]
    assert pool.turn(HOLD_SECONDS) == [], "one request at a time"
    assert pool.drain(1) == ask
    for left, bound in ((1, 0), (0, 1), (None, 0)):
        assert pool.drain(1, left, bound) == ask
        assert pool.drain(1) == ask
    assert pool.drain(1) == [Retire(1, machine_id(1))]


def test_a_node_that_has_left_is_absent_and_may_come_again() -> None:
    """Its rank is free only when its machine is being ended."""
    pool = Pool(2)
    pool.scale(1)
    assert pool.drain(1) == [DrainNode(1, machine_id(1))]
    assert pool.drain(1) == [Retire(1, machine_id(1))]
    pool.ranks.retired(1, machine_id(1), pool.now, is_retired=True)
    assert pool.turn(1.0) == [], "its workers are still there"
    pool.goes(1)
    assert pool.turn() == [RemoveNode(1, machine_id(1))]
    assert pool.events == []
    assert not pool.ranks.is_at_rest
    assert pool.scale(2) == [AddNode(2)]
    pool.is_gone(1)
    assert pool.scale(3) == [AddNode(1)]


def test_a_node_whose_workers_do_not_end_is_removed_after_a_while() -> None:
    pool = Pool(2)
    pool.scale(1)
    pool.drain(1)
    pool.drain(1)
    pool.ranks.retired(1, machine_id(1), pool.now, is_retired=True)
    assert pool.turn(LATE_SECONDS) == []
    assert pool.turn(0.1) == [RemoveNode(1, machine_id(1))]


def test_a_node_that_does_not_take_the_request_to_end_is_asked_again() -> None:
    pool = Pool(2)
    pool.scale(1)
    pool.drain(1)
    pool.drain(1)
    pool.ranks.retired(1, machine_id(1), pool.now, is_retired=False)
    assert pool.turn(HOLD_SECONDS) == [Retire(1, machine_id(1))]


def test_a_node_that_is_wanted_again_gets_calls_again() -> None:
    """Only after the request that is under way: otherwise that one could hold it for ever. A failure is repeated."""
    pool = Pool(2)
    pool.scale(1)
    assert pool.scale(2) == []
    assert pool.drain(1) == [Free(1)]
    pool.ranks.freed(1, is_free=False)
    assert pool.turn(HOLD_SECONDS) == [Free(1)]
    pool.ranks.freed(1, is_free=True)
    assert pool.turn() == [TakeIn(1)]
    assert pool.membership.ranks == {0, 1}
    assert pool.ranks.is_at_rest


def test_a_node_that_was_wanted_again_may_drain_on() -> None:
    pool = Pool(2)
    pool.scale(1)
    pool.ranks.drained(1, machine_id(1), 1, 0)
    pool.scale(2)
    assert pool.scale(1) == []
    assert pool.turn(HOLD_SECONDS) == [DrainNode(1, machine_id(1))]


def test_another_node_comes_for_one_whose_workers_are_ending() -> None:
    pool = Pool(2)
    pool.scale(1)
    pool.drain(1)
    pool.drain(1)
    assert pool.scale(2) == [AddNode(2)]


def test_no_rank_is_beyond_the_most() -> None:
    """The numbers of nodes and the ports end there: another node waits until a rank is free."""
    pool = Pool(2, most=2)
    pool.scale(1)
    pool.drain(1)
    pool.drain(1)
    assert pool.scale(2) == []
    pool.ranks.retired(1, machine_id(1), pool.now, is_retired=True)
    pool.goes(1)
    assert pool.turn() == [RemoveNode(1, machine_id(1))]
    assert pool.turn() == []
    pool.is_gone(1)
    assert pool.turn() == [AddNode(1)]


def test_a_vacant_rank_leaves_before_all_others() -> None:
    """No call waits for it: so its replacement is not rented."""
    pool = Pool(3)
    pool.goes(1)
    pool.turn()
    assert pool.turn(REJOIN_SECONDS + 0.1) == [ReplaceNode(1)]
    pool.membership.replaced(1, SOLD_OUT, pool.now)
    pool.turn()
    pool.view.nodes = [node for node in pool.view.nodes if node.rank != 1]
    assert pool.scale(2) == [LeaveOut(1), DrainNode(1, "")]
    pool.ranks.drained(1, "", 0, 0)
    assert pool.turn() == [RemoveNode(1, "")]


def test_a_vacant_rank_with_calls_of_its_own_is_replaced_first() -> None:
    pool = Pool(2)
    pool.goes(1)
    pool.turn()
    pool.turn(REJOIN_SECONDS + 0.1)
    pool.membership.replaced(1, SOLD_OUT, pool.now)
    pool.turn()
    pool.view.nodes = [node for node in pool.view.nodes if node.rank != 1]
    assert pool.scale(1) == [LeaveOut(1), DrainNode(1, "")]
    pool.ranks.drained(1, "", 0, 1)
    assert TakeIn(1) in pool.turn()
    assert 1 in pool.membership.ranks


def test_a_rank_that_is_being_replaced_does_not_leave() -> None:
    pool = Pool(2)
    pool.goes(1)
    pool.turn()
    pool.turn(REJOIN_SECONDS + 0.1)
    assert pool.scale(1) == []


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bound", [0, 2])
def test_a_node_that_is_lost_while_it_drains(bound: int) -> None:
    """It leaves at once, unless calls can run nowhere else: those need its replacement."""
    pool = Pool(2)
    pool.scale(1)
    pool.drain(1, left=3, bound=bound)
    pool.ranks.drained(1, machine_id(1), 3, bound)
    pool.goes(1)
    assert pool.turn() == []
    assert pool.turn(REJOIN_SECONDS + 0.1) == [DrainNode(1, machine_id(1))], "it asks what is bound to it now"
    pool.ranks.drained(1, machine_id(1), 0, bound)
    actions = pool.turn()
    if not bound:
        assert actions == [RemoveNode(1, machine_id(1))]
        assert [type(event) for event in pool.events] == [InstanceLost]
    else:
        assert actions == [TakeIn(1)]
        assert pool.membership.ranks == {0, 1}
        assert [type(event) for event in pool.events] == [InstanceLost]
        assert pool.turn(0.25) == [ReplaceNode(1)]
        pool.membership.replaced(1, None, pool.now)
        pool.view.away, pool.view.nodes[1] = set(), node_of(7, 1, 1, 1)
        assert pool.turn(0.25) == [LeaveOut(1), DrainNode(1, machine_id(7))], "no call waits for it any more"


def test_a_node_that_falls_silent_just_before_it_drains() -> None:
    """Its machine reports no end. With calls that are bound to it, it is replaced; its loss is reported once."""
    pool = Pool(2)
    pool.goes(1)
    pool.turn()
    pool.scale(1)
    actions, events = list[MembershipAction](), list[object]()
    for _ in range(40):
        turn = pool.turn(0.25)
        actions, events = [*actions, *turn], [*events, *pool.events]
        if DrainNode(1, machine_id(1)) in turn:
            pool.ranks.drained(1, machine_id(1), 0, 1)
    assert actions == [DrainNode(1, machine_id(1)), TakeIn(1), ReplaceNode(1)]
    assert [type(event) for event in events] == [InstanceLost]


def test_a_node_that_is_back_before_its_loss_is_handled_drains_on() -> None:
    """It has calls that can run nowhere else, and is there again: nothing is replaced."""
    pool = Pool(2)
    pool.scale(1)
    pool.drain(1, left=3, bound=1)
    pool.ranks.drained(1, machine_id(1), 3, 1)
    pool.goes(1)
    pool.turn()
    assert pool.turn(REJOIN_SECONDS + 0.1) == [DrainNode(1, machine_id(1))]
    pool.view.away = set()
    pool.ranks.drained(1, machine_id(1), 0, 1)
    assert pool.turn() == []
    assert pool.turn(HOLD_SECONDS) == [DrainNode(1, machine_id(1))]
    assert pool.membership.ranks == {0}


def test_while_the_head_is_away_nothing_begins() -> None:
    """Afterwards a node that is draining has the time of all nodes to join the new head."""
    pool = Pool(2)
    pool.scale(1)
    pool.ranks.drained(1, machine_id(1), 1, 0)
    pool.goes(1)
    restart = pool.lose_head()
    assert [node.rank for node in restart.before] == [0], "a node that leaves does not become the head"
    pool.turn()
    assert pool.turn(JOIN_ANEW_SECONDS) == []
    assert pool.turn(0.1) == [DrainNode(1, machine_id(1))]


def test_after_the_loss_of_the_head_a_node_is_held_again_before_its_workers_end() -> None:
    """The new scheduler knows of no hold, so the node may have got calls."""
    pool = Pool(2)
    pool.scale(1)
    assert pool.drain(1) == [DrainNode(1, machine_id(1))]
    pool.ranks.drained(1, machine_id(1), 0, 0)
    pool.lose_head()
    assert pool.turn(HOLD_SECONDS) == [DrainNode(1, machine_id(1))]
    assert pool.drain(1) == [DrainNode(1, machine_id(1))]
    assert pool.drain(1) == [Retire(1, machine_id(1))]


@pytest.mark.parametrize("lost", ["node", "head"])
def test_a_queue_that_waits_for_a_lost_node_lets_nothing_grow(lost: str) -> None:
    """Nothing was too small. When the node is there again, the queue has the whole time to show that it is."""
    pool = Pool(2, least=2)
    pool.view.ended = {0: "gone"} if lost == "head" else {1: "gone"}
    pool.goes(1)
    pool.membership.turn(pool.now, pool.view, is_cut=lost == "head")
    for now in range(61):
        pool.ranks.observe(float(now), Load(1, is_busy=True))
    assert pool.policy.target == 2
    if lost == "node":
        pool.membership.replaced(1, None, 61.0)
    else:
        pool.come_back()
    pool.ranks.observe(61.0, Load(1, is_busy=True))
    pool.ranks.observe(90.0, Load(1, is_busy=True))
    assert pool.policy.target == 2
    pool.ranks.observe(91.0, Load(1, is_busy=True))
    assert pool.policy.target == 3


def test_a_settled_pool_takes_back_what_is_draining_and_adds_nothing() -> None:
    pool = Pool(3)
    pool.scale(2)
    pool.ranks.settle(is_settled=True)
    assert pool.drain(2, left=1) == [Free(2)]
    pool.ranks.freed(2, is_free=True)
    assert pool.turn() == [TakeIn(2)]
    assert pool.scale(5) == []
    assert pool.ranks.is_at_rest
    pool.ranks.settle(is_settled=False)
    assert pool.turn() == [AddNode(3), AddNode(4)]


def test_a_pool_that_is_settled_no_more_begins_at_once_what_it_has_left() -> None:
    pool = Pool(1)
    assert pool.scale(2) == [AddNode(1)]
    pool.ranks.settle(is_settled=True)
    pool.ranks.added(1, PoolClosed("the pool is left as it is"), pool.now)
    pool.ranks.settle(is_settled=False)
    assert pool.turn() == [AddNode(1)]
