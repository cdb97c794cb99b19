"""The nodes of an open pool, and how lost ones are replaced: a pure state machine, messages in and actions out.

It has no threads, no machines and no clock. Each message brings the time, `MembershipView` shows the present state, and
`recovery.Recovery` does the actions and reports their outcomes. One thread calls it.

States of a node, by rank. `turn` moves it on, by the present members and not by messages about them:

    joined ──gone──▶ away ──there again──▶ joined
                      └──REJOIN_SECONDS, or it has ended──▶ vacant ──replaced──▶ joined
                                                             └──not to be had──▶ vacant (tried again later)

    joined ──its machine is to be taken back──▶ leaving ──gone, or retired──▶ vacant

A node that is leaving gets no more calls, and another machine is prepared to replace it. The node is retired when that
machine is ready and its last call has ended, or when its time is up. Then its workers end, their calls are lost, and
the prepared machine takes over the rank. If a restart of the cluster has already filled the rank, the prepared machine
is dismissed. All other cases (the machine goes early, no machine is available, the head is lost) are ordinary losses.
The head does not leave: its notice is emitted, and it is replaced when it is lost.

The head: connected ──cut──▶ silent ──it answers──▶ connected
                              └──gone, ended, dead, or silent for too long──▶ lost ──restart──▶ connected
                                                                               └──not to be had──▶ lost (tried again
                                                                               later) ──▶ given up

The head is gone if the provider says so, ended if it has said so itself, and dead if its machine says so: the
supervisor's process does not exist any more.

It is silent for too long after HEAD_PATIENCE_SECONDS, or half the lease if that is less, while another node answers. If
no node answers, probably this client is cut off and all nodes live: then it waits for the whole lease, after which the
head ends in any case.

If the head's scheduler answers but its workers are absent (frozen), its supervisor kills and restarts them. If they do
not return within HEAD_WORKERS_SECONDS, the head is lost.

A restart asks all nodes at once whether they live. The first that lives becomes the head. If none lives and machines
answer that their processes have died, as many machines are rented, all at once; otherwise one is rented for the head.
Dead machines are released in both cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import NodeLost, PoolClosed
from skyward_core.events.events import (
    ClusterRestarting,
    Error,
    InstanceLost,
    PoolReady,
    PreemptionNoticed,
    RebalanceRecommended,
    SkywardEvent,
)
from skyward_core.machines.instances import Instance, Lease, Node
from skyward_core.wire.info import Kind, Notice

REJOIN_SECONDS = 2.0  # a worker process that has crashed is back within one second
RESTART_WORKERS_SECONDS, RESTART_WORKERS_AGAIN_SECONDS = (
    2.0,
    10.0,
)  # added to REJOIN_SECONDS and the 14 s after which the scheduler removes a silent worker: less than 20 s in total
HEAD_WORKERS_SECONDS = 60.0  # a supervisor that has not restarted them in this time does not do it later
HEAD_PATIENCE_SECONDS = 45.0  # a connection that was cut for 30 s, and the attempts to reconnect
# in a row without a machine before it counts as gone, in a cloud; one listing is enough for processes of this machine
LISTINGS = 2
ASK_SECONDS = 2.0
JOIN_ANEW_SECONDS = 30.0  # for a node to join a new head
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
HOPELESS_SECONDS = 300.0
HOLD_SECONDS = 1.0
LOOKS_AT_REST = 2  # in a row without a call: then the messages of the last call have arrived
LATE_SECONDS = 5.0  # how long a machine may outlive the time of its notice
DIED = "its processes have died"
ANNOUNCED = "its provider had announced to take its machine back (spot notice)"


# ── actions, which `recovery.Recovery` does ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EmitMembershipEvent:
    """Emit an event."""

    event: SkywardEvent


@dataclass(frozen=True, slots=True)
class AskHead:
    """Ask whether the silent head lives, and whether its provider lists it; then `answered`."""

    head: Instance
    since: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Connect to the same head again, in this thread; `resumed` if it answers."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the cluster, in this thread; then `restarted` or `not_restarted`. `before`: its nodes so far."""

    before: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class RestartWorkers:
    """Let a node restart these workers."""

    rank: int
    workers: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReplaceNode:
    """Fill a vacant rank with a machine; then `replaced`."""

    rank: int


