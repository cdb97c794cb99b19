"""A pool whose size changes: when it grows and shrinks, and how its ranks come and leave, message by message."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.engine import recovery
from skyward_core.engine.elastic import RESTS, ElasticRanks, Load, ScalingPolicy
from skyward_core.engine.membership import (
    FIRST_PAUSE_SECONDS,
    HOLD_SECONDS,
    JOIN_ANEW_SECONDS,
    LATE_SECONDS,
    REJOIN_SECONDS,
    AddNode,
    DrainNode,
    EmitMembershipEvent,
    Free,
    LeaveOut,
    Membership,
    MembershipAction,
    RemoveNode,
    ReplaceNode,
    Restart,
    Retire,
    TakeIn,
)
from skyward_core.errors import LedgerError, NoCapacity, PoolClosed
from skyward_core.events.events import Error, InstanceLost, NodesScaled
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.machines.instances import Node
from tests.engine.model import machine_id, node_of
from tests.engine.recovery_world import World, lease_of

SOLD_OUT = NoCapacity("sold out")

# ── the policy alone ─────────────────────────────────────────────────────────────────────────────────────────────────

IDLE, BUSY = Load(0, is_busy=False), Load(0, is_busy=True)
UP, DOWN = 30.0, 300.0


def policy_of(least: int = 1, most: int = 8, slots: int = 1) -> ScalingPolicy:
    return ScalingPolicy(least, most, slots, UP, DOWN)


def queue_of(calls: int) -> Load:
    return Load(calls, is_busy=True)


def grown_to(nodes: int) -> ScalingPolicy:
    """A pool of 1 to 8 nodes that has grown, by the time 30."""
    policy = policy_of()
    assert [policy.decide(at, 1, queue_of(nodes - 1)) for at in (0.0, UP)] == [1, nodes]
    return policy


def test_a_pool_grows_when_its_queue_has_waited_long_enough() -> None:
    """By as many nodes as the queue fills, up to the most. A queue that was empty meanwhile waits again."""
    policy = policy_of(slots=2)
    decided = [(10.0, 5, 1), (39.9, 0, 1), (40.0, 5, 1), (69.9, 5, 1), (70.0, 5, 4), (80.0, 100, 4), (110.0, 100, 8)]
    for at, waiting, nodes in decided:
        assert policy.decide(at, policy.target, queue_of(waiting)) == nodes
    assert policy.reason == "100 calls wait for a slot"
    at_once = ScalingPolicy(1, 3, 1, 0.0, 0.0)
    assert [at_once.decide(0.0, 1, queue_of(1)), at_once.decide(0.0, 2, IDLE)] == [2, 1]


def test_a_queue_does_not_count_while_new_nodes_are_on_their_way() -> None:
    """Then it has the whole time again, to show that they are too few."""
    policy = grown_to(3)
    for at, nodes, waiting, target in ((1000, 1, 6, 3), (1001, 2, 6, 3), (1002, 3, 6, 3), (1031.9, 3, 6, 3)):
        assert policy.decide(at, nodes, queue_of(waiting)) == target
    assert policy.decide(1032, 3, queue_of(2)) == 5


def test_an_idle_pool_shrinks_to_the_least_after_a_while() -> None:
    """A call in between begins the time again."""
    policy = grown_to(4)
    for at, load, target in ((100, IDLE, 4), (399.9, IDLE, 4), (400, BUSY, 4), (500, IDLE, 4), (800, IDLE, 1)):
        assert policy.decide(at, 4, load) == target
    assert policy.reason == "no call for 300 s"


def test_after_a_failure_the_pool_goes_on_with_what_it_has_and_rests() -> None:
    """Each growth that fails in a row makes the rest longer; a node that has come ends that. Never below the least."""
    policy = grown_to(4)
    assert [policy.not_grown(100.0), policy.not_grown(100.0), policy.target] == [RESTS.seconds(1), None, 2]
    rested = 100.0 + RESTS.seconds(1)
    for at, target in ((100.0, 2), (rested - 0.1, 2), (rested, 7)):
        assert policy.decide(at, 2, queue_of(5)) == target
    assert policy.not_grown(200.0) == RESTS.seconds(2)
    policy.decide(200.0, policy.target, queue_of(1))
    policy.grown()
    assert policy.not_grown(300.0) == RESTS.seconds(1)
    for _ in range(9):
        policy.not_grown(300.0)
    assert policy.target == 1


def test_a_number_that_the_user_has_set_stays() -> None:
    """Until the pool decides again, from there."""
    policy = policy_of()
    policy.fix(5)
    for at, load in ((0.0, queue_of(9)), (UP, queue_of(9)), (9000.0, IDLE)):
        assert policy.decide(at, 5, load) == 5
    policy.not_grown(9000.0)
    assert (policy.is_fixed, policy.reason, policy.target) == (True, "pool.scale()", 5)
    policy.fix(None)
    assert [policy.decide(at, 5, IDLE) for at in (9001.0, 9001.0 + DOWN)] == [5, 1]


STEPS = st.tuples(st.floats(0, 500), st.integers(0, 10), st.integers(0, 20), st.booleans(), st.booleans())


@given(st.lists(STEPS, max_size=40))
def test_the_number_is_always_within_the_limits(steps: list[tuple[float, int, int, bool, bool]]) -> None:
    """And never shrinks while a call runs or waits, unless a machine could not be had."""
    policy, now = policy_of(2, 6, 2), 0.0
    for seconds, nodes, waiting, is_busy, has_failed in steps:
        now += seconds
        before = policy.target
        target = policy.decide(now, nodes, Load(waiting, is_busy or waiting > 0))
        assert 2 <= target <= 6
        assert target >= before or not (is_busy or waiting)
        if has_failed:
            policy.not_grown(now)
            assert 2 <= policy.target <= 6


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class View:
    """Nodes that are all there; a test changes the sets."""

    def __init__(self, nodes: int) -> None:
        self.nodes: list[Node] = [node_of(rank, rank, 1, 1) for rank in range(nodes)]
        self.away: set[int] = set()
        self.ended: dict[int, str] = {}

    def has(self, rank: int) -> bool:
        return rank not in self.away

    def missing(self, rank: int) -> list[int]:
        return [0] if rank in self.away else []

    def has_ended(self, rank: int) -> bool:
        return rank in self.ended

    def is_connected(self, rank: int) -> bool:
        return True

    def last_words(self, rank: int) -> str:
        return self.ended.get(rank, "")

    def notices(self, rank: int) -> tuple[()]:
        return ()


def drain(rank: int) -> DrainNode:
    return DrainNode(rank, machine_id(rank))


class Pool:
    """A pool of one to five nodes, with one slot each; a new node is in the view when it has come."""

    def __init__(self, nodes: int = 1, least: int = 1, most: int = 5, *, wanted: int | None = None) -> None:
        self.view = View(nodes)
        self.now = 0.0
        self.membership = Membership(nodes, lease_seconds=600.0)
        self.policy = ScalingPolicy(least, most, 1, UP, DOWN)
        if nodes > least:
            self.policy.fix(nodes)
        self.ranks = ElasticRanks(self.membership, self.policy)
        if wanted is not None:
            self.scale(wanted)

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

    def fails(self, rank: int, error: Exception = SOLD_OUT) -> None:
        self.ranks.added(rank, error, self.now)

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

    def answers(self, rank: int, left: int | None = 0, bound: int = 0) -> list[MembershipAction]:
        """Answer a request to drain, and take the next turn that may ask again."""
        self.ranks.drained(rank, machine_id(rank), left, bound)
        return self.turn(HOLD_SECONDS)

    def rests(self, rank: int) -> None:
        """A node that drains is at rest, and is to end."""
        assert [self.answers(rank), self.answers(rank)] == [[drain(rank)], [Retire(rank, machine_id(rank))]]

    def ends(self, rank: int) -> None:
        """A node that is at rest takes the request to end."""
        self.ranks.retired(rank, machine_id(rank), self.now, is_retired=True)

    def is_vacant(self, rank: int) -> None:
        """A node is lost, and not replaced."""
        self.goes(rank)
        self.turn()
        assert self.turn(REJOIN_SECONDS + 0.1) == [ReplaceNode(rank)]
        self.membership.replaced(rank, SOLD_OUT, self.now)
        self.turn()
        self.view.nodes = [node for node in self.view.nodes if node.rank != rank]

    def lose_head(self) -> Restart:
        """The head is lost, and the cluster is up again; return the restart that was requested."""
        self.view.ended = {0: "gone"}
        self.membership.turn(self.now, self.view, is_cut=True)
        self.ranks.turn(self.now, self.view)
        assert self.ranks.next_action() is None
        return self.come_back()

    def come_back(self) -> Restart:
        (restart,) = [one for one in iter(self.membership.next_action, None) if isinstance(one, Restart)]
        self.view.ended = {}
        self.membership.restarted(restart.before, (), lease_of(self.view.nodes), 1, self.now)
        return restart


def test_a_pool_grows_by_the_lowest_ranks_that_it_lacks() -> None:
    """A node is in broadcasts when its workers have joined; from then on it is replaced."""
    pool = Pool()
    assert pool.scale(3) == [AddNode(1), AddNode(2)]
    assert pool.events == [NodesScaled(3, 1, "pool.scale()")]
    assert (pool.turn(100.0), pool.events) == ([], [])
    pool.comes(2)
    assert (pool.turn(), pool.membership.ranks) == ([TakeIn(2)], {0, 2})
    pool.goes(2)
    pool.turn()
    assert pool.turn(REJOIN_SECONDS + 0.1) == [ReplaceNode(2)]


def not_grown(seconds: float) -> Error:
    text = "the pool cannot grow, and goes on with 1 node; it tries again in"
    return Error(f"{text} {seconds:.0f} s at the earliest: sold out")


def test_a_machine_that_is_not_to_be_had_is_tried_again_while_the_number_is_fixed() -> None:
    """After growing pauses, until it is called off."""
    pool = Pool(wanted=2)
    for pause in (FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS):
        pool.fails(1)
        assert (pool.turn(pause - 0.1), pool.events) == ([], [not_grown(pause)])
        assert pool.turn(0.1) == [AddNode(1)]
    pool.fails(1)
    assert (pool.scale(1), pool.turn(1000.0), pool.ranks.is_at_rest) == ([], [], True)


def test_after_a_failure_a_pool_that_grows_by_itself_goes_on_with_what_it_has() -> None:
    """One error for one growth; the machines that do come stay."""
    pool = Pool()
    for now in (0.0, UP):
        pool.ranks.observe(now, Load(3, is_busy=True))
    assert pool.turn(UP) == [AddNode(1), AddNode(2), AddNode(3)]
    pool.fails(1)
    pool.fails(3)
    assert pool.turn() == []
    assert [event for event in pool.events if isinstance(event, Error)] == [not_grown(RESTS.seconds(1))]
    pool.comes(2)
    assert (pool.turn(1000.0), pool.policy.target, pool.membership.ranks) == ([TakeIn(2)], 2, {0, 2})


def test_a_node_that_comes_too_late_is_drained_and_a_closing_pool_tries_no_more() -> None:
    pool = Pool(wanted=2)
    assert pool.scale(1) == []
    pool.comes(1)
    assert pool.turn() == [TakeIn(1), LeaveOut(1), drain(1)]
    pool = Pool(wanted=2)
    pool.fails(1, PoolClosed("the pool is closing"))
    assert (pool.turn(FIRST_PAUSE_SECONDS), pool.events) == ([], [])


def test_the_highest_rank_leaves_first_and_the_head_never() -> None:
    pool = Pool(3)
    assert pool.scale(2) == [LeaveOut(2), drain(2)]
    assert pool.events == [NodesScaled(2, 3, "pool.scale()")]
    assert (pool.scale(1), pool.membership.ranks) == ([LeaveOut(1), drain(1)], {0})
    pool.policy.fix(0)
    assert LeaveOut(0) not in pool.turn()


def test_a_node_leaves_when_it_was_at_rest_twice_in_a_row() -> None:
    """A call that comes in between, or no answer, begins that again. Its rank is free when its machine ends."""
    pool = Pool(2, wanted=1)
    assert pool.turn(HOLD_SECONDS) == [], "one request at a time"
    for left, bound in ((1, 0), (0, 1), (None, 0)):
        assert (pool.answers(1), pool.answers(1, left, bound)) == ([drain(1)], [drain(1)])
    pool.rests(1)
    pool.ends(1)
    assert pool.turn(1.0) == [], "its workers are still there"
    pool.goes(1)
    assert (pool.turn(), pool.events, pool.ranks.is_at_rest) == ([RemoveNode(1, machine_id(1))], [], False)
    assert pool.scale(2) == [AddNode(2)]
    pool.is_gone(1)
    assert pool.scale(3) == [AddNode(1)]


@pytest.mark.parametrize("is_retired", [True, False])
def test_a_node_that_does_not_end_is_asked_again_or_removed(is_retired: bool) -> None:
    pool = Pool(2, wanted=1)
    pool.rests(1)
    pool.ranks.retired(1, machine_id(1), pool.now, is_retired=is_retired)
    if is_retired:
        assert (pool.turn(LATE_SECONDS), pool.turn(0.1)) == ([], [RemoveNode(1, machine_id(1))])
    else:
        assert pool.turn(HOLD_SECONDS) == [Retire(1, machine_id(1))]


def test_a_node_that_is_wanted_again_gets_calls_again() -> None:
    """Only after the request that is under way: that one could hold it for ever. A failure is repeated."""
    pool = Pool(2, wanted=1)
    assert (pool.scale(2), pool.answers(1)) == ([], [Free(1)])
    pool.ranks.freed(1, is_free=False)
    assert pool.turn(HOLD_SECONDS) == [Free(1)]
    pool.ranks.freed(1, is_free=True)
    assert (pool.turn(), pool.membership.ranks, pool.ranks.is_at_rest) == ([TakeIn(1)], {0, 1}, True)
    pool = Pool(2, wanted=1)
    pool.ranks.drained(1, machine_id(1), 1, 0)
    pool.scale(2)
    assert (pool.scale(1), pool.turn(HOLD_SECONDS)) == ([], [drain(1)]), "unwanted again: it drains on"


def test_another_node_comes_for_one_whose_workers_are_ending() -> None:
    """Up to the most: the numbers of nodes and the ports end there. Then it waits until a rank is free."""
    pool = Pool(2, wanted=1)
    pool.rests(1)
    assert pool.scale(2) == [AddNode(2)]
    pool = Pool(2, most=2, wanted=1)
    pool.rests(1)
    assert pool.scale(2) == []
    pool.ends(1)
    pool.goes(1)
    assert (pool.turn(), pool.turn()) == ([RemoveNode(1, machine_id(1))], [])
    pool.is_gone(1)
    assert pool.turn() == [AddNode(1)]


@pytest.mark.parametrize("bound", [0, 1])
def test_a_vacant_rank_leaves_before_all_others(bound: int) -> None:
    """Its replacement is not rented, unless calls of its own wait for it."""
    pool = Pool(3)
    pool.is_vacant(1)
    assert pool.scale(2) == [LeaveOut(1), DrainNode(1, "")]
    pool.ranks.drained(1, "", 0, bound)
    assert (TakeIn(1) if bound else RemoveNode(1, "")) in pool.turn()


def test_a_rank_that_is_being_replaced_does_not_leave() -> None:
    pool = Pool(2)
    pool.goes(1)
    pool.turn()
    pool.turn(REJOIN_SECONDS + 0.1)
    assert pool.scale(1) == []


@pytest.mark.parametrize("end", ["leaves", "is replaced", "is back"])
def test_a_node_that_is_lost_while_it_drains(end: str) -> None:
    """It leaves at once, unless calls can run nowhere else: those need its replacement, if it does not come back."""
    bound = 0 if end == "leaves" else 2
    pool = Pool(2, wanted=1)
    pool.answers(1, left=3, bound=bound)
    pool.ranks.drained(1, machine_id(1), 3, bound)
    pool.goes(1)
    assert pool.turn() == []
    assert pool.turn(REJOIN_SECONDS + 0.1) == [drain(1)], "it asks what is bound to it now"
    pool.view.away = set() if end == "is back" else {1}
    pool.ranks.drained(1, machine_id(1), 0, bound)
    actions, lost = pool.turn(), [type(event) for event in pool.events]
    if end == "is back":
        assert (actions, lost, pool.turn(HOLD_SECONDS), pool.membership.ranks) == ([], [], [drain(1)], {0})
    elif end == "leaves":
        assert (actions, lost) == ([RemoveNode(1, machine_id(1))], [InstanceLost])
    else:
        assert (actions, lost, pool.membership.ranks) == ([TakeIn(1)], [InstanceLost], {0, 1})
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
        if drain(1) in turn:
            pool.ranks.drained(1, machine_id(1), 0, 1)
    assert actions == [drain(1), TakeIn(1), ReplaceNode(1)]
    assert [type(event) for event in events] == [InstanceLost]


def test_while_the_head_is_away_nothing_begins() -> None:
    """A node that leaves does not become the head, and has the time of all nodes to join the new one."""
    pool = Pool(2, wanted=1)
    pool.ranks.drained(1, machine_id(1), 1, 0)
    pool.goes(1)
    assert [node.rank for node in pool.lose_head().before] == [0]
    pool.turn()
    assert (pool.turn(JOIN_ANEW_SECONDS), pool.turn(0.1)) == ([], [drain(1)])


def test_after_the_loss_of_the_head_a_node_is_held_again_before_its_workers_end() -> None:
    """The new scheduler knows of no hold, so the node may have got calls."""
    pool = Pool(2, wanted=1)
    assert pool.answers(1) == [drain(1)]
    pool.ranks.drained(1, machine_id(1), 0, 0)
    pool.lose_head()
    assert pool.turn(HOLD_SECONDS) == [drain(1)]
    pool.rests(1)


@pytest.mark.parametrize("lost", ["node", "head"])
def test_a_queue_that_waits_for_a_lost_node_lets_nothing_grow(lost: str) -> None:
    """When the node is there again, the queue has the whole time to show that the pool is too small."""
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
    for now, target in ((61.0, 2), (90.0, 2), (91.0, 3)):
        pool.ranks.observe(now, Load(1, is_busy=True))
        assert pool.policy.target == target


def test_a_settled_pool_takes_back_what_is_draining_and_adds_nothing() -> None:
    """A pool that is settled no more begins at once what it has left."""
    pool = Pool(3, wanted=2)
    pool.ranks.settle(is_settled=True)
    assert pool.answers(2, left=1) == [Free(2)]
    pool.ranks.freed(2, is_free=True)
    assert pool.turn() == [TakeIn(2)]
    assert (pool.scale(4), pool.ranks.is_at_rest) == ([], True)
    pool.ranks.settle(is_settled=False)
    assert pool.turn() == [AddNode(3)]
    pool.ranks.settle(is_settled=True)
    pool.fails(3, PoolClosed("the pool is left as it is"))
    pool.ranks.settle(is_settled=False)
    assert pool.turn() == [AddNode(3)]


# ── recovery of an elastic pool ──────────────────────────────────────────────────────────────────────────────────────


class ElasticWorld(World):
    """A pool of two nodes that is to have one; its machines and its scheduler only record what is requested."""

    def __init__(self) -> None:
        super().__init__(2)
        self.requested: list[str] = []
        self.refusals: list[Exception] = []
        """What the next questions are answered whether this process is the steward."""
        self.refusals_to_remove: list[Exception] = []
        machines: Any = self.machines
        cluster: Any = self.cluster
        machines.raise_if_not_steward, machines.remove = lambda: raise_next(self.refusals), self.remove
        cluster.draining, cluster.remove_node = self, lambda rank: self.note("forget", rank)
        policy = ScalingPolicy(1, 2, 1, UP, DOWN, 2)
        self.recovery = self.new_recovery(machines, cluster, 2, 600.0, policy)
        self.recovery.fix_size(1)

    def remove(self, rank: int, instance_id: str) -> None:
        raise_next(self.refusals_to_remove)
        self.note("remove", rank)
        self.machines.give_back(rank)

    def note(self, what: str, rank: int) -> tuple[int, int]:
        self.requested.append(f"{what} {rank}")
        return (0, 0)

    # the interface of `draining.NodeDraining`: a node is at rest when it is held

    def take_in(self, rank: int) -> None:
        self.note("take in", rank)

    def leave_out(self, rank: int) -> None:
        self.note("leave out", rank)

    def drain(self, rank: int) -> tuple[int, int]:
        return self.note("hold", rank)

    def free(self, rank: int) -> None:
        self.note("free", rank)


def raise_next(refusals: list[Exception]) -> None:
    if refusals:
        raise refusals.pop(0)


NOT_STEWARD = NotSteward("another process keeps the pool now")


def test_a_node_that_is_not_wanted_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine ends when the ledger has said that this process is the steward; it does not answer twice."""
    monkeypatch.setattr(recovery, "ASK_LEDGER_SECONDS", 0.0)
    world = ElasticWorld()
    world.refusals_to_remove = [LedgerError("away")] * 2
    world.go_on(10.0)
    assert world.requested == ["leave out 1", "hold 1", "hold 1", "remove 1", "forget 1"]
    assert world.refusals_to_remove == []


def test_a_process_that_is_not_the_steward_any_more_holds_and_frees_no_node() -> None:
    """The new steward may be using the node, or taking it out of the pool."""
    world = ElasticWorld()
    world.refusals = [NOT_STEWARD] * 100
    world.go_on(10.0)
    assert world.requested == ["leave out 1"]
    world = ElasticWorld()
    world.turn()
    world.work()
    world.recovery.fix_size(2)
    world.refusals = [NOT_STEWARD]
    world.go_on(1.5)
    assert world.requested == ["leave out 1", "hold 1"]
    world.go_on(2.0)
    assert world.requested == ["leave out 1", "hold 1", "free 1", "take in 1"]
