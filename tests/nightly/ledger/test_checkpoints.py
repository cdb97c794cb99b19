"""Checkpoints of ledgers in SQLite lose nothing; and a pruned ledger is a smaller file."""

import contextlib
import sqlite3
import subprocess
import sys
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from skyward_core.ledger import sqlite_writers
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period
from tests.ledger.fixtures import Clock
from tests.system.ledger.test_prune import use
from tests.unit.ledger.test_sqlite_writers import path, wal_bytes, write  # noqa: F401 - fixtures

WRITES = """
import sys
from decimal import Decimal
from skyward_core.ledger import sqlite_writers
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period

sqlite_writers.LARGEST_BYTES = 20_000
for number in range(15):
    with Ledger(sys.argv[1]) as ledger:
        for part in range(3):
            ledger.set_account(Account(f"{sys.argv[2]}-{number}-{part}", Decimal(number), Period.RUN))
"""


def test_sqlite_makes_no_checkpoint_beside_commits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own one begins at 1,000 pages, that is 4 MB."""
    monkeypatch.setattr(sqlite_writers, "LARGEST_BYTES", 1 << 40)
    with Ledger(f"sqlite:///{path}") as ledger:
        while wal_bytes(path) < 5 << 20:
            write(ledger, 50)
        assert path.stat().st_size < 1 << 20
    assert not path.with_name("ledger.db-wal").exists()


def test_processes_that_open_write_and_close_at_once_lose_nothing(path: Path) -> None:
    url = f"sqlite:///{path}"
    Ledger(url).close()
    writers = [subprocess.Popen([sys.executable, "-c", WRITES, url, str(number)]) for number in range(4)]
    assert [writer.wait(100) for writer in writers] == [0] * 4
    with contextlib.closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert raw.execute("SELECT count(*) FROM skyward_accounts").fetchone() == (4 * 15 * 3,)


def test_a_pruned_file_becomes_smaller(sqlite_url: str, clock: Clock) -> None:
    """With specs and attempts as in real pools."""
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    with Ledger(sqlite_url, clock=clock) as ledger:
        ledger.set_account(Account("team", Decimal(5000), Period.MONTH))
        for number in range(100):
            use(ledger, f"p{number}", closes=True)
            ledger.end_pool(f"p{number}")
        ledger.vacuum()
        before = file.stat().st_size
        ledger.prune(clock.time + timedelta(days=1), is_dry_run=False)
        ledger.vacuum()
        assert file.stat().st_size < 0.4 * before
