"""A real detached pool lives as long as its account and `max_cost` pay for it, however long it is followed."""

from decimal import Decimal

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.metering import projection_of
from skyward_core.ledger.rows import Account, Period
from tests.conftest import RecordedEvents
from tests.waiting import wait_until

TEAM = "lease-payments"

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def waits() -> None:
    import time

    while True:
        time.sleep(3600)


def test_an_attached_process_keeps_a_detached_pool_within_its_budget() -> None:
    """A dollar a second. Its opener has paid for two short leases; the attached process reserves more, time after time.
    When the account has no more, a warning comes, and then the node ends itself: no more was reserved than there was.
    """
    recorded = RecordedEvents()
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(TEAM, Decimal(1000), Period.RUN))
        provider = sky.Local(price_per_hour=3600.0)
        pool = sky.ComputePool(provider=provider, budget=TEAM, lease_seconds=6, display="quiet").open()
        pool.start_detached(waits(), call_id="c")
        pool.detach(6)
        left = ledger.committed_usd(pool.id)
        with sky.ComputePool.attach(pool.id, lease_seconds=6, pays=True, on_event=recorded) as attached:
            wait_until(lambda: ledger.committed_usd(pool.id) > left + 15, "more money than one lease costs")
            assert attached.detached_call("c").state == "running"
            limit = ledger.committed_usd(pool.id) + 3
            ledger.set_account(Account(TEAM, limit, Period.RUN))
            wait_until(lambda: recorded.of(sky.BudgetWarning), "a warning")
            assert f"{TEAM!r} has 0" in recorded.of(sky.BudgetWarning)[0].reason
            wait_until(lambda: sky.Local().instances(pool.id) == [], "the end of the node")
        assert ledger.committed_usd(pool.id) <= limit
    sky.release(pool.id)


def test_a_detached_pool_ends_at_its_max_cost() -> None:
    """A dollar a second: the node's own clock ends it, and not the attached process."""
    provider = sky.Local(price_per_hour=3600.0)
    pool = sky.ComputePool(provider=provider, max_cost=66.0, lease_seconds=60, display="quiet").open()
    pool.start_detached(waits(), call_id="c")
    pool.detach(600)
    with sky.ComputePool.attach(pool.id, lease_seconds=600, pays=True):
        wait_until(lambda: sky.Local().instances(pool.id) == [], "the end of the node", 120.0)
    with Ledger(default_url()) as ledger:
        assert projection_of(ledger, pool.id).at(ledger.names.now()) < 80
    sky.release(pool.id)
