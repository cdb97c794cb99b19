"""Terminates all machines of a pool and waits until the provider confirms it: for the pool, its reaper and the sweep.

It requests the end of the machines that are recorded and of those that the provider lists, and repeats this. Only a
listing proves that a machine is gone, or a provider whose `terminate` confirms. An outage proves nothing: the teardown
waits until it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import LoopThread, Threads
from skyward_core.errors import InstancesLeft
from skyward_core.machines.instances import Instance
from skyward_core.providers.base import Provider

FIRST_TRY_PAUSE_SECONDS, LONGEST_TRY_PAUSE_SECONDS = 0.5, 30.0
DEADLINE_SECONDS = 600.0
"""The longest wait, even if a provider says that it may take longer."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 2.0
_log = logging.getLogger("skyward")


# Ends single machines of an open pool: lost ones, and those that did not become a node.
#
# States of such a machine:
#
#     lost ──request──▶ accepted, and still listed ──not listed any more, or the provider confirms──▶ gone (recorded;
#      │                                                                                              its money is free)
#      └──the request failed──▶ requested again, with growing pauses ──┘
#
# The first request is made by the caller or in a separate thread, because a provider may be slow. One other thread
# repeats request and listing for all machines that are left. It starts with the first of them and ends with the last
# one, or with the pool. If a machine is not gone when the thread ends, it stays in the ledger as rented: `teardown`
# ends it when the pool closes, or a sweep after a crash.
#
# Only ids that the pool has rented are requested. A listing counts only after the provider has accepted a request for
# the machine's end. An outage proves nothing.


class Termination:
    """One machine that is to end."""

    def __init__(self, instance_id: str, provider: TerminatingProvider) -> None:
        self.instance_id = instance_id
        self.provider = provider
        self.was_accepted = False
        """Whether the provider has accepted a request for its end."""
        self.over = threading.Event()
        """Set when the machine is gone, or when the pool ends: then the pool's teardown ends it."""


class Terminations:
    """All terminations of a pool. `record_gone` gets the ids of machines that are gone, and the evidence.

    Safe to use from several threads. `stop` ends its threads.
    """

    def __init__(self, pool_id: str, record_gone: Callable[[Iterable[str], str], object]) -> None:
        self._pool_id = pool_id
        self._record_gone = record_gone
        self._lock = threading.Lock()
        self._all: set[Termination] = set()
        self._left: set[Termination] = set()
        self._first_requests = Threads()
        self._repeater: LoopThread | None = None
        self._more = threading.Event()
        self._closing = threading.Event()
        self._listing = threading.Lock()
        """Held during a listing: the threads that wait for it share the next one."""
        self._last_listing: tuple[TerminatingProvider | None, float, set[str] | None] = None, 0.0, None
        """Of which provider, when it began (time.monotonic), and the ids in it, None if it failed."""

    def end(self, instance_id: str, provider: TerminatingProvider) -> Termination:
        """Request the end of a machine now; the repeating thread takes over if it is not gone. Raises nothing."""
        termination = self._of(instance_id, provider)
        self._request_first(termination)
        return termination

    def end_in_thread(
        self, instance_id: str, provider: TerminatingProvider, name: str, first: Callable[[], None]
    ) -> Termination:
        """Do the same in a thread of this name, after `first`, which may take long."""
        termination = self._of(instance_id, provider)

        def work() -> None:
            try:
                first()
            finally:
                self._request_first(termination)

        self._first_requests.run(name, work)
        return termination

    def stop(self) -> None:
        """Make no further request and release all waiting threads. Waits for requests that are in flight."""
        self._closing.set()
        self._more.set()
        with self._lock:
            terminations, repeater = list(self._all), self._repeater
        for termination in terminations:
            termination.over.set()
        self._first_requests.join()
        if repeater is not None:
            repeater.join()

    def _of(self, instance_id: str, provider: TerminatingProvider) -> Termination:
        termination = Termination(instance_id, provider)
        with self._lock:
            self._all.add(termination)
        if self._closing.is_set():
            termination.over.set()
        return termination

    def _request_first(self, termination: Termination) -> None:
        self._request([termination])
        if termination.over.is_set() or self._closing.is_set():
            return
        with self._lock:
            self._left.add(termination)
            self._more.set()
            if self._repeater is not None:
                return
            self._repeater = repeater = LoopThread("skyward-ending", self._repeat)
        if not repeater.start_if_possible():
            self._repeat()

    def _repeat(self) -> None:
        backoff = Backoff(FIRST_TRY_PAUSE_SECONDS, LONGEST_TRY_PAUSE_SECONDS)
        pauses = backoff.pauses()
        while not self._closing.wait(0):
            if self._more.is_set():
                self._more.clear()
                pauses = backoff.pauses()
            if self._more.wait(next(pauses)):
                continue  # another machine is lost, or the pool closes
            with self._lock:
                left = sorted(self._left, key=lambda termination: termination.instance_id)
            self._request(left)
            with self._lock:
                self._left = {termination for termination in self._left if not termination.over.is_set()}
                if not self._left:
                    self._repeater = None
                    return

    def _request(self, terminations: Sequence[Termination]) -> None:
        """Request the end of these machines once, and find out which are gone."""
        provider = terminations[0].provider  # at any time one provider has all machines of a pool
        ids = [termination.instance_id for termination in terminations]
        answer = request_termination(provider, ids)
        if answer.error is not None:
            _log.debug("%s was asked to end %s: %s", provider.name, ", ".join(ids), answer.error)
        refused = frozenset(ids) if answer.unconfirmed is None else answer.unconfirmed
        for termination in terminations:
            termination.was_accepted = termination.was_accepted or termination.instance_id not in refused
        accepted = [termination for termination in terminations if termination.was_accepted]
        if provider.terminate_confirms:
            self._are_gone(
                [termination for termination in accepted if termination.instance_id not in refused],
                f"{provider.name} confirmed its termination",
                answer.proofs,
            )
        elif accepted and (listed := self._listed(provider, time.monotonic())) is not None:
            self._are_gone(
                [termination for termination in accepted if termination.instance_id not in listed],
                f"{provider.name} lists it no more",
                answer.proofs,
            )

    def _listed(self, provider: TerminatingProvider, since: float) -> set[str] | None:
        """Return the ids in a listing that began after `since` (time.monotonic), None if it failed.

        When many machines are lost at once, each thread would list the whole pool: 50 of 1,000 took 20 s of processor.
        """
        with self._listing:
            whose, began, _ = self._last_listing
            if whose is not provider or began <= since:
                began, ids = time.monotonic(), None
                try:
                    ids = {instance.id for instance in provider.instances(self._pool_id)}
                except Exception as error:
                    _log.debug("%s could not list its machines: %s", provider.name, error)
                self._last_listing = provider, began, ids
            return self._last_listing[2]

    def _are_gone(self, terminations: Sequence[Termination], evidence: str, proofs: Mapping[str, str]) -> None:
        if not terminations:
            return
        gone = {termination.instance_id for termination in terminations}
        try:
            report_gone(self._record_gone, gone, evidence, proofs)
        except Exception:  # the lease is lost, which the session notices too; the machines are gone in any case
            _log.debug("it could not be recorded that machines are gone", exc_info=True)
        with self._lock:
            self._all.difference_update(terminations)
        for termination in terminations:
            termination.over.set()


