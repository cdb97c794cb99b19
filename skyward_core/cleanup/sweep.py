"""Ending what others have left: the machines of one pool (`end_pool`, `release`), or of every pool that is dead (`sweep`). The third rope of 0008.

`policy.py` decides, `teardown.py` gives back, `_Page` writes down what became of it. Every function may run in several processes at once, be killed at any
line, and be called again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from skyward_core.cleanup.policy import Action, Finding, Scene, answers, asked_by, can_see, judge, owners_of, paid_until, unsure_seconds
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import ZERO_USD, BadRequest, CredentialsError, LedgerConflict, LedgerError
from skyward_core.ledger.journal import price_of
from skyward_core.ledger.rows import Bucket, CostBy, Intent, PoolEntry, ResourceKind, UnreadableRow, Wish
from skyward_core.machines.instances import Instance, Lease
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.machines.signing import verify
from skyward_core.providers.base import Provider, load
from skyward_core.provisioning.teardown import give_back

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

MIN_AGE_SECONDS = 600.0
CONDEMN_TRIES = 20
LEAST_NOTED_SECONDS = 1.0
"""Of terminating: less than that is not worth a transaction of its own."""
ESTIMATED = "when it has ended nobody saw: its cost is estimated, up to when its lease must have ended it"

type Clock = Callable[[], datetime]

_log = logging.getLogger("skyward")


def _now() -> datetime:
    return datetime.now(UTC)


# ── one pool ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def end_pool(
    ledger: Ledger | None,
    provider: Provider,
    pool_id: str,
    *,
    why: str,
    may_still_launch: bool = True,
    clock: Clock = _now,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """End a pool's machines, those that the ledger knows and those that the provider lists, and write down what became of them. May be called again.

    The caller answers for it that the pool is dead, or is to be: it has condemned it. Where an answer to a launch may be missing, the provider is asked
    until it must list what came of that.

    Args:
        ledger: None if there is none that can be used: the machines are ended all the same.
        provider: who rents them.
        pool_id: whose they are.
        why: why they are ended; it goes into the evidence.
        may_still_launch: without the ledger: whether its owner may have been stopped a moment ago, in the middle of a launch.
        clock: tells the time of day.
        monotonic: counts seconds, for deadlines.
        pause: waits for so many seconds.

    Returns the ids of the machines that were there and are gone now. Raises InstancesLeft if some could not be confirmed gone; their entries stay open.
    Raises LedgerError once the machines are gone, if that could not be
    written down; a sweep does it later.
    """
    entry, ended = _end_machines(ledger, provider, pool_id, why, may_still_launch=may_still_launch, clock=clock, monotonic=monotonic, pause=pause)
    if ledger is not None and entry is not None and not ledger.open_intents(pool_id=pool_id):
        _end_entries(ledger, [entry])
    return ended


def _end_machines(
    ledger: Ledger | None,
    provider: Provider,
    pool_id: str,
    why: str,
    *,
    may_still_launch: bool,
    clock: Clock,
    monotonic: Callable[[], float],
    pause: Callable[[float], None],
) -> tuple[PoolEntry | None, tuple[str, ...]]:
    """End a pool's machines and close their entries; return its own, which is still open, if the ledger has one, and what was ended."""
    page = _Page(ledger, provider, pool_id, why, clock)
    unsure_until = 0.0
    if page.unlisted_seconds(may_still_launch=may_still_launch):
        with suppress(Exception):  # an outage: `give_back` meets it too, and waits it out
            page.found(provider.instances(pool_id))
        if seconds := page.unlisted_seconds(may_still_launch=may_still_launch):
            unsure_until = monotonic() + seconds
    try:
        give_back(provider, pool_id, page, unsure_until=unsure_until, clock=monotonic, pause=pause)
    except BaseException as error:
        try:
            page.write_down()
        except LedgerError as trouble:
            error.add_note(str(trouble))
        raise
    return page.close(), page.ended()


