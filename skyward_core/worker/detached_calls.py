"""Detached calls on the scheduler: their ids, attempts, lines and ends (docs/decisions/0029).

    new ──▶ waiting ──a worker has it──▶ running ──▶ ended ──────────┐
             ▲  │                          │  │                      ├──`forget`, or `result_ttl` is over──▶ forgotten
             │  └──cancelled──▶ cancelled ─┼──┼──────────────────────┤
             └────── its worker is lost ───┘  └──no more retries──▶ lost ─┘

All of this runs in the scheduler's event loop: if two starts have one id, the first makes the call, and the second
finds it. Topic and task of a call are both named `detached_key(call_id)`. Slots and runners know the call by its
`run_id`, which its starter has chosen: an id of a user may be any text.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyward_core.wire.checks import Unreadable, UnreadableMessages
from skyward_core.wire.messages import Outcome, OutcomeKind, Report, lines_of
from skyward_core.wire.protocol import (
    BUSY_TIMES,
    CANCEL,
    DETACHED_PREFIX,
    ENDS,
    IS_NAMED,
    KEEP,
    NAME,
    OWNER,
    RESULT_TTL,
    RETRIES,
    RUN_ID,
    WORK,
    detached_key,
)
from skyward_core.wire.reports import decode_report, encode_report

DROP_RESULT = "skyward-drop-result"
"""The operation on the scheduler's stream to a worker that removes the file of a result."""


@dataclass(slots=True)
class Attempt:
    """One time that a worker, named RANK-INDEX, got a call. Times are the head's clock, in seconds since 1970.

    `instance_id` is the worker's machine, "" if that is unknown. `why_lost` is "" for an attempt that was not lost.
    """

    worker: str
    instance_id: str
    began_at: float
    ended_at: float | None = None
    why_lost: str = ""


@dataclass(slots=True)
class Detached:
    """The record of a detached call. `state` is "waiting", "ended" (its outcome is among its messages), "cancelled",
    "lost" (see `reason` and `dask_error`) or, if it was forgotten before its end, "forgotten".

    `seconds` is how long its last attempt kept a slot busy, once that is known. Times are the head's clock.
    """

    call_id: str
    run_id: str
    name: str
    topic: LineTopic
    is_named: bool
    result_ttl: float | None
    owner: str = ""
    work: Mapping[str, str] = field(default_factory=dict[str, str])
    """The fields of the work that has started it."""
    submitted_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    state: str = "waiting"
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    reason: str = ""
    dask_error: str = ""
    is_forgotten: bool = False
    outcome: str = ""
    """The kind of its outcome; "" before."""
    seconds: float | None = None
    result_file: tuple[int, str] | None = None
    """The node that has its result in a file, and the file's path."""


