"""The ledger entries of a pool, for a process that is not the pool's owner and ends it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from skyward_core.cleanup.policy import (
    NO_ENDS,
    Ends,
    answers,
    can_see,
    ends_of,
    known_end,
    latest_request,
    shown_ends,
    unsure_seconds,
)
from skyward_core.config.own_providers import kind_is_local, provider_of
from skyward_core.errors import LedgerConflict, LedgerError, SkywardError
from skyward_core.ledger.journal import not_billed, request_for_found, requested_by
from skyward_core.ledger.rows import Bucket, Intent, PoolEntry, ResourceKind, UnreadableRow
from skyward_core.machines.instances import Instance
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import Provider

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

LEAST_NOTED_SECONDS = 1.0
"""Shorter times in the bucket TERMINATING are not recorded, because each costs a transaction."""
MOST_POOLS = 50
"""How many pools one look settles, the oldest first: it takes some milliseconds for each. Those that cannot be settled
are not counted: only a sweep ends them, and to pass over one costs about as much as to list it.
"""
_log = logging.getLogger("skyward")


type Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """Return the current time, in UTC."""
    return datetime.now(UTC)


class PoolRecord:
    """A pool's ledger entries during its teardown (a `teardown.MachineRecord`).

    After the first error the ledger is not used until the machines are gone: each try may take half a minute, and the
    machines would go on running.
    """

    def __init__(self, ledger: Ledger | None, provider: Provider, pool_id: str, why: str, clock: Clock) -> None:
        self._ledger = ledger
        self._provider = provider
        self._pool_id = pool_id
        self._why = why
        self._clock = clock
        self._entry: PoolEntry | None = None
        self._of_machines: list[Intent] = []
        """All entries of the pool's machines, also those of machines that are gone."""
        self._strange: set[str] = set()
        """The listed machines that none of them names."""
        self._intents: dict[int, Intent] = {}
        self._requested_before: dict[int, datetime | None] = {}
        """By entry: when another process requested the end of its machine."""
        self._numbers: dict[str, int] = {}
        self._machines: dict[str, Instance] = {}
        self._requested: dict[str, datetime] = {}
        self._gone: dict[str, str] = {}
        self._trouble: LedgerError | None = None
        self._try(self._read)

    def _read(self) -> None:
        assert self._ledger is not None
        self._entry = self._ledger.pool(self._pool_id)
        intents = self._ledger.intents(pool_id=self._pool_id)
        self._of_machines = [intent for intent in intents if intent.kind is ResourceKind.INSTANCE]
        for intent in self._of_machines:
            if intent.gone_at is None or intent.cloud_id is None:
                self._intents[intent.id] = intent
                self._requested_before.setdefault(intent.id, intent.end_asked_at)
                if intent.cloud_id is not None:
                    self._numbers[intent.cloud_id] = intent.id

    def unlisted_seconds(self, *, may_still_launch: bool) -> float:
        """Return for how long from now a machine may exist, or come to exist, that neither this record nor a listing
        contains.
        """
        longest = unsure_seconds(self._provider)
        if self._ledger is None or self._trouble is not None:
            return longest if may_still_launch else 0.0
        now, entry = self._clock(), self._entry
        ages = (
            [(now - latest_request(entry, intent, now)).total_seconds() for intent in self._unanswered()]
            if entry is not None
            else []
        )
        hidden = [(now - (intent.bound_at or intent.intended_at)).total_seconds() for intent in self._hidden()]
        unanswered = longest - min(ages) if ages else 0.0
        return max(0.0, unanswered, self._provider.listing_lag_seconds - min(hidden) if hidden else 0.0)

    def _hidden(self) -> Generator[Intent]:
        """Return the entries with an id that no listing has contained yet, which soon after a launch proves nothing."""
        return (
            intent
            for intent in self._intents.values()
            if intent.gone_at is None and intent.cloud_id is not None and intent.cloud_id not in self._machines
        )

    def _unanswered(self) -> Generator[Intent]:
        return (intent for intent in self._intents.values() if intent.cloud_id is None and intent.gone_at is None)

    # ── the methods of MachineRecord ─────────────────────────────────────────────────────────────────────────────────

    def rented(self) -> set[str]:
        """Return the ids of the machines that are not known to be gone."""
        return {*self._numbers, *self._machines} - self._gone.keys()

    def found(self, instances: Iterable[Instance]) -> None:
        """Record the listed machines. A new one is bound to its entry; a second one of an entry's launch gets its own.

        A machine that no entry names is ended too, and not billed.
        """
        listed = list(instances)
        for instance in listed:
            self._gone.pop(instance.id, None)  # an earlier listing lacked it by mistake
        self._machines |= {instance.id: instance for instance in listed}
        self._try(self._bind_all)

    def ending(self, instance_ids: Iterable[str]) -> None:
        """Note that the end of these machines is about to be requested."""
        ids = list(instance_ids)
        self._requested |= dict.fromkeys(ids, self._clock())
        _log.info("%s: terminating %s: %s", self._pool_id, ", ".join(ids), self._why)

    def end_requested(self, instance_ids: Iterable[str]) -> None:
        """Record that the end of these machines was requested."""
        ids = list(instance_ids)
        self._try(lambda: self._ask_end_all(ids))

    def seen_gone(self, instance_ids: Iterable[str]) -> None:
        """Do nothing: no time of machines is counted here, and `gone` does not wait."""

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        """Note that these machines are gone, with the evidence; `write_down` records it."""
        self._gone |= dict.fromkeys(instance_ids, f"{evidence}; it was ended because {self._why}")

    def ended(self) -> tuple[str, ...]:
        """Return the ids of the machines that a listing has contained and that are gone now."""
        return tuple(sorted(self._machines.keys() & self._gone.keys()))

    # ── writes to the ledger ─────────────────────────────────────────────────────────────────────────────────────────

    def write_down(self) -> None:
        """Write all that is known into the ledger. Raises LedgerError."""
        if self._ledger is None:
            return
        if self._trouble is not None:  # the ledger may be usable again: read and write everything
            self._trouble = None
            self._read()
            self._bind_all()
            self._ask_end_all(self._requested)
        by_evidence: dict[str, list[Intent]] = {}
        for instance_id, evidence in self._gone.items():
            if (number := self._numbers.get(instance_id)) is not None and self._intents[number].gone_at is None:
                by_evidence.setdefault(evidence, []).append(self._intents[number])
        for evidence, intents in by_evidence.items():
            now = self._clock()
            self._take(close_entries(self._ledger, intents, evidence, now, self._ends(intents, now)))

    def _ends(self, intents: Iterable[Intent], now: datetime) -> Ends:
        """Find out until when machines are paid for that no listing here contained: they ended earlier."""
        if self._entry is None:
            return NO_ENDS
        unseen = [
            replace(intent, end_asked_at=self._requested_before.get(intent.id))
            for intent in intents
            if intent.cloud_id not in self._machines
        ]
        return ends_of(self._provider, {self._pool_id: self._entry}, unseen, now)

    def close(self) -> PoolEntry | None:
        """Close all entries, because the provider lists no machine of the pool; return the pool's entry.

        Raises LedgerError.
        """
        self.write_down()
        if self._ledger is not None and (never_were := list(self._unanswered())):
            self._take(
                close_entries(
                    self._ledger,
                    never_were,
                    f"{self._provider.name} lists nothing of the pool; it was ended because {self._why}",
                    self._clock(),
                )
            )
        return self._entry

    def _bind_all(self) -> None:
        if self._ledger is None or self._entry is None:
            return
        new = {
            instance_id: instance
            for instance_id, instance in self._machines.items()
            if instance_id not in self._numbers
        }
        taken = set[int]()
        for instance_id, intent in answers(new.values(), self._intents.values()).items():
            if intent.id not in taken:
                taken.add(intent.id)
                with suppress(LedgerConflict):  # another sweep or the owner has bound the entry meanwhile
                    self._take([self._ledger.bind(intent, instance_id)])
                    del new[instance_id]
        for instance in new.values():
            if (intent := requested_by(instance, self._of_machines)) is not None:
                request = request_for_found(instance, self._provider, self._pool_id, self._clock(), intent.price)
                self._take([self._ledger.adopt(self._pool_id, request, instance.id)])
            elif instance.id not in self._strange:
                self._strange.add(instance.id)
                _log.warning("%s", not_billed(self._pool_id, instance))

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
        """Write to the ledger; after an error do not use it any more, until `write_down`."""
        if self._ledger is None or self._trouble is not None:
            return
        try:
            write()
        except LedgerError as error:
            _log.warning("%s: %s; its machines are ended nevertheless", self._pool_id, error)
            self._trouble = error


