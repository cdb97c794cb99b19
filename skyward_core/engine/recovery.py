"""Recovery when an open pool loses a node, its head or the connection: a thread that does the actions of `membership`,
and those of `elastic` for a pool that grows and shrinks.

Every TICK_SECONDS, and at each message of the cluster, `Recovery.turn` calls `membership.Membership` and does its
actions. An action that may take minutes (starting a machine) runs in another thread; the next turn gets its outcome.
The cluster's messages (`joined`, `left`, `cut`) come in any thread and only wake the recovery thread.

Recovery owns no machine: `MachineControl` rents and releases them. If this thread dies at any point, the pool's release
finds every machine by its tag.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from skyward_core.concurrency.threads import LoopThread, Threads
from skyward_core.engine.elastic import ElasticRanks, Load, ScalingPolicy
from skyward_core.engine.membership import (
    AddNode,
    AskHead,
    Dismiss,
    DrainNode,
    EmitMembershipEvent,
    Free,
    GiveUp,
    HoldNode,
    LeaveOut,
    Membership,
    MembershipAction,
    RemoveNode,
    ReplaceNode,
    Restart,
    RestartWorkers,
    Resume,
    Retire,
    StandBy,
    Survivors,
    TakeIn,
)
from skyward_core.errors import LedgerError, PoolClosed, SkywardError
from skyward_core.events.events import Error, SkywardEvent
from skyward_core.machines.instances import Lease, Node
from skyward_core.wire.info import Notice

TICK_SECONDS = 0.25
JOIN_SECONDS = 60.0
RESUME_SECONDS = 2.0
RESTART_SECONDS = 30.0
QUERY = "skyward-query"
SETTLE_POLL_SECONDS = 0.05
ASK_LEDGER_SECONDS = 5.0
UNKNOWN = 1  # stands for an unknown number of calls that a node has left
_log = logging.getLogger("skyward")


class MachineControl(Protocol):
    """The part of `provisioning.lifecycle.PoolMachines` that recovery uses."""

    @property
    def lease(self) -> Lease: ...
    @property
    def scheduler(self) -> str: ...
    def living(self) -> set[str]: ...
    def has_ended(self, rank: int) -> bool: ...
    def is_connected(self, rank: int) -> bool: ...
    def last_words(self, rank: int) -> str: ...
    def notices(self, rank: int) -> tuple[Notice, ...]: ...
    def stand_by(self, rank: int) -> None: ...
    def dismiss(self, rank: int) -> None: ...
    def raise_if_not_steward(self) -> None: ...
    def retire(self, rank: int, instance_id: str) -> None: ...
    def restart_workers(self, rank: int, workers: Sequence[int]) -> None: ...
    def replace(self, rank: int, is_there: Callable[[], bool]) -> None: ...
    def add(self, rank: int, is_there: Callable[[], bool]) -> None: ...
    def abandon_coming(self) -> None: ...
    def remove(self, rank: int, instance_id: str) -> None: ...
    def lives(self, ranks: Collection[int]) -> dict[int, bool]: ...
    def restart(self, heirs: Collection[str], dead: Collection[str]) -> Lease: ...


class DrainingControl(Protocol):
    """The part of `draining.NodeDraining` that recovery uses."""

    def take_in(self, rank: int) -> None: ...
    def leave_out(self, rank: int) -> None: ...
    def hold(self, rank: int) -> int: ...
    def drain(self, rank: int) -> tuple[int, int]: ...
    def free(self, rank: int) -> None: ...


class ClusterControl(Protocol):
    """The part of `cluster.Cluster` that recovery uses."""

    @property
    def slots(self) -> int: ...
    def has(self, rank: int) -> bool: ...
    def missing(self, rank: int) -> list[int]: ...
    def remove_node(self, rank: int) -> None: ...
    @property
    def draining(self) -> DrainingControl: ...
    def resume(self, address: str, timeout_seconds: float) -> None: ...
    def restart(self, lease: Lease, address: str, timeout_seconds: float) -> None: ...
    def update_nodes(self, lease: Lease) -> None: ...
    def fail_calls(self, error: SkywardError, rank: int | None = None) -> None: ...


class ThreadLauncher(Protocol):
    """Starts a thread of this name for long work, and does not wait for it. If it cannot, it does the work itself."""

    def __call__(self, name: str, work: Callable[[], None], /) -> object: ...


class Recovery:
    """Watches the members of an open pool's cluster. The pool calls `start`, `stop` and `join`. `clock` counts seconds.

    A test may call `turn` without `start`.
    """

    def __init__(
        self,
        machines: MachineControl,
        cluster: ClusterControl,
        nodes: int | Collection[int],
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        clock: Callable[[], float] = time.monotonic,
        in_thread: ThreadLauncher | None = None,
        scaling: ScalingPolicy | None = None,
    ) -> None:
        self._machines = machines
        self._cluster = cluster
        self._membership = Membership(nodes, lease_seconds)
        self._elastic = None if scaling is None else ElasticRanks(self._membership, scaling)
        self._is_settling = False
        self._view = _RecoveryView(machines, cluster)
        self._emit = emit
        self._clock = clock
        self._threads = Threads()
        self._in_thread = in_thread or self._threads.run
        self._wake = threading.Event()
        self._was_cut = threading.Event()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Outcomes of other threads, for the next turn: only one thread changes the state."""
        self._closing = threading.Event()
        self._thread = LoopThread("skyward-recovery", self._run, self._report)
        self._reported = ""

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Do nothing more. `PoolMachines.stop` must wake the threads that wait for machines before `join`."""
        self._closing.set()
        self._threads.close()
        self._wake.set()

    @property
    def is_stopped(self) -> bool:
        """Whether it does nothing any more."""
        return self._closing.is_set()

    def join(self) -> None:
        """Wait for all threads except QUERY, which only waits for an answer and changes nothing.

        Wait at most JOIN_SECONDS for a launch that hangs, because the pool must release its machines. `MachineControl`
        releases machines that come later.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        self._thread.join(JOIN_SECONDS)
        self._threads.close()
        self._threads.join(max(0.0, deadline - time.monotonic()), except_for=QUERY)

    # ── more and fewer nodes, in any thread ──────────────────────────────────────────────────────────────────────────

    def observe(self, load: Load) -> None:
        """Let the pool grow or shrink, if it is elastic."""
        if (elastic := self._elastic) is not None:
            self._post(lambda: elastic.observe(self._clock(), load))

    def fix_size(self, nodes: int | None) -> None:
        """Keep an elastic pool at this number of nodes; None: let it grow and shrink again."""
        if (elastic := self._elastic) is not None:
            self._post(lambda: elastic.fix(nodes))

    def settle(self, timeout_seconds: float) -> None:
        """Let no node come or leave any more, and wait at most so long until none does. A node that is coming is
        terminated, at any stage, and one that is draining gets calls again. `unsettle` undoes it.
        """
        if (elastic := self._elastic) is None:
            return
        self._is_settling = True
        done = threading.Event()

        def settle() -> None:
            elastic.settle(is_settled=True)
            done.set()

        self._post(settle)
        deadline = time.monotonic() + timeout_seconds
        done.wait(timeout_seconds)
        while not elastic.is_at_rest and time.monotonic() < deadline and not self._closing.wait(SETTLE_POLL_SECONDS):
            self._machines.abandon_coming()

    def unsettle(self) -> None:
        """Let nodes come and leave again."""
        self._is_settling = False
        if (elastic := self._elastic) is not None:
            self._post(lambda: elastic.settle(is_settled=False))

    # ── messages of the cluster, in any thread ───────────────────────────────────────────────────────────────────────
    # Each only sets a flag for the next turn. The message may be late, or from an earlier connection: a turn checks the
    # members itself.

    def joined(self, rank: int) -> None:
        """All workers of a node have joined."""
        self._wake.set()

    def left(self, rank: int) -> None:
        """A worker of a node has left."""
        self._wake.set()

    def cut(self) -> None:
        """The scheduler is out of reach."""
        self._was_cut.set()
        self._wake.set()

    # ── in the thread of recovery ────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            try:
                self.turn()
            except PoolClosed:
                return

    def _report(self, error: BaseException) -> None:
        """Emit an error; the next turn tries again. The same one is not emitted four times a second."""
        _log.debug("the loss of a node could not be handled", exc_info=error)
        if self._reported != repr(error):
            self._reported = repr(error)
            self._emit(Error(f"the loss of a node could not be handled: {error!r}"))

    def turn(self) -> None:
        """Check the head, the members and the clock once, and do the actions that are due."""
        while not self._inbox.empty():
            news = self._inbox.get()
            if not self._closing.is_set():
                news()
        if self._closing.is_set():
            return
        self._do_all()
        if is_cut := self._was_cut.is_set():
            self._was_cut.clear()
        had_head = self._membership.has_head and not is_cut
        self._membership.turn(self._clock(), self._view, is_cut=is_cut)
        self._do_all()
        # the head is back: look at the nodes too
        if not had_head and self._membership.has_head and not self._closing.is_set():
            self._membership.turn(self._clock(), self._view)
            self._do_all()
        if self._elastic is not None and not self._closing.is_set():
            self._elastic.turn(self._clock(), self._view)
            self._do_all()

    def _do_all(self) -> None:
        while (action := self._membership.next_action()) is not None:
            self._do(action)
        while self._elastic is not None and (action := self._elastic.next_action()) is not None:
            self._do(action)

    def _do(self, action: MembershipAction) -> None:
        match action:
            case EmitMembershipEvent(event):
                self._emit(event)
            case GiveUp(error, rank):
                self._cluster.fail_calls(error, rank)
            case Resume():
                self._resume()
            case Restart(before):
                self._restart(before)
            case Dismiss(rank):
                self._machines.dismiss(rank)
            case AskHead():
                self._in_thread(QUERY, lambda: self._ask(action))
            case RestartWorkers():
                self._in_thread(f"skyward-restart-workers-{action.rank}", lambda: self._restart_workers(action))
            case ReplaceNode(rank):
                self._in_thread(f"skyward-replace-{rank}", lambda: self._replace(rank))
            case StandBy():
                self._in_thread(f"skyward-stand-by-{action.rank}", lambda: self._stand_by(action))
            case HoldNode():
                self._in_thread(QUERY, lambda: self._hold(action))
            case Retire():
                self._in_thread(f"skyward-retire-{action.rank}", lambda: self._retire(action))
            case TakeIn(rank):
                self._cluster.draining.take_in(rank)
            case LeaveOut(rank):
                self._cluster.draining.leave_out(rank)
            case AddNode(rank):
                self._in_thread(f"skyward-add-{rank}", lambda: self._add(rank))
            case DrainNode():
                self._in_thread(QUERY, lambda: self._drain(action))
            case Free(rank):
                self._in_thread(QUERY, lambda: self._free(rank))
            case RemoveNode():
                self._in_thread(f"skyward-remove-{action.rank}", lambda: self._remove(action))

    # ── in this thread
    # ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _resume(self) -> None:
        try:
            self._cluster.resume(self._machines.scheduler, RESUME_SECONDS)
        except (SkywardError, OSError):
            return
        self._membership.resumed()

    def _restart(self, before: tuple[Node, ...]) -> None:
        """Bring the cluster up with another head."""
        survivors = Survivors((), ())
        try:
            survivors = self._membership.survivors(
                before, self._machines.lives([node.rank for node in before]), self._view
            )
            lease = self._machines.restart(survivors.heirs, survivors.dead)
            self._cluster.restart(lease, self._machines.scheduler, RESTART_SECONDS)
        except PoolClosed:
            raise
        except Exception as error:
            if not self._closing.is_set():
                self._membership.not_restarted(before, survivors.dead, error, self._view, self._clock())
        else:
            self._membership.restarted(before, survivors.dead, lease, self._cluster.slots, self._clock())

    # ── in other threads, because a machine or a provider may be slow
    # ────────────────────────────────────────────────────────

    def _post(self, news: Callable[[], None]) -> None:
        """Let the next turn begin with this. May be called from any thread."""
        self._inbox.put(news)
        self._wake.set()

    def _ask(self, action: AskHead) -> None:
        """Ask the head's machine whether its processes live, and its provider whether the machine exists.

        During an outage of the provider the second answer is unknown.
        """
        is_dead, is_listed = False, None
        try:
            is_dead = self._machines.lives([0]).get(0) is False
            is_listed = is_dead or action.head.id in self._machines.living()
        except Exception as error:
            _log.debug("the provider does not say whether the head exists: %s", error)
        self._post(lambda: self._membership.answered(action.since, is_dead=is_dead, is_listed=is_listed))

    def _restart_workers(self, action: RestartWorkers) -> None:
        """Let a node restart its workers. A later turn tries again if this fails."""
        try:
            self._machines.restart_workers(action.rank, action.workers)
        except Exception as error:
            _log.debug("the workers of node %d could not be restarted: %s", action.rank, error)

    def _replace(self, rank: int) -> None:
        failure: Exception | None = None
        try:
            if not self._cluster.has(rank):  # otherwise the node has come back
                self._machines.replace(rank, lambda: self._is_there(rank))
        except Exception as error:
            failure = error
        self._post(lambda: self._membership.replaced(rank, failure, self._clock()))

    def _is_there(self, rank: int) -> bool:
        self._cluster.update_nodes(self._machines.lease)
        return self._cluster.has(rank) or self._closing.is_set()

    def _stand_by(self, action: StandBy) -> None:
        failure: Exception | None = None
        try:
            self._machines.stand_by(action.rank)
        except Exception as error:
            failure = error
        self._post(lambda: self._membership.relieved(action.rank, action.instance_id, failure, self._clock()))

    def _hold(self, action: HoldNode) -> None:
        left = UNKNOWN
        try:
            left = self._cluster.draining.hold(action.rank)
        except Exception as error:
            _log.debug("node %d could not be held: %s", action.rank, error)
        self._post(lambda: self._membership.held(action.rank, action.instance_id, left))

    def _retire(self, action: Retire) -> None:
        is_retired = True
        try:
            self._machines.retire(action.rank, action.instance_id)
        except Exception as error:
            _log.debug("node %d could not be retired: %s", action.rank, error)
            is_retired = False
        self._post(lambda: self._note_retired(action, is_retired=is_retired))

    def _note_retired(self, action: Retire, *, is_retired: bool) -> None:
        self._membership.retired(action.rank, action.instance_id, is_retired=is_retired)
        if self._elastic is not None:
            self._elastic.retired(action.rank, action.instance_id, self._clock(), is_retired=is_retired)

    # ── the same for nodes that come and leave; only an elastic pool has these actions ───────────────────────────────

    def _post_elastic(self, news: Callable[[ElasticRanks], None]) -> None:
        if (elastic := self._elastic) is not None:
            self._post(lambda: news(elastic))

    def _add(self, rank: int) -> None:
        failure: Exception | None = None

        def is_there() -> bool:
            if self._is_settling:
                raise PoolClosed("the pool is left as it is")
            return self._is_there(rank)

        try:
            self._machines.add(rank, is_there)
        except Exception as error:
            failure = PoolClosed("the pool is left as it is") if self._is_settling else error
        self._post_elastic(lambda elastic: elastic.added(rank, failure, self._clock()))

    def _drain(self, action: DrainNode) -> None:
        left, bound = None, 0
        try:
            self._machines.raise_if_not_steward()  # the node may be one of another process, which gives it calls
            left, bound = self._cluster.draining.drain(action.rank)
        except Exception as error:
            _log.debug("node %d could not be drained: %s", action.rank, error)
        self._post_elastic(lambda elastic: elastic.drained(action.rank, action.instance_id, left, bound))

    def _free(self, rank: int) -> None:
        is_free = True
        try:
            self._machines.raise_if_not_steward()  # the other process may be taking the node out of the pool
            self._cluster.draining.free(rank)
        except Exception as error:
            _log.debug("node %d could not be freed: %s", rank, error)
            is_free = False
        self._post_elastic(lambda elastic: elastic.freed(rank, is_free=is_free))

    def _remove(self, action: RemoveNode) -> None:
        """End a machine; a request that fails is repeated by `Terminations`.

        While the ledger does not say whether this process may do that, it is asked again.
        """
        is_unknown = True
        while is_unknown and not self._closing.is_set():
            is_unknown = False
            try:
                self._machines.remove(action.rank, action.instance_id)
                self._cluster.remove_node(action.rank)
            except Exception as error:
                _log.debug("node %d could not be removed: %s", action.rank, error)
                is_unknown = isinstance(error, LedgerError) and not self._closing.wait(ASK_LEDGER_SECONDS)
        self._post_elastic(lambda elastic: elastic.removed(action.rank))


class _RecoveryView:
    """The state of machines and cluster, as `membership` needs it."""

    def __init__(self, machines: MachineControl, cluster: ClusterControl) -> None:
        self._machines = machines
        self._cluster = cluster

    @property
    def nodes(self) -> Sequence[Node]:
        return self._machines.lease.nodes

    def has(self, rank: int) -> bool:
        return self._cluster.has(rank)

    def missing(self, rank: int) -> Sequence[int]:
        return self._cluster.missing(rank)

    def has_ended(self, rank: int) -> bool:
        return self._machines.has_ended(rank)

    def is_connected(self, rank: int) -> bool:
        return self._machines.is_connected(rank)

    def last_words(self, rank: int) -> str:
        return self._machines.last_words(rank)

    def notices(self, rank: int) -> tuple[Notice, ...]:
        return self._machines.notices(rank)