def release(
    lease_or_pool_id: Lease | str,
    *,
    ledger: Ledger | None,
    credentials: Provider | None = None,
    why: str = "it was stopped on purpose",
    clock: Clock = _now,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """End a pool on purpose, live or not, from any process. It is condemned first, so that an owner that lives launches nothing more and closes.

    Args:
        lease_or_pool_id: which; a lease tells of its provider too, and is verified before that is asked.
        ledger: where it is written down; None: nothing but the lease and the provider's tags is known.
        credentials: the provider, if it needs secrets that neither the environment nor its entry has.
        why: goes into the evidence.
        clock: tells the time of day.
        monotonic: counts seconds, for deadlines.
        pause: waits for so many seconds.

    Returns the ids of the machines that were there and are gone now. Raises BadRequest if nobody knows the pool, CredentialsError for a lease that
    may have been altered, and what `end_pool` raises.
    """
    lease = lease_or_pool_id if isinstance(lease_or_pool_id, Lease) else None
    pool_id = lease_or_pool_id if isinstance(lease_or_pool_id, str) else lease_or_pool_id.pool_id
    try:
        entry = None if ledger is None else _condemned(ledger, pool_id)
    except UnreadableRow as error:
        if credentials is None and lease is None:
            raise LedgerError(f"{error} Its machines can be ended all the same: `skyward stop {pool_id} --provider NAME`.") from error
        entry = None
    if credentials is not None:
        provider = credentials
    elif entry is not None:
        provider = load(entry.provider)
    elif lease is not None:
        verify(lease, asks_provider=True)
        provider = load(lease.provider)
    else:
        raise BadRequest(f"The ledger has no pool {pool_id!r}: look with `skyward ps --all`, or name the provider that may have its machines.")
    if entry is not None and entry.provider_account and (error := _other_account(entry, provider.account())) is not None:
        raise error
    if entry is not None and not can_see(provider, entry.owner, Owner.here()):
        raise BadRequest(f"The machines of {pool_id!r} are processes of {entry.owner.name}, which cannot be seen from here: stop it there.")
    return end_pool(ledger, provider, pool_id, why=why, clock=clock, monotonic=monotonic, pause=pause)


def _condemned(ledger: Ledger, pool_id: str) -> PoolEntry | None:
    """Condemn a pool whatever its lease; its owner may renew it meanwhile, but not every time."""
    for _ in range(CONDEMN_TRIES):
        entry = ledger.pool(pool_id)
        if entry is None or entry.ended_at is not None or ledger.condemn(pool_id, seen=entry.lease_expires_at):
            return entry
    raise LedgerError(f"The lease of {pool_id!r} is renewed all the time, so that it could not be condemned in {CONDEMN_TRIES} tries. Try again.")


class _Page:
    """A pool's page of the ledger, in the hands of somebody else than its owner: the witness of its giving back (`teardown.Witness`).

    After the first error of the ledger it is left alone until the machines are gone: each try may cost half a minute, in which they would run on.
    """

    def __init__(self, ledger: Ledger | None, provider: Provider, pool_id: str, why: str, clock: Clock) -> None:
        self._ledger = ledger
        self._provider = provider
        self._pool_id = pool_id
        self._why = why
        self._clock = clock
        self._entry: PoolEntry | None = None
        self._intents: dict[int, Intent] = {}
        self._asked_before: dict[int, datetime | None] = {}
        """When others had asked for the end of each entry's machine."""
        self._numbers: dict[str, int] = {}
        self._machines: dict[str, Instance] = {}
        self._asked: dict[str, datetime] = {}
        self._gone: dict[str, str] = {}
        self._trouble: LedgerError | None = None
        self._try(self._read)

    def _read(self) -> None:
        assert self._ledger is not None
        self._entry = self._ledger.pool(self._pool_id)
        for intent in self._ledger.intents(pool_id=self._pool_id):
            if intent.kind is ResourceKind.INSTANCE and (intent.gone_at is None or intent.cloud_id is None):
                self._intents[intent.id] = intent
                self._asked_before.setdefault(intent.id, intent.end_asked_at)
                if intent.cloud_id is not None:
                    self._numbers[intent.cloud_id] = intent.id

    def unlisted_seconds(self, *, may_still_launch: bool) -> float:
        """Return for how long from now a machine may exist, or come to exist, that neither this page nor a listing names."""
        longest = unsure_seconds(self._provider)
        if self._ledger is None or self._trouble is not None:
            return longest if may_still_launch else 0.0
        now, entry = self._clock(), self._entry
        ages = [(now - asked_by(entry, intent, now)).total_seconds() for intent in self._unanswered()] if entry is not None else []
        hidden = [(now - (intent.bound_at or intent.intended_at)).total_seconds() for intent in self._hidden()]
        unanswered = longest - min(ages) if ages else 0.0
        return max(0.0, unanswered, self._provider.listing_lag_seconds - min(hidden) if hidden else 0.0)

    def _hidden(self) -> Generator[Intent]:
        """Machines with an id that no listing has shown here yet: so soon after their launch that says nothing."""
        return (intent for intent in self._intents.values() if intent.gone_at is None and intent.cloud_id is not None and intent.cloud_id not in self._machines)

    def _unanswered(self) -> Generator[Intent]:
        return (intent for intent in self._intents.values() if intent.cloud_id is None and intent.gone_at is None)

    # ── the witness ──────────────────────────────────────────────────────────────────────────────────────────────────

    def rented(self) -> set[str]:
        """Return the ids of the machines that are not known to be gone."""
        return {*self._numbers, *self._machines} - self._gone.keys()

    def found(self, instances: Iterable[Instance]) -> None:
        """Take note of what is listed; what is new is the answer to an entry, or gets one of its own."""
        listed = list(instances)
        for instance in listed:
            self._gone.pop(instance.id, None)  # it is back
        self._machines |= {instance.id: instance for instance in listed}
        self._try(self._bind_all)

    def ending(self, instance_ids: Iterable[str]) -> None:
        """Termination of these will be asked for now."""
        ids = list(instance_ids)
        self._asked |= dict.fromkeys(ids, self._clock())
        _log.info("%s: terminating %s: %s", self._pool_id, ", ".join(ids), self._why)

    def asked(self, instance_ids: Iterable[str]) -> None:
        """Termination of these was asked for."""
        ids = list(instance_ids)
        self._try(lambda: self._ask_end_all(ids))

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        """These are gone, and this is how it is known."""
        self._gone |= dict.fromkeys(instance_ids, f"{evidence}; it was ended because {self._why}")

    def ended(self) -> tuple[str, ...]:
        """Return the ids of the machines that a listing has shown and that are gone now."""
        return tuple(sorted(self._machines.keys() & self._gone.keys()))

    # ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────

    def write_down(self) -> None:
        """Write down all that is known now. Raises LedgerError."""
        if self._ledger is None:
            return
        if self._trouble is not None:  # from the beginning, in case it is usable again
            self._trouble = None
            self._read()
            self._bind_all()
            self._ask_end_all(self._asked)
        by_evidence: dict[str, list[Intent]] = {}
        for instance_id, evidence in self._gone.items():
            if (number := self._numbers.get(instance_id)) is not None and self._intents[number].gone_at is None:
                by_evidence.setdefault(evidence, []).append(self._intents[number])
        for evidence, intents in by_evidence.items():
            now = self._clock()
            self._take(_closed(self._ledger, intents, evidence, now, self._paid_until(intents, now)))

    def _paid_until(self, intents: Iterable[Intent], now: datetime) -> dict[int, datetime]:
        """What nobody has seen running here, was gone before its end was asked for here: when that was is estimated."""
        if self._entry is None:
            return {}
        unseen = (intent for intent in intents if intent.cloud_id not in self._machines)
        return {intent.id: paid_until(self._provider, self._entry, replace(intent, end_asked_at=self._asked_before.get(intent.id)), now) for intent in unseen}

    def close(self) -> PoolEntry | None:
        """The provider lists nothing of the pool: write down the end of everything, and return the pool's entry. Raises LedgerError."""
        self.write_down()
        if self._ledger is not None and (never_were := list(self._unanswered())):
            self._take(_closed(self._ledger, never_were, f"{self._provider.name} lists nothing of the pool; it was ended because {self._why}", self._clock()))
        return self._entry

    def _bind_all(self) -> None:
        if self._ledger is None or self._entry is None:
            return
        new = {instance_id: instance for instance_id, instance in self._machines.items() if instance_id not in self._numbers}
        taken = set[int]()
        for instance_id, intent in answers(new.values(), self._intents.values()).items():
            if intent.id not in taken:
                taken.add(intent.id)
                with suppress(LedgerConflict):  # another sweep, or the owner itself, knows better
                    self._take([self._ledger.bind(intent, instance_id)])
                    del new[instance_id]
        for instance in new.values():
            self._take([self._ledger.adopt(self._pool_id, self._wish_for(instance), instance.id)])

    def _wish_for(self, instance: Instance) -> Wish:
        return Wish(
            kind=ResourceKind.INSTANCE,
            provider=self._provider.name,
            region=instance.region,
            name=f"{self._pool_id}-{instance.rank}",
            token=f"{self._pool_id}-found-{instance.id}",
            tags=dict(instance.tags),
            expires_at=self._clock(),
            price=price_of(instance, self._provider),
        )

    def _ask_end_all(self, instance_ids: Iterable[str]) -> None:
        numbers = [self._numbers[instance_id] for instance_id in instance_ids if instance_id in self._numbers]
        if self._ledger is not None and numbers:
            self._take(self._ledger.ask_end_all(numbers))

    def _take(self, intents: Iterable[Intent]) -> None:
        for intent in intents:
            self._intents[intent.id] = intent
            if intent.cloud_id is not None:
                self._numbers[intent.cloud_id] = intent.id

    def _try(self, write: Callable[[], None]) -> None:
        """Keep an error of the ledger for the end, and leave the ledger alone until then."""
        if self._ledger is None or self._trouble is not None:
            return
        try:
            write()
        except LedgerError as error:
            _log.warning("%s: %s; its machines are ended all the same", self._pool_id, error)
            self._trouble = error


def _closed(ledger: Ledger, intents: Sequence[Intent], evidence: str, now: datetime, ends: Mapping[int, datetime] | None = None) -> list[Intent]:
    """Close entries, each second of their machines in a bucket: since its end was asked for it was terminating, and what nobody noted is as 0008 says.

    `ends` are the times, by the entries' numbers, until which those are paid for that were gone before anybody looked (`policy.paid_until`).
    """
    early = {number: end for number, end in (ends or {}).items() if (now - end).total_seconds() >= LEAST_NOTED_SECONDS}
    ending = {
        intent.id: {**intent.seconds, Bucket.TERMINATING: seconds}
        for intent in intents
        if (seconds := _terminating_seconds(intent, early.get(intent.id, now))) >= LEAST_NOTED_SECONDS
    }
    if ending:
        ledger.note_all(ending)
    by_words: dict[tuple[Bucket, str], list[int]] = {}
    for intent in intents:
        words = f"{evidence}; {ESTIMATED}" if intent.id in early and intent.cloud_id is not None else evidence
        by_words.setdefault((_unnoted(intent), words), []).append(intent.id)
    return [intent for (fill, words), numbers in by_words.items() for intent in ledger.close_all(numbers, words, fill=fill, paid_until=early)]


def _terminating_seconds(intent: Intent, until: datetime) -> float:
    """For how long its end has been asked for, as far as nothing else was noted for that time."""
    if intent.end_asked_at is None or intent.cloud_id is None:
        return 0.0
    others = sum(seconds for bucket, seconds in intent.seconds.items() if bucket is not Bucket.TERMINATING)
    return max(0.0, min((until - intent.end_asked_at).total_seconds(), (until - intent.intended_at).total_seconds() - others))


def _unnoted(intent: Intent) -> Bucket:
    """What a machine did whose owner was killed, from when it last noted something; for what never was the ledger fills in nothing.

    Of an entry without an id too: another sweep may have found its machine meanwhile.
    """
    if intent.seconds.get(Bucket.LOST):
        return Bucket.LOST
    return Bucket.IDLE if intent.seconds.get(Bucket.IDLE) or intent.seconds.get(Bucket.RUNNING_CALLS) else Bucket.LAUNCHING


def _end_entries(ledger: Ledger, entries: Sequence[PoolEntry]) -> None:
    """Write down what pools have cost to the accounts that paid, and that they have ended."""
    for entry in entries:
        if entry.account is not None:
            ledger.settle_pool(entry.id, sum((row.cost_usd for row in ledger.cost_rows(CostBy.POOL, pool_id=entry.id)), ZERO_USD))
    ledger.end_pools([entry.id for entry in entries])  # last: killed in between, the entries are still open, and the next sweep does both again


# ── all that is dead ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Failure:
    """What could not be looked at or ended, and why. `pool_id` is "" if it is a whole provider."""

    provider: str
    pool_id: str
    error: Exception

    def __str__(self) -> str:
        """Tell it in one line."""
        return f"{self.provider}{f', pool {self.pool_id}' if self.pool_id else ''}: {self.error}"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep has found, and what it has done of that: nothing, if it was a dry run."""

    findings: tuple[Finding, ...] = ()
    ended: tuple[Finding, ...] = ()
    """The findings of END that were carried out: their machines are known to be gone."""
    failures: tuple[Failure, ...] = ()
    closed: tuple[Finding, ...] = ()
    """Those of CLOSE that were carried out: the entries, and with them their pool's, say that nothing is left."""
    adopted: tuple[Finding, ...] = ()
    """Those of ADOPT that were: the ledger has the machines now."""
    pruned: tuple[str, ...] = ()
    """In words, what the providers have taken away that outlives pools and is of no use any more (`Provider.prune`), or would have if it was a dry run."""

    @property
    def to_do(self) -> tuple[Finding, ...]:
        """The findings that ask for something to be done, be it only that a dead pool is condemned and looked at again."""
        return tuple(finding for finding in self.findings if finding.action is not Action.LEAVE)


def sweep(
    ledger: Ledger | None,
    providers: Sequence[Provider] = (),
    *,
    is_dry_run: bool = True,
    min_age_seconds: float = MIN_AGE_SECONDS,
    include_unknown: bool = False,
    clock: Clock = _now,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> SweepReport:
    """Find what nobody answers for any more, at these providers and at those of all pools that the ledger has open, and end it.

    Args:
        ledger: None judges by tags alone.
        providers: whom to ask beside those that the ledger names.
        is_dry_run: look and tell, do nothing.
        min_age_seconds: machines that the ledger does not know are left until they are older than that.
        include_unknown: end such machines too if nobody here can tell whether their owner lives. They may be somebody else's.
        clock: tells the time of day.
        monotonic: counts seconds, for deadlines.
        pause: waits for so many seconds.

    What fails is in the report, and stops nothing else; a provider that cannot list is left alone altogether. Raises LedgerError if the ledger cannot be read.
    """
    view = _look(ledger, providers)

    def settle(place: _Place) -> _Work:
        scene = Scene(place.provider, place.machines, place.pools, place.intents, clock(), Owner.here(), _states(place), place.of_others)
        work = _Work(ledger, place, judge(scene, min_age_seconds=min_age_seconds, include_unknown=include_unknown), clock, monotonic, pause)
        if not is_dry_run:
            work.do()
        return work

    done = side_by_side(settle, view.places, "skyward-sweep")
    pruned = side_by_side(lambda place: _pruned(place.provider, clock(), is_dry_run=is_dry_run), view.places, "skyward-sweep")  # last: machines cost more
    return SweepReport(
        (*(finding for work in done for finding in work.findings), *view.left),
        tuple(finding for work in done for finding in work.ended),
        (*view.failures, *(failure for work in done for failure in work.failures), *(one for one in pruned if isinstance(one, Failure))),
        closed=tuple(finding for work in done for finding in work.closed),
        adopted=tuple(finding for work in done for finding in work.adopted),
        pruned=tuple(dict.fromkeys(line for lines in pruned if not isinstance(lines, Failure) for line in lines)),  # several places may be of one account
    )


def _pruned(provider: Provider, now: datetime, *, is_dry_run: bool) -> list[str] | Failure:
    try:
        return [f"{provider.name}: {line}" for line in provider.prune(now, is_dry_run=is_dry_run)]
    except Exception as error:  # whatever a provider raises, the sweep itself is done
        return Failure(provider.name, "", error)


# ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Place:
    """One provider, with what it lists and what the ledger has of it."""

    provider: Provider
    account: str
    machines: list[Instance]
    pools: dict[str, PoolEntry] = field(default_factory=dict[str, PoolEntry])
    intents: list[Intent] = field(default_factory=list[Intent])
    of_others: dict[str, tuple[PoolEntry, str]] = field(default_factory=dict[str, tuple[PoolEntry, str]])
    """The ledger's pools of this provider that are of another account, each with that in words."""


@dataclass(frozen=True, slots=True)
class _View:
    places: list[_Place]
    left: list[Finding]
    failures: list[Failure]


def _look(ledger: Ledger | None, providers: Sequence[Provider]) -> _View:
    """Read the ledger, then ask the providers: what a listing lacks was written down before it was made."""
    damaged: list[UnreadableRow] = []
    intents = [] if ledger is None else ledger.open_intents(unreadable=damaged)
    pools = {} if ledger is None else {entry.id: entry for entry in ledger.pools(unreadable=damaged)}
    pools |= _entries(ledger, {intent.pool_id for intent in intents} - pools.keys() - _unread_pools(damaged), damaged)
    survey = _Survey({_key(provider.to_json()): provider for provider in providers})
    survey.ask(pools.values())
    late = _entries(ledger, {machine.pool_id for machine in survey.machines()} - pools.keys() - _unread_pools(damaged), damaged)
    pools |= late
    survey.ask(late.values())
    strange = [Failure("ledger", error.pool_id, error) for error in damaged]
    strange += [Failure("ledger", entry.id, LedgerError(entry.trouble)) for entry in pools.values() if entry.trouble]
    for entry in pools.values():
        if (place := survey.places.get(_key(entry.provider))) is None:
            continue
        if (error := _other_account(entry, place.account)) is None:
            place.pools[entry.id] = entry
        else:  # what this account does not list may well be there
            place.of_others[entry.id] = (entry, str(error))
            strange.append(Failure(place.provider.name, entry.id, error))
    for intent in intents:
        entry = pools.get(intent.pool_id)  # None if it cannot be read
        place = None if entry is None else survey.places.get(_key(entry.provider))
        if place is not None and intent.pool_id in place.pools:
            place.intents.append(intent)
    left = [*_not_judged(survey.places, _unread_pools(damaged)), *_keep_apart(survey.places, pools)]
    return _View(list(survey.places.values()), left, [*survey.failures, *strange])


def _other_account(entry: PoolEntry, account: str) -> CredentialsError | None:
    """Return why credentials are of no use for a pool, None if they are, or if the ledger does not know whose its machines are."""
    if entry.provider_account in ("", account):
        return None
    return CredentialsError(f"its machines are of account {entry.provider_account!r}, and these credentials are of {account!r}: sweep with those of the former")


def _entries(ledger: Ledger | None, pool_ids: Iterable[str], damaged: list[UnreadableRow]) -> dict[str, PoolEntry]:
    found: dict[str, PoolEntry] = {}
    if ledger is None:
        return found
    for pool_id in sorted(pool_ids):
        try:
            entry = ledger.pool(pool_id)
        except UnreadableRow as error:
            damaged.append(error)
        else:
            found |= {} if entry is None else {entry.id: entry}
    return found


def _unread_pools(damaged: Iterable[UnreadableRow]) -> set[str]:
    return {error.pool_id for error in damaged if error.is_pool}


def _not_judged(places: Mapping[str, _Place], pool_ids: set[str]) -> Generator[Finding]:
    """Take out the machines of pools whose entries cannot be read: the ledger knows them, so that tags alone may not call them dead."""
    for place in places.values():
        for pool_id in sorted(pool_ids):
            if ids := tuple(machine.id for machine in place.machines if machine.pool_id == pool_id):
                reason = f"its entry in the ledger cannot be read: mend it, or end the pool with `skyward stop {pool_id} --provider {place.provider.name}`"
                yield Finding(Action.LEAVE, pool_id, place.provider.name, ids, reason)
        place.machines = [machine for machine in place.machines if machine.pool_id not in pool_ids]


def _key(provider: Mapping[str, Any]) -> str:
    """What tells a provider, as plain data, from others."""
    return json.dumps(dict(provider), sort_keys=True)


class _Survey:
    """The providers that were asked: the places that have answered, by key, and the failures."""

    def __init__(self, given: Mapping[str, Provider]) -> None:
        self.places: dict[str, _Place] = {}
        self.failures: list[Failure] = []
        self._given = dict(given)
        self._asked = set[str]()

    def machines(self) -> Generator[Instance]:
        """Return all that was listed."""
        return (machine for place in self.places.values() for machine in place.machines)

    def ask(self, entries: Iterable[PoolEntry]) -> None:
        """List the machines of the providers that were given, and of those of these pools, all at once; none of them twice."""
        wanted: dict[str, Provider | Mapping[str, Any]] = {**{_key(entry.provider): entry.provider for entry in entries}, **self._given}
        new = {key: provider for key, provider in wanted.items() if key not in self._asked}
        self._asked |= new.keys()
        for key, answer in zip(new, side_by_side(_listed, list(new.values()), "skyward-sweep"), strict=True):
            if isinstance(answer, Failure):
                self.failures.append(answer)
            else:
                self.places[key] = answer


def _listed(wish: Provider | Mapping[str, Any]) -> _Place | Failure:
    name = wish.name if isinstance(wish, Provider) else str(wish.get("name", "?"))
    try:
        provider = load(wish)
        return _Place(provider, provider.account(), provider.instances())
    except Exception as error:  # whatever a provider raises, nothing of it may be taken for gone
        return Failure(name, "", error)


def _keep_apart(places: Mapping[str, _Place], pools: Mapping[str, PoolEntry]) -> list[Finding]:
    """Leave each machine with one place: the provider of its pool, or the first that lists it; return what is left alone for that."""
    left: list[Finding] = []
    seen = set[tuple[str, str]]()
    own = {(key, machine.id) for key, place in places.items() for machine in place.machines}
    for key, place in places.items():
        kept: list[Instance] = []
        for machine in place.machines:
            entry = pools.get(machine.pool_id)
            home = key if entry is None else _key(entry.provider)
            if (home == key) and (entry is not None or (place.provider.name, machine.id) not in seen):
                kept.append(machine)
            elif home != key and (home, machine.id) not in own:
                reason = "its pool was opened with other settings of the provider, which do not list it, or could not be asked"
                left.append(Finding(Action.LEAVE, machine.pool_id, place.provider.name, (machine.id,), reason))
            seen.add((place.provider.name, machine.id))
        place.machines = kept
    return left


def _states(place: _Place) -> dict[Owner, OwnerState]:
    entries = [*place.pools.values(), *(entry for entry, _ in place.of_others.values())]
    return {owner: owner.state() for owner in {*(entry.owner for entry in entries), *owners_of(place.machines)}}


# ── doing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Work:
    """What is to be done at one provider. After `do` the findings say what has become of them."""

    def __init__(
        self,
        ledger: Ledger | None,
        place: _Place,
        findings: list[Finding],
        clock: Clock,
        monotonic: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self.findings = findings
        self.ended: list[Finding] = []
        self.closed: list[Finding] = []
        self.adopted: list[Finding] = []
        self.failures: list[Failure] = []
        self._ledger = ledger
        self._provider = place.provider
        self._pools = place.pools
        self._known = place.pools | {pool_id: entry for pool_id, (entry, _) in place.of_others.items()}
        self._intents = {intent.id: intent for intent in place.intents}
        self._clock = clock
        self._monotonic = monotonic
        self._pause = pause

    def do(self) -> None:
        """Bind, condemn, close and end."""
        self._adopt(self._of(Action.ADOPT))
        self._condemn({finding.pool_id for finding in self._of(Action.END, Action.CLOSE, Action.WAIT)} & self._known.keys())
        ends = self._of(Action.END)
        ending = {finding.pool_id for finding in ends}
        closing = [finding for finding in self._of(Action.CLOSE) if finding.pool_id not in ending]
        self._close(closing)
        side_by_side(self._end, ends, "skyward-sweep")
        over = self._end_entries({finding.pool_id for finding in (*closing, *self.ended)} & self._pools.keys())
        self.closed = [finding for finding in closing if finding.pool_id in over]

    def _of(self, *actions: Action) -> list[Finding]:
        return [finding for finding in self.findings if finding.action in actions]

    def _fail(self, pool_id: str, error: Exception) -> None:
        self.failures.append(Failure(self._provider.name, pool_id, error))

    def _adopt(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            assert self._ledger is not None
            try:
                self._ledger.bind_all(dict(zip(finding.intents, finding.resource_ids, strict=True)))
            except LedgerConflict:  # its owner has said so meanwhile, and knows better
                pass
            except LedgerError as error:
                self._fail(finding.pool_id, error)
            else:
                self.adopted.append(finding)

    def _condemn(self, pool_ids: Iterable[str]) -> None:
        """Judge these dead for everybody to see; what has come back to life meanwhile, or could not be judged, is left."""
        seen = {pool_id: entry.lease_expires_at for pool_id in pool_ids if (entry := self._known[pool_id]).ended_at is None and entry.condemned_at is None}
        if not seen:
            return
        assert self._ledger is not None
        try:
            spared = dict.fromkeys(seen.keys() - self._ledger.condemn_all(seen), "its lease was renewed while the sweep looked")
        except LedgerError as error:
            spared = dict.fromkeys(seen, "the ledger could not be written to")
            self._fail("", error)
        self.findings = [
            replace(finding, action=Action.LEAVE, reason=spared[finding.pool_id])
            if finding.pool_id in spared and finding.action is not Action.LEAVE
            else finding
            for finding in self.findings
        ]

    def _close(self, findings: Sequence[Finding]) -> None:
        """Close entries of pools of which nothing is there, all in a few transactions."""
        if not (intents := [self._intents[number] for finding in findings for number in finding.intents]):
            return
        assert self._ledger is not None
        try:
            intents = self._asked_once_more(intents)
        except Exception as error:  # nothing is closed on the strength of what could not be seen
            self._fail("", error)
            return
        now = self._clock()
        ends = {intent.id: paid_until(self._provider, self._pools[intent.pool_id], intent, now) for intent in intents}
        try:
            _closed(self._ledger, intents, f"{self._provider.name} does not list it; a sweep has closed it", now, ends)
        except LedgerError as error:
            self._fail("", error)

    def _asked_once_more(self, intents: Sequence[Intent]) -> list[Intent]:
        """Ask for the end of what has an id, and for another listing; return what is not in that one either. A single listing may have been mistaken."""
        if not (ids := sorted(str(intent.cloud_id) for intent in intents if intent.cloud_id is not None)):
            return list(intents)
        self._provider.terminate(ids)
        listed = {instance.id for instance in self._provider.instances()}
        return [intent for intent in intents if intent.cloud_id not in listed]

    def _end_entries(self, pool_ids: Iterable[str]) -> set[str]:
        """End the entries of those of these pools that have nothing open any more, and return which those are."""
        wanted = set(pool_ids)
        if not wanted:
            return set()
        assert self._ledger is not None
        try:
            damaged: list[UnreadableRow] = []
            over = sorted(wanted - {intent.pool_id for intent in self._ledger.open_intents(unreadable=damaged)} - {error.pool_id for error in damaged})
            _end_entries(self._ledger, [self._pools[pool_id] for pool_id in over])
        except LedgerError as error:
            self._fail("", error)
            return set()
        return set(over)

    def _end(self, finding: Finding) -> None:
        """End a pool's machines, those of its entries that are to be closed included. Entries of another account's machines are left as they are."""
        ledger = self._ledger if finding.pool_id in self._pools else None
        try:
            _end_machines(
                ledger,
                self._provider,
                finding.pool_id,
                finding.reason,
                may_still_launch=False,
                clock=self._clock,
                monotonic=self._monotonic,
                pause=self._pause,
            )
        except Exception as error:  # the others are not to run on for it
            self._fail(finding.pool_id, error)
        else:
            self.ended.append(finding)
