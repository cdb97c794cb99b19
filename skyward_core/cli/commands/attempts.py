"""`skyward why`: the attempts of a pool to rent machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from skyward_core.cli.options import AsJson, PoolId, id_of, open_ledger
from skyward_core.cli.printing import print_json, print_table, print_warnings
from skyward_core.cli.views import attempts as view
from skyward_core.errors import BadRequest

if TYPE_CHECKING:
    from skyward_core.ledger.rows import UnreadableRow


def why(context: typer.Context, pool: PoolId, *, as_json: AsJson = False) -> int:
    """Show why a pool has its machines where it has them, or none: each attempt to rent them, and its error."""
    unreadable: list[UnreadableRow] = []
    with open_ledger(context) as ledger:
        entry = ledger.pool(id_of(ledger, pool))
        if entry is None:
            raise BadRequest(f"the ledger has no pool {pool!r}: look with `skyward ps --all`")
        attempts = ledger.attempts(pool_id=entry.id, unreadable=unreadable)
    if as_json:
        print_json([view.as_json(attempt) for attempt in attempts])
    elif attempts:
        print_table(*view.table(attempts))
        for note in view.notes(entry, attempts):
            print(note)
    else:
        print(view.none_known(entry))
    return print_warnings(unreadable)
