"""The state of the calls of a client, and the records in it: pure bookkeeping.

A worker's name is RANK-INDEX. A worker is away, present, or held. A held worker gets no more calls, and finishes those
that it has.

States of a large function or scattered value at a node:

    absent ──planned──▶ coming ──arrived──▶ there ──evicted──▶ absent
                          └────failed────▶ absent

Least recently used functions are evicted first, until the others fit the limit. A scattered value is evicted when the
client has released it, which may be before it has arrived. Functions and values stay while a batch refers to them that
is in flight, or has outlived its head.

States of the batch of calls that were in flight when their head was lost:

    unknown ──a worker announces it──▶ kept ──all its outcomes are reported──▶ (ended)
       ▲ └──all workers that may have it have announced others, or too late──▶ (lost)
       │                                 │ └──that worker leaves──▶ (lost)
       └──────the next head is lost──────┘

A worker of a node that outlives the head joins the next one with its calls and announces them
(`worker/retained_batches.py`). Then it repeats their reports. Each has its first number, by which the client recognises
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from skyward_core.engine import actions as do
from skyward_core.engine.outbox import Entry, Queue, Shipment
from skyward_core.errors import SkywardError
from skyward_core.machines.instances import Node
from skyward_core.wire.messages import SHARED, Outcome, Parcel, Report

MANY = 1_000_000  # more than a worker has slots
LIMIT_BYTES = 64 << 20
"""Of large functions in the memory of a node."""
DECIDED_SECONDS = 60.0  # the time that workers have to join a new head; their node counts as lost before


@dataclass(slots=True)
class Fetching:
    """A large outcome in transit from a node. With an `error` the connection was cut: the fetch waits for it."""

    entry: Entry
    outcome: Outcome
    node: int
    instance_id: str
    lies_at: str
    until: float
    since: float
    error: Exception | None = None


class Phase(Enum):
    """The state of a batch."""

    CHOOSING = "choosing"
    BLOCKED = "blocked"
    UPLOADING = "uploading"
    SENT = "sent"
    GATHERING = "gathering"


@dataclass(slots=True)
class Out:
    """A batch from the queue.

    `worker` and `address`: its destination, unless the scheduler chooses. `instance_id`: the node of its large values.
    """

    shipment: Shipment
    phase: Phase
    epoch: int
    worker: str | None = None
    address: str | None = None
    instance_id: str | None = None
    functions: dict[str, Parcel] = field(default_factory=dict[str, Parcel])
    """Large functions, as parcels on the node."""
    heard: dict[str, int] = field(default_factory=dict[str, int])
    """The number of its last report, by origin."""

    @property
    def number(self) -> int:
        """The unique number of the batch."""
        return self.shipment.number

    @property
    def is_out(self) -> bool:
        """Whether the batch has gone out: its calls may have begun."""
        return self.phase in (Phase.SENT, Phase.GATHERING)


def rank_of(name: str) -> int:
    """Return the rank of the node of a worker."""
    return int(name.partition("-")[0])


@dataclass(slots=True)
class Members:
    """`nodes` by rank. `workers` maps the names of present workers to their addresses, `held` the addresses of held
    ones to how many of their slots are busy.

    `is_local`: all nodes are processes of this machine, which see the same memory.
    """

    nodes: Mapping[int, Node]
    is_local: bool = False
    workers_per_node: int = 1
    workers: dict[str, str] = field(default_factory=dict[str, str])
    held: dict[str, int] = field(default_factory=dict[str, int])
    instances: dict[str, str] = field(default_factory=dict[str, str])
    """The ids of the machines of present workers, by name; without those that are unknown."""
    staying: frozenset[int] | None = None
    """The ranks that are to stay in an elastic pool; None: all."""

    @staticmethod
    def of(nodes: Iterable[Node], *, is_local: bool = False) -> Members:
        """Return the members of a new pool: all workers are away."""
        by_rank = {node.rank: node for node in nodes}
        return Members(by_rank, is_local, max((node.workers for node in by_rank.values()), default=1))

    def names_at(self, rank: int) -> list[str]:
        """Return the names of all workers of a node, also of those that are away."""
        node = self.nodes.get(rank)
        return [f"{rank}-{index}" for index in range(node.workers if node is not None else self.workers_per_node)]

    def missing(self, rank: int) -> list[int]:
        """Return the indexes of the workers of a node that are away."""
        node = self.nodes.get(rank)
        return [
            index for index in range(node.workers if node is not None else 0) if f"{rank}-{index}" not in self.workers
        ]

    def has(self, rank: int) -> bool:
        """Return whether all workers of a node are present."""
        return rank in self.nodes and not self.missing(rank)

    def join(self, name: str, address: str, instance_id: str = "") -> bool:
        """Note that a worker has joined; True if its node is complete now, and was not before."""
        was_complete = self.has(rank_of(name))
        before = self.workers.get(name)
        if before != address:
            self.held.pop(before or "", None)
        self.workers[name] = address
        self.instances.pop(name, None)
        if instance_id:
            self.instances[name] = instance_id
        return self.has(rank_of(name)) and not was_complete

    def leave(self, name: str, address: str) -> bool:
        """Note that a worker has left; False if its successor has joined already."""
        if self.workers.get(name) != address:
            return False
        del self.workers[name]
        self.instances.pop(name, None)
        self.held.pop(address, None)
        return True

    def hold(self, address: str, left: int | None) -> None:
        """Note that a worker gets no more calls and has this many left; None: not known."""
        if address in self.workers.values():
            self.held[address] = self.held.get(address, MANY) if left is None else left

    def clear(self) -> None:
        """All workers are away: there is another scheduler."""
        self.workers.clear()
        self.instances.clear()
        self.held.clear()

    @property
    def free(self) -> list[str]:
        """Names of present workers that are not held."""
        return [
            name for name, address in self.workers.items() if rank_of(name) in self.nodes and address not in self.held
        ]

    @property
    def leaving(self) -> list[str]:
        """Names of held workers of nodes that are to leave an elastic pool. They still get the calls that may run
        nowhere else: their node leaves after these.
        """
        return [
            name
            for name, address in self.workers.items()
            if rank_of(name) in self.nodes and address in self.held and self.is_leaving(rank_of(name))
        ]

    def is_leaving(self, rank: int) -> bool:
        """Return whether a node is to leave an elastic pool."""
        return self.staying is not None and rank not in self.staying

    def is_strange(self, name: str) -> bool:
        """Return whether a present worker runs on a machine that is not known: a new node, or one in the place of
        another.
        """
        node, instance_id = self.node_of(name), self.instances.get(name)
        return name in self.workers and (node is None or instance_id not in (None, node.instance.id))

    def strange_nodes(self) -> dict[int, str]:
        """Return the ids of machines that are not known and have workers here, by rank; "" if an id is unknown."""
        return {rank_of(name): self.instances.get(name, "") for name in self.workers if self.is_strange(name)}

    def left(self) -> list[int]:
        """Return the known ranks that were to leave, and of which no worker is present any more."""
        present = {rank_of(name) for name in self.workers}
        return [rank for rank in self.nodes if self.is_leaving(rank) and rank not in present]

    @property
    def slots(self) -> int:
        """How many calls may be in flight.

        The calls that a held worker has left count: they must not take the place of calls for free slots.
        """
        total = 0
        for name, address in self.workers.items():
            if (node := self.nodes.get(rank_of(name))) is not None:
                total += min(node.slots, self.held.get(address, node.slots))
        return max(1, total)

    def node_of(self, name: str) -> Node | None:
        """Return the node of a worker; None if it is not a node of the pool."""
        return self.nodes.get(rank_of(name))

    def instance_of(self, parcel: Parcel) -> str | None:
        """Return the id of the instance whose memory has a parcel; None if it is not a node of the pool.

        The path contains the instance's id. The longest match counts, because one id may be the beginning of another.
        """
        path = str(parcel.path)
        known = {node.instance.id for node in self.nodes.values()}
        return max((one for one in known.union(self.instances.values()) if one in path), key=len, default=None)

    def has_instance(self, instance_id: str) -> bool:
        """Return whether an instance is one of the pool's nodes."""
        return any(node.instance.id == instance_id for node in self.nodes.values())

    def may_have_instance(self, instance_id: str) -> bool:
        """Return whether an instance is one of the pool's nodes, or has a worker here and will be known soon."""
        return self.has_instance(instance_id) or instance_id in self.instances.values()

    def is_there(self, instance_id: str) -> bool:
        """Return whether a worker of this instance is present."""
        if instance_id in self.instances.values():
            return True
        ranks = {rank_of(name) for name in self.workers}
        return any(node.instance.id == instance_id and node.rank in ranks for node in self.nodes.values())


