"""The calls of the simulation (`simulation.py`): their callers, their runs at workers, and their ends, with the
invariants of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skyward_core.engine import actions as do
from skyward_core.engine.kept_calls import DECIDED_SECONDS
from skyward_core.engine.losses import HEAD_LOST
from skyward_core.engine.outbox import Entry
from skyward_core.errors import NodeLost
from skyward_core.events.events import CallProgress, CallRetrying, LogLine
from skyward_core.worker.wire import Batch, Call, Outcome, OutcomeKind, Parcel, Report
from tests.engine.model import LARGE, SPANS

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
        rng = self.world.rng
        if len(self.world.callers) >= MOST_CALLS or self.world.is_over:
            return
        is_pinned = rng.random() < 0.15
        names = [f"{rank}-{index}" for rank in range(self.world.ranks) for index in range(self.world.workers_per_node)]
        count = (
            len(names) if is_pinned else min(rng.choice((1, 2, 3, 5, 8, 12, 30)), MOST_CALLS - len(self.world.callers))
        )
        function = rng.choice(LARGE_FUNCTIONS if rng.random() < self.world.large else FUNCTIONS)
        is_large = rng.random() < self.world.large
        ahead = self.world.streams.draw(rng) if self.world.streams.share else 0
        count = min(count, MOST_STREAMS) if ahead and not is_pinned else count
        shared = self.world.values.draw(rng) if self.world.values.share else {}
        entries = list[Entry]()
        for index in range(count):
            call_id = f"call-{len(self.world.callers)}"
            arguments = self._arguments(call_id) if is_large else SMALL
            call = Call(call_id, function, arguments, "job", shared=tuple(shared), ahead=ahead)
            parcel = LARGE if function in LARGE_FUNCTIONS else SMALL
            entries.append(Entry(call, parcel, names[index] if is_pinned else None, shared=shared))
            self.world.callers[call_id] = Caller(call_id, function)
            if ahead:
                self.world.streams.add(self.world.callers[call_id], ahead)
        self.world.say("submit", count, function, "pinned" if is_pinned else "", "large" if is_large else "")
        self.world.post("submit", entries)

    def _arguments(self, call_id: str) -> Parcel:
        machine = self.world.machines[self.world.nodes[0].instance.id]
        if not self.world.is_here or not machine.is_alive:
            return LARGE
        path = self.world.new_path(machine)
        machine.files[path] = f"arguments of {call_id}"
        return Parcel(b"", (), path, SPANS)

    def cancel(self) -> None:
        """A caller cancels a call, or several."""
        waiting = [
            caller for caller in self.world.callers.values() if caller.state == "waiting" and not caller.is_cancelled
        ]
        for caller in self.world.rng.sample(waiting, min(len(waiting), self.world.rng.choice((1, 1, 3)))):
            self.world.say("cancel", caller.call_id)
            caller.is_cancelled = True
            self.world.post("cancel", caller.call_id)

    # ── ends of calls, and events ─────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, action: do.Finish) -> None:
        caller = self._end(action.call_id, "finished")
        outcome = action.outcome
        if outcome.kind is OutcomeKind.RESULT:
            self._check_value(action)
        self.world.streams.finished(action.call_id, outcome)
        is_stopped = outcome.kind is OutcomeKind.CANCELLED
        self.world.require(
            not is_stopped or caller.is_cancelled or self.world.was_abandoned,
            "a call ends as cancelled without a cancel of its caller",
            caller,
        )
        self.world.require(outcome.kind is not OutcomeKind.RETURNED, "a call ends as handed back", caller)
        if outcome.text and not self.world.missed:
            caller.finished_run = int(outcome.text)
            self.world.require(
                caller.lines.issuperset(caller.printed.get(caller.finished_run, ())),
                "a result comes before lines of its call",
                caller,
            )
        self.world.drop_file(action.arguments)

    def _check_value(self, action: do.Finish) -> None:
        parcel = action.outcome.parcel
        value: str | None = bytes(parcel.data).decode()
        if parcel.path is not None:
            self.world.require(self.world.is_here, "a result is delivered that is not here", action.call_id)
            value = self.world.drop_file(parcel)
            if value is None and not self.world.machine_at(parcel.path).is_alive:
                return
        self.world.require(
            value is not None and value.startswith(f"{action.call_id}/"),
            "a call ends with another value",
            action.call_id,
            value,
        )

    def _fail(self, action: do.Fail) -> None:
        caller = self._end(action.call_id, "failed")
        is_of_arguments = action.arguments.path is not None and not self.world.cluster.has_file(action.arguments.path)
        is_lost = (
            isinstance(action.error, NodeLost)
            and not self.world.is_over
            and "given up" not in str(action.error)
            and "could not be sent" not in str(action.error)
        )
        is_missing = is_lost and self.world.streams.may_lack_items(action.call_id, str(action.error))
        is_final = (
            self.world.is_drained or action.arguments.path is not None or self.world.streams.has_items(action.call_id)
        )
        is_final = is_final or is_missing
        self.world.require(
            not is_lost or is_final or caller.sends > self.world.retries,
            "a call is lost that was not sent often enough",
            caller,
        )
        if is_lost and not is_missing and not self.world.retries:
            self._check_loss(action.call_id, str(action.error))
        self.world.require(
            not is_lost or caller.sends > 0 or is_of_arguments, "a call is lost that was never sent", caller
        )
        self.world.drop_file(action.arguments)

    def _check_loss(self, call_id: str, reason: str) -> None:
        """A call is lost for the first time: it must not be at a worker that the scheduler reaches, and its outcome
        must not be in transit.
        """
        is_too_late = reason.startswith(HEAD_LOST) and self.world.now >= self.world.resumed_at + DECIDED_SECONDS
        if is_too_late or NOT_FETCHED in reason:
            return
        messages = (
            [message[2] for message in self.world.connection.down.queue if message[0] == "event"]
            if self.world.connection is not None
            else []
        )
        messages += [
            args[1]
            for name, args, _ in self.world.mailbox
            if name == "report" and args[0] == self.world.dispatcher.epoch
        ]
        news = [item for message in messages if isinstance(message, Report) for item in message.news]
        is_reported = any(
            isinstance(item, Outcome) and item.call_id == call_id and item.kind is not OutcomeKind.RETURNED
            for item in news
        )
        self.world.require(
            not is_reported or not self.world.dispatcher.is_live or self.world.was_abandoned,
            "a call is lost whose outcome is in transit",
            call_id,
        )
        if self.world.scheduler.is_alive:
            for worker in self.world.scheduler.workers.values():
                is_reached = worker.is_alive and not worker.is_cut_off
                self.world.require(
                    not is_reached or not worker.has(call_id),
                    "a call is lost that is at a worker",
                    call_id,
                    worker.address,
                )
            is_asked = (
                self.world.connection is not None and self.world.connection.carries and self.world.dispatcher.is_live
            )
            for task in self.world.scheduler.tasks.values() if is_asked else ():
                outcome = (
                    task.worker.results.get(task.key, {}).get(call_id)
                    if task.worker is not None and task.worker.is_alive
                    else None
                )
                is_result = task.state == "memory" and outcome is not None and outcome.kind is not OutcomeKind.RETURNED
                self.world.require(not is_result, "a call is lost whose result the scheduler has", call_id)
        for worker in self.world.workers:
            is_kept = (
                worker.is_alive
                and worker.is_moving
                and worker.has(call_id)
                and self.world.now < self.world.resumed_at + DECIDED_SECONDS
            )
            self.world.require(
                not is_kept, "a call is lost that a worker takes to the next head", call_id, worker.process
            )

    def _cancelled(self, action: do.Cancelled) -> None:
        caller = self._end(action.call_id, "cancelled")
        self.world.require(caller.is_cancelled, "a call is cancelled without a cancel of its caller", caller)
        self.world.drop_file(action.arguments)

    def _end(self, call_id: str, state: str) -> Caller:
        caller = self.world.callers[call_id]
        self.world.require(caller.state == "waiting", f"a call ends twice: {state}", caller)
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
            self.world.require(event.line not in caller.lines, "a line is emitted twice", event.line)
            self.world.require(
                f"/{caller.finished_run}:" not in event.line, "a line comes after the result of its call", event.line
            )
            caller.lines.add(event.line)

    def _ran(self, action: do.MeterCalls) -> None:
        self.world.counted_seconds += action.seconds

    # ── runs at workers ───────────────────────────────────────────────────────────────────────────────────────────────

    def begun(self, worker: Worker, call: Call, batch: Batch) -> tuple[int, bool]:
        """A call begins: return the number of the run, and whether it has its scattered values."""
        function = batch.functions[call.function]
        caller, run = self.world.callers[call.call_id], next(self.world.runs)
        caller.begins += 1
        caller.printed[run] = []
        is_reached = not worker.is_cut_off and not self.world.is_over and caller.ended_at >= worker.joined_at
        self.world.say("    begins", call.call_id, "run", run)
        self.world.require(
            caller.begins <= self.world.retries + 1,
            f"a call begins {caller.begins} times with retries={self.world.retries}",
            caller,
        )
        self.world.require(
            caller.state != "failed" or not is_reached or self.world.streams.lacks_items(call.call_id),
            "a call begins after its caller has seen NodeLost",
            caller,
        )
        if is_reached:
            self.world.streams.begun(call.call_id)
        entry = self.world.dispatcher.entries.get(call.call_id)
        has_values = True
        if entry is not None and is_reached:
            has_values = self.world.values.used(worker, call.shared, batch.functions)
            self.world.require(caller.begins <= entry.losses + 1, "a call begins again that was not lost", caller)
            for parcel in (call.arguments, function):
                if parcel.path is not None and (machine := self.world.machine_at(parcel.path)).is_alive:
                    self.world.require(
                        parcel.path in machine.files, "a file that a call needs is missing", caller, parcel.path
                    )
        return run, has_values

    def printed(self, call_id: str, run: int) -> str:
        """A call prints: return the line."""
        lines = self.world.callers[call_id].printed[run]
        lines.append(f"{call_id}/{run}:{len(lines)}")
        return lines[-1]
