"""Each fault of the rental service"""

from __future__ import annotations

from typing import Any

import pytest

from tests.kill import matrix
from tests.kill.driver import TOGETHER, Ends, faulty

LONG_OUTAGE = {"error_seconds": 300.0}
SCENARIOS = list(faulty())
NAMES = [f"early {scenario.faults} late {scenario.late_faults}" for scenario in SCENARIOS]

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def points() -> dict[tuple[str, str], dict[str, Any]]:
    """All points, by the faults and by how the driver left the pool."""
    found = matrix.run([["faults"]])
    return {(point["scenario"], point["killed"]): point for point in found}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_closing_under_a_fault_leaves_nothing(points: dict[tuple[str, str], dict[str, Any]], scenario: Any) -> None:
    point = points[str(scenario), "none"]
    assert point["alive"] == 0
    assert _unexpected(point, scenario) == []
    if scenario.late_faults != LONG_OUTAGE and scenario.late_faults not in TOGETHER:
        assert point["alive_before"] == 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_sweeping_under_a_fault_leaves_nothing(points: dict[tuple[str, str], dict[str, Any]], scenario: Any) -> None:
    killed = str(scenario).replace(f"ends={Ends.CLOSED}", f"ends={Ends.KILLED}")
    point = points.get((killed, "driver"))
    if point is None:
        assert scenario.faults, "only a pool that could not be opened has no process to kill"
        return
    assert point["alive"] == 0
    assert _unexpected(point, scenario) == []


def _unexpected(point: dict[str, Any], scenario: Any) -> list[str]:
    """The problems."""
    return [
        problem for problem in point["problems"] if not (scenario.late_faults in TOGETHER and problem.startswith("m-"))
    ]
