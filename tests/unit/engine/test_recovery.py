"""What an open pool does about lost nodes, lost heads and preemption notices, in a model of its machines."""

import ast
import inspect
import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import skyward_core as sky
from skyward_core.engine import membership
from skyward_core.engine.membership import (
    ASK_SECONDS,
    FIRST_PAUSE_SECONDS,
    HEAD_PATIENCE_SECONDS,
    HEAD_WORKERS_SECONDS,
    HOLD_SECONDS,
    HOPELESS_SECONDS,
    LATE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    LOOKS_AT_REST,
    REJOIN_SECONDS,
    RESTART_WORKERS_SECONDS,
)
from skyward_core.errors import NoCapacity, NodeLost
from skyward_core.wire.info import Kind, Notice
from tests.conftest import examples
from tests.engine.recovery_world import NODES, Machine, World


@pytest.fixture
def world() -> World:
    return World()


def replacing(world: World) -> Machine:
    """Node 1 is lost, and its replacement has been requested; return the lost machine."""
    lost = world.cut(1)
    world.turn()
    world.turn(REJOIN_SECONDS + 0.1)
    assert [name for name, _ in world.in_thread] == ["skyward-replace-1"]
    return lost


# ── a node ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_comes_back_soon_is_not_lost(world: World) -> None:
    """However often that happens: no event, no question, no new machine."""
    for _ in range(5):
        world.cut(1)
        world.go_on(REJOIN_SECONDS - 0.5)
        world.mend(1)
        world.go_on(1)
    assert (world.recorded.events, world.machines.replaced, world.machines.restarts) == ([], [], 0)


def test_a_node_that_stays_away_is_lost_once_and_replaced(world: World) -> None:
    """Also its replacement. Two losses do not wait for each other."""
    ids = []
    for _ in range(2):
        ids += [(world.cut(rank).id, rank) for rank in (1, 2)]
        world.go_on(REJOIN_SECONDS - 0.25)
        assert len(world.lost()) == len(ids) - 2
        world.turn(1)
        assert sorted(name for name, _ in world.in_thread) == ["skyward-replace-1", "skyward-replace-2"]
        world.go_on(60)
        assert world.all_are_there()
    assert world.lost() == ids
    assert {type(event) for event in world.recorded.events} == {sky.InstanceLost}
    assert world.cluster.known == world.machines.lease


def test_a_node_that_reports_its_end_is_not_waited_for(world: World) -> None:
    """The event has the last lines of its log."""
    world.kill(2, "the lease ran out")
    world.turn()
    assert world.reasons() == ["its worker has left the pool (the lease ran out)"]


def test_without_capacity_it_is_tried_again_at_growing_intervals(world: World) -> None:
    """With an Error each time. Calls that only that node could run fail; the pool goes on while another node is left."""
    world.has_capacity = False
    world.kill(1)
    world.go_on(4 * HOPELESS_SECONDS, step=0.5)
    times = [at for at, _ in world.machines.replaced]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[:4] == pytest.approx([FIRST_PAUSE_SECONDS, 4, 8, 16], abs=1)
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_SECONDS, abs=1)
    assert {event.message for event in world.recorded.of(sky.Error)} == {"node 1 is not replaced yet: sold out"}
    assert len(world.recorded.of(sky.Error)) == len(times)
    assert {(rank, str(error)) for rank, error in world.cluster.given_up} == {
        (1, "node 1 is lost and not replaced: sold out")
    }
    assert isinstance(world.cluster.given_up[0][1].__cause__, NoCapacity)
    world.has_capacity = True
    world.go_on(LONGEST_PAUSE_SECONDS + 1)
    assert world.all_are_there()
    assert len(world.lost()) == 1


def test_one_rank_is_never_replaced_twice_at_once(world: World) -> None:
    """However long it takes, and whichever nodes come and go."""
    replacing(world)
    for _ in range(20):
        world.cluster.joins(1)
        world.turn(60)
        world.cluster.leaves(1)
        world.turn(60)
    assert [name for name, _ in world.in_thread] == ["skyward-replace-1"]


def test_a_node_that_comes_back_before_its_replacement_is_rented_stays(world: World) -> None:
    """Nothing is rented, and nothing terminated."""
    lost = replacing(world)
    world.mend(1)
    world.work()
    world.go_on(10)
    assert (world.machines.replaced, world.nodes[1]) == ([], lost)
    assert world.all_are_there()


