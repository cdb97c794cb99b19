"""The ranks of an elastic pool that come and go: a pure state machine beside `membership`, messages in and actions out.

It has no threads, no machines and no clock. `ScalingPolicy` says how many nodes there should be; this brings
the ranks there. `membership.Membership` watches the ranks that are nodes, and replaces those that are lost.

    absent ──wanted──▶ coming ──its workers have joined──▶ node ──too many──▶ draining ──at rest──▶ leaving ──▶ absent
                        ├──no machine is to be had, still wanted──▶ coming (tried again later)
                        └──not wanted any more──▶ absent
    draining ──wanted again──▶ node
    draining ──its node is lost──▶ leaving, or with calls that are bound to it: node (vacant, so it is replaced)

A node that is draining takes part in no new broadcast, and gets no more calls from any client. It leaves when it has no
call, no result in transit, and no value that another call may request. Then its workers end, and its machine after
them. The head (rank 0) never leaves. The highest rank leaves first, one that is vacant before all others.

While the head is away no change begins: nodes that come or leave continue when there is a head again.

The policy, facts in and a number out:

    least nodes ──calls wait for a slot, for `scale_up_after` seconds──▶ as many nodes as the queue fills, or `most`
        ▲                                                                  │
        └──────────── no call at all for `scale_down_after` seconds ───────┘

While the pool grows, the wait of the queue does not count: it begins again when the new nodes are there. After a
machine could not be had, the pool goes on with what it has, and rests before it grows again. A number that the user
has set (`fix`) replaces both rules.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from skyward_core.concurrency.backoff import Backoff
from skyward_core.engine.membership import (
    FIRST_PAUSE_SECONDS,
    HOLD_SECONDS,
    JOIN_ANEW_SECONDS,
    LATE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    LOOKS_AT_REST,
    REJOIN_SECONDS,
    AddNode,
    DrainNode,
    EmitMembershipEvent,
    Free,
    LeaveOut,
    Membership,
    MembershipAction,
    MembershipView,
    RemoveNode,
    Retire,
    TakeIn,
)
from skyward_core.errors import PoolClosed
from skyward_core.events.events import Error, NodesScaled

RESTS = Backoff(30.0, 600.0)
"""How long the pool does not grow, in seconds, after a machine could not be had."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the policy knows, at one moment: how many calls wait because all slots are taken, and whether any call of
    any client runs or waits.
    """

    waiting: int
    is_busy: bool


class ScalingPolicy:
    """Decides how many nodes there should be. One thread uses it; times are in seconds, on one clock.

    `slots` is how many calls one node runs at once; `nodes` is how many there are at first, by default the least.
    """

    def __init__(
        self,
        least: int,
        most: int,
        slots: int,
        scale_up_after: float = 30.0,
        scale_down_after: float = 300.0,
        nodes: int | None = None,
    ) -> None:
        self.least = least
        self.most = most
        self._slots = slots
        self._scale_up_after = scale_up_after
        self._scale_down_after = scale_down_after
        self._target = least if nodes is None else max(least, min(nodes, most))
        self._fixed: int | None = None
        self._waiting_since: float | None = None
        self._idle_since: float | None = None
        self._rest_until = -math.inf
        self._failures = 0
        self.reason = ""
        """Why the number has changed last."""

    @property
    def target(self) -> int:
        """How many nodes there should be, by the last decision."""
        return self._target if self._fixed is None else self._fixed

    @property
    def is_fixed(self) -> bool:
        """Whether the user has set the number."""
        return self._fixed is not None

    def fix(self, nodes: int | None) -> None:
        """Keep the pool at this number of nodes; None: decide again, from the present number on."""
        self._target = self.target
        self._fixed = nodes
        self._waiting_since = self._idle_since = None
        if nodes is not None:
            self.reason = "pool.scale()"

    def decide(self, now: float, nodes: int, load: Load) -> int:
        """Return how many nodes there should be; `nodes` take calls now."""
        is_waiting = load.waiting > 0 and nodes >= self._target
        self._waiting_since = None if not is_waiting else now if self._waiting_since is None else self._waiting_since
        self._idle_since = None if load.is_busy else now if self._idle_since is None else self._idle_since
        if self._fixed is not None:
            return self._fixed
        if self._waiting_since is not None and self._may_grow(now, self._waiting_since):
            wanted = min(self.most, self._target + math.ceil(load.waiting / self._slots))
            if wanted > self._target:
                self._change(wanted, f"{load.waiting} calls wait for a slot")
        elif self._target > self.least and self._may_shrink(now):
            self._change(self.least, f"no call for {self._scale_down_after:.0f} s")
        return self._target

    def not_grown(self, now: float) -> float | None:
        """A machine could not be had: go on with one less. Return how long the pool rests, in seconds; None if it rests
        already, because another one of the same growth could not be had.
        """
        if self._target > self.least:
            self._change(self._target - 1, "no machine was to be had")
        if now < self._rest_until:
            return None
        self._failures += 1
        seconds = RESTS.seconds(self._failures)
        self._rest_until = now + seconds
        return seconds

    def grown(self) -> None:
        """A new node takes calls: a later failure is the first one again."""
        self._failures = 0

    def _may_grow(self, now: float, waiting_since: float) -> bool:
        return now - waiting_since >= self._scale_up_after and now >= self._rest_until

    def _may_shrink(self, now: float) -> bool:
        return self._idle_since is not None and now - self._idle_since >= self._scale_down_after

    def _change(self, nodes: int, reason: str) -> None:
        self._target, self.reason = nodes, reason
        self._waiting_since = None


@dataclass(slots=True)
class _Coming:
    """A rank that is to get a node: whether a machine is being rented for it, or when that is tried again."""

    is_trying: bool = False
    try_at: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class _Draining:
    """A node that is to leave: since when it is at rest, and what has been requested.

    `bound` is how many calls can run nowhere else; None: not known yet. `is_asking`: a request is under way. `is_lost`:
    its node is gone. `retired_at` is when its workers were asked to end.
    """

    instance_id: str
    ask_at: float
    bound: int | None = None
    looks_at_rest: int = 0
    is_asking: bool = False
    is_wanted: bool = False
    is_lost: bool = False
    retired_at: float | None = None
    lost_by: float | None = None

    def join_anew(self, now: float) -> None:
        """There is a new head: the node has some time to join it, and gets calls from it until it is held again."""
        self.lost_by = now + JOIN_ANEW_SECONDS
        self.looks_at_rest, self.bound = 0, None


class ElasticRanks:
    """Brings the ranks of a pool to the number that the policy decides. One thread uses it."""

    def __init__(self, membership: Membership, policy: ScalingPolicy) -> None:
        self._membership = membership
        self._policy = policy
        self._actions: deque[MembershipAction] = deque()
        self._coming: dict[int, _Coming] = {}
        self._draining: dict[int, _Draining] = {}
        self._leaving: set[int] = set()
        """Ranks whose machine is being ended."""
        self._announced = policy.target
        self._had_head = True
        self._is_settled = False

    def next_action(self) -> MembershipAction | None:
        """Take the next action."""
        return self._actions.popleft() if self._actions else None

    @property
    def is_at_rest(self) -> bool:
        """Whether no rank comes or leaves at this moment."""
        return not (self._draining or self._leaving or any(one.is_trying for one in self._coming.values()))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def observe(self, now: float, load: Load) -> None:
        """Decide how many nodes there should be. A queue that waits for the head or a lost node lets nothing grow."""
        waiting = load.waiting if self._membership.has_head else 0
        self._policy.decide(now, len(self._membership.occupied), Load(waiting, load.is_busy))

    def fix(self, nodes: int | None) -> None:
        """Keep this number of nodes, which the user has set; None: decide again."""
        self._policy.fix(nodes)
        self._try_now()

    def settle(self, *, is_settled: bool) -> None:
        """With True, no more nodes come or leave, and those that are draining get calls again if their workers still
        run. False undoes it.
        """
        self._is_settled = is_settled
        if not is_settled:  # attempts that `settle` has ended need no pause
            self._try_now()

    def _try_now(self) -> None:
        for one in self._coming.values():
            one.try_at = 0.0

    def turn(self, now: float, view: MembershipView) -> None:
        """Look at the ranks and the clock."""
        if not self._membership.has_head:
            self._had_head = False
            return
        if not self._had_head:
            self._had_head = True
            for one in self._draining.values():
                one.join_anew(now)
        self._announce()
        self._adjust(now, view)
        for rank, one in list(self._draining.items()):
            self._drain(rank, one, now, view)
        for rank, one in self._coming.items():
            if not one.is_trying and now >= one.try_at:
                one.is_trying = True
                self._actions.append(AddNode(rank))

    def added(self, rank: int, failure: Exception | None, now: float) -> None:
        """An attempt to give a rank a node has ended."""
        one = self._coming[rank]
        one.is_trying = False
        if failure is None:
            del self._coming[rank]
            self._membership.admit(rank)
            self._policy.grown()
            self._actions.append(TakeIn(rank))
            return
        if isinstance(failure, PoolClosed):
            one.try_at = now + LONGEST_PAUSE_SECONDS
            return
        one.failures += 1
        pause = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).seconds(one.failures)
        one.try_at = now + pause
        rest = self._policy.not_grown(now)
        if rest is None and not self._policy.is_fixed:
            return
        seconds = pause if rest is None or self._policy.is_fixed else rest
        self._emit(
            Error(
                f"the pool cannot grow, and goes on with {_nodes(len(self._membership.ranks))}; it tries again in"
                f" {seconds:.0f} s at the earliest: {failure}"
            )
        )

    def drained(self, rank: int, instance_id: str, left: int | None, bound: int) -> None:
        """A node gets no more calls, and has `left` of them; None: it has not answered.

        `bound` is how many calls can run nowhere else.
        """
        if (one := self._draining_of(rank, instance_id)) is not None:
            one.is_asking = False
            one.looks_at_rest = 0 if left is None or left or bound else one.looks_at_rest + 1
            one.bound = bound if left is not None else None

    def freed(self, rank: int, *, is_free: bool) -> None:
        """The request to give a node calls again is answered."""
        if (one := self._draining.get(rank)) is not None:
            one.is_asking = False
            if is_free:
                self._take_back(rank)

    def retired(self, rank: int, instance_id: str, now: float, *, is_retired: bool) -> None:
        """The request to end a node's workers is over; `is_retired` is False if the node has not answered."""
        if (one := self._draining_of(rank, instance_id)) is not None:
            one.is_asking = False
            one.retired_at = now if is_retired else None

    def removed(self, rank: int) -> None:
        """The machine of a rank that has left is being ended by its provider."""
        self._leaving.discard(rank)

    # ── more or fewer nodes ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _kept(self) -> int:
        """How many nodes there are that are not to leave."""
        return len(self._membership.ranks) + sum(one.is_wanted for one in self._draining.values())

    @property
    def _size(self) -> int:
        """How many nodes there will be, if nothing fails."""
        return self._kept + len(self._coming)

    def _announce(self) -> None:
        before, self._announced = self._announced, self._policy.target
        if before != self._announced:
            self._emit(NodesScaled(self._announced, before, self._policy.reason))

    def _adjust(self, now: float, view: MembershipView) -> None:
        if self._is_settled:
            for rank in [rank for rank, one in self._coming.items() if not one.is_trying]:
                del self._coming[rank]
            for one in self._draining.values():
                one.is_wanted = True
            return
        target = self._policy.target
        while self._size > target and self._call_off():
            pass
        while self._kept > target and self._begin_to_drain(now, view):
            pass
        while self._size < target and (self._want_back() or self._begin_to_come()):
            pass

    def _call_off(self) -> bool:
        """Drop a rank that waits for its next try, or let a wanted one drain on."""
        for rank in sorted(self._coming, reverse=True):
            if not self._coming[rank].is_trying:
                del self._coming[rank]
                return True
        wanted = [one for one in self._draining.values() if one.is_wanted and not one.is_asking]
        for one in wanted[:1]:
            one.is_wanted = False
        return bool(wanted)

    def _begin_to_drain(self, now: float, view: MembershipView) -> bool:
        """Let the highest rank leave for which nothing else is under way, vacant ones first. The head never leaves."""
        ranks = sorted(self._membership.ranks - {0}, key=lambda rank: (not self._membership.is_vacant(rank), -rank))
        for rank in ranks:
            if not self._membership.part_with(rank):
                continue
            machine = next((node.instance.id for node in view.nodes if node.rank == rank), None)
            self._actions.append(LeaveOut(rank))
            self._draining[rank] = _Draining(machine or "", now)
            return True
        return False

    def _want_back(self) -> bool:
        """Keep a node that is draining, the lowest first, unless its workers were asked to end."""
        for _, one in sorted(self._draining.items()):
            if not one.is_wanted and one.retired_at is None and one.looks_at_rest < LOOKS_AT_REST:
                one.is_wanted = True
                return True
        return False

    def _begin_to_come(self) -> bool:
        """Let the lowest free rank come. There may be none below the most while nodes are leaving."""
        taken = self._membership.ranks | self._coming.keys() | self._draining.keys() | self._leaving
        rank = next((rank for rank in range(1, self._policy.most) if rank not in taken), None)
        if rank is not None:
            self._coming[rank] = _Coming()
        return rank is not None

    # ── one node leaves ──────────────────────────────────────────────────────────────────────────────────────────────

    def _drain(self, rank: int, one: _Draining, now: float, view: MembershipView) -> None:
        machine = next((node.instance.id for node in view.nodes if node.rank == rank), "")
        if not one.is_lost and (not machine or machine != one.instance_id):
            one.is_lost, one.bound = True, None
        elif not one.is_lost and not view.has(rank):
            self._miss(rank, one, now, view)
        if rank not in self._draining:
            return
        if one.is_lost and one.bound is not None:
            self._lose(rank, one, now, view)
        elif one.retired_at is not None and now > one.retired_at + LATE_SECONDS:
            self._remove(rank, one)
        elif not one.is_asking and now >= one.ask_at and one.retired_at is None and (one.is_lost or view.has(rank)):
            one.lost_by = None
            one.is_asking, one.ask_at = True, now + HOLD_SECONDS
            self._actions.append(self._next_request(rank, one))

    def _next_request(self, rank: int, one: _Draining) -> MembershipAction:
        if one.is_lost:
            return DrainNode(rank, one.instance_id)
        if one.is_wanted:
            return Free(rank)
        if one.looks_at_rest >= LOOKS_AT_REST:
            return Retire(rank, one.instance_id)
        return DrainNode(rank, one.instance_id)

    def _miss(self, rank: int, one: _Draining, now: float, view: MembershipView) -> None:
        """Its workers are away: they were asked to end, or the node is lost."""
        if one.retired_at is not None:
            self._remove(rank, one)
            return
        one.lost_by = now + REJOIN_SECONDS if one.lost_by is None else one.lost_by
        if now > one.lost_by or view.has_ended(rank):
            one.is_lost, one.bound, one.ask_at = True, None, now

    def _lose(self, rank: int, one: _Draining, now: float, view: MembershipView) -> None:
        """A node is lost before it could leave: calls that can run nowhere else need its replacement."""
        is_needed = one.bound or one.is_wanted
        if is_needed and view.has(rank):  # it has come back, or another machine has its place: it continues to drain
            there = next((node.instance.id for node in view.nodes if node.rank == rank), one.instance_id)
            self._draining[rank] = _Draining(there, now + HOLD_SECONDS, is_wanted=one.is_wanted)
            return
        if one.instance_id:
            self._membership.report_lost(
                one.instance_id, rank, "its worker has left the pool while it was draining", view
            )
        if is_needed:
            self._take_back(rank, lost_at=now)
        else:
            self._remove(rank, one)

    def _take_back(self, rank: int, lost_at: float | None = None) -> None:
        del self._draining[rank]
        self._membership.admit(rank, lost_at)
        self._actions.append(TakeIn(rank))

    def _remove(self, rank: int, one: _Draining) -> None:
        del self._draining[rank]
        self._leaving.add(rank)
        self._actions.append(RemoveNode(rank, one.instance_id))

    def _draining_of(self, rank: int, instance_id: str) -> _Draining | None:
        one = self._draining.get(rank)
        return one if one is not None and one.instance_id == instance_id else None

    def _emit(self, event: Error | NodesScaled) -> None:
        self._actions.append(EmitMembershipEvent(event))


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
