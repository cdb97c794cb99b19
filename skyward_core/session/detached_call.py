"""A call that runs also without a waiting client, as one process sees it.

Its states, as far as this process sees them, are written into the ledger (`CallLedger`). The ledger never stops a call
or a result. If it cannot be written, that is logged once, and the next look at a call tries again, at the earliest
after PAUSE_SECONDS. An attached client whose ledger does not know the pool writes nothing.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import BadRequest, LedgerConflict, LedgerError, NodeLost
from skyward_core.ledger.rows import CallState, SlotUse
from skyward_core.shown_text import visible
from skyward_core.wire.checks import Unreadable, UnreadableMessages
from skyward_core.wire.messages import CallMetrics, Outcome, OutcomeKind, ReportedMetrics, lines_with_levels
from skyward_core.wire.reports import decode_report
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger


POLL_SECONDS = 0.2
FIRST_POLL_SECONDS = 0.01
OUTCOME_SECONDS = 30.0
"""How long the outcome of a call that has ended may take: a worker repeats its reports to another head."""
ENDED = frozenset({"ended", "cancelled", "lost", "forgotten"})


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """One time that a node got a detached call. Times are the head's clock.

    `began_at` is when the node got it; it may have waited there for a slot. `why_lost` is "" unless the attempt was
    lost with its node: then the call runs again, at most `retries` times.
    """

    node: int
    began_at: datetime
    ended_at: datetime | None = None
    why_lost: str = ""


@dataclass(frozen=True, slots=True)
class CallNews:
    """What is new of a detached call: its state, the lines after a cursor, and the cursor after them.

    `node` is the rank of the node that has the call, None before one has it. `levels` has one of `logging` for each
    line of a log record, and None for each other line.
    """

    state: str
    lines: list[str]
    cursor: int
    node: int | None
    levels: list[int | None] = field(default_factory=list[int | None])

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more news."""
        return self.state in ENDED


