"""For how many seconds the calls of this client have held slots of the pool, for each use of the pool.

Two counts of one time: ended calls report theirs, and each worker counts the calls of each client and use, running ones
too (`worker.topic_seconds`). The second one comes some seconds late, and has the time of calls that were lost with
their worker. For each use and machine the larger count is used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class _OnMachine:
    ran: float = 0.0
    seen: float = 0.0
    """The sum of `processes`."""
    processes: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def seconds(self) -> float:
        return max(self.ran, self.seen)


class OwnTime:
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

    def of(self, use: str) -> dict[str, float]:
        """Return the seconds of one use, by instance id."""
        return {instance_id: its.seconds for instance_id, its in self._by_use.get(use, {}).copy().items()}

    def seen_at(self, use: str) -> float | None:
        """Return when workers have counted the running calls of a use last, on the monotonic clock; None: never."""
        return self._seen_at.get(use)

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
