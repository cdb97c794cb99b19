"""`skyward receipt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from skyward_core.cli.options import PoolId, id_of, open_settled_ledger
from skyward_core.cli.printing import print_json, print_warnings

if TYPE_CHECKING:
    from skyward_core.ledger.rows import UnreadableRow


def receipt(context: typer.Context, pool: PoolId) -> int:
    """Show what a pool has rented and what became of it, as JSON."""
    from skyward_core.ledger.receipt import receipt as receipt_of

    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger:
        print_json(receipt_of(ledger, id_of(ledger, pool), unreadable=unreadable))
    return print_warnings(unreadable)
