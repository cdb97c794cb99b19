"""The benchmark of growth runs: it uses fakes of the tests, which change without it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("arguments", "titles"),
    [
        (["nodes", "--nodes", "2", "--calls", "500"], ["### Opening", "### A map of 500 calls", "### Loss of 5 %"]),
        (["ledger", "--rows", "1000"], ["1,000 rows"]),
    ],
)
def test_growth_is_measured(arguments: list[str], titles: list[str]) -> None:
    """Each part prints its tables with figures."""
    command = [sys.executable, "-m", "benchmarks.scale", "--only", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [title for title in titles if title not in done.stdout] == []
    assert "nan" not in done.stdout