@dataclass(frozen=True, slots=True)
class StandBy:
    """Prepare a machine that will replace one that is leaving; then `relieved`."""

    rank: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Release the machine that stands by for this rank, which has a node again."""

    rank: int


@dataclass(frozen=True, slots=True)
class HoldNode:
    """Give a node no more calls; then `held`."""

    rank: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Let a node end its workers, without a restart; then `retired`."""

    rank: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class AddNode:
    """Fill a rank that the pool has not had yet with a machine; then `added`."""

    rank: int


@dataclass(frozen=True, slots=True)
class TakeIn:
    """Let broadcasts use this rank from now on."""

    rank: int


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Let no more broadcasts use this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Give a node no more calls, once no broadcast waits for it; then `drained`."""

    rank: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class Free:
    """Give a held node calls again; then `freed`."""

    rank: int


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """End the machine of a node whose workers have ended; then `removed`."""

    rank: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Let the calls that wait for a node of this rank raise, or (None) all calls."""

    error: NodeLost
    rank: int | None = None


type MembershipAction = (
    EmitMembershipEvent
    | AskHead
    | Resume
    | Restart
    | RestartWorkers
    | ReplaceNode
    | StandBy
    | Dismiss
    | HoldNode
    | Retire
    | AddNode
    | TakeIn
    | LeaveOut
    | DrainNode
    | Free
    | RemoveNode
    | GiveUp
)


class MembershipView(Protocol):
    """Shows the present state. Its methods change nothing."""

    @property
    def nodes(self) -> Sequence[Node]: ...
    def has(self, rank: int) -> bool: ...
    def missing(self, rank: int) -> Sequence[int]: ...
    def has_ended(self, rank: int) -> bool: ...
    def is_connected(self, rank: int) -> bool: ...
    def last_words(self, rank: int) -> str: ...
    def notices(self, rank: int) -> tuple[Notice, ...]: ...


@dataclass(frozen=True, slots=True)
class Survivors:
    """The nodes after a loss of the head, by id: those that may become the head, and those whose machines answer that
    their processes have died.
    """

    heirs: tuple[str, ...]
    dead: tuple[str, ...]


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Retry:
    """Something that is tried until it succeeds: since when, when next, and how often it has failed."""

    since: float
    try_at: float
    failures: int = 0
    is_trying: bool = False

    def put_off(self, now: float) -> None:
        """It has failed: try again later."""
        self.failures += 1
        self.try_at = now + Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).seconds(self.failures)


