"""`skyward top`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyward_core.cli import values
from skyward_core.cli.listing import pools_of
from skyward_core.cli.options import SHOWN_ROWS, AsJson, open_ledger
from skyward_core.cli.printing import print_json, print_table, print_warnings, table_text
from skyward_core.cli.views import top as view
from skyward_core.cli.views.live import is_unicode

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.live.metrics import PoolUses


def top(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    once: Annotated[bool, typer.Option("--once", help="print one table; so too where stdout is no terminal")] = False,
    every: Annotated[
        float, typer.Option(parser=values.seconds, metavar="SECONDS", help="how often the table is new")
    ] = 2.0,
) -> int:
    """Show the live pools and their nodes, with utilisation and cost, again and again until Ctrl-C."""
    from skyward_core.live.metrics import PoolUses

    is_one = as_json or once or not sys.stdout.isatty()
    with open_ledger(context) as ledger, PoolUses(ledger, awaits_first=is_one) as uses:
        if is_one:
            unreadable: list[object] = []
            found = _pools(ledger, uses, unreadable)
            if as_json:
                print_json([view.as_json(*one) for one in found])
            elif found:
                print_table(*view.table(found, is_unicode=is_unicode(sys.stdout)))
            else:
                print("no live pools")
            return print_warnings(unreadable)
        _draw(_texts(ledger, uses, every))
    return 0


def _pools(ledger: Ledger, uses: PoolUses, unreadable: list[Any]) -> list[tuple[dict[str, Any], Any]]:
    rows = ledger.pool_rows(limit=SHOWN_ROWS, unreadable=unreadable)
    pools = pools_of(ledger, rows, unreadable)
    return [(pool, uses.of(pool["pool"])) for pool in pools]


def _texts(ledger: Ledger, uses: PoolUses, seconds: float) -> Iterator[str]:
    while True:
        found = _pools(ledger, uses, [])
        yield table_text(*view.table(found, is_unicode=is_unicode(sys.stdout))) if found else "no live pools"
        time.sleep(seconds)


def _draw(texts: Iterator[str]) -> None:
    """Show the texts one after the other in the same place, until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        try:
            for text in texts:
                live.update(Text(text), refresh=True)
        except KeyboardInterrupt:
            return
