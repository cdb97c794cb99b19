"""The stand-ins of `make kill` for a pool with a name still fit: one kill of a process that joins and leaves as the last.

All boundaries of all scenarios are in tests/nightly/kill/test_points.py.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.kill.named import SCENARIOS

ROOT = Path(__file__).parents[3]
JOINS = 3
ONE_BOUNDARY = 1000


def test_after_a_kill_of_a_process_that_joins_the_next_one_gets_the_one_pool(tmp_path: Path) -> None:
    words = [str(tmp_path), f"sqlite:///{tmp_path}/ledger.db", str(ONE_BOUNDARY), str(JOINS), str(JOINS + 1)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill.named", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    (point,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert point["problems"] == []
    assert (point["scenario"], point["rentals"], point["left"]) == (SCENARIOS[JOINS].name, 1, 1)
