"""The sweep: find the pools whose owners are dead, and end their machines. Third safeguard (decision 0008).

It asks the ledger and the providers, `policy.py` decides, `ProviderWork` carries it out at one provider, with
`release.py` for each pool. Each of them may run in several processes at once, be killed at any line, and be called
again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from skyward_core.cleanup.policy import (
    Action,
    Finding,
    ProviderFacts,
    decide,
    ends_of,
    needing_second_look,
    other_account,
    owners_of,
)
from skyward_core.cleanup.pool_record import Clock, close_entries, end_entries, utc_now
from skyward_core.cleanup.release import end_machines
from skyward_core.concurrency.threads import side_by_side
from skyward_core.config.own_providers import OwnProviders
from skyward_core.errors import LedgerConflict, LedgerError
from skyward_core.ledger.rows import Intent, PoolEntry, UnreadableRow
from skyward_core.machines.instances import Instance
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.providers.base import Provider

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

MIN_AGE_SECONDS = 600.0
RENEWAL_SECONDS = 10.0
"""In this time an owner that lives renews its lease, and one time may fail (`session.clock.MOST_BEAT_SECONDS`)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A pool that could not be read or ended, and the error. `pool_id` is "" for a whole provider."""

    provider: str
    pool_id: str
    error: Exception

    def __str__(self) -> str:
        """Return one line for a report."""
        return f"{self.provider}{f', pool {self.pool_id}' if self.pool_id else ''}: {self.error}"


@dataclass(slots=True)
class ProviderListing:
    """One provider with its listing and its pools and intents in the ledger."""

    provider: Provider
    account: str
    machines: list[Instance]
    pools: dict[str, PoolEntry] = field(default_factory=dict[str, PoolEntry])
    intents: list[Intent] = field(default_factory=list[Intent])
    other_accounts: dict[str, tuple[PoolEntry, str]] = field(default_factory=dict[str, tuple[PoolEntry, str]])
    """The ledger's pools at this provider that belong to another account, each with the reason as text."""


@dataclass(frozen=True, slots=True)
class SurveyView:
    """The providers that have answered, the machines that the sweep must leave, and what could not be read."""

    listings: list[ProviderListing]
    left: list[Finding]
    failures: list[Failure]


def take_survey(ledger: Ledger | None, providers: Sequence[Provider]) -> SurveyView:
    """Read the ledger, then ask the providers.

    In this order a machine that a listing lacks was in the ledger before the listing was made.
    """
    damaged: list[UnreadableRow] = []
    intents = [] if ledger is None else ledger.open_intents(unreadable=damaged)
    pools = {} if ledger is None else {entry.id: entry for entry in ledger.pools(unreadable=damaged)}
    pools |= _entries(ledger, {intent.pool_id for intent in intents} - pools.keys() - _unread_pools(damaged), damaged)
    survey = _Survey(providers)
    survey.ask(pools.values())
    late = _entries(
        ledger, {machine.pool_id for machine in survey.machines()} - pools.keys() - _unread_pools(damaged), damaged
    )
    pools |= late
    survey.ask(late.values())
    strange = [Failure("ledger", error.pool_id, error) for error in damaged]
    strange += [Failure("ledger", entry.id, LedgerError(entry.trouble)) for entry in pools.values() if entry.trouble]
    for entry in pools.values():
        if (listing := survey.home(entry.id)) is None:
            continue
        if (error := other_account(entry, listing.account)) is None:
            listing.pools[entry.id] = entry
        else:  # machines that this account does not list may exist
            listing.other_accounts[entry.id] = (entry, str(error))
            strange.append(Failure(listing.provider.name, entry.id, error))
    for intent in intents:
        listing = survey.home(intent.pool_id)  # None if its pool cannot be read, or its provider is refused
        if listing is not None and intent.pool_id in listing.pools:
            listing.intents.append(intent)
    unknown = dict.fromkeys(_unread_pools(damaged), "its entry in the ledger cannot be read: repair it")
    unknown |= dict.fromkeys(survey.refused, "the provider in its entry of the ledger cannot be used: see the failure")
    left = [*_of_unknown(survey.listings, unknown), *_without_duplicates(survey)]
    return SurveyView(list(survey.listings.values()), left, [*survey.failures, *survey.refused.values(), *strange])


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


