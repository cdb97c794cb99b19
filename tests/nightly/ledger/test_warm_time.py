"""Warm time is a bucket of its own: no process uses the pool, and its machines cost money."""

from datetime import timedelta

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Join, NameState
from skyward_core.ledger.rows import Bucket
from tests.system.ledger.test_names import claim, opened
from tests.system.ledger.test_warm_time import LAUNCHED, adds_up, closed, rented, seconds
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


def test_the_time_until_another_process_comes_is_warm(ledger: Ledger, clock: Clock) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    claim(ledger, "b")
    machine = rented(ledger)
    clock.time += timedelta(seconds=30)
    ledger.note_all({machine: LAUNCHED})
    ledger.names.leave("nightly", "a")
    clock.time += timedelta(seconds=50)
    assert ledger.names.leave("nightly", "b") is NameState.WARM
    clock.time += timedelta(seconds=45)
    ledger.renew("sky-a", clock.time + timedelta(seconds=600))
    assert isinstance(claim(ledger, "c"), Join)
    assert seconds(ledger, machine) == {**LAUNCHED, Bucket.WARM: 45.0}
    clock.time += timedelta(seconds=5)
    assert isinstance(claim(ledger, "d"), Join), "the second one finds it in use"
    closed(ledger, machine, clock.time)
    assert seconds(ledger, machine) == {**LAUNCHED, Bucket.WARM: 45.0, Bucket.IDLE: 75.0}
    adds_up(ledger)
