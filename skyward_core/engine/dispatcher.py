"""The state of all calls of a client: a pure state machine, messages in and actions out. It has no thread, no
connection and no clock.

The dispatcher passes messages on to its parts. Each part owns its state, and its module draws the states:

    calls.py             calls, their items and large outcomes, from `submit` to the end of their future
    outbox.py            the queue of calls
    shipments.py         batches: the choice of a worker, uploads, and their flight; large functions on nodes
    connection_state.py  the connection and its epoch
    losses.py            losses with a connection, a worker or a head; what follows from changes of nodes and workers
    kept_calls.py        calls that outlive their head
    members.py           nodes and workers

A part calls only the parts that its constructor takes. There is no circle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable, Fetching, Items, call_events
from skyward_core.engine.connection_state import ConnectionState
from skyward_core.engine.kept_calls import KeptCalls
from skyward_core.engine.losses import HEAD_LOST, Losses, Roster
from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Entry, Queue
from skyward_core.engine.shipments import FunctionsOnNodes, Out, Placement, Shipments, seconds_by_use
from skyward_core.errors import SkywardError
from skyward_core.events.events import Metrics
from skyward_core.machines.instances import Node
from skyward_core.worker.retained_batches import WorkerFree, WorkerKept
from skyward_core.worker.scheduler_messages import PoolRanks, Resumed, WorkerHeld, WorkerJoined, WorkerLeft
from skyward_core.worker.wire import Item, Outcome, OutcomeKind, Output, Parcel, Report, ReportedMetrics

TICK_SECONDS = 0.5

type PoolNews = WorkerJoined | WorkerLeft | WorkerHeld | WorkerKept | WorkerFree | PoolRanks | Mapping[str, Any]


class Dispatcher:
    """The state of all calls of one client.

    One thread calls it, and does the actions that `take_actions` returns, in their order.
    """

    def __init__(self, nodes: Iterable[Node], topic: str, retries: int = 0, *, is_here: bool = False) -> None:
        self.topic = topic
        self.members = Members.of(nodes, is_here=is_here)
        self._actions: list[do.Action] = []
        act = self._do = self._actions.append
        self._queue = Queue(topic)
        self._functions = FunctionsOnNodes(act)
        self._kept = KeptCalls(self._functions.done)
        self._connection = ConnectionState(act)
        self._calls = CallTable(self._queue, self.members, self._connection, retries, act)
        self._items = Items(self.members, self._connection, self._queue, self._calls, act)
        self._shipments = Shipments(topic, self._connection, self._queue, self._calls, self._functions, self._kept, act)
        self._placement = Placement(
            self.members, self._connection, self._queue, self._calls, self._shipments, self._functions, act
        )
        self._losses = Losses(
            self.members, self._connection, self._queue, self._calls, self._shipments, self._kept, act
        )
        self._roster = Roster(
            self.members,
            self._queue,
            self._calls,
            self._items,
            self._shipments,
            self._functions,
            self._kept,
            self._losses,
            act,
        )
        self._roster.count_slots()

    def take_actions(self) -> list[do.Action]:
        """Return the actions to do, and forget them."""
        taken = self._actions.copy()
        self._actions.clear()
        return taken

    @property
    def is_here(self) -> bool:
        """Whether all nodes are processes of this machine, which see the same memory."""
        return self.members.is_here

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The calls whose callers wait: waiting, out or being fetched."""
        return self._calls.entries

    @property
    def fetching(self) -> Mapping[str, Fetching]:
        """Large outcomes in transit, by call."""
        return self._calls.fetches.by_call

    @property
    def outs(self) -> Mapping[int, Out]:
        """The batches in flight, and those that are being uploaded, by number."""
        return self._shipments.outs

    @property
    def epoch(self) -> int:
        """The number of the present connection."""
        return self._connection.epoch

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection: from `connected` until it is known to be cut."""
        return self._connection.is_connected

    @property
    def is_live(self) -> bool:
        """Whether the scheduler has answered on the connection: calls go out."""
        return self._connection.is_live

    @property
    def heard(self) -> int:
        """The number of the last message of the topic."""
        return self._connection.heard

    # ── from callers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, entries: Sequence[Entry]) -> None:
        """Take calls in, last in the queue."""
        self._calls.submit(entries)

    def cancel(self, call_id: str) -> None:
        """Stop a call that its caller has cancelled, or do not begin it."""
        self._calls.cancel(call_id)

    def give_credit(self, call_id: str, below: int) -> None:
        """The consumer of a streaming call has taken items: it may yield those below this number."""
        self._items.give_credit(call_id, below)

    def release_shared(self, name: str) -> None:
        """No call will use a scattered value any more: remove it from all nodes."""
        self._functions.release(name)

    def is_out(self, call_id: str) -> bool:
        """Return whether a call was sent to a worker, so that it may have begun, and its outcome has not arrived."""
        return self._queue.is_out(call_id) or self._calls.fetches.is_under_way(call_id)

    def stage(self, call_id: str) -> tuple[str, str, str | None, float] | None:
        """Return the function of a call, its state, the worker or the node (a number) that it needs or that had it, and
        since when, on the clock of `tick`. None for a call that has ended.

        States are "waiting", "out" (sent to a worker: it waits there, or runs) and "fetching".
        """
        if (fetching := self._calls.fetches.by_call.get(call_id)) is not None:
            return fetching.entry.title, "fetching", str(fetching.node), fetching.since
        if (entry := self._calls.entries.get(call_id)) is None:
            return None
        state = "out" if self._queue.is_out(call_id) else "waiting"
        return entry.title, state, entry.worker, entry.submitted_at

    def batches_by_use(self) -> dict[str, int]:
        """Return how many batches at workers have a call of each use, also one that stops. For any thread."""
        return self._queue.batches_by_use()

    def drain(self, error: SkywardError | None) -> None:
        """Begin no more calls: those that have not begun raise this, those that run may end.

        None: begin calls again.
        """
        if error is not None:
            for call_ids in self._shipments.withdraw():
                self._queue.returned(call_ids)
        self._calls.drain(error)

    def give_up(self, error: SkywardError, rank: int | None = None) -> None:
        """Wait no longer for a node that is not replaced: calls that need it raise this.

        None: all calls raise it, now and later.
        """
        if rank is None:
            self._clear()
            self._calls.end(error)
        else:
            self._calls.give_up_at(self.members.names_at(rank), error)

    def close(self, error: SkywardError) -> None:
        """End: all calls that have not ended raise this."""
        self._clear()
        self._calls.close(error)

    def _clear(self) -> None:
        """Forget the batches: nothing runs any more."""
        self._shipments.clear()
        self._losses.clear()

    # ── from the connection ──────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, now: float) -> int:
        """There is a connection: return its epoch. Calls go out once `resumed` was called for it."""
        self.disconnected()
        return self._connection.connected(now)

    def disconnected(self) -> None:
        """There is no connection. Batches that have not gone out wait again."""
        self._connection.disconnected()
        self._placement.disconnected()
        self._losses.forget()
        for call_ids in self._shipments.withdraw():
            self._calls.take_back(call_ids)

    def restarted(self, nodes: Sequence[Node], is_there: Callable[[Parcel], bool], now: float) -> None:
        """Another scheduler replaces the one before. Calls in flight are kept by workers that outlive the head, or lost
        with it.

        Arguments in the memory of a lost node are lost too; `is_there` says which exist.
        """
        self.disconnected()
        self._items.lose_all()
        alive = {node.instance.id for node in self.members.nodes.values()}
        self._roster.restart(nodes)
        self._losses.head_lost(
            [name for node in nodes if node.instance.id in alive for name in self.members.names_at(node.rank)]
        )
        # The files of a lost machine exist until its memory is cleared: they count as gone.
        self._calls.lose(
            self._calls.without_arguments(
                lambda parcel: self.members.instance_of(parcel) is not None and is_there(parcel)
            ),
            HEAD_LOST,
        )
        self._losses.lose_unkept(now)

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        """The scheduler has answered: it lists the batches that it has and its workers.

        The messages that were missed follow.
        """
        heard = self._connection.heard
        if not self._connection.resumed(epoch, resumed.number):
            return
        if resumed.number > heard:
            self._items.lose_all()
        self._losses.begin(epoch, resumed.abandoned, now, is_known=resumed.is_known)
        self._roster.resumed(resumed)
        self._losses.compare(epoch, resumed)
        self._calls.stop_unwanted()
        self._items.repeat_credit()
        self._losses.decide()
        self._do(do.Answered(epoch))

    def report(self, epoch: int, report: Report | None, now: float) -> None:
        """The next message of the topic: a worker's report. None: it could not be read."""
        if not self._connection.hear(epoch):
            return
        if report is None:
            self._items.lose_all()
        if report is not None and not self._losses.is_repeated(report):
            if seconds := seconds_by_use(item for item in report.news if isinstance(item, Outcome)):
                self._do(do.MeterCalls(report.instance_id, seconds))
            for item in report.news:
                if isinstance(item, Output | ReportedMetrics):
                    for event in call_events(report, item, *self._calls.place_and_use_of(item.call_id)):
                        self._do(do.EmitEvent(event, item.call_id))
                elif isinstance(item, Item):
                    self._items.arrived(item, report.node)
                elif item.kind is not OutcomeKind.RETURNED:
                    self._calls.ended(item, report.node, report.instance_id, now)
            self._calls.take_back(
                [
                    item.call_id
                    for item in report.news
                    if isinstance(item, Outcome) and item.kind is OutcomeKind.RETURNED
                ]
            )
        self._losses.decide()
        self._connection.acknowledge_many()

    def pool_news(self, epoch: int, news: PoolNews, now: float) -> None:
        """A worker has joined or left, is held, or keeps calls; or a node has measured something."""
        if not self._connection.is_live_in(epoch):  # the scheduler's answer lists the workers of that time
            if isinstance(news, Mapping) and epoch == self._connection.epoch:
                self._do(do.EmitEvent(Metrics(**news)))
            return
        match news:
            case WorkerJoined():
                self._roster.join(news.name, news.address, news.instance_id)
            case WorkerLeft():
                self._roster.leave(news.name, news.address)
                self._losses.decide()
            case WorkerKept():
                self._roster.announced(news, now)
            case WorkerFree(_, address):
                self._roster.free(address)
            case WorkerHeld():
                self._roster.hold(news.address, news.left)
            case PoolRanks():
                self._roster.ranks_known(news.ranks)
            case _:
                self._do(do.EmitEvent(Metrics(**news)))

    def task_ended(self, epoch: int, number: int, *, is_finished: bool, reason: str) -> None:
        """The task of a batch has ended: outcomes that were not reported are in its result, or lost with its worker."""
        self._shipments.task_ended(epoch, number, is_finished=is_finished, reason=reason)

    def gathered(
        self, epoch: int, number: int, outcomes: Mapping[str, Outcome], node: int, instance_id: str, now: float
    ) -> None:
        """The result of a batch's task is here."""
        self._shipments.gathered(epoch, number, outcomes, node, instance_id, now)

    def not_gathered(self, epoch: int, number: int, error: Exception) -> None:
        """The result of a batch's task is out of reach."""
        self._shipments.not_gathered(epoch, number, error)

    def taken_back(self, epoch: int, number: int) -> None:
        """A batch whose worker is gone had not ended, and its task is released: its calls are lost."""
        self._shipments.taken_back(epoch, number)

    def unsent(self, epoch: int, number: int, error: Exception, *, is_its_fault: bool) -> None:
        """A batch was not sent. It waits again, unless the batch itself is the cause."""
        self._shipments.unsent(epoch, number, error, is_its_fault=is_its_fault)

    def load_known(self, epoch: int, load: Mapping[str, Sequence[str]]) -> None:
        """The scheduler has said which batches each worker has; empty if it did not answer."""
        self._placement.load_known(epoch, load)

    def pinged(self, epoch: int, *, is_answered: bool) -> None:
        """The scheduler has answered a ping, or has not."""
        self._connection.pinged(epoch, is_answered=is_answered)

    def cut(self, epoch: int) -> None:
        """The connection is closed, or the scheduler does not answer any more."""
        self._connection.cut(epoch)

    # ── from transfers ───────────────────────────────────────────────────────────────────────────────────────────────

    def uploaded(
        self, number: int, instance_id: str, arguments: Mapping[str, Parcel], functions: Mapping[str, Parcel | None]
    ) -> None:
        """Large values of a batch are in a node's memory.

        A function that is None found no room there and travels in the message.
        """
        self._placement.uploaded(number, instance_id, arguments, functions)

    def upload_failed(
        self, number: int, instance_id: str, functions: Collection[str], error: Exception, *, is_its_fault: bool
    ) -> None:
        """Large values of a batch could not be put into a node's memory."""
        self._placement.upload_failed(number, instance_id, functions, error, is_its_fault=is_its_fault)

    def fetched(self, call_id: str, parcel: Parcel, lies_at: str) -> None:
        """A large outcome is here."""
        self._calls.fetched(call_id, parcel, lies_at)

    def not_fetched(self, call_id: str, lies_at: str, error: Exception, *, is_cut: bool) -> None:
        """A large outcome could not be fetched.

        `is_cut`: the connection to its node was cut; the fetch is repeated when the connection is back.
        """
        self._calls.not_fetched(call_id, lies_at, error, is_cut=is_cut)

    # ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, is_reachable: Callable[[str], bool]) -> None:
        """Twice a second: check the connection, and repeat fetches from nodes that are reachable again (`is_reachable`,
        by instance id).
        """
        self._queue.wake()
        self._losses.lose_unkept(now)
        self._calls.tick(now, is_reachable)
        self._connection.tick(now)

    def flush(self, now: float) -> None:
        """After one or several messages: send and stop calls, release kept ones, emit the progress."""
        if self._connection.is_live:
            self._stop_unwanted()
            if released := self._kept.take_released(self._queue.is_out):
                self._do(do.ReleaseRetainedCalls(self._connection.epoch, tuple(released)))
            self._placement.ship()
        self._calls.emit_progress(now)

    def _stop_unwanted(self) -> None:
        """Stop all calls that are to be stopped, with one message."""
        stop = self._kept.take_astray(self._calls.entries.__contains__)
        stop |= self._calls.take_to_stop()
        if stop:
            self._do(do.Stop(self._connection.epoch, tuple(sorted(stop))))

    # ── nodes and workers ────────────────────────────────────────────────────────────────────────────────────────────

    def know(self, nodes: Iterable[Node]) -> None:
        """Note these nodes: some have replaced others."""
        self._roster.know(nodes)

    def forget_node(self, rank: int) -> None:
        """Go on without the node of this rank, which is absent, and without a replacement."""
        self._roster.forget(rank)

    def follow(self, *, is_following: bool) -> None:
        """Another process decides which ranks of an elastic pool stay (True), or this one does."""
        self._roster.follow(is_following=is_following)

    def calls_of(self, rank: int) -> tuple[int, int, int]:
        """Return `CallTable.bound_to` and `Shipments.count_for` for a node."""
        names = self.members.names_at(rank)
        return *self._calls.bound_to(names), self._shipments.count_for(names)

    @property
    def waiting(self) -> int:
        """How many calls wait for a free slot. May be read from any thread."""
        return self._queue.waiting

    def fetching_from(self, instance_id: str) -> int:
        """Return how many outcomes are still to be fetched from a node."""
        return self._calls.fetches.count_from(instance_id)

    def uploading_to(self) -> set[str]:
        """Return the ids of the instances to which large values of batches go."""
        return {out.instance_id for out in self._shipments.outs.values() if not out.is_out and out.instance_id}

    def fetching_at(self) -> frozenset[str]:
        """Return the ids of the instances from which outcomes are fetched."""
        return self._calls.fetches.instances

    def key(self, number: int) -> str:
        """Return the key of a batch's task."""
        return self._shipments.key(number)
