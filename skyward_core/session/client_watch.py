"""What a process watches of a pool that another one keeps: the scheduler, lost nodes, and the nodes of an elastic pool.

`SchedulerSearch` reaches the scheduler again after the connection to it was cut:

    idle ──cut──▶ searching ──reached, not needed any more, or left──▶ idle
                      └──no scheduler within one lease, or the ledger says that the pool has ended──▶ `give_up`

Only one thread searches, "skyward-resume". No error but LeaseLost ends it early: an overloaded machine has errors of
many kinds, and the calls of a pool whose search has ended silently would wait forever.

`ClientWatcher` waits for lost nodes that another process replaces.

`Follower` adds the nodes that join an elastic pool, and removes those that left:

    a worker joins from a machine that is not known ──the newest lease names it──▶ reached ──▶ a node, which gets calls
    the scheduler says that a rank leaves, and its workers are gone ──▶ forgotten

The scheduler only says that something has changed. Data about the machine and its transport comes from the sealed lease
in the ledger, which is verified. Without such a lease this process uses only the nodes that it attached to, until they
leave.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import LeaseLost, NodeLost, PoolClosed, SkywardError
from skyward_core.machines.instances import Lease, Node
from skyward_core.session.sealed_lease import PoolKeys, find_lease

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.providers.base import Provider

POLL_SECONDS = 0.2
RESUME_SECONDS = 2.0
LONGEST_PAUSE_SECONDS, LONGEST_RESUME_SECONDS = 5.0, 20.0
"""Hundreds of attachments of one process may be cut at once, because the machine is overloaded. If all of them tried to
connect all the time, none of them could.
"""
PAUSE_SHARE, RESUME_SHARE = 1 / 24, 1 / 6
"""The longest pause, and the longest try, are at most this part of a lease."""
REPLACED_SECONDS = 300.0
"""For which a broadcast waits for the replacement of a lost node."""
LOOK_SECONDS = 1.0
PAUSES = Backoff(0.5, 30.0)
"""The pause before a lease is read again that lacks a node which has joined."""
_log = logging.getLogger("skyward")


class Ended(Protocol):
    """Set when the pool is left: a `threading.Event`."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...


class SchedulerSearch:
    """The search of one process for the scheduler of one pool. May be used from any thread."""

    def __init__(
        self,
        attempt: Callable[[float], bool],
        is_needed: Callable[[], bool],
        give_up: Callable[[Exception | None], object],
        ended: Ended,
        lease_seconds: float,
        log: Callable[..., object],
    ) -> None:
        """Searches for as long as the nodes may live.

        Args:
            attempt: tries to connect within so many seconds. It returns whether it has, False if there was nothing to
                connect to yet, and raises why it could not. LeaseLost ends the search.
            is_needed: returns whether this process is cut off, and is to search.
            give_up: called with the last error, when no scheduler was reached within `lease_seconds`, or none can be
                reached any more. Not called when the pool was left.
            ended: set when the pool is left.
            lease_seconds: for how long the nodes live after the last sign of life.
            log: takes a level, a message, its arguments and `error`, and does not wait for a terminal.
        """
        self._attempt = attempt
        self._is_needed = is_needed
        self._give_up = give_up
        self._ended = ended
        self._lease_seconds = lease_seconds
        self._log = log
        self._pauses = Backoff(POLL_SECONDS, max(POLL_SECONDS, min(LONGEST_PAUSE_SECONDS, lease_seconds * PAUSE_SHARE)))
        self._patience = Backoff(
            RESUME_SECONDS, max(RESUME_SECONDS, min(LONGEST_RESUME_SECONDS, lease_seconds * RESUME_SHARE))
        )
        """How long each try may take."""
        self._searching = threading.Lock()
        """Held by the one thread that searches; it waits for the network."""
        self._has_given_up = False

    def begin(self) -> None:
        """Search, after the search that runs, if there is one. Does not wait."""
        if not LoopThread("skyward-resume", self._run).start_if_possible():  # `look` tries again
            self._log(logging.WARNING, "the search for the pool's scheduler begins later: no thread can be started")

    def look(self) -> None:
        """Begin a search if one is needed and none runs, unless one has given up. Called periodically."""
        if not (self._has_given_up or self._searching.locked()) and self._is_needed():
            self.begin()

    def _run(self) -> None:
        with self._searching:
            if self._is_needed() and not self._has_given_up:
                self._search()

    def _search(self) -> None:
        since = time.monotonic()
        failures = 0
        error: Exception | None = None
        while not self._ended.wait(self._pauses.seconds(max(1, failures))):
            if isinstance(error, LeaseLost) or time.monotonic() - since >= self._lease_seconds:
                self._has_given_up = True
                self._give_up(error)
                return
            try:
                if self._attempt(self._patience.seconds(failures + 1)):
                    return
            except Exception as failure:
                if not isinstance(failure, SkywardError | OSError) and type(failure) is not type(error):
                    self._log(logging.ERROR, "a search for the pool's scheduler failed; it goes on", error=failure)
                error = failure
                failures += 1
            if not self._is_needed():
                return