class TerminatingProvider(Protocol):
    """The part of a provider that ends machines."""

    name: ClassVar[str]
    terminate_confirms: ClassVar[bool]

    def instances(self, pool_id: str | None = None) -> list[Instance]: ...
    def terminate(self, ids: Sequence[str]) -> Mapping[str, str] | None: ...


@dataclass(frozen=True, slots=True)
class TerminationAnswer:
    """What a provider has answered to one request for the end of machines."""

    unconfirmed: frozenset[str] | None
    """The machines that it could not end; None if it does not say which."""
    proofs: Mapping[str, str] = field(default_factory=dict[str, str])
    """By machine: how the provider knows that it is gone, in its words."""
    error: Exception | None = None


def request_termination(provider: TerminatingProvider, ids: Sequence[str]) -> TerminationAnswer:
    """Ask a provider once to terminate these machines. Raises nothing: an error is part of the answer."""
    try:
        return TerminationAnswer(frozenset(), provider.terminate(ids) or {} if ids else {})
    except InstancesLeft as error:
        return TerminationAnswer(frozenset(error.ids) or None, error=error)
    except Exception as error:  # the caller must go on with its next request
        return TerminationAnswer(None, error=error)


def report_gone(
    record: Callable[[Iterable[str], str], object], gone: AbstractSet[str], evidence: str, proofs: Mapping[str, str]
) -> None:
    """Record that machines are gone, with the evidence, and with the provider's own proof if it has given one."""
    for proof in sorted({proofs.get(machine, "") for machine in gone}):
        its = sorted(machine for machine in gone if proofs.get(machine, "") == proof)
        record(its, f"{evidence}: {proof}" if proof else evidence)


class MachineRecord(Protocol):
    """The record of a pool's machines: which are rented, which are to end, and which are gone."""

    def rented(self) -> set[str]:
        """Return the ids of the machines that are not known to be gone."""
        ...

    def found(self, instances: Iterable[Instance]) -> None:
        """Record that the provider lists these machines; some may be new to the record."""
        ...

    def ending(self, instance_ids: Iterable[str]) -> None:
        """Record that the end of these machines is about to be requested for the first time.

        It must not wait for anything, because the machines go on running meanwhile.
        """
        ...

    def end_requested(self, instance_ids: Iterable[str]) -> None:
        """Record that the end of these machines was requested."""
        ...

    def seen_gone(self, instance_ids: Iterable[str]) -> None:
        """These machines are known to be gone, and cost nothing from now on.

        It must not wait for anything: `gone` follows, and may wait for a locked ledger.
        """
        ...

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        """Record that these machines are gone, and the evidence."""
        ...


