"""`Observer`: connections to the nodes of a live pool and to its scheduler, for as long as one command looks."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from skyward_core.engine.certificates import PoolCertificate
from skyward_core.errors import BadRequest, CommandFailed, NodeLost, SkywardError
from skyward_core.events.events import Metrics
from skyward_core.live.pool_nodes import PoolNodes, find_nodes
from skyward_core.machines.instances import Instance
from skyward_core.session.detached_call import state_of
from skyward_core.session.sealed_lease import KeysInMemory
from skyward_core.transport.transport import Transport, Transports
from skyward_core.wire import answers
from skyward_core.wire.checks import Unreadable, UnreadableMessages
from skyward_core.wire.messages import lines_of
from skyward_core.wire.protocol import (
    DASK_PAGE,
    LIST_CALLS,
    LIST_STACKS,
    LISTING_SECONDS,
    PAGE_SECONDS,
    POOL_TOPIC,
    content_of,
    detached_key,
    is_detached,
)
from skyward_core.wire.reports import decode_news, decode_report
from skyward_core.wire.settings import SeenSettings
from skyward_core.worker.stacks import SlotStack

if TYPE_CHECKING:
    import distributed

    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.rows import CallState as NotedCall

REACH_SECONDS = 30.0
END_SECONDS = 2.0
NO_LEASE_SECONDS = 1.0
"""No node gets a lease from an observer; its transports must have a number."""
POLL_SECONDS = 0.3
LOOK_SECONDS = 5.0
"""How often a reader that follows looks whether a pool still lives."""
AGAIN_SECONDS = 30.0
FIRST_SECONDS = 6.0
"""How long the first samples may take: three times the interval."""
METRICS_POLL_SECONDS = 0.05
MOST_SAMPLES = 60
"""Of one node: two minutes."""
GRACE_SECONDS = 10.0
"""For the way to a busy scheduler and back, beside the time that it waits for its members."""


class Observer:
    """Connects to what is asked for, and closes it at the end of the context."""

    def __init__(self, nodes: PoolNodes) -> None:
        self.pool_id = nodes.pool_id
        self._lease = nodes.lease
        self._certificate = None if nodes.keys is None else nodes.keys.certificate
        self._in_memory = KeysInMemory()
        self._transports = Transports(NO_LEASE_SECONDS, lambda _: 0)
        self._client: distributed.Client | None = None
        self.unreadable = UnreadableMessages(f"pool {nodes.pool_id}")
        """Messages and answers of its nodes that were none."""
        self.instances = nodes.instances
        if nodes.lease is not None and nodes.keys is not None:
            lease = self._in_memory.with_keys(nodes.lease, nodes.keys.ssh_keys)
            self.instances = tuple(node.instance for node in lease.nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._client is not None:
                importlib.import_module("skyward_core.engine.connection").end(self._client, END_SECONDS)
        finally:
            self._transports.close()
            self._in_memory.close()
            self.unreadable.end()

    @property
    def slots_by_rank(self) -> dict[int, int]:
        """How many calls run at once on each node, by the pool's lease; empty if it has none."""
        nodes = () if self._lease is None else self._lease.nodes
        return {node.rank: node.workers * node.slots for node in nodes}

    def reach(self, instance: Instance) -> Transport:
        """Return a transport to a node, connected. Raises NodeLost (it has no address), Unreachable, errors of keys."""
        if instance.endpoint is None and instance.directory is None:
            raise NodeLost(f"{instance.id} has no address yet: try again when it has started")
        transport = self._transports.to(instance)
        if not transport.is_connected:
            transport.visit(timeout_seconds=REACH_SECONDS)
        return transport

    def client(self) -> distributed.Client:
        """Return a Dask client of the pool's scheduler, made at the first call. It unpickles nothing.

        Raises NodeLost if the pool has no head that answers, Unreachable and errors of keys.
        """
        if self._client is None:
            head, address = self._head()
            certificate = self._certificate or _certificate_of(self.reach(head))
            module = importlib.import_module("skyward_core.engine.connection")
            try:
                client = module.connect_observer(self._here(head, address), certificate)
            except OSError as error:
                raise NodeLost(f"the scheduler of pool {self.pool_id} does not answer: try again") from error
            client.on_unreadable = self.unreadable.note
            self._client = cast("distributed.Client", client)
        return self._client

    def ask(self, operation: str, seconds: float, /, **what: Any) -> Any:
        """Return the answer of the pool's scheduler. Raises NodeLost if none comes in time, and as `client` does."""
        client, until = self.client(), time.monotonic() + seconds
        module = importlib.import_module("skyward_core.engine.connection")
        return module.call_scheduler(client, operation, lambda: time.monotonic() < until, what)

    def dask_page(self, path: str) -> answers.DaskPage:
        """Return a plain page of Dask's scheduler. For any thread, after the first call of `client`.

        Raises what `ask_for` raises; nodes of an earlier release have no pages.
        """
        return self.ask_for(answers.dask_page, DASK_PAGE, PAGE_SECONDS + GRACE_SECONDS, path=path)

    def ask_for[T](self, read: Callable[[object], T], operation: str, seconds: float, /, **what: Any) -> T:
        """Return what `read` makes of the answer of the pool's scheduler. Raises NodeLost for an answer that is none,
        and as `ask` does.
        """
        return self.checked(read, self.ask(operation, seconds, **what))

    def checked[T](self, read: Callable[[object], T], answer: object) -> T:
        """Return what `read` makes of an answer. Raises NodeLost if it is none."""
        try:
            return read(answer)
        except Unreadable as error:
            self.unreadable.note("the scheduler", error)
            raise NodeLost(f"the scheduler of pool {self.pool_id} has sent an answer that is none: {error}") from error

    def _here(self, head: Instance, address: str) -> str:
        return self.reach(head).address(address)

    def _head(self) -> tuple[Instance, str]:
        """Return the node with the scheduler, and the scheduler's address there."""
        if self._lease is not None and self._lease.scheduler:
            return self.instances[0], self._lease.scheduler
        failures: list[Exception] = []
        for instance in self.instances:
            try:
                if (address := self.reach(instance).read("head.json").strip()) and urlsplit(address).port:
                    return instance, address
            except (CommandFailed, NodeLost, OSError, ValueError) as error:  # it is not the head, or not yet
                failures.append(error)
        raise NodeLost(f"pool {self.pool_id} has no head yet, or it has ended") from next(iter(failures), None)


