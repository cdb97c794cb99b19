"""Decides what a process that opens a pool by name does. Pure; `names.py` runs it in one transaction.

The states of a name, and what a kill between two writes leaves, are in docs/decisions/0028.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from skyward_core.errors import LedgerError
from skyward_core.ledger.rows import PoolEntry
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.work import NO_WORK, Work

SKEW_SECONDS = 120.0
"""How much the clock of a machine may differ from that of the server. Clients are written and judged by one clock, the
leases of pools are written by the clocks of machines.
"""


type Silent = tuple[str, datetime]
"""The id of a client, and the end of its lease as it was written last."""


class NotSteward(LedgerError):
    """Another process is the steward of the pool now: this one was silent for too long. Its calls go on."""


class Standing(StrEnum):
    """What a client is to the steward of its pool."""

    HELD = "this client is the steward"
    VACANT = "there is no steward, or it is dead: this client may become it"
    OTHER = "another client is the steward, or the pool is being opened or closed"
    GONE = "the pool has ended, the name has another one, or this client does not use it any more"


class NameState(StrEnum):
    """The state of the newest pool of a name."""

    OPENING = "opening"
    IN_USE = "in use"
    WARM = "warm"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class NamedPool:
    """The row of a name.

    `terms` are the settings that all clients must have in common, as JSON data. `steward` is the id of the client that
    opens, keeps or closes the pool; "" while there is none. `epoch` grows with each steward. `warm_until` is
    set in the state WARM.
    """

    name: str
    pool_id: str
    terms: Mapping[str, Any]
    state: NameState
    steward: str
    epoch: int
    keep_warm_seconds: float
    warm_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a client has of its pool.

    `calls` is how many of its calls run or wait. `idle_seconds` is for how long it has had none; None if that is not
    known.
    """

    calls: int = 0
    idle_seconds: float | None = None


NOTHING_USED = Usage()


@dataclass(frozen=True, slots=True)
class Activity:
    """The use of a named pool: living clients, their calls and the detached ones, and since when there is none.

    `idle_since` is None while a call runs or waits, and for a pool that has had no client.
    """

    users: int = 0
    calls: int = 0
    idle_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """A process that uses a named pool, or has used it.

    `calls` is how many of its calls run or wait, and `busy_at` when it had one last, both as it was recorded last.
    """

    id: str
    pool_id: str
    owner: Owner
    joined_at: datetime
    lease_expires_at: datetime
    left_at: datetime | None = None
    work: Work = NO_WORK
    calls: int = 0
    busy_at: datetime | None = None
    topic: str = ""
    """By what the pool's scheduler knows it; "" before its first call."""

    def lives(self, now: datetime, state: OwnerState) -> bool:
        """Return whether the process may still use the pool.

        It must renew its lease, also if this machine sees that it is there, because it may be stopped.
        """
        return self.left_at is None and state is not OwnerState.DEAD and self.lease_expires_at > now


@dataclass(frozen=True, slots=True)
class NameFacts:
    """What is known of a name in one transaction.

    `pool` is the ledger's entry of its pool; None before the opener has written it. `clients` are those of that pool.
    `states` has their owners; an owner that it lacks is UNKNOWN. `lease_skew_seconds` is for how long the lease of the
    pool counts beyond its end. `machine_now` is the time of this machine, if `now` is that of a server.
    """

    row: NamedPool
    pool: PoolEntry | None
    clients: Sequence[Client]
    now: datetime
    states: Mapping[Owner, OwnerState] = field(default_factory=dict[Owner, OwnerState])
    lease_skew_seconds: float = 0.0
    machine_now: datetime | None = None

    def living(self) -> list[Client]:
        """Return the clients that may still use the pool, in the order in which they came."""
        return [client for client in self.clients if client.lives(self.now, self.state(client.owner))]

    def state(self, owner: Owner) -> OwnerState:
        """Return whether a process lives."""
        return self.states.get(owner, OwnerState.UNKNOWN)

    def in_doubt(self) -> frozenset[Silent]:
        """Return the clients that are silent by the server's clock, and not by that of this machine.

        One of the two may have been set. Then clients that live have renewed their leases when one looks again.
        """
        if self.machine_now is None:
            return frozenset()
        return frozenset(
            (client.id, client.lease_expires_at)
            for client in self.clients
            if client.left_at is None
            and self.state(client.owner) is not OwnerState.DEAD
            and self.machine_now < client.lease_expires_at <= self.now
        )


