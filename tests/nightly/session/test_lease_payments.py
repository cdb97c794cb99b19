"""What an attached process reserves for a detached pool: how far ahead, from whom, and what remains when that ends."""

from decimal import Decimal

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.projection import projection_of
from skyward_core.ledger.rows import Account, Period
from tests.conftest import wait_until
from tests.system.session.test_lease_payments import (  # noqa: F401 - fixtures
    TEAM,
    Open,
    detached,
)
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


def test_a_pool_without_a_limit_is_not_paid_for(detached: Open, ledger: Ledger) -> None:
    assert detached(account=None).renewed() is None
    assert ledger.open_reservations(pool_id="sky-a") == []


# ── a real pool ──────────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def waits() -> None:
    import time

    while True:
        time.sleep(3600)


@pytest.mark.timeout(240)
def test_an_attached_process_keeps_a_detached_pool_within_its_budget() -> None:
    """A dollar a second. Its opener has paid for two short leases; the attached process reserves more, time after time.
    When the account has no more, a warning comes, and then the node ends itself: no more was reserved than there was.
    """
    warnings: list[sky.BudgetWarning] = []
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(TEAM, Decimal(1000), Period.RUN))
        pool = sky.ComputePool(
            provider=sky.Local(price_per_hour=3600.0), budget=TEAM, lease_seconds=6, display="quiet"
        ).open()
        pool.start_detached(waits(), call_id="c")
        pool.detach(6)
        left = ledger.committed_usd(pool.id)
        attached = sky.ComputePool.attach(
            pool.id,
            lease_seconds=6,
            pays=True,
            on_event=lambda event: warnings.append(event) if isinstance(event, sky.BudgetWarning) else None,
        )
        with attached:
            wait_until(lambda: ledger.committed_usd(pool.id) > left + 15, "more money than one lease costs")
            assert attached.detached_call("c").state == "running"
            limit = ledger.committed_usd(pool.id) + 3
            ledger.set_account(Account(TEAM, limit, Period.RUN))
            wait_until(lambda: warnings, "a warning")
            assert f"{TEAM!r} has 0" in warnings[0].reason
            wait_until(lambda: sky.Local().instances(pool.id) == [], "the end of the node")
        assert ledger.committed_usd(pool.id) <= limit
    sky.release(pool.id)


@pytest.mark.timeout(240)
def test_a_detached_pool_ends_at_its_max_cost_however_long_it_is_followed() -> None:
    """A dollar a second, of which there are a hundred: the node's own clock ends it, and not the attached process."""
    with Ledger(default_url()) as ledger:
        pool = sky.ComputePool(
            provider=sky.Local(price_per_hour=3600.0), max_cost=66.0, lease_seconds=60, display="quiet"
        ).open()
        pool.start_detached(waits(), call_id="c")
        pool.detach(600)
        with sky.ComputePool.attach(pool.id, lease_seconds=600, pays=True):
            wait_until(lambda: sky.Local().instances(pool.id) == [], "the end of the node", 120.0)
        assert projection_of(ledger, pool.id).at(ledger.names.now()) < 80
    sky.release(pool.id)
