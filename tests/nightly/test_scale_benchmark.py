"""`benchmarks/scale.py` still runs, at sizes that take little time. No figure is compared with anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELL = re.compile(r" \| ")


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
