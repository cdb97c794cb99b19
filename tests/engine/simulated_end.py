"""The end of a history in the simulation (`simulation.py`): all is repaired, and what must hold at rest is checked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from skyward_core.engine.function_files import LIMIT_BYTES
from skyward_core.errors import NodeLost
from tests.engine.model import FUNCTION_SPANS
from tests.engine.simulated_calls import MOST_CALLS

if TYPE_CHECKING:
    from tests.engine.model import Machine
    from tests.engine.simulation import World

ROUNDS = 40  # of repairs and waiting, after which a history must be at rest


class Violation(AssertionError):
    """An invariant does not hold."""


class Ending:
    """The end of a history."""

    def __init__(self, world: World) -> None:
        self.world = world

    # ── repairs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Repair everything, and go on until the world is at rest."""
        self.world.say("── settle")
        self.world.absence = 0.0
        self.world.values.held.clear()
        if self.world.connection is not None and not self.world.connection.carries and self.world.rng.random() < 0.8:
            self.world.post("cut", self.world.connection.epoch)
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
            self.world.now += 2.5
            self.world.post("tick", self.world.now, self.world.is_reachable)
            self._deliver_all()
            rests = rests + 1 if self._is_at_rest else 0
            if rests == 2:
                return
        raise Violation(f"it does not end: {self._what_is_left()}")

    def _repair(self) -> None:
        self.world.cluster.open_ways()
        for worker in self.world.workers:
            is_lost = worker.is_cut_off and not worker.is_moving and self.world.scheduler.is_alive
            if worker.is_alive and (
                is_lost or (worker.name in self.world.retiring and worker.address in self.world.scheduler.held)
            ):
                worker.die(self.world.rng)
        self.world.cluster.reconnect()
        self.world.pump()
        if not self.world.scheduler.is_alive:
            return
        for rank in sorted(self.world.given_up):
            self.world.post("give_up", NodeLost("given up"), rank)
        for _ in range(self.world.ranks):
            if any(
                rank not in self.world.given_up
                and (rank not in self.world.nodes or not self.world.cluster.machine(rank).is_alive)
                for rank in range(1, self.world.ranks)
            ):
                self.world.cluster.replace()
        for rank, index in self.world.cluster.missing():
            self.world.cluster.start_worker(rank, index)
        self.world.workers = [worker for worker in self.world.workers if worker.is_alive]

    def _deliver_all(self) -> None:
        is_any = True
        while is_any:
            self.world.pump()
            is_any = self.world.streams.consume_all()
            for wire in list(self.world.wires):
                while wire.queue:
                    is_any = True
                    wire.deliver(wire.queue.popleft())
            for steps in list(self.world.under_way):
                is_any = True
                if next(steps, 0) == 0:
                    self.world.under_way.remove(steps)
            is_any = is_any or bool(self.world.mailbox)

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
        dispatcher = self.world.dispatcher
        is_left = (
            dispatcher.entries
            or dispatcher.outs
            or dispatcher.fetching
            or dispatcher._queue._out
            or any(worker.is_busy for worker in self.world.workers)
        )
        is_connected = self.world.is_over or (
            self.world.connection is not None and self.world.connection.carries and dispatcher.is_live
        )
        return not is_left and is_connected

    def _what_is_left(self) -> str:
        dispatcher = self.world.dispatcher
        calls = [caller for caller in self.world.callers.values() if caller.state == "waiting"]
        phases = {number: (out.phase.value, out.epoch, out.worker) for number, out in dispatcher.outs.items()}
        busy = [worker.address for worker in self.world.workers if worker.is_busy]
        return f"{calls[:3]} entries {list(dispatcher.entries)[:5]} outs {phases} fetching {list(dispatcher.fetching)} live {dispatcher.is_live} busy {busy}"

    # ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_cancelled(self) -> None:
        if self.world.is_over or not self.world.dispatcher.is_live:
            return
        for worker in self.world.workers:
            for slot in worker.slots:
                if slot is not None and slot.running is not None and worker.is_alive and not worker.is_cut_off:
                    caller = self.world.callers[slot.running.call_id]
                    self.world.require(
                        caller.state not in ("cancelled", "failed"), "a call runs on that is cancelled or lost", caller
                    )

    def check_end(self) -> None:
        waiting = [caller for caller in self.world.callers.values() if caller.state == "waiting"]
        self.world.require(not waiting, "calls do not end", waiting[:3])
        self._check_counts()
        self.world.streams.check_end()
        dispatcher = self.world.dispatcher
        parts = {
            "entries": dispatcher,
            "outs": dispatcher,
            "fetching": dispatcher,
            "_unheard": dispatcher._losses,
            "_to_stop": dispatcher._calls,
        }
        for name, part in parts.items():
            self.world.require(not getattr(part, name), f"{name} is not empty at the end", getattr(part, name))
        self.world.require(
            not dispatcher._queue._out and not dispatcher._queue._shipments and not dispatcher._queue._suspects,
            "the queue is not empty at the end",
        )
        self.world.require(
            self.world.counted_seconds <= self.world.ran_seconds + 1e-6,
            "more time is counted than calls ran",
            self.world.counted_seconds,
            self.world.ran_seconds,
        )
        if not self.world.is_over:
            self.world.require(
                not self.world.scheduler.tasks, "tasks are not released", list(self.world.scheduler.tasks)
            )
            for node in self.world.nodes.values():
                self._check_memory(self.world.machines[node.instance.id])
            for worker in self.world.workers:
                self.world.require(
                    not worker.kept or not worker.is_alive, "a worker keeps calls at the end", worker.name, worker.kept
                )
            self.world.require(
                not dispatcher._kept.batches and not dispatcher._kept.at,
                "kept calls are not forgotten",
                dispatcher._kept,
            )

    def _check_counts(self) -> None:
        states = Counter(caller.state for caller in self.world.callers.values())
        if not self.world.callers:
            return
        progress = self.world.progress
        assert progress is not None
        counts = (progress.submitted, progress.done, progress.cancelled)
        self.world.require(
            counts == (len(self.world.callers), states["finished"] + states["failed"], states["cancelled"]),
            "the progress is wrong",
            progress,
            states,
        )
        self.world.require(progress.failed >= states["failed"], "the failed ones are not counted", progress, states)

    def _check_memory(self, machine: Machine) -> None:
        self.world.values.check_memory(machine)
        for path, content in machine.files.items():
            is_known = not content.startswith("call-") or path in self.world.heard
            self.world.require(
                content.startswith("function") or not is_known, "a file is left in the memory of a node", path, content
            )
        functions = sum(content.startswith("function") for content in machine.files.values())
        self.world.require(
            functions * FUNCTION_SPANS[0][1] <= LIMIT_BYTES,
            "too many functions are left in the memory of a node",
            machine.files,
        )
