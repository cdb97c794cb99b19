"""The one thread that owns the state of all calls, "skyward-engine": it passes messages to the dispatcher and does the
actions that this returns.

All other threads only post: callers, Dask's thread, transfers (`transfers.py`). The thread waits only for its mailbox.
"skyward-results" sets futures whose values take long to load, "skyward-callbacks" calls their callbacks. There is no
lock.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any, Protocol

from distributed.protocol.serialize import to_serialize  # noqa: TID253 - with connection.py owns Dask in this package

from skyward_core.concurrency.threads import LoopThread
from skyward_core.engine import actions as do
from skyward_core.engine.connection import SCHEDULER, TOPIC, NotSent, SchedulerConnection
from skyward_core.engine.dispatcher import TICK_SECONDS, Dispatcher
from skyward_core.engine.futures import (
    Callbacks,
    CallFuture,
    ItemFuture,
    NotPlain,
    Results,
    Settled,
    plain_value,
    value_of,
)
from skyward_core.engine.slot_use import LoadReports, SlotSeconds, SlotWaits, holder_of
from skyward_core.engine.transfers import Transfers
from skyward_core.errors import NodeLost, PoolClosed, SkywardError
from skyward_core.events.events import CallReported, CallsWaiting, SkywardEvent
from skyward_core.machines.owner import Owner
from skyward_core.transport.transport import Transports
from skyward_core.wire import protocol
from skyward_core.wire.answers import busy_times, call_lists
from skyward_core.wire.checks import Unreadable, UnreadableMessages
from skyward_core.wire.masking import SecretValues
from skyward_core.wire.messages import Parcel, Report
from skyward_core.wire.protocol import MOST_WAITING, PUT_SECRETS, BusyTime, Resumed, answer_of, detached_key
from skyward_core.wire.reports import decode_news, decode_report
from skyward_core.work import NO_WORK, Work

LOOK_SECONDS = 0.2
_log = logging.getLogger("skyward")


class Watcher(Protocol):
    """Is notified of the cluster's members, in the engine's thread. Must not wait."""

    def joined(self, rank: int) -> None:
        """All workers of a node have joined."""
        ...

    def left(self, rank: int) -> None:
        """A worker of a node has left, or does not answer any more."""
        ...

    def cut(self) -> None:
        """The scheduler is out of reach."""
        ...


class Counts(Protocol):
    """Counts the cost of calls (`ledger.metering.Meter`), in the engine's thread. Must not wait."""

    def ran(self, instance_id: str, seconds: float) -> float:
        """Calls have ended that kept slots of a machine busy for this many seconds in total; return their share of the
        bill, in USD.
        """
        ...

    def seen_running(self, instance_id: str, seconds: float) -> None:
        """Slots of a machine were busy for this many seconds since it was rented, with calls of all clients, running
        ones too. Called every few seconds.
        """
        ...


