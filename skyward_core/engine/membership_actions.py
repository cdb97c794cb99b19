"""The actions that `membership.Membership` requests; `recovery.Recovery` does them and reports the outcomes.

The actions of the dispatcher are in `actions.py`. Both modules have values of the same form. No action belongs to both,
because they concern different objects: nodes here, messages and calls there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyward_core.errors import NodeLost
from skyward_core.events.events import SkywardEvent
from skyward_core.machines.instances import Instance, Node


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
