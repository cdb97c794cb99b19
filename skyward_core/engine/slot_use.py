"""What the calls of this client take of the pool: for how many seconds they have held slots, for each use of the pool;
whether they wait for slots that other clients hold; and what the scheduler was told of this client's load.

Slot seconds are two counts of one time: ended calls report theirs, and each worker counts the calls of each client and
use, running ones too (`worker.topic_seconds`). The second one comes some seconds late, and has the time of calls that
were lost with their worker. For each use and machine the larger count is used.

Nothing is asked about other clients while calls run or end. A client whose calls make no progress for FIRST_SECONDS
asks the scheduler once (`worker/scheduler.py`), and then rarely:

    nothing waits ──calls, and none runs──▶ suspected ──FIRST_SECONDS──▶ asked ──answer──▶ answered ──later──▶ asked
          ▲                                                                                     │
          └────────────────────── a call has ended, or has run; there are none ─────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyward_core.wire.protocol import detached_key, load

FIRST_SECONDS = 5.0
NEXT_SECONDS = 60.0
"""From the first question to the second one; twice as long from that to the third, and so on."""
MOST_SECONDS = 600.0


@dataclass(slots=True)
class _OnMachine:
    ran: float = 0.0
    seen: float = 0.0
    """The sum of `processes`."""
    processes: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def seconds(self) -> float:
        return max(self.ran, self.seen)


class SlotSeconds:
    """The seconds of slots of one client's calls. One thread adds, any may read; no number shrinks.

    `use` is the id of the use that pays for a call, "" for calls of none.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """The sum over all uses and machines."""
        self._by_use: dict[str, dict[str, _OnMachine]] = {}
        """By use and instance id."""
        self._seen_at: dict[str, float] = {}
        """When a worker has last reported running calls of a use, on the monotonic clock."""
        self.reported_at = 0.0
        """When the scheduler has last told what workers have reported, of any use, on the same clock. It is asked every
        few seconds (`dispatcher.PING_SECONDS`).
        """

    def of(self, use: str) -> dict[str, float]:
        """Return the seconds of one use, by instance id."""
        return {instance_id: its.seconds for instance_id, its in self._by_use.get(use, {}).copy().items()}

    def seen_at(self, use: str) -> float | None:
        """Return when workers have counted the running calls of a use last, on the monotonic clock; None: never."""
        return self._seen_at.get(use)

    def forget(self, use: str) -> None:
        """Forget a use that has ended; called from any thread. Its seconds stay in the sum."""
        self._by_use.pop(use, None)
        self._seen_at.pop(use, None)

    def reported(self) -> None:
        """The scheduler has told what workers have reported. `seen` follows for each use whose calls run."""
        self.reported_at = time.monotonic()

    def ran(self, use: str, instance_id: str, seconds: float) -> None:
        """Calls of a use have ended that have kept slots of a machine busy for so many seconds in total."""
        its = self._on(use, instance_id)
        before = its.seconds
        its.ran += seconds
        self.seconds += its.seconds - before

    def seen(self, use: str, instance_id: str, process: str, seconds: float) -> None:
        """A worker process of a machine has counted so many seconds of a use. A smaller number changes nothing."""
        if not seconds:
            return
        its = self._on(use, instance_id)
        self._seen_at[use] = time.monotonic()
        before = its.seconds
        known = its.processes.get(process, 0.0)
        if seconds > known:
            its.processes[process] = seconds
            its.seen += seconds - known
        self.seconds += its.seconds - before

    def _on(self, use: str, instance_id: str) -> _OnMachine:
        return self._by_use.setdefault(use, {}).setdefault(instance_id, _OnMachine())


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """Who holds a slot: its run in words, else its process, and for how many seconds."""

    words: str
    seconds: float


class SlotWaits:
    """Decides when to ask. One thread uses it; it has no clock."""

    def __init__(self) -> None:
        self._ended_at = self._own_seconds = 0.0
        self._since: float | None = None
        """Since when no call has run or ended; None without calls."""
        self._ask_at, self._pause = 0.0, NEXT_SECONDS
        self._quiet_until = 0.0
        """Until when nothing is asked: a call was seen to run, and its seconds come late."""

    def is_due(self, now: float, unfinished: int, ended_at: float, own_seconds: float) -> bool:
        """Return whether to ask now. `unfinished` calls have no result, the last call has ended at `ended_at`, and
        calls have held slots for `own_seconds` so far.
        """
        if not unfinished:
            self._since = None
            return False
        if self._since is None or ended_at != self._ended_at:
            self._quiet_until = 0.0
            self._begin(now)
        elif own_seconds != self._own_seconds:
            self._begin(now)
        self._ended_at, self._own_seconds = ended_at, own_seconds
        if now < max(self._ask_at, self._quiet_until):
            return False
        self._ask_at, self._pause = now + self._pause, min(2 * self._pause, MOST_SECONDS)
        return True

    def answered(self, now: float, *, waits: bool) -> float:
        """Note whether the calls wait for others; return for how long they have."""
        if not waits:
            self._quiet_until = now + NEXT_SECONDS
        return 0.0 if self._since is None else now - self._since

    def _begin(self, now: float) -> None:
        self._since, self._ask_at, self._pause = now, now + FIRST_SECONDS, NEXT_SECONDS


def holder_of(answer: Mapping[str, Any], topics: Collection[str]) -> SlotHolder | None:
    """Return who has held a slot longest, as `CallLists.list_calls` has answered; None if a call of these topics runs,
    or none of others does.
    """
    held = [slot for worker in answer["workers"] for slot in worker["slots"] or ()]
    if not held or any(slot[2] in topics for slot in held):
        return None
    _, _, its_topic, _, seconds, _ = max(held, key=lambda slot: slot[4])
    return SlotHolder(_words(answer, its_topic), seconds)


def _words(answer: Mapping[str, Any], topic: str) -> str:
    for one in answer["clients"]:
        if one.get("topic") == topic:
            process = f"process {one.get('pid')} of {one.get('user')}"
            return f"run {text} ({process})" if (text := one.get("work_text")) else process
    for one in answer["detached"]:
        if detached_key(one["call_id"]) == topic:
            return f"the detached call {one['call_id']} of {one['owner'] or 'a client that has gone'}"
    return "a client that has gone"


class LoadReports:
    """Decides when a report is due, on one connection after the other. One thread uses it."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._sent: tuple[int, frozenset[str]] | None = (0, frozenset())
        """None: not known, the connection is new."""

    def forget(self) -> None:
        """There is another connection: the next report is due in any case.

        Another scheduler knows nothing. The same one still has the last report of the earlier connection.
        """
        self._sent = None

    def next(self, waiting: int | None, needed: Collection[str]) -> dict[str, Any] | None:
        """Return the message that is due; None if nothing has changed. `waiting` is None if it is reported later."""
        before = 0 if self._sent is None else self._sent[0]
        present = (before if waiting is None else waiting, frozenset(needed))
        if present == self._sent:
            return None
        self._sent = present
        return load(self._topic, *present)
