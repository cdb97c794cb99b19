"""The pools of a ledger as plain data: the list of `skyward ps --json`, which `skyward top` and the page show too."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from skyward_core.cli.views import pools as view
from skyward_core.errors import ZERO_USD

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.rows import PoolRow, UnreadableRow


def pools_of(ledger: Ledger, rows: Sequence[PoolRow], unreadable: list[UnreadableRow]) -> list[dict[str, Any]]:
    """Return pools as in `skyward ps --json`."""
    rates = _rates(ledger, unreadable)
    names = {named.pool_id: named for named in ledger.names.all_named(unreadable=unreadable)}
    uses = ledger.names.activity(names, unreadable=unreadable) if names else {}
    now = datetime.now(UTC)
    return [
        view.pool(row, rates.get(row.entry.id, ZERO_USD), now, names.get(row.entry.id), uses.get(row.entry.id))
        for row in rows
    ]


def _rates(ledger: Ledger, unreadable: list[UnreadableRow]) -> dict[str, Decimal]:
    """Return USD per hour of what each pool has rented now, by pool id."""
    rates: dict[str, Decimal] = {}
    for intent in ledger.open_intents(unreadable=unreadable):
        if intent.cloud_id is not None:
            rates[intent.pool_id] = rates.get(intent.pool_id, ZERO_USD) + intent.price.per_hour
    return rates
