"""Ending what nobody answers for any more, from a plain program or a pipeline's step: `sky.sweep` and `sky.release`, with the ledger opened for you."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyward_core.instances import Lease
from skyward_core.providers.base import Provider

if TYPE_CHECKING:
    from skyward_core.provisioning.sweep import SweepReport

MIN_AGE_SECONDS = 600.0


def sweep(
    providers: Sequence[Provider] = (),
    *,
    is_dry_run: bool = True,
    min_age_seconds: float = MIN_AGE_SECONDS,
    include_unknown: bool = False,
    ledger_url: str | None = None,
) -> SweepReport:
    """Find machines that nobody answers for any more, at these providers and at those of all open pools of the ledger; end them unless it is a dry run.

    `ledger_url` is that of the settings if not given (`SKYWARD_LEDGER`, or a file of this user). See `provisioning.sweep.sweep` for the rest.
    Raises LedgerError if the ledger cannot be read; all else that fails is in the report's `failures`.

    >>> import skyward_core as sky
    >>> sky.sweep([sky.Local()]).failures
    ()
    """
    sweeping, ledgers = importlib.import_module("skyward_core.provisioning.sweep"), importlib.import_module("skyward_core.ledger")
    with ledgers.Ledger(ledger_url or ledgers.default_url()) as ledger:
        return sweeping.sweep(ledger, providers, is_dry_run=is_dry_run, min_age_seconds=min_age_seconds, include_unknown=include_unknown)


def release(pool: Lease | str, *, credentials: Provider | None = None, ledger_url: str | None = None) -> None:
    """End a pool on purpose, from any process, by its lease or its id: what a teardown step does for a pool that another step has detached.

    May be called again. `credentials` is the provider with secrets from the caller's own store. Raises InstancesLeft if some machines could not be confirmed
    gone, BadRequest if nobody knows the pool.
    """
    sweeping, ledgers = importlib.import_module("skyward_core.provisioning.sweep"), importlib.import_module("skyward_core.ledger")
    with ledgers.Ledger(ledger_url or ledgers.default_url()) as ledger:
        sweeping.release(pool, ledger=ledger, credentials=credentials)