@dataclass(slots=True)
class _File:
    parcel: Parcel
    nbytes: int
    users: set[int] = field(default_factory=set[int])
    """The numbers of the batches in flight that refer to it."""
    is_shared: bool = False
    is_released: bool = False
    """Whether it is a scattered value, and whether the client has released it."""


class FunctionFiles:
    """The functions and scattered values in the memory of one node."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._files: dict[str, _File] = {}
        """In the order of their last use."""
        self._coming: set[str] = set()
        self._released: set[str] = set()
        """Scattered values that were released while they were coming."""

    @property
    def nbytes(self) -> int:
        """How much memory the functions take, in bytes."""
        return sum(file.nbytes for file in self._files.values() if not file.is_shared)

    def find(self, name: str) -> Parcel | None:
        """Return the parcel of a function in the node's memory; None if the function is not there."""
        file = self._files.get(name)
        return file.parcel if file is not None else None

    def use(self, number: int, names: Collection[str]) -> dict[str, Parcel]:
        """Note that a batch refers to these functions; return those that are there."""
        found = dict[str, Parcel]()
        for name in names:
            if (file := self._files.pop(name, None)) is not None:
                self._files[name] = file
                file.users.add(number)
                found[name] = file.parcel
        return found

    def done(self, number: int) -> None:
        """Note that a batch is no longer in flight."""
        for file in self._files.values():
            file.users.discard(number)

    def is_coming(self, names: Collection[str]) -> bool:
        """Return whether one of these functions is being uploaded."""
        return any(name in self._coming for name in names)

    def plan(self, names: Collection[str]) -> None:
        """Note that functions are being uploaded."""
        self._coming.update(names)

    def arrived(self, name: str, parcel: Parcel, nbytes: int) -> None:
        """Note that a function is there."""
        self._coming.discard(name)
        self._files[name] = _File(parcel, nbytes, is_shared=name.startswith(SHARED), is_released=name in self._released)
        self._released.discard(name)

    def failed(self, names: Collection[str]) -> None:
        """Note that functions have not arrived."""
        self._coming.difference_update(names)
        self._released.difference_update(names)

    def release(self, name: str) -> None:
        """Note that no call will use a scattered value any more."""
        if (file := self._files.get(name)) is not None:
            file.is_released = True
        elif name in self._coming:
            self._released.add(name)

    def evict(self) -> list[Parcel]:
        """Forget functions beyond the limit, and released values; return the files that are to be removed."""
        evicted = list[Parcel]()
        excess = self.nbytes - self._limit_bytes
        for name, file in list(self._files.items()):
            if file.users or not (file.is_released if file.is_shared else excess > 0):
                continue
            del self._files[name]
            evicted.append(file.parcel)
            if not file.is_shared:
                excess -= file.nbytes
        return evicted


