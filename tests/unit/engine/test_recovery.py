"""What an open pool does about lost nodes and heads: a small model of machines, a manual clock, one turn of recovery at
a time.
"""

import ast
import inspect
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

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
    HOPELESS_SECONDS,
    LONGEST_PAUSE_SECONDS,
    REJOIN_SECONDS,
    RESTART_WORKERS_SECONDS,
)
from skyward_core.engine.recovery import Recovery
from skyward_core.errors import NoCapacity, NodeLost, SkywardError, Unreachable
from skyward_core.machines.instances import Endpoint, Instance, InstanceState, Lease, Node
from skyward_core.provisioning.head_restart import HEIR_SECONDS
from skyward_core.worker.preemption_notice import Kind, Notice
from tests.conftest import RecordedEvents

NODES = 3


@dataclass
class Machine:
    """One machine: whether it lives, whether its connection works, what its log says about its end and about a
    preemption, and how many calls it has left.
    """

    id: str
    lives: bool = True
    is_wired: bool = True
    last_words: str = ""
    is_hollow: bool = False
    """Whether all of its processes have died while it answers: out of memory, or rebooted."""
    is_missed: bool = False
    """Whether the provider leaves it out of its lists, though it may live."""
    notices: tuple[Notice, ...] = ()
    calls_left: int = 0
    is_held: bool = False
    is_retired: bool = False

    @property
    def answers(self) -> bool:
        return self.lives and self.is_wired and not self.is_retired and not self.is_hollow