def _certificate_of(head: Transport) -> PoolCertificate:
    """Return the pool's certificate, which its nodes have in a private file."""
    try:
        settings = SeenSettings.of(head.read("settings.json"))
        return PoolCertificate(settings.tls_certificate, settings.tls_key)
    except (CommandFailed, OSError, Unreadable) as error:
        raise NodeLost("the head of the pool has no settings: it has ended, or has not begun") from error


# Lines of a live pool: the logs of its nodes, and the output of detached calls.
#
# A node writes what it does into its log: how it was prepared, workers that start and end. What calls print goes to the
# process that has made them, and is kept only for detached calls, by the pool's scheduler.


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a node's log. `node` is -1 for a line of a detached call."""

    node: int
    text: str


class NodeLogs:
    """The logs of all nodes, or of one. `new` returns the lines since the last call."""

    def __init__(self, observer: Observer, ranks: frozenset[int]) -> None:
        """Connect. Raises Unreachable if no node can be reached."""
        self.failures: list[str] = []
        """Why some nodes cannot be reached."""
        self._transports = list[tuple[int, Any]]()
        last: SkywardError | None = None
        for instance in observer.instances:
            if instance.rank not in ranks:
                continue
            try:
                self._transports.append((instance.rank, observer.reach(instance)))
            except SkywardError as error:
                last = error
                self.failures.append(f"node {instance.rank} cannot be reached: {error}")
        if last is not None and not self._transports:
            raise last

    def all(self) -> Iterator[Line]:
        """Yield all lines that the logs have now, node by node."""
        for rank, transport in self._transports:
            for text in transport.read("log").splitlines():
                yield Line(rank, text)

    def new(self) -> Iterator[Line]:
        """Yield the lines since the last call. Does not wait."""
        for rank, transport in self._transports:
            for text in transport.new_lines():
                yield Line(rank, text)

    @property
    def have_ended(self) -> bool:
        """Whether no node lives any more."""
        return not any(_lives(transport) for _, transport in self._transports)


