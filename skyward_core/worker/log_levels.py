"""The levels of the client's loggers, on a node: `logging` drops there what it would drop in the client, and no more.

They travel with each call (`events/levels_for_nodes.py` reads them), because clients with different levels may share a
pool, and their calls the process of a slot.
"""

from __future__ import annotations

import logging

type LogLevels = tuple[tuple[str, int], ...]
"""Names of loggers and their levels; "" is the root logger."""


class LevelsOfCalls:
    """Sets the levels of this process's loggers for one call after the other.

    What a call sets itself stays for the calls after it that come with the same levels, as its other global state does.
    """

    def __init__(self) -> None:
        self.levels: LogLevels = ()
        """Those of the last call."""
        self._before: dict[str, int] = {}

    def set(self, levels: LogLevels) -> None:
        """Set these levels, and those of the call before as they were before it."""
        if levels == self.levels:
            return
        for name, level in self._before.items():
            logging.getLogger(name).setLevel(level)
        self._before = {name: logging.getLogger(name).level for name, _ in levels}
        self.levels = levels
        for name, level in levels:
            logging.getLogger(name).setLevel(level)


of_this_process = LevelsOfCalls()
"""The calls of a runner find it here, as they find the standard output."""