class EngineThread:
    """Runs a dispatcher. `start` starts its thread, `close` ends it; messages that are posted after that are dropped.

    `delivered` returns the number of the last event that callbacks and displays have taken.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        transports: Transports,
        emit: Callable[[SkywardEvent], object],
        delivered: Callable[[], int],
        counts: Counts | None = None,
        secrets: SecretValues | None = None,
        work: Work = NO_WORK,
    ) -> None:
        self.dispatcher = dispatcher
        self._work = work
        self.connection: SchedulerConnection | None = None
        """The present connection to a scheduler. Only the owner's thread sets it."""
        self.futures: dict[str, CallFuture[Any]] = {}
        """The futures of all calls that have not ended. Callers add them; the thread that sets a future removes it."""
        self.watcher: Watcher | None = None
        self.ended_at = time.monotonic()
        """When the last call ended, on time.monotonic's clock."""
        self.slot_seconds = SlotSeconds()
        self.pool = ""
        """What the pool is called in events: its name, or its id."""
        self.lost: SkywardError | None = None
        """Why the pool has ended."""
        self.drained: SkywardError | None = None
        """Why the pool begins no calls just now."""
        self._unreadable = UnreadableMessages("the pool")
        self._waits = SlotWaits()
        self._followed: dict[str, int] = {}
        """By id of a detached call that has not ended: how many messages it had at the last look."""
        self._emit = emit
        self._counts = counts
        self._secrets = secrets
        self._mailbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = LoopThread("skyward-engine", self._run)
        self._results = Results(delivered, self._on_settled)
        self.callbacks = Callbacks()
        self._transfers = Transfers(dispatcher, transports, self.post)
        self._loading: dict[str, str] = {}
        """The instances from whose memory results are loaded here, by call; nodes of this machine only."""
        self._uploading_to: set[str] = set()
        self._reports = LoadReports(dispatcher.topic)
        self.use_ranks: Callable[[Collection[int]], object] = lambda _: None
        """Called with the ranks that new broadcasts are to use, if another process keeps the pool."""
        self._is_closed = False
        self._has_ended = False
        """Whether the owner's thread has taken the last message."""
        self._answers: dict[int, Future[None]] = {}
        """By epoch: the future of the scheduler's answer to that connection."""
        self._returned: dict[str, tuple[str, float]] = {}
        """By call: the name of its function, and when its outcome had come, while its value is loaded."""
        self._last_lines: dict[str, int] = {}
        """By call: the number of the event of its last log line."""
        self._reported: dict[str, CallReported] = {}
        """By call that runs: what it has reported, the last values of all metrics."""
        self._usd_per_second: dict[str, float] = {}
        self._seen: dict[str, dict[str, float]] = {}
        """How long slots were busy, by instance id and by worker process, also of processes that have ended."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the threads."""
        self._results.start()
        self._thread.start()

    def post(self, message: Callable[[], None]) -> None:
        """Do something in the owner's thread, after all earlier messages. Never waits."""
        self._mailbox.put(message)

    def run[R](self, work: Callable[[], R], timeout_seconds: float | None = None) -> R:
        """Do something in the owner's thread, and return its result.

        Raises TimeoutError, or PoolClosed if that thread has ended.
        """
        done: Future[R] = Future()

        def do_it() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        if self._thread.is_current:
            do_it()
        elif self._is_closed or not self._thread.is_alive:
            raise PoolClosed("the pool is closed")
        else:
            self.post(do_it)
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not wait_for([done], min(LOOK_SECONDS, max(0.0, until - time.monotonic()))).done:
            if not self._thread.is_alive:
                raise PoolClosed("the pool is closed")
            if time.monotonic() > until:
                raise TimeoutError("the engine has not answered in time")
        return done.result()

    def close(self, end: Callable[[], None]) -> None:
        """Do this as the last message, then end. All futures are set when it returns, unless one of the engine's
        threads calls it, or a result takes too long to load (`Results.close`).
        """
        if self._thread.is_alive and not self._is_closed:
            self._is_closed = True
            self.post(end)
            self._mailbox.put(None)
            self._thread.join()
        self._transfers.close()
        self._results.close()
        self.callbacks.close()

    # ── the pool as callers see it, in any thread ────────────────────────────────────────────────────────────────────

    def raise_if_refused(self) -> None:
        """Raise why the pool takes no calls, if it takes none."""
        if (refusal := self.lost or self.drained) is not None:
            raise refusal

    @property
    def present_connection(self) -> SchedulerConnection:
        """The connection to the scheduler. Raises the pool's error after its end, NodeLost while there is none."""
        if (connection := self.connection) is None:
            raise self.lost or NodeLost("the pool's scheduler is out of reach just now: try again")
        return connection

    def ask(self, operation: str, timeout_seconds: float = math.inf, **arguments: Any) -> Any:
        """Ask the scheduler, for so many seconds at most. Raises as `present_connection` does, and NodeLost if there
        is no answer on that connection.
        """
        return self.ask_on(self.present_connection, operation, time.monotonic() + timeout_seconds, arguments)

    def ask_for[T](
        self, read: Callable[[object], T], operation: str, timeout_seconds: float = math.inf, **arguments: Any
    ) -> T:
        """Ask the scheduler as `ask` does, and return what `read` makes of the answer. Raises NodeLost for an answer
        that cannot be read.
        """
        return self.checked(read, self.ask(operation, timeout_seconds, **arguments))

    def checked[T](self, read: Callable[[object], T], answer: object) -> T:
        """Return what `read` makes of an answer of the scheduler. Raises NodeLost if it is none."""
        try:
            return read(answer)
        except Unreadable as error:
            self.note_unreadable(SCHEDULER, error)
            raise NodeLost(f"the pool's scheduler has sent an answer that is none: {error}") from error

    def note_unreadable(self, sender: str, error: Unreadable) -> None:
        """Count something that was no message. Any thread may call this."""
        self.post(lambda: self._unreadable.note(sender, error))

    def ask_on(
        self, connection: SchedulerConnection, operation: str, deadline: float, arguments: Mapping[str, Any]
    ) -> Any:
        """Ask the scheduler on this connection, while it is the present one and until the deadline (time.monotonic)."""
        return connection.ask(
            operation, lambda: self.connection is connection and time.monotonic() < deadline, arguments
        )

    def set_counts(self, counts: Counts | None, secrets: SecretValues | None) -> None:
        """Count the cost of calls from now on, and send these secrets with each later connection. In this thread."""
        self._counts, self._secrets = counts, secrets

    def follow_detached(self, call_id: str, messages: int, *, has_ended: bool) -> None:
        """Note that somebody here looks at a detached call, which has had so many messages: if it waits for a slot,
        there is a `CallsWaiting`. Any thread may call this.
        """
        if has_ended:
            self._followed.pop(call_id, None)
        else:
            self._followed[call_id] = messages

    def fetching_from(self, instance_id: str) -> int:
        """Return how many outcomes and items are still to be fetched from a node. In the owner's thread."""
        loading = list(self._loading.values()).count(instance_id)
        return self.dispatcher.fetches_by_instance[instance_id] + self._transfers.items[instance_id] + loading

    def wait_for_end(self) -> None:
        """Wait until a close that has begun has set all futures, unless one of the engine's threads calls it."""
        self._thread.join()
        self._results.close()

    def _run(self) -> None:
        if not self._has_ended:
            self._handle_all()
        self._unreadable.end()

    def _handle_all(self) -> None:
        tick_at = time.monotonic() + TICK_SECONDS
        while True:
            try:
                message = self._mailbox.get(timeout=max(0.0, tick_at - time.monotonic()))
            except queue.Empty:
                message = self._tick
            if message is None:
                self._has_ended = True
                return
            self._handle(message)
            # messages that have come meanwhile: their calls are sent and stopped together
            for _ in range(self._mailbox.qsize()):
                if (message := self._mailbox.get()) is None:
                    self._has_ended = True
                    return
                self._handle(message)
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK_SECONDS
                self._handle(self._tick)
            self._handle(self._flush)
            message = None  # it may hold a large result

    def _handle(self, message: Callable[[], None]) -> None:
        try:
            message()
        except Exception:
            _log.exception("a message from the pool could not be handled")
        self._act()
        self._report_load(None)

    def _act(self) -> None:
        while actions := self.dispatcher.take_actions():
            for action in actions:
                try:
                    self._do(action)
                except Exception:
                    _log.exception("%s could not be done", type(action).__name__)

    def _tick(self) -> None:
        if (connection := self.connection) is not None and not connection.is_open:
            self.dispatcher.cut(connection.epoch)
        self.dispatcher.tick(time.monotonic(), self._transfers.is_reachable)
        self._uploading_to = self.dispatcher.uploading_to()
        self._report_load(self.dispatcher.queue.waiting)
        self._look_for_waits()
        self.callbacks.try_again()

    def _look_for_waits(self) -> None:
        followed = dict(self._followed)  # callers change it
        unfinished = len(self.dispatcher.entries) - len(self.dispatcher.fetching) + len(followed)
        progress = self.slot_seconds.seconds + sum(followed.values())
        is_due = self._waits.is_due(time.monotonic(), unfinished, self.ended_at, progress)
        if is_due and self.connection is not None and self.dispatcher.is_live:
            self.connection.list_calls(self)

    def _report_load(self, waiting: int | None) -> None:
        """Let the scheduler know which nodes this client needs: after each message, so that it knows of a fetch before
        the task is released.
        """
        if (connection := self.connection) is None or not self.dispatcher.is_live:
            return
        here = list(self._loading.values())  # another thread removes
        items_at = {instance_id for instance_id, count in self._transfers.items.items() if count}
        needed = items_at.union(self.dispatcher.fetches_by_instance, self._uploading_to, here)
        if (message := self._reports.next(waiting, needed)) is not None:
            _try_to_send(connection, message)

    def _flush(self) -> None:
        self.dispatcher.flush(time.monotonic())

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, connection: SchedulerConnection) -> Future[None]:
        """In the owner's thread: use this connection; the future ends when the scheduler has answered on it."""
        dispatcher = self.dispatcher
        epoch = dispatcher.connected(time.monotonic())
        self.connection = connection
        self._reports.forget()
        answer = self._answers[epoch] = Future[None]()
        if self._secrets:  # first, so that no call can come before them
            connection.send({"op": PUT_SECRETS, "secrets": to_serialize(self._secrets)})
        connection.listen(epoch, dispatcher.topic, dispatcher.heard, self)
        me = Owner.here()
        connection.introduce(
            {
                "topic": dispatcher.topic,
                "user": me.name,
                "pid": me.pid,
                "work": self._work.labels(),
                "work_text": str(self._work),
            }
        )
        return answer

    def disconnect(self, only: SchedulerConnection | None = None) -> SchedulerConnection | None:
        """In the owner's thread: use no connection; return the one before, which the caller closes.

        `only`: do nothing if another connection than this one is used by now.
        """
        if only is not None and only is not self.connection:
            return None
        connection, self.connection = self.connection, None
        self.dispatcher.disconnected()
        self._cancel_answers()
        return connection

    def _cancel_answers(self) -> None:
        """There will be no answers: callers that wait for one connect again."""
        for answer in self._answers.values():
            answer.cancel()
        self._answers.clear()

    # The messages of a connection, from Dask's thread: each is posted to the owner's thread.

    def on_resumed(self, epoch: int, resumed: Resumed) -> None:
        """The scheduler has answered on this connection."""
        self.post(lambda: self.dispatcher.resumed(epoch, resumed, time.monotonic()))

    def on_report(self, epoch: int, report: bytes) -> None:
        """A worker has reported."""
        self.post(lambda: self.dispatcher.report(epoch, self._read(self._report_of, report), time.monotonic()))

    def _report_of(self, message: object) -> Report:
        """Return the report of a message. Raises Unreadable, also if it names a file of this machine where no node of
        the pool keeps values.
        """
        report = decode_report(message)
        self._transfers.refuse_other_files(report)
        return report

    def on_pool_news(self, epoch: int, news: object) -> None:
        """A worker has joined or left, or a node has measured something."""

        def heard() -> None:
            if (known := self._read(decode_news, news)) is not None:
                self.dispatcher.pool_news(epoch, known, time.monotonic())

        self.post(heard)

    def on_unreadable(self, sender: str, error: Unreadable) -> None:
        """Something has come that is no message."""
        self.note_unreadable(sender, error)

    def _read[T](self, decode: Callable[[object], T], message: object, sender: str = TOPIC) -> T | None:
        """Return what a message says; None if it cannot be read. In the owner's thread."""
        try:
            return decode(message)
        except Unreadable as error:
            self._unreadable.note(sender, error)
            return None

    def on_tasks_finished(self, epoch: int, numbers: Collection[int]) -> None:
        """The results of these batches are in the memory of workers."""

        def finished() -> None:
            for number in numbers:
                self.dispatcher.task_ended(epoch, number, is_finished=True, reason="")

        self.post(finished)

    def on_task_failed(self, epoch: int, number: int, reason: str) -> None:
        """A batch has no result."""
        self.post(lambda: self.dispatcher.task_ended(epoch, number, is_finished=False, reason=reason))

    def on_ping(self, epoch: int, answer: object) -> None:
        """The scheduler has answered a ping with the times of busy slots; None: it has not answered."""

        def pinged() -> None:
            self.dispatcher.pinged(epoch, is_answered=answer is not None)
            if answer is not None:
                self.on_seen(self._read(lambda it: busy_times(it, self._unreadable.note), answer, SCHEDULER) or ())

        self.post(pinged)

    def on_calls_listed(self, epoch: int, answer: object) -> None:
        """The scheduler has listed who holds the slots."""

        def listed() -> None:
            if (known := self._read(lambda it: call_lists(it, self._unreadable.note), answer, SCHEDULER)) is None:
                return
            topics = {self.dispatcher.topic, *map(detached_key, list(self._followed))}
            holder, calls = holder_of(known, topics), len(self.dispatcher.entries) + len(topics) - 1
            seconds = self._waits.answered(time.monotonic(), waits=holder is not None)
            if holder is not None and calls and epoch == self.dispatcher.epoch:
                self._emit(CallsWaiting(self.pool, calls, seconds, holder.words, holder.seconds))

        self.post(listed)

    def on_asked_for_calls(self, epoch: int, request: int) -> None:
        """Somebody asks for the calls of this client: answer."""

        def asked() -> None:
            if (connection := self.connection) is not None and connection.epoch == epoch:
                _try_to_send(connection, answer_of(request, self._list_calls()))

        self.post(asked)

    def _list_calls(self) -> dict[str, Any]:
        """Return the calls that have not ended: id, function, state, worker or node, and for how many seconds it has
        been in that state. Of those that wait, the first ones, and how many there are.
        """
        now, listed, waiting = time.monotonic(), list[list[Any]](), 0
        for call_id in list(self.futures):  # callers add
            if (known := self.dispatcher.stage(call_id)) is not None:
                function, stage, where, since = known
            elif (returned := self._returned.get(call_id)) is not None:
                (function, since), stage, where = returned, "fetching", None
            else:  # it is being submitted, or ends just now
                continue
            waiting += stage == "waiting"
            if stage != "waiting" or waiting <= MOST_WAITING:
                listed.append([call_id, function, stage, where, now - since])
        return {"listed": listed, "waiting": waiting}

    def on_seen(self, times: Collection[BusyTime]) -> None:
        """Count what workers have told of their busy slots. In this thread."""
        self.slot_seconds.reported()
        for instance_id, process, seconds, by_use in times:
            for use, own_seconds in by_use.items():
                self.slot_seconds.seen(use, instance_id, process, own_seconds)
            if self._counts is None:
                continue
            processes = self._seen.setdefault(instance_id, {})
            processes[process] = seconds
            self._counts.seen_running(instance_id, sum(processes.values()))

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _do(self, action: do.Action) -> None:
        match action:
            case do.Finish():
                self._finish(action)
            case do.Fail():
                self._settle(action.call_id, lambda: _raise(action.error), [action.arguments])
            case do.Cancelled():
                self._settle(action.call_id, lambda: None, [action.arguments])
            case do.EmitEvent(event, call_id):
                if isinstance(event, CallReported):
                    self._note_report(event)
                self._emit_of(call_id, event)
            case do.MeterCalls(instance_id, seconds_by_use):
                for use, seconds in seconds_by_use.items():
                    self.slot_seconds.ran(use, instance_id, seconds)
                if self._counts is not None:
                    total = sum(seconds_by_use.values())
                    self._usd_per_second[instance_id] = self._counts.ran(instance_id, total) / total
            case do.Upload():
                self._transfers.upload(action)
            case do.Fetch():
                self._transfers.fetch(action)
            case do.DeliverItem(call_id, number, node, parcel):
                if isinstance(future := self.futures.get(call_id), ItemFuture):
                    future.put_item(number, parcel, node)
                else:
                    self._transfers.discard(parcel)
            case do.FetchItem():
                self._fetch_item(action)
            case do.Remove(instance_id, parcel):
                self._transfers.remove(instance_id, parcel)
            case do.Discard(parcel):
                self._transfers.discard(parcel)
            case do.UseRanks(ranks):
                self.use_ranks(ranks)
            case do.CutOff():
                self._cancel_answers()
                self._notify_watcher(action)
            case do.Joined() | do.Left():
                self._notify_watcher(action)
            case do.Answered(epoch):
                if (answer := self._answers.pop(epoch, None)) is not None and answer.set_running_or_notify_cancel():
                    answer.set_result(None)
            case _:
                if self.connection is not None and self.connection.epoch == action.epoch:
                    self._do_on(self.connection, action)

    def _do_on(self, connection: SchedulerConnection, action: do.Action) -> None:
        match action:
            case do.Send(epoch, number, key, batch, address):
                try:
                    connection.send_batch(number, key, batch, address)
                except Exception as error:  # the callers of these calls must learn of it
                    self.dispatcher.unsent(epoch, number, error, is_its_fault=not isinstance(error, NotSent))
            case do.Follow(_, number, key):
                connection.follow(number, key)
            case do.TakeBack(epoch, number, key):
                if connection.take_back(key):
                    self.dispatcher.taken_back(epoch, number)
            case do.Release(_, keys):
                connection.release(keys)
            case do.Gather():
                self._transfers.gather(
                    connection, action, lambda: self.connection is connection and not self._is_closed
                )
            case do.Stop(_, call_ids):
                _try_to_send(connection, protocol.cancel(call_ids))
            case do.GiveCredit(_, credit):
                _try_to_send(connection, protocol.give_credit(credit))
            case do.RepeatReports():
                _try_to_send(connection, protocol.repeat_reports())
            case do.ReleaseRetainedCalls(_, call_ids):
                _try_to_send(connection, protocol.release(call_ids))
            case do.Acknowledge(_, number):
                _try_to_send(connection, protocol.acknowledge(self.dispatcher.topic, number))
            case do.AskLoad(epoch):
                self._transfers.ask_load(connection, epoch, lambda: self.connection is connection)
            case do.Ping():
                connection.ping(self)
            case _:
                raise TypeError(action)

    def _notify_watcher(self, action: do.Joined | do.Left | do.CutOff) -> None:
        if self.watcher is None or self._is_closed:
            return
        match action:
            case do.Joined(rank):
                self.watcher.joined(rank)
            case do.Left(rank):
                self.watcher.left(rank)
            case do.CutOff():
                self.watcher.cut()

    def _emit_of(self, call_id: str | None, event: SkywardEvent) -> None:
        """Emit an event; the result of its call waits until callbacks have taken it."""
        number = self._emit(event)
        if call_id is not None and call_id in self.futures:
            self._last_lines[call_id] = number if isinstance(number, int) else 0

    def _note_report(self, event: CallReported) -> None:
        if event.call_id is not None and event.call_id in self.futures:
            before = self._reported.get(event.call_id)
            step = before.step if event.step is None and before is not None else event.step
            values = {**(before.values if before is not None else {}), **event.values}
            self._reported[event.call_id] = replace(event, step=step, values=values)

    def _fetch_item(self, action: do.FetchItem) -> None:
        future, instance_id = self.futures.get(action.call_id), action.instance_id
        if not isinstance(future, ItemFuture):
            if instance_id is not None:
                self._transfers.remove(instance_id, action.parcel)
        elif instance_id is None:
            future.break_off(NodeLost("an item of the call lies on a node that this client does not know"))
        else:
            self._transfers.fetch_item(
                instance_id,
                action.parcel,
                lambda parcel: future.put_item(action.number, parcel, action.node),
                future.break_off,
            )

    def _finish(self, action: do.Finish) -> None:
        outcome = action.outcome
        if (future := self.futures.get(action.call_id)) is not None:
            rate = self._usd_per_second.get(action.instance_id)
            if isinstance(future, ItemFuture):
                future.set_total(outcome.items)
            future.seconds = outcome.seconds
            future.cost = None if self._counts is None else outcome.seconds * (rate or 0.0)
        spent = [outcome.parcel, action.arguments]
        if outcome.parcel.path is not None and self.dispatcher.is_local and future is not None:
            self._loading[action.call_id] = action.instance_id
        try:
            value = plain_value(outcome)
        except NotPlain:
            if future is not None:
                self._returned[action.call_id] = action.function, time.monotonic()
            self._settle(action.call_id, lambda: value_of(outcome, action.node), spent)
        else:
            self._settle(action.call_id, lambda: value, spent, is_plain=True)

    def _settle(self, call_id: str, value: Callable[[], Any], spent: list[Parcel], *, is_plain: bool = False) -> None:
        if (report := self._reported.pop(call_id, None)) is not None:
            self._emit_of(call_id, replace(report, is_last=True))
        after = self._last_lines.pop(call_id, 0)
        if (future := self.futures.get(call_id)) is None:
            return
        settled = Settled(future, value, spent, after)
        if is_plain and not after and all(parcel.path is None for parcel in spent):  # to remove a large file takes time
            self._results.set(settled)
        else:
            self._results.put(settled)

    def _on_settled(self, future: CallFuture[Any]) -> None:
        """Before a future is set, in the thread that sets it."""
        self.futures.pop(future.call_id, None)
        self._returned.pop(future.call_id, None)
        self._loading.pop(future.call_id, None)
        self.ended_at = time.monotonic()


def _try_to_send(connection: SchedulerConnection, message: Mapping[str, Any]) -> None:
    try:
        connection.send(message)
    except NotSent as error:  # the connection is closed: the message is sent again on the next one
        _log.debug("%s", error)


def _raise(error: BaseException) -> None:
    raise error
