"""The calls of the simulation (`simulation.py`): their callers, their runs at workers, and their ends, with the
invariants of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skyward_core.engine import actions as do
from skyward_core.engine.dispatcher import HEAD_LOST
from skyward_core.engine.outbox import Entry
from skyward_core.engine.state import DECIDED_SECONDS
from skyward_core.errors import NodeLost
from skyward_core.events.events import CallProgress, CallRetrying, LogLine
from skyward_core.wire.messages import Batch, Call, Outcome, OutcomeKind, Parcel, Report
from tests.engine.model import LARGE, SPANS, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.model import Worker
    from tests.engine.simulation import World

MOST_CALLS = 60
MOST_STREAMS = 3  # that are submitted together
NOT_FETCHED = "its result could not be fetched"
SMALL = Parcel(b"small")
FUNCTIONS = ("short-a", "short-b", "long-a", "short-big", "long-big")
LARGE_FUNCTIONS = ("short-A", "short-B", "long-C", "short-D")


@dataclass(slots=True)
class Caller:
    """The caller of one call, and the call's true state, as the workers know it."""

    call_id: str
    function: str
    state: str = "waiting"
    is_cancelled: bool = False
    sends: int = 0
    begins: int = 0
    finished_run: int = -1
    ended_at: float = math.inf
    printed: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    lines: set[str] = field(default_factory=set[str])


