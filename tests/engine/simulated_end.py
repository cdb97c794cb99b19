"""The end of a history in the simulation (`simulation.py`): all is repaired, and what must hold at rest is checked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from skyward_core.engine.state import LIMIT_BYTES
from skyward_core.errors import NodeLost
from tests.engine.model import FUNCTION_SPANS, Violation, require
from tests.engine.simulated_calls import MOST_CALLS

if TYPE_CHECKING:
    from tests.engine.model import Machine
    from tests.engine.simulation import World

ROUNDS = 40  # of repairs and waiting, after which a history must be at rest


class Ending:
    """The end of a history."""

    def __init__(self, world: World) -> None:
        self.world = world

    # ── repairs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Repair everything, and go on until the world is at rest."""
        world = self.world
        world.say("── settle")
        world.absence = 0.0
        world.values.held.clear()
        if world.connection is not None and not world.connection.carries and world.rng.random() < 0.8:
            world.post("cut", world.connection.epoch)
        rests = 0
        for index in range(ROUNDS):
            self._repair()
            self._deliver_all()
            if index == 8:
                self._check_cancelled()
            for _ in range(MOST_CALLS if index > 8 else 0):
                if not self._work_all():
                    break
                self._deliver_all()
            world.now += 2.5
            world.post("tick", world.now, world.is_reachable)
            self._deliver_all()
            rests = rests + 1 if self._is_at_rest else 0
            if rests == 2:
                return
        raise Violation(f"it does not end: {self._what_is_left()}")

    def _repair(self) -> None:
        world = self.world
        world.cluster.open_ways()
        for worker in world.workers:
            is_lost = worker.is_cut_off and not worker.is_moving and world.scheduler.is_alive
            if worker.is_alive and (
                is_lost or (worker.name in world.retiring and worker.address in world.scheduler.held)
            ):
                worker.die(world.rng)
        world.cluster.reconnect()
        world.pump()
        if not world.scheduler.is_alive:
            return
        for rank in sorted(world.given_up):
            world.post("fail_calls", NodeLost("given up"), rank)
        for _ in range(world.ranks):
            if any(
                rank not in world.given_up and (rank not in world.nodes or not world.cluster.machine(rank).is_alive)
                for rank in range(1, world.ranks)
            ):
                world.cluster.replace()
        for rank, index in world.cluster.missing():
            world.cluster.start_worker(rank, index)
        world.workers = [worker for worker in world.workers if worker.is_alive]

    def _deliver_all(self) -> None:
        world = self.world
        is_any = True
        while is_any:
            world.pump()
            is_any = world.streams.consume_all()
            for wire in list(world.wires):
                while wire.queue:
                    is_any = True
                    wire.deliver(wire.queue.popleft())
            for steps in list(world.under_way):
                is_any = True
                if next(steps, 0) == 0:
                    world.under_way.remove(steps)
            is_any = is_any or bool(world.mailbox)

    def _work_all(self) -> bool:
        busy = [worker for worker in self.world.workers if worker.is_busy]
        for worker in busy:
            for _ in range(200):
                if not worker.is_busy:
                    break
                worker.step(self.world.rng)
        return bool(busy)

    @property
    def _is_at_rest(self) -> bool:
        world = self.world
        dispatcher = world.dispatcher
        is_left = (
            dispatcher.entries
            or dispatcher.outs
            or dispatcher.fetching
            or dispatcher.queue._out
            or any(worker.is_busy for worker in world.workers)
        )
        is_connected = world.is_over or (
            world.connection is not None and world.connection.carries and dispatcher.is_live
        )
        return not is_left and is_connected

    def _what_is_left(self) -> str:
        world = self.world
        dispatcher = world.dispatcher
        calls = [caller for caller in world.callers.values() if caller.state == "waiting"]
        phases = {number: (out.phase.value, out.epoch, out.worker) for number, out in dispatcher.outs.items()}
        busy = [worker.address for worker in world.workers if worker.is_busy]
        return f"{calls[:3]} entries {list(dispatcher.entries)[:5]} outs {phases} fetching {list(dispatcher.fetching)} live {dispatcher.is_live} busy {busy}"

    # ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_cancelled(self) -> None:
        world = self.world
        if world.is_over or not world.dispatcher.is_live:
            return
        for worker in world.workers:
            for slot in worker.slots:
                if slot is not None and slot.running is not None and worker.is_alive and not worker.is_cut_off:
                    caller = world.callers[slot.running.call_id]
                    require(
                        caller.state not in ("cancelled", "failed"), "a call runs on that is cancelled or lost", caller
                    )

    def check_end(self) -> None:
        world = self.world
        waiting = [caller for caller in world.callers.values() if caller.state == "waiting"]
        require(not waiting, "calls do not end", waiting[:3])
        self._check_counts()
        world.streams.check_end()
        dispatcher = world.dispatcher
        for name in ("entries", "outs", "fetching", "_unheard", "_to_stop"):
            require(not getattr(dispatcher, name), f"{name} is not empty at the end", getattr(dispatcher, name))
        require(
            not dispatcher.queue._out and not dispatcher.queue._shipments and not dispatcher.queue._suspects,
            "the queue is not empty at the end",
        )
        require(
            world.counted_seconds <= world.ran_seconds + 1e-6,
            "more time is counted than calls ran",
            world.counted_seconds,
            world.ran_seconds,
        )
        if not world.is_over:
            require(not world.scheduler.tasks, "tasks are not released", list(world.scheduler.tasks))
            for node in world.nodes.values():
                self._check_memory(world.machines[node.instance.id])
            for worker in world.workers:
                require(
                    not worker.kept or not worker.is_alive, "a worker keeps calls at the end", worker.name, worker.kept
                )
            require(
                not dispatcher._kept.batches and not dispatcher._kept.at,
                "kept calls are not forgotten",
                dispatcher._kept,
            )

    def _check_counts(self) -> None:
        world = self.world
        states = Counter(caller.state for caller in world.callers.values())
        if not world.callers:
            return
        progress = world.progress
        assert progress is not None
        counts = (progress.submitted, progress.done, progress.cancelled)
        require(
            counts == (len(world.callers), states["finished"] + states["failed"], states["cancelled"]),
            "the progress is wrong",
            progress,
            states,
        )
        require(progress.failed >= states["failed"], "the failed ones are not counted", progress, states)

    def _check_memory(self, machine: Machine) -> None:
        self.world.values.check_memory(machine)
        for path, content in machine.files.items():
            is_known = not content.startswith("call-") or path in self.world.heard
            require(
                content.startswith("function") or not is_known, "a file is left in the memory of a node", path, content
            )
        functions = sum(content.startswith("function") for content in machine.files.values())
        require(
            functions * FUNCTION_SPANS[0][1] <= LIMIT_BYTES,
            "too many functions are left in the memory of a node",
            machine.files,
        )
