"""What an attached process reserves for a detached pool: how far ahead, from whom, and what remains when that ends."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

import pytest

from skyward_core.events.events import BudgetWarning
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.projection import projection_of
from skyward_core.ledger.rows import Account, Period, Price
from skyward_core.machines.owner import Owner
from skyward_core.session.lease_payments import LeasePayments, seconds_covered
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    Clock,
    clock,
    ledger,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)

PRICE = Price(Decimal(36))
"""A cent a second."""
LEASE_SECONDS = 100.0
TEAM = "team"
ENDING_SECONDS = 1.0
"""Of `sky.Local`."""


class Payer:
    """One attached process, its clock, and the warnings of its money."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self.warnings: list[BudgetWarning] = []
        began = clock.time
        self.payments = LeasePayments(
            "sky-a",
            LEASE_SECONDS,
            self.warnings.append,  # pyright: ignore[reportArgumentType]
            lambda: ledger,
            lambda: (clock.time - began).total_seconds(),
        )

    def renewed(self) -> float | None:
        self.payments.renew()
        return self.payments.paid_seconds()


type Open = Callable[..., Payer]


@pytest.fixture
def detached(ledger: Ledger, clock: Clock) -> Open:
    """Opens a pool with one machine, which its opener has left; `reserved` USD are reserved from the account."""

    def open_it(limit: str = "100", reserved: str = "2", *, account: str | None = TEAM, spec: str = "{}") -> Payer:
        if account is not None:
            ledger.set_account(Account(account, Decimal(limit), Period.RUN))
        ledger.open_pool(
            "sky-a",
            owner=Owner.here(),
            provider={"name": "local"},
            spec_json=spec,
            lease_expires_at=clock.time + timedelta(seconds=200),
            account=account,
        )
        (intent,) = ledger.intend_all("sky-a", [resource_request("1", "sky-a", PRICE)])
        ledger.bind(intent, "i-1")
        if account is not None:
            ledger.reserve(account, "sky-a", Decimal(reserved))
        return Payer(ledger, clock)

    return open_it


def test_nothing_is_reserved_while_enough_is_left(detached: Open, ledger: Ledger) -> None:
    """Two dollars pay for 200 s, which are two leases."""
    payer = detached()
    assert payer.renewed() == 200
    assert ledger.committed_usd("sky-a") == 2


def test_more_is_reserved_before_the_money_ends(detached: Open, ledger: Ledger, clock: Clock) -> None:
    """With less than one and a half leases left the pool is paid for two leases again, and again."""
    payer = detached()
    for _ in range(5):
        clock.time += timedelta(seconds=60)
        assert payer.renewed() == 200
    assert ledger.committed_usd("sky-a") == projection_of(ledger, "sky-a").at(clock.time + timedelta(seconds=200))
    assert payer.warnings == []


def test_two_processes_pay_once(detached: Open, ledger: Ledger, clock: Clock) -> None:
    first = detached()
    second = Payer(ledger, clock)
    clock.time += timedelta(seconds=60)
    assert (first.renewed(), second.renewed()) == (200, 200)
    assert ledger.committed_usd("sky-a") == Decimal("2.6")


def test_the_rest_of_an_account_is_used_to_the_last_second(detached: Open, ledger: Ledger, clock: Clock) -> None:
    """Of 2.50 USD two are reserved: the machines get 50 s more, and then a warning says why they end."""
    payer = detached(limit="2.5")
    clock.time += timedelta(seconds=60)
    assert payer.renewed() == 190
    assert ledger.committed_usd("sky-a") == Decimal("2.5")
    assert payer.warnings == []
    clock.time += timedelta(seconds=170)
    assert payer.renewed() == 20
    assert payer.renewed() == 20
    (warning,) = payer.warnings
    assert (warning.account, warning.spent_usd) == (TEAM, pytest.approx(2.3))
    assert "'team' has 0" in warning.reason
    assert "end in 20 s" in warning.reason


def test_no_machine_lives_beyond_max_cost(detached: Open, ledger: Ledger, clock: Clock) -> None:
    """Neither is more reserved than it allows. A machine is billed until it is gone."""
    payer = detached(spec='{"max_cost": 2.5}')
    clock.time += timedelta(seconds=60)
    assert payer.renewed() == 190 - ENDING_SECONDS
    assert ledger.committed_usd("sky-a") == Decimal("2.49")


def test_max_cost_alone_is_known_from_the_ledger(detached: Open, clock: Clock) -> None:
    payer = detached(account=None, spec='{"max_cost": 1.0}')
    assert payer.renewed() == 100 - ENDING_SECONDS
    clock.time += timedelta(seconds=80)
    assert payer.renewed() == 20 - ENDING_SECONDS
    assert "max_cost=1 is nearly used up" in payer.warnings[0].reason


def test_a_pool_that_has_ended_is_not_paid_for(detached: Open, ledger: Ledger, clock: Clock) -> None:
    payer = detached()
    (intent,) = ledger.open_intents(pool_id="sky-a")
    ledger.close_all([intent.id], "it is gone")
    ledger.end_pool("sky-a")
    clock.time += timedelta(seconds=60)
    assert payer.renewed() is None


def test_the_first_payment_of_a_late_process_is_for_what_is_used_already(
    detached: Open, ledger: Ledger, clock: Clock
) -> None:
    """No process pays between two triggerers: the nodes end where the money does, and no time is paid for twice."""
    payer = detached(reserved="0.5")
    clock.time += timedelta(seconds=40)
    assert payer.renewed() == 200
    assert ledger.committed_usd("sky-a") == Decimal("2.4")


def test_machines_without_a_price_have_no_end(ledger: Ledger, clock: Clock, detached: Open) -> None:
    projection = projection_of(ledger, "none")
    assert seconds_covered(projection, clock.time, Decimal(0)) > 1e8
