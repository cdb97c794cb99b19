"""The state of all calls of a client: a pure state machine, messages in and actions out. It has no thread, no
connection and no clock.

    outbox.py      the queue of calls
    state.py       the state, and the records in it
    calls.py       calls, their items and large outcomes, from `submit` to the end of their future
    shipments.py   batches: the choice of a worker, uploads, and their flight
    losses.py      nodes and workers that come and leave; losses with a connection, a worker or a head
    dispatcher.py  the connection, and messages that concern all of these

Each class has the transitions of one of them, and builds on the class before: State, Calls, Shipments, Losses,
Dispatcher. A transition may use those of classes before its own.

States of the connection; each connection has a number, its epoch:

    none ──connected──▶ asking ──resumed──▶ live ──three pings unanswered, or closed──▶ cut
     ▲                    │ └──the same──────┼──────────────────────────────────────────▶│
     └──disconnected──────┴──────────────────┴───────────────────────────────────────────┘

Calls go out only while the connection is live. Messages of other epochs are dropped: the scheduler keeps them and sends
them again to the connection that resumes the topic, or they are lost with their scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyward_core.engine import actions as do
from skyward_core.engine.calls import call_events
from skyward_core.engine.losses import HEAD_LOST, Losses
from skyward_core.engine.shipments import seconds_by_use
from skyward_core.errors import SkywardError
from skyward_core.events.events import Metrics
from skyward_core.machines.instances import Node
from skyward_core.wire.messages import Item, Outcome, OutcomeKind, Output, Parcel, Report, ReportedMetrics
from skyward_core.wire.protocol import PoolRanks, Resumed, WorkerFree, WorkerHeld, WorkerJoined, WorkerKept, WorkerLeft

TICK_SECONDS = 0.5
PING_SECONDS = 4.0
PINGS = 3  # unanswered in a row
ACKNOWLEDGED_TOGETHER = 1000

type PoolNews = WorkerJoined | WorkerLeft | WorkerHeld | WorkerKept | WorkerFree | PoolRanks | Mapping[str, Any]


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
        """The next message of the topic: a worker's report. None: it could not be read."""
        if not self._is_live_in(epoch):
            return
        self.heard += 1
        if report is None:
            self._lose_streams()
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
        """Return `CallTable.bound_to` and `Shipments.count_for` for a node."""
        names = self.members.names_at(rank)
        return *self._bound_to(names), self._count_for(names)

    def uploading_to(self) -> set[str]:
        """Return the ids of the instances to which large values of batches go."""
        return {out.instance_id for out in self.outs.values() if not out.is_out and out.instance_id}
