"""The time of a machine goes on in another process where the first one has recorded it."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from skyward_core.ledger.adopted_time import metered_of
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import Bucket, Intent, Price, ResourceKind

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
PRICE = Price(Decimal(36))


def intent(seconds: Mapping[Bucket, float], gone_at: datetime | None = None) -> Intent:
    """An entry from noon on."""
    return Intent(
        1,
        "sky-1",
        ResourceKind.INSTANCE,
        "fake",
        "r",
        "sky-1-0",
        "t",
        {},
        PRICE,
        NOON,
        NOON,
        "m",
        NOON,
        None,
        gone_at,
        None,
        seconds,
    )


class Clock:
    def __init__(self) -> None:
        self.seconds = 5000.0

    def __call__(self) -> float:
        return self.seconds


def counted(entry: Intent, after: float, slots: int = 2) -> tuple[Clock, Meter]:
    """A meter that goes on with an entry so many seconds after noon."""
    clock = Clock()
    meter = Meter(clock)
    meter.adopt(metered_of(entry, NOON + timedelta(seconds=after), clock(), slots))
    return clock, meter


RECORDED = {Bucket.LAUNCHING: 10.0, Bucket.BOOTSTRAPPING: 20.0, Bucket.RUNNING_CALLS: 30.0, Bucket.IDLE: 40.0}


def test_the_time_since_the_last_record_is_counted() -> None:
    clock, meter = counted(intent(RECORDED), 107)
    assert meter.buckets()["m"] == {**dict.fromkeys(Bucket, 0), **RECORDED, Bucket.IDLE: 47.0}
    clock.seconds += 3
    assert meter.buckets()["m"][Bucket.IDLE] == 50.0
    assert meter.total() == Decimal("1.10")


def test_the_calls_of_all_processes_go_on() -> None:
    clock, meter = counted(intent(RECORDED), 100)
    clock.seconds += 10
    meter.seen_running("m", 70.0)
    spent = meter.buckets()["m"]
    assert (spent[Bucket.RUNNING_CALLS], spent[Bucket.IDLE]) == (35.0, 45.0)


def test_warm_time_is_idle_here() -> None:
    _, meter = counted(intent({**RECORDED, Bucket.WARM: 100.0, Bucket.LOST: 5.0}), 215)
    spent = meter.buckets()["m"]
    assert (spent[Bucket.IDLE], spent[Bucket.LOST]) == (140.0, 15.0)


@pytest.mark.parametrize("phase", [Bucket.LOST, Bucket.TERMINATING])
def test_a_machine_that_was_lost_stays_so(phase: Bucket) -> None:
    _, meter = counted(intent({**RECORDED, phase: 5.0}), 115)
    assert meter.buckets()["m"][phase] == 15.0


def test_a_machine_that_is_gone_costs_what_was_recorded() -> None:
    clock, meter = counted(intent(RECORDED, gone_at=NOON + timedelta(seconds=100)), 500)
    clock.seconds += 100
    assert (meter.total(), meter.rented()) == (Decimal("1.00"), set())


def test_the_time_never_shrinks() -> None:
    """A clock that is behind would make it shorter than the record, which the ledger refuses."""
    _, meter = counted(intent(RECORDED), 90)
    assert sum(meter.buckets()["m"].values()) == 100.0


def test_a_machine_that_is_counted_already_is_not_counted_twice() -> None:
    clock, meter = counted(intent(RECORDED), 100)
    meter.adopt(metered_of(intent(RECORDED), NOON + timedelta(seconds=100), clock(), 2))
    assert meter.total() == Decimal("1.00")
