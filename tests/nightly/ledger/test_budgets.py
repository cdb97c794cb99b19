"""Spending limits: no history of launches and losses costs more than `max_cost`, and no interval begins unreserved."""

from __future__ import annotations

from decimal import Decimal

from skyward_core.ledger.budgets import Fill
from skyward_core.ledger.ledger import Ledger
from tests.unit.ledger.test_budgets import LEASE_SECONDS, Clock, clock, committed, ledger, opened, usd  # noqa: F401 - fixtures


def test_reservations_are_renewed_while_time_passes(ledger: Ledger, clock: Clock) -> None:
    it = opened(ledger, clock, "1000")
    it.launch(2, usd("36"))
    for _ in range(1200):
        assert it.limit.check() == (Fill.FULL, "")
        paid = it.limit.paid_seconds()
        assert paid is not None
        assert paid >= LEASE_SECONDS
        held = committed(ledger, "1000")
        assert it.meter.projected(clock() + paid) <= held <= it.meter.total() + 2 * (120 + 2 * 120) * Decimal("0.01")
        clock.seconds += 1.0
