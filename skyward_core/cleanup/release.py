"""End the machines of one pool from any process: `end_pool` for a pool that is dead, `release` on purpose."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from skyward_core.cleanup.policy import can_see, other_account
from skyward_core.cleanup.pool_record import Clock, PoolRecord, end_entries, utc_now
from skyward_core.config.own_providers import provider_of, provider_of_lease
from skyward_core.errors import BadRequest, CredentialsError, LedgerError
from skyward_core.ledger.rows import PoolEntry, UnreadableRow
from skyward_core.machines.instances import Lease
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import Provider
from skyward_core.provisioning.teardown import tear_down

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

CONDEMN_TRIES = 20
_log = logging.getLogger("skyward")


def end_pool(
    ledger: Ledger | None,
    provider: Provider,
    pool_id: str,
    *,
    why: str,
    may_still_launch: bool = True,
    clock: Clock = utc_now,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """End a pool's machines, those in the ledger and those that the provider lists, and record the result. May be
    called again.

    The caller must know that the pool is dead or have condemned it. If an answer to a launch may be missing, this asks
    the provider until its listing must contain the machines of that launch.

    Args:
        ledger: None if no ledger can be used: the machines are ended without it.
        provider: the provider of the machines.
        pool_id: the pool of the machines.
        why: the reason, for the evidence.
        may_still_launch: used without a ledger: whether the owner may have stopped just now, during a launch.
        clock: returns the time of day.
        monotonic: counts seconds, for deadlines.
        pause: waits for so many seconds.

    Returns the ids of the machines that a listing has shown and that are gone now. Raises InstancesLeft if some could
    not be confirmed gone; their entries stay open. Raises LedgerError if the machines are gone and the ledger could not
    record it; a later sweep does.
    """
    entry, ended = end_machines(
        ledger, provider, pool_id, why, may_still_launch=may_still_launch, clock=clock, monotonic=monotonic, pause=pause
    )
    if ledger is not None and entry is not None and not ledger.open_intents(pool_id=pool_id):
        end_entries(ledger, [entry])
    return ended


def end_machines(
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
    """End a pool's machines and close their entries.

    Return the pool's own entry, still open, or None, and the ids of the ended machines.
    """
    record = PoolRecord(ledger, provider, pool_id, why, clock)
    unsure_until = 0.0
    if record.unlisted_seconds(may_still_launch=may_still_launch):
        with suppress(Exception):  # after an outage `tear_down` lists again
            record.found(provider.instances(pool_id))
        if seconds := record.unlisted_seconds(may_still_launch=may_still_launch):
            unsure_until = monotonic() + seconds
    try:
        tear_down(provider, pool_id, record, unsure_until=unsure_until, clock=monotonic, pause=pause)
    except BaseException as error:
        try:
            record.write_down()
        except LedgerError as trouble:
            error.add_note(str(trouble))
        raise
    return record.close(), record.ended()


def release(
    lease_or_pool_id: Lease | str,
    *,
    ledger: Ledger | None,
    credentials: Provider | None = None,
    given: Sequence[Provider] = (),
    why: str = "it was stopped on purpose",
    stopped_by: str = "",
    clock: Clock = utc_now,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """End a pool on purpose, live or not, from any process. It is condemned first, so that a live owner launches
    nothing more and closes.

    Args:
        lease_or_pool_id: the pool. A lease also names the provider, and is verified before the first request to it.
        ledger: None if only the lease and the provider's tags are known.
        credentials: the provider, if it needs secrets that neither the environment nor its entry has.
        given: providers that the caller's user has named, one of which may have the machines.
        why: the reason, for the evidence.
        stopped_by: the person who does it, and how. A live owner then raises PoolStopped, which no orchestrator tries
            again; "": the owner's process is believed to be dead, and if it is not, it raises LeaseLost.
        clock: returns the time of day.
        monotonic: counts seconds, for deadlines.
        pause: waits for so many seconds.

    Returns the ids of the machines that a listing has shown and that are gone now. Raises BadRequest if the pool is
    unknown, CredentialsError for a lease or an entry that may have been altered and for credentials that the provider
    refuses, and what `end_pool` raises.
    """
    lease = lease_or_pool_id if isinstance(lease_or_pool_id, Lease) else None
    pool_id = lease_or_pool_id if isinstance(lease_or_pool_id, str) else lease_or_pool_id.pool_id

    def provider_for(entry: PoolEntry) -> Provider:
        return provider_of(entry, given) if credentials is None else credentials

    try:
        entry, provider = (None, None) if ledger is None else _condemned(ledger, pool_id, stopped_by, provider_for)
    except UnreadableRow as error:
        if credentials is None and lease is None:
            raise LedgerError(
                f"{error} Its machines can still be ended: `skyward stop {pool_id} --provider NAME`."
            ) from error
        entry, provider = None, None
    if provider is None:
        provider = credentials or (None if lease is None else provider_of_lease(lease))
    if provider is None:
        raise BadRequest(
            f"The ledger has no pool {pool_id!r}: look with `skyward ps --all`, or name the provider that may have its"
            " machines."
        )
    if entry is not None and entry.provider_account and (error := other_account(entry, provider.account())) is not None:
        raise error
    if entry is not None and not can_see(provider, entry.owner, Owner.here()):
        raise BadRequest(
            f"The machines of {pool_id!r} are processes of {entry.owner.name}, which cannot be seen from here: stop it"
            " there."
        )
    _must_be_accepted(provider, pool_id, is_condemned=entry is not None)
    return end_pool(ledger, provider, pool_id, why=why, clock=clock, monotonic=monotonic, pause=pause)


def _must_be_accepted(provider: Provider, pool_id: str, *, is_condemned: bool) -> None:
    """Raise CredentialsError at once if the provider refuses this process: to ask it again for minutes is no use."""
    try:
        provider.instances(pool_id)
    except CredentialsError as error:
        after = (
            " The ledger has noted that the pool is stopped: its owner ends the machines if it lives, and nobody renews"
            " their lease."
            if is_condemned
            else ""
        )
        raise CredentialsError(
            f"{provider.name} refuses the credentials of this process, so it has ended no machine of {pool_id!r}:"
            f" {error}.{after} Set other credentials, and run this again"
        ) from error
    except Exception as error:  # an outage: the machines are ended when it is over
        _log.debug("%s does not list the machines of %s now: %s", provider.name, pool_id, error)


def _condemned(
    ledger: Ledger, pool_id: str, stopped_by: str, provider_for: Callable[[PoolEntry], Provider]
) -> tuple[PoolEntry | None, Provider | None]:
    """Condemn a pool whose lease may still run; if its owner renews the lease meanwhile, try again, CONDEMN_TRIES times
    at most. Return it with its provider: a pool whose provider is refused goes on.
    """
    for _ in range(CONDEMN_TRIES):
        entry = ledger.pool(pool_id)
        if entry is None:
            return None, None
        provider = provider_for(entry)
        if entry.ended_at is not None or ledger.condemn(pool_id, seen=entry.written_lease, stopped_by=stopped_by):
            return entry, provider
    raise LedgerError(
        f"The lease of {pool_id!r} is renewed all the time, so that it could not be condemned in {CONDEMN_TRIES} tries."
        " Try again."
    )
