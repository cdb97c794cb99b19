"""`skyward doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import FAILED, AsJson, provider_from
from skyward_core.cli.printing import print_json, print_table
from skyward_core.cli.views import doctor as view


def doctor(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            parser=values.printable,
            metavar="NAME",
            help="a provider to check; may be repeated (default: those of the settings)",
        ),
    ] = None,
    limit: Annotated[
        float, typer.Option(parser=values.seconds, metavar="SECONDS", help="the most that one check may take")
    ] = 20.0,
) -> int:
    """Check settings, ledger, keys, clouds and orchestrators, and say what to do. Rents nothing."""
    from skyward_core.doctor.diagnosis import diagnose

    given = None if provider is None else [provider_from(text) for text in provider]
    checks = diagnose(providers=given, ledger_url=context.obj, limit_seconds=limit)
    if as_json:
        print_json(view.as_json(checks))
    else:
        print_table(*view.table(checks))
        print(view.summary(checks))
    return FAILED if view.has_failed(checks) else 0
