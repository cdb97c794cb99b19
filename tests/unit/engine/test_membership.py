"""The states of nodes and of the head, message by message: what each action carries, and the exact times.

`test_recovery.py` has the histories of whole pools.
"""

from datetime import UTC, datetime

import pytest

from skyward_core.engine.membership import (
    ANNOUNCED,
    DIED,
    FIRST_PAUSE_SECONDS,
    HEAD_PATIENCE_SECONDS,
    HEAD_WORKERS_SECONDS,
    HOLD_SECONDS,
    HOPELESS_SECONDS,
    JOIN_ANEW_SECONDS,
    LATE_SECONDS,
    REJOIN_SECONDS,
    RESTART_WORKERS_AGAIN_SECONDS,
    RESTART_WORKERS_SECONDS,
    Membership,
    Survivors,
)
from skyward_core.engine.membership_actions import (
    AskHead,
    EmitMembershipEvent,
    GiveUp,
    HoldNode,
    MembershipAction,
    ReplaceNode,
    Restart,
    RestartWorkers,
    Resume,
    Retire,
    StandBy,
)
from skyward_core.errors import NoCapacity, PoolClosed
from skyward_core.events.events import ClusterRestarting, Error, InstanceLost, PoolReady, PreemptionNoticed
from skyward_core.machines.instances import Lease, Node
from skyward_core.worker.preemption_notice import Kind, Notice
from tests.engine.model import machine_id, node_of

SOLD_OUT = NoCapacity("sold out")


class View:
    """Three nodes that are all there; a test changes the sets."""

    def __init__(self, nodes: int = 3) -> None:
        self.nodes: list[Node] = [node_of(rank, rank, 1, 1) for rank in range(nodes)]
        self.away: set[int] = set()
        self.ended: dict[int, str] = {}
        self.unconnected: set[int] = set()
        self.noticed: dict[int, tuple[Notice, ...]] = {}

    def has(self, rank: int) -> bool:
        return rank not in self.away

    def missing(self, rank: int) -> list[int]:
        return [0] if rank in self.away else []

    def has_ended(self, rank: int) -> bool:
        return rank in self.ended

    def is_connected(self, rank: int) -> bool:
        return rank not in self.unconnected

    def last_words(self, rank: int) -> str:
        return self.ended.get(rank, "")

    def notices(self, rank: int) -> tuple[Notice, ...]:
        return self.noticed.get(rank, ())


class Pool:
    """The states of a pool and its view."""

    def __init__(self, nodes: int = 3, lease_seconds: float = 600.0) -> None:
        self.view = View(nodes)
        self.membership = Membership(nodes, lease_seconds)

    def turn(self, now: float, *, is_cut: bool = False) -> list[MembershipAction]:
        self.membership.turn(now, self.view, is_cut=is_cut)
        return self.actions()

    def actions(self) -> list[MembershipAction]:
        return list(iter(self.membership.next_action, None))

    def lease(self, *ranks: int) -> Lease:
        nodes = tuple(node for node in self.view.nodes if node.rank in ranks)
        return Lease(pool_id="sky-1", provider={}, nodes=nodes, created_at=datetime(2026, 1, 1, tzinfo=UTC))


def lost(rank: int, reason: str) -> EmitMembershipEvent:
    return EmitMembershipEvent(InstanceLost(machine_id(rank), rank, reason))


def failure(text: str) -> EmitMembershipEvent:
    return EmitMembershipEvent(Error(text))


GONE = "its worker has left the pool"


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_is_lost_after_the_time_to_rejoin() -> None:
    """The time begins again after it was there. The last moment is in time."""
    pool = Pool()
    pool.view.away = {1}
    assert pool.turn(10.0) == []
    pool.view.away = set()
    assert pool.turn(10.0 + REJOIN_SECONDS) == []
    pool.view.away = {1}
    assert pool.turn(20.0) == []
    assert pool.turn(20.0 + REJOIN_SECONDS) == []
    assert pool.turn(20.1 + REJOIN_SECONDS) == [lost(1, GONE), ReplaceNode(1)]
    assert pool.turn(99.0) == []


