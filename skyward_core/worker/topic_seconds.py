"""For how long the calls of each client, and of each use of the pool, have kept the slots of a worker busy: the bills
of uses are made of it.

A client is known by its topic, a use by its id (`key_of`). Detached calls are not counted here: they belong to no
client, and the ledger has the time of each (docs/decisions/0029).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from skyward_core.wire.protocol import is_detached

RECENT_SECONDS = 60.0
"""For how long after its last call a client is in the heartbeats: it has the reports of ended calls anyway."""
MOST_TOPICS = 1000
USE_MARK = "#"
"""Between topic and use in a key."""

type WorkerTime = tuple[str, str, float, Mapping[str, float]]
"""How long a worker's slots were busy, in seconds, since its process began: the id of its instance, a name of the
process, the sum over its slots, and the parts of recent clients and uses by their keys.
"""


class TopicSeconds:
    """The seconds of ended calls in one slot, by key.

    One thread adds, any thread reads. Of more than MOST_TOPICS the one that was used least recently is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}
        """By key: its seconds, and when it was used last; in the order of the last use."""

    def add(self, key: str, seconds: float) -> None:
        """A call with this key has kept the slot busy for so long, and has ended."""
        if key and not is_detached(key):
            before = self.of(key)
            self._spent.pop(key, None)
            self._spent[key] = before + seconds, self._clock()
            if len(self._spent) > MOST_TOPICS:
                del self._spent[next(iter(self._spent))]

    def of(self, key: str) -> float:
        """Return the seconds of a key, 0 if it is not known."""
        return self._spent.get(key, (0.0, 0.0))[0]

    def by_use(self, topic: str) -> dict[str, float]:
        """Return the seconds of a client that are known, by use."""
        return by_use({key: seconds for key, (seconds, _) in self._spent.copy().items()}, topic)

    def recent(self, running: str = "") -> dict[str, float]:
        """Return the seconds of clients that were used lately, and of the key that a call runs for now ("": none).

        Not of other uses, or a map of a thousand steps would fill the heartbeats: their calls have reported.
        """
        since = self._clock() - RECENT_SECONDS
        spent = self._spent.copy().items()
        found = {key: seconds for key, (seconds, at) in spent if at >= since and USE_MARK not in key}
        if running and not is_detached(running):
            found[running] = self.of(running)
        return found


def key_of(topic: str, use: str) -> str:
    """Return what the seconds of a call are counted under."""
    return f"{topic}{USE_MARK}{use}" if topic and use else topic


def by_use(parts: Mapping[str, float], topic: str) -> dict[str, float]:
    """Return the seconds of one client from those of all: by the use, "" for calls of none."""
    marked = topic + USE_MARK
    found = {key.removeprefix(marked): seconds for key, seconds in parts.items() if key.startswith(marked)}
    return {"": parts[topic], **found} if topic in parts else found


def added_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of several slots, by key."""
    sums: dict[str, float] = {}
    for part in parts:
        for key, seconds in part.items():
            sums[key] = sums.get(key, 0.0) + seconds
    return sums