class CallLog:
    """The output of one detached call."""

    failures: Sequence[str] = ()

    def __init__(self, observer: Observer, call_id: str) -> None:
        self._observer = observer
        observer.client()
        self._slots = observer.slots_by_rank
        self._call_id = call_id
        self._after = 0
        self._known: Mapping[str, Any] = {}

    def all(self) -> Iterator[Line]:
        """Yield all lines so far. Raises BadRequest if the pool has no such call."""
        return self.new()

    def new(self) -> Iterator[Line]:
        """Yield the lines since the last call. Raises BadRequest if the pool has no such call."""
        observer = self._observer
        answer = observer.ask("skyward_call", GRACE_SECONDS, call_id=self._call_id, after=self._after)
        if answer is None:
            records = observer.ask_for(
                lambda it: answers.call_records(it, observer.unreadable.note), "skyward_calls", GRACE_SECONDS
            )
            names = ", ".join(record["call_id"] for record in records) or "none"
            raise BadRequest(f"the pool has no detached call {self._call_id!r}; it has {names}")
        self._known = known = observer.checked(answers.call_record, answer)
        self._after = known["number"] + len(known["messages"])
        for message in known["messages"]:
            try:
                lines = lines_of(decode_report(message))
            except Unreadable as error:
                observer.unreadable.note(f"a worker of call {self._call_id}", error)
                continue
            for text in lines:
                yield Line(-1, text)

    @property
    def have_ended(self) -> bool:
        """Whether the call has ended."""
        return self._known.get("ended_at") is not None

    def state(self) -> NotedCall | None:
        """Return what the scheduler has last said of the call, as the ledger has it. To be asked after `new`.

        None if the slots of the nodes are not known: the call's part of their price depends on them.
        """
        if not (slots := self._slots):
            return None
        return state_of(self._known, lambda rank: slots.get(rank) or slots[min(slots)], time.time())


def followed(source: NodeLogs | CallLog) -> Iterator[Line]:
    """Yield lines as they come, until the pool or the call has ended."""
    looked_at = time.monotonic()
    while True:
        yield from source.new()
        if isinstance(source, CallLog) or time.monotonic() - looked_at > LOOK_SECONDS:
            looked_at = time.monotonic()
            if source.have_ended:
                yield from source.new()
                return
        time.sleep(POLL_SECONDS)


def _lives(transport: Any) -> bool:
    try:
        return transport.lives(LOOK_SECONDS) is not False
    except (SkywardError, OSError):
        return True  # an outage is no end


@dataclass(frozen=True, slots=True)
class WorkerStacks:
    """The slots of one worker, RANK-INDEX; None if it has not answered."""

    worker: str
    slots: tuple[SlotStack, ...] | None


def stacks_of(observer: Observer) -> list[WorkerStacks]:
    """Return the stacks of all slots, by worker. The calls go on. Raises as `Observer.ask_for` does."""
    found = observer.ask_for(
        lambda answer: answers.worker_stacks(answer, observer.unreadable.note),
        LIST_STACKS,
        LISTING_SECONDS + GRACE_SECONDS,
        seconds=LISTING_SECONDS,
    )
    return sorted(
        (
            WorkerStacks(name, None if slots is None else tuple(SlotStack(*slot) for slot in slots))
            for name, slots in found
        ),
        key=lambda one: one.worker,
    )


