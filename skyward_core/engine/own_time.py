"""For how many seconds the calls of this client have held slots of the pool.

Two counts of one time: ended calls report theirs, and each worker counts the calls of each client, running ones too
(`worker.topic_seconds`). The second one comes some seconds late, and has the time of calls that were lost with their
worker. For each machine the larger count is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Machine:
    ran: float = 0.0
    seen: float = 0.0
    """The sum of `processes`."""
    processes: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def seconds(self) -> float:
        return max(self.ran, self.seen)


class OwnTime:
    """The seconds of slots of one client's calls. One thread adds, any may read `seconds`, which never shrinks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The sum over all machines."""
        self._machines: dict[str, _Machine] = {}

    def ran(self, instance_id: str, seconds: float) -> None:
        """Calls have ended that have kept slots of a machine busy for so many seconds in total."""
        machine = self._machines.setdefault(instance_id, _Machine())
        before = machine.seconds
        machine.ran += seconds
        self.seconds += machine.seconds - before

    def seen(self, instance_id: str, process: str, seconds: float) -> None:
        """A worker process of a machine has counted so many seconds so far. A smaller number changes nothing."""
        if not seconds:
            return
        machine = self._machines.setdefault(instance_id, _Machine())
        before = machine.seconds
        known = machine.processes.get(process, 0.0)
        if seconds > known:
            machine.processes[process] = seconds
            machine.seen += seconds - known
        self.seconds += machine.seconds - before
