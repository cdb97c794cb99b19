"""Losses with a connection, a worker or a head: which calls are lost, and when that is known.

A batch in flight is lost if the scheduler does not have it any more when the next connection resumes. A kept call is
lost when its worker leaves. Both are decided only after the messages that the scheduler had sent before: an outcome may
be among them.

When the head is lost, workers that outlive it announce the calls that they have, and report them again
(`kept_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable
from skyward_core.engine.connection_state import ConnectionState
from skyward_core.engine.kept_calls import KeptCalls, batch_of
from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Queue
from skyward_core.engine.shipments import Shipments
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.wire import Item, Outcome, Report

HEAD_LOST = "the head of the pool was lost"


class Losses:
    """The batches and calls that may be lost, until that is known. `act` takes the actions."""

    def __init__(
        self,
        members: Members,
        connection: ConnectionState,
        queue: Queue,
        calls: CallTable,
        shipments: Shipments,
        kept: KeptCalls,
        act: Callable[[do.Action], object],
    ) -> None:
        self._members = members
        self._connection = connection
        self._queue = queue
        self._calls = calls
        self._shipments = shipments
        self._kept = kept
        self._do = act
        self._unheard: set[int] = set()
        """Batches that the scheduler does not have any more, until the messages before its answer are heard."""
        self._unheard_until = 0
        """The number of the last of these messages."""
        self._left_behind: list[int] = []
        """Batches whose workers have left, until the messages before the scheduler's answer are heard."""
        self._gone: list[str] = []
        """Addresses of workers that have left, likewise."""
        self._abandoned = 0
        """How often the scheduler has forgotten this client."""

    def forget(self) -> None:
        """Wait for no messages any more: the connection has ended, or all are heard."""
        self._unheard.clear()
        self._left_behind.clear()
        self._gone.clear()

    def clear(self) -> None:
        """Forget everything: the pool begins no calls any more."""
        self.forget()
        self._kept.clear()

    # ── another connection ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, epoch: int, abandoned: int, now: float, *, is_known: bool) -> None:
        """The scheduler has answered.

        `abandoned`: how often it has forgotten this client; each time it has stopped all calls of the client.
        `is_known`: whether it has kept the messages for this client.
        """
        may_keep = bool(self._kept.before)
        if abandoned != self._abandoned:
            self._abandoned = abandoned
            self._lose_all("its scheduler has waited for this client for too long")
        if may_keep:  # also if all calls are lost or have ended: workers are to forget them
            self._kept.listen(now)
            if not is_known:
                self._kept.await_repeats()
            self._do(do.RepeatReports(epoch))

    def compare(self, epoch: int, resumed: Resumed) -> None:
        """Decide by the scheduler's answer about each batch that an earlier connection has sent: its task is known, it
        never came, or it is lost.
        """
        before = {self._shipments.key(out.number): out for out in self._shipments.outs.values() if out.epoch < epoch}
        for key, out in before.items():
            if key in resumed.tasks:
                self._shipments.follow(out)
                if out.worker and self._members.workers.get(out.worker) != out.address:
                    self._left_behind.append(out.number)
            elif resumed.is_known and key not in resumed.gone:
                self._calls.take_back(self._shipments.forget(out))  # it was sent on a dead connection
            else:
                self._unheard.add(out.number)
        if ended := tuple(key for key in resumed.tasks if key not in before):
            self._do(do.Release(epoch, ended))
        self._unheard_until = resumed.last

    def keepers_gone(self, addresses: Collection[str]) -> None:
        """The workers that keep calls have left, except those at these addresses."""
        self._gone += sorted(set(self._kept.at.values()) - set(addresses))

    def worker_left(self, address: str) -> None:
        """A worker has left."""
        self._gone.append(address)

    def decide(self) -> None:
        """Once the messages before the scheduler's answer are heard, lose the batches and calls that the scheduler or a
        worker does not have any more.
        """
        if self._connection.heard < self._unheard_until:
            return
        if self._unheard:
            for out in [out for number, out in self._shipments.outs.items() if number in self._unheard]:
                self._calls.lose(self._shipments.forget(out), "it was lost while its scheduler could not be reached")
        for number in self._left_behind:
            self._do(do.TakeBack(self._connection.epoch, number, self._shipments.key(number)))
        for address in self._gone:
            self._calls.lose(self._kept.left(address), "its worker is gone")
        self._discard_left_behind()
        self.forget()

    def _lose_all(self, reason: str) -> None:
        out = [call_id for item in list(self._shipments.outs.values()) for call_id in self._shipments.forget(item)]
        out += self._kept.forget(self._queue.next_number)
        self._calls.lose(out, reason)

    # ── another head ─────────────────────────────────────────────────────────────────────────────────────────────────

    def head_lost(self, awaited: Sequence[str]) -> None:
        """The head is lost. The workers of these names may join the next one with the calls in flight."""
        self._abandoned = 0
        outs = self._shipments.outs
        heard = {origin: number for out in outs.values() for origin, number in out.heard.items()}
        before = self._queue.next_number
        batches = {out.number: self._shipments.forget_with_head(out) for out in list(outs.values())}
        self._kept.begin(batches, awaited, before, heard)

    def is_repeated(self, report: Report) -> bool:
        """Return whether a report was heard before, or its batch is done; note the report's number.

        Workers repeat all reports that were not released when they join, and at each request. A report that comes
        before an awaited announcement counts as repeated, because it follows the announcement again.
        """
        number = batch_of(report.origin)
        if number < 0:
            return False
        out = self._shipments.outs.get(number)
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
                self._calls.discard(outcome.parcel)
        for item in report.news if is_done else ():
            if isinstance(item, Item):  # of a run that was lost: no consumer takes it
                self._calls.discard(item.parcel)
        self._kept.ended(report, [outcome.call_id for outcome in outcomes])
        return is_done or is_repeated

    def lose_unkept(self, now: float) -> None:
        """Lose the calls that were in flight when the head was lost and that no worker has kept, once that is known."""
        if lost := self._kept.take_lost(now, is_live=self._connection.is_live):
            self._calls.lose(lost, HEAD_LOST)
            self._discard_left_behind()

    def _discard_left_behind(self) -> None:
        for parcel in self._kept.take_left_behind():
            self._calls.discard(parcel)
