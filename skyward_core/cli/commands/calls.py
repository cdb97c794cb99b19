"""`skyward calls`: the calls of a live pool now; without a pool, detached calls and what they have cost."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import SHOWN_ROWS, AsJson, complete_pools, id_of, open_ledger
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import calls as view
from skyward_core.cli.views import live_calls

if TYPE_CHECKING:
    from skyward_core.ledger.rows import UnreadableRow


def calls(
    context: typer.Context,
    live: Annotated[
        str | None,
        typer.Argument(
            metavar="[POOL]",
            parser=values.name,
            autocompletion=complete_pools,
            help="a live pool, its id or its name: all its calls now",
        ),
    ] = None,
    *,
    as_json: AsJson = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="of a live pool: where in the code each call is")] = False,
    pool: Annotated[
        str | None, typer.Option(parser=values.name, metavar="POOL", help="only the detached calls of this pool")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(parser=values.printable, metavar="TEXT", help="only calls whose owner has this text")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=values.since,
            metavar="WHEN",
            help="started on this UTC day (2026-11-21) or later; 30d: in these days",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(parser=values.count, metavar="N", help="at most this many lines, the newest; the sum counts all"),
    ] = SHOWN_ROWS,
) -> int:
    """Show the calls of a live pool: which wait, run or are fetched, where, and for whom. Without a pool, show calls
    that were started detached: for whom, how they ended, and what they have cost.
    """
    if live is not None:
        if pool is not None or owner is not None or since is not None:
            raise typer.BadParameter("--pool, --owner and --since are for detached calls: leave the pool out")
        return _live(context, live, as_json=as_json, with_stacks=stacks, limit=limit)
    if stacks:
        raise typer.BadParameter("--stacks needs a live pool: `skyward calls POOL --stacks`")
    unreadable: list[UnreadableRow] = []
    with open_ledger(context) as ledger:
        found = ledger.calls(
            pool_id=None if pool is None else id_of(ledger, pool), owner=owner, since=since, unreadable=unreadable
        )
    if as_json:
        print_json({"calls": [view.as_json(one) for one in found], "cost_usd": float(view.total(found))})
    elif found:
        print_table(*view.table(found, limit))
    else:
        print("the ledger has no such detached calls")
    return print_warnings(unreadable)


def _live(context: typer.Context, name: str, *, as_json: bool, with_stacks: bool, limit: int) -> int:
    from skyward_core.live.calls import calls_of
    from skyward_core.live.observer import Observer
    from skyward_core.live.pool_nodes import find_nodes

    with open_ledger(context) as ledger:
        nodes = find_nodes(ledger, name)
    with Observer(nodes) as observer:
        found = calls_of(observer, with_stacks=with_stacks)
    if as_json:
        print_json(live_calls.as_json(nodes.pool_id, found))
    elif found.calls:
        print_table(*live_calls.table(found, limit))
        for text in (live_calls.more(found, limit), live_calls.stacks(found, limit)):
            if text:
                print(f"\n{text}")
    else:
        print(f"{nodes.pool_id} has no calls now")
    return print_warnings(found.silent)
