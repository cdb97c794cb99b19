"""Random histories of one pool's money: processes that stop, go on, die, and lose the ledger or the nodes.

    truth    a world of machines, slots and calls, with its own seconds; what the nodes have counted
    ledger   what processes have written of it: late, from a wrong clock, again because an answer was lost, or never

`play` makes a history by its seed, on any ledger. After each step `Money.check` reads everything that shows a part of
the bill: the parts add up to it to the micro-dollar, none is negative, buckets are the lives of the machines, and no
figure of a use grows after its end. Time is a number: nothing sleeps. `python -m tests.ledger.histories SEED` shows the
steps of one history.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from random import Random

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.receipt import receipt, users_of
from skyward_core.ledger.rows import Bucket, CallState, CostBy, Price, SlotUse
from skyward_core.ledger.uses import NewUse, UseCount
from skyward_core.work import Work
from tests.ledger.fixtures import Clock, open_pool, resource_request

PRICES = (Price(Decimal(3600)), Price(Decimal("1.234567")), Price(Decimal("36"), increment_seconds=60))
PAUSES = (0.2, 1.0, 3.7, 20.0, 61.0, 400.0)


@dataclass
class Machine:
    """A machine of the truth. `busy` is how long its slots were held, in seconds."""

    number: int
    instance_id: str
    price: Price
    slots: int
    began: float
    ended: float | None = None
    busy: float = 0.0

    def life(self, now: float) -> float:
        return (now if self.ended is None else self.ended) - self.began


@dataclass
class Process:
    """A process with one use. `known` are the seconds that it has had of each machine, as far as it has learned."""

    use_id: str
    work: Work
    known: dict[str, float] = field(default_factory=dict[str, float])
    learned_at: float = 0.0
    has_begun: bool = False
    is_stopped: bool = False
    is_dead: bool = False
    is_over: bool = False
    has_ledger: bool = True
    has_nodes: bool = True

    @property
    def runs(self) -> bool:
        return not (self.is_stopped or self.is_dead)


class Money:
    """One history: the truth, and the writes of its processes."""

    def __init__(self, ledger: Ledger, clock: Clock, seed: int, *, is_connected: bool = False, mark: str = "") -> None:
        """`is_connected`: no process is cut off, and no clock is set. `mark` is a part of the pool's id."""
        self.ledger, self.clock, self.chance = ledger, clock, Random(seed)
        self.is_connected = is_connected
        self.now = 0.0
        """The truth's seconds, which no clock step changes."""
        self.pool_id = f"sky-{seed}{mark}"
        self.has_name = self.chance.random() < 0.7
        self.work = Work(system="test", run=str(seed))
        self.told: list[str] = []
        self.machines: list[Machine] = []
        self.processes: list[Process] = []
        self.held: dict[tuple[str, int], str] = {}
        """By machine and slot: the use whose call holds it."""
        self.nodes: dict[str, dict[str, float]] = {}
        """By use and machine: the seconds that the nodes have counted."""
        self.ended: dict[str, Decimal] = {}
        """What the uses that have ended had then, by the ledger."""
        self.calls: list[CallState] = []
        self.was_stepped = self.is_over = False
        work = Work() if self.has_name else self.work
        open_pool(ledger, self.pool_id, work=work, name="nightly" if self.has_name else "")
        for number in range(self.chance.randint(1, 2)):
            price, slots = self.chance.choice(PRICES), self.chance.randint(1, 3)
            token = f"{self.pool_id}-{number}"
            (intent,) = ledger.intend_all(self.pool_id, [resource_request(token, self.pool_id, price)])
            ledger.bind(intent, f"i-{token}")
            self.machines.append(Machine(intent.id, f"i-{token}", price, slots, self.now))
        self.start()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> str:
        """Do one thing, and let some time pass; return its name."""
        self.go(self.chance.choice(PAUSES))
        does: list[Callable[[], object]] = [
            self.start, self.call, self.call, self.end_call, self.stop, self.go_on, self.kill,
            self.beat, self.beat, self.keep, self.settle, self.ask_the_head, self.leave, self.detached,
        ]  # fmt: skip
        if not self.is_connected:
            does += [self.cut, self.restore, self.step_clock]
            does += [self.end] * (len(self.told) > 12)
        does = [self.late, self.late, self.settle, self.end] if self.is_over else does
        do = self.chance.choice(does)
        do()
        self.told.append(do.__name__)
        return do.__name__

    def go(self, seconds: float) -> None:
        self.clock.go(seconds)
        if self.is_over:
            self.now += seconds
            return
        for (instance_id, _), use_id in self.held.items():
            counted = self.nodes.setdefault(use_id, {})
            counted[instance_id] = counted.get(instance_id, 0.0) + seconds
        for machine in self.machines:
            machine.busy += seconds * sum(instance_id == machine.instance_id for instance_id, _ in self.held)
        self.now += seconds

    def start(self) -> None:
        number = len(self.processes)
        work = replace(self.work, task=f"task{self.chance.randint(0, 2)}", attempt=str(number))
        self.processes.append(Process(f"{self.pool_id}-use-{number}", work))
        self.begin(self.processes[-1])

    def begin(self, process: Process) -> None:
        if process.runs and process.has_ledger and not process.has_begun:
            self.write(self.ledger.uses.write, [NewUse(process.use_id, self.pool_id, process.work)])
            process.has_begun = True

    def call(self) -> None:
        """A call takes a free slot; its process notes that soon."""
        able = [one for one in self.processes if one.runs and one.has_nodes and not one.is_over]
        free = [
            (machine.instance_id, slot)
            for machine in self.machines
            for slot in range(machine.slots)
            if (machine.instance_id, slot) not in self.held
        ]
        if able and free:
            process = self.chance.choice(able)
            self.held[self.chance.choice(free)] = process.use_id
            self.learn(process)
            self.note(process)

    def end_call(self) -> None:
        if self.held:
            use_id = self.held.pop(self.chance.choice(sorted(self.held)))
            self.learn(next(one for one in self.processes if one.use_id == use_id))

    def stop(self) -> None:
        self.one().is_stopped = True

    def go_on(self) -> None:
        self.one().is_stopped = False

    def kill(self) -> None:
        """Its calls go on until somebody ends them, or their machines end."""
        self.one().is_dead = True

    def cut(self) -> None:
        process = self.one()
        process.has_ledger, process.has_nodes = self.chance.choice([(False, True), (True, False), (False, False)])

    def restore(self) -> None:
        process = self.one()
        process.has_ledger = process.has_nodes = True

    def beat(self) -> None:
        process = self.one()
        self.begin(process)
        self.learn(process)
        self.note(process)

    def keep(self) -> None:
        """The process that keeps the pool notes the time of the machines."""
        buckets = {machine.number: self.buckets(machine) for machine in self.machines}
        self.write(self.ledger.note_all, buckets)

    def settle(self) -> None:
        """Somebody settles uses without the nodes: nobody can ask them."""
        chosen = [process for process in self.processes if self.chance.random() < 0.5]
        self.write(self.ledger.uses.settle, [process.use_id for process in chosen])

    def ask_the_head(self) -> None:
        """A process is dead or replaced: its calls end, and its use has what the nodes have counted."""
        process = self.one()
        self.held = {slot: use_id for slot, use_id in self.held.items() if use_id != process.use_id}
        process.is_over = True
        self.write(self.ledger.uses.write, ended={process.use_id: self.count(self.nodes.get(process.use_id, {}))})

    def leave(self) -> None:
        """A process ends its use: its calls have ended, and it has the last sample."""
        process = self.one()
        if process.runs and process.has_nodes:
            self.held = {slot: use_id for slot, use_id in self.held.items() if use_id != process.use_id}
            self.learn(process)
            process.is_over = True
            if process.has_ledger:
                self.write(self.ledger.uses.write, ended={process.use_id: self.count(process.known)})

    def detached(self) -> None:
        """A detached call has had a free slot since the last step; another client sees it."""
        machine = self.chance.choice(self.machines)
        idle = machine.slots * machine.life(self.now) - machine.busy
        seconds = self.chance.uniform(0.0, max(0.0, idle) / 4)
        machine.busy += seconds
        call_id = f"{self.pool_id}-call-{len(self.calls)}"
        used = (SlotUse(machine.instance_id, machine.slots, seconds),)
        owner, at = self.chance.choice(["", "dag/a"]), self.clock.time
        call = CallState(call_id, "f", owner, 1, "ended", at, at, used, replace(self.work, asset="a"))
        self.calls.append(call)
        self.write(self.ledger.note_calls, self.pool_id, [call])

    def step_clock(self) -> None:
        self.clock.go(self.chance.choice([-300.0, -5.0, 5.0, 3600.0]))
        self.was_stepped = True

    def end(self) -> None:
        """The pool ends: by the process that keeps it, by one that has old figures, or by a sweep, hours later."""
        if self.is_over:
            return
        self.is_over = True
        self.held.clear()
        for machine in self.machines:
            machine.ended = self.now
        how = self.chance.choice(["keeper", "sweep", "late sweep"])
        if how == "keeper":
            self.keep()
        ended_at = self.clock.time
        if how == "late sweep":
            self.clock.go(7200)
        numbers = [machine.number for machine in self.machines]
        paid_until = dict.fromkeys(numbers, ended_at)
        fill = None if how == "keeper" else Bucket.IDLE
        self.write(self.ledger.close_all, numbers, "it is gone", fill=fill, paid_until=paid_until)
        self.write(self.ledger.end_pool, self.pool_id)

    def late(self) -> None:
        """A process goes on after the end of the pool, and writes what it has counted."""
        process = self.one()
        process.has_ledger = process.has_nodes = True
        process.is_stopped = False
        self.begin(process)
        self.learn(process)
        if self.chance.random() < 0.5:
            self.note(process)
        elif process.runs:
            self.write(self.ledger.uses.write, ended={process.use_id: self.count(process.known)})

    # ── what processes know ──────────────────────────────────────────────────────────────────────────────────────────

    def one(self) -> Process:
        return self.chance.choice(self.processes)

    def learn(self, process: Process) -> None:
        if process.runs and process.has_nodes:
            process.known, process.learned_at = dict(self.nodes.get(process.use_id, {})), self.now

    def note(self, process: Process) -> None:
        if process.runs and process.has_ledger and process.has_begun and not process.is_over:
            held = [instance_id for (instance_id, _), use_id in self.held.items() if use_id == process.use_id]
            rate = sum(self.price_of_slot(instance_id) for instance_id in held)
            count = replace(
                self.count(process.known),
                held_slots=len(held),
                usd_per_hour=rate,
                age_seconds=self.now - process.learned_at,
            )
            self.write(self.ledger.uses.write, counts={process.use_id: count})

    def count(self, seconds: dict[str, float]) -> UseCount:
        cost = sum(spent * self.price_of_slot(instance_id) / 3600 for instance_id, spent in seconds.items())
        return UseCount(sum(seconds.values()), round(cost, 6))

    def write(self, verb: Callable[..., object], *arguments: object, **words: object) -> None:
        """Write into the ledger. Some answers are lost, and who has not got one writes again."""
        for _ in range(self.chance.choice([1, 1, 1, 2])):
            verb(*arguments, **words)

    def price_of_slot(self, instance_id: str) -> float:
        machine = next(one for one in self.machines if one.instance_id == instance_id)
        return float(machine.price.per_hour) / machine.slots

    def buckets(self, machine: Machine) -> dict[Bucket, float]:
        life = machine.life(self.now)
        launching = min(1.0, life)
        busy = min(machine.busy / machine.slots, life - launching)
        return {Bucket.LAUNCHING: launching, Bucket.RUNNING_CALLS: busy, Bucket.IDLE: life - launching - busy}

    # ── what holds after each step ───────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise AssertionError if parts and bill disagree anywhere."""
        ledger, pool_id = self.ledger, self.pool_id
        (whole,) = ledger.cost_rows(CostBy.POOL, pool_id=pool_id)
        bill = whole.cost_usd
        rows = {by: ledger.cost_rows(by, pool_id=pool_id) for by in CostBy}
        rows |= {f"{by} split": ledger.cost_rows(by, pool_id=pool_id, split=True) for by in (CostBy.RUN, CostBy.OWNER)}
        for by, its in rows.items():
            assert sum(row.cost_usd for row in its) == bill, f"by {by}"
            assert all(row.cost_usd >= 0 and row.seconds >= 0 for row in its), f"by {by}"
        self._check_parts(bill)
        self._check_receipt(bill)
        self._check_ends()

    def _check_parts(self, bill: Decimal) -> None:
        parts = [part for part in self.ledger.cost_parts(self.work) if part.pool_id == self.pool_id]
        users = users_of(self.ledger, self.pool_id)
        assert all(user.cost_usd >= 0 and user.slot_seconds >= 0 for user in users)
        assert sum(user.cost_usd for user in users) <= bill
        assert sum(part.cost_usd for part in parts) <= bill
        by_work: dict[Work, Decimal] = {}
        for user in users:
            by_work[user.work] = by_work.get(user.work, Decimal(0)) + user.cost_usd
        assert {part.work: part.cost_usd for part in parts if part.work in by_work} == by_work
        if self.has_name:
            split = users_of(self.ledger, self.pool_id, split=True)
            assert sum(user.cost_usd for user in split) == bill

    def _check_receipt(self, bill: Decimal) -> None:
        paper = receipt(self.ledger, self.pool_id)
        micro = lambda usd: round(usd * 1_000_000)
        assert micro(paper["total_cost_usd"]) == round(bill * 1_000_000)
        for lines in (paper["resources"], list(paper["buckets"].values())):
            assert sum(micro(line["cost_usd"]) for line in lines) == micro(paper["total_cost_usd"])
        for bucket in Bucket:
            seconds = sum(round(one["seconds"][bucket] * 1000) for one in paper["resources"])
            assert seconds == round(paper["buckets"][bucket]["seconds"] * 1000), bucket
        held = sum(micro(user["cost_usd"]) for user in paper["users"])
        assert micro(paper["buckets"]["running calls"]["cost_usd"]) >= held
        for intent, shown in zip(self.ledger.intents(pool_id=self.pool_id), paper["resources"], strict=True):
            lived = sum(round(seconds * 1000) for seconds in shown["seconds"].values())
            assert lived == sum(round(seconds * 1000) for seconds in intent.seconds.values())
            machine = next(one for one in self.machines if one.number == intent.id)
            if not self.was_stepped:
                assert lived <= round(machine.life(self.now) * 1000) + 1, "no machine has more time than it lived"

    def _check_ends(self) -> None:
        for use in self.ledger.uses.of_pool(self.pool_id):
            if use.ended_at is not None:
                assert use.cost_usd <= self.ended.get(use.id, use.cost_usd), f"{use.id} grew after its end"
                self.ended[use.id] = use.cost_usd


