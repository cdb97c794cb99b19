"""Reads the ledger and the providers' listings, before the policy of the sweep decides."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyward_core.cleanup.policy import Action, Finding, other_account, owners_of
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import LedgerError
from skyward_core.ledger.rows import Intent, PoolEntry, UnreadableRow
from skyward_core.machines.instances import Instance
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.providers.base import Provider, load

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


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
    survey = _Survey({_key(provider.to_json()): provider for provider in providers})
    survey.ask(pools.values())
    late = _entries(
        ledger, {machine.pool_id for machine in survey.machines()} - pools.keys() - _unread_pools(damaged), damaged
    )
    pools |= late
    survey.ask(late.values())
    strange = [Failure("ledger", error.pool_id, error) for error in damaged]
    strange += [Failure("ledger", entry.id, LedgerError(entry.trouble)) for entry in pools.values() if entry.trouble]
    for entry in pools.values():
        if (listing := survey.listings.get(_key(entry.provider))) is None:
            continue
        if (error := other_account(entry, listing.account)) is None:
            listing.pools[entry.id] = entry
        else:  # machines that this account does not list may exist
            listing.other_accounts[entry.id] = (entry, str(error))
            strange.append(Failure(listing.provider.name, entry.id, error))
    for intent in intents:
        entry = pools.get(intent.pool_id)  # None if it cannot be read
        listing = None if entry is None else survey.listings.get(_key(entry.provider))
        if listing is not None and intent.pool_id in listing.pools:
            listing.intents.append(intent)
    left = [*_unreadable(survey.listings, _unread_pools(damaged)), *_without_duplicates(survey.listings, pools)]
    return SurveyView(list(survey.listings.values()), left, [*survey.failures, *strange])


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


def _unreadable(listings: Mapping[str, ProviderListing], pool_ids: set[str]) -> Generator[Finding]:
    """Remove the machines of pools whose entries cannot be read, and return findings that leave them.

    The ledger has these pools, so that tags alone do not prove them dead.
    """
    for listing in listings.values():
        for pool_id in sorted(pool_ids):
            if ids := tuple(machine.id for machine in listing.machines if machine.pool_id == pool_id):
                reason = (
                    f"its entry in the ledger cannot be read: repair it, or end the pool with `skyward stop {pool_id}"
                    f" --provider {listing.provider.name}`"
                )
                yield Finding(Action.LEAVE, pool_id, listing.provider.name, ids, reason)
        listing.machines = [machine for machine in listing.machines if machine.pool_id not in pool_ids]


def _key(provider: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal providers."""
    return json.dumps(dict(provider), sort_keys=True)


class _Survey:
    """The listings of the providers that have answered, by key, and the failures of the others."""

    def __init__(self, given: Mapping[str, Provider]) -> None:
        self.listings: dict[str, ProviderListing] = {}
        self.failures: list[Failure] = []
        self._given = dict(given)
        self._queried = set[str]()

    def machines(self) -> Generator[Instance]:
        """Return all listed machines."""
        return (machine for listing in self.listings.values() for machine in listing.machines)

    def ask(self, entries: Iterable[PoolEntry]) -> None:
        """List the machines of the given providers and of the providers of these pools, all at once; each once."""
        wanted: dict[str, Provider | Mapping[str, Any]] = {
            **{_key(entry.provider): entry.provider for entry in entries},
            **self._given,
        }
        new = {key: provider for key, provider in wanted.items() if key not in self._queried}
        self._queried |= new.keys()
        for key, answer in zip(new, side_by_side(_listed, list(new.values()), "skyward-sweep"), strict=True):
            if isinstance(answer, Failure):
                self.failures.append(answer)
            else:
                self.listings[key] = answer


def _listed(wanted: Provider | Mapping[str, Any]) -> ProviderListing | Failure:
    name = wanted.name if isinstance(wanted, Provider) else str(wanted.get("name", "?"))
    try:
        provider = load(wanted)
        return ProviderListing(provider, provider.account(), provider.instances())
    except Exception as error:  # an error of any kind does not prove that machines are gone
        return Failure(name, "", error)


def _without_duplicates(listings: Mapping[str, ProviderListing], pools: Mapping[str, PoolEntry]) -> list[Finding]:
    """Keep each machine in one listing: that of its pool's provider, or the first with it.

    Return findings that leave the machines of no such listing.
    """
    left: list[Finding] = []
    seen = set[tuple[str, str]]()
    own = {(key, machine.id) for key, listing in listings.items() for machine in listing.machines}
    for key, listing in listings.items():
        kept: list[Instance] = []
        for machine in listing.machines:
            entry = pools.get(machine.pool_id)
            home = key if entry is None else _key(entry.provider)
            if (home == key) and (entry is not None or (listing.provider.name, machine.id) not in seen):
                kept.append(machine)
            elif home != key and (home, machine.id) not in own:
                reason = "its pool was opened with other settings of the provider, which do not list it, or failed"
                left.append(Finding(Action.LEAVE, machine.pool_id, listing.provider.name, (machine.id,), reason))
            seen.add((listing.provider.name, machine.id))
        listing.machines = kept
    return left


def owner_states(listing: ProviderListing) -> dict[Owner, OwnerState]:
    """Return the states of all owners of a provider's pools and machines."""
    entries = [*listing.pools.values(), *(entry for entry, _ in listing.other_accounts.values())]
    return {owner: owner.state() for owner in {*(entry.owner for entry in entries), *owners_of(listing.machines)}}