def test_a_node_that_has_ended_is_lost_at_once_with_its_last_words() -> None:
    pool = Pool()
    pool.view.away, pool.view.ended = {2}, {2: "idle for an hour"}
    assert pool.turn(0.0) == [lost(2, f"{GONE} (idle for an hour)"), ReplaceNode(2)]


def test_a_replacement_that_fails_is_tried_again_after_growing_pauses() -> None:
    """Each time its calls are given up. A success ends it."""
    pool = Pool()
    pool.view.away, pool.view.ended = {1}, {1: "broken"}
    pool.turn(0.0)
    now = 100.0
    for pause in (FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS):
        pool.membership.replaced(1, SOLD_OUT, now)
        error, given_up = pool.actions()
        assert error == failure("node 1 is not replaced yet: sold out")
        assert isinstance(given_up, GiveUp)
        assert (str(given_up.error), given_up.error.__cause__, given_up.rank) == (
            "node 1 is lost and not replaced: sold out",
            SOLD_OUT,
            1,
        )
        assert pool.turn(now + pause - 0.1) == []
        assert pool.turn(now + pause) == [ReplaceNode(1)]
        now += pause
    pool.view.away, pool.view.ended = set(), {}
    pool.membership.replaced(1, None, now)
    assert pool.turn(now + 1000.0) == []


def test_the_end_of_the_pool_is_no_failure_of_a_replacement() -> None:
    pool = Pool()
    pool.view.away, pool.view.ended = {1}, {1: "broken"}
    pool.turn(0.0)
    pool.membership.replaced(1, PoolClosed("closed"), 0.0)
    assert pool.actions() == []


def test_absent_workers_of_the_head_are_restarted_and_later_it_is_lost() -> None:
    pool = Pool()
    pool.view.away = {0}
    text = "the scheduler of node 0 answers, but its workers stay away: they are killed and restarted"
    restarted = [EmitMembershipEvent(Error(text, machine_id(0))), RestartWorkers(0, [0])]
    assert pool.turn(0.0) == []
    first = REJOIN_SECONDS + RESTART_WORKERS_SECONDS
    assert pool.turn(first) == []
    assert pool.turn(first + 0.1) == restarted
    again = first + 0.1 + RESTART_WORKERS_AGAIN_SECONDS
    assert pool.turn(again - 0.1) == []
    assert pool.turn(again) == restarted
    pool.turn(50.0)
    pool.turn(REJOIN_SECONDS + HEAD_WORKERS_SECONDS)
    assert pool.membership.has_head
    gone, restarting = pool.turn(REJOIN_SECONDS + HEAD_WORKERS_SECONDS + 0.1)
    reason = "its scheduler answers, but its workers have stayed away for 60 s"
    assert (gone, restarting) == (lost(0, reason), EmitMembershipEvent(ClusterRestarting(reason)))
    assert not pool.membership.has_head
    assert pool.turn(70.0) == [Restart(tuple(pool.view.nodes))]


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_silent_head_is_asked_for_and_resumed_while_it_is_connected() -> None:
    """The next question waits for the answer, and for two seconds."""
    pool = Pool()
    ask, resume = AskHead(pool.view.nodes[0].instance, 5.0), Resume()
    assert pool.turn(5.0, is_cut=True) == [ask, resume]
    assert pool.turn(9.0) == [resume]
    pool.membership.answered(4.0, is_dead=True, is_listed=False)  # about an earlier silence
    assert pool.turn(9.0) == [resume]
    pool.membership.answered(5.0, is_dead=False, is_listed=True)
    assert pool.turn(9.0) == [ask, resume]
    pool.membership.answered(5.0, is_dead=False, is_listed=None)
    assert pool.turn(10.9) == [resume]
    pool.view.unconnected = {0}
    assert pool.turn(11.0) == [ask]
    pool.membership.resumed()
    assert pool.membership.has_head


