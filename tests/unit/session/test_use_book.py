"""Which slots a use holds, as its process notes it."""

import pytest

from skyward_core.engine.dispatcher import PING_SECONDS
from skyward_core.session.pool_uses import REPORT_SECONDS, slots_held

NOW = 1000.0
LONG_AGO = NOW - REPORT_SECONDS - 0.1
"""A call that holds a slot since then is in a report of now."""


@pytest.mark.parametrize(
    ("seen_at", "submitted_at", "held"),
    [(None, NOW - 0.3, 2), (None, LONG_AGO, 0), (NOW, LONG_AGO, 2), (LONG_AGO, LONG_AGO, 0), (LONG_AGO, NOW, 2)],
    ids=["just submitted", "waiting for a slot", "running", "lost", "submitted again"],
)
def test_calls_that_wait_at_a_worker_for_the_slots_of_others_hold_none(
    seen_at: float | None, submitted_at: float, held: int
) -> None:
    assert slots_held(2, seen_at, submitted_at, reported_at=NOW) == held


def test_a_call_that_runs_does_not_wait_between_two_reports() -> None:
    """Whatever the time: nothing is known before the next report, which comes after PING_SECONDS, or later."""
    submitted_at, first = NOW, NOW + 0.2
    assert slots_held(1, None, submitted_at, reported_at=first) == 1, "its worker has not reported yet"
    second = first + PING_SECONDS
    assert slots_held(1, second, submitted_at, reported_at=second) == 1
    assert slots_held(1, second, submitted_at, reported_at=second + PING_SECONDS) == 0, "the third report lacks it"
