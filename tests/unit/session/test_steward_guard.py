"""Whether a process keeps a named pool: certain for its lease, then it asks, and never again after it was replaced."""

import pytest

from skyward_core.errors import LedgerError
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.session.steward_guard import StewardGuard, boot_clock

LEASE_SECONDS = 10.0


class Rows:
    """A ledger's answers to renewals, and a clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.renewals = 0
        self.answer = "steward"
        self.guard = StewardGuard(LEASE_SECONDS, self.renew, lambda: self.seconds)

    def renew(self) -> None:
        since = self.guard.now()
        self.renewals += 1
        if self.answer == "away":
            raise LedgerError("the server is being restarted")
        if self.answer == "steward":
            self.guard.confirm(since)
        else:
            self.guard.lose()


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_a_process_that_never_was_the_steward_may_not_act(rows: Rows) -> None:
    """It does not ask, either."""
    assert not rows.guard.is_certain
    with pytest.raises(NotSteward):
        rows.guard.check()
    assert (rows.renewals, rows.guard.epoch, rows.guard.is_lost) == (0, None, False)


def test_a_steward_is_certain_as_long_as_its_lease_runs(rows: Rows) -> None:
    """In this time it does not ask, because no other process can take the pool over."""
    rows.guard.begin(3, rows.seconds)
    rows.seconds += LEASE_SECONDS - 0.1
    rows.guard.check()
    assert (rows.guard.is_certain, rows.renewals, rows.guard.epoch) == (True, 0, 3)
    rows.seconds += 0.1
    assert not rows.guard.is_certain


def test_each_renewal_makes_it_longer(rows: Rows) -> None:
    """It counts from the time before the renewal. An older answer that arrives late changes nothing."""
    rows.guard.begin(1, 100.0)
    rows.guard.confirm(105.0)
    rows.guard.confirm(101.0)
    rows.seconds = 114.9
    assert rows.guard.is_certain
    rows.seconds = 115.0
    assert not rows.guard.is_certain


def test_a_steward_that_was_stopped_asks_before_it_acts(rows: Rows) -> None:
    rows.guard.begin(1, rows.seconds)
    rows.seconds += 1000
    rows.guard.check()
    assert (rows.renewals, rows.guard.is_certain) == (1, True)


def test_a_steward_that_was_replaced_may_not_act(rows: Rows) -> None:
    """Not even if a renewal of before is confirmed late."""
    rows.guard.begin(1, rows.seconds)
    rows.seconds += 1000
    rows.answer = "another"
    with pytest.raises(NotSteward):
        rows.guard.check()
    rows.guard.confirm(rows.seconds)
    assert (rows.guard.is_certain, rows.guard.is_lost) == (False, True)
    with pytest.raises(NotSteward):
        rows.guard.check()
    assert rows.renewals == 1


def test_a_steward_that_cannot_ask_does_not_act(rows: Rows) -> None:
    """It is not replaced by that: it goes on when the ledger answers."""
    rows.guard.begin(1, rows.seconds)
    rows.seconds += 1000
    rows.answer = "away"
    with pytest.raises(LedgerError, match="being restarted"):
        rows.guard.check()
    rows.answer = "steward"
    rows.guard.check()
    assert rows.guard.is_certain


def test_a_process_may_become_the_steward_again(rows: Rows) -> None:
    rows.guard.begin(1, rows.seconds)
    assert rows.guard.lose()
    assert not rows.guard.lose()
    rows.guard.begin(4, rows.seconds)
    assert (rows.guard.is_certain, rows.guard.is_lost, rows.guard.epoch) == (True, False, 4)


def test_the_clock_runs_on() -> None:
    before = boot_clock()
    assert boot_clock() >= before > 0
