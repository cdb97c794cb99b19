"""Leases are judged alike by processes of one boot of a computer, however its time of day is set meanwhile."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from skyward_core.ledger.lease_clock import NO_CLOCK, LeaseClock, read_clock
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Join, NameState, Rent, Standing
from skyward_core.machines.owner import Owner, OwnerState
from tests.ledger.fixtures import NOON, claim, open_pool, run_on

ELSEWHERE = Owner("ada", "container", "boot", "1", 4711, "1")
"""A process of another container: only its lease shows whether it lives."""
OTHER = replace(ELSEWHERE, pid=4712)
HOUR = 3600.0
STEPS = pytest.mark.parametrize("step", [HOUR, -HOUR, 0.0])


class Computer:
    """Its time of day, which may be set, and the seconds for which it was awake."""

    def __init__(self) -> None:
        self.seconds, self.ahead = 5000.0, 0.0

    def wall(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds + self.ahead)

    def awake(self) -> float:
        return self.seconds

    def ledger(self, url: str) -> Ledger:
        """Connect as a new process does."""
        return Ledger(url, clock=self.wall, awake=self.awake)


@pytest.fixture
def computer() -> Computer:
    return Computer()


def in_a_minute(computer: Computer) -> datetime:
    return computer.wall() + timedelta(seconds=60)


@STEPS
def test_a_pool_is_dead_a_lease_after_its_last_renewal(sqlite_url: str, computer: Computer, step: float) -> None:
    """And not before, for a process that starts after the step; it is condemned by the lease that it has read."""
    with computer.ledger(sqlite_url) as writer:
        open_pool(writer, "p", ELSEWHERE, lease_expires_at=in_a_minute(computer))
        computer.ahead += step
        with computer.ledger(sqlite_url) as reader:
            for seconds, is_dead in ((59, False), (2, True)):
                computer.seconds += seconds
                (found,) = reader.pools()
                assert bool(found.why_dead(computer.wall(), OwnerState.UNKNOWN)) is is_dead
                assert reader.pool("p") == found == reader.pool_rows()[0].entry
                assert not found.needs_second_look(computer.wall(), OwnerState.UNKNOWN)
            writer.renew("p", in_a_minute(computer))
            assert not reader.condemn("p", seen=found.written_lease)
            (found,) = reader.pools()
            assert not found.why_dead(computer.wall(), OwnerState.UNKNOWN)
            assert found.lease_expires_at == in_a_minute(computer)
            assert reader.condemn("p", seen=found.written_lease)


def test_a_lease_is_never_shortened_whatever_the_time_of_day(sqlite_url: str, computer: Computer) -> None:
    with computer.ledger(sqlite_url) as ledger:
        open_pool(ledger, "p", ELSEWHERE, lease_expires_at=computer.wall() + timedelta(seconds=600))
        for step in (HOUR, -2 * HOUR):
            computer.ahead += step
            ledger.renew("p", in_a_minute(computer))
            found = ledger.pool("p")
            assert found is not None
            assert found.lease_expires_at == computer.wall() + timedelta(seconds=600)


@STEPS
def test_a_lease_of_another_boot_is_judged_by_the_time_of_day(sqlite_url: str, computer: Computer, step: float) -> None:
    """Also one of an earlier version, which stored no clock: but only after a second look."""
    with computer.ledger(sqlite_url) as ledger:
        for pool_id, boot in (("old", ""), ("far", "another boot")):
            open_pool(ledger, pool_id, ELSEWHERE, lease_expires_at=in_a_minute(computer))
            run_on(sqlite_url, f"UPDATE skyward_pools SET lease_boot = '{boot}' WHERE id = '{pool_id}'")
        written = in_a_minute(computer)
        computer.ahead += step
        for found in ledger.pools():
            assert (found.lease_expires_at, found.lease_shift, found.written_lease) == (written, None, written)
            assert found.needs_second_look(computer.wall(), OwnerState.UNKNOWN) is (step > 0)


@STEPS
def test_a_named_pool_is_joined_while_its_clients_renew(sqlite_url: str, computer: Computer, step: float) -> None:
    """After their lease its steward is replaced, and it is rented anew: not before, not later."""
    with computer.ledger(sqlite_url) as ledger:
        rent = claim(ledger, "a", owner=ELSEWHERE, lease_seconds=60.0)
        assert isinstance(rent, Rent)
        open_pool(ledger, "sky-a", ELSEWHERE, lease_expires_at=in_a_minute(computer))
        ledger.live_by_lease("sky-a", in_a_minute(computer))
        ledger.names.opened("nightly", rent.epoch)
        computer.ahead += step
        with computer.ledger(sqlite_url) as comer:
            computer.seconds += 59
            assert isinstance(claim(comer, "b", owner=OTHER, lease_seconds=600.0), Join)
            assert comer.stewards.look("nightly", "b") == (Standing.OTHER, 1)
            assert not comer.names.is_last("nightly", "b")
            assert comer.names.activity(["sky-a"])["sky-a"].users == 2
            computer.seconds += 2
            assert comer.stewards.look("nightly", "b") == (Standing.VACANT, 1)
            assert comer.names.is_last("nightly", "b")
            computer.seconds += 600
            assert isinstance(claim(comer, "c", owner=OTHER), Rent)


@STEPS
def test_a_warm_pool_is_found_as_long_as_it_is_warm(sqlite_url: str, computer: Computer, step: float) -> None:
    with computer.ledger(sqlite_url) as ledger:
        rent = claim(ledger, "a", owner=ELSEWHERE, keep_warm_seconds=60.0)
        assert isinstance(rent, Rent)
        open_pool(ledger, "sky-a", ELSEWHERE, lease_expires_at=in_a_minute(computer))
        ledger.names.opened("nightly", rent.epoch)
        assert ledger.names.leave("nightly", "a") is NameState.WARM
        computer.ahead += step
        computer.seconds += 30
        changed = ledger.names.keep_warm("nightly", "sky-a", 10.0)
        assert changed is not None
        assert changed.warm_until == computer.wall() + timedelta(seconds=30)
        with computer.ledger(sqlite_url) as comer:
            assert comer.names.named("nightly") == changed == comer.names.all_named()[0]
            computer.seconds += 31
            assert isinstance(claim(comer, "b", owner=OTHER), Rent)


def test_a_clock_that_was_read_while_this_process_was_stopped_is_read_again(computer: Computer) -> None:
    """Else a stop between two readings would count as a step."""
    stops = iter([HOUR])

    def wall() -> datetime:
        computer.seconds += next(stops, 0.0)
        return computer.wall()

    found = read_clock(wall, computer.awake)
    assert found.ahead_microseconds == (NOON - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert read_clock(wall, None) == NO_CLOCK


@pytest.mark.parametrize(
    ("seconds", "shift"),
    [(1.9, timedelta(0)), (-1.9, timedelta(0)), (2, timedelta(seconds=2)), (-HOUR, -timedelta(hours=1))],
)
def test_a_small_difference_is_no_step(seconds: float, shift: timedelta) -> None:
    row = LeaseClock("boot", 1_000_000).values()
    assert LeaseClock("boot", 1_000_000 + round(seconds * 1_000_000)).shift(row) == shift


@pytest.mark.parametrize("clock", [NO_CLOCK, LeaseClock("another", 5)])
def test_a_time_of_another_boot_is_not_shifted(clock: LeaseClock) -> None:
    assert clock.shift(LeaseClock("boot", 1).values()) is None
    assert NO_CLOCK.shift(NO_CLOCK.values()) is None