def play(ledger: Ledger, clock: Clock, seed: int, *, steps: int = 25) -> Money:
    """Play one history, and check it after each step. An error names the seed and the steps."""
    money = Money(ledger, clock, seed)
    try:
        money.check()
        for _ in range(steps):
            money.step()
            money.check()
    except Exception as error:
        error.add_note(f"seed {seed}: {', '.join(money.told)}")
        raise
    return money


def parts_in_order(ledger: Ledger, clock: Clock, seed: int, order: int, *, steps: int = 20) -> dict[str, Decimal]:
    """Return the parts of a pool after a history whose last writes came in one of their orders: settlements by others,
    the last words of processes, and the time of the machines.
    """
    began = clock.time
    money = Money(ledger, clock, seed, is_connected=True, mark=f"-{order}")
    for _ in range(steps):
        money.step()
    last: list[Callable[[], object]] = [money.keep]
    for process in money.processes:
        money.held = {slot: use_id for slot, use_id in money.held.items() if use_id != process.use_id}
        last.append(partial(ledger.uses.settle, [process.use_id]))
        if not process.is_dead:
            process.is_stopped = False
            money.learn(process)
            last.append(partial(ledger.uses.write, ended={process.use_id: money.count(process.known)}))
    Random(order).shuffle(last)
    for write in last:
        write()
        money.check()
    money.keep()
    ledger.close_all([machine.number for machine in money.machines], "it is gone")
    ledger.end_pool(money.pool_id)
    money.check()
    clock.time = began
    return {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.TASK, pool_id=money.pool_id)}


def main(seed: int) -> None:
    """Show the steps of one history."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, Ledger(f"sqlite:///{folder}/ledger.db", clock=clock) as ledger:
        print(*play(ledger, clock, seed).told, sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