def close_entries(
    ledger: Ledger, intents: Sequence[Intent], evidence: str, now: datetime, ends: Ends = NO_ENDS
) -> list[Intent]:
    """Close entries, with a bucket for each second of their machines.

    Seconds after the request for the end are TERMINATING; seconds that were not recorded get a bucket by ADR 0008.
    `ends` has those of machines that were found gone.
    """
    early = ends.before(now, LEAST_NOTED_SECONDS)
    ending = {
        intent.id: {**intent.seconds, Bucket.TERMINATING: seconds}
        for intent in intents
        if (seconds := _terminating_seconds(intent, early.get(intent.id, now))) >= LEAST_NOTED_SECONDS
    }
    if ending:
        ledger.note_all(ending)
    by_words: dict[tuple[Bucket, str], list[int]] = {}
    for intent in intents:
        words = ends.evidence(intent.id, evidence) if intent.id in early and intent.cloud_id is not None else evidence
        by_words.setdefault((_unnoted(intent), words), []).append(intent.id)
    return [
        intent
        for (fill, words), numbers in by_words.items()
        for intent in ledger.close_all(numbers, words, fill=fill, paid_until=early)
    ]


def _terminating_seconds(intent: Intent, until: datetime) -> float:
    """Return the seconds since the request for the end, without those that another bucket has."""
    if intent.end_asked_at is None or intent.cloud_id is None:
        return 0.0
    others = sum(seconds for bucket, seconds in intent.seconds.items() if bucket is not Bucket.TERMINATING)
    return max(
        0.0, min((until - intent.end_asked_at).total_seconds(), (until - intent.intended_at).total_seconds() - others)
    )


