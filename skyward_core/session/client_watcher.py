"""Waits for lost nodes that another process replaces, for a session that no longer keeps its pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward_core.errors import NodeLost
from skyward_core.session.scheduler_search import SchedulerSearch

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster

REPLACED_SECONDS = 300.0
"""For which a broadcast waits for the replacement of a lost node."""


class ClientWatcher:
    """The watcher of a cluster whose nodes another process replaces. `look` is called every second."""

    def __init__(
        self,
        cluster: Cluster,
        scheduler: Callable[[], str],
        lease_seconds: float,
        ended: threading.Event,
        log: Callable[..., object],
    ) -> None:
        self._cluster = cluster
        self._scheduler = scheduler
        self._ended = ended
        self._away: dict[int, float] = {}
        """Since when nodes are absent, by rank."""
        self._search = SchedulerSearch(self._resume, self._is_cut_off, self._give_up, ended, lease_seconds, log)

    def joined(self, rank: int) -> None:
        """Note that a node has joined."""
        self._away.pop(rank, None)

    def left(self, rank: int) -> None:
        """Note when a node went away; another node may take its rank."""
        self._away.setdefault(rank, time.monotonic())

    def cut(self) -> None:
        """The scheduler is out of reach: try to reach it again as long as the lease may be valid."""
        self._search.begin()

    def look(self) -> None:
        """Stop waiting for nodes that are not replaced, and search for the scheduler if no thread does."""
        self._search.look()
        for rank, since in list(self._away.items()):
            if time.monotonic() - since > REPLACED_SECONDS:
                self._cluster.give_up(NodeLost(f"node {rank} is lost, and no process has put one in its place"), rank)

    def _is_cut_off(self) -> bool:
        return not (self._ended.is_set() or self._cluster.is_connected)

    def _resume(self, seconds: float) -> bool:
        self._cluster.resume(self._scheduler(), seconds)
        return True

    def _give_up(self, error: Exception | None) -> None:
        lost = NodeLost("the head of the pool is gone: another process may have replaced it, so open the pool again")
        lost.__cause__ = error
        self._cluster.give_up(lost)