@dataclass(frozen=True, slots=True)
class Rent:
    """The name belongs to the caller's pool now, and the caller rents.

    `dead_pool` is the pool that had the name and is condemned now, `why_dead` the reason; both are "" if none had it.
    """

    epoch: int
    dead_pool: str = ""
    why_dead: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """The caller is a client of this pool now, and attaches to it."""

    row: NamedPool


@dataclass(frozen=True, slots=True)
class Wait:
    """Another process opens or closes the pool just now: look again."""

    pool_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The name has a pool with other settings: for each field, that of the pool and that of the caller."""

    pool_id: str
    differences: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class LookAgain:
    """The pool cannot be used if these clients do not live, and that is in doubt (`NameFacts.in_doubt`): claim again,
    and name those that have not renewed their leases for long enough.
    """

    pool_id: str
    silent: frozenset[Silent]


type Claim = Rent | Join | Wait | Refused | LookAgain


def decide_claim(facts: NameFacts | None, terms: Mapping[str, Any], dead: Collection[Silent] = ()) -> Claim:
    """Return what a process that opens the name with these terms does. Without `facts` the name has no row.

    `dead`: clients in doubt that have not renewed these leases since the caller looked for the first time.
    """
    if facts is None:
        return Rent(1)
    row = facts.row
    if facts.pool is not None and facts.pool.ended_at is not None:
        return Rent(row.epoch + 1)
    if why := why_dead(facts):
        if silent := facts.in_doubt().difference(dead):
            return LookAgain(row.pool_id, silent)
        return Rent(row.epoch + 1, row.pool_id, why)
    if row.state is NameState.OPENING:
        return Wait(row.pool_id, "another process opens it")
    if row.state is NameState.CLOSING:
        return Wait(row.pool_id, "another process closes it")
    if found := differences(row.terms, terms):
        return Refused(row.pool_id, found)
    return Join(row)


def why_dead(facts: NameFacts) -> str:
    """Return why the pool of a name cannot be used any more, while no process ends it; "" if it can."""
    row, pool = facts.row, facts.pool
    living = {client.id for client in facts.living()}
    if row.state in {NameState.OPENING, NameState.CLOSING}:
        verb = "opened" if row.state is NameState.OPENING else "closed"
        fate = "is dead, or does not renew its lease" if row.steward else "has given up"
        return "" if row.steward in living else f"the process that {verb} it {fate}"
    if pool is None:
        return "the ledger has no entry of it"
    if pool.condemned_at is not None:
        return "a sweep has condemned it"
    if row.state is NameState.WARM and row.warm_until is not None and row.warm_until <= facts.now and not living:
        return "its warm time is over"
    if _has_run_out(facts, pool) and not living:
        return "its lease has run out"
    return ""


def may_be_condemned(facts: NameFacts, client_id: str) -> bool:
    """Return whether a pool that a client could not reach is condemned.

    It is condemned if no other client may still use it, or if its lease has expired: a process that reaches its nodes
    renews that lease.
    """
    if facts.in_doubt():
        return False
    return is_last(facts, client_id) or (facts.pool is not None and _has_run_out(facts, facts.pool))


def _has_run_out(facts: NameFacts, pool: PoolEntry) -> bool:
    return pool.lease_expires_at + timedelta(seconds=facts.lease_skew_seconds) <= facts.now


def standing(facts: NameFacts | None, client_id: str) -> Standing:
    """Return what a client is to the steward of its pool.

    `facts` needs to have this client and the steward only.
    """
    own = None if facts is None else next((client for client in facts.clients if client.id == client_id), None)
    if facts is None or own is None or own.left_at is not None or own.pool_id != facts.row.pool_id:
        return Standing.GONE
    if facts.pool is not None and (facts.pool.ended_at is not None or facts.pool.condemned_at is not None):
        return Standing.GONE
    if facts.row.steward == client_id:
        return Standing.HELD
    if facts.pool is None:
        return Standing.GONE
    living = {client.id for client in facts.living()}
    is_vacant = facts.row.state is NameState.IN_USE and facts.row.steward not in living and client_id in living
    return Standing.VACANT if is_vacant else Standing.OTHER


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which the terms of a pool differ from the caller's, with both values."""
    return {
        name: (theirs.get(name), ours.get(name))
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    }


