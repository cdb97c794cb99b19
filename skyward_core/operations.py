"""Operations without a pool: `sky.offers`, `sky.sweep`, `sky.cost_of`, `sky.cost_parts`, `sky.receipts_of`,
`sky.receipt_of` and `sky.release`.

They open cache and ledger.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyward_core.accelerators import Accelerator, parse
from skyward_core.concurrency.threads import side_by_side
from skyward_core.config.settings import Settings
from skyward_core.errors import BadRequest, Refusal, ShortTraceback
from skyward_core.machines.instances import Lease
from skyward_core.machines.offers import Architecture, Requirements, memory_gb
from skyward_core.paths import cache_places, first_private
from skyward_core.providers.base import BUILT_IN, Provider, kind_of, load, load_all
from skyward_core.wire.private_folders import NotPrivate
from skyward_core.work import Work
from skyward_core.written_numbers import LONGEST_SECONDS, number

if TYPE_CHECKING:
    from datetime import datetime

    from skyward_core.cleanup.sweep import SweepReport
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.rows import CostPart
    from skyward_core.provisioning.price_list import PriceList

MIN_AGE_SECONDS = 600.0
MAX_AGE_SECONDS = 300.0
_log = logging.getLogger("skyward")


@ShortTraceback()
def offers(
    providers: str | Provider | Sequence[str | Provider] | None = None,
    *,
    accelerator: Accelerator | str | None = None,
    machine: str | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    architecture: Architecture | None = None,
    max_price_per_hour: float | None = None,
    max_age_seconds: float = MAX_AGE_SECONDS,
) -> PriceList:
    """Return the present offers of these providers that fit, the cheapest first. All providers are queried at the same
    time, except those with a recent answer in the cache.

    Without `providers` those of the settings are asked (`SKYWARD_PROVIDER`, `skyward.toml`), and if there are none each
    cloud whose credentials are found. Prices are USD per hour for one machine, with all that it needs. A provider that
    could not be queried is in `refusals`, also a cloud without credentials. Warns if no provider has answered. Raises
    BadRequest for requirements that no machine can meet, and if all providers raise it.

    >>> import skyward_core as sky
    >>> sky.offers("local", cpu=1)[0].provider
    'local'
    """
    chip = parse(accelerator) if isinstance(accelerator, str) else accelerator
    if max_price_per_hour is not None:
        max_price_per_hour = number(max_price_per_hour, "max_price_per_hour", "USD per hour, above 0, or None")
    what = f"the seconds for which a price list is recent, 0 or more, at most {LONGEST_SECONDS:.0f}"
    max_age_seconds = number(max_age_seconds, "max_age_seconds", what, least=0, most=LONGEST_SECONDS)
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
    asked = sellers() if providers is None else Sellers(load_all(providers))
    prices = cast(
        "PriceList", lists.price_list(asked.providers, want, _folder_of_prices(), max_age_seconds=max_age_seconds)
    )
    prices = replace(prices, refusals=(*prices.refusals, *asked.refusals()))
    if prices.is_unknown:
        _log.warning("no provider has said what it sells: %s", "; ".join(map(str, prices.refusals)))
    return prices


@dataclass(frozen=True, slots=True)
class Sellers:
    """The providers that are asked what they sell, and why others are not: by name, what is missing."""

    providers: Sequence[Provider]
    without: Mapping[str, str] = field(default_factory=dict[str, str])

    def refusals(self) -> tuple[Refusal, ...]:
        """Return the reasons as a price list has them."""
        return tuple(
            Refusal(name, "", "", spot=False, error="CredentialsError", code="", message=why, seconds=0.0)
            for name, why in self.without.items()
        )


def sellers() -> Sellers:
    """Return the providers in the settings; without any, each built-in cloud whose credentials are found, and this
    computer if there is none. Raises BadRequest for invalid settings.
    """
    if configured := Settings.read().fields.get("provider"):
        return Sellers(load_all(configured))
    clouds = [load(name) for name in BUILT_IN if kind_of(name).rents]
    lacks = side_by_side(lambda cloud: cloud.missing_credentials(), clouds, "skyward-credentials", len(clouds))
    without = {cloud.name: why for cloud, why in zip(clouds, lacks, strict=True) if why}
    return Sellers([cloud for cloud in clouds if cloud.name not in without] or load_all("local"), without)


def _folder_of_prices() -> Path | None:
    """Return where the answers of providers are kept; None if no folder is safe from other users."""
    try:
        return first_private("offers", cache_places())
    except NotPrivate:
        return None


def configured_providers() -> tuple[Provider, ...]:
    """Return the providers in the settings (`SKYWARD_PROVIDER`, `skyward.toml`); this computer if there are none.

    Raises BadRequest for invalid settings.
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
    """Find machines whose owner is dead, at these providers and at those of all open pools of the ledger; end them
    unless it is a dry run.

    `providers` are those of the settings if not given (`SKYWARD_PROVIDER`, `skyward.toml`; this computer if there are
    none). A machine that the ledger does not know is found only at these providers. Other unused things of ours that
    outlive pools, such as old AWS images, are removed too (`pruned` of the report).

    `ledger_url` is that of the settings if not given (`SKYWARD_LEDGER`, or a file of this user). See
    `cleanup.sweep.sweep` for the rest. Raises LedgerError if the ledger cannot be read, and BadRequest if the settings
    cannot; other errors are in the report's `failures`.

    >>> import skyward_core as sky
    >>> sky.sweep([sky.Local()]).failures
    ()
    """
    what = f"the seconds for which an unknown machine is left, 0 or more, at most {LONGEST_SECONDS:.0f}"
    min_age_seconds = number(min_age_seconds, "min_age_seconds", what, least=0, most=LONGEST_SECONDS)
    swept = configured_providers() if providers is None else providers
    sweeping, ledgers = (
        importlib.import_module("skyward_core.cleanup.sweep"),
        importlib.import_module("skyward_core.ledger.ledger"),
    )
    url = ledger_url or ledgers.default_url()
    with ledgers.ledger_to_read(url) if is_dry_run else ledgers.Ledger(url, may_migrate=True) as ledger:
        return sweeping.sweep(
            ledger, swept, is_dry_run=is_dry_run, min_age_seconds=min_age_seconds, include_unknown=include_unknown
        )


