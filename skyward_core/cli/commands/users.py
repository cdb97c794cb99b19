"""`skyward users`: who uses a pool with a name, and what that has cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skyward_core.cli import values
from skyward_core.cli.options import AsJson, Split, complete_pools, id_of, open_settled_ledger
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import users as view
from skyward_core.errors import ZERO_USD, BadRequest

if TYPE_CHECKING:
    from skyward_core.ledger.rows import UnreadableRow


def users(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", parser=values.name, autocompletion=complete_pools, help="of a pool, or its id"),
    ],
    *,
    as_json: AsJson = False,
    split: Split = False,
) -> int:
    """Show who uses a pool with a name, or has used it, and what that has cost."""
    from skyward_core.ledger.rows import CostBy
    from skyward_core.ledger.users import users_of

    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger:
        pool_id = id_of(ledger, name)
        found = users_of(ledger, pool_id, split=split, unreadable=unreadable)
        if not found:
            raise BadRequest(f"the ledger has no pool with the name {name!r}, and no users of a pool of this id")
        noted = sum((row.cost_usd for row in ledger.cost_rows(CostBy.POOL, pool_id=pool_id)), ZERO_USD)
        pool = ledger.pool(pool_id)
    # what calls have held is noted some seconds before the time of their machines
    cost = max(noted, view.calls_cost_usd(found))
    if as_json:
        print_json(view.as_json(pool_id, found, cost))
    else:
        print_table(*view.table(pool, found, cost))
    return print_warnings(unreadable)