def test_a_head_with_a_frozen_worker_has_it_restarted(world: World) -> None:
    """There is an event, and its supervisor kills the worker and starts it again; the machine stays."""
    world.cluster.leaves(0)
    world.go_on(REJOIN_SECONDS + RESTART_WORKERS_SECONDS)
    assert (world.recorded.events, world.machines.roused) == ([], [])  # a worker that has died is back by then
    world.go_on(1)
    ((at, rank, workers),) = world.machines.roused
    assert (rank, workers) == (0, [0])
    assert at < 5, "with the 14 s of the scheduler that is within twenty"
    assert {event.message for event in world.recorded.of(sky.Error)} == {
        "the scheduler of node 0 answers, but its workers stay away: they are killed and restarted"
    }
    world.go_on(20)
    assert len(world.machines.roused) == 3  # one request may not have arrived
    world.cluster.joins(0)
    world.go_on(100)
    assert len(world.machines.roused) == 3
    assert (world.lost(), world.machines.replaced, world.machines.restarts) == ([], [], 0)


def test_a_head_without_its_worker_is_lost_at_last(world: World) -> None:
    """Another node becomes the head, and the machine is replaced."""
    world.cluster.leaves(0)
    world.go_on(HEAD_WORKERS_SECONDS)
    assert world.lost() == []
    world.go_on(20)
    assert world.reasons() == ["its scheduler answers, but its workers have stayed away for 60 s"]
    assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady)) == 1
    assert world.all_are_there()


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_asked_in_vain", [False, True])
def test_a_head_that_answers_again_is_not_lost(world: World, is_asked_in_vain: bool) -> None:
    """Whatever the provider reports meanwhile. Each cut has the whole patience."""
    world.is_asked_in_vain = is_asked_in_vain
    for count in range(1, 4):
        world.cut(0)
        world.go_on(HEAD_PATIENCE_SECONDS - 1)
        world.mend(0)
        world.go_on(1)
        assert world.cluster.resumed == count
    assert (world.recorded.events, world.machines.replaced, world.machines.restarts) == ([], [], 0)
    assert world.all_are_there()


def test_no_node_counts_as_lost_while_the_head_is_silent(world: World) -> None:
    """Nodes that are away before or meanwhile have the usual time to come back when it answers again."""
    world.cut(1)
    world.go_on(REJOIN_SECONDS - 1)
    world.cut(0)
    world.turn()
    world.nodes[2].lives = False
    world.go_on(HEAD_PATIENCE_SECONDS - 1)
    world.mend(0)
    world.go_on(REJOIN_SECONDS - 1)
    world.mend(1)
    assert world.recorded.events == []
    world.go_on(5)
    assert [rank for _, rank in world.lost()] == [2]
    assert world.all_are_there()


@pytest.mark.parametrize(
    ("how", "seconds", "reason"),
    [
        ("not listed", 1.0, "its provider lists it no more"),
        ("it said so", 0.5, "it has ended (the machine was taken back)"),
        ("its processes died", 0.5, "its processes have died"),
        ("silence", HEAD_PATIENCE_SECONDS + 1, "it has been silent for 45 s"),
    ],
)
def test_a_lost_head_is_succeeded_by_a_node_that_is_left(world: World, how: str, seconds: float, reason: str) -> None:
    """The cluster restarts on the next node, and the vacant rank is filled. Each is emitted once."""
    heir = world.nodes[1]
    if how == "its processes died":
        world.hollow_out(0)
    elif how == "silence":
        world.cut(0)
    else:
        world.kill(0, "the machine was taken back" if how == "it said so" else "")
    world.go_on(seconds)
    assert (world.nodes[0], world.reasons()) == (heir, [reason])
    world.go_on(10)
    kinds = [type(event) for event in world.recorded.events]
    assert kinds == [sky.InstanceLost, sky.ClusterRestarting, sky.PoolReady]
    assert world.all_are_there()
    assert world.recorded.of(sky.PoolReady)[0].nodes >= NODES - 1


@pytest.mark.parametrize("nodes", [1, 3])
def test_if_no_node_answers_the_client_counts_as_cut_off(nodes: int) -> None:
    """No node is abandoned until its lease expires: then the head is lost."""
    world = World(nodes, lease_seconds=120)
    for seconds in (119, 121):
        for rank in world.nodes:
            world.cut(rank)
        world.go_on(seconds)
        if seconds == 119:
            for rank in world.nodes:
                world.mend(rank)
            world.go_on(1)
            assert (world.recorded.events, world.cluster.resumed) == ([], 1)
    assert world.reasons()[0] == "it has been silent for 120 s"


