"""The state of all calls of a client: a pure state machine, messages in and actions out. It has no thread, no
connection and no clock.

    outbox.py      the queue of calls
    state.py       the state, and the records in it
    calls.py       calls, their items and large outcomes, from `submit` to the end of their future
    shipments.py   batches: the choice of a worker, uploads, and their flight
    dispatcher.py  nodes and workers that come and leave; losses with a connection, a worker or a head; the connection

Each class has the transitions of one of them, and builds on the class before: State, Calls, Shipments, Losses,
Dispatcher. A transition may use those of classes before its own.

States of the connection; each connection has a number, its epoch:

    none ──connected──▶ asking ──resumed──▶ live ──three pings unanswered, or closed──▶ cut
     ▲                    │ └──the same──────┼──────────────────────────────────────────▶│
     └──disconnected──────┴──────────────────┴───────────────────────────────────────────┘

Calls go out only while the connection is live. Messages of other epochs are dropped: the scheduler keeps them and sends
them again to the connection that resumes the topic, or they are lost with their scheduler.

A batch in flight is lost if the scheduler does not have it any more when the next connection resumes. A kept call is
lost when its worker leaves. Both are decided only after the messages that the scheduler had sent before: an outcome may
be among them. When the head is lost, workers that outlive it announce the calls that they have, and report them again
(`state.KeptCalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from skyward_core.engine import actions as do
from skyward_core.engine.calls import call_events
from skyward_core.engine.shipments import Shipments, seconds_by_use
from skyward_core.engine.state import batch_of, rank_of
from skyward_core.errors import SkywardError
from skyward_core.events.events import BootstrapCompleted, Metrics
from skyward_core.machines.instances import Node
from skyward_core.wire.messages import Item, Outcome, OutcomeKind, Output, Parcel, Report, ReportedMetrics
from skyward_core.wire.protocol import (
    HELD,
    PoolRanks,
    Resumed,
    WorkerFree,
    WorkerHeld,
    WorkerJoined,
    WorkerKept,
    WorkerLeft,
)
from skyward_core.wire.reports import PoolNews

HEAD_LOST = "the head of the pool was lost"
MOST_ORIGINS = 10_000
"""Of the reports of one batch, or of all that have ended: whoever lies can name others without end."""


class Losses(Shipments):
    """The transitions of nodes and workers that come and leave, and of the batches and calls that may be lost with them
    until that is known.
    """

    def _stop_waiting(self) -> None:
        """Wait for no messages any more: the connection has ended, or all are heard."""
        self._unheard.clear()
        self._left_behind.clear()
        self._gone.clear()

    def _clear_losses(self) -> None:
        """Forget everything: the pool begins no calls any more."""
        self._stop_waiting()
        self._kept.clear()

    # ── another connection ───────────────────────────────────────────────────────────────────────────────────────────

    def _begin_comparison(self, epoch: int, abandoned: int, now: float, *, is_known: bool) -> None:
        """The scheduler has answered.

        `abandoned`: how often it has forgotten this client; each time it has stopped all calls of the client.
        `is_known`: whether it has kept the messages for this client.
        """
        may_keep = bool(self._kept.before)
        if abandoned != self._abandoned:
            self._abandoned = abandoned
            self._lose_in_flight("its scheduler has waited for this client for too long")
        if may_keep:  # also if all calls are lost or have ended: workers are to forget them
            self._kept.listen(now)
            if not is_known:
                self._kept.await_repeats()
            self._do(do.RepeatReports(epoch))

    def _compare_batches(self, epoch: int, resumed: Resumed) -> None:
        """Decide by the scheduler's answer about each batch that an earlier connection has sent: its task is known, it
        never came, or it is lost.
        """
        before = {self.key(out.number): out for out in self.outs.values() if out.epoch < epoch}
        for key, out in before.items():
            if key in resumed.tasks:
                self._follow_batch(out)
                if out.worker and self.members.workers.get(out.worker) != out.address:
                    self._left_behind.append(out.number)
            elif resumed.is_known and key not in resumed.gone:
                self._take_back(self._forget_batch(out))  # it was sent on a dead connection
            else:
                self._unheard.add(out.number)
        if ended := tuple(key for key in resumed.tasks if key not in before):
            self._do(do.Release(epoch, ended))
        self._unheard_until = resumed.last

    def _keepers_gone(self, addresses: Collection[str]) -> None:
        """The workers that keep calls have left, except those at these addresses."""
        self._gone += sorted(set(self._kept.at.values()) - set(addresses))

    def _decide(self) -> None:
        """Once the messages before the scheduler's answer are heard, lose the batches and calls that the scheduler or a
        worker does not have any more.
        """
        if self.heard < self._unheard_until:
            return
        if self._unheard:
            for out in [out for number, out in self.outs.items() if number in self._unheard]:
                self._lose(self._forget_batch(out), "it was lost while its scheduler could not be reached")
        for number in self._left_behind:
            self._do(do.TakeBack(self.epoch, number, self.key(number)))
        for address in self._gone:
            self._lose(self._kept.left(address), "its worker is gone")
        self._discard_left_behind()
        self._stop_waiting()

    def _lose_in_flight(self, reason: str) -> None:
        out = [call_id for item in list(self.outs.values()) for call_id in self._forget_batch(item)]
        out += self._kept.forget(self.queue.next_number)
        self._lose(out, reason)

    # ── another head ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _head_lost(self, awaited: Sequence[str]) -> None:
        """The head is lost. The workers of these names may join the next one with the calls in flight."""
        self._abandoned = 0
        outs = self.outs
        heard = {origin: number for out in outs.values() for origin, number in out.heard.items()}
        before = self.queue.next_number
        batches = {out.number: self._forget_batch_of_lost_head(out) for out in list(outs.values())}
        self._kept.begin(batches, awaited, before, heard)

    def _is_repeated(self, report: Report) -> bool:
        """Return whether a report was heard before, or its batch is done; note the report's number.

        Workers repeat all reports that were not released when they join, and at each request. A report that comes
        before an awaited announcement counts as repeated, because it follows the announcement again.
        """
        number = batch_of(report.origin)
        if number < 0:
            return False
        out = self.outs.get(number)
        if out is None and number in self._kept.unrepeated:
            self._kept.pass_over(report)
            return True
        heard = out.heard if out is not None else self._kept.heard
        is_repeated = report.number <= heard.get(report.origin, 0)
        if report.origin in heard or len(heard) < MOST_ORIGINS:
            heard[report.origin] = max(report.number, heard.get(report.origin, 0))
        if out is not None:
            return is_repeated
        is_done = number not in self._kept.batches
        outcomes = [item for item in report.news if isinstance(item, Outcome)]
        for outcome in outcomes if is_done and not is_repeated else ():
            if self._kept.was_lost(report, outcome.call_id):
                self._discard(outcome.parcel)
        for item in report.news if is_done else ():
            if isinstance(item, Item):  # of a run that was lost: no consumer takes it
                self._discard(item.parcel)
        self._kept.ended(report, [outcome.call_id for outcome in outcomes])
        return is_done or is_repeated

    def _lose_unkept(self, now: float) -> None:
        """Lose the calls that were in flight when the head was lost and that no worker has kept, once that is known."""
        if lost := self._kept.take_lost(now, is_live=self.is_live):
            self._lose(lost, HEAD_LOST)
            self._discard_left_behind()

    def _discard_left_behind(self) -> None:
        for parcel in self._kept.take_left_behind():
            self._discard(parcel)

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def update_nodes(self, nodes: Iterable[Node]) -> None:
        """Note these nodes: some have replaced others."""
        members, nodes = self.members, list(nodes)
        for node in nodes:
            before = members.nodes.get(node.rank)
            if before is not None and before.instance.id != node.instance.id:
                self._kept.without(members.names_at(node.rank))
        self._set_nodes({**members.nodes, **{node.rank: node for node in nodes}})

    def remove_node(self, rank: int) -> None:
        """Go on without the node of this rank, which is absent, and without a replacement."""
        self._set_nodes({other: node for other, node in self.members.nodes.items() if other != rank})

    def _set_nodes_of_new_head(self, nodes: Sequence[Node]) -> None:
        """Another head has these nodes; all workers are away."""
        self.members.clear()
        self._set_nodes({node.rank: node for node in nodes})

    def _set_nodes(self, nodes: Mapping[int, Node]) -> None:
        self.members.nodes = nodes
        self._functions.forget_absent(self.members.has_instance)
        self._use_ranks()
        self._count_slots()

    # ── the ranks that stay ──────────────────────────────────────────────────────────────────────────────────────────

    def follow(self, *, is_following: bool) -> None:
        """Another process decides which ranks stay (True), or this one does."""
        self._is_following = is_following
        self._use_ranks()

    def _ranks_known(self, ranks: frozenset[int] | None) -> None:
        """The process that keeps the pool has decided which ranks stay; None: it has decided nothing."""
        self._staying = ranks
        self._use_ranks()

    def _use_ranks(self) -> None:
        self.members.staying = self._staying if self._is_following else None
        if self.members.staying is not None:
            self._do(do.UseRanks(self.members.staying & self.members.nodes.keys()))
            self._count_slots()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compare_workers(self, resumed: Resumed) -> None:
        """The scheduler has listed its workers, and the ranks that stay."""
        self._keepers_gone(resumed.workers)
        there = {name: address for address, (name, _) in resumed.workers.items()}
        for name, address in list(self.members.workers.items()):
            if there.get(name) != address:
                self._leave(name, address)
        for address, (name, status) in resumed.workers.items():
            self._join(name, address, resumed.instances.get(address, ""))
            if status == HELD:
                self.members.hold(address, None)
            else:  # its WorkerFree may have been lost with the connection
                self.members.held.pop(address, None)
        self._ranks_known(resumed.ranks)
        self._count_slots()

    def _join(self, name: str, address: str, instance_id: str) -> None:
        """A worker has joined."""
        rank = rank_of(name)
        is_complete = self.members.join(name, address, instance_id)
        self._count_slots()
        self._stop_unwanted()  # the batch of a cancelled call may go to this worker
        self._repeat_credit()
        if is_complete:
            self._do(do.EmitEvent(BootstrapCompleted(self.members.nodes[rank].instance.id)))
            self._do(do.Joined(rank))

    def _leave(self, name: str, address: str) -> None:
        """A worker has left."""
        if not self.members.leave(name, address):
            return  # its successor has joined already
        self._count_slots()
        self._take_back_from(address)
        self._gone.append(address)
        self._do(do.Left(rank_of(name)))

    def _hold(self, address: str, left: int | None) -> None:
        """A worker gets no more calls, and has so many left; None: not known."""
        self.members.hold(address, left)
        self._count_slots()

    def _free(self, address: str) -> None:
        """A worker gets calls again."""
        self.members.held.pop(address, None)
        self._count_slots()

    def _announced(self, news: WorkerKept, now: float) -> None:
        """A worker announces the calls that it has from an earlier head, those of other clients too."""
        self._kept.announced(news.name, news.address, self._ours(news.keys))
        self._stop_unwanted(news.calls)
        if news.is_paused:
            self._hold(news.address, None)
        self._lose_unkept(now)


TICK_SECONDS = 0.5
PING_SECONDS = 4.0
PINGS = 3  # unanswered in a row
ACKNOWLEDGED_TOGETHER = 1000


class Dispatcher(Losses):
    """The state of all calls of one client.

    One thread calls it, and does the actions that `take_actions` returns, in their order.
    """

    def take_actions(self) -> list[do.Action]:
        """Return the actions to do, and forget them."""
        taken = self._actions.copy()
        self._actions.clear()
        return taken

    # ── from callers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def is_out(self, call_id: str) -> bool:
        """Return whether a call was sent to a worker, so that it may have begun, and its outcome has not arrived."""
        return self.queue.is_out(call_id) or self._is_being_fetched(call_id)

    def stage(self, call_id: str) -> tuple[str, str, str | None, float] | None:
        """Return the function of a call, its state, the worker or the node (a number) that it needs or that had it, and
        since when, on the clock of `tick`. None for a call that has ended.

        States are "waiting", "out" (sent to a worker: it waits there, or runs) and "fetching".
        """
        if (fetching := self.fetching.get(call_id)) is not None:
            return fetching.entry.title, "fetching", str(fetching.node), fetching.since
        if (entry := self.entries.get(call_id)) is None:
            return None
        state = "out" if self.queue.is_out(call_id) else "waiting"
        return entry.title, state, entry.worker, entry.submitted_at

    def drain(self, error: SkywardError | None) -> None:
        """Begin no more calls: those that have not begun raise this, those that run may end.

        None: begin calls again.
        """
        if error is not None:
            for call_ids in self._withdraw():
                self.queue.returned(call_ids)
        self._begin_no_calls(error)

    def fail_calls(self, error: SkywardError, rank: int | None = None) -> None:
        """Wait no longer for a node that is not replaced: calls that need it raise this.

        None: all calls raise it, now and later.
        """
        if rank is None:
            self._clear()
            self._end(error)
        else:
            self._fail_at(self.members.names_at(rank), error)

    def close(self, error: SkywardError) -> None:
        """End: all calls that have not ended raise this."""
        self._clear()
        self._is_closed = True
        self._end(error)

    def _clear(self) -> None:
        """Forget the batches: nothing runs any more."""
        self.outs.clear()
        self._clear_losses()

    # ── from the connection ──────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, now: float) -> int:
        """There is a connection: return its epoch. Calls go out once `resumed` was called for it."""
        self.disconnected()
        self.epoch += 1
        self.is_connected = True
        self._unanswered, self._is_pinging, self._pinged_at = 0, False, now
        return self.epoch

    def disconnected(self) -> None:
        """There is no connection. Batches that have not gone out wait again."""
        self.is_connected = self.is_live = self._is_load_requested = False
        self._stop_waiting()
        for call_ids in self._withdraw():
            self._take_back(call_ids)

    def restarted(self, nodes: Sequence[Node], is_there: Callable[[Parcel], bool], now: float) -> None:
        """Another scheduler replaces the one before. Calls in flight are kept by workers that outlive the head, or lost
        with it.

        Arguments in the memory of a lost node are lost too; `is_there` says which exist.
        """
        self.disconnected()
        self._lose_streams()
        alive = {node.instance.id for node in self.members.nodes.values()}
        self._set_nodes_of_new_head(nodes)
        self._head_lost(
            [name for node in nodes if node.instance.id in alive for name in self.members.names_at(node.rank)]
        )
        # The files of a lost machine exist until its memory is cleared: they count as gone.
        self._lose(
            self._without_arguments(lambda parcel: self.members.instance_of(parcel) is not None and is_there(parcel)),
            HEAD_LOST,
        )
        self._lose_unkept(now)

    def resumed(self, epoch: int, resumed: Resumed, now: float) -> None:
        """The scheduler has answered: it lists the batches that it has and its workers.

        The messages that were missed follow.
        """
        if epoch != self.epoch or not self.is_connected:  # the answer to another connection, or it comes too late
            return
        heard, self.heard, self.is_live = self.heard, resumed.number, True
        if resumed.number > heard:
            self._lose_streams()
        self._begin_comparison(epoch, resumed.abandoned, now, is_known=resumed.is_known)
        self._compare_workers(resumed)
        self._compare_batches(epoch, resumed)
        self._stop_unwanted()
        self._repeat_credit()
        self._decide()
        self._do(do.Answered(epoch))

    def report(self, epoch: int, report: Report | None, now: float) -> None:
        """The next message of the topic: a worker's report. None: it could not be read, and is of no call."""
        if not self._is_live_in(epoch):
            return
        self.heard += 1
        if report is not None and not self._is_repeated(report):
            if seconds := seconds_by_use(item for item in report.news if isinstance(item, Outcome)):
                self._do(do.MeterCalls(report.instance_id, seconds))
            for item in report.news:
                if isinstance(item, Output | ReportedMetrics):
                    for event in call_events(report, item, *self._place_and_use_of(item.call_id)):
                        self._do(do.EmitEvent(event, item.call_id))
                elif isinstance(item, Item):
                    self._item_arrived(item, report.node)
                elif item.kind is not OutcomeKind.RETURNED:
                    self._call_ended(item, report.node, report.instance_id, now)
            self._take_back(
                [
                    item.call_id
                    for item in report.news
                    if isinstance(item, Outcome) and item.kind is OutcomeKind.RETURNED
                ]
            )
        self._decide()
        if self.heard - self._acknowledged > ACKNOWLEDGED_TOGETHER:
            self._acknowledge()

    def pool_news(self, epoch: int, news: PoolNews, now: float) -> None:
        """A worker has joined or left, is held, or keeps calls; or a node has measured something."""
        if not self._is_live_in(epoch):  # the scheduler's answer lists the workers of that time
            if isinstance(news, Mapping) and epoch == self.epoch:
                self._do(do.EmitEvent(Metrics(**news)))
            return
        match news:
            case WorkerJoined():
                self._join(news.name, news.address, news.instance_id)
            case WorkerLeft():
                self._leave(news.name, news.address)
                self._decide()
            case WorkerKept():
                self._announced(news, now)
            case WorkerFree(_, address):
                self._free(address)
            case WorkerHeld():
                self._hold(news.address, news.left)
            case PoolRanks():
                self._ranks_known(news.ranks)
            case _:
                self._do(do.EmitEvent(Metrics(**news)))

    def pinged(self, epoch: int, *, is_answered: bool) -> None:
        """The scheduler has answered a ping, or has not.

        Misses are counted, not timed: a busy program misses one answer, not several in a row.
        """
        if epoch == self.epoch:
            self._is_pinging = False
            self._unanswered = 0 if is_answered else self._unanswered + 1
            if self._unanswered >= PINGS:
                self.cut(epoch)

    def cut(self, epoch: int) -> None:
        """The connection is closed, or the scheduler does not answer any more."""
        if epoch == self.epoch and self.is_connected:
            self.is_connected = self.is_live = False
            self._do(do.CutOff())

    def _acknowledge(self) -> None:
        if self.heard != self._acknowledged:
            self._acknowledged = self.heard
            self._do(do.Acknowledge(self.epoch, self.heard))

    # ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, is_reachable: Callable[[str], bool]) -> None:
        """Twice a second: check the connection, and repeat fetches from nodes that are reachable again (`is_reachable`,
        by instance id).
        """
        self.queue.wake()
        self._lose_unkept(now)
        self._repeat_fetches(now, is_reachable)
        if self.is_live:
            self._acknowledge()
        if self.is_connected and not self._is_pinging and now - self._pinged_at > PING_SECONDS:
            self._is_pinging, self._pinged_at = True, now
            self._do(do.Ping(self.epoch))

    def flush(self, now: float) -> None:
        """After one or several messages: send and stop calls, release kept ones, emit the progress."""
        if self.is_live:
            self._send_stops()
            if released := self._kept.take_released(self.queue.is_out):
                self._do(do.ReleaseRetainedCalls(self.epoch, tuple(released)))
            self._ship()
        self._emit_progress(now)

    def _send_stops(self) -> None:
        """Stop all calls that are to be stopped, with one message."""
        stop = self._kept.take_astray(self.entries.__contains__)
        stop |= self._take_to_stop()
        if stop:
            self._do(do.Stop(self.epoch, tuple(sorted(stop))))

    # ── nodes and workers ────────────────────────────────────────────────────────────────────────────────────────────

    def calls_of(self, rank: int) -> tuple[int, int, int]:
        """Return what `_bound_to` and `_count_for` return for the workers of a node."""
        names = self.members.names_at(rank)
        return *self._bound_to(names), self._count_for(names)

    def uploading_to(self) -> set[str]:
        """Return the ids of the instances to which large values of batches go."""
        return {out.instance_id for out in self.outs.values() if not out.is_out and out.instance_id}