@pytest.mark.parametrize("how", ["dead", "ended", "unlisted"])
def test_a_head_is_lost_as_soon_as_that_is_known(how: str) -> None:
    """The others are the heirs."""
    pool = Pool()
    pool.turn(5.0, is_cut=True)
    pool.view.unconnected = {0}
    if how == "ended":
        pool.view.ended = {0: "its lease has expired"}
    pool.membership.answered(5.0, is_dead=how == "dead", is_listed=how != "unlisted")
    reason = {"dead": DIED, "ended": "it has ended", "unlisted": "its provider lists it no more"}[how]
    words = " (its lease has expired)" if how == "ended" else ""
    assert pool.turn(6.0) == [
        lost(0, reason + words),
        EmitMembershipEvent(ClusterRestarting(reason)),
        Restart(tuple(pool.view.nodes)),
    ]


@pytest.mark.parametrize(
    ("lease_seconds", "others_answer", "limit"),
    [(600.0, True, HEAD_PATIENCE_SECONDS), (60.0, True, 30.0), (600.0, False, 600.0)],
    ids=["patience", "half the lease", "no other node answers"],
)
def test_a_head_is_silent_for_too_long(lease_seconds: float, others_answer: bool, limit: float) -> None:
    pool = Pool(lease_seconds=lease_seconds)
    pool.view.unconnected = {0} if others_answer else {0, 1, 2}
    pool.turn(100.0, is_cut=True)
    assert pool.turn(100.0 + limit) == []
    assert pool.turn(100.1 + limit)[0] == lost(0, f"it has been silent for {limit:.0f} s")


def test_a_restarted_pool_has_time_to_join_and_replaces_what_the_lease_lacks() -> None:
    """The event has the time since the loss. A node without the new address is lost."""
    pool = Pool()
    before = tuple(pool.view.nodes)
    pool.turn(5.0, is_cut=True)
    pool.view.ended = {0: "broken"}
    pool.turn(6.0)
    pool.view.ended = {}
    pool.view.nodes = [node_of(7, 0, 1, 1), pool.view.nodes[1]]
    pool.membership.restarted(before, [machine_id(2)], pool.lease(0, 1), 4, 16.0)
    assert pool.actions() == [EmitMembershipEvent(PoolReady("sky-1", 2, 4, 10.0)), lost(2, DIED)]
    pool.view.away = {1, 2}
    assert pool.turn(16.0) == [ReplaceNode(2)]
    assert pool.turn(16.0 + JOIN_ANEW_SECONDS) == []
    assert pool.turn(16.1 + JOIN_ANEW_SECONDS) == [lost(1, GONE), ReplaceNode(1)]


def test_a_restart_that_fails_is_tried_again_until_it_is_hopeless() -> None:
    """The machine that was to be the head is lost too, with the trouble as the reason."""
    pool = Pool()
    before = tuple(pool.view.nodes)
    pool.turn(5.0, is_cut=True)
    pool.view.ended = {0: "broken"}
    pool.turn(6.0)
    pool.view.ended = {}
    pool.view.nodes = [node_of(7, 0, 1, 1), *pool.view.nodes[1:]]
    pool.membership.not_restarted(before, [], SOLD_OUT, pool.view, 10.0)
    assert pool.actions() == [failure("the cluster could not be restarted yet: sold out")]
    assert pool.turn(10.0 + FIRST_PAUSE_SECONDS - 0.1) == []
    assert pool.turn(10.0 + FIRST_PAUSE_SECONDS) == [
        EmitMembershipEvent(InstanceLost(machine_id(7), 0, "the cluster did not come up on it: sold out")),
        Restart(tuple(pool.view.nodes)),
    ]
    pool.membership.not_restarted(tuple(pool.view.nodes), [], SOLD_OUT, pool.view, 6.0 + HOPELESS_SECONDS)
    assert len(pool.actions()) == 1
    pool.view.nodes = pool.view.nodes[:2]
    pool.membership.not_restarted(before, [], SOLD_OUT, pool.view, 6.1 + HOPELESS_SECONDS)
    error, given_up, dropped = pool.actions()
    assert error == failure("the cluster could not be restarted yet: sold out")
    assert isinstance(given_up, GiveUp)
    assert (str(given_up.error), given_up.error.__cause__, given_up.rank) == (
        "the head of the pool is lost, and the cluster could not be restarted: sold out",
        SOLD_OUT,
        None,
    )
    assert dropped == lost(2, "it did not get the address of the new head")
    assert pool.turn(10_000.0, is_cut=True) == []