class FunctionsOnNodes:
    """The functions in the memory of all nodes, by instance id. `act` takes the actions."""

    def __init__(self, act: Callable[[do.Action], object]) -> None:
        self._by_instance: dict[str, FunctionFiles] = {}
        self._do = act

    def at(self, instance_id: str) -> FunctionFiles:
        """Return the functions in the memory of a node."""
        return self._by_instance.setdefault(instance_id, FunctionFiles())

    def evict(self, instance_id: str) -> None:
        """Remove functions beyond the limit from a node."""
        for parcel in self.at(instance_id).evict():
            self._do(do.Remove(instance_id, parcel))

    def done(self, number: int) -> None:
        """Note that a batch is no longer in flight, on any node, and remove functions beyond the limit."""
        for instance_id, files in self._by_instance.items():
            files.done(number)
            self.evict(instance_id)

    def release(self, name: str) -> None:
        """Remove a scattered value from all nodes: no call will use it any more."""
        for instance_id, files in self._by_instance.items():
            files.release(name)
            self.evict(instance_id)

    def forget_absent(self, is_known: Callable[[str], bool]) -> None:
        """Forget the functions of instances that are not known any more."""
        self._by_instance = {
            instance_id: files for instance_id, files in self._by_instance.items() if is_known(instance_id)
        }