class World:
    """The true state, which recovery sees only through `FakeMachines` and `FakeCluster`."""

    def __init__(self, nodes: int = NODES, lease_seconds: float = 600.0) -> None:
        self.now = 0.0
        self.size = nodes
        self.names = (f"i-{number}" for number in itertools.count())
        self.nodes: dict[int, Machine] = {rank: Machine(next(self.names)) for rank in range(nodes)}
        self.former: set[str] = set()
        self.has_capacity = True
        self.is_asked_in_vain = False
        self.is_cloud = False
        self.mute: set[int] = set()
        """Ranks that do not answer in time whether they live."""
        self.in_thread: list[tuple[str, Callable[[], None]]] = []
        self.recorded = RecordedEvents()
        self.machines = FakeMachines(self)
        self.cluster = FakeCluster(self)
        self.recovery = Recovery(
            self.machines, self.cluster, nodes, lease_seconds, self.recorded, lambda: self.now, self.moved_to_file
        )

    def moved_to_file(self, name: str, work: Callable[[], None]) -> None:
        self.in_thread.append((name, work))

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def kill(self, rank: int, last_words: str = "") -> Machine:
        machine = self.nodes[rank]
        machine.lives, machine.last_words = False, last_words
        self._goes(rank)
        return machine

    def hollow_out(self, rank: int) -> Machine:
        machine = self.nodes[rank]
        machine.is_hollow = True
        self._goes(rank)
        return machine

    def cut(self, rank: int) -> Machine:
        machine = self.nodes[rank]
        machine.is_wired = False
        self._goes(rank)
        return machine

    def mend(self, rank: int) -> None:
        machine = self.nodes[rank]
        machine.is_wired = True
        if machine.answers:
            self.cluster.joins(rank)

    def announce(self, rank: int, seconds_left: float = 120.0, calls_left: int = 0) -> Machine:
        machine = self.nodes[rank]
        machine.notices = (Notice(Kind.INTERRUPTION, "terminate", 1e9, seconds_left),)
        machine.calls_left = calls_left
        return machine

    def _goes(self, rank: int) -> None:
        if rank == 0:
            self.cluster.is_cut = True
            self.recovery.cut()
        else:
            self.cluster.leaves(rank)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass and recovery take one turn; deferred work is not done meanwhile."""
        self.now += seconds
        self.recovery.turn()

    def work(self) -> int:
        """Do the deferred work; return how many pieces there were."""
        works, self.in_thread = self.in_thread, []
        for _, work in works:
            work()
        return len(works)

    def go_on(self, seconds: float, step: float = 0.25) -> None:
        """Let time pass in small steps, with deferred work done in between."""
        end = self.now + seconds
        while self.now < end:
            self.turn(step)
            self.work()
        self.turn()

    def lost(self) -> list[tuple[str, int]]:
        return [(event.instance_id, event.node) for event in self.recorded.of(sky.InstanceLost)]

    def all_are_there(self) -> bool:
        return all(self.cluster.has(rank) and self.nodes[rank].answers for rank in range(self.size))


class FakeMachines:
    """The interface of `lifecycle.PoolMachines`, with its rules: `replace` and `restart` terminate the replaced
    machines, and drop machines that they cannot reach.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.replaced: list[tuple[float, int]] = []
        self.standing_by: dict[int, Machine] = {}
        self.retired: list[str] = []
        self.dismissed: list[str] = []
        self.roused: list[tuple[float, int, list[int]]] = []
        self.restarts = 0
        self.fails_to_restart = 0
        self.on_restart: Callable[[], None] = lambda: None

    @property
    def lease(self) -> Lease:
        nodes = tuple(
            Node(instance=instance(machine.id, rank, self.world.is_cloud), rank=rank)
            for rank, machine in sorted(self.world.nodes.items())
        )
        return Lease(pool_id="pool", provider={}, nodes=nodes, created_at=datetime(2026, 1, 1, tzinfo=UTC))

    @property
    def scheduler(self) -> str:
        return f"tls://{self.world.nodes[0].id}"

    def living(self) -> set[str]:
        if self.world.is_asked_in_vain:
            raise ConnectionError("the provider's API is down")
        return {machine.id for machine in self.world.nodes.values() if machine.lives and not machine.is_missed}

    def has_ended(self, rank: int) -> bool:
        machine = self.world.nodes.get(rank)
        return machine is None or bool(machine.last_words)

    def is_connected(self, rank: int) -> bool:
        machine = self.world.nodes.get(rank)
        return machine is not None and machine.is_wired

    def last_words(self, rank: int) -> str:
        machine = self.world.nodes.get(rank)
        return machine.last_words if machine is not None else ""

    def notices(self, rank: int) -> tuple[Notice, ...]:
        machine = self.world.nodes.get(rank)
        return machine.notices if machine is not None else ()

    def stand_by(self, rank: int) -> None:
        if rank not in self.standing_by:
            if not self.world.has_capacity:
                raise NoCapacity("sold out")
            self.standing_by[rank] = Machine(next(self.world.names))

    def dismiss(self, rank: int) -> None:
        if (machine := self.standing_by.pop(rank, None)) is not None:
            machine.lives = False
            self.dismissed.append(machine.id)

    def retire(self, rank: int, instance_id: str) -> None:
        machine = self.world.nodes.get(rank)
        if machine is None or machine.id != instance_id:
            return
        if not machine.answers:
            raise Unreachable("it does not answer")
        machine.is_retired = True
        self.retired.append(instance_id)
        self.world.cluster.leaves(rank)

    def restart_workers(self, rank: int, workers: Sequence[int]) -> None:
        self.roused.append((self.world.now, rank, list(workers)))

    def replace(self, rank: int, is_there: Callable[[], bool]) -> None:
        self.replaced.append((self.world.now, rank))
        self.give_back(rank)
        if (machine := self.standing_by.pop(rank, None)) is not None:
            self.world.nodes[rank] = machine
        else:
            self.rent(rank)
        if self.world.cluster.is_cut:
            self.world.nodes.pop(rank)
            raise SkywardError(f"node {rank} did not join the pool in time")
        assert not is_there()
        self.world.cluster.joins(rank)
        assert is_there()

    def lives(self, ranks: Collection[int]) -> dict[int, bool]:
        machines = {
            rank: machine
            for rank in ranks
            if (machine := self.world.nodes.get(rank)) is not None and machine.lives and machine.is_wired
        }
        return {rank: machine.answers for rank, machine in machines.items() if rank not in self.world.mute}

    def restart(self, heirs: Collection[str], dead: Collection[str]) -> Lease:
        self.restarts += 1
        fallen = [rank for rank, machine in sorted(self.world.nodes.items()) if machine.id in dead]
        for rank in {0, *fallen}:
            self.give_back(rank)
        left = [rank for rank, machine in sorted(self.world.nodes.items()) if machine.id in heirs]
        if left:
            self.world.nodes[0] = self.world.nodes.pop(left[0])
        else:
            for rank in fallen or [0]:
                self.rent(rank)
            self.world.nodes[0] = self.world.nodes.pop(min(fallen or [0]))
        self.on_restart()
        if self.fails_to_restart or not self.world.nodes[0].answers:
            self.fails_to_restart = max(0, self.fails_to_restart - 1)
            if self.world.nodes[0].is_hollow:  # no process could report that it does not join
                self.world.now += HEIR_SECONDS
            raise SkywardError("the new head did not come up in time")
        for rank in [rank for rank, machine in self.world.nodes.items() if not machine.is_wired]:
            self.give_back(rank)
        return self.lease

    def rent(self, rank: int) -> None:
        if not self.world.has_capacity:
            raise NoCapacity("sold out")
        self.world.nodes[rank] = Machine(next(self.world.names))

    def give_back(self, rank: int) -> None:
        if (machine := self.world.nodes.pop(rank, None)) is not None:
            machine.lives = False
            self.world.former.add(machine.id)


