"""`skyward ps` and `skyward stop`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.listing import pools_of
from skyward_core.cli.options import SHOWN_ROWS, AsJson, PoolId, id_of, open_ledger, open_settled_ledger, provider_from
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import pools as view

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.rows import UnreadableRow


def ps(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    include_ended: Annotated[bool, typer.Option("--all", help="also pools that have ended")] = False,
    limit: Annotated[
        int, typer.Option(parser=values.count, metavar="N", help="at most this many, the newest")
    ] = SHOWN_ROWS,
) -> int:
    """Show the pools, and what each has cost so far."""
    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger:
        rows = ledger.pool_rows(include_ended=include_ended, limit=limit, unreadable=unreadable)
        pools = pools_of(ledger, rows, unreadable)
    if as_json:
        print_json(pools)
    elif not pools:
        print("no pools" if include_ended else "no open pools; `skyward ps --all` shows those that have ended")
    else:
        print_table(*view.table(pools, {row.entry.id: str(row.entry.work) for row in rows}))
        if len(pools) == limit:
            print(f"the newest {limit}; --limit shows more")
    return print_warnings([*unreadable, *view.faults(rows)])


def stop(
    context: typer.Context,
    pool: PoolId,
    *,
    provider: Annotated[
        str | None,
        typer.Option(parser=values.printable, metavar="NAME", help="whose machines, if the ledger does not know"),
    ] = None,
) -> int:
    """End a pool, live or not, by its id or its name."""
    from skyward_core.cleanup.release import release

    with open_ledger(context) as ledger:
        pool_id = id_of(ledger, pool)
        credentials = None if provider is None else provider_from(provider)
        is_known = _is_known(ledger, pool_id)
        ended = release(pool_id, ledger=ledger, credentials=credentials, why="it was stopped with `skyward stop`")
    print(view.stopped(pool_id, ended, is_known=is_known, provider=None if credentials is None else credentials.name))
    return 0


def _is_known(ledger: Ledger, pool_id: str) -> bool:
    from skyward_core.ledger.rows import UnreadableRow

    try:
        return ledger.pool(pool_id) is not None
    except UnreadableRow:
        return True
