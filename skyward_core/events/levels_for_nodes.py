"""The levels of this process's loggers, as its calls get them on their nodes (`worker/log_records.py`)."""

from __future__ import annotations

import logging

from skyward_core.events.console import node_level

OURS = ("skyward", "distributed", "tornado", "bokeh")
"""Loggers of the pool itself, and of what it imports: their levels here are not the user's wish."""


def levels_for_nodes(root_level: int = 0) -> tuple[tuple[str, int], ...]:
    """Return the level of each logger for which the user or an orchestrator has set one.

    The root logger gets `root_level`; 0: the level from which on the lines of nodes are shown in this process.
    """
    named = [
        (name, level)
        for name, logger in list(logging.root.manager.loggerDict.items())  # a copy: other threads make loggers
        if (level := getattr(logger, "level", 0)) and name.partition(".")[0] not in OURS
    ]
    return (("", root_level or node_level()), *named)
