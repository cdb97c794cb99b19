"""Kill -9 at generated points, at the boundaries of named pools, and under each fault: nothing is left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import examples
from tests.kill import matrix
from tests.kill.__main__ import SEED
from tests.kill.boundaries import PHASES
from tests.kill.driver import TOGETHER, Ends, Scenario, faulty
from tests.kill.named import SCENARIOS
from tests.ledger.fixtures import postgresql_server, postgresql_url, sqlite_url, url  # noqa: F401 - fixtures

POINTS, REAPED = examples(1000), 18
EVERY = int(os.environ.get("EVERY", "16"))
"""1 takes each boundary of a named pool (10 minutes for each database on a quiet machine, `make kill`); else it is one
of sixteen, others for each.
"""
BOUNDARY_SECONDS = 1700 if EVERY > 1 else 7000
LONG_OUTAGE = {"error_seconds": 300.0}

pytestmark = [pytest.mark.timeout(1800)]


def test_after_a_kill_at_any_point_nothing_is_left() -> None:
    """No machine of a dead pool is alive, and no machine of a live pool got a request to end, with every safeguard."""
    points = matrix.work_off(SEED, POINTS, REAPED)
    assert matrix.wrong(points) == []
    kills = [point for point in points if matrix.is_kill(point)]
    assert len(kills) >= POINTS
    phases = Counter(point["phase"] for point in kills)
    assert set(phases) == {phase.value for phase in PHASES}
    safeguards = {(point["killed"], point["safeguard"]) for point in points}
    assert safeguards == {(killed, safeguard) for killed, safeguard, _ in matrix.COLUMNS}
    assert sum(point["alive_before"] for point in kills) > POINTS // 2, "the kills must leave machines running"


def test_closing_and_sweeping_under_each_fault_leave_nothing() -> None:
    """Closing alone waits until the fault is over. Machines remain for a sweep only after an outage of five minutes or
    a wrong listing. If the driver was killed under the fault, sweeps end every machine of its pool.
    """
    found = {(point["scenario"], point["killed"]): point for point in matrix.run([["faults"]])}
    wrong: list[str] = []
    for scenario in faulty():
        closed = found[str(scenario), "none"]
        killed = found.get((str(scenario).replace(f"ends={Ends.CLOSED}", f"ends={Ends.KILLED}"), "driver"))
        for point in (closed, killed):
            if point is not None and (point["alive"] or unexpected(point, scenario)):
                wrong.append(f"{scenario}: {point}")
        is_long = scenario.late_faults == LONG_OUTAGE or scenario.late_faults in TOGETHER
        if closed["alive_before"] and not is_long:
            wrong.append(f"{scenario}: closing has left {closed['alive_before']}")
        if killed is None and not scenario.faults:
            wrong.append(f"{scenario}: its driver was not killed")
    assert wrong == []


def unexpected(point: dict[str, Any], scenario: Scenario) -> list[str]:
    """If a listing omitted living machines, the ledger recorded them as gone, and meters them again from then on."""
    is_hidden = scenario.late_faults in TOGETHER
    return [problem for problem in point["problems"] if not (is_hidden and problem.startswith("m-"))]


@pytest.mark.timeout(BOUNDARY_SECONDS + 100)
def test_after_a_kill_at_any_boundary_the_next_process_gets_the_one_pool(url: str, tmp_path: Path) -> None:
    """Never two rentals. Then all leases end, and no machine lives."""
    command = [sys.executable, "-m", "tests.kill.named", str(tmp_path), url, str(EVERY)]
    done = subprocess.run(
        command, cwd=matrix.REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=BOUNDARY_SECONDS
    )
    points = [json.loads(line) for line in done.stdout.splitlines()]
    print(table(points))
    assert [point for point in points if point["problems"]] == []
    assert {point["scenario"] for point in points} == {scenario.name for scenario in SCENARIOS}
    assert sum(point["left"] for point in points) > len(points) // 3, "the kills must leave machines running"
    assert EVERY > 1 or any(point["uses"] for point in points), "a kill must leave a step's use open"


def table(points: Sequence[dict[str, Any]]) -> str:
    """Points, machines left by the kill, those alive after all leases, most rentals at once, the longest wait."""
    lines = ["| what is killed | points | left by the kill | alive after | rentals at once | next pool, at most |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name in dict.fromkeys(point["scenario"] for point in points):
        its = [point for point in points if point["scenario"] == name]
        left, alive = (sum(point[field] for point in its) for field in ("left", "alive"))
        most, seconds = (max(point[field] for point in its) for field in ("rentals", "seconds"))
        lines.append(f"| {name} | {len(its)} | {left} | {alive} | {most} | {seconds:.1f} s |")
    return "\n".join(lines)
