"""Who may end what: from what the ledger says and a provider lists, what is to be done with each pool. Pure; `sweep.py`
does it.

Proof is asked for, never its absence: a machine is ended only where its pool, or the process that its tags name, is
known to be dead; an entry is closed only when a listing that must show its machine does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from skyward_core.errors import CredentialsError
from skyward_core.ledger.rows import Bucket, Intent, PoolEntry, ResourceKind
from skyward_core.machines.instances import Instance
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, LAUNCH_TAG, OWNER_TAG, PROCESS_TAG, RANK_TAG, Provider

IN_FLIGHT_SECONDS = 10.0
"""How long a creating call may still be at work after its caller was killed."""
BOOT_SECONDS = 1800.0
"""How long a machine may take to come up; before that nothing on it counts its lease."""


class Action(StrEnum):
    """What a sweep does with what it has found."""

    END = "end"  # machines of a dead pool
    CLOSE = "close"  # entries of a dead pool whose machines are not there
    ADOPT = "adopt"  # machines of a live pool that its entries do not name yet
    WAIT = "wait"  # of a dead pool, and asked for so recently that no listing need show it: the next sweep looks again
    LEAVE = "leave"  # of a live pool, or somebody else's


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be done with resources of one pool, and why.

    `resource_ids` are ids of machines, or names where nothing has an id yet.
    """

    action: Action
    pool_id: str
    provider: str
    resource_ids: tuple[str, ...]
    reason: str
    intents: tuple[int, ...] = ()
    """The ledger's entries that it is about; of ADOPT, one for each machine."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known of one provider's pools and machines. `pools` are the ledger's, `intents` those of them that are
    open, read before `machines` were listed.

    `states` tells of every owner, of entries and of tags, whether it lives; who is not in it, is UNKNOWN. `here` is who
    asks. `of_others` are the pools of the ledger whose machines it says are another account's, each with why these
    credentials are not the right ones: what they list of them may be ended, but what they do not list says nothing.
    """

    provider: Provider
    machines: Sequence[Instance]
    pools: Mapping[str, PoolEntry]
    intents: Sequence[Intent]
    now: datetime
    here: Owner
    states: Mapping[Owner, OwnerState] = field(default_factory=dict[Owner, OwnerState])
    of_others: Mapping[str, tuple[PoolEntry, str]] = field(default_factory=dict[str, tuple[PoolEntry, str]])

    def state(self, owner: Owner) -> OwnerState:
        """Tell whether an owner lives."""
        return self.states.get(owner, OwnerState.UNKNOWN)


def judge(scene: Scene, *, min_age_seconds: float = 0.0, include_unknown: bool = False) -> list[Finding]:
    """Return what is to be done, pool by pool.

    Args:
        scene: what is known.
        min_age_seconds: a machine that the ledger does not know is left until it is older than that.
        include_unknown: end machines too that nobody here can tell anything of, but that their owner may still count
            on.
    """
    machines, intents = _by_pool(scene.machines), _by_pool(scene.intents)
    findings: list[Finding] = []
    for pool_id in sorted({*scene.pools, *machines}):
        entry = scene.pools.get(pool_id)
        if pool_id in scene.of_others:
            findings.append(_judge_other(scene, *scene.of_others[pool_id], machines[pool_id]))
        elif entry is None:
            findings.append(
                _judge_stranger(scene, pool_id, machines[pool_id], min_age_seconds, include_unknown=include_unknown)
            )
        elif why := entry.why_dead(scene.now, scene.state(entry.owner)):
            findings += _judge_dead(scene, entry, why, machines[pool_id], intents[pool_id])
        else:
            findings += _judge_live(scene, entry, machines[pool_id], intents[pool_id])
    return findings


def answers(machines: Iterable[Instance], entries: Iterable[Intent]) -> dict[str, Intent]:
    """Return, by the ids of machines, the entries without an id that they are the answers to, as far as that is
    certain.

    By the launch and the rank in its tags; by its rank alone only where the provider has lost the launch, and only one
    open entry has that rank. Two machines may be answers to one entry: a call that was tried again can have created
    both.
    """
    unbound = [intent for intent in entries if intent.cloud_id is None]
    by_launch = {(intent.tags.get(LAUNCH_TAG), intent.tags.get(RANK_TAG)): intent for intent in unbound}
    by_rank: dict[str | None, list[Intent]] = defaultdict(list)
    for intent in unbound:
        if intent.gone_at is None:
            by_rank[intent.tags.get(RANK_TAG)].append(intent)
    found: dict[str, Intent] = {}
    for machine in machines:
        launch, rank = machine.tags.get(LAUNCH_TAG), str(machine.rank)
        its = by_rank[rank] if launch is None else [by_launch[launch, rank]] if (launch, rank) in by_launch else []
        if len(its) == 1:
            found[machine.id] = its[0]
    return found


def can_see(provider: Provider, owner: Owner, here: Owner) -> bool:
    """Tell whether a listing from here must show what that owner has rented: machines that are processes are seen on
    their own host, by their own user.

    After another boot they are gone, and a listing is right not to show them.
    """
    if not provider.is_here:
        return True
    is_same_place = owner.boot != here.boot or owner.namespace == here.namespace
    return owner.host == here.host and is_same_place and here.user in (owner.user, "root")