def _unnoted(intent: Intent) -> Bucket:
    """Return the bucket for the seconds of a machine after the last record of its owner, which was killed.

    Also for an entry without an id: another sweep may have bound its machine meanwhile.
    """
    if intent.seconds.get(Bucket.LOST):
        return Bucket.LOST
    return (
        Bucket.IDLE if intent.seconds.get(Bucket.IDLE) or intent.seconds.get(Bucket.RUNNING_CALLS) else Bucket.LAUNCHING
    )


def end_entries(ledger: Ledger, entries: Sequence[PoolEntry]) -> None:
    """Settle the costs of pools with their budgets and their runs, and record that the pools have ended."""
    for entry in entries:
        if entry.account is not None or entry.run_account is not None:
            ledger.settle_pool(entry.id, ledger.pool_cost_usd(entry.id))
    # last: after a crash before this line the entries are still open, and the next sweep does both again
    ledger.end_pools([entry.id for entry in entries])


# Settles pools of this computer whose nodes have ended themselves, for any process that looks at the ledger.
#
#     dead, its nodes have written their ends ──▶ condemned ──▶ entries closed, with these ends ──▶ the pool has ended
#
# It reads files and the process table, and asks no provider over a network: `skyward ps` must not wait for a cloud.
# Pools elsewhere are settled by the next process that opens their name, and by a sweep. Each step may be repeated, by
# several processes at once; after a kill between two of them the next process goes on (docs/decisions/0046).


