"""Deterministic simulation of the dispatcher. Each seed is one history of calls and losses; messages come late, in
another order, twice or never.

`World` is the dispatcher's surroundings: its owner, the connection, scheduler, workers and machines (`model.py`),
recovery, and callers. It has no thread, clock or socket; `random.Random(seed)` draws the next event. The invariants are
checked after each message, and at the end, when all is repaired and at rest. The first that does not hold raises
`Violation`.

    python -m tests.engine.simulation --seed 17                       one history, printed step by step
    python -m tests.engine.simulation --histories 100000 --from 0     many, in two processes
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.function_files import LIMIT_BYTES
from skyward_core.engine.kept_calls import DECIDED_SECONDS
from skyward_core.engine.losses import HEAD_LOST
from skyward_core.engine.outbox import Entry
from skyward_core.engine.shipments import Phase
from skyward_core.errors import NodeLost, PoolClosed
from skyward_core.events.events import CallProgress, CallRetrying, LogLine
from skyward_core.machines.instances import Node
from skyward_core.worker.wire import Batch, Call, Item, Outcome, OutcomeKind, Parcel, Report
from tests.engine.model import (
    FUNCTION_SPANS,
    LARGE,
    SPANS,
    Connection,
    Machine,
    Scheduler,
    Wire,
    Worker,
    machine_id,
    node_of,
)
from tests.engine.simulated_streams import Streams, Values, names_of

MOST_CALLS = 60
MOST_STREAMS = 3  # that are submitted together
ROUNDS = 40  # of repairs and waiting, after which a history must be at rest
# failures of one kind, characters that make a kind, characters that are printed
PRINTED_OF_A_KIND, WORDS, LONGEST = 3, 60, 600
NOT_FETCHED = "its result could not be fetched"
SMALL = Parcel(b"small")
FUNCTIONS = ("short-a", "short-b", "long-a", "short-big", "long-big")
LARGE_FUNCTIONS = ("short-A", "short-B", "long-C", "short-D")
OF_STREAM = {"resumed", "report", "pool_news"}
LATE = OF_STREAM | {"task_ended", "gathered", "not_gathered", "load_known", "pinged", "fetched", "not_fetched", "cut"}
"""Messages that may come a second time; those of the stream only after their connection was replaced."""
TIMED = {"resumed", "report", "gathered", "pool_news"}
"""Messages to which the owner adds the time."""

type Steps = Generator[None]
"""Something that takes time: other events may happen at each `yield`."""


class Violation(AssertionError):
    """An invariant does not hold."""


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


class World:
    """One history. `run` runs it; `make` makes the dispatcher, which may be a broken one."""

    def __init__(
        self, seed: int, make: Callable[..., Dispatcher] = Dispatcher, trace: Callable[[str], object] | None = None
    ) -> None:
        rng = self.rng = Random(seed)
        self.seed, self.trace = seed, trace
        self.now = 0.0
        self.ids = itertools.count()
        self.serials = itertools.count()
        self.runs = itertools.count()
        self.wires: list[Wire] = []
        self.under_way: list[Steps] = []
        self.mailbox: deque[tuple[str, tuple[Any, ...], dict[str, Any]]] = deque()
        self.before: deque[tuple[str, tuple[Any, ...], dict[str, Any]]] = deque(maxlen=12)
        self.callers: dict[str, Caller] = {}
        self.machines: dict[str, Machine] = {}
        self.workers: list[Worker] = []
        self.heard: set[str] = set()
        """Paths of large outcomes in messages to the dispatcher."""
        self.missed = 0
        self.ran_seconds = self.counted_seconds = 0.0
        self.progress: CallProgress | None = None
        self.is_over = self.is_drained = self.is_cut = self.was_abandoned = False
        self.restarts = 0
        self._draw(rng)
        self._draw_kinds(Random(f"{seed} kinds"))
        self.nodes = {rank: self._new_node(rank) for rank in range(self.ranks)}
        self.given_up: set[int] = set()
        self.resumed_at = math.inf
        """When the present scheduler answered last."""
        self.retiring: set[str] = set()
        """Names of workers that were held: the workers of these names end when all is repaired."""
        self.topics = itertools.count()
        self.dispatcher = make(self.nodes.values(), self._new_topic(), self.retries, is_here=self.is_here)
        self.scheduler = Scheduler(self, self.limit)
        self.connection: Connection | None = None
        self.connections: list[Connection] = []
        self.doers: dict[type, Callable[[Any], object]] = {
            do.Send: self._send,
            do.Follow: self._follow,
            do.TakeBack: self._take_back,
            do.Gather: lambda action: self.under_way.append(self._gather(action)),
            do.Release: self._release,
            do.GiveCredit: self.streams.give_credit,
            do.DeliverItem: self.streams.deliver,
            do.FetchItem: self.streams.fetch,
            do.Stop: lambda action: self.tell(action.epoch, ("cancel", action.call_ids)),
            do.RepeatReports: lambda action: self.tell(action.epoch, ("tell kept", None)),
            do.ReleaseRetainedCalls: lambda action: self.tell(action.epoch, ("release kept", action.call_ids)),
            do.Acknowledge: lambda action: self.tell(
                action.epoch, ("acknowledge", (self.dispatcher.topic, action.number))
            ),
            do.AskLoad: lambda action: self.under_way.append(self._ask_load(action)),
            do.Ping: lambda action: self.under_way.append(self._ping(action)),
            do.Upload: self._upload,
            do.Fetch: lambda action: self.under_way.append(self._fetch(action)),
            do.Remove: lambda action: self.under_way.append(self._remove(action)),
            do.Finish: self._finish,
            do.Fail: self._fail,
            do.Cancelled: self._cancelled,
            do.Discard: lambda action: self.drop_file(action.parcel),
            do.EmitEvent: self._emit,
            do.MeterCalls: self._ran,
            do.CutOff: lambda _: setattr(self, "is_cut", True),
        }

    def _draw(self, rng: Random) -> None:
        """Draw the constants of the history and its kinds of faults."""
        self.retries = rng.choice((0, 0, 0, 1, 1, 2))
        self.ranks = rng.randint(1, 4)
        self.workers_per_node = rng.choice((1, 1, 1, 2))
        self.slots = rng.randint(1, 3)
        self.is_here = rng.random() < 0.25
        self.limit = rng.choice((1_000, 1_000, 1))
        self.steps = rng.randint(40, 240)
        self.keeps = rng.random() < 0.9
        self.kept_limit = rng.choice((1_000, 1_000, 1_000, 1))
        self.absence = rng.choice((0.0, 0.0, 0.8, 0.95))
        self.delivered, self.worked = rng.choice(((0.3, 0.5), (0.4, 0.75), (0.5, 0.75), (0.65, 0.8)))
        self.large = rng.choice((0.0, 0.3, 0.7))
        self.menu = [
            *[self.submit, self.tick] * 4,
            *[self.cancel, self.rejoin, self.reconnect] * 3,
            *[self.pump, self.notice, self.open_ways, self.replace] * 2,
        ]
        faults = (
            (self.kill_worker, 2, 0.5),
            (self.silence_worker, 1, 0.3),
            (self.kill_node, 1, 0.3),
            (self.kill_scheduler, 1, 0.4),
            (self.cut_silently, 2, 0.4),
            (self.cut_openly, 2, 0.5),
            (self.block_way, 2, 0.3),
            (self.hold, 1, 0.3),
            (self.drain, 1, 0.15),
            (self.undrain, 2, 0.5),
            (self.give_up_rank, 1, 0.2),
            (self.abandon, 1, 0.2),
            (self.jump, 1, 0.2),
            (self.duplicate, 4, 0.5),
        )
        for fault, weight, share in faults:
            if rng.random() < share:
                self.menu += [fault] * weight
        self.has_own_faults = rng.random() < 0.1
        self.last_step = rng.choice((None, None, None, None, None, None, None, self.close, self.give_up_all))

    def _draw_kinds(self, rng: Random) -> None:
        """Draw how many calls stream and use scattered values: none in half of the histories."""
        self.streams = Streams(self, rng.choice((0.0, 0.0, 0.0, 0.4, 0.8)))
        self.values = Values(self, rng.choice((0.0, 0.0, 0.0, 0.4, 0.8)))
        if self.streams.share:
            self.steps += 80
            self.menu += [self.cut_silently, self.cut_openly, self.reconnect] * rng.choice((0, 1, 2))
            if rng.random() < 0.7:  # few slots, so that streams come far
                self.ranks, self.workers_per_node, self.slots = min(self.ranks, 2), 1, 1
            self.limit = rng.choice((self.limit, 1))
        if self.values.share:
            self.menu += [self.values.drop] * 2

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Run the history. Raises Violation."""
        rng = self.rng
        self._connect_first()
        last_at = rng.randrange(self.steps) if self.last_step is not None else -1
        for index in range(self.steps):
            self.now += 0.05
            if index == last_at and self.last_step is not None:
                self.last_step()
            chance = rng.random()
            if chance < self.delivered:
                self.deliver()
            elif chance < self.worked:
                self.work()
            else:
                rng.choice(self.menu)()
        self._settle()
        self._check_end()

    def say(self, *words: object) -> None:
        """Print a step of the history."""
        if self.trace is not None:
            self.trace(" ".join(map(str, words)))

    def wire(self, deliver: Callable[[Any], object]) -> Wire:
        """Return a new wire."""
        wire = Wire(deliver)
        self.wires.append(wire)
        return wire

    def post(self, name: str, *args: Any, **more: Any) -> None:
        """Post a message to the dispatcher."""
        self.mailbox.append((name, args, more))

    def deliver(self) -> None:
        """Continue one thing in progress: a message on a wire, a transfer, a question."""
        rng = self.rng
        ready = [wire for wire in self.wires if wire.queue]
        choice = rng.randrange(len(ready) + len(self.under_way)) if ready or self.under_way else -1
        if 0 <= choice < len(ready):
            wire = ready[choice]
            message = wire.queue.popleft()
            if self.trace is not None:
                self.say("  deliver", str(message)[:150])
            wire.deliver(message)
        elif choice >= 0:
            self._go_on(choice - len(ready))
        if rng.random() < 0.75:
            self.pump()
        if self.streams.share and rng.random() < 0.5:
            self.streams.consume()

    def _go_on(self, index: int) -> None:
        steps = self.under_way[index]
        self.say("  go on", steps.__name__)
        if next(steps, 0) == 0:
            self.under_way.remove(steps)

    def work(self) -> None:
        """Let one worker do one thing."""
        busy = [worker for worker in self.workers if worker.is_busy]
        if busy:
            worker = self.rng.choice(busy)
            self.say("  work", worker.address)
            worker.step(self.rng)

    def pump(self) -> None:
        """Let the owner take all its messages, and flush."""
        while self.mailbox:
            self._handle(*self.mailbox.popleft())
        self._handle("flush", (self.now,), {})

    def _handle(self, name: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        if self.trace is not None and name != "flush":
            self.say(">", name, str(args)[:220], more or "")
        if name == "connect":
            self._connect(*args)
            return
        dispatcher = self.dispatcher
        if name in LATE:
            self._note(name, args)
            self.before.append((name, args, more))
        if name in TIMED:
            getattr(dispatcher, name)(*args, self.now, **more)
        else:
            getattr(dispatcher, name)(*args, **more)
        if name == "drain":
            self.is_drained = args[0] is not None
        elif name == "close" or (name == "give_up" and len(args) == 1):
            self.is_over = True
        if name == "resumed" and dispatcher.is_live:
            self.resumed_at = self.now
        self._do_all()
        self._check_queue(name)

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        """Note the large outcomes in messages to the dispatcher."""
        dispatcher, outcomes = self.dispatcher, ()
        if args and args[0] == dispatcher.epoch and dispatcher.is_live:
            if name == "report":
                outcomes = args[1].news
            elif (
                name == "gathered"
                and (out := dispatcher.outs.get(args[1])) is not None
                and out.phase is Phase.GATHERING
            ):
                outcomes = args[2].values()
        self.heard.update(
            item.parcel.path for item in outcomes if isinstance(item, Outcome | Item) and item.parcel.path
        )

    def _do_all(self) -> None:
        while actions := self.dispatcher.take_actions():
            for action in actions:
                if self.trace is not None:
                    self.say("    ", str(action)[:200])
                doer = self.doers.get(type(action))
                if doer is not None:
                    doer(action)

    # ── actions of the owner ─────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, epoch: int, message: tuple[str, Any]) -> None:
        """Send a message to the scheduler, on the connection of this epoch."""
        connection = self.connection
        if connection is not None and connection.epoch == epoch:
            connection.up.send(message)

    def _send(self, action: do.Send) -> None:
        connection = self.connection
        self.require(
            not self.is_over and not self.is_drained, "a batch goes out on a pool that begins no calls", action.key
        )
        if connection is None or connection.epoch != action.epoch:
            return
        if connection.is_closed:
            self.dispatcher.unsent(action.epoch, action.number, OSError("closed"), is_its_fault=False)
        elif self.has_own_faults and self.rng.random() < 0.05:
            self.dispatcher.unsent(action.epoch, action.number, ValueError("cannot be pickled"), is_its_fault=True)
        else:
            for call in action.batch.calls:
                self.callers[call.call_id].sends += 1
            connection.follow(action.number, action.key)
            connection.up.send(("run", (action.key, action.batch, action.address)))

    def _follow(self, action: do.Follow) -> None:
        if self.connection is not None and self.connection.epoch == action.epoch:
            self.connection.follow(action.number, action.key)

    def _release(self, action: do.Release) -> None:
        if self.connection is not None and self.connection.epoch == action.epoch:
            self.connection.release(action.keys)

    def _take_back(self, action: do.TakeBack) -> None:
        connection = self.connection
        if connection is not None and connection.epoch == action.epoch and connection.take_back(action.key):
            self.dispatcher.taken_back(action.epoch, action.number)

    def _gather(self, action: do.Gather) -> Steps:
        connection = self.connection
        if connection is None:
            return
        yield
        task = connection.scheduler.tasks.get(action.key)
        worker = task.worker if task is not None else None
        outcomes = worker.results.get(action.key) if worker is not None and worker.is_alive else None
        if not connection.carries:
            if self.rng.random() < 0.5:
                return  # the question ends with the connection
            outcomes = None
        yield
        if outcomes is None or worker is None:
            self.post("not_gathered", action.epoch, action.number, OSError("it is not there"))
        else:
            self.post("gathered", action.epoch, action.number, outcomes, worker.node.rank, worker.machine.id)

    def _ask_load(self, action: do.AskLoad) -> Steps:
        connection = self.connection
        yield
        load = connection.scheduler.load() if connection is not None and connection.carries else {}
        yield
        self.post("load_known", action.epoch, load)

    def _ping(self, action: do.Ping) -> Steps:
        connection = self.connection
        yield
        self.post("pinged", action.epoch, is_answered=connection is not None and connection.carries)

    def _upload(self, action: do.Upload) -> None:
        machine = self.machines[action.instance_id]
        values = names_of(action.functions)
        for name in values:
            self.values.begins(name, machine)
        self.under_way.append(self._put(action, machine, values))

    def _put(self, action: do.Upload, machine: Machine, values: list[str]) -> Steps:
        yield
        names = [name for name, _ in action.functions]
        is_its_fault = self.has_own_faults and self.rng.random() < 0.1
        has_no_room = bool(values) and self.rng.random() < 0.1
        if is_its_fault or has_no_room or not (machine.is_alive and machine.is_reachable):
            yield
            for name in values:
                self.values.ends(name, machine)
            self.post(
                "upload_failed", action.number, action.instance_id, names, OSError("no way"), is_its_fault=is_its_fault
            )
            return
        arguments = dict[str, Parcel]()
        functions = dict[str, Parcel | None]()
        for name in names:
            functions[name] = None
            if name in values:
                functions[name] = Parcel(b"", (), path := self.new_path(machine), SPANS)
                machine.files[path] = f"value {name}"
                self.values.ends(name, machine)
            elif self.rng.random() < 0.9:
                functions[name] = Parcel(b"", (), path := self.new_path(machine), FUNCTION_SPANS)
                machine.files[path] = f"function {name}"
        for call_id, _ in action.arguments:
            arguments[call_id] = Parcel(b"", (), path := self.new_path(machine), SPANS)
            machine.files[path] = f"arguments of {call_id}"
        yield
        self.post("uploaded", action.number, action.instance_id, arguments, functions)

    def _fetch(self, action: do.Fetch) -> Steps:
        yield
        machine, path = self.machines[action.instance_id], str(action.parcel.path)
        if not (machine.is_alive and machine.is_reachable):
            yield
            self.post("not_fetched", action.call_id, path, OSError("no way"), is_cut=True)
        elif path not in machine.files:
            yield
            self.post("not_fetched", action.call_id, path, OSError("no such file"), is_cut=False)
        else:
            value = machine.files[path]
            if self.rng.random() < 0.1:
                yield
                self.post("not_fetched", action.call_id, path, OSError("cut on the way"), is_cut=True)
                return
            del machine.files[path]
            yield
            self.post("fetched", action.call_id, Parcel(value.encode()), path)

    def _remove(self, action: do.Remove) -> Steps:
        machine = self.machines[action.instance_id]
        yield
        while machine.is_alive and not machine.is_reachable:
            yield
        machine.files.pop(str(action.parcel.path), None)

    def drop_file(self, parcel: Parcel) -> str | None:
        """Remove a file of this machine; return its content."""
        return self.machine_at(parcel.path).files.pop(parcel.path, None) if parcel.path is not None else None

    # ── ends of calls, and events
    # ───────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, action: do.Finish) -> None:
        caller = self._end(action.call_id, "finished")
        outcome = action.outcome
        if outcome.kind is OutcomeKind.RESULT:
            self._check_value(action)
        self.streams.finished(action.call_id, outcome)
        is_stopped = outcome.kind is OutcomeKind.CANCELLED
        self.require(
            not is_stopped or caller.is_cancelled or self.was_abandoned,
            "a call ends as cancelled without a cancel of its caller",
            caller,
        )
        self.require(outcome.kind is not OutcomeKind.RETURNED, "a call ends as handed back", caller)
        if outcome.text and not self.missed:
            caller.finished_run = int(outcome.text)
            self.require(
                caller.lines.issuperset(caller.printed.get(caller.finished_run, ())),
                "a result comes before lines of its call",
                caller,
            )
        self.drop_file(action.arguments)

    def _check_value(self, action: do.Finish) -> None:
        parcel = action.outcome.parcel
        value: str | None = bytes(parcel.data).decode()
        if parcel.path is not None:
            self.require(self.is_here, "a result is delivered that is not here", action.call_id)
            value = self.drop_file(parcel)
            if value is None and not self.machine_at(parcel.path).is_alive:
                return
        self.require(
            value is not None and value.startswith(f"{action.call_id}/"),
            "a call ends with another value",
            action.call_id,
            value,
        )

    def _fail(self, action: do.Fail) -> None:
        caller = self._end(action.call_id, "failed")
        is_of_arguments = action.arguments.path is not None and not self._has_file(action.arguments.path)
        is_lost = (
            isinstance(action.error, NodeLost)
            and not self.is_over
            and "given up" not in str(action.error)
            and "could not be sent" not in str(action.error)
        )
        is_missing = is_lost and self.streams.may_lack_items(action.call_id, str(action.error))
        is_final = self.is_drained or action.arguments.path is not None or self.streams.has_items(action.call_id)
        is_final = is_final or is_missing
        self.require(
            not is_lost or is_final or caller.sends > self.retries,
            "a call is lost that was not sent often enough",
            caller,
        )
        if is_lost and not is_missing and not self.retries:
            self._check_loss(action.call_id, str(action.error))
        self.require(not is_lost or caller.sends > 0 or is_of_arguments, "a call is lost that was never sent", caller)
        self.drop_file(action.arguments)

    def _check_loss(self, call_id: str, reason: str) -> None:
        """A call is lost for the first time: it must not be at a worker that the scheduler reaches, and its outcome
        must not be in transit.
        """
        is_too_late = reason.startswith(HEAD_LOST) and self.now >= self.resumed_at + DECIDED_SECONDS
        if is_too_late or NOT_FETCHED in reason:
            return
        messages = (
            [message[2] for message in self.connection.down.queue if message[0] == "event"]
            if self.connection is not None
            else []
        )
        messages += [args[1] for name, args, _ in self.mailbox if name == "report" and args[0] == self.dispatcher.epoch]
        news = [item for message in messages if isinstance(message, Report) for item in message.news]
        is_reported = any(
            isinstance(item, Outcome) and item.call_id == call_id and item.kind is not OutcomeKind.RETURNED
            for item in news
        )
        self.require(
            not is_reported or not self.dispatcher.is_live or self.was_abandoned,
            "a call is lost whose outcome is in transit",
            call_id,
        )
        if self.scheduler.is_alive:
            for worker in self.scheduler.workers.values():
                is_reached = worker.is_alive and not worker.is_cut_off
                self.require(
                    not is_reached or not worker.has(call_id),
                    "a call is lost that is at a worker",
                    call_id,
                    worker.address,
                )
            is_asked = self.connection is not None and self.connection.carries and self.dispatcher.is_live
            for task in self.scheduler.tasks.values() if is_asked else ():
                outcome = (
                    task.worker.results.get(task.key, {}).get(call_id)
                    if task.worker is not None and task.worker.is_alive
                    else None
                )
                is_result = task.state == "memory" and outcome is not None and outcome.kind is not OutcomeKind.RETURNED
                self.require(not is_result, "a call is lost whose result the scheduler has", call_id)
        for worker in self.workers:
            is_kept = (
                worker.is_alive
                and worker.is_moving
                and worker.has(call_id)
                and self.now < self.resumed_at + DECIDED_SECONDS
            )
            self.require(not is_kept, "a call is lost that a worker takes to the next head", call_id, worker.process)

    def _cancelled(self, action: do.Cancelled) -> None:
        caller = self._end(action.call_id, "cancelled")
        self.require(caller.is_cancelled, "a call is cancelled without a cancel of its caller", caller)
        self.drop_file(action.arguments)

    def _end(self, call_id: str, state: str) -> Caller:
        caller = self.callers[call_id]
        self.require(caller.state == "waiting", f"a call ends twice: {state}", caller)
        caller.state, caller.ended_at = state, self.now
        return caller

    def _emit(self, action: do.EmitEvent) -> None:
        event = action.event
        if isinstance(event, CallProgress):
            self.progress = event
        elif isinstance(event, CallRetrying) and event.attempt == 2:
            self._check_loss(event.call_id, event.reason)
        elif isinstance(event, LogLine) and event.call_id is not None:
            caller = self.callers[event.call_id]
            self.require(event.line not in caller.lines, "a line is emitted twice", event.line)
            self.require(
                f"/{caller.finished_run}:" not in event.line, "a line comes after the result of its call", event.line
            )
            caller.lines.add(event.line)

    def _ran(self, action: do.MeterCalls) -> None:
        self.counted_seconds += action.seconds

    # ── runs at workers ──────────────────────────────────────────────────────────────────────────────────────────────

    def begun(self, worker: Worker, call: Call, batch: Batch) -> tuple[int, bool]:
        """A call begins: return the number of the run, and whether it has its scattered values."""
        function = batch.functions[call.function]
        caller, run = self.callers[call.call_id], next(self.runs)
        caller.begins += 1
        caller.printed[run] = []
        is_reached = not worker.is_cut_off and not self.is_over and caller.ended_at >= worker.joined_at
        self.say("    begins", call.call_id, "run", run)
        self.require(
            caller.begins <= self.retries + 1,
            f"a call begins {caller.begins} times with retries={self.retries}",
            caller,
        )
        self.require(
            caller.state != "failed" or not is_reached or self.streams.lacks_items(call.call_id),
            "a call begins after its caller has seen NodeLost",
            caller,
        )
        if is_reached:
            self.streams.begun(call.call_id)
        entry = self.dispatcher.entries.get(call.call_id)
        has_values = True
        if entry is not None and is_reached:
            has_values = self.values.used(worker, call.shared, batch.functions)
            self.require(caller.begins <= entry.losses + 1, "a call begins again that was not lost", caller)
            for parcel in (call.arguments, function):
                if parcel.path is not None and (machine := self.machine_at(parcel.path)).is_alive:
                    self.require(
                        parcel.path in machine.files, "a file that a call needs is missing", caller, parcel.path
                    )
        return run, has_values

    def printed(self, call_id: str, run: int) -> str:
        """A call prints: return the line."""
        lines = self.callers[call_id].printed[run]
        lines.append(f"{call_id}/{run}:{len(lines)}")
        return lines[-1]

    def machine_at(self, path: str) -> Machine:
        """Return the machine in whose memory a path is."""
        return self.machines[path.split("/")[3]]

    def new_path(self, machine: Machine) -> str:
        """Return the path of a new file."""
        return f"/dev/shm/{machine.id}/{next(self.ids)}"

    # ── callers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self) -> None:
        """A caller submits calls."""
        rng = self.rng
        if len(self.callers) >= MOST_CALLS or self.is_over:
            return
        is_pinned = rng.random() < 0.15
        names = [f"{rank}-{index}" for rank in range(self.ranks) for index in range(self.workers_per_node)]
        count = len(names) if is_pinned else min(rng.choice((1, 2, 3, 5, 8, 12, 30)), MOST_CALLS - len(self.callers))
        function = rng.choice(LARGE_FUNCTIONS if rng.random() < self.large else FUNCTIONS)
        is_large = rng.random() < self.large
        ahead = self.streams.draw(rng) if self.streams.share else 0
        count = min(count, MOST_STREAMS) if ahead and not is_pinned else count
        shared = self.values.draw(rng) if self.values.share else {}
        entries = list[Entry]()
        for index in range(count):
            call_id = f"call-{len(self.callers)}"
            arguments = self._arguments(call_id) if is_large else SMALL
            call = Call(call_id, function, arguments, "job", shared=tuple(shared), ahead=ahead)
            parcel = LARGE if function in LARGE_FUNCTIONS else SMALL
            entries.append(Entry(call, parcel, names[index] if is_pinned else None, shared=shared))
            self.callers[call_id] = Caller(call_id, function)
            if ahead:
                self.streams.add(self.callers[call_id], ahead)
        self.say("submit", count, function, "pinned" if is_pinned else "", "large" if is_large else "")
        self.post("submit", entries)

    def _arguments(self, call_id: str) -> Parcel:
        machine = self.machines[self.nodes[0].instance.id]
        if not self.is_here or not machine.is_alive:
            return LARGE
        path = self.new_path(machine)
        machine.files[path] = f"arguments of {call_id}"
        return Parcel(b"", (), path, SPANS)

    def cancel(self) -> None:
        """A caller cancels a call, or several."""
        waiting = [caller for caller in self.callers.values() if caller.state == "waiting" and not caller.is_cancelled]
        for caller in self.rng.sample(waiting, min(len(waiting), self.rng.choice((1, 1, 3)))):
            self.say("cancel", caller.call_id)
            caller.is_cancelled = True
            self.post("cancel", caller.call_id)

    def drain(self) -> None:
        """The pool drains: it begins no more calls."""
        self.say("drain")
        self.post("drain", PoolClosed("it is being drained"))

    def undrain(self) -> None:
        """It begins calls again."""
        self.post("drain", None)

    def close(self) -> None:
        """The pool ends."""
        self.say("close")
        self.post("close", PoolClosed("it is closed"))

    def give_up_all(self) -> None:
        """Recovery has found no head."""
        self.post("give_up", NodeLost("given up"))

    def give_up_rank(self) -> None:
        """Recovery has found no machine for a vacant rank."""
        if vacant := [rank for rank in range(self.ranks) if rank not in self.nodes or not self._machine(rank).is_alive]:
            rank = self.rng.choice(vacant)
            self.post("give_up", NodeLost("given up"), rank)
            if self.rng.random() < 0.5:
                self.given_up.add(rank)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Half a second or some seconds pass."""
        self.now += self.rng.choice((0.5, 0.5, 2.0, 5.0))
        self.post("tick", self.now, self._is_reachable)
        self.pump()

    def jump(self) -> None:
        """Minutes pass."""
        self.now += 100.0

    def _is_reachable(self, instance_id: str) -> bool:
        machine = self.machines[instance_id]
        return machine.is_alive and machine.is_reachable

    def duplicate(self) -> None:
        """A message comes a second time: one of an earlier connection, or of a task or transfer that has ended."""
        late = [
            message for message in self.before if message[0] not in OF_STREAM or message[1][0] != self.dispatcher.epoch
        ]
        if late:
            self.mailbox.append(self.rng.choice(late))

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _connect_first(self) -> None:
        self.post("connect")
        for rank in range(self.ranks):
            for index in range(self.workers_per_node):
                if self.rng.random() < 0.8:
                    self._start_worker(rank, index)
        self.pump()

    def _connect(self) -> None:
        if self.is_over or not self.scheduler.is_alive:
            self.is_cut = True
            return
        dispatcher = self.dispatcher
        if self.connection is not None:
            self.connection.close(self.rng)
        self.wires = [wire for wire in self.wires if wire.is_open or wire.queue]
        connection = self.connection = Connection(self, self.scheduler, dispatcher.topic)
        connection.epoch = dispatcher.connected(self.now)
        self.connections.append(connection)
        self.is_cut = False
        self._do_all()
        connection.up.send(("subscribe", "pool"))
        connection.up.send(("subscribe", dispatcher.topic))
        connection.up.send(("resume", (dispatcher.topic, dispatcher.heard)))

    def reconnect(self) -> None:
        """Recovery connects again after a cut: to the same scheduler, or to the one that replaces a lost one."""
        if self.is_over or not (self.is_cut or self.connection is None):
            return
        if self.rng.random() < self.absence:
            return
        self.say("reconnect")
        if self.rng.random() < 0.3:
            self.post("disconnected")
            self.pump()
        if not self.scheduler.is_alive:
            self._restart()
        self.post("connect")

    def _restart(self) -> None:
        """Another machine becomes the head. Workers with calls join it, except those of the old head."""
        left = {
            rank: node
            for rank, node in self.nodes.items()
            if (machine := self._machine(rank)).is_alive and machine.is_reachable
        }
        heir = self.rng.choice(sorted(left)) if left else None
        serials = {rank: self._machine(rank).serial for rank in left if rank not in (heir, 0)}
        serials[0] = self._machine(heir).serial if heir is not None else None
        old_head = self._machine(0)
        self.nodes = {rank: self._new_node(rank, serial) for rank, serial in sorted(serials.items())}
        by_machine = {node.instance.id: node for node in self.nodes.values()}
        self.scheduler = Scheduler(self, self.limit)
        self.restarts += 1
        for worker in self.workers:
            if worker.is_alive and not worker.is_moving:
                worker.lose_scheduler(self.rng)
            node, worker.is_moving = by_machine.get(worker.machine.id), False
            if worker.is_alive and node is not None and worker.machine is not old_head:
                worker.move(node)
            elif worker.is_alive and (node is not None or self.rng.random() < 0.5):
                worker.die(self.rng)  # else it does not learn of the new head, and runs on
        self.resumed_at = math.inf
        self.say("restart", [(rank, node.instance.id) for rank, node in self.nodes.items()])
        self._handle("restarted", (tuple(self.nodes.values()), self._is_there, self.now), {})

    def _has_file(self, path: str) -> bool:
        """Whether a file is on a machine of the pool: the memory of others is cleared at any time."""
        machine = self.machine_at(path)
        return path in machine.files and any(node.instance.id == machine.id for node in self.nodes.values())

    def _is_there(self, parcel: Parcel) -> bool:
        return parcel.path in self.machine_at(str(parcel.path)).files

    def _new_topic(self) -> str:
        return f"skyward-{next(self.topics):08d}"

    def cut_silently(self) -> None:
        """The client's connection carries nothing any more, and the client gets no notice."""
        if self.connection is not None and self.connection.carries:
            self.say("cut silently")
            self.connection.up.cut(self.rng, ("gone", None) if self.rng.random() < 0.5 else None)
            self.connection.down.cut(self.rng)

    def cut_openly(self) -> None:
        """The client's connection is closed."""
        if self.connection is not None and self.connection.carries:
            self.say("cut openly")
            self.connection.up.cut(self.rng, ("gone", None))
            self.connection.down.cut(self.rng, ("closed", None, None))

    def abandon(self) -> None:
        """The scheduler has waited for the client for the time of a lease."""
        if self.connection is not None and not self.connection.carries and self.scheduler.is_alive:
            self.say("abandon")
            self.missed += 1
            self.was_abandoned = True
            for connection in self.connections:
                connection.up.queue.clear()  # after so long a time these messages are lost, or have arrived
                self.scheduler.receive(connection, ("gone", None))
            self.scheduler.abandon()

    # ── machines and workers ─────────────────────────────────────────────────────────────────────────────────────────

    def _new_node(self, rank: int, serial: int | None = None) -> Node:
        if serial is None:
            serial = next(self.serials)
            self.machines[machine_id(serial)] = Machine(machine_id(serial), serial)
        return node_of(serial, rank, self.workers_per_node, self.slots)

    def _machine(self, rank: int) -> Machine:
        return self.machines[self.nodes[rank].instance.id]

    def _start_worker(self, rank: int, index: int) -> None:
        name = f"{rank}-{index}"
        if any(worker.name == name for worker in self.scheduler.workers.values()):
            return  # its name is in use
        machine = self._machine(rank)
        here = [
            worker for worker in self.workers if worker.machine is machine and worker.index == index and worker.is_alive
        ]
        worker = next((worker for worker in here if worker.is_moving), None)
        for other in here:
            if other is not worker:
                other.die(self.rng)
        if worker is None:
            worker = Worker(self, self.nodes[rank], machine, index)
            self.workers.append(worker)
        worker.join(self.scheduler)
        self.say("joins", worker.name, worker.address, sorted(worker.kept))

    def _missing(self) -> list[tuple[int, int]]:
        there = {
            (worker.machine.id, worker.index) for worker in self.workers if worker.is_alive and not worker.is_cut_off
        }
        ranks = [rank for rank in self.nodes if self._machine(rank).is_alive]
        return [
            (rank, index)
            for rank in ranks
            for index in range(self.workers_per_node)
            if (self._machine(rank).id, index) not in there
        ]

    def rejoin(self) -> None:
        """A worker that is away joins, in a new process or with its kept calls."""
        if self.scheduler.is_alive and (missing := self._missing()):
            self._start_worker(*self.rng.choice(missing))

    def notice(self) -> None:
        """A worker notices that its scheduler is gone."""
        lost = [worker for worker in self.workers if worker.is_alive and worker.is_cut_off and not worker.is_moving]
        if lost:
            worker = self.rng.choice(lost)
            worker.lose_scheduler(self.rng)
            if self.scheduler.is_alive and worker.is_alive:
                worker.die(self.rng)  # the scheduler has removed this worker

    def kill_worker(self) -> None:
        """A worker process dies."""
        if living := [worker for worker in self.workers if worker.is_alive]:
            with_results = [worker for worker in living if worker.results]
            worker = self.rng.choice(with_results if with_results and self.rng.random() < 0.5 else living)
            self.say("kill", worker.address)
            worker.die(self.rng)

    def silence_worker(self) -> None:
        """A worker and the scheduler cannot reach each other."""
        if reached := [worker for worker in self.workers if worker.is_alive and not worker.is_cut_off]:
            worker = self.rng.choice(reached)
            self.say("silence", worker.address)
            worker.fall_silent(self.rng)

    def kill_node(self) -> None:
        """A machine is gone, with the files in its memory."""
        rank = self.rng.choice(list(self.nodes))
        machine = self._machine(rank)
        self.say("kill node", rank, machine.id)
        machine.is_alive = False
        machine.files.clear()
        for worker in self.workers:
            if worker.machine is machine and worker.is_alive:
                worker.die(self.rng)
        if rank == 0:
            self.kill_scheduler()

    def kill_scheduler(self) -> None:
        """The scheduler's process dies; its workers run on for a while."""
        if not self.scheduler.is_alive:
            return
        self.say("kill scheduler")
        self.scheduler.is_alive = False
        for worker in self.workers:
            if not worker.is_moving:
                worker.up.cut(self.rng)
                worker.is_cut_off = True
        if self.connection is not None:
            self.connection.up.cut(self.rng)
            self.connection.down.cut(self.rng, ("closed", None, None) if self.rng.random() < 0.7 else None)

    def replace(self) -> None:
        """A vacant rank is filled with a new machine."""
        if not self.scheduler.is_alive:
            return
        if vacant := [
            rank for rank in range(1, self.ranks) if rank not in self.nodes or not self._machine(rank).is_alive
        ]:
            rank = self.rng.choice(vacant)
            self.nodes[rank] = self._new_node(rank)
            self.given_up.discard(rank)
            self.say("replace", rank, self.nodes[rank].instance.id)
            self.post("know", [self.nodes[rank]])
            self.pump()

    def block_way(self) -> None:
        """Large values reach a machine no more, and do not come from it."""
        self._machine(self.rng.choice(list(self.nodes))).is_reachable = False

    def open_ways(self) -> None:
        """Large values reach all machines again."""
        for machine in self.machines.values():
            machine.is_reachable = True

    def hold(self) -> None:
        """A node gets no more calls."""
        if self.scheduler.is_alive:
            rank = self.rng.choice(list(self.nodes))
            self.retiring.update(f"{rank}-{index}" for index in range(self.workers_per_node))
            self.scheduler.hold(rank)

    # ── the end of a history
    # ──────────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self) -> None:
        """Repair everything, and go on until the world is at rest."""
        self.say("── settle")
        self.absence = 0.0
        self.values.held.clear()
        if self.connection is not None and not self.connection.carries and self.rng.random() < 0.8:
            self.post("cut", self.connection.epoch)
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
            self.now += 2.5
            self.post("tick", self.now, self._is_reachable)
            self._deliver_all()
            rests = rests + 1 if self._is_at_rest else 0
            if rests == 2:
                return
        raise Violation(f"it does not end: {self._what_is_left()}")

    def _repair(self) -> None:
        self.open_ways()
        for worker in self.workers:
            is_lost = worker.is_cut_off and not worker.is_moving and self.scheduler.is_alive
            if worker.is_alive and (
                is_lost or (worker.name in self.retiring and worker.address in self.scheduler.held)
            ):
                worker.die(self.rng)
        self.reconnect()
        self.pump()
        if not self.scheduler.is_alive:
            return
        for rank in sorted(self.given_up):
            self.post("give_up", NodeLost("given up"), rank)
        for _ in range(self.ranks):
            if any(
                rank not in self.given_up and (rank not in self.nodes or not self._machine(rank).is_alive)
                for rank in range(1, self.ranks)
            ):
                self.replace()
        for rank, index in self._missing():
            self._start_worker(rank, index)
        self.workers = [worker for worker in self.workers if worker.is_alive]

    def _deliver_all(self) -> None:
        is_any = True
        while is_any:
            self.pump()
            is_any = self.streams.consume_all()
            for wire in list(self.wires):
                while wire.queue:
                    is_any = True
                    wire.deliver(wire.queue.popleft())
            for steps in list(self.under_way):
                is_any = True
                if next(steps, 0) == 0:
                    self.under_way.remove(steps)
            is_any = is_any or bool(self.mailbox)

    def _work_all(self) -> bool:
        busy = [worker for worker in self.workers if worker.is_busy]
        for worker in busy:
            for _ in range(200):
                if not worker.is_busy:
                    break
                worker.step(self.rng)
        return bool(busy)

    @property
    def _is_at_rest(self) -> bool:
        dispatcher = self.dispatcher
        is_left = (
            dispatcher.entries
            or dispatcher.outs
            or dispatcher.fetching
            or dispatcher._queue._out
            or any(worker.is_busy for worker in self.workers)
        )
        is_connected = self.is_over or (self.connection is not None and self.connection.carries and dispatcher.is_live)
        return not is_left and is_connected

    def _what_is_left(self) -> str:
        dispatcher = self.dispatcher
        calls = [caller for caller in self.callers.values() if caller.state == "waiting"]
        phases = {number: (out.phase.value, out.epoch, out.worker) for number, out in dispatcher.outs.items()}
        busy = [worker.address for worker in self.workers if worker.is_busy]
        return f"{calls[:3]} entries {list(dispatcher.entries)[:5]} outs {phases} fetching {list(dispatcher.fetching)} live {dispatcher.is_live} busy {busy}"

    # ── invariants ───────────────────────────────────────────────────────────────────────────────────────────────────

    def require(self, is_so: object, what: str, *about: object) -> None:
        """Raise Violation if an invariant does not hold."""
        if not is_so:
            raise Violation(f"{what} {' '.join(map(str, about))}")

    def _check_queue(self, name: str) -> None:
        if self.is_over or self.is_drained:
            self.require(
                not any(True for _ in self.dispatcher._queue._all_waiting),
                f"after {name} calls wait on a pool that begins none",
            )

    def _check_cancelled(self) -> None:
        if self.is_over or not self.dispatcher.is_live:
            return
        for worker in self.workers:
            for slot in worker.slots:
                if slot is not None and slot.running is not None and worker.is_alive and not worker.is_cut_off:
                    caller = self.callers[slot.running.call_id]
                    self.require(
                        caller.state not in ("cancelled", "failed"), "a call runs on that is cancelled or lost", caller
                    )

    def _check_end(self) -> None:
        waiting = [caller for caller in self.callers.values() if caller.state == "waiting"]
        self.require(not waiting, "calls do not end", waiting[:3])
        self._check_counts()
        self.streams.check_end()
        dispatcher = self.dispatcher
        parts = {
            "entries": dispatcher,
            "outs": dispatcher,
            "fetching": dispatcher,
            "_unheard": dispatcher._losses,
            "_to_stop": dispatcher._calls,
        }
        for name, part in parts.items():
            self.require(not getattr(part, name), f"{name} is not empty at the end", getattr(part, name))
        self.require(
            not dispatcher._queue._out and not dispatcher._queue._shipments and not dispatcher._queue._suspects,
            "the queue is not empty at the end",
        )
        self.require(
            self.counted_seconds <= self.ran_seconds + 1e-6,
            "more time is counted than calls ran",
            self.counted_seconds,
            self.ran_seconds,
        )
        if not self.is_over:
            self.require(not self.scheduler.tasks, "tasks are not released", list(self.scheduler.tasks))
            for node in self.nodes.values():
                self._check_memory(self.machines[node.instance.id])
            for worker in self.workers:
                self.require(
                    not worker.kept or not worker.is_alive, "a worker keeps calls at the end", worker.name, worker.kept
                )
            self.require(
                not dispatcher._kept.batches and not dispatcher._kept.at,
                "kept calls are not forgotten",
                dispatcher._kept,
            )

    def _check_counts(self) -> None:
        states = Counter(caller.state for caller in self.callers.values())
        if not self.callers:
            return
        progress = self.progress
        assert progress is not None
        counts = (progress.submitted, progress.done, progress.cancelled)
        self.require(
            counts == (len(self.callers), states["finished"] + states["failed"], states["cancelled"]),
            "the progress is wrong",
            progress,
            states,
        )
        self.require(progress.failed >= states["failed"], "the failed ones are not counted", progress, states)

    def _check_memory(self, machine: Machine) -> None:
        self.values.check_memory(machine)
        for path, content in machine.files.items():
            is_known = not content.startswith("call-") or path in self.heard
            self.require(
                content.startswith("function") or not is_known, "a file is left in the memory of a node", path, content
            )
        functions = sum(content.startswith("function") for content in machine.files.values())
        self.require(
            functions * FUNCTION_SPANS[0][1] <= LIMIT_BYTES,
            "too many functions are left in the memory of a node",
            machine.files,
        )


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def explore(seed: int, make: Callable[..., Dispatcher] = Dispatcher) -> str | None:
    """Run one history; return its failure, if there is one."""
    try:
        World(seed, make).run()
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore many histories, or print one."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.simulation", description="Explore histories of the dispatcher."
    )
    parser.add_argument("--seed", type=int, help="print this history step by step")
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.seed is not None:
        World(options.seed, trace=print).run()
        return 0
    seeds = range(options.first, options.first + options.histories)
    began = time.monotonic()
    failures = Counter[str]()
    for failure in filter(None, _explored(seeds, options.processes)):
        what = failure.partition(": ")[2][:WORDS]
        failures[what] += 1
        if failures[what] <= PRINTED_OF_A_KIND:
            print(failure[:LONGEST], flush=True)
    print(
        f"{len(seeds)} histories from seed {options.first} in {time.monotonic() - began:.0f} s, {failures.total()} failed"
    )
    for what, count in failures.most_common():
        print(f"{count:7} {what}")
    return 1 if failures else 0


def _explored(seeds: range, processes: int) -> Iterator[str | None]:
    if processes == 1:
        yield from map(explore, seeds)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(explore, seeds, chunksize=100)


if __name__ == "__main__":
    sys.exit(main())