def test_survivors_are_those_that_answer() -> None:
    """Without any answer those that are connected. The head, and a node that has ended, is none."""
    pool = Pool(5)
    nodes = pool.view.nodes
    pool.view.ended = {4: "broken"}
    pool.view.unconnected = {3}

    def survivors(answers: dict[int, bool]) -> Survivors:
        return pool.membership.survivors(nodes, answers, pool.view)

    assert survivors({0: True, 1: True, 2: False, 4: True}) == Survivors((machine_id(1),), (machine_id(2),))
    assert survivors({2: False}) == Survivors((), (machine_id(2),))
    assert survivors({}) == Survivors((machine_id(1), machine_id(2)), ())


# ── notices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def noticed(rank: int = 1) -> Pool:
    """A notice of two minutes for a node, at time 10: it is held, and a machine is to stand by."""
    pool = Pool()
    pool.view.noticed = {rank: (Notice(Kind.INTERRUPTION, "terminate", 1e9, 120.0),)}
    event, *actions = pool.turn(10.0)
    assert event == EmitMembershipEvent(PreemptionNoticed(machine_id(rank), rank, "terminate", 1e9, 120.0))
    assert actions == ([StandBy(rank, machine_id(rank)), HoldNode(rank, machine_id(rank))] if rank else [])
    return pool


def test_a_node_is_retired_when_its_successor_is_ready_and_its_calls_have_ended() -> None:
    """It is at rest after two looks in a row."""
    pool = noticed()
    name = machine_id(1)
    pool.membership.relieved(1, name, None, 11.0)
    for left, now in ((0, 11.0), (1, 12.0), (0, 13.0), (0, 14.0)):
        assert pool.turn(now - 0.5) == []
        pool.membership.held(1, name, left)
        pool.membership.held(1, "another machine", 0)
        action = Retire if now == 14.0 else HoldNode
        assert pool.turn(now) == [action(1, name)]
    assert pool.turn(20.0) == []
    pool.membership.retired(1, name, is_retired=False)
    assert pool.turn(20.0) == [Retire(1, name)]
    pool.membership.retired(1, name, is_retired=True)
    pool.view.away = {1}
    assert pool.turn(21.0) == [lost(1, f"it was retired; {ANNOUNCED}"), ReplaceNode(1)]


def test_a_node_is_retired_some_seconds_after_its_time() -> None:
    """Though its calls run and no machine stands by."""
    pool = noticed()
    name, end = machine_id(1), 10.0 + 120.0 + LATE_SECONDS
    pool.membership.relieved(1, name, SOLD_OUT, 11.0)
    assert pool.actions() == [
        failure("no machine stands by yet for node 1, whose machine is to be taken back: sold out")
    ]
    pool.membership.held(1, name, 3)
    assert pool.turn(11.0 + FIRST_PAUSE_SECONDS) == [StandBy(1, name), HoldNode(1, name)]
    pool.membership.relieved(1, name, SOLD_OUT, 129.0)
    pool.membership.held(1, name, 3)
    assert HoldNode(1, name) in pool.turn(end)
    assert StandBy(1, name) not in pool.turn(end)
    pool.membership.held(1, name, 3)
    assert pool.turn(end + HOLD_SECONDS) == [Retire(1, name)]


def test_the_head_does_not_leave() -> None:
    """Its loss says that it was announced."""
    pool = noticed(0)
    assert pool.turn(20.0) == []
    pool.turn(30.0, is_cut=True)
    pool.view.ended = {0: ""}
    assert pool.turn(31.0)[0] == lost(0, f"it has ended; {ANNOUNCED}")
