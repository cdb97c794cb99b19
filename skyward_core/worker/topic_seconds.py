"""For how long the calls of each client have kept the slots of a worker busy, to split the costs of a shared pool.

A client is known by its topic. Detached calls are not counted here: they belong to no client, and the ledger has the
time of each (docs/decisions/0029).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from skyward_core.worker.detached_calls import is_detached

RECENT_SECONDS = 60.0
"""For how long after its last call a client is in the heartbeats: it has the reports of ended calls anyway."""
MOST_TOPICS = 1000

type WorkerTime = tuple[str, str, float, Mapping[str, float]]
"""How long a worker's slots were busy, in seconds, since its process began: the id of its instance, a name of the
process, the sum over its slots, and the parts of recent clients by their topics.
"""


class TopicSeconds:
    """The seconds of ended calls in one slot, by topic.

    One thread adds, any thread reads. Of more than MOST_TOPICS the one that was used least recently is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}
        """By topic: its seconds, and when it was used last; in the order of the last use."""

    def add(self, topic: str, seconds: float) -> None:
        """A call of this topic has kept the slot busy for so long, and has ended."""
        if topic and not is_detached(topic):
            before = self.of(topic)
            self._spent.pop(topic, None)
            self._spent[topic] = before + seconds, self._clock()
            if len(self._spent) > MOST_TOPICS:
                del self._spent[next(iter(self._spent))]

    def of(self, topic: str) -> float:
        """Return the seconds of a topic, 0 if it is not known."""
        return self._spent.get(topic, (0.0, 0.0))[0]

    def recent(self, running: str = "") -> dict[str, float]:
        """Return the seconds of topics that were used lately, and of the one that a call runs for now ("": none)."""
        since = self._clock() - RECENT_SECONDS
        found = {topic: seconds for topic, (seconds, at) in self._spent.copy().items() if at >= since}
        if running and not is_detached(running):
            found[running] = self.of(running)
        return found


def added_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of several slots, by topic."""
    sums: dict[str, float] = {}
    for part in parts:
        for topic, seconds in part.items():
            sums[topic] = sums.get(topic, 0.0) + seconds
    return sums
