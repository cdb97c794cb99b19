"""Kill -9 at the boundaries of pools with a name, on both databases"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kill.named import SCENARIOS
from tests.unit.ledger.test_ledger import postgresql_server, postgresql_url, sqlite_url, url  # noqa: F401 - fixtures

EVERY = int(os.environ.get("EVERY", "16"))
ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.timeout(1800)]


def test_after_a_kill_at_any_boundary_the_next_process_gets_the_one_pool(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kill.named", str(tmp_path), url, str(EVERY)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1700)
    points = [json.loads(line) for line in done.stdout.splitlines()]
    print(table(points))
    assert [point for point in points if point["problems"]] == []
    assert {point["scenario"] for point in points} == {scenario.name for scenario in SCENARIOS}
    assert sum(point["left"] for point in points) > len(points) // 3, "the kills must leave machines running"


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