def asked_by(entry: PoolEntry, intent: Intent, now: datetime) -> datetime:
    """Return when a thing was asked for at the latest, if it was: nobody asks for a pool that has ended, is condemned,
    or has lost its lease.
    """
    return max(
        intent.intended_at,
        min(
            moment for moment in (now, entry.lease_expires_at, entry.condemned_at, entry.ended_at) if moment is not None
        ),
    )


def unsure_seconds(provider: Provider) -> float:
    """Return how long after it was asked for a machine may be missing in a listing: the call may still be at work,
    though its caller was killed.
    """
    return max(provider.listing_lag_seconds, 0.0 if provider.is_here else IN_FLIGHT_SECONDS)


def paid_until(provider: Provider, entry: PoolEntry, intent: Intent, now: datetime) -> datetime:
    """Return when a machine that is found gone has cost money at the latest.

    Nobody has seen it end. Where machines end themselves for good, it was when its lease had run out or it was asked
    to, or at its hard end if that came first, each with the time that it takes to come up and to go; never before what
    is known of its life. Elsewhere, and at the latest, now.
    """
    if not provider.ends_for_good():
        return now
    was_up = any(
        intent.seconds.get(bucket) for bucket in (Bucket.BOOTSTRAPPING, Bucket.RUNNING_CALLS, Bucket.IDLE, Bucket.LOST)
    )
    grace = timedelta(seconds=provider.gone_deadline_seconds + (0.0 if was_up else BOOT_SECONDS))
    end = max(entry.lease_expires_at, intent.end_asked_at or intent.intended_at) + grace
    if EXPIRES_TAG in intent.tags:  # counted on the machine from when it was up
        end = min(end, intent.expires_at + timedelta(seconds=intent.seconds.get(Bucket.LAUNCHING, 0.0)) + grace)
    known = max(
        intent.bound_at or intent.intended_at, intent.intended_at + timedelta(seconds=sum(intent.seconds.values()))
    )
    return min(now, max(end, known))


# ── pools that the ledger knows ──────────────────────────────────────────────────────────────────────────────────────


def _judge_live(
    scene: Scene, entry: PoolEntry, machines: Sequence[Instance], intents: Sequence[Intent]
) -> Generator[Finding]:
    bound = {intent.cloud_id for intent in intents}
    found = answers((machine for machine in machines if machine.id not in bound), intents)
    if len({intent.id for intent in found.values()}) < len(found):  # two machines for one entry: its owner knows which
        found = {}
    if found:
        reason = "its pool is live, and the answer to its launch is not written down yet"
        yield Finding(
            Action.ADOPT,
            entry.id,
            scene.provider.name,
            tuple(found),
            reason,
            tuple(intent.id for intent in found.values()),
        )
    if rest := tuple(machine.id for machine in machines if machine.id not in found):
        yield Finding(
            Action.LEAVE,
            entry.id,
            scene.provider.name,
            rest,
            f"its pool is live: {_left(entry, scene.now)} of its lease are left",
        )


def _judge_dead(
    scene: Scene, entry: PoolEntry, why: str, machines: Sequence[Instance], intents: Sequence[Intent]
) -> Generator[Finding]:
    name = scene.provider.name
    ours = [intent for intent in intents if intent.kind is ResourceKind.INSTANCE]
    if others := [intent for intent in intents if intent.kind is not ResourceKind.INSTANCE]:
        names = tuple(intent.cloud_id or intent.name for intent in others)
        yield Finding(
            Action.LEAVE,
            entry.id,
            name,
            names,
            f"{why}; a sweep ends machines only, and these are none: look at the console of {name}",
            _numbers(others),
        )
    if not can_see(scene.provider, entry.owner, scene.here):
        names = tuple(
            sorted({intent.cloud_id or intent.name for intent in ours} | {machine.id for machine in machines})
        )
        reason = f"{why}; its machines are processes of {entry.owner.name}, which cannot be seen from here: sweep there"
        yield Finding(Action.LEAVE, entry.id, name, names, reason, _numbers(ours))
        return
    lag, unsure = (
        timedelta(seconds=scene.provider.listing_lag_seconds),
        timedelta(seconds=unsure_seconds(scene.provider)),
    )
    listed = {machine.id for machine in machines}
    answered = {intent.id for intent in answers(machines, ours).values()}
    alive = [intent for intent in ours if intent.cloud_id in listed or intent.id in answered]
    rest = [intent for intent in ours if intent.cloud_id not in listed and intent.id not in answered]
    hidden = [intent for intent in rest if intent.cloud_id is not None and _known_since(intent) + lag > scene.now]
    waiting = [
        intent for intent in rest if intent.cloud_id is None and asked_by(entry, intent, scene.now) + unsure > scene.now
    ]
    undecided = {*_numbers(hidden), *_numbers(waiting)}
    absent = [intent for intent in rest if intent.id not in undecided]
    if ids := listed | {str(intent.cloud_id) for intent in hidden}:
        yield Finding(Action.END, entry.id, name, tuple(sorted(ids)), why, _numbers([*alive, *hidden]))
    if waiting:
        reason = f"{why}; what it has asked for may be listed only {unsure.total_seconds():.0f} s later"
        yield Finding(Action.WAIT, entry.id, name, tuple(intent.name for intent in waiting), reason, _numbers(waiting))
    if absent:
        names = tuple(intent.cloud_id or intent.name for intent in absent)
        yield Finding(Action.CLOSE, entry.id, name, names, f"{why}; {name} does not list it", _numbers(absent))
    elif not ids and not waiting and not others and entry.ended_at is None:
        yield Finding(Action.CLOSE, entry.id, name, (), f"{why}; nothing of it is left")


