"""Giving machines back: the one function that every exit calls, the pool's own, its reaper's and a sweep's.

It asks for the end of what is known and of what the provider lists, asks again, and believes nothing but a listing, or
a provider whose `terminate` confirms. An outage is waited out, and never taken for absence.
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
from skyward_core.provisioning.termination import tell_gone

DEADLINE_SECONDS = 600.0
"""However long a provider says that it may take."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 2.0


class Witness(Protocol):
    """Who keeps book of what is rented: told before termination is asked for and after it, and when a machine is known
    to be gone.
    """

    def rented(self) -> set[str]:
        """Return the ids of the machines that are not known to be gone."""
        ...

    def found(self, instances: Iterable[Instance]) -> None:
        """The provider lists these; some may be new to the book."""
        ...

    def ending(self, instance_ids: Iterable[str]) -> None:
        """Termination of these will be asked for now, for the first time.

        Must wait for nothing: they run on meanwhile.
        """
        ...

    def asked(self, instance_ids: Iterable[str]) -> None:
        """It was asked for."""
        ...

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        """These are gone, and this is how it is known."""
        ...


@dataclass(slots=True)
class _Round:
    """What is known between two tries."""

    left: set[str]
    told: set[str] = field(default_factory=set[str])
    seen: dict[str, Instance] = field(default_factory=dict[str, Instance])
    missing: set[str] = field(default_factory=set[str])
    """What the last listing lacked."""
    trouble: list[Exception] = field(default_factory=list[Exception])
    proofs: dict[str, str] = field(default_factory=dict[str, str])
    """How the provider knows that some are gone, in its words."""


def give_back(
    provider: Provider,
    pool_id: str,
    witness: Witness,
    *,
    are_all_known: bool = False,
    presumed_gone: AbstractSet[str] = frozenset(),
    unsure_until: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Terminate the machines of a pool, those that the witness knows and those that the provider lists, until none is
    left. May be called again.

    Args:
        provider: who rents them.
        pool_id: whose they are.
        witness: is told what is asked for and what is gone.
        are_all_known: no machine can exist that the witness does not know, so a provider whose `terminate` confirms
            need not be asked for others.
        presumed_gone: ids that the provider need not confirm: they have ended by their own lease, and what carries them
            does not answer.
        unsure_until: a machine may exist that the provider does not list before this time on `clock`: what a listing
            lacks that was asked for earlier says nothing.
        clock: counts seconds.
        pause: waits for so many seconds.

    Raises InstancesLeft if some could not be confirmed gone in time, with the last trouble as its cause.
    """
    patience = min(DEADLINE_SECONDS, provider.gone_deadline_seconds)
    deadline = max(clock() + patience, unsure_until + patience if unsure_until else 0.0)
    pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, 1.5).pauses()
    is_sure = provider.terminate_confirms and are_all_known
    state = _Round(left=witness.rented())
    while True:
        if not is_sure and (listed := _listed(provider, pool_id, state, witness)) is not None:
            state.left |= listed
        unconfirmed = _terminate(provider, state, witness)
        if provider.terminate_confirms and unconfirmed is not None:
            _tell_confirmed(provider, state, witness, unconfirmed, presumed_gone)
            if is_sure and not state.left:
                return
        asked_at = clock()
        still = _listed(provider, pool_id, state, witness)
        if still is not None and asked_at < unsure_until:
            state.left |= still
        elif still is not None:
            if gone := _believed(state, witness.rented() - still, was_heard=unconfirmed is not None):
                tell_gone(witness, gone, f"{provider.name} lists it no more", state.proofs)
            state.left = still | (state.missing - gone)
            if not state.left:
                return
        if clock() > deadline:
            raise _left(provider, state, patience)
        pause(next(pauses))


def _believed(state: _Round, missing: set[str], *, was_heard: bool) -> set[str]:
    """Which of those that a listing lacks are gone: all, or if their termination has just failed, those that the
    listing before it lacked too.
    """
    gone = missing if was_heard else missing & state.missing
    state.missing = missing
    return gone


def _listed(provider: Provider, pool_id: str, state: _Round, witness: Witness) -> set[str] | None:
    """The ids of the pool's machines; None if the provider could not say, which is noted."""
    try:
        found = {instance.id: instance for instance in provider.instances(pool_id)}
    except Exception as error:  # a clean-up must go on to the next try
        state.trouble.append(error)
        return None
    state.seen |= found
    witness.found(found.values())
    return set(found)


def _terminate(provider: Provider, state: _Round, witness: Witness) -> set[str] | None:
    """Ask for the end of these machines; return those that the provider could not end, or None if it does not say
    which.
    """
    new = sorted(state.left - state.told)
    state.told.update(new)
    if new:
        witness.ending(new)
    unconfirmed = _asked(provider, state)
    if new:
        witness.asked(new)  # only now: a ledger that is locked may hold this up for half a minute
    return unconfirmed


def _asked(provider: Provider, state: _Round) -> set[str] | None:
    try:
        if state.left:
            state.proofs.update(provider.terminate(sorted(state.left)) or {})
    except InstancesLeft as error:
        state.trouble.append(error)
        return set(error.ids) or None
    except Exception as error:  # likewise
        state.trouble.append(error)
        return None
    return set()


def _tell_confirmed(
    provider: Provider, state: _Round, witness: Witness, unconfirmed: set[str], presumed_gone: AbstractSet[str]
) -> None:
    """A provider whose `terminate` confirms has named what it could not end: all else that it was asked for is gone."""
    rented = witness.rented()
    if confirmed := (state.left - unconfirmed) & rented:
        tell_gone(witness, confirmed, f"{provider.name} confirmed its termination", state.proofs)
    if lapsed := unconfirmed & presumed_gone & rented:
        witness.gone(sorted(lapsed), "its lease has run out, and what carries it does not answer")
    state.left = unconfirmed - presumed_gone


def _left(provider: Provider, state: _Round, patience: float) -> InstancesLeft:
    left = sorted(state.left)
    ids = ", ".join(left) or "its machines"
    places = [
        url
        for instance_id in left
        if (instance := state.seen.get(instance_id)) and (url := provider.console_url(instance))
    ]
    look = f"Look at {', '.join(places)}" if places else "Look at its console"
    error = InstancesLeft(
        f"{provider.name} was asked to terminate {ids}; after {patience:.0f} s they are not confirmed gone. {look};"
        " `skyward sweep` asks again",
        left,
    )
    error.__cause__ = state.trouble[-1] if state.trouble else None
    return error