def settle_here(
    ledger: Ledger, *, clock: Clock = utc_now, provider_of: Callable[[PoolEntry], Provider] = provider_of
) -> list[str]:
    """Settle the dead pools of this computer of which nothing is left; return their ids. Raises nothing: a ledger that
    cannot be written to is settled by the next process.

    A pool is settled if each of its machines has written its end, and no process of one is left. Its lease has run out,
    or its owner is dead, or it was condemned.
    """
    try:
        return _settled(ledger, clock, provider_of)
    except (SkywardError, OSError) as error:
        _log.debug("pools that have ended themselves are not settled now: %s", error)
        return []


def _settled(ledger: Ledger, clock: Clock, provider_of: Callable[[PoolEntry], Provider]) -> list[str]:
    unreadable: list[UnreadableRow] = []
    dead = _dead_here(ledger.pools(unreadable=unreadable), clock(), provider_of)
    if not dead:
        return []
    intents = defaultdict[str, list[Intent]](list)
    for intent in ledger.open_intents(unreadable=unreadable):
        intents[intent.pool_id].append(intent)
    spoilt = {error.pool_id for error in unreadable}
    dead = [(entry, provider) for entry, provider in dead if entry.id not in spoilt]
    entries = {entry.id: entry for entry, _ in dead}
    ends = dict(islice(_ends(dead, intents, clock()), MOST_POOLS))
    # a process that has come meanwhile has renewed the lease: then the pool lives
    condemned = ledger.condemn_all({pool_id: entries[pool_id].written_lease for pool_id in ends})
    over = [pool_id for pool_id in ends if pool_id in condemned]
    for pool_id in over:
        if pool_intents := intents.get(pool_id):
            close_entries(ledger, pool_intents, "nothing of it is left", clock(), ends[pool_id])
    end_entries(ledger, [entries[pool_id] for pool_id in over])
    return over


def _dead_here(
    entries: Sequence[PoolEntry], now: datetime, provider_of: Callable[[PoolEntry], Provider]
) -> list[tuple[PoolEntry, Provider]]:
    """Return the pools that are dead, and whose machines are processes that can be seen from here."""
    dead: list[tuple[PoolEntry, Provider]] = []
    here = Owner.here()
    for entry in entries:
        if not entry.trouble and kind_is_local(entry) and entry.why_dead(now, entry.owner.state()):
            try:
                provider = provider_of(entry)
            except SkywardError as error:  # an altered row must not keep the others open
                _log.debug("pool %r is not settled now: %s", entry.id, error)
                continue
            if provider.is_local and can_see(provider, entry.owner, here):
                dead.append((entry, provider))
    return dead


def _ends(
    dead: Sequence[tuple[PoolEntry, Provider]], intents: Mapping[str, Sequence[Intent]], now: datetime
) -> Generator[tuple[str, Ends]]:
    """Return, for each of these pools of which nothing is left, when its machines have ended.

    The provider of one shows the machines of all: those of another price are processes of this computer too.
    """
    if not dead:
        return
    provider = dead[0][1]
    running = {machine.pool_id for machine in provider.instances()}
    over = {entry.id: intents.get(entry.id, ()) for entry, _ in dead if entry.id not in running}
    shown = shown_ends(provider, [intent for pool_intents in over.values() for intent in pool_intents])
    for pool_id, pool_intents in over.items():
        ends = {
            intent.id: end
            for intent in pool_intents
            if intent.kind is ResourceKind.INSTANCE and (end := shown.get(intent.cloud_id or "")) is not None
        }
        if len(ends) == len(pool_intents):
            until = {intent.id: known_end(intent, ends[intent.id], now) for intent in pool_intents}
            yield pool_id, Ends(until, {number: str(end) for number, end in ends.items()})