# Utilisation of a live pool: the samples of its nodes, from the moment on at which a reader has connected.
#
# The nodes sample every two seconds. The scheduler passes the samples on and keeps none.


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The last samples of one node, the oldest first, and how many of its slots have calls."""

    node: int
    instance_id: str
    samples: tuple[Metrics, ...]
    busy: int
    slots: int


class SampleFeed:
    """Hears the samples of one pool for as long as its observer is open."""

    def __init__(self, observer: Observer, most_samples: int = MOST_SAMPLES) -> None:
        """Subscribe, and keep so many samples of each node. Raises what `Observer.client` raises."""
        self._observer = observer
        self._samples = {one.id: deque[Metrics](maxlen=most_samples) for one in observer.instances}
        observer.client().subscribe_topic(POOL_TOPIC, self._hear)

    def await_first(self) -> None:
        """Wait until each node has sent a sample, but not for long: a pool may have `collect_metrics=False`."""
        deadline = time.monotonic() + FIRST_SECONDS
        while time.monotonic() < deadline and not all(self._samples.values()):
            time.sleep(METRICS_POLL_SECONDS)

    def uses(self) -> list[NodeUse]:
        """Return the use of each node, by rank. Raises NodeLost if the scheduler does not answer."""
        observer = self._observer
        workers = observer.ask_for(answers.workers_of_dask, "identity", GRACE_SECONDS, n_workers=-1)
        tasks = observer.ask_for(answers.tasks_by_address, "processing", GRACE_SECONDS, workers=None)
        slots = _slots(workers, tasks)
        return [
            NodeUse(one.rank, one.id, tuple(self._samples[one.id]), *slots.get(one.rank, (0, 0)))
            for one in self._observer.instances
        ]

    def _hear(self, event: object) -> None:
        """Keep a sample of a node of the pool. In the thread of Dask's client."""
        try:
            news = decode_news(content_of(event))
        except Unreadable as error:
            self._observer.unreadable.note("a node", error)
            return
        if isinstance(news, Mapping) and news["instance_id"] in self._samples:  # others are of workers
            sample = Metrics(**news)
            self._samples[sample.instance_id].append(sample)


def uses_of(observer: Observer) -> list[NodeUse]:
    """Return the use of each node now; a node without samples (`collect_metrics=False`) has none."""
    feed = SampleFeed(observer)
    feed.await_first()
    return feed.uses()