def test_a_head_that_is_silent_longer_than_others_has_its_patience_from_then_on(world: World) -> None:
    for rank in world.nodes:
        world.cut(rank)
    world.go_on(100)
    world.mend(1)
    world.go_on(HEAD_PATIENCE_SECONDS - 1)
    assert world.lost() == []
    world.go_on(2)
    assert world.lost()[0][1] == 0


def test_a_short_lease_shortens_the_patience() -> None:
    """To half of it: the head may end itself after that."""
    world = World(lease_seconds=20)
    world.cut(0)
    world.go_on(9)
    assert world.lost() == []
    world.go_on(2)
    assert [rank for _, rank in world.lost()] == [0]


@pytest.mark.parametrize("missed", [(True, False, True, False), (True, True)])
def test_a_cloud_may_leave_a_machine_out_once(world: World, missed: tuple[bool, ...]) -> None:
    """One listing without the head is no loss; the second in a row is."""
    world.is_cloud = True
    head = world.cut(0)
    for head.is_missed in missed:
        world.turn(ASK_SECONDS)
        assert world.work() == 1, "each turn makes one listing"
    world.turn()
    assert world.reasons() == (["its provider lists it no more"] if len(missed) == 2 else [])


def test_an_outage_of_the_provider_is_not_absence() -> None:
    """The head has its whole patience; an answer counts as soon as it comes. There is one question at a time."""
    for outage, lost_at in ((10, 13), (HEAD_PATIENCE_SECONDS, HEAD_PATIENCE_SECONDS + 1)):
        world = World()
        world.is_asked_in_vain = True
        world.kill(0)
        world.go_on(outage - 1)
        assert world.lost() == []
        world.is_asked_in_vain = outage > 10
        world.go_on(lost_at - outage + 1)
        assert [rank for _, rank in world.lost()] == [0]
    world = World()
    world.cut(0)
    for _ in range(40):
        world.turn(0.5)
    assert [name for name, _ in world.in_thread] == ["skyward-query"]


def test_a_restart_that_fails_is_tried_again(world: World) -> None:
    """A node that fails to become the head is lost too, with an Error; the next one is tried."""
    world.machines.fails_to_restart = 2
    world.kill(0)
    world.go_on(30)
    assert [rank for _, rank in world.lost()] == [0, 0, 0]
    assert len(set(world.lost())) == 3
    assert world.reasons()[1:] == ["the cluster did not come up on it: the new head did not come up in time"] * 2
    assert len(world.recorded.of(sky.Error)) == 2
    assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady)) == 1
    assert world.all_are_there()


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_node_that_does_not_join_the_new_head_is_lost(world: World, is_cut: bool) -> None:
    """Once; it is dropped at the restart, or has some time to join."""
    absent = world.nodes[2]
    world.kill(0)
    if is_cut:
        world.cut(2)
    else:
        absent.lives = False
    world.go_on(HEAD_PATIENCE_SECONDS + 10)
    assert sorted(world.lost(), key=lambda lost: lost[1])[1:] == [(absent.id, 2)]
    assert world.all_are_there()


@pytest.mark.parametrize("comes", [True, False])
def test_a_single_node_that_is_lost_is_replaced(comes: bool) -> None:
    """As soon as a machine is to be had. After HOPELESS_SECONDS all calls raise, and nothing more is rented."""
    world = World(nodes=1)
    world.has_capacity = False
    world.kill(0)
    world.go_on(20 if comes else HOPELESS_SECONDS - 10)
    assert world.cluster.given_up == []
    if comes:
        world.has_capacity = True
        world.go_on(20)
        assert (world.all_are_there(), len(world.lost())) == (True, 1)
        return
    world.go_on(10 + LONGEST_PAUSE_SECONDS)
    ((rank, error),) = world.cluster.given_up
    assert (rank, type(error), type(error.__cause__)) == (None, NodeLost, NoCapacity)
    assert str(error) == "the head of the pool is lost, and the cluster could not be restarted: sold out"
    restarts, world.has_capacity = world.machines.restarts, True
    world.go_on(600, step=10)
    assert world.machines.restarts == restarts