class ClientWatcher:
    """The watcher of a cluster whose nodes another process replaces. `look` is called periodically."""

    def __init__(
        self,
        cluster: Callable[[], Cluster | None],
        resume: Callable[[float], bool],
        lease_seconds: float,
        ended: threading.Event,
        log: Callable[..., object],
        on_given_up: Callable[[SkywardError], object] = lambda _: None,
        why_gone: Callable[[], str] = lambda: "",
    ) -> None:
        """Watch nothing before `cluster` returns one.

        `resume`: the `attempt` of `SchedulerSearch`. `on_given_up` is called with the error of the calls that wait,
        when no scheduler was reached while the nodes may live; not when the pool was left. `why_gone` returns what the
        head has written about its end (`words_of_end`).
        """
        self._cluster = cluster
        self._ended = ended
        self._on_given_up = on_given_up
        self._why_gone = why_gone
        self._is_paused = False
        self._away: dict[int, float] = {}
        """Since when nodes are absent, by rank."""
        self._search = SchedulerSearch(resume, self._is_cut_off, self._give_up, ended, lease_seconds, log)

    def joined(self, rank: int) -> None:
        """Note that a node has joined, or is not waited for any more."""
        self._away.pop(rank, None)

    def left(self, rank: int) -> None:
        """Note when a node went away; another node may take its rank."""
        self._away.setdefault(rank, time.monotonic())

    def cut(self) -> None:
        """The scheduler is out of reach: try to reach it again as long as the lease may be valid."""
        self._search.begin()

    def pause(self) -> None:
        """This process keeps the pool from now on: its recovery does all that."""
        self._is_paused = True
        self._away.clear()

    def go_on(self, lease: Lease) -> None:
        """Another process keeps the pool, with these nodes: watch the cluster. Does not wait."""
        self._is_paused = False
        if (cluster := self._cluster()) is None:
            return
        cluster.watch(self)
        for node in lease.nodes:
            if cluster.missing(node.rank):
                self.left(node.rank)
        if not cluster.is_connected:
            self.cut()

    def look(self) -> None:
        """Stop waiting for nodes that are not replaced, and search for the scheduler if no thread does."""
        self._search.look()
        for rank, since in list(self._away.items()):
            if (cluster := self._cluster()) is not None and time.monotonic() - since > REPLACED_SECONDS:
                cluster.fail_calls(NodeLost(f"node {rank} is lost, and no process has put one in its place"), rank)

    def _is_cut_off(self) -> bool:
        cluster = self._cluster()
        return not (cluster is None or cluster.is_connected or self._is_paused or self._ended.is_set())

    def _give_up(self, error: Exception | None) -> None:
        lost: SkywardError
        if isinstance(error, LeaseLost):
            lost = error
        else:
            why = self._why_gone() or (
                "another process may have replaced it: open the pool again by its name, or attach with its present"
                " lease"
            )
            lost = NodeLost(f"the head of the pool is gone: {why}")
            lost.__cause__ = error
        if (cluster := self._cluster()) is not None:
            cluster.fail_calls(lost)
        self._on_given_up(lost)