@dataclass(slots=True)
class _SilentHead:
    """The head cannot be reached: since when, and in how many listings in a row its provider did not have it.

    `alone_since` is when it fell silent, or when last no other node answered either. `is_dead`: its machine answers
    that its processes have died.
    """

    since: float
    alone_since: float
    head: Instance | None
    ask_at: float
    is_asking: bool = False
    is_dead: bool = False
    misses: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether enough listings are without the machine: a cloud may omit a machine once."""
        return self.head is not None and self.misses >= (1 if self.head.endpoint is None else LISTINGS)


@dataclass(slots=True)
class _Lost:
    """The head is lost. `trouble` is the last error of a restart."""

    retry: _Retry
    trouble: Exception | None = None


@dataclass(slots=True)
class _Leaving:
    """A node whose machine is to be taken back when the clock says `due`: the state of its replacement and of its
    calls.
    """

    instance_id: str
    due: float
    relief: _Retry
    hold_at: float
    is_relieved: bool = False
    is_asking: bool = False
    looks_at_rest: int = 0
    is_retired: bool = False


class Membership:
    """The states of all ranks of a pool and of its head.

    Messages may add actions, which `next_action` returns in their order.
    """

    def __init__(self, nodes: int | Iterable[int], lease_seconds: float) -> None:
        """`nodes`: how many there are, or their ranks."""
        self._ranks = set(range(nodes) if isinstance(nodes, int) else nodes)
        """The ranks that are to have a node: those that are lost are replaced."""
        self._lease_seconds = lease_seconds
        self._patience = min(HEAD_PATIENCE_SECONDS, lease_seconds / 2)
        self._actions: deque[MembershipAction] = deque()
        self._lost_by: dict[int, float] = {}
        """By rank: when a node that is away counts as lost."""
        self._restart_workers_at = 0.0
        self._vacant: dict[int, _Retry] = {}
        self._head: _SilentHead | _Lost | None = None
        self._reported_lost: set[str] = set()
        self._reported_notices: set[tuple[str, Kind]] = set()
        self._due: dict[str, float] = {}
        """When machines are to be taken back, once the notice was emitted."""
        self._leaving: dict[int, _Leaving] = {}
        self._relieving: set[int] = set()
        """Ranks for which a machine is being prepared to stand by."""
        self._standing_by: set[int] = set()
        """Ranks for which a machine stands by."""
        self._has_given_up = False

    def next_action(self) -> MembershipAction | None:
        """Take the next action."""
        return self._actions.popleft() if self._actions else None

    @property
    def has_head(self) -> bool:
        """Whether the head is neither silent nor lost."""
        return self._head is None

    # ── ranks that come and go (`elastic`) ───────────────────────────────────────────────────────────────────────────

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that are to have a node."""
        return frozenset(self._ranks)

    @property
    def occupied(self) -> frozenset[int]:
        """The ranks whose node is not lost."""
        return frozenset(self._ranks - self._vacant.keys())

    def admit(self, rank: int, lost_at: float | None = None) -> None:
        """Watch this rank from now on: its node is replaced when it is lost. `lost_at`: the time at which it was
        lost.
        """
        self._ranks.add(rank)
        if lost_at is not None:
            self._vacant[rank] = _Retry(lost_at, lost_at)

    def report_lost(self, instance_id: str, rank: int, reason: str, view: MembershipView) -> None:
        """Emit that the node of a rank is lost, with its last words; once for each instance."""
        if instance_id in self._reported_lost:
            return
        self._reported_lost.add(instance_id)
        words = view.last_words(rank)
        text = f"{reason} ({words})" if words else reason
        self._emit(InstanceLost(instance_id, rank, f"{text}; {ANNOUNCED}" if instance_id in self._due else text))

    def is_vacant(self, rank: int) -> bool:
        """Return whether the node of this rank is lost, and not replaced yet."""
        return rank in self._vacant

    def part_with(self, rank: int) -> bool:
        """Stop watching this rank. Does nothing and returns False while its node is being replaced or taken back."""
        vacancy = self._vacant.get(rank)
        is_busy = (vacancy is not None and vacancy.is_trying) or rank in self._leaving
        if is_busy or rank in self._relieving or rank in self._standing_by:
            return False
        self._ranks.discard(rank)
        self._vacant.pop(rank, None)
        self._lost_by.pop(rank, None)
        return True

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, now: float, view: MembershipView, *, is_cut: bool = False) -> None:
        """Look at the head, the members and the clock.

        `is_cut`: the connection to the scheduler was lost since the last turn.
        """
        if self._has_given_up:
            return
        if is_cut and self._head is None:
            self._head = _SilentHead(now, now, _instance_of(0, view), now)
        if isinstance(self._head, _SilentHead):
            self._await_head(self._head, now, view)
        if isinstance(self._head, _Lost) and now >= self._head.retry.try_at:
            self._restart(self._head, view)
        if self._head is None:
            self._check_nodes(now, view)
            self._check_notices(now, view)
            self._dismiss()
            self._fill(now)

    def replaced(self, rank: int, failure: Exception | None, now: float) -> None:
        """An attempt to replace a node has ended."""
        vacancy = self._vacant[rank]
        vacancy.is_trying = False
        if failure is None:
            del self._vacant[rank]
            return
        if self._has_given_up or isinstance(failure, PoolClosed):
            return
        self._emit(Error(f"node {rank} is not replaced yet: {failure}"))
        self._actions.append(GiveUp(_lost(f"node {rank} is lost and not replaced: {failure}", failure), rank))
        vacancy.put_off(now)  # without a limit: while the head lives its workers work, and without them it is lost

    def relieved(self, rank: int, instance_id: str, failure: Exception | None, now: float) -> None:
        """An attempt to prepare a machine that stands by has ended."""
        self._relieving.discard(rank)
        if failure is None:
            self._standing_by.add(rank)
        leaving = self._leaving_of(rank, instance_id)
        if leaving is not None:
            leaving.is_relieved = failure is None
        if failure is None or self._has_given_up or isinstance(failure, PoolClosed):
            return
        self._emit(Error(f"no machine stands by yet for node {rank}, whose machine is to be taken back: {failure}"))
        if leaving is not None:
            leaving.relief.put_off(now)

    def held(self, rank: int, instance_id: str, left: int) -> None:
        """A node gets no more calls, and has this many left."""
        if (leaving := self._leaving_of(rank, instance_id)) is not None:
            leaving.is_asking = False
            leaving.looks_at_rest = 0 if left else leaving.looks_at_rest + 1

    def retired(self, rank: int, instance_id: str, *, is_retired: bool) -> None:
        """The request to end a node's workers is over; `is_retired` is False if the node has not answered."""
        if (leaving := self._leaving_of(rank, instance_id)) is not None:
            leaving.is_asking, leaving.is_retired = False, is_retired

    def answered(self, since: float, *, is_dead: bool, is_listed: bool | None) -> None:
        """The requests about a head that is silent since this time are answered.

        `is_listed` None: its provider has not answered.
        """
        silence = self._head
        if not isinstance(silence, _SilentHead) or silence.since != since:
            return
        silence.is_asking, silence.is_dead = False, is_dead
        if is_listed is not None:
            silence.misses = 0 if is_listed else silence.misses + 1

    def resumed(self) -> None:
        """The head answers again."""
        self._head = None
        self._lost_by.clear()  # nodes that are away have the whole time to come back

    def survivors(self, nodes: Sequence[Node], answers: Mapping[int, bool], view: MembershipView) -> Survivors:
        """Return the nodes that may become the head, by the nodes' answers to whether they live.

        A node that does not answer counts as living only if no node answers, neither yes nor no: a useless wait for it
        takes long.
        """
        dead = tuple(node.instance.id for node in nodes if answers.get(node.rank) is False)
        fit = [node for node in nodes if node.rank and node.rank not in self._leaving and not view.has_ended(node.rank)]
        heirs = [node for node in fit if answers.get(node.rank) is True]
        if not heirs and not dead:
            heirs = [node for node in fit if view.is_connected(node.rank)]
        return Survivors(tuple(node.instance.id for node in heirs), dead)

    def restarted(self, before: Sequence[Node], dead: Collection[str], lease: Lease, slots: int, now: float) -> None:
        """The cluster is up again.

        Ranks that are vacant in the lease are to be replaced; the other nodes have some time to join the new head.
        """
        since = self._head.retry.since if isinstance(self._head, _Lost) else now
        self._head = None
        there = {node.rank for node in lease.nodes}
        self._lost_by = {rank: now + JOIN_ANEW_SECONDS for rank in self._ranks if rank in there}
        for rank in sorted(self._ranks):
            if rank not in there:
                self._vacant.setdefault(rank, _Retry(now, now))
        self._emit(PoolReady(lease.pool_id, len(lease.nodes), slots, now - since))
        self._emit_dropped(before, dead, lease.nodes)

    def not_restarted(
        self, before: Sequence[Node], dead: Collection[str], error: Exception, view: MembershipView, now: float
    ) -> None:
        """The cluster could not be restarted."""
        if isinstance(lost := self._head, _Lost):
            self._emit(Error(f"the cluster could not be restarted yet: {error}"))
            # then no more machines are rented: they would have no work
            if now - lost.retry.since > HOPELESS_SECONDS:
                self._has_given_up = True
                self._actions.append(
                    GiveUp(
                        _lost(f"the head of the pool is lost, and the cluster could not be restarted: {error}", error)
                    )
                )
            lost.trouble = error
            lost.retry.put_off(now)
        self._emit_dropped(before, dead, view.nodes)

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_nodes(self, now: float, view: MembershipView) -> None:
        """Compare the present nodes with those that should be there."""
        for rank in sorted(self._ranks):
            if rank in self._vacant:
                continue
            if view.has(rank):
                self._lost_by.pop(rank, None)
                continue
            lost_by = self._lost_by.setdefault(rank, now + REJOIN_SECONDS)
            leaving = self._leaving.get(rank)
            is_retired = leaving is not None and leaving.is_retired
            if rank == 0:  # the head is lost with its scheduler, and that answers
                self._check_workers_of_head(now - lost_by, now, view)
            elif now > lost_by or is_retired or view.has_ended(rank):
                del self._lost_by[rank]
                self._leaving.pop(rank, None)
                self._emit_lost(rank, "it was retired" if is_retired else "its worker has left the pool", view)
                self._vacant[rank] = _Retry(now, now)

    def _check_workers_of_head(self, overdue_seconds: float, now: float, view: MembershipView) -> None:
        """Workers of the head are away: restart them after a while, since a frozen worker is not dead.

        Later the head is lost.
        """
        if overdue_seconds > HEAD_WORKERS_SECONDS:
            self._lose_head(
                f"its scheduler answers, but its workers have stayed away for {overdue_seconds:.0f} s", now, view
            )
        elif overdue_seconds > RESTART_WORKERS_SECONDS and now >= self._restart_workers_at:
            self._restart_workers_at = now + RESTART_WORKERS_AGAIN_SECONDS
            self._emit(
                Error(
                    "the scheduler of node 0 answers, but its workers stay away: they are killed and restarted",
                    _id_of(0, view),
                )
            )
            self._actions.append(RestartWorkers(0, view.missing(0)))

    def _fill(self, now: float) -> None:
        """Begin to replace lost nodes."""
        for rank, vacancy in self._vacant.items():
            if not vacancy.is_trying and now >= vacancy.try_at and rank not in self._relieving:
                vacancy.is_trying = True
                self._standing_by.discard(rank)  # the replacement uses that machine
                self._actions.append(ReplaceNode(rank))

    def _dismiss(self) -> None:
        """Release machines that stand by for ranks which a restart of the cluster has filled."""
        for rank in sorted(self._standing_by - self._leaving.keys() - self._vacant.keys()):
            self._standing_by.discard(rank)
            self._actions.append(Dismiss(rank))

    # ── nodes whose machines are to be taken back ────────────────────────────────────────────────────────────────────

    def _check_notices(self, now: float, view: MembershipView) -> None:
        """Take in the notices of machines, and go on with the nodes that are leaving."""
        for rank in sorted(self._ranks):
            if rank not in self._vacant and view.has(rank):
                for notice in view.notices(rank):
                    self._take_notice(rank, notice, now, view)
        for rank, leaving in list(self._leaving.items()):
            if _id_of(rank, view) != leaving.instance_id:
                del self._leaving[rank]
            else:
                self._relieve(rank, leaving, now)
                self._hold_or_retire(rank, leaving, now)

    def _take_notice(self, rank: int, notice: Notice, now: float, view: MembershipView) -> None:
        """Emit a notice, once for each machine. From then on its node is leaving, also if it was away in between."""
        machine = _id_of(rank, view)
        if machine is None:
            return
        is_new = (machine, notice.kind) not in self._reported_notices
        self._reported_notices.add((machine, notice.kind))
        if notice.kind is Kind.REBALANCE:
            if is_new:
                self._emit(RebalanceRecommended(machine, rank, notice.at))
            return
        if is_new:
            self._due[machine] = now + notice.seconds_left
            self._emit(PreemptionNoticed(machine, rank, notice.action, notice.at, notice.seconds_left))
        if rank and rank not in self._leaving:
            self._leaving[rank] = _Leaving(machine, self._due[machine], _Retry(now, now), now)

    def _relieve(self, rank: int, leaving: _Leaving, now: float) -> None:
        """Prepare a machine that stands by; not again when no time is left for it."""
        if not leaving.is_relieved and rank not in self._relieving and leaving.relief.try_at <= now <= leaving.due:
            self._relieving.add(rank)
            self._actions.append(StandBy(rank, leaving.instance_id))

    def _hold_or_retire(self, rank: int, leaving: _Leaving, now: float) -> None:
        """Give a node no more calls, and later retire it.

        Repeated every HOLD_SECONDS: a worker that joins again is free.
        """
        if leaving.is_retired or leaving.is_asking or now < leaving.hold_at:
            return
        leaving.is_asking, leaving.hold_at = True, now + HOLD_SECONDS
        leaving.is_retired = now > leaving.due + LATE_SECONDS or (
            leaving.is_relieved and leaving.looks_at_rest >= LOOKS_AT_REST
        )
        self._actions.append((Retire if leaving.is_retired else HoldNode)(rank, leaving.instance_id))

    def _leaving_of(self, rank: int, instance_id: str) -> _Leaving | None:
        leaving = self._leaving.get(rank)
        return leaving if leaving is not None and leaving.instance_id == instance_id else None

    # ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _await_head(self, silence: _SilentHead, now: float, view: MembershipView) -> None:
        """The scheduler is out of reach: wait for it while the head may live."""
        if not silence.is_asking and now >= silence.ask_at and silence.head is not None:
            silence.is_asking, silence.ask_at = True, now + ASK_SECONDS
            self._actions.append(AskHead(silence.head, silence.since))
        if reason := self._why_lost(silence, now, view):
            self._lose_head(reason, now, view)
        elif view.is_connected(0):
            self._actions.append(Resume())

    def _why_lost(self, silence: _SilentHead, now: float, view: MembershipView) -> str:
        # Nodes that fell silent with the head count as answering until their connection is known to be gone.
        if not any(view.is_connected(node.rank) for node in view.nodes):
            silence.alone_since = now
        silent_seconds = now - silence.since
        is_too_long = now - silence.alone_since > self._patience or silent_seconds > self._lease_seconds
        if view.has_ended(0):
            return "it has ended"
        if silence.is_dead:
            return DIED
        if silence.is_gone:
            return "its provider lists it no more"
        return f"it has been silent for {silent_seconds:.0f} s" if is_too_long else ""

    def _lose_head(self, reason: str, now: float, view: MembershipView) -> None:
        self._emit_lost(0, reason, view)
        self._emit(ClusterRestarting(reason))
        self._head = _Lost(_Retry(now, now))

    def _restart(self, lost: _Lost, view: MembershipView) -> None:
        """Try to restart the cluster with another head."""
        if lost.trouble is not None:  # `PoolMachines.restart` releases the machine that was to be the head
            self._emit_lost(0, f"the cluster did not come up on it: {lost.trouble}", view)
        ranks = self._ranks - self._vacant.keys()
        self._actions.append(Restart(tuple(node for node in view.nodes if node.rank in ranks)))

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _emit(self, event: SkywardEvent) -> None:
        self._actions.append(EmitMembershipEvent(event))

    def _emit_lost(self, rank: int, reason: str, view: MembershipView) -> None:
        if (machine := _id_of(rank, view)) is not None:
            self.report_lost(machine, rank, reason, view)

    def _emit_dropped(self, before: Sequence[Node], dead: Collection[str], there: Sequence[Node]) -> None:
        """Emit the loss of nodes during a restart of the cluster."""
        left = {node.instance.id for node in there}
        for node in before:
            if node.instance.id not in left | self._reported_lost:
                self._reported_lost.add(node.instance.id)
                self._emit(
                    InstanceLost(
                        node.instance.id,
                        node.rank,
                        DIED if node.instance.id in dead else "it did not get the address of the new head",
                    )
                )


def _instance_of(rank: int, view: MembershipView) -> Instance | None:
    return next((node.instance for node in view.nodes if node.rank == rank), None)


def _id_of(rank: int, view: MembershipView) -> str | None:
    instance = _instance_of(rank, view)
    return instance.id if instance is not None else None


def _lost(message: str, cause: BaseException) -> NodeLost:
    error = NodeLost(message)
    error.__cause__ = cause
    return error