class Calls:
    """The callers of a history."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.doers: dict[type, Callable[..., object]] = {
            do.Finish: self._finish,
            do.Fail: self._fail,
            do.Cancelled: self._cancelled,
            do.Discard: lambda action: world.drop_file(action.parcel),
            do.EmitEvent: self._emit,
            do.MeterCalls: self._ran,
        }
        """What becomes of actions of the dispatcher that callers see."""

    # ── callers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self) -> None:
        """A caller submits calls."""
        world = self.world
        rng = world.rng
        if len(world.callers) >= MOST_CALLS or world.is_over:
            return
        is_pinned = rng.random() < 0.15
        names = [f"{rank}-{index}" for rank in range(world.ranks) for index in range(world.workers_per_node)]
        count = len(names) if is_pinned else min(rng.choice((1, 2, 3, 5, 8, 12, 30)), MOST_CALLS - len(world.callers))
        function = rng.choice(LARGE_FUNCTIONS if rng.random() < world.large else FUNCTIONS)
        is_large = rng.random() < world.large
        ahead = world.streams.draw(rng) if world.streams.share else 0
        count = min(count, MOST_STREAMS) if ahead and not is_pinned else count
        shared = world.values.draw(rng) if world.values.share else {}
        entries = list[Entry]()
        for index in range(count):
            call_id = f"call-{len(world.callers)}"
            arguments = self._arguments(call_id) if is_large else SMALL
            call = Call(call_id, function, arguments, "job", shared=tuple(shared), ahead=ahead)
            parcel = LARGE if function in LARGE_FUNCTIONS else SMALL
            entries.append(Entry(call, parcel, names[index] if is_pinned else None, shared=shared))
            world.callers[call_id] = Caller(call_id, function)
            if ahead:
                world.streams.add(world.callers[call_id], ahead)
        world.say("submit", count, function, "pinned" if is_pinned else "", "large" if is_large else "")
        world.post("submit", entries)

    def _arguments(self, call_id: str) -> Parcel:
        world = self.world
        machine = world.machines[world.nodes[0].instance.id]
        if not world.is_local or not machine.is_alive:
            return LARGE
        path = world.new_path(machine)
        machine.files[path] = f"arguments of {call_id}"
        return Parcel(b"", (), path, SPANS)

    def cancel(self) -> None:
        """A caller cancels a call, or several."""
        world = self.world
        waiting = [caller for caller in world.callers.values() if caller.state == "waiting" and not caller.is_cancelled]
        for caller in world.rng.sample(waiting, min(len(waiting), world.rng.choice((1, 1, 3)))):
            world.say("cancel", caller.call_id)
            caller.is_cancelled = True
            world.post("cancel", caller.call_id)

    # ── ends of calls, and events ─────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, action: do.Finish) -> None:
        world = self.world
        caller = self._end(action.call_id, "finished")
        outcome = action.outcome
        if outcome.kind is OutcomeKind.RESULT:
            self._check_value(action)
        world.streams.finished(action.call_id, outcome)
        is_stopped = outcome.kind is OutcomeKind.CANCELLED
        require(
            not is_stopped or caller.is_cancelled or world.was_abandoned,
            "a call ends as cancelled without a cancel of its caller",
            caller,
        )
        require(outcome.kind is not OutcomeKind.RETURNED, "a call ends as handed back", caller)
        if outcome.text and not world.missed:
            caller.finished_run = int(outcome.text)
            require(
                caller.lines.issuperset(caller.printed.get(caller.finished_run, ())),
                "a result comes before lines of its call",
                caller,
            )
        world.drop_file(action.arguments)

    def _check_value(self, action: do.Finish) -> None:
        world = self.world
        parcel = action.outcome.parcel
        value: str | None = bytes(parcel.data).decode()
        if parcel.path is not None:
            require(world.is_local, "a result is delivered that is not here", action.call_id)
            value = world.drop_file(parcel)
            if value is None and not world.machine_at(parcel.path).is_alive:
                return
        require(
            value is not None and value.startswith(f"{action.call_id}/"),
            "a call ends with another value",
            action.call_id,
            value,
        )

    def _fail(self, action: do.Fail) -> None:
        world = self.world
        caller = self._end(action.call_id, "failed")
        is_of_arguments = action.arguments.path is not None and not world.cluster.has_file(action.arguments.path)
        is_lost = (
            isinstance(action.error, NodeLost)
            and not world.is_over
            and "given up" not in str(action.error)
            and "could not be sent" not in str(action.error)
        )
        is_missing = is_lost and world.streams.may_lack_items(action.call_id, str(action.error))
        is_final = world.is_drained or action.arguments.path is not None or world.streams.has_items(action.call_id)
        is_final = is_final or is_missing
        require(
            not is_lost or is_final or caller.sends > world.retries,
            "a call is lost that was not sent often enough",
            caller,
        )
        if is_lost and not is_missing and not world.retries:
            self._check_loss(action.call_id, str(action.error))
        require(not is_lost or caller.sends > 0 or is_of_arguments, "a call is lost that was never sent", caller)
        world.drop_file(action.arguments)

    def _check_loss(self, call_id: str, reason: str) -> None:
        """A call is lost for the first time: it must not be at a worker that the scheduler reaches, and its outcome
        must not be in transit.
        """
        world = self.world
        is_too_late = reason.startswith(HEAD_LOST) and world.now >= world.resumed_at + DECIDED_SECONDS
        if is_too_late or NOT_FETCHED in reason:
            return
        messages = (
            [message[2] for message in world.connection.down.queue if message[0] == "event"]
            if world.connection is not None
            else []
        )
        messages += [
            args[1] for name, args, _ in world.mailbox if name == "report" and args[0] == world.dispatcher.epoch
        ]
        news = [item for message in messages if isinstance(message, Report) for item in message.news]
        is_reported = any(
            isinstance(item, Outcome) and item.call_id == call_id and item.kind is not OutcomeKind.RETURNED
            for item in news
        )
        require(
            not is_reported or not world.dispatcher.is_live or world.was_abandoned,
            "a call is lost whose outcome is in transit",
            call_id,
        )
        if world.scheduler.is_alive:
            for worker in world.scheduler.workers.values():
                is_reached = worker.is_alive and not worker.is_cut_off
                require(
                    not is_reached or not worker.has(call_id),
                    "a call is lost that is at a worker",
                    call_id,
                    worker.address,
                )
            is_asked = world.connection is not None and world.connection.carries and world.dispatcher.is_live
            for task in world.scheduler.tasks.values() if is_asked else ():
                outcome = (
                    task.worker.results.get(task.key, {}).get(call_id)
                    if task.worker is not None and task.worker.is_alive
                    else None
                )
                is_result = task.state == "memory" and outcome is not None and outcome.kind is not OutcomeKind.RETURNED
                require(not is_result, "a call is lost whose result the scheduler has", call_id)
        for worker in world.workers:
            is_kept = (
                worker.is_alive
                and worker.is_moving
                and worker.has(call_id)
                and world.now < world.resumed_at + DECIDED_SECONDS
            )
            require(not is_kept, "a call is lost that a worker takes to the next head", call_id, worker.process)

    def _cancelled(self, action: do.Cancelled) -> None:
        caller = self._end(action.call_id, "cancelled")
        require(caller.is_cancelled, "a call is cancelled without a cancel of its caller", caller)
        self.world.drop_file(action.arguments)

    def _end(self, call_id: str, state: str) -> Caller:
        caller = self.world.callers[call_id]
        require(caller.state == "waiting", f"a call ends twice: {state}", caller)
        caller.state, caller.ended_at = state, self.world.now
        return caller

    def _emit(self, action: do.EmitEvent) -> None:
        event = action.event
        if isinstance(event, CallProgress):
            self.world.progress = event
        elif isinstance(event, CallRetrying) and event.attempt == 2:
            self._check_loss(event.call_id, event.reason)
        elif isinstance(event, LogLine) and event.call_id is not None:
            caller = self.world.callers[event.call_id]
            require(event.line not in caller.lines, "a line is emitted twice", event.line)
            require(
                f"/{caller.finished_run}:" not in event.line, "a line comes after the result of its call", event.line
            )
            caller.lines.add(event.line)

    def _ran(self, action: do.MeterCalls) -> None:
        self.world.counted_seconds += sum(action.seconds_by_use.values())

    # ── runs at workers ───────────────────────────────────────────────────────────────────────────────────────────────

    def begun(self, worker: Worker, call: Call, batch: Batch) -> tuple[int, bool]:
        """A call begins: return the number of the run, and whether it has its scattered values."""
        world = self.world
        function = batch.functions[call.function]
        caller, run = world.callers[call.call_id], next(world.runs)
        caller.begins += 1
        caller.printed[run] = []
        is_reached = not worker.is_cut_off and not world.is_over and caller.ended_at >= worker.joined_at
        world.say("    begins", call.call_id, "run", run)
        require(
            caller.begins <= world.retries + 1,
            f"a call begins {caller.begins} times with retries={world.retries}",
            caller,
        )
        require(
            caller.state != "failed" or not is_reached or world.streams.lacks_items(call.call_id),
            "a call begins after its caller has seen NodeLost",
            caller,
        )
        if is_reached:
            world.streams.begun(call.call_id)
        entry = world.dispatcher.entries.get(call.call_id)
        has_values = True
        if entry is not None and is_reached:
            has_values = world.values.used(worker, call.shared, batch.functions)
            require(caller.begins <= entry.losses + 1, "a call begins again that was not lost", caller)
            for parcel in (call.arguments, function):
                if parcel.path is not None and (machine := world.machine_at(parcel.path)).is_alive:
                    require(parcel.path in machine.files, "a file that a call needs is missing", caller, parcel.path)
        return run, has_values

    def printed(self, call_id: str, run: int) -> str:
        """A call prints: return the line."""
        lines = self.world.callers[call_id].printed[run]
        lines.append(f"{call_id}/{run}:{len(lines)}")
        return lines[-1]
