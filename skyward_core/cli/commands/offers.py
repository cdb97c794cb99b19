"""`skyward offers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from skyward_core.cli import values
from skyward_core.cli.options import FAILED, AsJson, providers_from
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import offers as view


def offers(
    *,
    as_json: AsJson = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            parser=values.printable,
            metavar="NAME",
            help="a provider; may be repeated (default: those of the settings)",
        ),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(parser=values.name, metavar="NAME", help='such as "A100" or "H100-SXM"')
    ] = None,
    count: Annotated[
        int, typer.Option(parser=values.count, metavar="N", help="accelerators in one machine, at least")
    ] = 1,
    cpu: Annotated[int | None, typer.Option(parser=values.count, metavar="N", help="CPU cores, at least")] = None,
    memory: Annotated[
        str | None, typer.Option(parser=values.name, metavar="SIZE", help='memory, at least: "64GB"')
    ] = None,
    architecture: Annotated[
        Literal["x86_64", "arm64"] | None, typer.Option(help="processor of the machine (default: any)")
    ] = None,
    max_price: Annotated[
        float | None, typer.Option(parser=values.price, metavar="USD", help="per hour and machine, at most")
    ] = None,
    max_age: Annotated[
        float, typer.Option(parser=values.seconds, metavar="SECONDS", help="use stored answers up to this age")
    ] = 300.0,
    limit: Annotated[int, typer.Option(parser=values.count, metavar="N", help="at most this many, the cheapest")] = 20,
) -> int:
    """Show what is sold now, the cheapest first."""
    from skyward_core.accelerators import parse
    from skyward_core.operations import offers as find_offers

    found = find_offers(
        providers_from(provider),
        accelerator=None if accelerator is None else replace(parse(accelerator), count=count),
        cpu=cpu,
        memory=memory,
        architecture=architecture,
        max_price_per_hour=max_price,
        max_age_seconds=max_age,
    )
    shown = found.offers[:limit]
    if as_json:
        print_json(view.as_json(found, shown))
        return 0
    if shown:
        print_table(*view.table(shown))
        print(view.summary(found, shown))
    print_warnings(found.refusals)
    return 0 if shown else FAILED
