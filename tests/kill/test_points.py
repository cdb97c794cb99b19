"""Kill -9 at generated points, a thousand in `make long`: after recovery nothing lives but what may, and nothing of
anybody else was touched.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import examples
from tests.kill import matrix
from tests.kill.__main__ import SEED
from tests.kill.boundaries import PHASES

POINTS, REAPED = examples(1000), 18


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_whoever_is_killed_wherever_nothing_is_left() -> None:
    """Kills over all phases, by every rope: no machine of the dead is alive, none of the living was asked to end, and
    the ledger's books are closed.
    """
    points = matrix.work_off(SEED, POINTS, REAPED)
    assert matrix.wrong(points) == []
    kills = [point for point in points if matrix.is_kill(point)]
    assert len(kills) >= POINTS
    phases = Counter(point["phase"] for point in kills)
    assert set(phases) == {phase.value for phase in PHASES}
    ropes = {(point["killed"], point["rope"]) for point in points}
    assert ropes == {(killed, rope) for killed, rope, _ in matrix.COLUMNS}
    assert sum(point["alive_before"] for point in kills) > POINTS // 2, (
        "the kills must leave machines running, or nothing is shown"
    )