class DetachedCall[R]:
    """A call that runs also without a waiting client.

    Made by `ComputePool.start_detached` and `detached_call`; safe to use from several processes.
    """

    def __init__(
        self,
        call_id: str,
        cluster: Callable[[], Cluster],
        note: Callable[[Mapping[str, Any]], object] = lambda _: None,
        raise_if_stopped: Callable[[], object] = lambda: None,
        *,
        is_new: bool = False,
    ) -> None:
        self.call_id = call_id
        self.is_new = is_new
        """Whether the `start_detached` that returned this object has begun the call."""
        self._cluster = cluster
        self._note = note
        """Writes a record into the ledger, if it is new. Raises nothing."""
        self._raise_if_stopped = raise_if_stopped
        """Raises PoolStopped if somebody has stopped the pool. It is asked when the pool does not answer."""
        self._lock = threading.Lock()
        self._unreadable = UnreadableMessages("the pool")
        self._number = 0
        self._lines: list[tuple[int, list[tuple[str, int | None]]]] = []
        """Number of the first line, and lines with their levels; between two of them, lines were dropped."""
        self._lines_in_all = 0
        self._metrics = CallMetrics(None, {})
        self._outcome: Outcome | None = None
        self._node = 0
        """The rank of the node that has reported the outcome."""

    def __repr__(self) -> str:
        return f"<DetachedCall {self.call_id}>"

    @property
    def state(self) -> str:
        """One of "waiting", "running", "ended" (with a result or an exception), "cancelled", "lost" (with its node) and
        "forgotten" (before its end).
        """
        return self._state_of(self._look())

    @property
    def name(self) -> str:
        """The name of the function that it runs."""
        return visible(str(self._look()["name"]))

    @property
    def is_forgotten(self) -> bool:
        """Whether its lines and its result were dropped, by `forget` or after `result_ttl`."""
        return bool(self._look()["is_forgotten"])

    @property
    def attempts(self) -> tuple[CallAttempt, ...]:
        """The times that a node got the call, in order. All but the last were lost with their node."""
        return tuple(
            CallAttempt(_rank(worker), _moment(began_at), ended_at and _moment(ended_at), visible(why_lost))
            for worker, _, began_at, ended_at, why_lost in self._look()["attempts"]
        )

    def log(self, offset: int = 0) -> list[str]:
        """Return the lines that the call has written so far, from line number `offset` on.

        Those of an attempt that was lost stay. Raises BadRequest if the call was forgotten.
        """
        return self.log_from(offset)[0]

    def log_from(self, cursor: int = 0) -> tuple[list[str], int]:
        """Return the lines from line number `cursor` on, and the cursor for what comes after them.

        Lines are numbered from 0. A reader in another process that goes on from its last cursor gets each line once.
        Where the pool has dropped lines, because there were too many, one line says how many. Raises BadRequest if the
        call was forgotten.
        """
        _refuse_cursor(cursor)
        self._refuse_forgotten(self._look())
        lines, after = self._lines_from(cursor)
        return [line for line, _ in lines], after

    def follow(self, cursor: int = 0) -> CallNews:
        """Return state, new lines and node of the call with one request, for a reader that comes again and again.

        As `log_from`, and this object forgets the lines before `cursor`: its memory does not grow. A forgotten call
        has no lines.
        """
        _refuse_cursor(cursor)
        known = self._look()
        if known["is_forgotten"]:
            return CallNews(self._state_of(known), [], cursor, None)
        lines, after = self._lines_from(cursor)
        with self._lock:
            self._lines = [(first, its) for first, its in self._lines if first + len(its) > cursor]
        attempts = known["attempts"]
        return CallNews(
            self._state_of(known),
            [line for line, _ in lines],
            after,
            _rank(attempts[-1][0]) if attempts else None,
            [level for _, level in lines],
        )

    def _lines_from(self, cursor: int) -> tuple[list[tuple[str, int | None]], int]:
        lines = list[tuple[str, int | None]]()
        with self._lock:
            for first, known in self._lines:
                if first + len(known) <= cursor:
                    continue
                if first > cursor:
                    lines.append((_dropped(first - cursor), None))
                    cursor = first
                lines.extend(known[cursor - first :])
                cursor = first + len(known)
            if cursor < self._lines_in_all:
                lines.append((_dropped(self._lines_in_all - cursor), None))
                cursor = self._lines_in_all
        return lines, cursor

    def metrics(self) -> tuple[int | None, Mapping[str, float]]:
        """Return the last step and the last value of each metric that the call has reported (`sky.report`)."""
        self._look()
        return self._metrics

    def result(self, timeout: float | None = None) -> R:
        """Wait for the call to end; return its result or raise its exception. May be called again, and by other
        processes.

        Raises TimeoutError, CallCrashed and ResultNotLoaded; NodeLost if its node was lost with the call or the result;
        BadRequest if the result was forgotten; `concurrent.futures.CancelledError` if the call was cancelled.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pauses = Backoff(FIRST_POLL_SECONDS, POLL_SECONDS).pauses()
        ended_at: float | None = None
        while not self._has_all(record := self._look()):
            if record["state"] not in ENDED:
                ended_at = None  # another head runs it again: the end that the first one has seen is over
            else:
                ended_at = time.monotonic() if ended_at is None else ended_at
                if time.monotonic() > ended_at + OUTCOME_SECONDS:
                    raise NodeLost(
                        f"call {self.call_id} has ended, and the pool's head does not have its outcome any more"
                    )
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"call {self.call_id} is {record['state']} after {timeout} s")
            time.sleep(next(pauses))
        self._refuse_forgotten(record)
        if record["state"] == "lost":
            raise _lost_call(self.call_id, record["reason"], record["dask_error"])
        if self._outcome is None or self._is_cancelled:
            raise CancelledError(f"call {self.call_id} was cancelled")
        return cast(R, self._cluster().detached.value(self._outcome, self._node))

    def cancel(self) -> None:
        """Stop the call, or do not begin it. A call that has ended stays as it is."""
        self._cluster().detached.cancel(self.call_id)

    def forget(self) -> None:
        """Delete the lines and the result of the call. It does not stop a running call: `cancel` it first.

        If the id was chosen by the caller, the pool still knows it: no other call of this id begins. Otherwise all
        records are deleted.
        """
        self._look()
        self._cluster().detached.forget(self.call_id, self._outcome)

    @property
    def _is_cancelled(self) -> bool:
        """Whether a worker has stopped the call, or has not begun it, because it was cancelled."""
        return self._outcome is not None and self._outcome.kind is OutcomeKind.CANCELLED

    def _state_of(self, known: Mapping[str, Any]) -> str:
        state = str(known["state"])
        return "cancelled" if state == "ended" and known["outcome"] == OutcomeKind.CANCELLED else state

    def _has_all(self, known: Mapping[str, Any]) -> bool:
        """Whether the call has ended, and its outcome is here unless it was forgotten or there is none."""
        state = known["state"]
        return state in ENDED and (state != "ended" or self._outcome is not None or known["is_forgotten"])

    def _refuse_forgotten(self, known: Mapping[str, Any]) -> None:
        if known["is_forgotten"]:
            state = self._state_of(known)
            words = "was forgotten" if state == "forgotten" else f"is {state}, and its result was forgotten"
            raise BadRequest(
                f"call {self.call_id} {words} (`forget`, or its `result_ttl` is over). It does not run again: start a"
                " call with another id"
            )

    def _look(self) -> Any:
        """Ask the head for the new state of the call, and store it. Raises NodeLost if it does not answer, and
        PoolStopped if it never will.
        """
        try:
            known = self._store(lambda: self._cluster().detached.record(self.call_id, self._number))
        except NodeLost:
            self._raise_if_stopped()
            raise
        self._note(known)
        return known

    def _store(self, ask: Callable[[], Any]) -> Any:
        with self._lock:
            known = ask()
            lines = list[tuple[str, int | None]]()
            for message in known["messages"]:
                try:
                    report = decode_report(message)
                except Unreadable as error:
                    self._unreadable.note(f"a worker of call {self.call_id}", error)
                    continue
                lines.extend(lines_with_levels(report))
                for item in report.news:
                    if isinstance(item, ReportedMetrics):
                        self._metrics = self._metrics.updated(item.metrics)
                    elif isinstance(item, Outcome) and item.kind is not OutcomeKind.RETURNED:
                        self._outcome, self._node = item, report.node
            if lines:
                self._lines.append((known["first_line"], lines))
            self._lines_in_all = known["lines_in_all"]
            self._number = known["number"] + len(known["messages"])
        return known


def _refuse_cursor(cursor: int) -> None:
    if cursor < 0:
        raise BadRequest(f"cursor={cursor!r}: write the number of a line, 0 or more")


def _rank(worker: str) -> int:
    """Return the rank of the node of a worker."""
    return int(worker.partition("-")[0])


def _dropped(count: int) -> str:
    return f"[{count} lines were dropped: there were too many]"


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _lost_call(call_id: str, reason: str, dask_error: str) -> NodeLost:
    error = NodeLost(
        f"call {call_id} was lost with its node: {reason}. Start it again if it may run twice; in a pool with retries=1"
        " or more a lost call runs again by itself"
    )
    error.__cause__ = RuntimeError(dask_error) if dask_error else None
    return error


# ── their states in the ledger ────────────────────────────────────────────────────────────────────────────────────────


BUSY_SECONDS = 2.0
PAUSE_SECONDS = 5.0
ASK_SECONDS = 2.0


class CallLedger:
    """Writes the states of one pool's detached calls. Any thread may use it; `slots_at` is `Cluster.slots_at`."""

    def __init__(self, pool_id: str, slots_at: Callable[[int], int], log: Callable[..., object]) -> None:
        self._pool_id = pool_id
        self._slots_at = slots_at
        self._log = log
        """Takes a level, a message and its arguments."""
        self._lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._written: dict[str, tuple[int, str]] = {}
        """By call: the last attempt and state that was written."""
        self._is_unknown = False
        self._has_warned = False
        self._again_at = 0.0

    def starts(self, call_id: str, name: str, owner: str, work: Work) -> None:
        """Write that a call is about to be handed over, for this work. Raises nothing."""
        self._write([CallState(call_id, name, owner, 0, "waiting", datetime.now(UTC), work=work)])

    def note(self, *records: Mapping[str, Any]) -> None:
        """Write the states of records of the scheduler that are new. Raises nothing."""
        states = [state_of(record, self._slots_at, time.time()) for record in records]
        self._write([one for one in states if self._written.get(one.call_id) != (one.generation, one.state)])

    def raise_if_stopped(self) -> None:
        """Raise PoolStopped if somebody has stopped the pool, by the ledger; nothing if that does not answer."""
        with self._lock:
            try:
                entry = self._opened().pool(self._pool_id)
            except LedgerError as error:
                self._log(logging.DEBUG, "it is not known whether the pool %s was stopped: %s", self._pool_id, error)
                return
        if entry is not None:
            entry.raise_if_stopped()

    def close(self) -> None:
        """Close the connection to the ledger; a later write opens another."""
        with self._lock:
            if self._ledger is not None:
                self._ledger.close()
                self._ledger = None

    def _write(self, states: Sequence[CallState]) -> None:
        if not states or self._is_unknown:
            return
        with self._lock:
            if time.monotonic() < self._again_at:
                return
            try:
                self._opened().note_calls(self._pool_id, states)
            except LedgerConflict:  # the ledger of another machine: it does not know the pool
                self._is_unknown = True
            except LedgerError as error:
                self._again_at = time.monotonic() + PAUSE_SECONDS
                self._log(
                    logging.DEBUG if self._has_warned else logging.WARNING,
                    "detached calls of pool %s are not in the ledger just now; they go on, and the next look at one"
                    " writes it again: %s",
                    self._pool_id,
                    error,
                )
                self._has_warned = True
            else:
                self._written.update({one.call_id: (one.generation, one.state) for one in states})

    def _opened(self) -> Ledger:
        if self._ledger is None:
            module = importlib.import_module("skyward_core.ledger.ledger")
            self._ledger = cast("Ledger", module.Ledger(module.default_url(), busy_timeout_seconds=BUSY_SECONDS))
        return self._ledger