class PoolUses:
    """Feeds of several pools, for a reader that comes again and again."""

    def __init__(self, ledger: Ledger, *, awaits_first: bool = False, most_samples: int = MOST_SAMPLES) -> None:
        """`awaits_first`: wait for the first samples of each pool, because there is only one look. `most_samples` are
        kept of each node.
        """
        self._ledger = ledger
        self._awaits_first = awaits_first
        self._most_samples = most_samples
        self._feeds: dict[str, tuple[Observer, SampleFeed]] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        """Why a pool was out of reach, and when (time.monotonic)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(())

    def keep(self, pool_ids: Collection[str]) -> None:
        """Close the connections to all other pools: they have ended."""
        for pool_id in self._feeds.keys() - set(pool_ids):
            self._feeds.pop(pool_id)[0].__exit__(None, None, None)

    def of(self, pool_id: str) -> list[NodeUse] | str:
        """Return the uses of the nodes of a pool, or why it is out of reach; that is tried again later."""
        at, why = self._failed.get(pool_id, (0.0, ""))
        if why and time.monotonic() - at < AGAIN_SECONDS:
            return why
        try:
            return self._feed(pool_id).uses()
        except Exception as error:  # of any kind: one pool must not keep a page from the others
            if (known := self._feeds.pop(pool_id, None)) is not None:
                known[0].__exit__(None, None, None)
            kind = "" if isinstance(error, (SkywardError, OSError)) else f"{type(error).__name__}: "
            self._failed[pool_id] = (time.monotonic(), f"{kind}{error}".partition("\n")[0])
            return self._failed[pool_id][1]

    def _feed(self, pool_id: str) -> SampleFeed:
        if pool_id not in self._feeds:
            observer = Observer(find_nodes(self._ledger, pool_id))
            try:
                feed = SampleFeed(observer, self._most_samples)
            except BaseException:
                observer.__exit__(None, None, None)
                raise
            self._feeds[pool_id] = (observer, feed)
            if self._awaits_first:
                feed.await_first()
        return self._feeds[pool_id][1]


def _slots(workers: Mapping[str, tuple[str, int]], tasks: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """Return how many slots of each rank have calls, and how many there are."""
    found: dict[int, tuple[int, int]] = {}
    for address, (name, threads) in workers.items():
        rank = name.partition("-")[0]
        if rank.isascii() and rank.isdecimal():
            busy, slots = found.get(int(rank), (0, 0))
            found[int(rank)] = (busy + min(threads, tasks.get(address, 0)), slots + threads)
    return found


# The calls of a live pool: which wait, run or are fetched, where, for whom, and on request where in the code they are.
#
# The pool's scheduler asks its clients and workers (`worker/scheduler.py`); here their answers become one list. A
# worker knows which call a slot has, and a client knows its function and its work. So a call whose client does not
# answer is still in the list.


class CallState(StrEnum):
    """Where a call is on its way."""

    WAITING = "waiting"  # for a slot: in its client's queue, or at a worker whose slots are busy
    RUNNING = "running"
    FETCHING = "fetching"  # it has ended, and its result is on the way to its client, or is loaded there
    UNKNOWN = "unknown"  # it was sent to a worker, and a worker does not answer


@dataclass(frozen=True, slots=True)
class CallClient:
    """The process that waits for a call; all empty for one that has not said who it is."""

    user: str = ""
    pid: int | None = None
    work: Mapping[str, str] = field(default_factory=dict[str, str])
    work_text: str = ""


NO_CLIENT = CallClient()


@dataclass(frozen=True, slots=True)
class LiveCall:
    """One call that has not ended. `seconds`: for how long it has been in its state; None if that is not known.

    `worker` is RANK-INDEX, `slot` the number of its slot there, and `pid` the call's own process on the node. A
    detached call has an `owner` in place of a client. `stacks` is None if they were not asked for.
    """

    call_id: str
    function: str
    state: CallState
    seconds: float | None
    client: CallClient = NO_CLIENT
    is_detached: bool = False
    owner: str = ""
    worker: str = ""
    slot: int | None = None
    pid: int | None = None
    stacks: str | None = None

    @property
    def node(self) -> int | None:
        """The rank of its node."""
        rank = self.worker.partition("-")[0]
        return int(rank) if rank.isdecimal() else None


@dataclass(frozen=True, slots=True)
class CallList:
    """The calls of a pool, running ones first. `more_waiting`: how many wait in queues and are not listed. `silent`:
    who has not answered, and what that means, as sentences.
    """

    calls: tuple[LiveCall, ...]
    more_waiting: int
    silent: tuple[str, ...]


def calls_of(observer: Observer, *, with_stacks: bool = False) -> CallList:
    """Return the calls of a pool. They go on.

    Raises what `Observer.ask_for` raises, and BadRequest if the nodes were started by an earlier release.
    """
    answer = observer.ask(LIST_CALLS, LISTING_SECONDS + GRACE_SECONDS, with_stacks=with_stacks, seconds=LISTING_SECONDS)
    if answer is None:
        raise BadRequest(
            f"the nodes of pool {observer.pool_id} have a release that lists no calls: `skyward stacks` shows its slots"
        )
    return call_list(observer.checked(lambda it: answers.call_lists(it, observer.unreadable.note), answer))


def call_list(answer: Mapping[str, Any]) -> CallList:
    """Return one list of what clients and workers have answered."""
    running = {call.call_id: call for call in _in_slots(answer["workers"])}
    clients = {one.get("topic", ""): _client(one) for one in answer["clients"]}
    mute = [one["name"] for one in answer["workers"] if one["slots"] is None]
    unheard = CallState.UNKNOWN if mute or answer["others"] else CallState.WAITING
    found = [
        call
        for one in answer["clients"]
        for row in (one["calls"] or {"listed": ()})["listed"]
        for call in [_of_client(row, _client(one), running, unheard)]
    ]
    found += _detached(answer["detached"], answer["now"], running, unheard)
    for call in running.values():  # their clients have not answered
        topic = call.owner
        found.append(replace(call, owner="", client=clients.get(topic, NO_CLIENT)))
    order = list(CallState)
    order.insert(0, order.pop(order.index(CallState.RUNNING)))
    found.sort(key=lambda call: (order.index(call.state), -(call.seconds or 0.0)))
    waiting = sum(one["calls"]["waiting"] for one in answer["clients"] if one["calls"] is not None)
    listed = sum(
        row[2] == CallState.WAITING
        for one in answer["clients"]
        if one["calls"] is not None
        for row in one["calls"]["listed"]
    )
    return CallList(tuple(found), waiting - listed, tuple(_silent(answer["clients"], mute, answer["others"])))


def _in_slots(workers: Iterable[Mapping[str, Any]]) -> Iterator[LiveCall]:
    """Return the calls in slots, each with its topic in place of its owner."""
    for worker in workers:
        for slot, pid, topic, call_id, seconds, stacks in worker["slots"] or ():
            yield LiveCall(
                str(call_id),
                "",
                CallState.RUNNING,
                seconds,
                owner=topic,
                worker=worker["name"],
                slot=slot,
                pid=pid,
                stacks=stacks,
            )


def _client(one: Mapping[str, Any]) -> CallClient:
    return CallClient(one.get("user", ""), one.get("pid"), one.get("work", {}), one.get("work_text", ""))


def _of_client(row: Sequence[Any], client: CallClient, running: dict[str, LiveCall], unheard: CallState) -> LiveCall:
    call_id, function, stage, where, seconds = row
    if (call := running.pop(call_id, None)) is not None:
        return replace(call, function=function, client=client, owner="")
    state = unheard if stage == "out" else CallState(stage)
    return LiveCall(call_id, function, state, seconds, client, worker=where or "")


def _detached(
    records: Iterable[Mapping[str, Any]], now: float, running: dict[str, LiveCall], unheard: CallState
) -> Iterator[LiveCall]:
    by_topic = {call.owner: call for call in running.values() if is_detached(call.owner)}
    for record in records:
        call_id, function, owner = record["call_id"], record["name"], record["owner"]
        if (call := by_topic.get(detached_key(call_id))) is not None:
            del running[call.call_id]
            yield replace(call, call_id=call_id, function=function, owner=owner, is_detached=True)
        elif record["state"] in ("waiting", "running"):
            state = CallState.WAITING if record["state"] == "waiting" and not record["worker"] else unheard
            yield LiveCall(
                call_id,
                function,
                state,
                max(0.0, now - record["submitted_at"]),
                is_detached=True,
                owner=owner,
                worker=record["worker"],
            )


def _silent(clients: Iterable[Mapping[str, Any]], mute: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    for one in clients:
        if one["calls"] is None:
            yield (
                f"the client {one.get('user', '')}, process {one.get('pid')}, does not answer: the functions of its"
                " calls, and those that wait, are not known"
            )
    for name in mute:
        yield f"worker {name} does not answer: what it runs is not known"
    for name in others:
        yield f"worker {name} has a release that lists no calls: `skyward stacks` shows its slots"
