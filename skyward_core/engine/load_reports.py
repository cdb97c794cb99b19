"""What the scheduler was last sent of this client's load: the calls that wait here, and the nodes that it needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from skyward_core.worker.client_loads import load


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
