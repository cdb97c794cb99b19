"""What several commands share: options, the ledger, providers and exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from skyward_core.cli import values
from skyward_core.errors import BadRequest

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.providers.base import Provider

FAILED, TO_DO = 1, 3
"""Exit codes: something failed; a dry run has found something to do. 0 is success, 2 a command line with a fault."""
SHOWN_ROWS = 100

AsJson = Annotated[bool, typer.Option("--json", help="as JSON")]
PoolId = Annotated[str, typer.Argument(metavar="POOL_ID", parser=values.name, help="as `skyward ps` shows it")]


def open_ledger(context: typer.Context) -> Ledger:
    """Open the ledger of `--ledger`, or the default one. It is opened after the command line was read without fault."""
    from skyward_core.ledger.ledger import Ledger, default_url

    return Ledger(context.obj or default_url())


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
