"""Models of the dispatcher's surroundings: wires, workers with their slots, and the memory of machines. The scheduler is
in `model_scheduler.py`.

They behave like `worker/calls.py`, `worker/node.py`, `worker/slot.py` and Dask, as seen by a client. They have no
threads and no clock: a wire holds its messages until the simulation delivers them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

from skyward_core.machines.instances import Instance, InstanceState, Node
from skyward_core.wire.messages import Batch, Call, Item, Outcome, OutcomeKind, Output, Parcel, Report
from skyward_core.wire.protocol import WorkerFree, WorkerKept

if TYPE_CHECKING:
    from tests.engine.model_scheduler import Scheduler
    from tests.engine.simulation import World

LARGE = Parcel(bytes(70_000))
SPANS = ((0, 70_000),)
FUNCTION_SPANS = ((0, 30 << 20),)  # only two of them fit below the limit of a node
SECONDS = {"short": 0.0005, "long": 1.0}


class Violation(AssertionError):
    """An invariant does not hold."""


def require(is_so: object, what: str, *about: object) -> None:
    """Raise Violation if an invariant does not hold."""
    if not is_so:
        raise Violation(f"{what} {' '.join(map(str, about))}")


@cache
def node_of(serial: int, rank: int, workers: int, slots: int) -> Node:
    """Return the node of a rank on the machine of this number."""
    name = machine_id(serial)
    instance = Instance(
        id=name, provider="model", pool_id="pool", rank=rank, state=InstanceState.RUNNING, region="", instance_type=""
    )
    return Node(instance=instance, rank=rank, workers=workers, slots=slots)


def machine_id(serial: int) -> str:
    """Return the id of a machine; no id is part of another."""
    return f"machine-{serial:03d}"


class Wire:
    """Messages in one direction, in order.

    After a cut it delivers some of the messages in transit, and takes no more.
    """

    __slots__ = ("deliver", "is_open", "queue")

    def __init__(self, deliver: Callable[[Any], object]) -> None:
        self.deliver = deliver
        self.queue: deque[Any] = deque()
        self.is_open = True

    def send(self, message: Any) -> None:
        """Send a message."""
        if self.is_open:
            self.queue.append(message)

    def cut(self, rng: Random, last: Any = None) -> None:
        """Take no more messages, and lose the last ones in transit.

        `last` is the message by which the other side notices the cut.
        """
        if self.is_open:
            for _ in range(rng.randint(0, len(self.queue))):
                self.queue.pop()
        self.is_open = False
        if last is not None:
            self.queue.append(last)


@dataclass(slots=True)
class Machine:
    """A machine: the files in its memory and their contents. `is_reachable`: whether large values can be sent to it."""

    id: str
    serial: int
    files: dict[str, str] = field(default_factory=dict[str, str])
    is_alive: bool = True
    is_reachable: bool = True


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Slot:
    """A batch that runs in a slot: the calls that wait, the running one, unreported news, and all outcomes."""

    key: str
    batch: Batch
    waiting: deque[Call]
    scheduler: Scheduler
    running: Call | None = None
    run: int = 0
    has_values: bool = True
    """Whether the scattered values of the running call are there."""
    items: int = 0
    below: int = 0
    """How many items the running call has yielded, and its credit."""
    news: list[Outcome | Output | Item] = field(default_factory=list[Outcome | Output | Item])
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])


@dataclass(slots=True)
class Kept:
    """A batch that a worker keeps: its unreleased calls, and its reports."""

    topic: str
    origin: str
    calls: set[str]
    is_running: bool = True
    number: int = 0
    reports: list[Report] = field(default_factory=list[Report])


class Worker:
    """A worker process: batches that wait for a slot, and its slots. It outlives its scheduler while it has calls, and
    joins the next one with them.

    `is_cut_off`: the scheduler cannot reach it, or it has none. `is_moving`: it knows of another scheduler, and has not
    joined it.
    """

    def __init__(self, world: World, node: Node, machine: Machine, index: int) -> None:
        self.world, self.node, self.machine, self.index = world, node, machine, index
        self.process = f"{machine.id}/{index}-{next(world.ids)}"
        self.is_alive = True
        self.is_cut_off = self.is_moving = False
        self.ready: deque[tuple[str, Batch]] = deque()
        self.slots: list[Slot | None] = [None] * node.slots
        self.cancelled: set[str] = set()
        self.results: dict[str, dict[str, Outcome]] = {}
        self.kept: dict[str, Kept] = {}
        self.older: set[str] = set()
        """Batches of an earlier scheduler that still have slots."""

    def join(self, scheduler: Scheduler) -> None:
        """Join the pool with the kept calls."""
        self.scheduler, self.name, self.address = (
            scheduler,
            f"{self.node.rank}-{self.index}",
            f"tls://{self.machine.id}:{next(self.world.ids)}",
        )
        self.is_cut_off = self.is_moving = False
        self.joined_at = self.world.now
        self.down = self.world.wire(self.receive)
        self.up = self.world.wire(lambda message: scheduler.hear(self, message))
        self.results.clear()
        self.older = {key for key, kept in self.kept.items() if kept.is_running}
        scheduler.add_worker(self)
        self.announce()

    def announce(self) -> None:
        """Announce its calls, and repeat their reports."""
        if self.world.keeps:
            calls = tuple(call_id for kept in self.kept.values() for call_id in sorted(kept.calls))
            self.up.send(("news", WorkerKept(self.name, self.address, calls, bool(self.older), tuple(self.kept)), None))
            for kept in self.kept.values():
                for report in kept.reports:
                    self.up.send(("report", kept.topic, report))
        self._free()

    def lose_scheduler(self, rng: Random) -> None:
        """The scheduler is gone: begin none of its batches.

        Wait for another one with the calls that run or are not released; or end.
        """
        self.ready.clear()
        self.is_cut_off = True
        self.up.cut(rng)
        self.down.cut(rng)
        self.down.queue.clear()
        if not (self.world.keeps and any(kept.calls for kept in self.kept.values())):
            self.is_alive = False

    def move(self, node: Node) -> None:
        """Leave for another scheduler, under the node's new rank."""
        self.node = node
        self.is_moving = True

    def _free(self) -> None:
        if self.older and not any(key in self.kept and self.kept[key].is_running for key in self.older):
            self.older.clear()
            self.up.send(("news", WorkerFree(self.name, self.address), None))

    @property
    def is_busy(self) -> bool:
        """Whether it has work."""
        return self.is_alive and (bool(self.ready) or any(self.slots))

    def has(self, call_id: str) -> bool:
        """Whether a call runs or waits here."""
        at_work = [slot.batch for slot in self.slots if slot is not None and call_id not in slot.outcomes]
        return any(
            call.call_id == call_id for batch in (*at_work, *(batch for _, batch in self.ready)) for call in batch.calls
        )

    def receive(self, message: Any) -> None:
        """Take a message of the scheduler's."""
        if not self.is_alive:
            return
        kind, what = message
        if kind == "compute":
            self.ready.append(what)
        elif kind == "free":
            self.ready = deque(item for item in self.ready if item[0] != what)
            self.results.pop(what, None)
            if what in self.kept:
                self._release(what, self.kept[what].calls)
        elif kind == "tell kept":
            self.announce()
        elif kind == "credit":
            for slot in filter(None, self.slots):
                if slot.running is not None and slot.running.call_id in what:
                    slot.below = max(slot.below, what[slot.running.call_id])
        elif kind == "release kept":
            for key in list(self.kept):
                self._release(key, what)
        else:
            self.cancelled.update(name for name in what if name.startswith("call"))
            for slot in filter(None, self.slots):
                self.obey(slot, is_all=slot.batch.topic in what)

    def _release(self, key: str, calls: Collection[str]) -> None:
        kept = self.kept[key]
        kept.calls.difference_update(list(calls))
        if not kept.calls and not kept.is_running:
            del self.kept[key]

    def obey(self, slot: Slot, *, is_all: bool = False) -> None:
        """Stop cancelled calls. `is_all`: stop all calls of the slot now, and none later."""
        is_meant = lambda call: is_all or call.call_id in self.cancelled
        if slot.running is not None and is_meant(slot.running):
            self._ended(slot, Outcome(slot.running.call_id, OutcomeKind.CANCELLED, seconds=1.0))
        for call in [call for call in slot.waiting if is_meant(call)]:
            slot.waiting.remove(call)
            self._tell(slot, Outcome(call.call_id, OutcomeKind.CANCELLED))

    def step(self, rng: Random) -> None:
        """Do one thing in one slot."""
        index = rng.randrange(len(self.slots)) if len(self.slots) > 1 else 0
        slot = self.slots[index]
        if slot is None:
            if self.ready:
                key, batch = self.ready.popleft()
                slot = self.slots[index] = Slot(key, batch, deque(batch.calls), self.scheduler)
                self.kept[key] = Kept(batch.topic, f"{self.process}/{key}", {call.call_id for call in batch.calls})
                self.obey(slot)
            return
        chance = rng.random()
        if slot.running is not None:
            self._go_on(slot, rng, chance)
        elif slot.waiting and chance < 0.9:
            self._begin(slot)
        elif slot.waiting:
            self._hand_back(slot)
        elif slot.news:
            self._report(slot)
        else:
            self._finish(index, slot)

    def _go_on(self, slot: Slot, rng: Random, chance: float) -> None:
        call = slot.running
        assert call is not None
        if chance < 0.15:
            line = self.world.calls.printed(call.call_id, slot.run)
            slot.news.append(Output(call.call_id, "stdout", (line,), 0.0))
        elif chance < 0.25 and slot.waiting:
            self._hand_back(slot)
        elif chance < 0.4 and slot.news:
            self._report(slot)
        elif call.ahead and slot.has_values and slot.items < self.world.streams.consumers[call.call_id].total:
            self._yield(slot, call, chance)
        else:
            self._ended(slot, self._outcome(call, slot.run, rng, has_values=slot.has_values))

    def _yield(self, slot: Slot, call: Call, chance: float) -> None:
        """Yield an item as far as the credit goes, and report those that were yielded. It may crash."""
        if chance > 0.95 and slot.items < slot.below:
            self._ended(slot, Outcome(call.call_id, OutcomeKind.CRASH, text=f"{slot.run}", exit_code=-9, seconds=1.0))
            return
        if slot.items < slot.below:
            slot.news.append(self.world.streams.yields(self, call.call_id, slot.run, slot.items))
            slot.items += 1
        elif self.world.is_over:  # the pool ends its nodes
            self._ended(slot, Outcome(call.call_id, OutcomeKind.CANCELLED))
            return
        if slot.news and (slot.items == slot.below or chance > 0.7):
            self._report(slot)

    def _begin(self, slot: Slot) -> None:
        call = slot.waiting.popleft()
        slot.running, slot.items, slot.below = call, 0, call.ahead
        slot.run, slot.has_values = self.world.calls.begun(self, call, slot.batch)

    def _outcome(self, call: Call, run: int, rng: Random, *, has_values: bool = True) -> Outcome:
        seconds = SECONDS[call.function.partition("-")[0]]
        chance = rng.random() if has_values else 0.07
        if chance < 0.05:
            return Outcome(call.call_id, OutcomeKind.CRASH, text=f"{run}", exit_code=-9, seconds=seconds)
        if chance < 0.1:
            return Outcome(call.call_id, OutcomeKind.ERROR, text=f"{run}", seconds=seconds)
        value = f"{call.call_id}/{run}"
        if chance < 0.7 and not call.function.endswith("big"):
            return Outcome(call.call_id, OutcomeKind.RESULT, Parcel(value.encode()), text=f"{run}", seconds=seconds)
        path = call.arguments.path  # the result may take the file of the arguments over
        if path is None or path not in self.world.machine_at(path).files or rng.random() < 0.5:
            path = self.world.new_path(self.machine)
        self.world.machine_at(path).files[path] = value
        return Outcome(call.call_id, OutcomeKind.RESULT, Parcel(b"", (), path, SPANS), text=f"{run}", seconds=seconds)

    def _ended(self, slot: Slot, outcome: Outcome) -> None:
        slot.running = None
        self.world.ran_seconds += outcome.seconds
        self._tell(slot, outcome._replace(items=slot.items))

    def _tell(self, slot: Slot, outcome: Outcome) -> None:
        slot.news.append(outcome)
        slot.outcomes[outcome.call_id] = outcome

    def _hand_back(self, slot: Slot) -> None:
        for call in slot.waiting:
            self._tell(slot, Outcome(call.call_id, OutcomeKind.RETURNED))
        slot.waiting.clear()

    def _report(self, slot: Slot) -> None:
        kept = self.kept[slot.key]
        kept.number += 1
        report = Report(self.node.rank, self.machine.id, tuple(slot.news), kept.origin, kept.number)
        slot.news = []
        if self.world.keeps:
            rest = tuple(item for item in report.news if not isinstance(item, Item))
            kept.reports.append(report._replace(news=rest))  # items do not outlive their head
        self.up.send(("report", slot.batch.topic, report))

    def _finish(self, index: int, slot: Slot) -> None:
        self.slots[index] = None
        self.cancelled.difference_update(call.call_id for call in slot.batch.calls)
        self.kept[slot.key].is_running = False
        if not (self.kept[slot.key].calls and self.world.keeps):
            del self.kept[slot.key]
        if slot.scheduler is self.scheduler and not self.is_cut_off:
            self.results[slot.key] = slot.outcomes
            self.up.send(("finished", slot.key, None))
        ended = [key for key, kept in self.kept.items() if not kept.is_running]
        for key in ended[: -self.world.kept_limit]:
            del self.kept[key]
        self._free()

    def die(self, rng: Random) -> None:
        """End at once. The scheduler notices it after some of the messages in transit."""
        self.is_alive = False
        if not self.is_moving:
            self.up.cut(rng, None if self.is_cut_off else ("gone", None, None))
            self.down.cut(rng)

    def fall_silent(self, rng: Random) -> None:
        """Be out of the scheduler's reach: the scheduler removes it, and it runs on for a while."""
        self.up.cut(rng, None if self.is_cut_off else ("gone", None, None))
        self.down.cut(rng)
        self.is_cut_off = True
