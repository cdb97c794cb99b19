"""The pool in the simulation (`simulation.py`): the client's connection, machines, workers, their faults, and recovery."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.engine.model import Machine, Worker, machine_id, node_of
from tests.engine.model_scheduler import Connection, Scheduler

if TYPE_CHECKING:
    from skyward_core.machines.instances import Node
    from skyward_core.worker.wire import Parcel
    from tests.engine.simulation import World


class Cluster:
    """The connection, the machines and the workers of a history, what happens to them, and how they are replaced."""

    def __init__(self, world: World) -> None:
        self.world = world

    # ── the connection ────────────────────────────────────────────────────────────────────────────────────────────────

    def connect_first(self) -> None:
        self.world.post("connect")
        for rank in range(self.world.ranks):
            for index in range(self.world.workers_per_node):
                if self.world.rng.random() < 0.8:
                    self.start_worker(rank, index)
        self.world.pump()

    def connect(self) -> None:
        if self.world.is_over or not self.world.scheduler.is_alive:
            self.world.is_cut = True
            return
        dispatcher = self.world.dispatcher
        if self.world.connection is not None:
            self.world.connection.close(self.world.rng)
        self.world.wires = [wire for wire in self.world.wires if wire.is_open or wire.queue]
        connection = self.world.connection = Connection(self.world, self.world.scheduler, dispatcher.topic)
        connection.epoch = dispatcher.connected(self.world.now)
        self.world.connections.append(connection)
        self.world.is_cut = False
        self.world.do_all()
        connection.up.send(("subscribe", "pool"))
        connection.up.send(("subscribe", dispatcher.topic))
        connection.up.send(("resume", (dispatcher.topic, dispatcher.heard)))

    def reconnect(self) -> None:
        """Recovery connects again after a cut: to the same scheduler, or to the one that replaces a lost one."""
        if self.world.is_over or not (self.world.is_cut or self.world.connection is None):
            return
        if self.world.rng.random() < self.world.absence:
            return
        self.world.say("reconnect")
        if self.world.rng.random() < 0.3:
            self.world.post("disconnected")
            self.world.pump()
        if not self.world.scheduler.is_alive:
            self._restart()
        self.world.post("connect")

    def _restart(self) -> None:
        """Another machine becomes the head. Workers with calls join it, except those of the old head."""
        left = {
            rank: node
            for rank, node in self.world.nodes.items()
            if (machine := self.machine(rank)).is_alive and machine.is_reachable
        }
        heir = self.world.rng.choice(sorted(left)) if left else None
        serials = {rank: self.machine(rank).serial for rank in left if rank not in (heir, 0)}
        serials[0] = self.machine(heir).serial if heir is not None else None
        old_head = self.machine(0)
        self.world.nodes = {rank: self.new_node(rank, serial) for rank, serial in sorted(serials.items())}
        by_machine = {node.instance.id: node for node in self.world.nodes.values()}
        self.world.scheduler = Scheduler(self.world, self.world.limit)
        self.world.restarts += 1
        for worker in self.world.workers:
            if worker.is_alive and not worker.is_moving:
                worker.lose_scheduler(self.world.rng)
            node, worker.is_moving = by_machine.get(worker.machine.id), False
            if worker.is_alive and node is not None and worker.machine is not old_head:
                worker.move(node)
            elif worker.is_alive and (node is not None or self.world.rng.random() < 0.5):
                worker.die(self.world.rng)  # else it does not learn of the new head, and runs on
        self.world.resumed_at = math.inf
        self.world.say("restart", [(rank, node.instance.id) for rank, node in self.world.nodes.items()])
        self.world.handle("restarted", (tuple(self.world.nodes.values()), self._is_there, self.world.now), {})

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
        if self.world.connection is not None and self.world.connection.carries:
            self.world.say("cut silently")
            self.world.connection.up.cut(self.world.rng, ("gone", None) if self.world.rng.random() < 0.5 else None)
            self.world.connection.down.cut(self.world.rng)

    def cut_openly(self) -> None:
        """The client's connection is closed."""
        if self.world.connection is not None and self.world.connection.carries:
            self.world.say("cut openly")
            self.world.connection.up.cut(self.world.rng, ("gone", None))
            self.world.connection.down.cut(self.world.rng, ("closed", None, None))

    def abandon(self) -> None:
        """The scheduler has waited for the client for the time of a lease."""
        if self.world.connection is not None and not self.world.connection.carries and self.world.scheduler.is_alive:
            self.world.say("abandon")
            self.world.missed += 1
            self.world.was_abandoned = True
            for connection in self.world.connections:
                connection.up.queue.clear()  # after so long a time these messages are lost, or have arrived
                self.world.scheduler.receive(connection, ("gone", None))
            self.world.scheduler.abandon()

    # ── machines and workers ──────────────────────────────────────────────────────────────────────────────────────────

    def new_node(self, rank: int, serial: int | None = None) -> Node:
        if serial is None:
            serial = next(self.world.serials)
            self.world.machines[machine_id(serial)] = Machine(machine_id(serial), serial)
        return node_of(serial, rank, self.world.workers_per_node, self.world.slots)

    def machine(self, rank: int) -> Machine:
        return self.world.machines[self.world.nodes[rank].instance.id]

    def start_worker(self, rank: int, index: int) -> None:
        name = f"{rank}-{index}"
        if any(worker.name == name for worker in self.world.scheduler.workers.values()):
            return  # its name is in use
        machine = self.machine(rank)
        here = [
            worker
            for worker in self.world.workers
            if worker.machine is machine and worker.index == index and worker.is_alive
        ]
        worker = next((worker for worker in here if worker.is_moving), None)
        for other in here:
            if other is not worker:
                other.die(self.world.rng)
        if worker is None:
            worker = Worker(self.world, self.world.nodes[rank], machine, index)
            self.world.workers.append(worker)
        worker.join(self.world.scheduler)
        self.world.say("joins", worker.name, worker.address, sorted(worker.kept))

    def missing(self) -> list[tuple[int, int]]:
        there = {
            (worker.machine.id, worker.index)
            for worker in self.world.workers
            if worker.is_alive and not worker.is_cut_off
        }
        ranks = [rank for rank in self.world.nodes if self.machine(rank).is_alive]
        return [
            (rank, index)
            for rank in ranks
            for index in range(self.world.workers_per_node)
            if (self.machine(rank).id, index) not in there
        ]

    def rejoin(self) -> None:
        """A worker that is away joins, in a new process or with its kept calls."""
        if self.world.scheduler.is_alive and (missing := self.missing()):
            self.start_worker(*self.world.rng.choice(missing))

    def notice(self) -> None:
        """A worker notices that its scheduler is gone."""
        lost = [
            worker for worker in self.world.workers if worker.is_alive and worker.is_cut_off and not worker.is_moving
        ]
        if lost:
            worker = self.world.rng.choice(lost)
            worker.lose_scheduler(self.world.rng)
            if self.world.scheduler.is_alive and worker.is_alive:
                worker.die(self.world.rng)  # the scheduler has removed this worker

    def kill_worker(self) -> None:
        """A worker process dies."""
        if living := [worker for worker in self.world.workers if worker.is_alive]:
            with_results = [worker for worker in living if worker.results]
            worker = self.world.rng.choice(with_results if with_results and self.world.rng.random() < 0.5 else living)
            self.world.say("kill", worker.address)
            worker.die(self.world.rng)

    def silence_worker(self) -> None:
        """A worker and the scheduler cannot reach each other."""
        if reached := [worker for worker in self.world.workers if worker.is_alive and not worker.is_cut_off]:
            worker = self.world.rng.choice(reached)
            self.world.say("silence", worker.address)
            worker.fall_silent(self.world.rng)

    def kill_node(self) -> None:
        """A machine is gone, with the files in its memory."""
        rank = self.world.rng.choice(list(self.world.nodes))
        machine = self.machine(rank)
        self.world.say("kill node", rank, machine.id)
        machine.is_alive = False
        machine.files.clear()
        for worker in self.world.workers:
            if worker.machine is machine and worker.is_alive:
                worker.die(self.world.rng)
        if rank == 0:
            self.kill_scheduler()

    def kill_scheduler(self) -> None:
        """The scheduler's process dies; its workers run on for a while."""
        if not self.world.scheduler.is_alive:
            return
        self.world.say("kill scheduler")
        self.world.scheduler.is_alive = False
        for worker in self.world.workers:
            if not worker.is_moving:
                worker.up.cut(self.world.rng)
                worker.is_cut_off = True
        if self.world.connection is not None:
            self.world.connection.up.cut(self.world.rng)
            self.world.connection.down.cut(
                self.world.rng, ("closed", None, None) if self.world.rng.random() < 0.7 else None
            )

    def replace(self) -> None:
        """A vacant rank is filled with a new machine."""
        if not self.world.scheduler.is_alive:
            return
        if vacant := [
            rank
            for rank in range(1, self.world.ranks)
            if rank not in self.world.nodes or not self.machine(rank).is_alive
        ]:
            rank = self.world.rng.choice(vacant)
            self.world.nodes[rank] = self.new_node(rank)
            self.world.given_up.discard(rank)
            self.world.say("replace", rank, self.world.nodes[rank].instance.id)
            self.world.post("know", [self.world.nodes[rank]])
            self.world.pump()

    def block_way(self) -> None:
        """Large values reach a machine no more, and do not come from it."""
        self.machine(self.world.rng.choice(list(self.world.nodes))).is_reachable = False

    def open_ways(self) -> None:
        """Large values reach all machines again."""
        for machine in self.world.machines.values():
            machine.is_reachable = True

    def hold(self) -> None:
        """A node gets no more calls."""
        if self.world.scheduler.is_alive:
            rank = self.world.rng.choice(list(self.world.nodes))
            self.world.retiring.update(f"{rank}-{index}" for index in range(self.world.workers_per_node))
            self.world.scheduler.hold(rank)
