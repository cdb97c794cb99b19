"""Which slots a use holds, as its process notes it."""

import pytest

from skyward_core.session.pool_uses import UNSEEN_SECONDS, slots_held

NOW = 1000.0
LONG_AGO = NOW - UNSEEN_SECONDS - 0.1


@pytest.mark.parametrize(
    ("seen_at", "submitted_at", "held"),
    [(None, NOW - 0.3, 2), (None, LONG_AGO, 0), (NOW - 0.5, LONG_AGO, 2), (LONG_AGO, LONG_AGO, 0), (LONG_AGO, NOW, 2)],
    ids=["just submitted", "waiting for a slot", "running", "lost", "submitted again"],
)
def test_calls_that_wait_at_a_worker_for_the_slots_of_others_hold_none(
    seen_at: float | None, submitted_at: float, held: int
) -> None:
    assert slots_held(2, seen_at, submitted_at, NOW) == held
