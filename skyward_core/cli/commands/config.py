"""`skyward config show` and `skyward config schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import config as view


def show(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    profile: Annotated[
        str | None,
        typer.Option(parser=values.name, metavar="NAME", help="a profile of skyward.toml (default: SKYWARD_PROFILE)"),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(parser=values.name, metavar="NAME", help="for the pool with this name")
    ] = None,
) -> int:
    """Show each setting, and where its value comes from. Values of secrets are masked."""
    from skyward_core.config.report import configuration

    found = configuration(profile=profile, pool=pool, ledger_url=context.obj)
    if as_json:
        print_json(view.as_json(found))
    else:
        print_table(*view.table(found))
        print(view.summary(found))
    return print_warnings([found.fault] if found.fault else [])


def schema() -> int:
    """Print the JSON schema of skyward.toml, with which editors complete and check it."""
    from skyward_core.config.schema import settings_schema

    print_json(settings_schema())
    return 0
