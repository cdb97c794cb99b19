"""The policy of the sweep: decides from the ledger and a provider's listing what to do with each pool. Pure.

Every decision needs a proof. A machine is ended only if its pool, or the process that its tags name, is known to be
dead. An entry is closed only if a listing lacks its machine and is late enough to contain it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from skyward_core.errors import CredentialsError
from skyward_core.ledger.rows import Bucket, Intent, PoolEntry, ResourceKind
from skyward_core.machines.instances import Instance, NodeEnd
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, LAUNCH_TAG, OWNER_TAG, PROCESS_TAG, RANK_TAG, Provider

IN_FLIGHT_SECONDS = 10.0
"""How long a creating call may go on after its caller was killed."""
BOOT_SECONDS = 1800.0
"""How long a machine may take to come up. Until then it does not count its lease."""
ESTIMATED = "no process saw it end: its cost is estimated, up to the time at which its lease must have ended it"
_log = logging.getLogger("skyward")


class Action(StrEnum):
    """What a sweep does with what it has found."""

    END = "end"  # machines of a dead pool
    CLOSE = "close"  # entries of a dead pool whose machines are not there
    ADOPT = "adopt"  # machines of a live pool that its entries do not name yet
    WAIT = "wait"  # of a dead pool, requested so recently that no listing needs to show it: left to the next sweep
    LEAVE = "leave"  # of a live pool, or of another user


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
    """The ledger's entries of these resources; for ADOPT, one for each machine."""


@dataclass(frozen=True, slots=True)
class ProviderFacts:
    """What is known of one provider's pools and machines.

    `pools` are those of the ledger, and `intents` their open entries, read before `machines` were listed. `states` has
    the owners of entries and of tags; an owner that it lacks is UNKNOWN. `here` is this process.

    `other_accounts` are the ledger's pools whose machines belong to another account, each with the reason as text.
    Their machines may be ended if these credentials list them. That a listing lacks them proves nothing.
    """

    provider: Provider
    machines: Sequence[Instance]
    pools: Mapping[str, PoolEntry]
    intents: Sequence[Intent]
    now: datetime
    here: Owner
    states: Mapping[Owner, OwnerState] = field(default_factory=dict[Owner, OwnerState])
    other_accounts: Mapping[str, tuple[PoolEntry, str]] = field(default_factory=dict[str, tuple[PoolEntry, str]])

    def state(self, owner: Owner) -> OwnerState:
        """Return whether an owner lives."""
        return self.states.get(owner, OwnerState.UNKNOWN)


def decide(facts: ProviderFacts, *, min_age_seconds: float = 0.0, include_unknown: bool = False) -> list[Finding]:
    """Return what to do with each pool.

    Args:
        facts: what is known.
        min_age_seconds: machines that the ledger does not know are left until they are older than that.
        include_unknown: also end machines if it is unknown whether their owner lives; the owner may still use them.
    """
    machines, intents = _by_pool(facts.machines), _by_pool(facts.intents)
    findings: list[Finding] = []
    for pool_id in sorted({*facts.pools, *machines}):
        entry = facts.pools.get(pool_id)
        if pool_id in facts.other_accounts:
            findings.append(_decide_other_account(facts, *facts.other_accounts[pool_id], machines[pool_id]))
        elif entry is None:
            findings.append(
                _decide_unknown(facts, pool_id, machines[pool_id], min_age_seconds, include_unknown=include_unknown)
            )
        elif why := entry.why_dead(facts.now, facts.state(entry.owner)):
            findings += _decide_dead(facts, entry, why, machines[pool_id], intents[pool_id])
        else:
            findings += _decide_live(facts, entry, machines[pool_id], intents[pool_id])
    return findings


def needing_second_look(facts: ProviderFacts) -> set[str]:
    """Return the pools that count as dead only because of a lease that their owners may still renew."""
    entries = [*facts.pools.values(), *(entry for entry, _ in facts.other_accounts.values())]
    return {entry.id for entry in entries if entry.needs_second_look(facts.now, facts.state(entry.owner))}