class DetachedCalls:
    """The records of all detached calls of one scheduler. It owns the timers of `result_ttl`."""

    def __init__(self, topics: dict[str, Topic], topic_limit_bytes: int) -> None:
        self._topics = topics
        """The topics that the scheduler keeps, by name; those of detached calls are added and removed here."""
        self._limit_bytes = topic_limit_bytes
        self._calls: dict[str, Detached] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unreadable = UnreadableMessages("the pool")
        self._scheduler: Any = None  # Dask's types say too little

    def start(self, scheduler: Any) -> None:
        """Add the operations of clients to the scheduler."""
        self._scheduler = scheduler
        scheduler.handlers.update(
            {
                "skyward_calls": self.calls,
                "skyward_call": self.call,
                "skyward_forget": self.forget,
                "skyward_cancel": self.cancel,
            }
        )

    def close(self) -> None:
        """Stop the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def results_at(self, rank: int) -> int:
        """Return how many results lie in files of a node."""
        return sum(call.result_file is not None and call.result_file[0] == rank for call in self._calls.values())

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, call_id: str, run_id: str, make_task: Callable[[str], object]) -> dict[str, Any]:
        """Make a call of this id, unless there was one; return its record. `is_new` says whether the call has this run
        id. Idempotent: a client that has not received the answer asks again.
        """
        key = detached_key(call_id)
        if key not in self._calls:
            make_task(key)
        call = self._calls[key]
        return {**self._record(call), "is_new": call.run_id == run_id}

    def calls(self, *, is_all: bool = False) -> list[dict[str, Any]]:
        """Return the records of all detached calls, in the order in which they came; `is_all`: forgotten ones too."""
        return [self._record(call) for call in self._calls.values() if is_all or not call.is_forgotten]

    def call(self, call_id: str, after: int = 0) -> dict[str, Any] | None:
        """Return the record of a detached call and its messages after this number; None if there is none of this id.

        `number` is the number of the message before the first of `messages`, and `first_line` the number of their first
        line.
        """
        call = self._calls.get(detached_key(call_id))
        if call is None:
            return None
        number, messages = call.topic.after(after)
        return {
            **self._record(call),
            "number": number,
            "first_line": call.topic.line_of(len(messages)),
            "messages": messages,
        }

    def cancel(self, call_id: str) -> None:
        """Stop a call, or do not begin it."""
        self.stop([call_id])

    def stop(self, calls: Collection[str]) -> None:
        """Stop calls: take back detached ones that wait here, and stop all others on the workers."""
        ids = list[str]()
        for call_id in calls:
            if call := self._calls.get(detached_key(call_id)):
                self._take_back(call)
                ids.append(call.run_id)
            else:
                ids.append(call_id)
        self._tell_workers({"op": CANCEL, "calls": ids})

    def forget(self, call_id: str) -> bool:
        """Drop the record and the result of a detached call; False if there is none of this id.

        This does not stop a call that runs. Of a call with a chosen id the record stays, without lines and result.
        """
        key = detached_key(call_id)
        call = self._calls.get(key)
        if call is None:
            return False
        if call.is_forgotten:
            return True
        if timer := self._timers.pop(key, None):
            timer.cancel()
        call.is_forgotten = True
        if call.state not in ENDS:
            call.state = "forgotten"
        if call.result_file is not None:
            node, path = call.result_file
            self._tell_workers({"op": DROP_RESULT, "path": path}, f"{node}-")
        del self._topics[key]
        call.topic = LineTopic(0)
        if not call.is_named:
            del self._calls[key]
        self._scheduler.client_releases_keys(keys=[key], client=KEEP)
        return True

    # ── what happens to them ─────────────────────────────────────────────────────────────────────────────────────────

    def take_in(self, key: str) -> None:
        """Make the record of a task that Dask has taken in, unless there is one."""
        if key in self._calls:
            return
        task = self._scheduler.tasks[key]
        annotations = task.annotations or {}
        # Dask fails a task after the deaths of more than `allowed-failures` (none here) of its workers: the count of
        # this one starts below zero.
        task.suspicious = -int(annotations.get(RETRIES, 0))
        topic = self._topics[key] = LineTopic(self._limit_bytes)
        call_id = key.removeprefix(DETACHED_PREFIX)
        self._calls[key] = Detached(
            call_id,
            str(annotations.get(RUN_ID, call_id)),
            str(annotations.get(NAME, "")),
            topic,
            bool(annotations.get(IS_NAMED, False)),
            annotations.get(RESULT_TTL),
            str(annotations.get(OWNER, "")),
            dict(annotations.get(WORK, {})),
        )

    def follow(self, key: str, start: str, finish: str, stimulus_id: str, news: Mapping[str, Any]) -> None:
        """Note that Dask has moved the task of this key from one state to another."""
        call = self._calls.get(key)
        if call is None or call.is_forgotten or call.state in ENDS:
            return  # its result may be lost later, with its worker
        if start == "processing" and finish not in {"processing", "memory"}:
            self._lose_attempt(call, stimulus_id)
        if finish == "processing":
            worker = self._scheduler.tasks[key].processing_on
            instance_id, *_ = worker.metrics.get(BUSY_TIMES) or ("",)
            call.attempts.append(Attempt(str(worker.name), str(instance_id), time.time()))
        elif finish in {"waiting", "queued", "no-worker"}:
            call.state = "waiting"
        elif finish == "memory":
            self._end(call, "ended")
        elif finish in {"erred", "forgotten"}:
            call.dask_error = news.get("exception_text") or ""
            call.reason = "the scheduler could not run it" if call.dask_error else "the worker that ran it is gone"
            self._end(call, "lost")

    def hear(self, topic: str, message: bytes) -> bool:
        """Note the outcome in a report of this topic, if it is a detached call's; return whether to keep the message.

        Not what cannot be read, and nothing after the outcome of a call that has ended: it could make the topic drop
        the outcome.
        """
        call = self._calls.get(topic)
        if call is None or call.is_forgotten:
            return True
        if call.state in ENDS and call.outcome:
            return False
        try:
            report = decode_report(message)
        except Unreadable as error:
            self._unreadable.note(f"a worker of call {call.call_id}", error)
            return False
        for item in report.news:
            if isinstance(item, Outcome) and item.kind is not OutcomeKind.RETURNED:
                call.outcome, call.seconds = str(item.kind), item.seconds
                call.result_file = None if item.parcel.path is None else (report.node, item.parcel.path)
        return True

    def _lose_attempt(self, call: Detached, stimulus_id: str) -> None:
        if not call.attempts or call.attempts[-1].ended_at is not None:
            return
        attempt = call.attempts[-1]
        attempt.ended_at = time.time()
        if any(str(worker.name) == attempt.worker for worker in self._scheduler.workers.values()):
            attempt.why_lost = "the scheduler has taken the call back"
        elif stimulus_id.startswith("skyward-silent"):
            attempt.why_lost = "its worker did not answer any more"
        else:
            attempt.why_lost = "its worker has left the pool: the node was lost, or the process of the worker has ended"

    def _end(self, call: Detached, state: str) -> None:
        call.state, call.ended_at = state, time.time()
        if call.attempts and call.attempts[-1].ended_at is None:
            call.attempts[-1].ended_at = call.ended_at
        if call.result_ttl is not None:
            self._timers[detached_key(call.call_id)] = asyncio.get_running_loop().call_later(
                call.result_ttl, self.forget, call.call_id
            )

    def _record(self, call: Detached) -> dict[str, Any]:
        task = None if call.is_forgotten else self._scheduler.tasks.get(detached_key(call.call_id))
        is_running = (
            task is not None
            and task.processing_on is not None
            and (task in task.processing_on.executing or call.topic.number > 0)
        )
        return {
            "call_id": call.call_id,
            "name": call.name,
            "owner": call.owner,
            "work": call.work,
            "state": "running" if is_running else call.state,
            "worker": call.attempts[-1].worker if call.attempts else "",
            "runs": len(call.attempts),
            "attempts": [
                (one.worker, one.instance_id, one.began_at, one.ended_at, one.why_lost) for one in call.attempts
            ],
            "submitted_at": call.submitted_at,
            "ended_at": call.ended_at,
            "seconds": call.seconds,
            "outcome": call.outcome,
            "reason": call.reason,
            "dask_error": call.dask_error,
            "messages_in_all": call.topic.number,
            "lines_in_all": call.topic.lines,
            "has_result": task is not None and task.state == "memory",
            "is_forgotten": call.is_forgotten,
        }

    def _take_back(self, call: Detached) -> None:
        """Make sure that a cancelled call does not begin: no worker has it yet, or it must not go to another one."""
        key = detached_key(call.call_id)
        task = self._scheduler.tasks.get(key)
        if task is None or call.state != "waiting":
            return
        task.suspicious = max(0, task.suspicious)
        if task.processing_on is not None:
            return  # a worker has it: its slots get the same message to stop it
        self._end(call, "cancelled")
        self._scheduler.log_event(key, encode_report(Report(-1, "", (Outcome(call.run_id, OutcomeKind.CANCELLED),))))
        self._scheduler.stimulus_cancel(
            [key], client=KEEP, force=True, reason="skyward-cancel", msg="the call was cancelled"
        )

    def _tell_workers(self, message: Mapping[str, Any], prefix: str = "") -> None:
        """Send a message to all workers whose names begin so."""
        workers = {
            address: [message]
            for address, worker in self._scheduler.workers.items()
            if str(worker.name).startswith(prefix)
        }
        self._scheduler.send_all({}, workers)


class Topic:
    """Numbered messages. The last ones are kept; the oldest are dropped when they take more than `limit_bytes`."""

    __slots__ = ("_limit_bytes", "_messages", "nbytes", "number")

    def __init__(self, limit_bytes: int, number: int = 0) -> None:
        self.number = number
        self.nbytes = 0
        self._limit_bytes = limit_bytes
        self._messages: deque[bytes] = deque()

    def add(self, message: bytes) -> None:
        """Keep a message. The last one is always kept, even if it is larger than the limit."""
        self.number += 1
        self._messages.append(message)
        self.nbytes += len(message)
        while self.nbytes > self._limit_bytes and len(self._messages) > 1:
            self._drop_oldest()

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to this number."""
        while self._messages and self.number - len(self._messages) < number:
            self._drop_oldest()

    def after(self, number: int) -> tuple[int, list[bytes]]:
        """Return the kept messages after this number, and the number of the message before them."""
        skipped = max(0, number - (self.number - len(self._messages)))
        messages = list(self._messages)[skipped:]
        return self.number - len(messages), messages

    def _drop_oldest(self) -> None:
        self.nbytes -= len(self._messages.popleft())


class LineTopic(Topic):
    """A topic of reports. `lines` is how many lines all of them have had, the dropped ones too."""

    __slots__ = ("_counts", "lines")

    def __init__(self, limit_bytes: int, number: int = 0) -> None:
        super().__init__(limit_bytes, number)
        self.lines = 0
        self._counts: deque[int] = deque()

    def add(self, message: bytes) -> None:
        """Keep a report, and count its lines. Raises Unreadable."""
        count = len(lines_of(decode_report(message)))
        self.lines += count
        self._counts.append(count)
        super().add(message)

    def line_of(self, messages: int) -> int:
        """Return the number of the first line of the last so many messages; lines count from 0."""
        return self.lines - sum(list(self._counts)[len(self._counts) - messages :])

    def _drop_oldest(self) -> None:
        super()._drop_oldest()
        self._counts.popleft()