@dataclass(slots=True)
class _Progress:
    """What is known between two rounds."""

    left: set[str]
    requested: set[str] = field(default_factory=set[str])
    seen: dict[str, Instance] = field(default_factory=dict[str, Instance])
    missing: set[str] = field(default_factory=set[str])
    """The machines that the last listing lacked."""
    errors: list[Exception] = field(default_factory=list[Exception])
    proofs: dict[str, str] = field(default_factory=dict[str, str])
    """By machine: how the provider knows that it is gone, in its words."""


def tear_down(
    provider: Provider,
    pool_id: str,
    record: MachineRecord,
    *,
    are_all_known: bool = False,
    presumed_gone: AbstractSet[str] = frozenset(),
    unsure_until: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Terminate the machines of a pool, those in the record and those that the provider lists, until none is left. May
    be called again.

    Args:
        provider: the provider of the machines.
        pool_id: the pool of the machines.
        record: gets what is requested and what is gone.
        are_all_known: no machine can exist that the record lacks. A provider whose `terminate` confirms need not list
            its machines then.
        presumed_gone: ids that the provider need not confirm. Their lease has run out, so that they have ended
            themselves, and their host does not answer.
        unsure_until: before this time on `clock` a machine may exist that the provider does not list. A listing that
            was requested earlier does not prove that a machine is gone.
        clock: counts seconds.
        pause: waits for so many seconds.

    Raises InstancesLeft if some could not be confirmed gone in time. Its cause is the last error.
    """
    patience = min(DEADLINE_SECONDS, provider.gone_deadline_seconds)
    deadline = max(clock() + patience, unsure_until + patience if unsure_until else 0.0)
    pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, 1.5).pauses()
    is_sure = provider.terminate_confirms and are_all_known
    progress = _Progress(left=record.rented())
    while True:
        if not is_sure and (listed := _listed(provider, pool_id, progress, record)) is not None:
            progress.left |= listed
        new = _begin_to_end(progress, record)
        unconfirmed = _terminate(provider, progress)
        confirmed = set[str]()
        if provider.terminate_confirms and unconfirmed is not None:
            confirmed = (progress.left - unconfirmed) & record.rented()  # before they are seen to be gone
            record.seen_gone(confirmed)
        if new:
            record.end_requested(new)  # after the request: a locked ledger may take half a minute
        if provider.terminate_confirms and unconfirmed is not None:
            if confirmed:
                report_gone(record.gone, confirmed, f"{provider.name} confirmed its termination", progress.proofs)
            if lapsed := unconfirmed & presumed_gone & record.rented():
                record.gone(sorted(lapsed), "its lease has expired, and its host does not answer")
            progress.left = set(unconfirmed - presumed_gone)
            if is_sure and not progress.left:
                return
        requested_at = clock()
        still = _listed(provider, pool_id, progress, record)
        if still is not None and requested_at < unsure_until:
            progress.left |= still
        elif still is not None:
            if gone := _proved_gone(progress, record.rented() - still, was_accepted=unconfirmed is not None):
                record.seen_gone(gone)
                report_gone(record.gone, gone, f"{provider.name} lists it no more", progress.proofs)
            progress.left = still | (progress.missing - gone)
            if not progress.left:
                return
        if clock() > deadline:
            raise _instances_left(provider, progress, patience)
        pause(next(pauses))


def _proved_gone(progress: _Progress, missing: set[str], *, was_accepted: bool) -> set[str]:
    """Return which of the machines that a listing lacks are gone.

    These are all of them; after a failed termination only those that the listing before lacked too.
    """
    gone = missing if was_accepted else missing & progress.missing
    progress.missing = missing
    return gone


def _listed(provider: Provider, pool_id: str, progress: _Progress, record: MachineRecord) -> set[str] | None:
    """Return the ids of the pool's machines, or None after an error, which is kept."""
    try:
        found = {instance.id: instance for instance in provider.instances(pool_id)}
    except Exception as error:  # the next round must come
        progress.errors.append(error)
        return None
    progress.seen |= found
    record.found(found.values())
    return set(found)


def _begin_to_end(progress: _Progress, record: MachineRecord) -> list[str]:
    """Record which machines are about to be terminated for the first time, and return them."""
    new = sorted(progress.left - progress.requested)
    progress.requested.update(new)
    if new:
        record.ending(new)
    return new


def _terminate(provider: Provider, progress: _Progress) -> frozenset[str] | None:
    """Request the end of all that is left.

    Return the machines that the provider could not end, or None if it does not say which.
    """
    answer = request_termination(provider, sorted(progress.left))
    progress.proofs.update(answer.proofs)
    if answer.error is not None:
        progress.errors.append(answer.error)
    return answer.unconfirmed


def _instances_left(provider: Provider, progress: _Progress, patience: float) -> InstancesLeft:
    left = sorted(progress.left)
    ids = ", ".join(left) or "its machines"
    pages = [
        url
        for instance_id in left
        if (instance := progress.seen.get(instance_id)) and (url := provider.console_url(instance))
    ]
    look = f"Look at {', '.join(pages)}" if pages else "Look at its console"
    error = InstancesLeft(
        f"{provider.name} was asked to terminate {ids}; after {patience:.0f} s they are not confirmed gone. {look};"
        " `skyward sweep` asks again",
        left,
    )
    error.__cause__ = progress.errors[-1] if progress.errors else None
    return error