def answers(machines: Iterable[Instance], entries: Iterable[Intent]) -> dict[str, Intent]:
    """Return, by machine, the entry without an id from whose launch the machine comes, if that is certain.

    A machine and an entry belong together by the launch and the rank in their tags. If the machine has no tag of its
    launch, the rank decides, provided that one open entry has it. Two machines may belong to one entry: a call that was
    repeated can have created both.
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
    """Return whether a listing from here must contain what that owner has rented.

    Machines that are processes are visible on their own host, to their own user: root too lists only its own, because
    any user can start a process that claims to be another's. After a reboot they are gone, so that a listing without
    them is correct.
    """
    if not provider.is_local:
        return True
    has_rebooted = owner.boot != here.boot
    is_same_place = owner.host == here.host and (has_rebooted or owner.namespace == here.namespace)
    return is_same_place and (here.user == owner.user or (has_rebooted and here.user == "root"))


def latest_request(entry: PoolEntry, intent: Intent, now: datetime) -> datetime:
    """Return the latest time at which a resource may have been requested.

    No process requests anything for a pool that has ended, is condemned, or has lost its lease.
    """
    return max(
        intent.intended_at,
        min(
            moment for moment in (now, entry.lease_expires_at, entry.condemned_at, entry.ended_at) if moment is not None
        ),
    )


def unsure_seconds(provider: Provider) -> float:
    """Return for how long after its request a listing may lack a machine.

    The call may go on although its caller was killed.
    """
    return max(provider.listing_lag_seconds, 0.0 if provider.is_local else IN_FLIGHT_SECONDS)


def paid_until(provider: Provider, entry: PoolEntry, intent: Intent, now: datetime) -> datetime:
    """Return an estimate of the time until which a machine that is found gone has cost money.

    No process has seen it end, and it has not written its end. If the provider's machines end themselves for good, it
    was at the end of its lease or after the request for its end, or at its hard end if that is earlier; plus the time
    that it takes to come up, and that the provider usually bills for ending. It was never before the last time at which
    it is known to have run. In all other cases it was now.
    """
    if not provider.ends_for_good():
        return now
    was_up = any(
        intent.seconds.get(bucket) for bucket in (Bucket.BOOTSTRAPPING, Bucket.RUNNING_CALLS, Bucket.IDLE, Bucket.LOST)
    )
    grace = timedelta(seconds=provider.ending_seconds + (0.0 if was_up or provider.is_local else BOOT_SECONDS))
    end = max(entry.lease_expires_at, intent.end_asked_at or intent.intended_at) + grace
    if EXPIRES_TAG in intent.tags:  # counted on the machine from when it was up
        end = min(end, intent.expires_at + timedelta(seconds=intent.seconds.get(Bucket.LAUNCHING, 0.0)) + grace)
    known = max(
        intent.bound_at or intent.intended_at, intent.intended_at + timedelta(seconds=sum(intent.seconds.values()))
    )
    return min(now, max(end, known))


# ── pools that the ledger knows ──────────────────────────────────────────────────────────────────────────────────────


def _decide_live(
    facts: ProviderFacts, entry: PoolEntry, machines: Sequence[Instance], intents: Sequence[Intent]
) -> Generator[Finding]:
    bound = {intent.cloud_id for intent in intents}
    found = answers((machine for machine in machines if machine.id not in bound), intents)
    if len({intent.id for intent in found.values()}) < len(found):  # two machines for one entry: only its owner knows
        found = {}
    if found:
        reason = "its pool is live, and its launch is not recorded as answered yet"
        yield Finding(
            Action.ADOPT,
            entry.id,
            facts.provider.name,
            tuple(found),
            reason,
            tuple(intent.id for intent in found.values()),
        )
    if rest := tuple(machine.id for machine in machines if machine.id not in found):
        yield Finding(
            Action.LEAVE,
            entry.id,
            facts.provider.name,
            rest,
            f"its pool is live: {_why_live(entry, facts.now)}",
        )


def _decide_dead(
    facts: ProviderFacts, entry: PoolEntry, why: str, machines: Sequence[Instance], intents: Sequence[Intent]
) -> Generator[Finding]:
    name = facts.provider.name
    ours = [intent for intent in intents if intent.kind is ResourceKind.INSTANCE]
    if others := [intent for intent in intents if intent.kind is not ResourceKind.INSTANCE]:
        names = tuple(intent.cloud_id or intent.name for intent in others)
        yield Finding(
            Action.LEAVE,
            entry.id,
            name,
            names,
            f"{why}; a sweep ends machines only, and this is no machine: look at the console of {name}",
            _numbers(others),
        )
    if not can_see(facts.provider, entry.owner, facts.here):
        names = tuple(
            sorted({intent.cloud_id or intent.name for intent in ours} | {machine.id for machine in machines})
        )
        reason = f"{why}; its machines are processes of {entry.owner.name}, not visible from here: sweep there"
        yield Finding(Action.LEAVE, entry.id, name, names, reason, _numbers(ours))
        return
    lag, unsure = (
        timedelta(seconds=facts.provider.listing_lag_seconds),
        timedelta(seconds=unsure_seconds(facts.provider)),
    )
    listed = {machine.id for machine in machines}
    answered = {intent.id for intent in answers(machines, ours).values()}
    alive = [intent for intent in ours if intent.cloud_id in listed or intent.id in answered]
    rest = [intent for intent in ours if intent.cloud_id not in listed and intent.id not in answered]
    hidden = [intent for intent in rest if intent.cloud_id is not None and _known_since(intent) + lag > facts.now]
    waiting = [
        intent
        for intent in rest
        if intent.cloud_id is None and latest_request(entry, intent, facts.now) + unsure > facts.now
    ]
    undecided = {*_numbers(hidden), *_numbers(waiting)}
    absent = [intent for intent in rest if intent.id not in undecided]
    if ids := listed | {str(intent.cloud_id) for intent in hidden}:
        yield Finding(Action.END, entry.id, name, tuple(sorted(ids)), why, _numbers([*alive, *hidden]))
    if waiting:
        reason = f"{why}; a listing may lack its machines for {unsure.total_seconds():.0f} s after their request"
        yield Finding(Action.WAIT, entry.id, name, tuple(intent.name for intent in waiting), reason, _numbers(waiting))
    if absent:
        names = tuple(intent.cloud_id or intent.name for intent in absent)
        yield Finding(Action.CLOSE, entry.id, name, names, f"{why}; {name} does not list it", _numbers(absent))
    elif not ids and not waiting and not others and entry.ended_at is None:
        yield Finding(Action.CLOSE, entry.id, name, (), f"{why}; nothing of it is left")


def _decide_other_account(
    facts: ProviderFacts, entry: PoolEntry, trouble: str, machines: Sequence[Instance]
) -> Finding:
    """Decide on a pool of another account. Only the ledger's entry counts.

    Tags prove nothing here: a detached pool lives on although the process in its tags is dead.
    """
    why = entry.why_dead(facts.now, facts.state(entry.owner))
    return Finding(
        Action.END if why else Action.LEAVE,
        entry.id,
        facts.provider.name,
        tuple(machine.id for machine in machines),
        why or trouble,
    )


def _known_since(intent: Intent) -> datetime:
    return intent.bound_at or intent.intended_at


def _why_live(entry: PoolEntry, now: datetime) -> str:
    left = (entry.lease_expires_at - now).total_seconds()
    return f"its lease runs for another {left:.0f} s" if left > 0 else "its owner runs, though it renews no lease"


# ── pools that the ledger does not know ──────────────────────────────────────────────────────────────────────────────


def _decide_unknown(
    facts: ProviderFacts, pool_id: str, machines: Sequence[Instance], min_age_seconds: float, *, include_unknown: bool
) -> Finding:
    """Decide on a pool by the tags of its machines: END only if the tags of each machine allow it."""
    verdicts = [_verdict(facts, machine, min_age_seconds, include_unknown=include_unknown) for machine in machines]
    is_end = all(is_over for is_over, _ in verdicts)
    reason = next(reason for is_over, reason in verdicts if is_over == is_end)
    if not is_end and any(is_over for is_over, _ in verdicts):
        reason = f"{reason}; this holds for some of its machines only"
    return Finding(
        Action.END if is_end else Action.LEAVE,
        pool_id,
        facts.provider.name,
        tuple(machine.id for machine in machines),
        reason,
    )


def _verdict(
    facts: ProviderFacts, machine: Instance, min_age_seconds: float, *, include_unknown: bool
) -> tuple[bool, str]:
    """Return whether a machine may be ended, and the reason."""
    created, expires = _time(machine, CREATED_TAG), _time(machine, EXPIRES_TAG)
    owner = _owner(machine)
    state = OwnerState.UNKNOWN if owner is None else facts.state(owner)
    who = machine.tags.get(OWNER_TAG) or "an unknown owner"
    if created is None and not include_unknown:
        return False, f"the ledger does not know it, and its tags lack the time of its creation; it belongs to {who}"
    age_seconds = None if created is None else (facts.now - created).total_seconds()
    if age_seconds is not None and age_seconds <= min_age_seconds:
        return (
            False,
            f"the ledger does not know it, and it is {age_seconds:.0f} s old: another ledger may have its pool",
        )
    if expires is not None and expires <= facts.now:
        return True, f"its time ran out {(facts.now - expires).total_seconds():.0f} s ago, by its tags"
    if state is OwnerState.DEAD:
        return True, f"its owner ({who}) is dead, by its tags"
    if state in {OwnerState.ALIVE, OwnerState.STOPPED}:
        return False, f"the ledger does not know it; its owner ({who}) lives"
    if include_unknown:
        return True, f"the ledger does not know it, it belongs to {who}, and unknown machines are to be ended"
    return False, f"the ledger does not know it, and it belongs to {who}, who may be another user"


def _owner(machine: Instance) -> Owner | None:
    try:
        return Owner.parse(machine.tags[OWNER_TAG], machine.tags[PROCESS_TAG])
    except (KeyError, ValueError):
        return None


def owners_of(machines: Iterable[Instance]) -> set[Owner]:
    """Return the owners that the tags of machines name."""
    return {owner for machine in machines if (owner := _owner(machine)) is not None}


def _time(machine: Instance, tag: str) -> datetime | None:
    """Return the time in a tag; None if the tag is missing or has another form."""
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
    """Return why these credentials cannot be used for a pool, or None if they can.

    They can if the ledger does not know the account of the pool's machines.
    """
    if entry.provider_account in ("", account):
        return None
    return CredentialsError(
        f"its machines belong to account {entry.provider_account!r}, and these credentials to {account!r}: sweep with"
        " credentials of the former"
    )


# Until when machines are paid for that were found gone: until the end that they have written, or an estimate.
#
# A provider may be able to show when and why a machine has ended itself (`Provider.ends`). Otherwise it was at the
# end of its lease (`policy.paid_until`).


@dataclass(frozen=True, slots=True)
class Ends:
    """For entries of machines that were found gone: until when each is paid for, and what its machine has written.

    An end without words is an estimate.
    """

    until: Mapping[int, datetime] = field(default_factory=dict[int, datetime])
    words: Mapping[int, str] = field(default_factory=dict[int, str])

    def before(self, now: datetime, least_seconds: float) -> dict[int, datetime]:
        """Return the ends that were written, and those that are estimated to be so long ago."""
        return {
            number: end
            for number, end in self.until.items()
            if number in self.words or (now - end).total_seconds() >= least_seconds
        }

    def evidence(self, number: int, evidence: str) -> str:
        """Add to some evidence how the end of an entry is known."""
        return f"{evidence}; {self.words.get(number, ESTIMATED)}"


NO_ENDS = Ends()


def ends_of(provider: Provider, pools: Mapping[str, PoolEntry], intents: Sequence[Intent], now: datetime) -> Ends:
    """Return the ends of machines that a listing lacks. Asks the provider for them; raises nothing."""
    shown = shown_ends(provider, intents)
    until: dict[int, datetime] = {}
    words: dict[int, str] = {}
    for intent in intents:
        if intent.cloud_id is not None and (end := shown.get(intent.cloud_id)) is not None:
            until[intent.id], words[intent.id] = known_end(intent, end, now), str(end)
        else:
            until[intent.id] = paid_until(provider, pools[intent.pool_id], intent, now)
    return Ends(until, words)


def shown_ends(provider: Provider, intents: Sequence[Intent]) -> Mapping[str, NodeEnd]:
    """Return the ends that the provider can show, by machine; none if it does not answer."""
    ids = [intent.cloud_id for intent in intents if intent.cloud_id is not None]
    try:
        return provider.ends(ids) if ids else {}
    except Exception as error:  # the machines are gone anyway, and their cost is estimated
        _log.warning("%s does not show when machines have ended: %s", provider.name, error)
        return {}


def known_end(intent: Intent, end: NodeEnd, now: datetime) -> datetime:
    """Return the end of a machine by the clock of the ledger: not before it was requested, and not after now."""
    return min(now, max(end.at, intent.intended_at))