def test_without_any_node_for_long_all_calls_raise(world: World) -> None:
    """The head's scheduler lives, and its worker does not come back: later the head is lost too. Then nothing is rented."""
    world.has_capacity = False
    world.kill(1)
    world.kill(2)
    world.cluster.there.discard(0)
    world.go_on(HOPELESS_SECONDS - 10)
    assert None not in {rank for rank, _ in world.cluster.given_up}
    world.go_on(HEAD_WORKERS_SECONDS + 2 * LONGEST_PAUSE_SECONDS)
    assert [type(error) for rank, error in world.cluster.given_up if rank is None] == [NodeLost]
    tries, world.has_capacity = (len(world.machines.replaced), world.machines.restarts), True
    world.go_on(600, step=10)
    assert (len(world.machines.replaced), world.machines.restarts) == tries


def test_an_unfinished_replacement_does_not_become_the_head(world: World) -> None:
    """A rank that is being replaced has no node yet."""
    replacing(world)
    heir = world.nodes[2]
    world.kill(0, "gone")
    world.turn(0.1)
    assert world.nodes[0] is heir
    world.go_on(10)
    assert world.all_are_there()


def test_a_replacement_that_dies_with_the_head_is_no_loss(world: World) -> None:
    """It had not joined, and cannot get the new head's address: it was never a member."""
    first = replacing(world)
    world.nodes[1] = Machine("on-its-way", is_wired=False)
    head = world.kill(0, "gone")
    world.turn(0.1)
    assert "on-its-way" in world.former
    assert world.lost() == [(first.id, 1), (head.id, 0)]


# ── all processes die, the machines answer ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("nodes", "is_cloud"), [(6, False), (6, True), (1, True)])
def test_if_all_processes_die_at_once_all_nodes_restart_at_once(nodes: int, is_cloud: bool) -> None:
    """Recovery waits for no dead node: one restart, all ranks there within 15 s, and each loss is emitted once."""
    world = World(nodes)
    world.is_cloud = is_cloud
    ids = [(machine.id, rank) for rank, machine in world.nodes.items()]
    for rank in reversed(range(nodes)):
        world.hollow_out(rank)
    world.go_on(15)
    assert world.all_are_there()
    assert (world.machines.restarts, world.machines.replaced, world.cluster.given_up) == (1, [], [])
    assert (sorted(world.lost()), set(world.reasons())) == (ids, {"its processes have died"})
    assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady)) == 1


@pytest.mark.parametrize("mute", [set(), {2}])
def test_a_dead_node_is_not_chosen_as_head(world: World, mute: set[int]) -> None:
    """The next living node is, and the dead one is replaced. A node that is slow to answer is not terminated."""
    other, world.mute = world.nodes[2], mute
    world.hollow_out(1)
    world.hollow_out(0)
    world.go_on(REJOIN_SECONDS - 0.5)
    assert world.nodes[2 if mute else 0] is other
    world.go_on(5)
    assert world.all_are_there()
    assert (world.machines.restarts, len(world.lost())) == (1, 2)


def test_if_no_node_answers_a_connected_one_is_tried(world: World) -> None:
    """A client that is too busy to read the answers does not rent machines because of that."""
    heir, world.mute = world.nodes[1], {0, 1, 2}
    world.kill(0)
    world.go_on(5)
    assert world.nodes[0] is heir
    assert world.all_are_there()


# ── preemption notices ───────────────────────────────────────────────────────────────────────────────────────────────

AT_REST_SECONDS = (LOOKS_AT_REST + 2) * HOLD_SECONDS


def test_a_node_without_calls_is_replaced_at_once(world: World) -> None:
    """Emitted once, held, retired, and replaced by the new machine, before its time is up."""
    machine = world.announce(1)
    world.go_on(AT_REST_SECONDS)
    assert [(event.instance_id, event.node, event.action) for event in world.recorded.of(sky.PreemptionNoticed)] == [
        (machine.id, 1, "terminate")
    ]
    assert (world.machines.retired, machine.id in world.former) == ([machine.id], True)
    assert ["announced" in reason for reason in world.reasons()] == [True]
    assert (world.all_are_there(), world.machines.standing_by) == (True, {})