def batch_of(origin: str) -> int:
    """Return the number of the batch that a report is about; -1 if its origin does not say.

    Origins end with the key of the batch's task.
    """
    number = origin.rpartition("/")[2].removeprefix("skyward-").partition("-")[0]
    return int(number) if number.isdecimal() else -1


@dataclass(slots=True)
class KeptCalls:
    """Batches that were in flight when a head was lost. `at` has the address of the worker that keeps each; the others
    are unknown.

    `awaited` names the workers that may still announce batches, until the clock says `until`, while there is a
    connection. `on_end` gets the number of each batch that has ended, or is lost.
    """

    on_end: Callable[[int], object] = lambda _: None
    batches: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """By number: the calls that have not ended. A call may have been in an earlier batch, which handed it back."""
    at: dict[int, str] = field(default_factory=dict[int, str])
    awaited: set[str] = field(default_factory=set[str])
    until: float = 0.0
    before: int = 0
    """Batches with a lower number were sent to a head that is lost."""
    heard: dict[str, int] = field(default_factory=dict[str, int])
    """By origin: the number of the last report of a batch that is no longer in flight."""
    unrepeated: set[int] = field(default_factory=set[int])
    """Batches whose reports do not count yet: an earlier one may have come before a new scheduler knew this client."""
    _passed_over: dict[int, list[Parcel]] = field(default_factory=dict[int, list[Parcel]])
    """The outcomes in those reports. Their worker repeats them when it announces the batch, or they are left behind."""
    _left_behind: list[Parcel] = field(default_factory=list[Parcel])
    """The outcomes of lost batches that were not repeated: their files are to be removed."""
    _lost: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Batches that are lost, and their calls that had not ended: a worker may announce them after all."""
    astray: set[str] = field(default_factory=set[str])
    """Calls of lost batches that a worker has announced. They may run again elsewhere; the others are to be stopped."""
    _released: set[str] = field(default_factory=set[str])

    def begin(
        self, batches: Mapping[int, Collection[str]], awaited: Collection[str], before: int, heard: Mapping[str, int]
    ) -> None:
        """The head is lost: these batches were in flight, and these workers may still have them.

        All batches so far have numbers below `before`.
        """
        self.batches.update({number: set(calls) for number, calls in batches.items() if calls})
        for number, calls in batches.items():
            self._lost.pop(number, None)
            if not calls:
                self.on_end(number)
        self.at.clear()
        self._released.clear()
        self.astray.clear()
        self.awaited = set(awaited)
        self.before = before
        self.heard.update(heard)

    def clear(self) -> None:
        """Forget everything: the pool begins no calls any more."""
        records = (self.batches, self.at, self.awaited, self.heard, self._lost, self.astray, self._released)
        for record in (*records, self.unrepeated, self._passed_over, self._left_behind):
            record.clear()
        self.until, self.before = 0.0, 0

    @property
    def calls(self) -> list[str]:
        """The calls whose state is unknown, and those that have not ended."""
        return sorted(call_id for calls in self.batches.values() for call_id in calls)

    def announced(self, name: str, address: str, keys: Collection[str]) -> None:
        """A worker announces the batches that it keeps. All their reports follow, in order."""
        self.awaited.discard(name)
        for number in map(batch_of, keys):
            self.unrepeated.discard(number)
            self._passed_over.pop(number, None)
            if number in self.batches:
                self.at[number] = address
            self.astray.update(self._lost.get(number, ()))

    def await_repeats(self) -> None:
        """The scheduler did not know this client: reports before its answer are lost, and workers repeat them."""
        self.unrepeated = set(self.batches)

    def pass_over(self, report: Report) -> None:
        """A report of a batch in `unrepeated` does not count."""
        outcomes = [item.parcel for item in report.news if isinstance(item, Outcome)]
        self._passed_over.setdefault(batch_of(report.origin), []).extend(outcomes)

    def take_left_behind(self) -> list[Parcel]:
        """Return the outcomes of lost batches that their worker has not repeated, once."""
        left_behind, self._left_behind = self._left_behind, []
        return left_behind

    def without(self, names: Collection[str]) -> None:
        """Await no announcement of these workers: their node was replaced."""
        self.awaited.difference_update(names)

    def listen(self, now: float) -> None:
        """The connection is live: the workers have some time to announce."""
        self.until = now + DECIDED_SECONDS

    def take_lost(self, now: float, *, is_live: bool) -> list[str]:
        """Return the calls that no worker has, once that is known. Time without a connection does not count."""
        unknown = self.batches.keys() - self.at.keys()
        if not unknown or (self.awaited and not (is_live and now > self.until)):
            return []
        self.awaited.clear()
        return self._take(unknown)

    def left(self, address: str) -> list[str]:
        """A worker has gone: return the calls that it kept."""
        return self._take([number for number, there in self.at.items() if there == address])

    def forget(self, before: int) -> list[str]:
        """All batches with numbers below `before` are lost, and reports of them no longer count.

        Return the calls of those that were kept or unknown.
        """
        self.before = before
        self.awaited.clear()
        return self._take(list(self.batches))

    def lose(self, number: int, calls: Collection[str]) -> None:
        """A batch is lost with these calls."""
        self._lost[number] = set(calls)

    def was_lost(self, report: Report, call_id: str) -> bool:
        """Return whether a call of a batch had not ended when that was lost."""
        return call_id in self._lost.get(batch_of(report.origin), ())

    def ended(self, report: Report, calls: Collection[str]) -> None:
        """Outcomes of these calls have arrived: their worker may forget those that have outlived their head."""
        number = batch_of(report.origin)
        self.astray.difference_update(calls)
        if 0 <= number < self.before:
            left = self.batches.get(number, set[str]())
            left.difference_update(calls)
            if not left:
                self._take([number])
            self._released.update(calls)

    def take_astray(self, is_wanted: Callable[[str], bool]) -> set[str]:
        """Return the calls of lost batches that a worker has announced and no caller waits for, once."""
        unwanted = {call_id for call_id in self.astray if not is_wanted(call_id)}
        self.astray -= unwanted
        return unwanted

    def take_released(self, is_out: Callable[[str], bool]) -> list[str]:
        """Return the calls that workers may forget, once. Not those in flight: a worker may have them again."""
        released = sorted(call_id for call_id in self._released if not is_out(call_id))
        self._released.difference_update(released)
        return released

    def _take(self, numbers: Iterable[int]) -> list[str]:
        taken = list[str]()
        for number in sorted(numbers):
            calls = self.batches.pop(number, set[str]())
            self.at.pop(number, None)
            self.unrepeated.discard(number)
            self._left_behind += self._passed_over.pop(number, ())
            self.on_end(number)
            if calls:
                self.lose(number, calls)
            taken += sorted(calls)
        return taken


# ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────────────


class State:
    """The state of all calls of one client, and the actions that follow from its last transitions.

    Only `Calls`, `Shipments`, `Losses` and `Dispatcher`, which build on it, change it.
    """

    def __init__(self, nodes: Iterable[Node], topic: str, retries: int = 0, *, is_local: bool = False) -> None:
        self.topic = topic
        self.members = Members.of(nodes, is_local=is_local)
        self._retries = retries
        self._actions: list[do.Action] = []
        self._do = self._actions.append
        self._is_following = False
        """Whether another process decides which ranks of an elastic pool stay."""
        self._staying: frozenset[int] | None = None
        """The ranks that stay by its last decision."""

        # calls
        self.entries: dict[str, Entry] = {}
        """The calls whose callers wait: waiting, out or being fetched."""
        self.fetching: dict[str, Fetching] = {}
        """Large outcomes in transit, by call."""
        self.fetches_by_instance: Counter[str] = Counter()
        """How many outcomes are still to be fetched from each instance."""
        self.queue = Queue(topic)
        self._credit: dict[str, int] = {}
        """By call: the items below this number may be yielded. Workers repeat nothing, so each connection gets it."""
        self._to_stop: set[str] = set()
        self._drained: SkywardError | None = None
        """What calls raise that have not begun: the pool drains."""
        self._ended: SkywardError | None = None
        """What all calls raise: the pool has ended."""
        self._is_closed = False
        self.submitted: int = 0
        """How many calls were submitted so far."""
        self._done: int = 0
        self._failed: int = 0
        self._cancelled: int = 0
        self._progress: tuple[int, int, int, int] = (0, 0, 0, 0)
        """The counts that were emitted last."""
        self._progress_at = -math.inf

        # batches
        self.outs: dict[int, Out] = {}
        """The batches in flight, and those that are being uploaded, by number."""
        self._key_end = f"-{topic[-8:]}"
        """The end of the keys of this client's tasks."""
        self._functions = FunctionsOnNodes(self._do)
        self._is_load_requested = False

        # the connection
        self.epoch: int = 0
        """The number of the present connection."""
        self.is_connected = False
        """From `connected` until the connection is known to be cut."""
        self.is_live = False
        """Whether the scheduler has answered on the connection: calls go out."""
        self.heard: int = 0
        """The number of the last message of the topic."""
        self._acknowledged: int = 0
        self._unanswered: int = 0
        """How many pings in a row have no answer."""
        self._is_pinging = False
        self._pinged_at = -math.inf

        # losses
        self._kept = KeptCalls(self._functions.done)
        self._unheard: set[int] = set()
        """Batches that the scheduler does not have any more, until the messages before its answer are heard."""
        self._unheard_until: int = 0
        """The number of the last of these messages."""
        self._left_behind: list[int] = []
        """Batches whose workers have left, until the messages before the scheduler's answer are heard."""
        self._gone: list[str] = []
        """Addresses of workers that have left, likewise."""
        self._abandoned: int = 0
        """How often the scheduler has forgotten this client."""
        self._count_slots()

    @property
    def is_local(self) -> bool:
        """Whether all nodes are processes of this machine, which see the same memory."""
        return self.members.is_local

    def _is_live_in(self, epoch: int) -> bool:
        """Return whether the present connection has this epoch and is live."""
        return self.is_live and epoch == self.epoch

    def _count_slots(self) -> None:
        """Note how many calls may go out, and to which workers."""
        self.queue.workers = self.members.free
        self.queue.leaving = self.members.leaving
        self.queue.slots = self.members.slots