def _settled_ledger(ledger_url: str | None) -> Ledger:
    """Open the ledger, after pools of this computer that have ended themselves were settled."""
    ledgers, settlement = (
        importlib.import_module("skyward_core.ledger.ledger"),
        importlib.import_module("skyward_core.cleanup.pool_record"),
    )
    ledger = cast("Ledger", ledgers.ledger_to_read(ledger_url or ledgers.default_url()))
    settlement.settle_here(ledger)
    return ledger


def cost_of(work: Work, *, ledger_url: str | None = None) -> dict[str, float]:
    """Return the cost so far of each pool for this work, in USD, by pool id; pools of killed processes included.

    A work matches if it has the same text in all fields that are not empty here: without `attempt` all tries match. Of
    a pool that several works share, only the part of those that match counts: what their uses and detached calls have
    held, the shares that earlier releases have recorded, and for the work to which the pool belongs all that is no
    other's, such as idle and warm time. A pool to which its user has given a name belongs to nobody. Raises
    LedgerError.

    >>> import skyward_core as sky
    >>> sky.cost_of(sky.Work(workflow="nightly", run="never"))
    {}
    """
    entries = importlib.import_module("skyward_core.ledger.rows")
    with _settled_ledger(ledger_url) as ledger:
        return {row.key: float(row.cost_usd) for row in ledger.cost_rows(entries.CostBy.POOL, work=work)}


def cost_parts(
    work: Work, *, ended_between: tuple[datetime, datetime] | None = None, ledger_url: str | None = None
) -> list[CostPart]:
    """Return what `cost_of` adds up: the part of each pool's cost for each exact work that matches, in whole
    micro-dollars.

    `is_final` says that the part does not change any more. With `Work()`, which all match, there are also the rests of
    pools that belong to nobody: their `pool` is the name. With `ended_between` only pools count that have ended in that
    time. Raises LedgerError.

    >>> import skyward_core as sky
    >>> sky.cost_parts(sky.Work(workflow="nightly", run="never"))
    []
    """
    with _settled_ledger(ledger_url) as ledger:
        return ledger.cost_parts(work, ended_between)


def receipts_of(work: Work, *, ledger_url: str | None = None) -> list[dict[str, Any]]:
    """Return the receipt of each pool for this work that has rented something, oldest first: what `skyward receipt`
    prints.

    A pool matches if it belongs to the work (see `cost_of`), so a pool to which its user has given a name does not.
    Entries that cannot be read are left out. Raises LedgerError, and BadRequest for an empty work, which all pools
    would match.

    >>> import skyward_core as sky
    >>> sky.receipts_of(sky.Work(workflow="nightly", run="never"))
    []
    """
    if not work.labels():
        raise BadRequest("receipts_of needs a work with at least one field, such as Work(workflow='nightly')")
    entries, receipts = (
        importlib.import_module("skyward_core.ledger.rows"),
        importlib.import_module("skyward_core.ledger.receipt"),
    )
    with _settled_ledger(ledger_url) as ledger:
        # a pool that this work has used, and that belongs to another or to nobody, has no machines of its own here
        rows = [row for row in ledger.cost_rows(entries.CostBy.POOL, work=work, unreadable=[]) if row.resources]
        found = [receipts.receipt(ledger, row.key, unreadable=[]) for row in rows]
    return sorted(found, key=lambda receipt: receipt["created_at"])


def receipt_of(pool_id: str, *, ledger_url: str | None = None) -> dict[str, Any]:
    """Return the receipt of one pool, so far or in all: what `skyward receipt` prints.

    Raises LedgerError; its subclass LedgerConflict if the ledger does not have the pool.

    >>> import skyward_core as sky
    >>> sky.receipt_of("sky-never")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    LedgerConflict: the ledger has no such pool
    """
    receipts = importlib.import_module("skyward_core.ledger.receipt")
    with _settled_ledger(ledger_url) as ledger:
        return cast("dict[str, Any]", receipts.receipt(ledger, pool_id, unreadable=[]))


def release(pool: Lease | str, *, credentials: Provider | None = None, ledger_url: str | None = None) -> None:
    """End a pool on purpose, from any process, by its lease, its id or its name: for a last step of a pipeline that
    ends a pool which another step has detached or left warm.

    May be called again. `credentials` is the provider with secrets from the caller's own store. Raises InstancesLeft if
    some machines could not be confirmed gone, BadRequest for an unknown pool, CredentialsError for a lease that may
    have been altered, if the ledger does not know its pool.
    """
    releasing, ledgers = (
        importlib.import_module("skyward_core.cleanup.release"),
        importlib.import_module("skyward_core.ledger.ledger"),
    )
    with ledgers.Ledger(ledger_url or ledgers.default_url()) as ledger:
        if isinstance(pool, str) and (named := ledger.names.named(pool)) is not None:
            pool = named.pool_id
        releasing.release(pool, ledger=ledger, credentials=credentials)
