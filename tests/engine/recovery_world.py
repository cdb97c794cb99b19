"""A model of the machines and of the cluster of an open pool, for tests of recovery: a manual clock, one turn at a time."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import skyward_core as sky
from skyward_core.engine.recovery import Recovery
from skyward_core.errors import NoCapacity, NodeLost, SkywardError, Unreachable
from skyward_core.machines.instances import Endpoint, Instance, InstanceState, Lease, Node
from skyward_core.provisioning.replacement import HEIR_SECONDS
from skyward_core.wire.info import Kind, Notice
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
        self.recovery = self.new_recovery(self.machines, self.cluster, nodes, lease_seconds)

    def new_recovery(self, *parts: Any) -> Recovery:
        return Recovery(*parts[:4], self.recorded, lambda: self.now, self.moved_to_file, *parts[4:])

    def moved_to_file(self, name: str, work: Callable[[], None]) -> None:
        self.in_thread.append((name, work))

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

    def reasons(self) -> list[str]:
        return [event.reason for event in self.recorded.of(sky.InstanceLost)]

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
        return lease_of(nodes)

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
        self.draining: Any = self
        """Has `hold` of `NodeDraining`."""

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

    def update_nodes(self, lease: Lease) -> None:
        self.known = lease

    def fail_calls(self, error: SkywardError, rank: int | None = None) -> None:
        self.given_up.append((rank, error))

    def _connect(self, address: str) -> None:
        head = self.world.nodes[0]
        assert address == f"tls://{head.id}"
        if not head.answers:
            raise NodeLost("the pool's scheduler does not answer")
        self.is_cut = False
        self.there = {rank for rank, machine in self.world.nodes.items() if machine.answers}


def lease_of(nodes: Sequence[Node]) -> Lease:
    return Lease(pool_id="pool", provider={}, nodes=tuple(nodes), created_at=datetime(2026, 1, 1, tzinfo=UTC))


def instance(instance_id: str, rank: int, is_cloud: bool) -> Instance:
    place = {"region": "r", "instance_type": "t", "endpoint": Endpoint(host="h") if is_cloud else None}
    return Instance(id=instance_id, provider="fake", pool_id="pool", rank=rank, state=InstanceState.RUNNING, **place)
