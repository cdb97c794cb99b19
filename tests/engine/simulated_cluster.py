"""The pool in the simulation (`simulation.py`): the client's connection, machines, workers, their faults, and recovery."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.engine.model import Machine, Worker, machine_id, node_of
from tests.engine.model_scheduler import Connection, Scheduler

if TYPE_CHECKING:
    from skyward_core.machines.instances import Node
    from skyward_core.wire.messages import Parcel
    from tests.engine.simulation import World


class Cluster:
    """The connection, the machines and the workers of a history, what happens to them, and how they are replaced."""

    def __init__(self, world: World) -> None:
        self.world = world

    # ── the connection ────────────────────────────────────────────────────────────────────────────────────────────────

    def connect_first(self) -> None:
        world = self.world
        world.post("connect")
        for rank in range(world.ranks):
            for index in range(world.workers_per_node):
                if world.rng.random() < 0.8:
                    self.start_worker(rank, index)
        world.pump()

    def connect(self) -> None:
        world = self.world
        if world.is_over or not world.scheduler.is_alive:
            world.is_cut = True
            return
        dispatcher = world.dispatcher
        if world.connection is not None:
            world.connection.close(world.rng)
        world.wires = [wire for wire in world.wires if wire.is_open or wire.queue]
        connection = world.connection = Connection(world, world.scheduler, dispatcher.topic)
        connection.epoch = dispatcher.connected(world.now)
        world.connections.append(connection)
        world.is_cut = False
        world.do_all()
        connection.up.send(("subscribe", "pool"))
        connection.up.send(("subscribe", dispatcher.topic))
        connection.up.send(("resume", (dispatcher.topic, dispatcher.heard)))

    def reconnect(self) -> None:
        """Recovery connects again after a cut: to the same scheduler, or to the one that replaces a lost one."""
        world = self.world
        if world.is_over or not (world.is_cut or world.connection is None):
            return
        if world.rng.random() < world.absence:
            return
        world.say("reconnect")
        if world.rng.random() < 0.3:
            world.post("disconnected")
            world.pump()
        if not world.scheduler.is_alive:
            self._restart()
        world.post("connect")

    def _restart(self) -> None:
        """Another machine becomes the head. Workers with calls join it, except those of the old head."""
        world = self.world
        left = {
            rank: node
            for rank, node in world.nodes.items()
            if (machine := self.machine(rank)).is_alive and machine.is_reachable
        }
        heir = world.rng.choice(sorted(left)) if left else None
        serials = {rank: self.machine(rank).serial for rank in left if rank not in (heir, 0)}
        serials[0] = self.machine(heir).serial if heir is not None else None
        old_head = self.machine(0)
        world.nodes = {rank: self.new_node(rank, serial) for rank, serial in sorted(serials.items())}
        by_machine = {node.instance.id: node for node in world.nodes.values()}
        world.scheduler = Scheduler(world, world.limit)
        world.restarts += 1
        for worker in world.workers:
            if worker.is_alive and not worker.is_moving:
                worker.lose_scheduler(world.rng)
            node, worker.is_moving = by_machine.get(worker.machine.id), False
            if worker.is_alive and node is not None and worker.machine is not old_head:
                worker.move(node)
            elif worker.is_alive and (node is not None or world.rng.random() < 0.5):
                worker.die(world.rng)  # else it does not learn of the new head, and runs on
        world.resumed_at = math.inf
        world.say("restart", [(rank, node.instance.id) for rank, node in world.nodes.items()])
        world.handle("restarted", (tuple(world.nodes.values()), self._is_there, world.now), {})

    def has_file(self, path: str) -> bool:
        """Whether a file is on a machine of the pool: the memory of others is cleared at any time."""
        machine = self.world.machine_at(path)
        return path in machine.files and any(node.instance.id == machine.id for node in self.world.nodes.values())

    def _is_there(self, parcel: Parcel) -> bool:
        return parcel.path in self.world.machine_at(str(parcel.path)).files

    def new_topic(self) -> str:
        return f"skyward-{next(self.world.topics):08d}"

    def cut_silently(self) -> None:
        """The client's connection carries nothing any more, and the client gets no notice."""
        world = self.world
        if world.connection is not None and world.connection.carries:
            world.say("cut silently")
            world.connection.up.cut(world.rng, ("gone", None) if world.rng.random() < 0.5 else None)
            world.connection.down.cut(world.rng)

    def cut_openly(self) -> None:
        """The client's connection is closed."""
        world = self.world
        if world.connection is not None and world.connection.carries:
            world.say("cut openly")
            world.connection.up.cut(world.rng, ("gone", None))
            world.connection.down.cut(world.rng, ("closed", None, None))

    def abandon(self) -> None:
        """The scheduler has waited for the client for the time of a lease."""
        world = self.world
        if world.connection is not None and not world.connection.carries and world.scheduler.is_alive:
            world.say("abandon")
            world.missed += 1
            world.was_abandoned = True
            for connection in world.connections:
                connection.up.queue.clear()  # after so long a time these messages are lost, or have arrived
                world.scheduler.receive(connection, ("gone", None))
            world.scheduler.abandon()

    # ── machines and workers ──────────────────────────────────────────────────────────────────────────────────────────

    def new_node(self, rank: int, serial: int | None = None) -> Node:
        world = self.world
        if serial is None:
            serial = next(world.serials)
            world.machines[machine_id(serial)] = Machine(machine_id(serial), serial)
        return node_of(serial, rank, world.workers_per_node, world.slots)

    def machine(self, rank: int) -> Machine:
        return self.world.machines[self.world.nodes[rank].instance.id]

    def start_worker(self, rank: int, index: int) -> None:
        world = self.world
        name = f"{rank}-{index}"
        if any(worker.name == name for worker in world.scheduler.workers.values()):
            return  # its name is in use
        machine = self.machine(rank)
        here = [
            worker
            for worker in world.workers
            if worker.machine is machine and worker.index == index and worker.is_alive
        ]
        worker = next((worker for worker in here if worker.is_moving), None)
        for other in here:
            if other is not worker:
                other.die(world.rng)
        if worker is None:
            worker = Worker(world, world.nodes[rank], machine, index)
            world.workers.append(worker)
        worker.join(world.scheduler)
        world.say("joins", worker.name, worker.address, sorted(worker.kept))

    def missing(self) -> list[tuple[int, int]]:
        world = self.world
        there = {
            (worker.machine.id, worker.index) for worker in world.workers if worker.is_alive and not worker.is_cut_off
        }
        ranks = [rank for rank in world.nodes if self.machine(rank).is_alive]
        return [
            (rank, index)
            for rank in ranks
            for index in range(world.workers_per_node)
            if (self.machine(rank).id, index) not in there
        ]

    def rejoin(self) -> None:
        """A worker that is away joins, in a new process or with its kept calls."""
        if self.world.scheduler.is_alive and (missing := self.missing()):
            self.start_worker(*self.world.rng.choice(missing))

    def notice(self) -> None:
        """A worker notices that its scheduler is gone."""
        world = self.world
        lost = [worker for worker in world.workers if worker.is_alive and worker.is_cut_off and not worker.is_moving]
        if lost:
            worker = world.rng.choice(lost)
            worker.lose_scheduler(world.rng)
            if world.scheduler.is_alive and worker.is_alive:
                worker.die(world.rng)  # the scheduler has removed this worker

    def kill_worker(self) -> None:
        """A worker process dies."""
        world = self.world
        if living := [worker for worker in world.workers if worker.is_alive]:
            with_results = [worker for worker in living if worker.results]
            worker = world.rng.choice(with_results if with_results and world.rng.random() < 0.5 else living)
            world.say("kill", worker.address)
            worker.die(world.rng)

    def silence_worker(self) -> None:
        """A worker and the scheduler cannot reach each other."""
        world = self.world
        if reached := [worker for worker in world.workers if worker.is_alive and not worker.is_cut_off]:
            worker = world.rng.choice(reached)
            world.say("silence", worker.address)
            worker.fall_silent(world.rng)

    def kill_node(self) -> None:
        """A machine is gone, with the files in its memory."""
        world = self.world
        rank = world.rng.choice(list(world.nodes))
        machine = self.machine(rank)
        world.say("kill node", rank, machine.id)
        machine.is_alive = False
        machine.files.clear()
        for worker in world.workers:
            if worker.machine is machine and worker.is_alive:
                worker.die(world.rng)
        if rank == 0:
            self.kill_scheduler()

    def kill_scheduler(self) -> None:
        """The scheduler's process dies; its workers run on for a while."""
        world = self.world
        if not world.scheduler.is_alive:
            return
        world.say("kill scheduler")
        world.scheduler.is_alive = False
        for worker in world.workers:
            if not worker.is_moving:
                worker.up.cut(world.rng)
                worker.is_cut_off = True
        if world.connection is not None:
            world.connection.up.cut(world.rng)
            world.connection.down.cut(world.rng, ("closed", None, None) if world.rng.random() < 0.7 else None)

    def replace(self) -> None:
        """A vacant rank is filled with a new machine."""
        world = self.world
        if not world.scheduler.is_alive:
            return
        if vacant := [
            rank for rank in range(1, world.ranks) if rank not in world.nodes or not self.machine(rank).is_alive
        ]:
            rank = world.rng.choice(vacant)
            world.nodes[rank] = self.new_node(rank)
            world.given_up.discard(rank)
            world.say("replace", rank, world.nodes[rank].instance.id)
            world.post("update_nodes", [world.nodes[rank]])
            world.pump()

    def block_way(self) -> None:
        """Large values reach a machine no more, and do not come from it."""
        self.machine(self.world.rng.choice(list(self.world.nodes))).is_reachable = False

    def open_ways(self) -> None:
        """Large values reach all machines again."""
        for machine in self.world.machines.values():
            machine.is_reachable = True

    def hold(self) -> None:
        """A node gets no more calls."""
        world = self.world
        if world.scheduler.is_alive:
            rank = world.rng.choice(list(world.nodes))
            world.retiring.update(f"{rank}-{index}" for index in range(world.workers_per_node))
            world.scheduler.hold(rank)