class FakeCluster:
    """The interface of `Cluster`: the workers that the scheduler last reported."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.there = set(world.nodes)
        self.is_cut = False
        self.resumed = 0
        self.given_up: list[tuple[int | None, SkywardError]] = []
        self.known: Lease | None = None

    @property
    def slots(self) -> int:
        return len(self.there)

    def has(self, rank: int) -> bool:
        return rank in self.there

    def missing(self, rank: int) -> list[int]:
        return [] if self.has(rank) else [0]

    def hold(self, rank: int) -> int:
        machine = self.world.nodes.get(rank)
        if self.is_cut or machine is None:
            raise NodeLost("the scheduler is out of reach")
        machine.is_held = True
        return machine.calls_left

    def joins(self, rank: int) -> None:
        if rank == 0 or not self.is_cut:
            self.there.add(rank)
            self.world.recovery.joined(rank)

    def leaves(self, rank: int) -> None:
        if not self.is_cut:
            self.there.discard(rank)
            self.world.recovery.left(rank)

    def resume(self, address: str, timeout_seconds: float) -> None:
        self.resumed += 1
        self._connect(address)

    def restart(self, lease: Lease, address: str, timeout_seconds: float) -> None:
        self.known = lease
        self._connect(address)

    def know(self, lease: Lease) -> None:
        self.known = lease

    def give_up(self, error: SkywardError, rank: int | None = None) -> None:
        self.given_up.append((rank, error))

    def _connect(self, address: str) -> None:
        head = self.world.nodes[0]
        assert address == f"tls://{head.id}"
        if not head.answers:
            raise NodeLost("the pool's scheduler does not answer")
        self.is_cut = False
        self.there = {rank for rank, machine in self.world.nodes.items() if machine.answers}


def instance(instance_id: str, rank: int, is_cloud: bool) -> Instance:
    endpoint = Endpoint(host="h") if is_cloud else None
    return Instance(
        id=instance_id,
        provider="fake",
        pool_id="pool",
        rank=rank,
        state=InstanceState.RUNNING,
        region="r",
        instance_type="t",
        endpoint=endpoint,
    )


@pytest.fixture
def world() -> World:
    return World()


# ── a node ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_happens_while_all_are_there(world: World) -> None:
    """As long as every node is there, there are no events, requests or new machines."""
    world.go_on(60)
    assert (world.recorded.events, world.machines.replaced, world.machines.restarts) == ([], [], 0)


def test_a_worker_that_comes_back_soon_is_not_lost(world: World) -> None:
    """A worker that has crashed is back within seconds: that loses no node, however often it happens."""
    for _ in range(5):
        world.cut(1)
        world.go_on(REJOIN_SECONDS - 0.5)
        world.mend(1)
        world.go_on(1)
    assert (world.recorded.events, world.machines.replaced) == ([], [])


def test_a_node_that_stays_away_is_lost_once_and_replaced(world: World) -> None:
    """After REJOIN_SECONDS the node is lost, without other events, and another machine replaces it."""
    lost = world.cut(1)
    world.go_on(REJOIN_SECONDS - 0.25)
    assert world.lost() == []
    world.go_on(60)
    assert world.lost() == [(lost.id, 1)]
    assert [type(event) for event in world.recorded.events] == [sky.InstanceLost]
    assert len(world.machines.replaced) == 1
    assert world.all_are_there()
    assert world.cluster.known == world.machines.lease


def test_a_node_that_reports_its_end_is_not_waited_for(world: World) -> None:
    """A node whose log says that it has ended is lost at once, and the event has the last lines of that log."""
    lost = world.kill(2, "the lease ran out")
    world.turn()
    assert [(event.instance_id, event.reason) for event in world.recorded.of(sky.InstanceLost)] == [
        (lost.id, "its worker has left the pool (the lease ran out)")
    ]


def test_without_capacity_it_is_tried_again_at_growing_intervals(world: World) -> None:
    """NoCapacity is an Error event each time, the pauses grow up to a limit, and calls that only that node could run
    fail.
    """
    world.has_capacity = False
    lost = world.kill(1)
    world.go_on(400)
    times = [at for at, _ in world.machines.replaced]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[:4] == pytest.approx([FIRST_PAUSE_SECONDS, 4, 8, 16], abs=0.5)
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_SECONDS, abs=0.5)
    assert world.lost() == [(lost.id, 1)]
    assert len(world.recorded.of(sky.Error)) == len(times)
    assert {rank for rank, _ in world.cluster.given_up} == {1}
    assert isinstance(world.cluster.given_up[0][1].__cause__, NoCapacity)
    world.has_capacity = True
    world.go_on(LONGEST_PAUSE_SECONDS + 1)
    assert world.all_are_there()
    assert world.lost() == [(lost.id, 1)]


def test_two_nodes_are_replaced_at_once(world: World) -> None:
    """Two losses do not wait for each other."""
    world.kill(1)
    world.kill(2)
    world.turn()
    world.turn(REJOIN_SECONDS + 0.1)
    assert sorted(name for name, _ in world.in_thread) == ["skyward-replace-1", "skyward-replace-2"]
    world.work()
    world.turn()
    assert world.all_are_there()


def test_one_rank_is_never_replaced_twice_at_once(world: World) -> None:
    """During a replacement no second one begins, however long it takes and whichever nodes come and go."""
    world.kill(1)
    world.turn()
    world.turn(REJOIN_SECONDS + 0.1)
    for _ in range(20):
        world.cluster.joins(1)
        world.turn(60)
        world.cluster.leaves(1)
        world.turn(60)
    assert [name for name, _ in world.in_thread] == ["skyward-replace-1"]


def test_a_node_that_comes_back_before_its_replacement_is_rented_stays(world: World) -> None:
    """If a node is back before a machine is rented, it keeps its rank: nothing is rented, and nothing terminated."""
    lost = world.cut(1)
    world.turn()
    world.turn(REJOIN_SECONDS + 0.1)
    world.mend(1)
    world.work()
    world.go_on(10)
    assert world.machines.replaced == []
    assert world.nodes[1] is lost
    assert world.all_are_there()


def test_a_replacement_that_is_lost_is_replaced(world: World) -> None:
    """A replacement may be lost too. Each loss is emitted once."""
    ids = []
    for _ in range(3):
        ids.append(world.kill(1).id)
        world.go_on(10)
        assert world.all_are_there()
    assert world.lost() == [(instance_id, 1) for instance_id in ids]


def test_a_replacement_that_leaves_at_once_is_noticed(world: World) -> None:
    """A node that joins and is gone again before recovery takes its next turn does not count as present."""
    world.kill(1)
    world.turn()
    world.turn(REJOIN_SECONDS + 0.1)
    world.work()
    second = world.kill(1)
    world.go_on(REJOIN_SECONDS - 0.25)
    assert (second.id, 1) not in world.lost()
    world.go_on(10)
    assert (second.id, 1) in world.lost()
    assert world.all_are_there()


def test_without_nodes_for_long_all_calls_raise(world: World) -> None:
    """While any node works, and for some minutes after, calls wait. If no node is left and none comes they raise, and
    no more machines are rented.
    """
    world.has_capacity = False
    world.kill(1)
    world.kill(2)
    # the head's scheduler lives, its worker does not come back: later the head is lost too
    world.cluster.there.discard(0)
    world.go_on(HOPELESS_SECONDS - 10)
    assert None not in {rank for rank, _ in world.cluster.given_up}
    world.go_on(HEAD_WORKERS_SECONDS + 2 * LONGEST_PAUSE_SECONDS)
    (error,) = [error for rank, error in world.cluster.given_up if rank is None]
    assert isinstance(error, NodeLost)
    assert "could not be restarted: sold out" in str(error)
    tries = len(world.machines.replaced)
    world.has_capacity = True
    world.go_on(600, step=10)
    assert len(world.machines.replaced) == tries


def test_a_head_with_a_frozen_worker_has_it_restarted(world: World) -> None:
    """A machine with a living scheduler is not terminated because its worker is frozen: there is an event, and its
    supervisor kills the worker and starts it again.
    """
    world.cluster.leaves(0)
    world.go_on(REJOIN_SECONDS + RESTART_WORKERS_SECONDS)
    assert (world.recorded.events, world.machines.roused) == ([], [])  # a worker that has died is back by then
    world.go_on(1)
    ((at, rank, workers),) = world.machines.roused
    assert (rank, workers) == (0, [0])
    assert at < 5, "with the 14 s of the scheduler that is within twenty"
    assert [type(event) for event in world.recorded.events] == [sky.Error]
    world.go_on(20)
    assert len(world.machines.roused) == 3  # one request may not have arrived
    world.cluster.joins(0)
    world.go_on(100)
    assert len(world.machines.roused) == 3
    assert (world.lost(), world.machines.replaced, world.machines.restarts) == ([], [], 0)
    assert world.all_are_there()


def test_a_head_without_its_worker_is_lost_at_last(world: World) -> None:
    """If the supervisor does not bring the worker back either, another node becomes the head, and the machine is
    replaced.
    """
    lost = world.nodes[0].id
    world.cluster.leaves(0)
    world.go_on(HEAD_WORKERS_SECONDS)
    assert world.lost() == []
    world.go_on(20)
    assert world.lost() == [(lost, 0)]
    assert (
        world.recorded.of(sky.InstanceLost)[0].reason
        == "its scheduler answers, but its workers have stayed away for 60 s"
    )
    assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady)) == 1
    assert world.all_are_there()


def test_while_one_node_is_left_the_pool_goes_on(world: World) -> None:
    """However long a node cannot be replaced: while another is there, only the calls for the lost node fail."""
    world.has_capacity = False
    world.kill(1)
    world.go_on(4 * HOPELESS_SECONDS, step=5)
    assert {rank for rank, _ in world.cluster.given_up} == {1}


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_asked_in_vain", [False, True])
def test_a_head_that_answers_again_is_not_lost(world: World, is_asked_in_vain: bool) -> None:
    """A short cut loses nothing: the cluster is resumed, and no loss is emitted, whatever the provider reports
    meanwhile.
    """
    world.is_asked_in_vain = is_asked_in_vain
    world.cut(0)
    world.go_on(HEAD_PATIENCE_SECONDS - 1)
    assert world.cluster.resumed == 0
    world.mend(0)
    world.go_on(1)
    assert world.cluster.resumed == 1
    assert (world.recorded.events, world.machines.replaced, world.machines.restarts) == ([], [], 0)
    assert world.all_are_there()


def test_each_cut_has_the_whole_patience(world: World) -> None:
    """Several cuts do not add up."""
    for count in range(1, 4):
        world.cut(0)
        world.go_on(HEAD_PATIENCE_SECONDS - 1)
        world.mend(0)
        world.go_on(0.5)
        assert world.cluster.resumed == count
    assert world.recorded.events == []


def test_no_node_counts_as_lost_while_the_head_is_silent(world: World) -> None:
    """Nodes that leave while the head is silent are checked when it answers again; then they have the usual time to
    come back.
    """
    world.cut(0)
    world.turn()
    world.nodes[1].lives = False
    world.go_on(HEAD_PATIENCE_SECONDS - 1)
    world.mend(0)
    world.go_on(REJOIN_SECONDS - 1)
    assert world.recorded.events == []
    world.go_on(5)
    assert [rank for _, rank in world.lost()] == [1]
    assert world.all_are_there()


def test_a_node_that_was_away_before_a_cut_has_the_usual_time_after_it(world: World) -> None:
    """The time in which no node could come back, because the head was silent, does not count."""
    world.cut(1)
    world.go_on(REJOIN_SECONDS - 1)
    world.cut(0)
    world.go_on(10)
    world.mend(0)
    world.go_on(REJOIN_SECONDS - 1)
    world.mend(1)
    world.go_on(5)
    assert world.recorded.events == []


@pytest.mark.parametrize(
    ("how", "seconds", "reason"),
    [
        ("the provider lists it no more", 1.0, "its provider lists it no more"),
        ("it said so", 0.5, "it has ended (the machine was taken back)"),
        ("silence", HEAD_PATIENCE_SECONDS + 1, "it has been silent for 45 s"),
    ],
)
def test_a_lost_head_is_succeeded_by_a_node_that_is_left(world: World, how: str, seconds: float, reason: str) -> None:
    """In whatever way the loss is known: it is emitted once, the cluster restarts on the next node, and the vacant rank
    is filled.
    """
    heir = world.nodes[1]
    lost = (
        world.cut(0) if how == "silence" else world.kill(0, "the machine was taken back" if how == "it said so" else "")
    )
    world.go_on(seconds)
    assert world.nodes[0] is heir
    assert [(event.instance_id, event.node, event.reason) for event in world.recorded.of(sky.InstanceLost)] == [
        (lost.id, 0, reason)
    ]
    world.go_on(10)
    kinds = [type(event) for event in world.recorded.events]
    assert kinds == [sky.InstanceLost, sky.ClusterRestarting, sky.PoolReady]
    assert [rank for _, rank in world.machines.replaced] == [1]
    assert world.all_are_there()
    assert world.recorded.of(sky.PoolReady)[0].nodes == NODES - 1


def test_if_no_node_answers_the_client_counts_as_cut_off(world: World) -> None:
    """No node is abandoned while none answers: all live until their leases expire. Then the head is lost."""
    world = World(lease_seconds=120)
    for rank in world.nodes:
        world.cut(rank)
    world.go_on(119)
    for rank in world.nodes:
        world.mend(rank)
    world.go_on(1)
    assert (world.recorded.events, world.cluster.resumed) == ([], 1)
    for rank in world.nodes:
        world.cut(rank)
    world.go_on(121)
    assert next(event.reason for event in world.recorded.of(sky.InstanceLost)) == "it has been silent for 120 s"


def test_the_only_node_has_its_whole_lease() -> None:
    """No other node could show whether the node or the client is cut off."""
    world = World(nodes=1, lease_seconds=120)
    world.cut(0)
    world.go_on(119)
    assert world.recorded.events == []
    world.mend(0)
    world.go_on(1)
    assert (world.recorded.events, world.cluster.resumed) == ([], 1)


def test_a_head_that_answers_after_other_nodes_is_not_lost(world: World) -> None:
    """When another node answers again first, the head has its patience from then on, within the lease."""
    for rank in world.nodes:
        world.cut(rank)
    world.go_on(100)
    world.mend(1)
    world.go_on(HEAD_PATIENCE_SECONDS - 1)
    assert world.lost() == []
    world.go_on(2)
    assert next(rank for _, rank in world.lost()) == 0


def test_a_cloud_may_leave_a_machine_out_once(world: World) -> None:
    """If lists may be incomplete, one listing without the head is no loss; the second in a row is."""
    world.is_cloud = True
    head = world.cut(0)
    head.is_missed = True
    world.go_on(1)
    head.is_missed = False
    world.go_on(10)
    assert world.lost() == []
    head.is_missed = True
    world.go_on(5)
    assert [event.reason for event in world.recorded.of(sky.InstanceLost)] == ["its provider lists it no more"]


def test_listings_without_the_head_count_only_in_a_row(world: World) -> None:
    """The head is missing in one listing, is in the next, and is missing again: it is not lost."""
    world.is_cloud = True
    head = world.cut(0)
    for head.is_missed in (True, False, True, False):
        world.turn(ASK_SECONDS)
        assert world.work() == 1, "each turn makes one listing"
    world.turn()
    assert world.lost() == []


def test_an_outage_of_the_provider_is_not_absence(world: World) -> None:
    """If a provider does not answer, the head has its whole patience."""
    world.is_asked_in_vain = True
    world.kill(0)
    world.go_on(HEAD_PATIENCE_SECONDS - 1)
    assert world.lost() == []
    world.go_on(2)
    assert [rank for _, rank in world.lost()] == [0]


def test_the_provider_is_asked_again_after_an_outage(world: World) -> None:
    """The answer counts as soon as it comes, not only at the end of the patience."""
    world.is_asked_in_vain = True
    world.kill(0)
    world.go_on(10)
    world.is_asked_in_vain = False
    world.go_on(3)
    assert [event.reason for event in world.recorded.of(sky.InstanceLost)] == ["its provider lists it no more"]


def test_the_provider_is_asked_one_question_at_a_time(world: World) -> None:
    """While an answer is awaited no second question is sent."""
    world.cut(0)
    for _ in range(40):
        world.turn(0.5)
    assert [name for name, _ in world.in_thread] == ["skyward-query"]


def test_a_short_lease_shortens_the_patience() -> None:
    """Recovery waits at most half the lease for a head, because the head may end itself after that."""
    world = World(lease_seconds=20)
    world.cut(0)
    world.go_on(11)
    assert [rank for _, rank in world.lost()] == [0]


def test_a_restart_that_fails_is_tried_again(world: World) -> None:
    """A node that fails to become the head is lost too; the next one is tried. The pool emits the error, and an event
    when it is ready.
    """
    world.machines.fails_to_restart = 2
    world.kill(0)
    world.go_on(30)
    assert [rank for _, rank in world.lost()] == [0, 0, 0]
    assert len({instance_id for instance_id, _ in world.lost()}) == 3
    assert [event.reason for event in world.recorded.of(sky.InstanceLost)][1:] == [
        "the cluster did not come up on it: the new head did not come up in time"
    ] * 2
    assert len(world.recorded.of(sky.Error)) == 2
    assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady)) == 1
    assert world.all_are_there()


def test_a_second_head_that_is_lost_during_the_restart_is_emitted(world: World) -> None:
    """The next head dies while it becomes the head: one event, and the third node becomes the head."""

    def die() -> None:
        world.machines.on_restart = lambda: None
        world.nodes[0].lives = False

    world.machines.on_restart = die
    first, second = world.nodes[0].id, world.nodes[1].id
    world.kill(0)
    world.go_on(30)
    assert [instance_id for instance_id, _ in world.lost()] == [first, second]
    assert world.all_are_there()


def test_a_node_that_cannot_be_reached_during_a_restart_is_lost(world: World) -> None:
    """A node that is out of reach while the cluster restarts is dropped: that is a loss, emitted once, and the node is
    replaced.
    """
    world.cut(0)
    world.turn()
    dropped = world.cut(2)
    world.go_on(HEAD_PATIENCE_SECONDS + 10)
    assert [instance_id for instance_id, _ in world.lost()].count(dropped.id) == 1
    assert world.all_are_there()


def test_a_node_that_does_not_join_the_new_head_is_lost(world: World) -> None:
    """After a restart every node has RESTART_SECONDS to join, then it counts as lost."""
    absent = world.nodes[2]
    world.kill(0)
    absent.lives = False
    world.go_on(20)
    assert [rank for _, rank in world.lost()] == [0]
    world.go_on(30)
    assert absent.id in {instance_id for instance_id, _ in world.lost()}
    assert world.all_are_there()


def test_a_single_node_that_is_lost_is_replaced() -> None:
    """A pool of one node has no other node for a head: another machine is rented, as soon as one is available."""
    world = World(nodes=1)
    world.has_capacity = False
    world.kill(0)
    world.go_on(20)
    assert world.cluster.given_up == []
    world.has_capacity = True
    world.go_on(20)
    assert world.all_are_there()
    assert len(world.lost()) == 1


def test_a_head_that_never_comes_back_is_abandoned() -> None:
    """After HOPELESS_SECONDS without a head all calls raise, and no more machines are rented."""
    world = World(nodes=1)
    world.has_capacity = False
    world.kill(0)
    world.go_on(HOPELESS_SECONDS - 10)
    assert world.cluster.given_up == []
    world.go_on(10 + LONGEST_PAUSE_SECONDS)
    ((rank, error),) = world.cluster.given_up
    assert (rank, type(error), type(error.__cause__)) == (None, NodeLost, NoCapacity)
    restarts = world.machines.restarts
    world.has_capacity = True
    world.go_on(600, step=10)
    assert world.machines.restarts == restarts


def test_an_unfinished_replacement_does_not_become_the_head(world: World) -> None:
    """A rank that is being replaced has no node yet: another node becomes the head."""
    world.kill(1)
    world.turn()
    world.turn(REJOIN_SECONDS + 0.1)
    assert [name for name, _ in world.in_thread] == ["skyward-replace-1"]
    heir = world.nodes[2]
    world.kill(0, "gone")
    world.turn(0.1)
    assert world.nodes[0] is heir
    assert [name for name, _ in world.in_thread if "replace-1" in name] == ["skyward-replace-1"]
    world.go_on(10)
    assert world.all_are_there()


def test_a_replacement_that_dies_with_the_head_is_no_loss(world: World) -> None:
    """A machine that had not joined when the head was lost, and cannot get the new head's address, was never a member:
    there is no event.
    """
    first = world.kill(1)
    world.turn()
    world.turn(REJOIN_SECONDS + 0.1)
    world.nodes[1] = Machine("on-its-way", is_wired=False)
    head = world.kill(0, "gone")
    world.turn(0.1)
    assert "on-its-way" in world.former
    assert world.lost() == [(first.id, 1), (head.id, 0)]


# ── all processes die, the machines answer ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_cloud", [False, True])
def test_if_all_processes_die_at_once_all_nodes_restart_at_once(is_cloud: bool) -> None:
    """Recovery waits for no dead node: one restart, all ranks there within 15 s, and each loss is emitted once."""
    world = World(nodes=6)
    world.is_cloud = is_cloud
    ids = [machine.id for machine in world.nodes.values()]
    for rank in reversed(range(6)):
        world.hollow_out(rank)
    world.go_on(15)
    assert world.all_are_there()
    assert (world.machines.restarts, world.machines.replaced) == (1, [])
    assert sorted(world.lost()) == [(instance_id, rank) for rank, instance_id in enumerate(ids)]
    assert {event.reason for event in world.recorded.of(sky.InstanceLost)} == {"its processes have died"}
    assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady)) == 1
    assert world.cluster.given_up == []


def test_a_dead_node_is_not_chosen_as_head(world: World) -> None:
    """The next living node becomes the head at once, and the dead one is replaced with the lost head."""
    heir = world.nodes[2]
    world.hollow_out(1)
    world.hollow_out(0)
    world.go_on(REJOIN_SECONDS - 0.5)
    assert world.nodes[0] is heir
    world.go_on(5)
    assert world.all_are_there()
    assert world.machines.restarts == 1
    assert len(world.lost()) == 2


def test_nodes_that_answer_late_learn_of_the_new_head(world: World) -> None:
    """A node that is slow to answer keeps its calls; its machine is not terminated, and recovery does not wait for it."""
    slow = world.nodes[2]
    world.mute = {2}
    world.hollow_out(1)
    world.hollow_out(0)
    world.go_on(5)
    assert world.nodes[2] is slow
    assert world.all_are_there()
    assert world.machines.restarts == 1


def test_if_no_node_answers_a_connected_one_is_tried(world: World) -> None:
    """A client that is too busy to read the answers does not rent machines because of that."""
    heir = world.nodes[1]
    world.mute = {0, 1, 2}
    world.kill(0)
    world.go_on(5)
    assert world.nodes[0] is heir
    assert world.all_are_there()


def test_the_only_node_with_dead_processes_is_not_waited_for() -> None:
    """Its machine has reported it: recovery does not wait for the lease, as it does for a silent machine."""
    world = World(nodes=1)
    world.is_cloud = True
    world.hollow_out(0)
    world.go_on(3)
    assert world.all_are_there()
    assert [event.reason for event in world.recorded.of(sky.InstanceLost)] == ["its processes have died"]


def test_the_module_that_decides_has_no_thread_clock_or_machine() -> None:
    """`membership` only reads its arguments and returns actions: none of its imports could do more."""
    tree = ast.parse(inspect.getsource(membership))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    standard = {"__future__", "collections", "collections.abc", "dataclasses", "typing"}
    values = {
        "skyward_core.concurrency.backoff",
        "skyward_core.engine.membership_actions",
        "skyward_core.errors",
        "skyward_core.events.events",
        "skyward_core.machines.instances",
        "skyward_core.worker.preemption_notice",
    }
    assert imported <= standard | values


# ── any order of events ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Seen:
    """Every instance that was ever a member, as the test has recorded it."""

    members: set[str] = field(default_factory=set[str])


class AnyOrder(RuleBasedStateMachine):
    """Faults, repairs and time in any order; at the end all is repaired."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.seen = Seen()
        self._note()

    def _note(self) -> None:
        world = self.world
        self.seen.members |= {machine.id for rank, machine in world.nodes.items() if world.cluster.has(rank)}

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data(), words=st.sampled_from(["", "gone"]))
    def kill(self, data: st.DataObject, words: str) -> None:
        self.world.kill(data.draw(st.sampled_from(sorted(self.world.nodes))), words)

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        self.world.cut(data.draw(st.sampled_from(sorted(self.world.nodes))))

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data())
    def mend(self, data: st.DataObject) -> None:
        self.world.mend(data.draw(st.sampled_from(sorted(self.world.nodes))))

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data(), seconds_left=st.sampled_from([0.0, 2.0, 120.0]), calls_left=st.integers(0, 1))
    def announce(self, data: st.DataObject, seconds_left: float, calls_left: int) -> None:
        self.world.announce(data.draw(st.sampled_from(sorted(self.world.nodes))), seconds_left, calls_left)

    @precondition(lambda self: self.world.nodes)
    @rule(data=st.data())
    def hollow_out(self, data: st.DataObject) -> None:
        self.world.hollow_out(data.draw(st.sampled_from(sorted(self.world.nodes))))

    @rule(mute=st.sets(st.integers(0, NODES - 1)))
    def mute(self, mute: set[int]) -> None:
        self.world.mute = mute

    @rule(has_capacity=st.booleans())
    def capacity(self, has_capacity: bool) -> None:
        self.world.has_capacity = has_capacity

    @rule(is_asked_in_vain=st.booleans())
    def outage(self, is_asked_in_vain: bool) -> None:
        self.world.is_asked_in_vain = is_asked_in_vain

    @rule(times=st.integers(1, 2))
    def trouble(self, times: int) -> None:
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
    def each_loss_has_one_event_and_only_members_are_lost(self) -> None:
        lost = [instance_id for instance_id, _ in self.world.lost()]
        assert len(lost) == len(set(lost))
        ranks = [name for name, _ in self.world.in_thread if name.startswith(("skyward-replace", "skyward-stand-by"))]
        assert len(ranks) == len({name.rpartition("-")[2] for name in ranks}), "one replacement a rank at a time"

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
            "who is to be taken back is replaced"
        )
        assert world.machines.standing_by == {}, "no machine is rented without need"
        assert len(world.recorded.of(sky.ClusterRestarting)) == len(world.recorded.of(sky.PoolReady))
        lost = {instance_id for instance_id, _ in world.lost()}
        assert self.seen.members & world.former <= lost, "a member that was given back must have an InstanceLost event"


AnyOrder.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
