"""What a pool will have cost at a time to come, if all machines that it has now live until then."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from skyward_core.errors import ZERO_USD
from skyward_core.ledger.rows import CostBy, Price

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Projection:
    """The cost of the machines that are gone, in USD, and price and request of those that live."""

    gone_usd: Decimal
    living: tuple[tuple[Price, datetime], ...]

    def at(self, until: datetime) -> Decimal:
        """Return the cost in USD if all machines that live now do so up to that time."""
        return self.gone_usd + sum(
            (price.cost(max(0.0, (until - since).total_seconds())) for price, since in self.living), ZERO_USD
        )


def projection_of(ledger: Ledger, pool_id: str) -> Projection:
    """Return the projection of a pool, by its entries in the ledger. Raises LedgerError."""
    recorded = {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.RESOURCE, pool_id=pool_id)}
    intents = ledger.intents(pool_id=pool_id)
    return Projection(
        sum((recorded.get(str(one.id), ZERO_USD) for one in intents if one.gone_at is not None), ZERO_USD),
        tuple((one.price, one.intended_at) for one in intents if one.gone_at is None),
    )