def _of_unknown(listings: Mapping[str, ProviderListing], unknown: Mapping[str, str]) -> Generator[Finding]:
    """Remove the machines of pools whose home is unknown, for these reasons, and return findings that leave them.

    The ledger has these pools, so that tags alone do not prove them dead.
    """
    for listing in listings.values():
        for pool_id, why in sorted(unknown.items()):
            if ids := tuple(machine.id for machine in listing.machines if machine.pool_id == pool_id):
                reason = f"{why}, or end the pool with `skyward stop {pool_id} --provider {listing.provider.name}`"
                yield Finding(Action.LEAVE, pool_id, listing.provider.name, ids, reason)
        listing.machines = [machine for machine in listing.machines if machine.pool_id not in unknown]


def _key(provider: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal providers."""
    return json.dumps(dict(provider), sort_keys=True)


class _Survey:
    """The listings of the providers that have answered, by key, and the failures of the others."""

    def __init__(self, given: Sequence[Provider]) -> None:
        self.listings: dict[str, ProviderListing] = {}
        self.failures: list[Failure] = []
        self.homes: dict[str, str] = {}
        """The key of the provider of each pool."""
        self.refused: dict[str, Failure] = {}
        """The pools whose rows lead to a provider that this process may not use, or does not know."""
        self._given = {_key(provider.to_json()): provider for provider in given}
        self._own = OwnProviders(given)
        self._queried = set[str]()

    def machines(self) -> Generator[Instance]:
        """Return all listed machines."""
        return (machine for listing in self.listings.values() for machine in listing.machines)

    def home(self, pool_id: str) -> ProviderListing | None:
        """Return the listing of a pool's provider; None if there is none."""
        return self.listings.get(self.homes.get(pool_id, ""))

    def ask(self, entries: Iterable[PoolEntry]) -> None:
        """List the machines of the given providers and of the providers of these pools, all at once; each once."""
        wanted: dict[str, Provider] = {}
        for entry in entries:
            try:
                provider = self._own.of(entry)
            except Exception as error:  # another distribution's provider may raise anything
                self.refused[entry.id] = Failure(entry.provider_name, entry.id, error)
            else:
                self.homes[entry.id] = key = _key(provider.to_json())
                wanted.setdefault(key, provider)
        wanted |= self._given
        new = {key: provider for key, provider in wanted.items() if key not in self._queried}
        self._queried |= new.keys()
        for key, answer in zip(new, side_by_side(_listed, list(new.values()), "skyward-sweep"), strict=True):
            if isinstance(answer, Failure):
                self.failures.append(answer)
            else:
                self.listings[key] = answer


def _listed(provider: Provider) -> ProviderListing | Failure:
    try:
        return ProviderListing(provider, provider.account(), provider.instances())
    except Exception as error:  # an error of any kind does not prove that machines are gone
        return Failure(provider.name, "", error)


def _without_duplicates(survey: _Survey) -> list[Finding]:
    """Keep each machine in one listing: that of its pool's provider, or the first with it.

    Return findings that leave the machines of no such listing.
    """
    left: list[Finding] = []
    seen = set[tuple[str, str]]()
    own = {(key, machine.id) for key, listing in survey.listings.items() for machine in listing.machines}
    for key, listing in survey.listings.items():
        kept: list[Instance] = []
        for machine in listing.machines:
            home = survey.homes.get(machine.pool_id)
            if home in (None, key) and (home is not None or (listing.provider.name, machine.id) not in seen):
                kept.append(machine)
            elif home not in (None, key) and (home, machine.id) not in own:
                reason = "its pool was opened with other settings of the provider, which do not list it, or failed"
                left.append(Finding(Action.LEAVE, machine.pool_id, listing.provider.name, (machine.id,), reason))
            seen.add((listing.provider.name, machine.id))
        listing.machines = kept
    return left


def owner_states(listing: ProviderListing) -> dict[Owner, OwnerState]:
    """Return the states of all owners of a provider's pools and machines."""
    entries = [*listing.pools.values(), *(entry for entry, _ in listing.other_accounts.values())]
    return {owner: owner.state() for owner in {*(entry.owner for entry in entries), *owners_of(listing.machines)}}


class ProviderWork:
    """The work of a sweep at one provider. `do` carries out the findings and changes them to what was done."""

    def __init__(
        self,
        ledger: Ledger | None,
        listing: ProviderListing,
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
        self._provider = listing.provider
        self._pools = listing.pools
        self._known = listing.pools | {pool_id: entry for pool_id, (entry, _) in listing.other_accounts.items()}
        self._intents = {intent.id: intent for intent in listing.intents}
        self._clock = clock
        self._monotonic = monotonic
        self._pause = pause

    def do(self) -> None:
        """Adopt machines, condemn pools, close entries and end machines, in this order."""
        self._adopt(self._of(Action.ADOPT))
        self._condemn(
            {finding.pool_id for finding in self._of(Action.END, Action.CLOSE, Action.WAIT)} & self._known.keys()
        )
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
            except LedgerConflict:  # its owner has bound the entry meanwhile
                pass
            except LedgerError as error:
                self._fail(finding.pool_id, error)
            else:
                self.adopted.append(finding)

    def _condemn(self, pool_ids: Iterable[str]) -> None:
        """Condemn these pools.

        Those whose lease was renewed meanwhile, and those that the ledger could not condemn, are left.
        """
        seen = {
            pool_id: entry.written_lease
            for pool_id in pool_ids
            if (entry := self._known[pool_id]).ended_at is None and entry.condemned_at is None
        }
        if not seen:
            return
        assert self._ledger is not None
        try:
            spared = dict.fromkeys(
                seen.keys() - self._ledger.condemn_all(seen), "its lease was renewed during the sweep"
            )
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
        """Close entries of pools without machines, in a few transactions."""
        if not (intents := [self._intents[number] for finding in findings for number in finding.intents]):
            return
        assert self._ledger is not None
        try:
            intents = self._still_missing(intents)
        except Exception as error:  # without a listing there is no proof that the machines are gone
            self._fail("", error)
            return
        now = self._clock()
        ends = ends_of(self._provider, self._pools, intents, now)
        try:
            close_entries(
                self._ledger, intents, f"{self._provider.name} does not list it; a sweep has closed it", now, ends
            )
        except LedgerError as error:
            self._fail("", error)

    def _still_missing(self, intents: Sequence[Intent]) -> list[Intent]:
        """Terminate machines that have an id and list again; return the intents that the second listing lacks too.

        One listing may have been wrong.
        """
        if not (ids := sorted(str(intent.cloud_id) for intent in intents if intent.cloud_id is not None)):
            return list(intents)
        self._provider.terminate(ids)
        listed = {instance.id for instance in self._provider.instances()}
        return [intent for intent in intents if intent.cloud_id not in listed]

    def _end_entries(self, pool_ids: Iterable[str]) -> set[str]:
        """End those of these pools that have no open entries, and return their ids."""
        wanted = set(pool_ids)
        if not wanted:
            return set()
        assert self._ledger is not None
        try:
            damaged: list[UnreadableRow] = []
            over = sorted(
                wanted
                - {intent.pool_id for intent in self._ledger.open_intents(unreadable=damaged)}
                - {error.pool_id for error in damaged}
            )
            end_entries(self._ledger, [self._pools[pool_id] for pool_id in over])
        except LedgerError as error:
            self._fail("", error)
            return set()
        return set(over)

    def _end(self, finding: Finding) -> None:
        """End a pool's machines, including those whose entries are to be closed.

        Entries of another account's machines do not change.
        """
        ledger = self._ledger if finding.pool_id in self._pools else None
        try:
            end_machines(
                ledger,
                self._provider,
                finding.pool_id,
                finding.reason,
                may_still_launch=False,
                clock=self._clock,
                monotonic=self._monotonic,
                pause=self._pause,
            )
        except Exception as error:  # the other pools' machines must still be ended
            self._fail(finding.pool_id, error)
        else:
            self.ended.append(finding)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The findings of a sweep, and what it has done about them: nothing if it was a dry run."""

    findings: tuple[Finding, ...] = ()
    ended: tuple[Finding, ...] = ()
    """The findings of END that were carried out: their machines are known to be gone."""
    failures: tuple[Failure, ...] = ()
    closed: tuple[Finding, ...] = ()
    """The findings of CLOSE that were carried out: the entries and the pool's own entry are closed."""
    adopted: tuple[Finding, ...] = ()
    """The findings of ADOPT that were carried out: the machines are in the ledger now."""
    pruned: tuple[str, ...] = ()
    """Descriptions of unused things that outlive pools and that the providers have removed, or would remove if this was
    no dry run (`Provider.prune`).
    """

    @property
    def to_do(self) -> tuple[Finding, ...]:
        """The findings that need an action, even if that is only to condemn a dead pool and look again."""
        return tuple(finding for finding in self.findings if finding.action is not Action.LEAVE)


def sweep(
    ledger: Ledger | None,
    providers: Sequence[Provider] = (),
    *,
    is_dry_run: bool = True,
    min_age_seconds: float = MIN_AGE_SECONDS,
    include_unknown: bool = False,
    clock: Clock = utc_now,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> SweepReport:
    """Find machines whose owner is dead, at these providers and at those of the ledger's open pools, and end them.

    Args:
        ledger: None decides by tags alone.
        providers: queried in addition to those that the ledger names.
        is_dry_run: only report.
        min_age_seconds: machines that the ledger does not know are left until they are older than that.
        include_unknown: also end such machines if it is unknown whether their owner lives. They may belong to another
            user.
        clock: returns the time of day.
        monotonic: counts seconds, for deadlines.
        pause: waits for so many seconds.

    Failures are in the report and stop nothing else. Nothing is done at a provider that cannot list its machines.
    Raises LedgerError if the ledger cannot be read.
    """
    view = take_survey(ledger, providers)

    def settle(listing: ProviderListing) -> ProviderWork:
        facts = _facts(listing, clock())
        findings = decide(facts, min_age_seconds=min_age_seconds, include_unknown=include_unknown)
        work = ProviderWork(ledger, listing, findings, clock, monotonic, pause)
        if not is_dry_run:
            if needing_second_look(facts):  # `condemn_all` refuses those whose leases are renewed meanwhile
                pause(RENEWAL_SECONDS)
            work.do()
        return work

    done = side_by_side(settle, view.listings, "skyward-sweep")
    # last: machines cost more
    pruned = side_by_side(
        lambda listing: _pruned(listing.provider, clock(), is_dry_run=is_dry_run), view.listings, "skyward-sweep"
    )
    return _report(view, done, pruned)


def _facts(listing: ProviderListing, now: datetime) -> ProviderFacts:
    return ProviderFacts(
        listing.provider,
        listing.machines,
        listing.pools,
        listing.intents,
        now,
        Owner.here(),
        owner_states(listing),
        listing.other_accounts,
    )


def _pruned(provider: Provider, now: datetime, *, is_dry_run: bool) -> list[str] | Failure:
    try:
        return [f"{provider.name}: {line}" for line in provider.prune(now, is_dry_run=is_dry_run)]
    except Exception as error:  # an error of any kind must not fail the sweep, which is done
        return Failure(provider.name, "", error)


def _report(view: SurveyView, done: Sequence[ProviderWork], pruned: Sequence[list[str] | Failure]) -> SweepReport:
    return SweepReport(
        (*(finding for work in done for finding in work.findings), *view.left),
        tuple(finding for work in done for finding in work.ended),
        (
            *view.failures,
            *(failure for work in done for failure in work.failures),
            *(one for one in pruned if isinstance(one, Failure)),
        ),
        closed=tuple(finding for work in done for finding in work.closed),
        adopted=tuple(finding for work in done for finding in work.adopted),
        # several listings may be of one account
        pruned=tuple(dict.fromkeys(line for lines in pruned if not isinstance(lines, Failure) for line in lines)),
    )
