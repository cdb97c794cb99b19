"""Terminates all machines of a pool and waits until the provider confirms it: for the pool, its reaper and the sweep.

It requests the end of the machines that are recorded and of those that the provider lists, and repeats this. Only a
listing proves that a machine is gone, or a provider whose `terminate` confirms. An outage proves nothing: the teardown
waits until it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import InstancesLeft
from skyward_core.machines.instances import Instance
from skyward_core.providers.base import Provider
from skyward_core.provisioning.termination import report_gone, request_termination

DEADLINE_SECONDS = 600.0
"""The longest wait, even if a provider says that it may take longer."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 2.0


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
        unconfirmed = _terminate(provider, progress, record)
        if provider.terminate_confirms and unconfirmed is not None:
            _report_confirmed(provider, progress, record, unconfirmed, presumed_gone)
            if is_sure and not progress.left:
                return
        requested_at = clock()
        still = _listed(provider, pool_id, progress, record)
        if still is not None and requested_at < unsure_until:
            progress.left |= still
        elif still is not None:
            if gone := _proved_gone(progress, record.rented() - still, was_accepted=unconfirmed is not None):
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


def _terminate(provider: Provider, progress: _Progress, record: MachineRecord) -> frozenset[str] | None:
    """Request the end of all that is left.

    Return the machines that the provider could not end, or None if it does not say which.
    """
    new = sorted(progress.left - progress.requested)
    progress.requested.update(new)
    if new:
        record.ending(new)
    answer = request_termination(provider, sorted(progress.left))
    progress.proofs.update(answer.proofs)
    if answer.error is not None:
        progress.errors.append(answer.error)
    if new:
        record.end_requested(new)  # after the request: a locked ledger may take half a minute
    return answer.unconfirmed


def _report_confirmed(
    provider: Provider,
    progress: _Progress,
    record: MachineRecord,
    unconfirmed: frozenset[str],
    presumed_gone: AbstractSet[str],
) -> None:
    """Record what a provider has confirmed: all machines of its request that it has not named as left are gone."""
    rented = record.rented()
    if confirmed := (progress.left - unconfirmed) & rented:
        report_gone(record.gone, confirmed, f"{provider.name} confirmed its termination", progress.proofs)
    if lapsed := unconfirmed & presumed_gone & rented:
        record.gone(sorted(lapsed), "its lease has expired, and its host does not answer")
    progress.left = set(unconfirmed - presumed_gone)


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
