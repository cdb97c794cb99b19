"""Notices that calls of this client wait for slots that other clients hold, and who these are.

Nothing is asked while calls run or end: workers count the seconds of each client's calls (`own_time.py`). A client
whose calls make no progress for FIRST_SECONDS asks the scheduler once (`worker/call_lists.py`), and then rarely.

    nothing waits ──calls, and none runs──▶ suspected ──FIRST_SECONDS──▶ asked ──answer──▶ answered ──later──▶ asked
          ▲                                                                                     │
          └────────────────────── a call has ended, or has run; there are none ─────────────────┘
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from skyward_core.worker.detached_calls import detached_key

FIRST_SECONDS = 5.0
NEXT_SECONDS = 60.0
"""From the first question to the second one; twice as long from that to the third, and so on."""
MOST_SECONDS = 600.0


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