def test_a_node_with_calls_is_waited_for(world: World) -> None:
    """It gets no more calls. One look without calls is not enough: messages of the last one may be in flight."""
    machine = world.announce(1, calls_left=1)
    world.go_on(40)
    assert (machine.is_held, list(world.machines.standing_by)) == (True, [1])
    machine.calls_left = 0
    world.go_on(HOLD_SECONDS)
    machine.calls_left = 1
    world.go_on(20)
    assert world.machines.retired == []
    machine.calls_left = 0
    world.go_on(AT_REST_SECONDS)
    assert world.machines.retired == [machine.id]
    assert world.all_are_there()


@pytest.mark.parametrize("calls", ["run", "are unknown"])
def test_when_the_time_is_up_a_node_is_lost_with_its_calls(
    world: World, monkeypatch: pytest.MonkeyPatch, calls: str
) -> None:
    """Not earlier, and not much later. A second notice, as a node that restarts logs it, changes nothing."""
    machine = world.announce(1, seconds_left=30, calls_left=1)

    def no_answer(rank: int) -> int:
        raise NodeLost("the scheduler does not answer")

    with monkeypatch.context() as patch:
        if calls == "are unknown":
            patch.setattr(world.cluster, "hold", no_answer)
        world.go_on(15)
        machine.notices = (*machine.notices, Notice(Kind.INTERRUPTION, "terminate", 1e9, 60.0))
        world.go_on(15)
    assert world.machines.retired == []
    world.go_on(LATE_SECONDS + 2 * HOLD_SECONDS)
    assert world.machines.retired == [machine.id]
    assert len(world.recorded.of(sky.PreemptionNoticed)) == 1
    assert world.all_are_there()


def test_a_machine_that_ends_early_is_an_ordinary_loss(world: World) -> None:
    world.announce(1, calls_left=1)
    world.go_on(5)
    (standing_by,) = world.machines.standing_by.values()
    world.kill(1)
    world.go_on(5)
    assert (world.nodes[1], world.machines.retired) == (standing_by, [])
    assert ["announced" in reason for reason in world.reasons()] == [True]


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "on its way"])
def test_a_spare_machine_is_terminated_when_a_restart_has_filled_its_rank(world: World, is_ready: bool) -> None:
    """All processes die at once, and machines are rented for all ranks: a spare one would cost money until the end."""
    world.announce(1, calls_left=1)
    world.go_on(5) if is_ready else world.turn()
    for rank in range(world.size):
        world.hollow_out(rank)
    world.go_on(60)
    assert world.all_are_there()
    assert (world.machines.standing_by, len(world.machines.dismissed)) == ({}, 1)


def test_while_a_machine_is_being_prepared_no_second_one_is_rented(world: World) -> None:
    world.announce(1)
    world.turn()
    world.kill(1)
    for _ in range(100):
        world.turn(0.25)
    assert [name for name, _ in world.in_thread if name != "skyward-query"] == ["skyward-stand-by-1"]
    world.go_on(1)
    assert (world.all_are_there(), world.machines.standing_by) == (True, {})


@pytest.mark.parametrize("trouble", ["sold out", "out of reach"])
def test_a_node_stays_while_nothing_can_be_done(world: World, trouble: str) -> None:
    """No other machine is to be had, or it does not hear that it is to end: the pool tries again."""
    machine = world.announce(1)
    world.has_capacity, machine.is_wired = trouble != "sold out", trouble != "out of reach"
    world.go_on(60)
    assert world.machines.retired == []
    errors = {event.message.partition(" yet")[0] for event in world.recorded.of(sky.Error)}
    assert "no machine stands by" in errors if trouble == "sold out" else True
    world.has_capacity = machine.is_wired = True
    world.go_on(60)
    assert world.machines.retired == [machine.id]
    assert world.all_are_there()


def test_the_head_is_not_replaced_early(world: World) -> None:
    """Its notice is emitted, and named when it is lost. A node with a notice does not become the head."""
    head, leaving, heir = world.announce(0), world.announce(1, seconds_left=400, calls_left=1), world.nodes[2]
    world.go_on(200)
    assert sorted(event.node for event in world.recorded.of(sky.PreemptionNoticed)) == [0, 1]
    assert (head.is_held, world.machines.retired, world.machines.restarts) == (False, [], 0)
    world.kill(0, "asked to")
    world.go_on(10)
    assert ("announced" in world.reasons()[0], world.nodes[0], world.machines.restarts) == (True, heir, 1)
    leaving.calls_left = 0
    world.go_on(20)
    assert world.machines.retired == [leaving.id]
    assert world.all_are_there()


