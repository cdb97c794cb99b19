"""Losses with a connection, a worker or a head: which calls are lost, and when that is known.

A batch in flight is lost if the scheduler does not have it any more when the next connection resumes. A kept call is
lost when its worker leaves. Both are decided only after the messages that the scheduler had sent before: an outcome may
be among them.

When the head is lost, workers that outlive it announce the calls that they have, and report them again
(`state.KeptCalls`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from skyward_core.engine import actions as do
from skyward_core.engine.shipments import Shipments
from skyward_core.engine.state import batch_of, rank_of
from skyward_core.events.events import BootstrapCompleted
from skyward_core.machines.instances import Node
from skyward_core.wire.messages import Item, Outcome, Report
from skyward_core.wire.protocol import HELD, Resumed, WorkerKept

HEAD_LOST = "the head of the pool was lost"


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