def note_all(cluster: Cluster, pool_id: str, log: Callable[..., object]) -> None:
    """Write what the scheduler knows of all detached calls, before its machine ends. Raises nothing: an error here must
    not stop the end of the pool.
    """
    if cluster.owner.connection is None:
        return
    calls = CallLedger(pool_id, cluster.slots_at, log)
    try:
        calls.note(*cluster.detached.known(ASK_SECONDS))
    except Exception as error:
        log(logging.DEBUG, "the last states of the detached calls of pool %s are not known: %s", pool_id, error)
    finally:
        calls.close()


def state_of(record: Mapping[str, Any], slots_at: Callable[[int], int], now: float) -> CallState:
    """Return what a record of the scheduler says for the ledger. Times are seconds since 1970.

    A call had its slot for as long as its outcome says; an attempt that was lost, or that runs, for as long as a node
    had the call.
    """
    used = list[SlotUse]()
    for number, (worker, instance_id, began_at, ended_at, _) in enumerate(record["attempts"], 1):
        is_last = number == len(record["attempts"])
        seconds = (now if ended_at is None else ended_at) - began_at
        if is_last and record["seconds"] is not None:
            seconds = record["seconds"]
        if is_last and record["state"] == "waiting":
            seconds = 0.0 if ended_at is None else seconds
        used.append(SlotUse(instance_id, slots_at(int(worker.partition("-")[0])), max(0.0, seconds)))
    return CallState(
        record["call_id"],
        record["name"],
        record["owner"],
        len(record["attempts"]),
        _state(record),
        datetime.fromtimestamp(record["submitted_at"], UTC),
        None if record["ended_at"] is None else datetime.fromtimestamp(record["ended_at"], UTC),
        tuple(used),
        Work.of(record["work"]),
    )


def _state(record: Mapping[str, Any]) -> str:
    """Return the state; of calls that have ended, "failed" and "cancelled" ones are separate."""
    state, outcome = str(record["state"]), record["outcome"]
    if state != "ended" or outcome in ("", OutcomeKind.RESULT):
        return state
    return "cancelled" if outcome == OutcomeKind.CANCELLED else "failed"
