"""What several commands share: options, the ledger, providers and exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.printing import print_warnings
from skyward_core.errors import BadRequest

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.live.pool_nodes import PoolNodes
    from skyward_core.providers.base import Provider

SHOWN_ROWS = 100
SETTLE_BUSY_SECONDS = 5.0


def complete_pools(context: typer.Context) -> list[tuple[str, str]]:
    """Return the names and ids of open pools, of which typer offers those that fit; none without a ledger."""
    from skyward_core.errors import SkywardError
    from skyward_core.ledger.ledger import default_url, ledger_to_read
    from skyward_core.live.pool_nodes import names_of_pools

    url: str | None = context.find_root().params.get("ledger")
    try:
        with ledger_to_read(url or default_url(), busy_timeout_seconds=1.0) as ledger:
            return names_of_pools(ledger)
    except (SkywardError, OSError):  # a message would be part of the user's command line
        return []


AsJson = Annotated[bool, typer.Option("--json", help="as JSON")]
Split = Annotated[
    bool,
    typer.Option(
        "--split", help="divide what no call has used of pools that belong to nobody among those that have made calls"
    ),
]
PoolName = Annotated[
    str, typer.Argument(metavar="POOL", parser=values.name, autocompletion=complete_pools, help="its id or its name")
]
PoolId = Annotated[
    str,
    typer.Argument(
        metavar="POOL",
        parser=values.name,
        autocompletion=complete_pools,
        help="its id or its name, as `skyward ps` shows them",
    ),
]


def nodes_of(context: typer.Context, pool: str) -> PoolNodes:
    """Return the nodes of a live pool by its name or id. Raises what `find_nodes` raises."""
    from skyward_core.live.pool_nodes import find_nodes

    with open_ledger(context) as ledger:
        return find_nodes(ledger, pool)


def id_of(ledger: Ledger, pool: str) -> str:
    """Return the id of the pool that has a name now, or had it last; a text that is no name is an id already.

    Raises LedgerError.
    """
    named = ledger.names.named(pool)
    return named.pool_id if named is not None and named.pool_id else pool


def open_ledger(context: typer.Context) -> Ledger:
    """Open the ledger of `--ledger`, or the default one, to look into it. It is opened only after the command line was
    read without a fault.
    """
    from skyward_core.ledger.ledger import ledger_to_read

    return ledger_to_read(ledger_url(context, "no pool is known"))


def make_ledger(context: typer.Context, *, may_migrate: bool = False) -> Ledger:
    """Open the ledger to write into it, or to wait for what others write. A new one is made."""
    from skyward_core.ledger.ledger import Ledger

    return Ledger(ledger_url(context, "a new one is made, and it knows no pool"), may_migrate=may_migrate)


def open_settled_ledger(context: typer.Context) -> Ledger:
    """Open the ledger to show it, after pools of this computer that have ended themselves were settled. That waits for
    other writers for some seconds only, and for no provider.
    """
    from skyward_core.cleanup.pool_record import settle_here
    from skyward_core.ledger.ledger import ledger_to_read

    ledger = ledger_to_read(ledger_url(context, "no pool is known"), busy_timeout_seconds=SETTLE_BUSY_SECONDS)
    settle_here(ledger)
    return ledger


def ledger_url(context: typer.Context, if_missing: str) -> str:
    """Return the URL of the ledger. If a file that was named is not there, which may be a mistake, say so and what
    follows.
    """
    from skyward_core.ledger.ledger import default_url, is_made
    from skyward_core.ledger.sql_engine import parse_url

    named: str | None = context.obj
    if named is None:
        return default_url()
    if not is_made(named):
        print_warnings([f"there is no ledger at {parse_url(named).database}: {if_missing}"])
    return named


def providers_from(texts: Sequence[str] | None) -> Sequence[Provider]:
    """Return the providers of `--provider`, or those of the settings."""
    from skyward_core.operations import configured_providers

    return configured_providers() if texts is None else [provider_from(text) for text in texts]


def provider_from(text: str) -> Provider:
    """Return a provider by its name, or from JSON with its fields."""
    from skyward_core.providers.base import load

    try:
        name_or_fields: object = json.loads(text) if text.lstrip().startswith("{") else text
    except ValueError as error:
        raise BadRequest(f"--provider {text}: {error}") from error
    return load(name_or_fields)  # pyright: ignore[reportArgumentType] - a name, or a JSON object
