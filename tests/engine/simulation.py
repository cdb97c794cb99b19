"""Deterministic simulation of the dispatcher. Each seed is one history of calls and losses; messages come late, in
another order, twice or never.

`World` is the dispatcher's surroundings: workers and machines (`model.py`), the scheduler (`model_scheduler.py`), and its
owner, the connection, recovery, callers and streams (`simulated_*.py`). It has no thread, clock or socket;
`random.Random(seed)` draws the next event. The invariants are checked after each message, and at the end, when all is
repaired and at rest. The first that does not hold raises `Violation`.

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
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.dispatcher import Dispatcher
from skyward_core.engine.state import Phase
from skyward_core.errors import NodeLost, PoolClosed
from skyward_core.events.events import CallProgress
from skyward_core.wire.messages import Item, Outcome, Parcel
from tests.engine.model import Machine, Wire, Worker, require
from tests.engine.model_scheduler import Connection, Scheduler
from tests.engine.simulated_calls import Caller, Calls
from tests.engine.simulated_cluster import Cluster
from tests.engine.simulated_end import Ending
from tests.engine.simulated_owner import Owner, Steps
from tests.engine.simulated_streams import Streams, Values

# failures of one kind, characters that make a kind, characters that are printed
PRINTED_OF_A_KIND, WORDS, LONGEST = 3, 60, 600
OF_STREAM = {"resumed", "report", "pool_news"}
LATE = OF_STREAM | {"task_ended", "gathered", "not_gathered", "load_known", "pinged", "fetched", "not_fetched", "cut"}
"""Messages that may come a second time; those of the stream only after their connection was replaced."""
TIMED = {"resumed", "report", "gathered", "pool_news"}
"""Messages to which the owner adds the time."""


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
        self.calls, self.owner, self.cluster, self.ending = Calls(self), Owner(self), Cluster(self), Ending(self)
        self._draw(rng)
        self._draw_kinds(Random(f"{seed} kinds"))
        self.nodes = {rank: self.cluster.new_node(rank) for rank in range(self.ranks)}
        self.given_up: set[int] = set()
        self.resumed_at = math.inf
        """When the present scheduler answered last."""
        self.retiring: set[str] = set()
        """Names of workers that were held: the workers of these names end when all is repaired."""
        self.topics = itertools.count()
        self.dispatcher = make(self.nodes.values(), self.cluster.new_topic(), self.retries, is_local=self.is_local)
        self.scheduler = Scheduler(self, self.limit)
        self.connection: Connection | None = None
        self.connections: list[Connection] = []
        self.doers: dict[type, Callable[..., object]] = {
            **self.owner.doers,
            **self.calls.doers,
            do.GiveCredit: self.streams.give_credit,
            do.DeliverItem: self.streams.deliver,
            do.FetchItem: self.streams.fetch,
        }

    def _draw(self, rng: Random) -> None:
        """Draw the constants of the history and its kinds of faults."""
        self.retries = rng.choice((0, 0, 0, 1, 1, 2))
        self.ranks = rng.randint(1, 4)
        self.workers_per_node = rng.choice((1, 1, 1, 2))
        self.slots = rng.randint(1, 3)
        self.is_local = rng.random() < 0.25
        self.limit = rng.choice((1_000, 1_000, 1))
        self.steps = rng.randint(40, 240)
        self.keeps = rng.random() < 0.9
        self.kept_limit = rng.choice((1_000, 1_000, 1_000, 1))
        self.absence = rng.choice((0.0, 0.0, 0.8, 0.95))
        self.delivered, self.worked = rng.choice(((0.3, 0.5), (0.4, 0.75), (0.5, 0.75), (0.65, 0.8)))
        self.large = rng.choice((0.0, 0.3, 0.7))
        self.menu = [
            *[self.calls.submit, self.tick] * 4,
            *[self.calls.cancel, self.cluster.rejoin, self.cluster.reconnect] * 3,
            *[self.pump, self.cluster.notice, self.cluster.open_ways, self.cluster.replace] * 2,
        ]
        faults = (
            (self.cluster.kill_worker, 2, 0.5),
            (self.cluster.silence_worker, 1, 0.3),
            (self.cluster.kill_node, 1, 0.3),
            (self.cluster.kill_scheduler, 1, 0.4),
            (self.cluster.cut_silently, 2, 0.4),
            (self.cluster.cut_openly, 2, 0.5),
            (self.cluster.block_way, 2, 0.3),
            (self.cluster.hold, 1, 0.3),
            (self.drain, 1, 0.15),
            (self.undrain, 2, 0.5),
            (self.fail_calls_of_rank, 1, 0.2),
            (self.cluster.abandon, 1, 0.2),
            (self.jump, 1, 0.2),
            (self.duplicate, 4, 0.5),
        )
        for fault, weight, share in faults:
            if rng.random() < share:
                self.menu += [fault] * weight
        self.has_own_faults = rng.random() < 0.1
        self.last_step = rng.choice((None, None, None, None, None, None, None, self.close, self.fail_all_calls))

    def _draw_kinds(self, rng: Random) -> None:
        """Draw how many calls stream and use scattered values: none in half of the histories."""
        self.streams = Streams(self, rng.choice((0.0, 0.0, 0.0, 0.4, 0.8)))
        self.values = Values(self, rng.choice((0.0, 0.0, 0.0, 0.4, 0.8)))
        if self.streams.share:
            self.steps += 80
            self.menu += [self.cluster.cut_silently, self.cluster.cut_openly, self.cluster.reconnect] * rng.choice(
                (0, 1, 2)
            )
            if rng.random() < 0.7:  # few slots, so that streams come far
                self.ranks, self.workers_per_node, self.slots = min(self.ranks, 2), 1, 1
            self.limit = rng.choice((self.limit, 1))
        if self.values.share:
            self.menu += [self.values.drop] * 2

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Run the history. Raises Violation."""
        rng = self.rng
        self.cluster.connect_first()
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
        self.ending.settle()
        self.ending.check_end()

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
            self.handle(*self.mailbox.popleft())
        self.handle("flush", (self.now,), {})

    def handle(self, name: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        if self.trace is not None and name != "flush":
            self.say(">", name, str(args)[:220], more or "")
        if name == "connect":
            self.cluster.connect(*args)
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
        elif name == "close" or (name == "fail_calls" and len(args) == 1):
            self.is_over = True
        if name == "resumed" and dispatcher.is_live:
            self.resumed_at = self.now
        self.do_all()
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

    def do_all(self) -> None:
        while actions := self.dispatcher.take_actions():
            for action in actions:
                if self.trace is not None:
                    self.say("    ", str(action)[:200])
                doer = self.doers.get(type(action))
                if doer is not None:
                    doer(action)

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def drop_file(self, parcel: Parcel) -> str | None:
        """Remove a file of this machine; return its content."""
        return self.machine_at(parcel.path).files.pop(parcel.path, None) if parcel.path is not None else None

    def machine_at(self, path: str) -> Machine:
        """Return the machine in whose memory a path is."""
        return self.machines[path.split("/")[3]]

    def new_path(self, machine: Machine) -> str:
        """Return the path of a new file."""
        return f"/dev/shm/{machine.id}/{next(self.ids)}"

    # ── the pool's user, and recovery ─────────────────────────────────────────────────────────────────────────────────

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

    def fail_all_calls(self) -> None:
        """Recovery has found no head."""
        self.post("fail_calls", NodeLost("given up"))

    def fail_calls_of_rank(self) -> None:
        """Recovery has found no machine for a vacant rank."""
        if vacant := [
            rank for rank in range(self.ranks) if rank not in self.nodes or not self.cluster.machine(rank).is_alive
        ]:
            rank = self.rng.choice(vacant)
            self.post("fail_calls", NodeLost("given up"), rank)
            if self.rng.random() < 0.5:
                self.given_up.add(rank)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Half a second or some seconds pass."""
        self.now += self.rng.choice((0.5, 0.5, 2.0, 5.0))
        self.post("tick", self.now, self.is_reachable)
        self.pump()

    def jump(self) -> None:
        """Minutes pass."""
        self.now += 100.0

    def is_reachable(self, instance_id: str) -> bool:
        machine = self.machines[instance_id]
        return machine.is_alive and machine.is_reachable

    def duplicate(self) -> None:
        """A message comes a second time: one of an earlier connection, or of a task or transfer that has ended."""
        late = [
            message for message in self.before if message[0] not in OF_STREAM or message[1][0] != self.dispatcher.epoch
        ]
        if late:
            self.mailbox.append(self.rng.choice(late))

    # ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_queue(self, name: str) -> None:
        if self.is_over or self.is_drained:
            require(
                not any(True for _ in self.dispatcher.queue._all_waiting),
                f"after {name} calls wait on a pool that begins none",
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
