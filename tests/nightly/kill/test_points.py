"""Kill -9 at generated points, a thousand in `make long`"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import examples
from tests.kill import matrix
from tests.kill.__main__ import SEED
from tests.kill.boundaries import PHASES

POINTS, REAPED = examples(1000), 18


@pytest.mark.timeout(900)
def test_after_a_kill_at_any_point_nothing_is_left() -> None:
    points = matrix.work_off(SEED, POINTS, REAPED)
    assert matrix.wrong(points) == []
    kills = [point for point in points if matrix.is_kill(point)]
    assert len(kills) >= POINTS
    phases = Counter(point["phase"] for point in kills)
    assert set(phases) == {phase.value for phase in PHASES}
    safeguards = {(point["killed"], point["safeguard"]) for point in points}
    assert safeguards == {(killed, safeguard) for killed, safeguard, _ in matrix.COLUMNS}
    assert sum(point["alive_before"] for point in kills) > POINTS // 2, (
        "the kills must leave machines running, or nothing is shown"
    )
