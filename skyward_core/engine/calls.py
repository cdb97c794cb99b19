"""The calls whose callers wait, from `submit` to the action that ends their future.

States of a call:

    waiting ──sent──▶ out ──outcome──▶ ended
       ▲ │             │ └──large outcome──▶ fetching ──fetched──▶ ended
       │ │             │                        └──its node is lost──▶ lost
       │ │             ├──handed back: it was not begun──▶ waiting
       │ │             └──its worker, task or head is lost──▶ lost ──may run again──▶ waiting
       │ └──cancelled, given up──▶ ended                       └──retries are used up──▶ ended (NodeLost)

On a pool that drains or closes no call waits: a call that comes back into the queue raises the error of `drain` or
`close`.

Items of streaming calls come in the order of their numbers, in reports. A missing item is lost, with the messages of a
scheduler that is gone or had no room. Then the call is stopped and raises NodeLost, because its generator cannot yield
the item again. A call whose first item has come does not run again.

`outbox.py` has the queue, `shipments.py` the batches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from skyward_core.engine import actions as do
from skyward_core.engine.outbox import Entry
from skyward_core.engine.state import Fetching, State
from skyward_core.errors import NodeLost, SkywardError
from skyward_core.events.events import CallProgress, CallReported, CallRetrying, LogLine
from skyward_core.wire.messages import Item, Outcome, OutcomeKind, Output, Parcel, Report, ReportedMetrics

PROGRESS_SECONDS = 0.1
FETCH_SECONDS = 120.0  # how long a fetch whose connection is cut is repeated while the node lives: as long as a lease
KNOWN_SECONDS = 30.0  # how long the outcome of a node that has just joined waits until this client knows the node
LOST = "items of the call were lost with messages of the pool's scheduler: call it again"


class Calls(State):
    """The transitions of calls: which of them wait again and which end, and how."""

    # ── from callers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, entries: Sequence[Entry]) -> None:
        """Take calls in, last in the queue."""
        self.submitted += len(entries)
        self.entries.update((entry.call.call_id, entry) for entry in entries)
        self.queue.add(entries)
        self._refuse([entry.call.call_id for entry in entries])

    def cancel(self, call_id: str) -> None:
        """Stop a call that its caller has cancelled, or do not begin it."""
        entry = self.entries.pop(call_id, None)
        if entry is None:
            return
        self._cancelled += 1
        self._forget_fetch(call_id)
        if not self.queue.drop({call_id}) and self.queue.is_out(call_id):
            self._to_stop.add(call_id)
        self._do(do.Cancelled(call_id, entry.call.arguments))
        self._clear_remote_args(entry)

    def _begin_no_calls(self, error: SkywardError | None) -> None:
        """Begin no more calls: those that wait raise this. None: begin calls again."""
        self._drained = error
        if error is not None:
            self._fail(self.queue.withdraw(), error)

    def _fail_at(self, names: Iterable[str], error: SkywardError) -> None:
        """Make the calls that wait for one of these workers raise this."""
        ids = [call_id for name in names for call_id in self.queue.pinned_to(name)]
        self.queue.drop(set(ids))
        self._fail(ids, error)

    def _bound_to(self, names: Sequence[str]) -> tuple[int, int]:
        """Return how many calls wait for one of these workers, and how many in all can run nowhere else."""
        waiting = sum(len(self.queue.pinned_to(name)) for name in names)
        return waiting, sum(entry.worker in names for entry in self.entries.values())

    def _end(self, error: SkywardError) -> None:
        """Make all calls raise this, now and later.

        Outcomes that are being fetched may still arrive, unless the pool closes.
        """
        self._ended = self._ended or error
        self.queue.clear()
        self._to_stop.clear()
        self._fail(
            [call_id for call_id in self.entries if self._is_closed or not self._is_being_fetched(call_id)], error
        )

    def _place_and_use_of(self, call_id: str | None) -> tuple[int | None, str]:
        """Return the place of a call's node among those of its broadcast, None if it is of none, and the use that pays
        for the call; None and "" for a call that has ended.
        """
        if call_id is None or (entry := self.entries.get(call_id)) is None:
            return None, ""
        return None if entry.call.place is None else entry.call.place[0], entry.call.use

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _call_ended(self, outcome: Outcome, node: int, instance_id: str, now: float) -> None:
        """A call has ended at a worker."""
        call_id = outcome.call_id
        was_out = self.queue.ended(call_id, outcome.seconds if outcome.kind is OutcomeKind.RESULT else None)
        entry = self.entries.get(call_id)
        if entry is None:  # it was cancelled, or is lost
            self._discard(outcome.parcel)
        elif not was_out:  # its outcome came before, and is being fetched
            return
        elif outcome.items != entry.items:
            self._discard(outcome.parcel)
            self._fail([call_id], NodeLost("items of the call were lost with messages of the pool's scheduler"))
        elif outcome.parcel.path is None or self.members.is_local:
            self._finish(call_id, outcome, node, instance_id)
        else:
            self._fetch(entry, outcome, node, now)

    def fetched(self, call_id: str, parcel: Parcel, lies_at: str) -> None:
        """A large outcome is here."""
        if (fetching := self._find_fetch(call_id, lies_at)) is None:
            self._do(do.Discard(parcel))
        else:
            self._end_fetch(call_id)
            self._finish(call_id, fetching.outcome._replace(parcel=parcel), fetching.node, fetching.instance_id)

    def not_fetched(self, call_id: str, lies_at: str, error: Exception, *, is_cut: bool) -> None:
        """A large outcome could not be fetched.

        `is_cut`: the connection to its node was cut; the fetch is repeated when the connection is back.
        """
        if (fetching := self._find_fetch(call_id, lies_at)) is None:
            return
        fetching.error = error
        if not is_cut or self._ended is not None:
            self._forget_fetch(call_id)
            self._lose_result(fetching.entry, error)

    def _discard(self, parcel: Parcel) -> None:
        """Remove an outcome that has no caller any more."""
        if parcel.path is None:
            return
        if self.members.is_local:
            self._do(do.Discard(parcel))
        elif (instance_id := self.members.instance_of(parcel)) is not None:
            self._do(do.Remove(instance_id, parcel))

    def _fetch(self, entry: Entry, outcome: Outcome, node: int, now: float) -> None:
        lies_on = self.members.instance_of(outcome.parcel)
        if lies_on is None:
            self._lose_result(
                entry,
                NodeLost(
                    "the value lies on a node that this client does not know: it came in the place of another one, or"
                    " is lost"
                ),
            )
        else:
            self._begin_fetch(entry, outcome, node, lies_on, now)

    def _finish(self, call_id: str, outcome: Outcome, node: int, instance_id: str) -> None:
        entry = self.entries.pop(call_id)
        self._done += 1
        self._failed += outcome.kind is not OutcomeKind.RESULT
        self._do(do.Finish(call_id, node, instance_id, outcome, entry.call.arguments, entry.title))
        self._clear_remote_args(entry)

    def _lose_result(self, entry: Entry, cause: Exception) -> None:
        """A call ended, and its outcome cannot be fetched. If it may run again, it waits at the end of the queue."""
        call_id = entry.call.call_id
        reason = f"the call ended, but its result could not be fetched: {cause}"
        entry.losses += 1
        if self._may_run_again(entry):
            self._do(do.EmitEvent(CallRetrying(call_id, entry.losses + 1, self._retries + 1, reason)))
            self.queue.add([entry])
        else:
            self._fail([call_id], self._node_lost(entry, reason, cause))

    # ── large outcomes, in the memory of nodes ────────────────────────────────────────────────────────────────────────

    def _begin_fetch(self, entry: Entry, outcome: Outcome, node: int, instance_id: str, now: float) -> None:
        """Fetch an outcome from the memory of an instance."""
        call_id = outcome.call_id
        until = now + (FETCH_SECONDS if self.members.has_instance(instance_id) else KNOWN_SECONDS)
        self._end_fetch(call_id)
        self.fetching[call_id] = Fetching(entry, outcome, node, instance_id, str(outcome.parcel.path), until, now)
        self.fetches_by_instance[instance_id] += 1
        self._do(do.Fetch(call_id, instance_id, outcome.parcel))

    def _find_fetch(self, call_id: str, lies_at: str) -> Fetching | None:
        """Return the fetch to which a message belongs; None if there is none."""
        fetching = self.fetching.get(call_id)
        return fetching if fetching is not None and fetching.lies_at == lies_at else None

    def _forget_fetch(self, call_id: str) -> None:
        """End the fetch of an outcome that has no caller any more, and remove the outcome from the node."""
        if (fetching := self._end_fetch(call_id)) is not None:
            self._do(do.Remove(fetching.instance_id, fetching.outcome.parcel))

    def _repeat_fetches(self, now: float, is_reachable: Callable[[str], bool]) -> None:
        """Repeat the fetches whose node is reachable again. Outcomes that cannot be fetched any more are lost."""
        for call_id, fetching in list(self.fetching.items()):
            if fetching.error is None:
                continue
            is_too_late = now > fetching.until or not self.members.may_have_instance(fetching.instance_id)
            if not is_too_late and is_reachable(fetching.instance_id):
                fetching.error = None
                self._do(do.Fetch(call_id, fetching.instance_id, fetching.outcome.parcel))
            elif is_too_late or (self.is_live and not self.members.is_there(fetching.instance_id)):
                self._forget_fetch(call_id)
                self._lose_result(fetching.entry, fetching.error)

    def _is_being_fetched(self, call_id: str) -> bool:
        """Return whether an outcome is in transit, and does not wait for a connection that was cut."""
        fetching = self.fetching.get(call_id)
        return fetching is not None and fetching.error is None

    def _end_fetch(self, call_id: str) -> Fetching | None:
        if (fetching := self.fetching.pop(call_id, None)) is not None:
            self.fetches_by_instance[fetching.instance_id] -= 1
            if not self.fetches_by_instance[fetching.instance_id]:
                del self.fetches_by_instance[fetching.instance_id]
        return fetching

    # ── items of streaming calls ──────────────────────────────────────────────────────────────────────────────────────

    def _item_arrived(self, item: Item, node: int) -> None:
        """An item has come: hand it to the consumer, after a fetch if it lies on another machine."""
        call_id = item.call_id
        entry = self.entries.get(call_id)
        if entry is None or not entry.call.ahead or item.number < entry.items:
            self._discard(item.parcel)
        elif item.number > entry.items:
            self._discard(item.parcel)
            self._lose_items([call_id])
        else:
            entry.items += 1
            if item.parcel.path is None or self.members.is_local:
                self._do(do.DeliverItem(call_id, item.number, node, item.parcel))
            else:
                self._do(do.FetchItem(call_id, item.number, node, self.members.instance_of(item.parcel), item.parcel))

    def give_credit(self, call_id: str, below: int) -> None:
        """The consumer has taken items: the call may yield those below this number."""
        if call_id in self.entries:
            self._credit[call_id] = below
            if self.is_live:
                self._do(do.GiveCredit(self.epoch, {call_id: below}))

    def _repeat_credit(self) -> None:
        """A worker may have missed the last credit: there is another connection, or a worker has joined."""
        self._credit = {call_id: below for call_id, below in self._credit.items() if call_id in self.entries}
        if self._credit and self.is_live:
            self._do(do.GiveCredit(self.epoch, dict(self._credit)))

    def _lose_streams(self) -> None:
        """Messages were lost: the calls in flight may wait for credit that their items would bring."""
        self._lose_items(
            [call_id for call_id, entry in self.entries.items() if entry.call.ahead and self.queue.is_out(call_id)]
        )

    def _lose_items(self, call_ids: Iterable[str]) -> None:
        call_ids = list(call_ids)
        self._fail(call_ids, NodeLost(LOST))
        self._stop_unwanted(call_ids)

    # ── calls handed back, and calls lost ────────────────────────────────────────────────────────────────────────────

    def _take_back(self, call_ids: Sequence[str]) -> None:
        """Calls have not been begun: they wait again, first in the queue; on a pool that drains or closes they
        raise.
        """
        self.queue.returned(call_ids)
        self._refuse(call_ids)

    def _rest(self, call_ids: Sequence[str]) -> None:
        """Calls could not be sent just now: the next tick tries again."""
        self.queue.rest(call_ids)
        self._refuse(call_ids)

    def _lose(self, call_ids: Iterable[str], reason: str, cause: BaseException | None = None) -> None:
        """Calls are lost with their node: those that may run again wait for another node, the others raise NodeLost."""
        again, lost = list[str](), list[tuple[str, SkywardError]]()
        for call_id in call_ids:
            entry = self.entries.get(call_id)
            if entry is None:
                self.queue.ended(call_id)
                continue
            entry.losses += 1
            if self._may_run_again(entry):
                self._clear_remote_args(entry)
                again.append(call_id)
                self._do(do.EmitEvent(CallRetrying(call_id, entry.losses + 1, self._retries + 1, reason)))
            else:
                if not self.queue.ended(call_id):
                    self.queue.drop({call_id})
                lost.append((call_id, self._node_lost(entry, reason, cause)))
        self.queue.returned(again)
        for call_id, error in lost:
            self._fail([call_id], error)
        # a worker may still have one: it must not begin after its caller has seen NodeLost
        if lost and self.is_live:
            self._do(do.Stop(self.epoch, tuple(call_id for call_id, _ in lost)))

    def _fail(self, call_ids: Iterable[str], error: SkywardError) -> None:
        """Make calls raise this. Those that have ended are skipped."""
        for call_id in call_ids:
            entry = self.entries.pop(call_id, None)
            if entry is None:
                continue
            self._forget_fetch(call_id)
            self._done += 1
            self._failed += 1
            self._do(do.Fail(call_id, error, entry.call.arguments))
            self._clear_remote_args(entry)

    def _without_arguments(self, is_there: Callable[[Parcel], bool]) -> list[str]:
        """Return the waiting calls whose arguments were in a node's memory and are gone."""
        arguments = [
            (call_id, entry.call.arguments) for call_id, entry in self.entries.items() if not self.queue.is_out(call_id)
        ]
        return [
            call_id
            for call_id, parcel in arguments
            if parcel.path and call_id not in self.fetching and not is_there(parcel)
        ]

    def _refuse(self, call_ids: Sequence[str]) -> None:
        """Make calls that wait raise, if the pool begins none. Drop those that their callers have cancelled."""
        refusal = self._ended or self._drained
        if unwanted := (
            set(call_ids) if refusal is not None else {call_id for call_id in call_ids if call_id not in self.entries}
        ):
            self.queue.drop(unwanted)
        if refusal is not None:
            self._fail(call_ids, refusal)

    def _may_run_again(self, entry: Entry) -> bool:
        may_begin = self._ended is None and self._drained is None and not entry.in_group and not entry.items
        return may_begin and entry.losses <= self._retries and entry.call.arguments.path is None

    def _node_lost(self, entry: Entry, reason: str, cause: BaseException | None) -> NodeLost:
        if entry.in_group and self._retries:
            advice = f"its group cannot go on without it (ComputePool(retries={self._retries}))"
        elif not self._retries:
            advice = "submit it again if it may run twice, or open the pool with retries=1 or more"
        elif entry.losses <= self._retries and (self._ended or self._drained) is not None:
            advice = "it would run again, but the pool begins no calls any more"
        elif entry.items:
            advice = "its first items have come, so it does not run again by itself: call it again"
        elif entry.call.arguments.path is not None:
            advice = "its arguments were lost with it, because they are too large to be kept here: submit it again"
        else:
            advice = f"it was lost {entry.losses} times (ComputePool(retries={self._retries}))"
        error = NodeLost(f"{reason}; {advice}")
        error.__cause__ = cause
        return error

    # ── arguments on nodes ───────────────────────────────────────────────────────────────────────────────────────────

    def _set_remote_args(self, call_id: str, instance_id: str, parcel: Parcel) -> None:
        """The large arguments of a call are in a node's memory. Remove them at once if no caller waits for the call."""
        entry = self.entries.get(call_id)
        if entry is None:
            self._do(do.Remove(instance_id, parcel))
        else:
            self._clear_remote_args(entry)
            entry.remote_args = (instance_id, parcel)

    def _clear_remote_args(self, entry: Entry) -> None:
        """Remove a call's arguments from the node that has them: they are not needed there any more."""
        if entry.remote_args is not None:
            self._do(do.Remove(*entry.remote_args))
            entry.remote_args = None

    # ── calls to stop ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stop_unwanted(self, call_ids: Iterable[str] | None = None) -> None:
        """Stop those of the calls (None: of all) that are in flight and have no caller any more."""
        out = self.queue.all_out() if call_ids is None else filter(self.queue.is_out, call_ids)
        self._to_stop.update(call_id for call_id in out if call_id not in self.entries)

    def _take_to_stop(self) -> set[str]:
        """Return the calls that are to be stopped, once. Drop those that wait: they have not begun."""
        if not self._to_stop:
            return set()
        to_stop = {call_id for call_id in self._to_stop - self.queue.drop(self._to_stop) if self.queue.is_out(call_id)}
        self._to_stop.clear()
        return to_stop

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _emit_progress(self, now: float) -> None:
        """Emit how many calls have ended, if that has changed: at most ten times a second, and always at the end."""
        counts = (self.submitted, self._done, self._failed, self._cancelled)
        is_all = self._done + self._cancelled == self.submitted
        if counts != self._progress and (is_all or now - self._progress_at > PROGRESS_SECONDS):
            self._progress, self._progress_at = counts, now
            self._do(do.EmitEvent(CallProgress(*counts)))


def call_events(
    report: Report, item: Output | ReportedMetrics, place: int | None = None, use: str = ""
) -> Iterator[LogLine | CallReported]:
    """Yield an event for each line, or one for the metrics; `place` as in `LogLine`, `use` as in `CallReported`."""
    if isinstance(item, ReportedMetrics):
        step, values = item.metrics
        yield CallReported(report.node, report.instance_id, item.call_id, step, values, item.timestamp, use=use)
        return
    for line in item.lines:
        yield LogLine(
            report.node, report.instance_id, line, item.timestamp, item.call_id, item.stream, item.level, place
        )
