"""Calls that were out when their head was lost, until it is known what has become of each: pure bookkeeping.

States of such a call:

    unknown ──a worker announces it──▶ kept ──its outcome is told──▶ (ended)
       ▲ └──all workers that may have it have announced others, or too late──▶ (lost)
       │                                 │ └──that worker leaves──▶ (lost)
       └──────the next head is lost──────┘

A worker of a node that outlives the head joins the next one with its calls and announces them (`worker/kept.py`). Then it tells their reports again: each
has the number that it had at first, so that what was heard before is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from skyward_core.worker.wire import Report

DECIDED_SECONDS = 60.0  # for workers to come over to a new head; their node counts as lost before


def batch_of(origin: str) -> int:
    """Return the number of the batch that a report is about; -1 if its origin does not say. Origins end with the key of the batch's task."""
    number = origin.rpartition("/")[2].removeprefix("skyward-").partition("-")[0]
    return int(number) if number.isdecimal() else -1


@dataclass(slots=True)
class KeptCalls:
    """`unknown` calls; those that are kept, by id, `at` the address of a worker; the names of the workers that are `awaited`, until the clock says `until`."""

    unknown: set[str] = field(default_factory=set[str])
    at: dict[str, str] = field(default_factory=dict[str, str])
    awaited: set[str] = field(default_factory=set[str])
    until: float = 0.0
    before: int = 0
    """Batches with a lower number were sent to a head that is lost."""
    _batches: set[int] = field(default_factory=set[int])
    """Those that were out when a head was lost. All others from before are done with."""
    _heard: dict[str, int] = field(default_factory=dict[str, int])
    """By origin: the number of the last report that was heard."""
    _given_up: set[str] = field(default_factory=set[str])
    """Calls that are lost and do not run again: a worker that announces one after all is to stop it."""
    _released: set[str] = field(default_factory=set[str])

    def begin(self, calls: Collection[str], batches: Collection[int], awaited: Collection[str], before: int, heard: Mapping[str, int], now: float) -> None:
        """The head is lost: these calls of these batches were out, and workers of these names may still have them. Batches have numbers below `before`."""
        self.unknown.update(self.at, calls)
        self._batches.update(batches)
        self.at.clear()
        self._released.clear()
        self.awaited = set(awaited)
        self.until = now + DECIDED_SECONDS
        self.before = before
        self._heard.update(heard)

    @property
    def are_any(self) -> bool:
        """Whether what has become of some call is not known, or it has not ended."""
        return bool(self.unknown or self.at)

    def announced(self, name: str, address: str, calls: Collection[str]) -> list[str]:
        """A worker says which calls it keeps; return those of them that it must stop."""
        self.awaited.discard(name)
        for call_id in calls:
            if call_id in self.unknown or call_id in self.at:
                self.unknown.discard(call_id)
                self.at[call_id] = address
        return [call_id for call_id in calls if call_id in self._given_up]

    def without(self, names: Collection[str]) -> None:
        """Await no announcement of these workers: their node is not what it was."""
        self.awaited.difference_update(names)

    def take_lost(self, now: float) -> list[str]:
        """Return the calls that no worker has, once that is known."""
        if not self.unknown or (self.awaited and now <= self.until):
            return []
        lost = sorted(self.unknown)
        self.unknown.clear()
        self.awaited.clear()
        return lost

    def gave_up(self, calls: Collection[str]) -> None:
        """These calls are lost, and do not run again."""
        self._given_up.update(calls)

    def left(self, address: str) -> list[str]:
        """A worker has gone: return the calls that it kept."""
        lost = [call_id for call_id, there in self.at.items() if there == address]
        for call_id in lost:
            del self.at[call_id]
        return lost

    def is_done_with(self, report: Report) -> bool:
        """Tell whether a report is of a batch from before that was heard of, or lost, while its head lived: its worker was not told to forget it."""
        number = batch_of(report.origin)
        return 0 <= number < self.before and number not in self._batches

    def is_retold(self, report: Report) -> bool:
        """Tell whether a report of a batch from before was heard already; else note that it is heard."""
        if not self.before or batch_of(report.origin) >= self.before or report.number == 0:
            return False
        if report.number <= self._heard.get(report.origin, 0):
            return True
        self._heard[report.origin] = report.number
        return False

    def ended(self, report: Report, calls: Collection[str]) -> None:
        """Outcomes of these calls have arrived: their worker may forget those that have outlived their head."""
        if self.before and batch_of(report.origin) < self.before:
            for call_id in calls:
                self.at.pop(call_id, None)
                self.unknown.discard(call_id)
            self._released.update(calls)

    def take_released(self) -> list[str]:
        """Return the calls that workers may forget, once."""
        released, self._released = sorted(self._released), set()
        return released
