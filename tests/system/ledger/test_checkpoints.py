"""Checkpoints of ledgers in SQLite: the `-wal` file stays small, and nothing is lost."""

import contextlib
import sqlite3
from pathlib import Path

from skyward_core.ledger.ledger import Ledger
from tests.unit.ledger.test_checkpoints import SMALL_BYTES, Clock, clock, path, wal_bytes, write  # noqa: F401 - fixtures


def test_the_wal_file_stays_small_while_connections_are_open(path: Path, clock: Clock):
    largest = 0
    with Ledger(f"sqlite:///{path}") as ledger, Ledger(f"sqlite:///{path}"):
        for _ in range(100):
            write(ledger, 3)
            largest = max(largest, wal_bytes(path))
    assert SMALL_BYTES / 2 < largest < 2 * SMALL_BYTES
    with contextlib.closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