def test_a_recommendation_is_only_emitted(world: World) -> None:
    """The machine may stay for days."""
    world.nodes[1].notices = (Notice(Kind.REBALANCE, "", 1e9),)
    world.go_on(200)
    assert [(event.node, event.at) for event in world.recorded.of(sky.RebalanceRecommended)] == [(1, 1e9)]
    assert (world.nodes[1].is_held, world.lost()) == (False, [])


def test_the_module_that_decides_has_no_thread_clock_or_machine() -> None:
    """`membership` only reads its arguments and returns actions: none of its imports could do more."""
    tree = ast.parse(inspect.getsource(membership))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    values = ("concurrency.backoff", "errors", "events.events", "machines.instances")
    standard = {"__future__", "collections", "collections.abc", "dataclasses", "typing"}
    assert imported <= standard | {f"skyward_core.{name}" for name in (*values, "wire.info")}


# ── any order of events ──────────────────────────────────────────────────────────────────────────────────────────────


def on_a_node(do: Callable[..., object], **drawn: st.SearchStrategy) -> Callable[..., None]:
    """A rule about one of the nodes that there are."""

    def on_one(self: "AnyOrder", data: st.DataObject, **drawn: object) -> None:
        do(self.world, data.draw(st.sampled_from(sorted(self.world.nodes))), **drawn)

    return precondition(lambda self: self.world.nodes)(rule(data=st.data(), **drawn)(on_one))


class AnyOrder(RuleBasedStateMachine):
    """Faults, repairs and time in any order; at the end all is repaired: every rank is there again, and each lost
    instance has exactly one event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.members = set[str]()
        self._note()

    def _note(self) -> None:
        self.members |= {machine.id for rank, machine in self.world.nodes.items() if self.world.cluster.has(rank)}

    kill = on_a_node(World.kill, last_words=st.sampled_from(["", "gone"]))
    cut = on_a_node(World.cut)
    mend = on_a_node(World.mend)
    hollow_out = on_a_node(World.hollow_out)
    announce = on_a_node(World.announce, seconds_left=st.sampled_from([0.0, 2.0, 120.0]), calls_left=st.integers(0, 1))

    @rule(mute=st.sets(st.integers(0, NODES - 1)), has_capacity=st.booleans(), is_asked_in_vain=st.booleans())
    def trouble(self, mute: set[int], has_capacity: bool, is_asked_in_vain: bool) -> None:
        self.world.mute, self.world.has_capacity, self.world.is_asked_in_vain = mute, has_capacity, is_asked_in_vain

    @rule(times=st.integers(1, 2))
    def no_restart(self, times: int) -> None:
        self.world.machines.fails_to_restart = times

    @rule(seconds=st.sampled_from([0.0, 0.25, 2.0, 3.5, 20.0]))
    def turn(self, seconds: float) -> None:
        self.world.turn(seconds)
        self._note()

    @precondition(lambda self: self.world.in_thread)
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        _, work = self.world.in_thread.pop(data.draw(st.integers(0, len(self.world.in_thread) - 1)))
        work()
        self._note()

    @invariant()
    def each_loss_has_one_event_and_each_rank_one_replacement(self) -> None:
        lost = self.world.lost()
        assert len(lost) == len({instance_id for instance_id, _ in lost})
        ranks = [name for name, _ in self.world.in_thread if name.startswith(("skyward-replace", "skyward-stand-by"))]
        assert len(ranks) == len({name.rpartition("-")[2] for name in ranks})

    def teardown(self) -> None:
        world = self.world
        world.has_capacity, world.is_asked_in_vain, world.machines.fails_to_restart = True, False, 0
        world.mute = set()
        for rank in sorted(world.nodes):
            world.mend(rank)
        world.go_on(400, step=1.0)
        self._note()
        if given_up := [rank for rank, _ in world.cluster.given_up if rank is None]:
            assert len(given_up) == 1
            return
        assert world.all_are_there()
        assert not any(machine.notices for rank, machine in world.nodes.items() if rank), (
            "who is taken back is replaced"
        )
        assert world.machines.standing_by == {}, "no machine is rented without need"
        assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady))
        assert self.members & world.former <= {instance_id for instance_id, _ in world.lost()}


AnyOrder.TestCase.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = pytest.mark.generated(AnyOrder.TestCase)
