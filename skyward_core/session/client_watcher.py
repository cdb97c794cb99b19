"""Waits for lost nodes that another process replaces: for a session that keeps its pool no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward_core.errors import NodeLost, SkywardError

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster

POLL_SECONDS = 0.2
REPLACED_SECONDS = 300.0
"""For which a broadcast waits for the replacement of a lost node."""
RESUME_SECONDS = 2.0


class ClientWatcher:
    """The watcher of a cluster whose nodes another process replaces. `look` is called every second."""

    def __init__(
        self, cluster: Cluster, scheduler: Callable[[], str], lease_seconds: float, ended: threading.Event
    ) -> None:
        self._cluster = cluster
        self._scheduler = scheduler
        self._lease_seconds = lease_seconds
        self._ended = ended
        self._away: dict[int, float] = {}
        """Since when nodes are absent, by rank."""
        self._resuming = threading.Lock()
        """Held by the one thread that tries to reach the scheduler again."""

    def joined(self, rank: int) -> None:
        """Note that a node has joined."""
        self._away.pop(rank, None)

    def left(self, rank: int) -> None:
        """Note when a node went away; another node may take its rank."""
        self._away.setdefault(rank, time.monotonic())

    def cut(self) -> None:
        """The scheduler is out of reach: try to reach it again as long as the lease may be valid."""
        threading.Thread(target=self._resume, name="skyward-resume", daemon=True).start()

    def look(self) -> None:
        """Stop waiting for nodes that are not replaced."""
        for rank, since in list(self._away.items()):
            if time.monotonic() - since > REPLACED_SECONDS:
                self._cluster.give_up(NodeLost(f"node {rank} is lost, and no process has put one in its place"), rank)

    def _resume(self) -> None:
        with self._resuming:
            if not (self._ended.is_set() or self._cluster.is_connected):
                self._reach_scheduler()

    def _reach_scheduler(self) -> None:
        since = time.monotonic()
        error: Exception | None = None
        while not self._ended.wait(POLL_SECONDS) and time.monotonic() - since < self._lease_seconds:
            try:
                self._cluster.resume(self._scheduler(), RESUME_SECONDS)
                return
            except (SkywardError, OSError) as failure:
                error = failure
        lost = NodeLost("the head of the pool is gone: another process may have given it another one, open it again")
        lost.__cause__ = error
        self._cluster.give_up(lost)
