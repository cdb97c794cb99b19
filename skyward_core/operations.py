"""What needs no pool, for a program or a pipeline's step: `sky.offers`, `sky.sweep`, `sky.cost_of` and `sky.release`,
with cache and ledger opened for you.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

from skyward_core.accelerators import Accelerator, parse
from skyward_core.config import Settings
from skyward_core.machines.instances import Lease
from skyward_core.machines.offers import Architecture, Requirements, memory_gb
from skyward_core.providers.base import Provider, load_all
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.cleanup.sweep import SweepReport
    from skyward_core.provisioning.price_list import PriceList

MIN_AGE_SECONDS = 600.0
MAX_AGE_SECONDS = 300.0


def offers(
    providers: str | Provider | Sequence[str | Provider],
    *,
    accelerator: Accelerator | str | None = None,
    machine: str | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    architecture: Architecture | None = None,
    max_price_per_hour: float | None = None,
    max_age_seconds: float = MAX_AGE_SECONDS,
) -> PriceList:
    """Return what these providers sell now that fits, cheapest first. They are asked at the same time, unless an answer
    is kept that is young enough.

    Prices are USD per hour for one machine, which has all that is asked for. One that cannot be asked is in `refusals`,
    and hides no other. Raises BadRequest for a wish that nothing can meet, and if it is all that there is to be heard.

    >>> import skyward_core as sky
    >>> sky.offers("local", cpu=1)[0].provider
    'local'
    """
    chip = parse(accelerator) if isinstance(accelerator, str) else accelerator
    memory_wanted = None if memory is None else memory_gb(memory)
    want = Requirements(
        accelerator=chip,
        instance_type=machine,
        vcpus=cpu,
        memory_gb=memory_wanted,
        max_price_per_hour=max_price_per_hour,
        architecture=architecture,
    )
    lists = importlib.import_module("skyward_core.provisioning.price_list")
    return lists.price_list(
        load_all(providers), want, user_cache_path("skyward") / "offers", max_age_seconds=max_age_seconds
    )


def configured_providers() -> tuple[Provider, ...]:
    """Return whom the settings name (`SKYWARD_PROVIDER`, `skyward.toml`); this computer if they name nobody.

    Raises BadRequest for what they cannot mean.
    """
    return load_all(Settings.read().fields.get("provider") or "local")


def sweep(
    providers: Sequence[Provider] | None = None,
    *,
    is_dry_run: bool = True,
    min_age_seconds: float = MIN_AGE_SECONDS,
    include_unknown: bool = False,
    ledger_url: str | None = None,
) -> SweepReport:
    """Find machines that nobody answers for any more, at these providers and at those of all open pools of the ledger;
    end them unless it is a dry run.

    `providers` are those of the settings if not given (`SKYWARD_PROVIDER`, `skyward.toml`; this computer where they
    name nobody): a machine that the ledger does not know is found only at those that are named. What else of ours they
    have that is of no use any more, such as old images of AWS's, goes with them (`pruned` of the report).

    `ledger_url` is that of the settings if not given (`SKYWARD_LEDGER`, or a file of this user). See
    `cleanup.sweep.sweep` for the rest. Raises LedgerError if the ledger cannot be read, and BadRequest if the settings
    cannot; all else that fails is in the report's `failures`.

    >>> import skyward_core as sky
    >>> sky.sweep([sky.Local()]).failures
    ()
    """
    asked = configured_providers() if providers is None else providers
    sweeping, ledgers = (
        importlib.import_module("skyward_core.cleanup.sweep"),
        importlib.import_module("skyward_core.ledger.ledger"),
    )
    with ledgers.Ledger(ledger_url or ledgers.default_url()) as ledger:
        return sweeping.sweep(
            ledger, asked, is_dry_run=is_dry_run, min_age_seconds=min_age_seconds, include_unknown=include_unknown
        )


def cost_of(work: Work, *, ledger_url: str | None = None) -> dict[str, float]:
    """Return what each pool for this work has cost so far by the ledger, in USD, by the ids of the pools: that of
    killed processes too.

    A pool is for the work if its own has the same text wherever that is not empty: leave the attempt out for all tries.
    Raises LedgerError.

    >>> import skyward_core as sky
    >>> sky.cost_of(sky.Work(workflow="nightly", run="never"))
    {}
    """
    ledgers, entries = (
        importlib.import_module("skyward_core.ledger.ledger"),
        importlib.import_module("skyward_core.ledger.rows"),
    )
    with ledgers.Ledger(ledger_url or ledgers.default_url()) as ledger:
        return {row.key: float(row.cost_usd) for row in ledger.cost_rows(entries.CostBy.POOL, work=work)}


def release(pool: Lease | str, *, credentials: Provider | None = None, ledger_url: str | None = None) -> None:
    """End a pool on purpose, from any process, by its lease or its id: what a teardown step does for a pool that
    another step has detached.

    May be called again. `credentials` is the provider with secrets from the caller's own store. Raises InstancesLeft if
    some machines could not be confirmed gone, BadRequest if nobody knows the pool, CredentialsError for a lease of a
    pool that the ledger does not know and that may have been altered.
    """
    releasing, ledgers = (
        importlib.import_module("skyward_core.cleanup.release"),
        importlib.import_module("skyward_core.ledger.ledger"),
    )
    with ledgers.Ledger(ledger_url or ledgers.default_url()) as ledger:
        releasing.release(pool, ledger=ledger, credentials=credentials)
