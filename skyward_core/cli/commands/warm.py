"""`skyward warm`."""

from __future__ import annotations

from typing import Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, complete_pools, open_ledger
from skyward_core.cli.printing import print_json
from skyward_core.cli.views import warm as view


def warm(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", parser=values.name, autocompletion=complete_pools, help="of a pool")
    ],
    *,
    seconds: Annotated[
        float,
        typer.Option("--for", parser=values.duration, metavar="TIME", help="such as 90s, 30m, 2h or 1d"),
    ],
    as_json: AsJson = False,
) -> int:
    """Keep a pool with a name warm, now or when the last process has left it."""
    from skyward_core.session.warm_pools import keep_warm

    with open_ledger(context) as ledger:
        row = keep_warm(ledger, name, seconds)
    if as_json:
        print_json(view.as_json(row))
    else:
        print(view.words(row))
    return 0
