"""Calls that were in flight when their head was lost, until the state of each is known: pure bookkeeping.

States of the batch of such calls:

    unknown ──a worker announces it──▶ kept ──all its outcomes are reported──▶ (ended)
       ▲ └──all workers that may have it have announced others, or too late──▶ (lost)
       │                                 │ └──that worker leaves──▶ (lost)
       └──────the next head is lost──────┘

A worker of a node that outlives the head joins the next one with its calls and announces them
(`worker/retained_batches.py`). Then it repeats their reports. Each has its first number, by which the client recognises
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from skyward_core.worker.wire import Outcome, Parcel, Report

DECIDED_SECONDS = 60.0  # the time that workers have to join a new head; their node counts as lost before


def batch_of(origin: str) -> int:
    """Return the number of the batch that a report is about; -1 if its origin does not say.

    Origins end with the key of the batch's task.
    """
    number = origin.rpartition("/")[2].removeprefix("skyward-").partition("-")[0]
    return int(number) if number.isdecimal() else -1


@dataclass(slots=True)
class KeptCalls:
    """Batches that were in flight when a head was lost. `at` has the address of the worker that keeps each; the others
    are unknown.

    `awaited` names the workers that may still announce batches, until the clock says `until`, while there is a
    connection. `on_end` gets the number of each batch that has ended, or is lost.
    """

    on_end: Callable[[int], object] = lambda _: None
    batches: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """By number: the calls that have not ended. A call may have been in an earlier batch, which handed it back."""
    at: dict[int, str] = field(default_factory=dict[int, str])
    awaited: set[str] = field(default_factory=set[str])
    until: float = 0.0
    before: int = 0
    """Batches with a lower number were sent to a head that is lost."""
    heard: dict[str, int] = field(default_factory=dict[str, int])
    """By origin: the number of the last report of a batch that is no longer in flight."""
    unrepeated: set[int] = field(default_factory=set[int])
    """Batches whose reports do not count yet: an earlier one may have come before a new scheduler knew this client."""
    _passed_over: dict[int, list[Parcel]] = field(default_factory=dict[int, list[Parcel]])
    """The outcomes in those reports. Their worker repeats them when it announces the batch, or they are left behind."""
    _left_behind: list[Parcel] = field(default_factory=list[Parcel])
    """The outcomes of lost batches that were not repeated: their files are to be removed."""
    _lost: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Batches that are lost, and their calls that had not ended: a worker may announce them after all."""
    astray: set[str] = field(default_factory=set[str])
    """Calls of lost batches that a worker has announced. They may run again elsewhere; the others are to be stopped."""
    _released: set[str] = field(default_factory=set[str])

    def begin(
        self, batches: Mapping[int, Collection[str]], awaited: Collection[str], before: int, heard: Mapping[str, int]
    ) -> None:
        """The head is lost: these batches were in flight, and these workers may still have them.

        All batches so far have numbers below `before`.
        """
        self.batches.update({number: set(calls) for number, calls in batches.items() if calls})
        for number, calls in batches.items():
            self._lost.pop(number, None)
            if not calls:
                self.on_end(number)
        self.at.clear()
        self._released.clear()
        self.astray.clear()
        self.awaited = set(awaited)
        self.before = before
        self.heard.update(heard)

    def clear(self) -> None:
        """Forget everything: the pool begins no calls any more."""
        records = (self.batches, self.at, self.awaited, self.heard, self._lost, self.astray, self._released)
        for record in (*records, self.unrepeated, self._passed_over, self._left_behind):
            record.clear()
        self.until, self.before = 0.0, 0

    @property
    def calls(self) -> list[str]:
        """The calls whose state is unknown, and those that have not ended."""
        return sorted(call_id for calls in self.batches.values() for call_id in calls)

    def announced(self, name: str, address: str, keys: Collection[str]) -> None:
        """A worker announces the batches that it keeps. All their reports follow, in order."""
        self.awaited.discard(name)
        for number in map(batch_of, keys):
            self.unrepeated.discard(number)
            self._passed_over.pop(number, None)
            if number in self.batches:
                self.at[number] = address
            self.astray.update(self._lost.get(number, ()))

    def await_repeats(self) -> None:
        """The scheduler did not know this client: reports before its answer are lost, and workers repeat them."""
        self.unrepeated = set(self.batches)

    def pass_over(self, report: Report) -> None:
        """A report of a batch in `unrepeated` does not count."""
        outcomes = [item.parcel for item in report.news if isinstance(item, Outcome)]
        self._passed_over.setdefault(batch_of(report.origin), []).extend(outcomes)

    def take_left_behind(self) -> list[Parcel]:
        """Return the outcomes of lost batches that their worker has not repeated, once."""
        left_behind, self._left_behind = self._left_behind, []
        return left_behind

    def without(self, names: Collection[str]) -> None:
        """Await no announcement of these workers: their node was replaced."""
        self.awaited.difference_update(names)

    def listen(self, now: float) -> None:
        """The connection is live: the workers have some time to announce."""
        self.until = now + DECIDED_SECONDS

    def take_lost(self, now: float, *, is_live: bool) -> list[str]:
        """Return the calls that no worker has, once that is known. Time without a connection does not count."""
        unknown = self.batches.keys() - self.at.keys()
        if not unknown or (self.awaited and not (is_live and now > self.until)):
            return []
        self.awaited.clear()
        return self._take(unknown)

    def left(self, address: str) -> list[str]:
        """A worker has gone: return the calls that it kept."""
        return self._take([number for number, there in self.at.items() if there == address])

    def forget(self, before: int) -> list[str]:
        """All batches with numbers below `before` are lost, and reports of them no longer count.

        Return the calls of those that were kept or unknown.
        """
        self.before = before
        self.awaited.clear()
        return self._take(list(self.batches))

    def lose(self, number: int, calls: Collection[str]) -> None:
        """A batch is lost with these calls."""
        self._lost[number] = set(calls)

    def was_lost(self, report: Report, call_id: str) -> bool:
        """Return whether a call of a batch had not ended when that was lost."""
        return call_id in self._lost.get(batch_of(report.origin), ())

    def ended(self, report: Report, calls: Collection[str]) -> None:
        """Outcomes of these calls have arrived: their worker may forget those that have outlived their head."""
        number = batch_of(report.origin)
        self.astray.difference_update(calls)
        if 0 <= number < self.before:
            left = self.batches.get(number, set[str]())
            left.difference_update(calls)
            if not left:
                self._take([number])
            self._released.update(calls)

    def take_astray(self, is_wanted: Callable[[str], bool]) -> set[str]:
        """Return the calls of lost batches that a worker has announced and no caller waits for, once."""
        unwanted = {call_id for call_id in self.astray if not is_wanted(call_id)}
        self.astray -= unwanted
        return unwanted

    def take_released(self, is_out: Callable[[str], bool]) -> list[str]:
        """Return the calls that workers may forget, once. Not those in flight: a worker may have them again."""
        released = sorted(call_id for call_id in self._released if not is_out(call_id))
        self._released.difference_update(released)
        return released

    def _take(self, numbers: Iterable[int]) -> list[str]:
        taken = list[str]()
        for number in sorted(numbers):
            calls = self.batches.pop(number, set[str]())
            self.at.pop(number, None)
            self.unrepeated.discard(number)
            self._left_behind += self._passed_over.pop(number, ())
            self.on_end(number)
            if calls:
                self.lose(number, calls)
            taken += sorted(calls)
        return taken
