"""`benchmarks/scale.py` still runs, at sizes that take little time. No figure is compared with anything."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._scale_ledger import filled
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import CostBy

ROOT = Path(__file__).parents[2]
CELL = re.compile(r" \| ")


def test_a_filled_ledger_has_its_rows_in_pools_that_commands_can_read(tmp_path: Path) -> None:
    """Copies made in SQL count as rows that were written through the ledger."""
    with Ledger(filled(tmp_path / "ledger.db", 400)) as ledger:
        assert len(ledger.pools(include_ended=True)) == 20
        assert len(ledger.pools()) == 5
        assert len(ledger.open_intents()) == 100
        costs = ledger.cost_rows(CostBy.POOL)
        days = ledger.cost_rows(CostBy.DAY)
    assert sum(row.resources for row in costs) == 400
    assert len({row.cost_usd for row in costs if row.key.startswith("sky-ended")}) == 1
    assert len(days) == 15


def test_a_ledger_of_the_smallest_size_has_a_pool_of_each_kind(tmp_path: Path) -> None:
    filled(tmp_path / "ledger.db", 1)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        ended = database.execute("SELECT id, ended_microseconds IS NOT NULL FROM skyward_pools ORDER BY id").fetchall()
    assert ended == [("sky-ended", 1), ("sky-open", 0)]


@pytest.mark.skipif(os.geteuid() != 0, reason="the played nodes listen on port 22")
def test_it_prints_a_table_for_each_part(tmp_path: Path) -> None:
    """Opening, map and loss with three played nodes, and a ledger of a thousand rows. All results were compared by the
    benchmark itself.
    """
    options = ["--nodes", "3", "--calls", "50", "--rows", "1000", "--call-seconds", "0.05"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tables = dict(re.findall(r"^### (.+)\n\n((?:\|.*\n)+)", done.stdout, re.M))
    assert list(tables) == ["Opening", "A map of 50 calls", "Loss of 5 %", "The ledger"]
    head, _, loss = (CELL.split(line.strip("| ")) for line in tables["Loss of 5 %"].splitlines())
    assert dict(zip(head, loss, strict=True)).items() >= {"nodes": "3", "lost": "1", "calls": "30"}.items()
    for text in tables.values():
        assert len({len(CELL.split(line)) for line in text.splitlines()}) == 1
    assert "nan" not in done.stdout
    assert "skyward cost --by day" in tables["The ledger"]