def is_last(facts: NameFacts, client_id: str) -> bool:
    """Return whether no other client may still use the pool."""
    return all(client.id == client_id for client in facts.living())


def may_come_back(facts: NameFacts, client_id: str, silent_seconds: float) -> bool:
    """Return whether a client is the last one only as far as the ledger knows: the row of another one has run out in
    the last `silent_seconds`, in which it could not be renewed, and may be renewed again.
    """
    since = facts.now - timedelta(seconds=silent_seconds)
    uses = {client.id: client for client in facts.clients if client.left_at is None}
    return (
        client_id in uses
        and is_last(facts, client_id)
        and any(
            client.id != client_id
            and client.lease_expires_at > since
            and facts.state(client.owner) is not OwnerState.DEAD
            for client in uses.values()
        )
    )


def is_earlier_attempt(theirs: Work, ours: Work) -> bool:
    """Return whether both are attempts of the same work of a run, and theirs is the earlier one."""
    is_same = replace(theirs, attempt="") == replace(ours, attempt="") and bool(ours.run and ours.task)
    numbers = theirs.attempt, ours.attempt
    return (
        is_same
        and all(number.isascii() and number.isdecimal() for number in numbers)
        and int(numbers[0]) < int(numbers[1])
    )


def ended_by(client: Client, facts: NameFacts) -> list[Client]:
    """Return the clients of a pool whose calls another client ends: earlier attempts of its work, and processes that
    are seen to be dead.
    """
    return [
        other
        for other in facts.clients
        if other.id != client.id
        and other.left_at is None
        and (is_earlier_attempt(other.work, client.work) or facts.state(other.owner) is OwnerState.DEAD)
    ]


def silent_clients(client: Client, facts: NameFacts) -> list[Client]:
    """Return the other clients of a pool that have not left it and do not live: what their calls have held is asked of
    the nodes before the pool ends.
    """
    living = {one.id for one in facts.living()}
    return [one for one in facts.clients if one.id not in {client.id, *living} and one.left_at is None]


def warm_end(facts: NameFacts, most_seconds: float) -> datetime:
    """Return until when a pool is warm that its last client leaves now: for `keep_warm` seconds, unless its nodes end
    earlier by another of their clocks, or are paid for `most_seconds` only.
    """
    limits = [facts.row.keep_warm_seconds, most_seconds]
    if (timeout := facts.row.terms.get("timeout")) is not None:
        limits.append(float(timeout))
    if (lifetime := facts.row.terms.get("max_lifetime")) is not None and facts.pool is not None:
        limits.append(float(lifetime) - (facts.now - facts.pool.created_at).total_seconds())
    return facts.now + timedelta(seconds=max(0.0, min(limits)))


def may_be_kept_warm(facts: NameFacts) -> bool:
    """Return whether the pool of a name is there, and is not being closed: its warm time can be changed."""
    pool = facts.pool
    has_ended = pool is not None and (pool.ended_at is not None or pool.condemned_at is not None)
    return not has_ended and facts.row.state is not NameState.CLOSING and not why_dead(facts)