def words_of_end(provider: Provider, instance_id: str) -> str:
    """Return what a node has written about its end, for messages; "" if that cannot be found out."""
    try:
        end = provider.ends([instance_id]).get(instance_id)
    except Exception as error:  # of any kind: the message has other words then
        _log.debug("the end of %s cannot be found out: %s", instance_id, error)
        return ""
    return "" if end is None else str(end)


class Follower:
    """Follows the nodes of one pool. `look` is called every LOOK_SECONDS, by one thread.

    `lease` returns the present lease of this process. `reach` connects to nodes of a newer one and returns those that
    answer. `use` takes the changed lease, with the nodes that are not used any more.
    """

    def __init__(
        self,
        lease: Callable[[], Lease],
        reach: Callable[[Lease, PoolKeys], list[Node]],
        use: Callable[[Lease, list[Node]], object],
        find: Callable[[str], tuple[Lease, PoolKeys]] = find_lease,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease = lease
        self._reach = reach
        self._use = use
        self._find = find
        self._clock = clock
        self._wanted: dict[int, str] = {}
        self._tries = 0
        self._try_at = 0.0

    def look(self, cluster: Cluster) -> None:
        """Compare the workers of the scheduler with the known nodes, once. Raises nothing."""
        try:
            self._forget(cluster, cluster.draining.left_nodes())
            self._learn(cluster, cluster.draining.strange_nodes())
        except (PoolClosed, TimeoutError):
            pass  # the pool is left, or the engine is busy: the next look sees the same
        except (SkywardError, OSError) as error:
            _log.debug("the nodes that have joined are not known yet: %s", error)

    def _forget(self, cluster: Cluster, ranks: list[int]) -> None:
        for rank in ranks:
            lease = self._lease()
            gone = [node for node in lease.nodes if node.rank == rank]
            self._use(_with_nodes(lease, [node for node in lease.nodes if node.rank != rank]), gone)
            cluster.fail_calls(NodeLost(f"node {rank} has left the pool, because the pool has shrunk"), rank)
            cluster.remove_node(rank)

    def _learn(self, cluster: Cluster, wanted: dict[int, str]) -> None:
        now = self._clock()
        if wanted != self._wanted:
            self._wanted, self._tries, self._try_at = wanted, 0, now
        if not wanted or now < self._try_at:
            return
        self._tries += 1
        self._try_at = now + PAUSES.seconds(self._tries)
        newest, keys = self._find(self._lease().pool_id)
        come = [node for node in newest.nodes if node.rank in wanted and wanted[node.rank] in ("", node.instance.id)]
        if not come:
            return
        ids = {node.instance.id for node in come}
        known = [node for node in self._lease().nodes if node.instance.id in ids]
        there = {node.instance.id for node in known}
        new = self._reach(_with_nodes(newest, [node for node in come if node.instance.id not in there]), keys)
        if not known and not new:
            return
        lease, ranks = self._lease(), {node.rank for node in (*known, *new)}
        gone = [node for node in lease.nodes if node.rank in ranks and node not in known]
        stays = [node for node in lease.nodes if node.rank not in ranks]
        lease = _with_nodes(lease, sorted([*stays, *known, *new], key=lambda node: node.rank))
        self._use(lease, gone)
        cluster.update_nodes(lease)


def _with_nodes(lease: Lease, nodes: list[Node]) -> Lease:
    return lease.model_copy(update={"nodes": tuple(nodes)})
