"""Warm time is a bucket of its own: no process uses the pool, and its machines cost money."""

from datetime import datetime, timedelta
from decimal import Decimal

import pytest

from skyward_core.cleanup.pool_record import close_entries
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Join, NameState, Rent
from skyward_core.ledger.rows import Bucket, CostBy, Price
from skyward_core.ledger.warm_time import with_warm
from tests.system.ledger.test_names import LEASE_SECONDS, claim, opened
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

LAUNCHED = {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 20.0}
"""What the opener has recorded until it leaves, half a minute after the machine was requested."""


def rented(ledger: Ledger, token: str = "1") -> int:
    (intent,) = ledger.intend_all("sky-a", [resource_request(token, "sky-a", Price(Decimal("0.33")))])
    ledger.bind(intent, f"i-{token}")
    return intent.id


def left_warm(ledger: Ledger, clock: Clock, client: str = "a", keep_warm_seconds: float = 600.0) -> int:
    """Open a pool, rent, and leave it warm after half a minute; return its machine."""
    opened(ledger, client, keep_warm_seconds=keep_warm_seconds)
    machine = rented(ledger)
    clock.time += timedelta(seconds=30)
    ledger.note_all({machine: LAUNCHED})
    assert ledger.names.leave("nightly", client) is NameState.WARM
    ledger.renew("sky-a", clock.time + timedelta(seconds=keep_warm_seconds))
    return machine


def seconds(ledger: Ledger, machine: int) -> dict[Bucket, float]:
    (intent,) = (intent for intent in ledger.intents(pool_id="sky-a") if intent.id == machine)
    return {bucket: spent for bucket, spent in intent.seconds.items() if spent}


def closed(ledger: Ledger, machine: int, now: datetime, *ends: datetime) -> None:
    """Close the entry of a machine, as a sweep or `skyward stop` does; `ends`: it ended earlier than it was found so."""
    intents = [intent for intent in ledger.intents(pool_id="sky-a") if intent.id == machine]
    close_entries(ledger, intents, "it is gone", now, dict.fromkeys([machine], *ends) if ends else None)


def adds_up(ledger: Ledger) -> None:
    """The buckets have the whole cost, to the micro-dollar."""
    buckets = ledger.cost_rows(CostBy.BUCKET, pool_id="sky-a")
    (whole,) = ledger.cost_rows(CostBy.POOL, pool_id="sky-a")
    assert sum(row.cost_usd for row in buckets) == whole.cost_usd
    assert sum(row.seconds for row in buckets) == pytest.approx(whole.seconds)
    assert sum(row.on_demand_usd for row in buckets) == whole.on_demand_usd


def test_warm_times_add_up(ledger: Ledger, clock: Clock) -> None:
    machine = left_warm(ledger, clock)
    for client in ("b", "c"):
        clock.time += timedelta(seconds=60)
        assert isinstance(claim(ledger, client, keep_warm_seconds=600.0), Join)
        clock.time += timedelta(seconds=10)
        ledger.renew("sky-a", clock.time + timedelta(seconds=600))
        assert ledger.names.leave("nightly", client) is NameState.WARM
    assert seconds(ledger, machine)[Bucket.WARM] == 120.0
    adds_up(ledger)


def test_a_pool_that_ends_while_it_is_warm_was_warm_until_its_end_was_requested(ledger: Ledger, clock: Clock) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    claim(ledger, "b")
    machine = rented(ledger)
    clock.time += timedelta(seconds=30)
    ledger.note_all({machine: LAUNCHED})
    ledger.names.leave("nightly", "a")
    clock.time += timedelta(seconds=50)
    ledger.names.leave("nightly", "b")
    clock.time += timedelta(seconds=100)
    ledger.ask_end_all([machine])
    clock.time += timedelta(seconds=7)
    closed(ledger, machine, clock.time)
    whole = {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 70.0, Bucket.WARM: 100.0, Bucket.TERMINATING: 7.0}
    assert seconds(ledger, machine) == whole
    adds_up(ledger)


def test_time_that_a_process_has_counted_is_not_warm(ledger: Ledger, clock: Clock) -> None:
    machine = left_warm(ledger, clock)
    clock.time += timedelta(seconds=100)
    ledger.note_all({machine: {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 80.0}})
    claim(ledger, "b", keep_warm_seconds=600.0)
    assert seconds(ledger, machine) == {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 80.0, Bucket.WARM: 40.0}
    adds_up(ledger)


def test_a_warm_pool_that_has_ended_itself_was_warm_until_then(ledger: Ledger, clock: Clock) -> None:
    machine = left_warm(ledger, clock)
    end = clock.time + timedelta(seconds=600)
    clock.time += timedelta(hours=1)
    assert isinstance(claim(ledger, "b"), Rent)
    closed(ledger, machine, clock.time, end)
    assert seconds(ledger, machine) == {**LAUNCHED, Bucket.WARM: 600.0}
    adds_up(ledger)


def test_a_process_that_counts_the_whole_life_does_not_count_warm_time_twice(ledger: Ledger, clock: Clock) -> None:
    machine = left_warm(ledger, clock)
    clock.time += timedelta(seconds=100)
    claim(ledger, "b", keep_warm_seconds=600.0)
    ledger.note_all({machine: {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 125.0, Bucket.RUNNING_CALLS: 5.0}})
    whole = {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 25.0, Bucket.RUNNING_CALLS: 5.0, Bucket.WARM: 100.0}
    assert seconds(ledger, machine) == whole
    ledger.note_all({machine: {**whole, Bucket.TERMINATING: 3.0}})
    assert seconds(ledger, machine) == {**whole, Bucket.TERMINATING: 3.0}
    adds_up(ledger)


def test_a_machine_that_is_gone_or_never_came_was_not_warm(ledger: Ledger, clock: Clock) -> None:
    gone = left_warm(ledger, clock)
    (never,) = ledger.intend_all("sky-a", [resource_request("2", "sky-a")])
    clock.time += timedelta(seconds=40)
    closed(ledger, gone, clock.time)
    clock.time += timedelta(seconds=60)
    claim(ledger, "b", keep_warm_seconds=600.0)
    assert seconds(ledger, gone) == {**LAUNCHED, Bucket.WARM: 40.0}
    assert seconds(ledger, never.id) == {}


def test_a_pool_that_is_closed_was_never_warm(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    machine = rented(ledger)
    assert ledger.names.leave("nightly", "a") is NameState.CLOSING
    clock.time += timedelta(seconds=20)
    closed(ledger, machine, clock.time)
    assert Bucket.WARM not in seconds(ledger, machine)


def test_the_account_pays_for_warm_time(ledger: Ledger, clock: Clock) -> None:
    machine = left_warm(ledger, clock)
    clock.time += timedelta(seconds=3570)
    closed(ledger, machine, clock.time)
    (row,) = ledger.cost_rows(CostBy.POOL, pool_id="sky-a")
    assert row.cost_usd == Decimal("0.33")
    warm = next(row for row in ledger.cost_rows(CostBy.BUCKET, pool_id="sky-a") if row.key == Bucket.WARM)
    assert warm.cost_usd == Decimal("0.327250")
    assert LEASE_SECONDS < warm.seconds == 3570


def test_a_note_without_idle_time_does_not_change_it() -> None:
    known = {**dict.fromkeys(Bucket, 0), Bucket.IDLE: 5, Bucket.WARM: 3}
    assert with_warm(known, {Bucket.LOST: 1}) == {**known, Bucket.LOST: 1}
    assert with_warm(known, {Bucket.IDLE: 9}) == {**known, Bucket.IDLE: 6}
