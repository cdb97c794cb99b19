"""Streams and scattered values in the simulation (`simulation.py`): consumers with their credit, and the values that a
client has scattered, with the invariants of both.

A streaming call yields the items `call-3/7#0`, `call-3/7#1`, ... of its run 7. Its consumer takes some of them, gives
credit, or stops early.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from skyward_core.engine import actions as do
from skyward_core.engine.calls import LOST
from skyward_core.wire.messages import SHARED, Item, Outcome, OutcomeKind, Parcel
from skyward_core.wire.shared_values import SharedValue
from tests.engine.model import LARGE, require

if TYPE_CHECKING:
    from tests.engine.model import Machine, Worker
    from tests.engine.simulated_calls import Caller
    from tests.engine.simulation import World

MOST_ITEMS = 9
ENDLESS = 10_000
MOST_VALUES = 6
ITEMS_MISSING = "items of the call were lost with messages"
"""In both errors of calls whose items are missing (`engine/calls.py`)."""
assert ITEMS_MISSING in LOST


@dataclass(slots=True)
class Consumer:
    """The consumer of one streaming call, as `engine/futures.py` has it."""

    caller: Caller
    ahead: int
    total: int
    """How many items each run of the call yields."""
    below: int
    """The credit that it has given: the call may yield the items below this number."""
    came: int = 0
    """How many items the dispatcher has handed over or lets fetch."""
    run: str = ""
    """The run of the first item."""
    here: dict[int, str] = field(default_factory=dict[int, str])
    taken: list[str] = field(default_factory=list[str])
    is_over: bool = False
    lacks_items: bool = False


class Streams:
    """The consumers of a history."""

    def __init__(self, world: World, share: float) -> None:
        self.world, self.share = world, share
        self.consumers: dict[str, Consumer] = {}

    # ── calls and runs ───────────────────────────────────────────────────────────────────────────────────────────────

    def draw(self, rng: Random) -> int:
        """Return how many items new calls may be ahead; 0: they do not stream."""
        return rng.choice((1, 2, 3)) if rng.random() < self.share else 0

    def add(self, caller: Caller, ahead: int) -> None:
        """A caller submits a streaming call."""
        total = self.world.rng.choice((*range(MOST_ITEMS), *[ENDLESS] * 3))
        self.consumers[caller.call_id] = Consumer(caller, ahead, total, ahead)

    def begun(self, call_id: str) -> None:
        """A run of a call begins."""
        if (consumer := self.consumers.get(call_id)) is not None:
            require(not consumer.came or consumer.is_over, "a call begins again after its first items", consumer)

    def yields(self, worker: Worker, call_id: str, run: int, number: int) -> Item:
        """A run yields an item."""
        world, consumer = self.world, self.consumers[call_id]
        require(
            number < len(consumer.taken) + consumer.ahead,
            "a node is more items ahead than its credit",
            consumer,
            number,
        )
        value = f"{call_id}/{run}#{number}"
        if world.rng.random() < 0.7:
            return Item(call_id, number, Parcel(value.encode()))
        path = world.new_path(worker.machine)
        worker.machine.files[path] = value
        return Item(call_id, number, Parcel(b"", (), path, LARGE.spans))

    # ── actions of the owner ─────────────────────────────────────────────────────────────────────────────────────────

    def give_credit(self, action: do.GiveCredit) -> None:
        """Send credit to all workers."""
        self.world.owner.tell(action.epoch, ("credit", dict(action.credit)))

    def deliver(self, action: do.DeliverItem) -> None:
        """An item is on this machine, or in a message."""
        world = self.world
        consumer = self._next_of(action)
        parcel = action.parcel
        if parcel.path is None:
            self._arrive(consumer, action.number, bytes(parcel.data).decode())
            return
        require(world.is_local, "an item is delivered that is not here", action)
        value = world.drop_file(parcel)
        if value is None:  # the memory of its machine was cleared
            require(not world.machine_at(parcel.path).is_alive, "an item is gone", action)
            self._break_off(consumer)
        else:
            self._arrive(consumer, action.number, value)

    def fetch(self, action: do.FetchItem) -> None:
        """An item is in the memory of a node."""
        consumer = self._next_of(action)
        if action.instance_id is None:
            self._break_off(consumer)
        else:
            self.world.under_way.append(self._get(consumer, action, self.world.machines[action.instance_id]))

    def _get(self, consumer: Consumer, action: do.FetchItem, machine: Machine) -> Generator[None]:
        path = str(action.parcel.path)
        yield
        if not machine.is_alive or not machine.is_reachable or path not in machine.files:
            require(not machine.is_alive or path in machine.files, "an item is gone before it was fetched", action)
            yield
            self._break_off(consumer)
            yield from self._remove_later(machine, path)
        else:
            value = machine.files.pop(path)
            yield
            self._arrive(consumer, action.number, value)

    def _remove_later(self, machine: Machine, path: str) -> Generator[None]:
        """As `Transfers` does with an item that it could not fetch."""
        while machine.is_alive and not machine.is_reachable:
            yield
        machine.files.pop(path, None)

    def _next_of(self, action: do.DeliverItem | do.FetchItem) -> Consumer:
        consumer = self.consumers[action.call_id]
        require(consumer.caller.state == "waiting", "an item comes after the end of its call", action)
        require(action.number == consumer.came, "an item comes twice or in another order", consumer, action)
        consumer.came += 1
        return consumer

    def _arrive(self, consumer: Consumer, number: int, value: str) -> None:
        run, _, name = value.rpartition("#")
        consumer.run = consumer.run or run
        is_its_own = run == consumer.run and name == str(number) and run.startswith(f"{consumer.caller.call_id}/")
        require(is_its_own, "an item has another value", consumer, value)
        if not consumer.is_over:
            consumer.here[number] = value

    def _break_off(self, consumer: Consumer) -> None:
        self._leave(consumer)

    # ── consumers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def consume(self) -> None:
        """A consumer takes the items that are here, or stops early."""
        world = self.world
        if ready := [consumer for consumer in self.consumers.values() if self._is_ready(consumer)]:
            consumer = world.rng.choice(ready)
            if world.rng.random() < 0.05:
                world.say("stops early", consumer.caller.call_id)
                self._leave(consumer)
            else:
                self._take(consumer)

    def consume_all(self) -> bool:
        """All consumers take what is here, and stop those that do not end. Return whether there was anything."""
        ready = [consumer for consumer in self.consumers.values() if self._is_ready(consumer)]
        for consumer in ready:
            self._take(consumer)
            if consumer.total == ENDLESS:
                self._leave(consumer)
        return bool(ready)

    def _is_ready(self, consumer: Consumer) -> bool:
        return not consumer.is_over and len(consumer.taken) in consumer.here

    def _take(self, consumer: Consumer) -> None:
        while self._is_ready(consumer):
            consumer.taken.append(consumer.here.pop(len(consumer.taken)))
            below = len(consumer.taken) + consumer.ahead
            if consumer.caller.state == "waiting" and below - consumer.below >= max(1, consumer.ahead // 2):
                consumer.below = below
                self.world.post("give_credit", consumer.caller.call_id, below)

    def _leave(self, consumer: Consumer) -> None:
        consumer.is_over = True
        consumer.here.clear()
        caller = consumer.caller
        if caller.state == "waiting" and not caller.is_cancelled:
            caller.is_cancelled = True
            self.world.post("cancel", caller.call_id)

    # ── ends of calls ────────────────────────────────────────────────────────────────────────────────────────────────

    def finished(self, call_id: str, outcome: Outcome) -> None:
        """A call has ended at a worker."""
        if (consumer := self.consumers.get(call_id)) is not None:
            require(outcome.items == consumer.came, "a call ends before its items", consumer, outcome)
            is_whole = outcome.kind is not OutcomeKind.RESULT or consumer.came == consumer.total
            require(is_whole, "a call ends with too few items", consumer)

    def may_lack_items(self, call_id: str, reason: str) -> bool:
        """Whether a loss needs no worker and no scheduler: items are missing. Check that messages were lost."""
        consumer = self.consumers.get(call_id)
        if consumer is None or ITEMS_MISSING not in reason:
            return False
        consumer.lacks_items = True
        require(self.world.missed or self.world.restarts, "items are lost without a loss of messages", consumer)
        return True

    def lacks_items(self, call_id: str) -> bool:
        """Whether a call was lost with its items: it may be at a worker, and begin there before it is stopped."""
        return call_id in self.consumers and self.consumers[call_id].lacks_items

    def has_items(self, call_id: str) -> bool:
        """Whether items of a call have come: it does not run again."""
        return call_id in self.consumers and self.consumers[call_id].came > 0

    def check_end(self) -> None:
        """Each item has come once: those that were not taken are here, unless their consumer has left."""
        for consumer in self.consumers.values():
            is_whole = len(consumer.taken) + len(consumer.here) == consumer.came
            require(is_whole or consumer.is_over or consumer.caller.is_cancelled, "an item is lost", consumer)


class Values:
    """The scattered values of a history. The client releases a value when nothing refers to it any more: neither the
    program (`held`) nor a call in the dispatcher.
    """

    def __init__(self, world: World, share: float) -> None:
        self.world, self.share = world, share
        self.held: list[SharedValue] = []
        self.coming: list[tuple[str, str]] = []
        """Names, and the machines to which they are being uploaded."""
        self.made = 0

    def draw(self, rng: Random) -> dict[str, SharedValue]:
        """Return the values that new calls use."""
        if rng.random() >= self.share:
            return {}
        if not self.held or (self.made < MOST_VALUES and rng.random() < 0.4):
            value = SharedValue(LARGE)
            value.name = f"{SHARED}{self.made}"
            self.made += 1
            weakref.finalize(value, _release, weakref.ref(self.world), value.name).atexit = False
            self.held.append(value)
        return {value.name: value for value in rng.sample(self.held, 1)}

    def drop(self) -> None:
        """The program forgets a value."""
        if self.held:
            self.held.pop(self.world.rng.randrange(len(self.held)))

    def begins(self, name: str, machine: Machine) -> None:
        """A value is to be uploaded to a machine."""
        require(
            (name, machine.id) not in self.coming and f"value {name}" not in machine.files.values(),
            "a value is uploaded to a node that has it",
            name,
            machine.id,
        )
        self.coming.append((name, machine.id))

    def ends(self, name: str, machine: Machine) -> None:
        """The upload has ended."""
        self.coming.remove((name, machine.id))

    def used(self, worker: Worker, names: Sequence[str], functions: dict[str, Parcel]) -> bool:
        """A call begins: return whether its values are there. They are, unless their machine is lost."""
        for name in names:
            path = str(functions[name].path)
            machine = self.world.machine_at(path)
            require(machine is worker.machine or self.world.is_local, "a value is on another node", name, path)
            content = machine.files.get(path)
            if content is None and not machine.is_alive:
                return False
            require(content == f"value {name}", "a call begins without its scattered value", name, path)
        return True

    def check_memory(self, machine: Machine) -> None:
        """Once all is released, no copy is left."""
        left = [content for content in machine.files.values() if content.startswith("value")]
        require(not left, "a scattered value is left in the memory of a node", machine)


def _release(world: weakref.ref[World], name: str) -> None:
    """Nothing refers to a value any more."""
    if (alive := world()) is not None:
        alive.post("release_shared", name)


def names_of(functions: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the names of the scattered values among functions to upload."""
    return [name for name, _ in functions if name.startswith(SHARED)]
