"""Detached calls in the ledger: who wins, what stays, and what a call has cost. On both databases."""

from decimal import Decimal

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import SlotUse
from tests.system.ledger.test_calls import MINUTE, ledger, state  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    LATER,
    NOON,
    OWNER,
    PROVIDER,
    Clock,
    clock,
    postgresql_server,
    postgresql_url,
    sqlite_url,
    url,
)


def test_a_call_costs_its_share_of_the_machines_price(ledger: Ledger) -> None:
    used = (SlotUse("i-1", 4, 60.0), SlotUse("i-1", 4, 40.0), SlotUse("unknown", 1, 5.0))
    ledger.note_calls("p", [state("ended", 2, ended_at=NOON + MINUTE, used=used)])
    (call,) = ledger.calls()
    assert (call.cost_usd, call.seconds, call.generation) == (Decimal("0.025"), 105.0, 2)
    assert (call.started_at, call.ended_at, call.owner) == (NOON, NOON + MINUTE, "cron:nightly/train")