def _judge_other(scene: Scene, entry: PoolEntry, trouble: str, machines: Sequence[Instance]) -> Finding:
    """Of a pool that the ledger knows, tags prove nothing: who has detached it is dead, and it lives on.

    Only the ledger may call it dead.
    """
    why = entry.why_dead(scene.now, scene.state(entry.owner))
    return Finding(
        Action.END if why else Action.LEAVE,
        entry.id,
        scene.provider.name,
        tuple(machine.id for machine in machines),
        why or trouble,
    )


def _known_since(intent: Intent) -> datetime:
    return intent.bound_at or intent.intended_at


def _left(entry: PoolEntry, now: datetime) -> str:
    return f"{(entry.lease_expires_at - now).total_seconds():.0f} s"


# ── pools that only tags tell of ─────────────────────────────────────────────────────────────────────────────────────


def _judge_stranger(
    scene: Scene, pool_id: str, machines: Sequence[Instance], min_age_seconds: float, *, include_unknown: bool
) -> Finding:
    """One verdict for all its machines, for they are ended together: END only if it is right for each of them."""
    verdicts = [_verdict(scene, machine, min_age_seconds, include_unknown=include_unknown) for machine in machines]
    is_end = all(is_over for is_over, _ in verdicts)
    reason = next(reason for is_over, reason in verdicts if is_over == is_end)
    if not is_end and any(is_over for is_over, _ in verdicts):
        reason = f"{reason}; this holds for some of its machines only"
    return Finding(
        Action.END if is_end else Action.LEAVE,
        pool_id,
        scene.provider.name,
        tuple(machine.id for machine in machines),
        reason,
    )


def _verdict(scene: Scene, machine: Instance, min_age_seconds: float, *, include_unknown: bool) -> tuple[bool, str]:
    """Whether the machine may be ended, and why, or why not."""
    created, expires = _time(machine, CREATED_TAG), _time(machine, EXPIRES_TAG)
    owner = _owner(machine)
    state = OwnerState.UNKNOWN if owner is None else scene.state(owner)
    who = machine.tags.get(OWNER_TAG) or "nobody knows whom"
    if created is None and not include_unknown:
        return False, f"the ledger does not know it, nor its tags when it was made: it is of {who}"
    age_seconds = None if created is None else (scene.now - created).total_seconds()
    if age_seconds is not None and age_seconds <= min_age_seconds:
        return (
            False,
            f"the ledger does not know it, and it is {age_seconds:.0f} s old: its pool may be written down elsewhere",
        )
    if expires is not None and expires <= scene.now:
        return True, f"its time ran out {(scene.now - expires).total_seconds():.0f} s ago, by its tags"
    if state is OwnerState.DEAD:
        return True, f"its owner ({who}) is dead, by its tags"
    if state is OwnerState.ALIVE:
        return False, f"the ledger does not know it; its owner ({who}) lives"
    if include_unknown:
        return True, f"the ledger does not know it, it is of {who}, and what is unknown was asked to be ended"
    return False, f"the ledger does not know it, and it is of {who}: somebody else's, or may be"


def _owner(machine: Instance) -> Owner | None:
    try:
        return Owner.parse(machine.tags[OWNER_TAG], machine.tags[PROCESS_TAG])
    except (KeyError, ValueError):
        return None


def owners_of(machines: Iterable[Instance]) -> set[Owner]:
    """Return whom the tags of machines name."""
    return {owner for machine in machines if (owner := _owner(machine)) is not None}


def _time(machine: Instance, tag: str) -> datetime | None:
    """A time in a tag; None for a tag that is not there, or that somebody else wrote."""
    text = machine.tags.get(tag, "")
    try:
        return datetime.fromtimestamp(int(text), UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _numbers(intents: Iterable[Intent]) -> tuple[int, ...]:
    return tuple(intent.id for intent in intents)


def _by_pool[T: (Instance, Intent)](things: Iterable[T]) -> Mapping[str, list[T]]:
    found: dict[str, list[T]] = defaultdict(list)
    for thing in things:
        found[thing.pool_id].append(thing)
    return found


def other_account(entry: PoolEntry, account: str) -> CredentialsError | None:
    """Return why credentials are of no use for a pool, None if they are, or if the ledger does not know whose its
    machines are.
    """
    if entry.provider_account in ("", account):
        return None
    return CredentialsError(
        f"its machines are of account {entry.provider_account!r}, and these credentials are of {account!r}: sweep with"
        " those of the former"
    )
