"""What the scheduler was last sent of this client's load: the calls that wait here, and the nodes that it needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from skyward_core.worker.client_loads import load


class LoadReports:
    """Decides when a report is due, on one connection after the other. One thread uses it."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._waiting = 0
        self._needed: frozenset[str] = frozenset()

    def forget(self) -> None:
        """There is another connection, perhaps to another scheduler, which knows nothing."""
        self._waiting, self._needed = 0, frozenset()

    def next(self, waiting: int | None, needed: Collection[str]) -> dict[str, Any] | None:
        """Return the message that is due; None if nothing has changed. `waiting` is None if it is reported later."""
        present = (self._waiting if waiting is None else waiting, frozenset(needed))
        if present == (self._waiting, self._needed):
            return None
        self._waiting, self._needed = present
        return load(self._topic, *present)
