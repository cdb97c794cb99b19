"""Checkpoints of ledgers in SQLite: the `-wal` file stays small, and nothing is lost."""

import contextlib
import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

from skyward_core.ledger import sqlite_writers
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period
from tests.ledger.fixtures import MeterClock

SMALL_BYTES = 100_000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sqlite_writers, "LARGEST_BYTES", SMALL_BYTES)
    monkeypatch.setattr(sqlite_writers, "WAIT_SECONDS", 0.01)
    return tmp_path / "ledger.db"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MeterClock:
    clock = MeterClock()
    monkeypatch.setattr(sqlite_writers.Checkpoints.__init__, "__defaults__", (clock,))
    return clock


def wal_bytes(path: Path) -> int:
    return path.with_name("ledger.db-wal").stat().st_size


def write(ledger: Ledger, times: int) -> None:
    """Change an account so many times."""
    for _ in range(times):
        limit = sum((account.limit_usd for account in ledger.accounts()), Decimal(1))
        ledger.set_account(Account("team", limit, Period.RUN))


def test_a_reader_delays_a_checkpoint_and_no_write_fails(path: Path, clock: MeterClock) -> None:
    """The next attempt is a minute later."""
    with Ledger(f"sqlite:///{path}") as ledger, contextlib.closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM skyward_accounts").fetchall()
        while wal_bytes(path) < 2 * SMALL_BYTES:
            write(ledger, 3)
        reader.rollback()
        write(ledger, 3)
        assert wal_bytes(path) > 2 * SMALL_BYTES
        clock.go(sqlite_writers.AGAIN_SECONDS)
        write(ledger, 1)
        assert wal_bytes(path) == 0


def test_while_a_process_keeps_the_write_lock_there_is_no_checkpoint(path: Path) -> None:
    """SQLite would make one without the lock. A checkpoint that fails is no error: the commit before it counts."""
    with Ledger(f"sqlite:///{path}") as ledger:
        write(ledger, 3)
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 0.01})
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute("CREATE TABLE filling(text)")
        while wal_bytes(path) < 2 * SMALL_BYTES:
            writer.execute("INSERT INTO filling VALUES (?)", ("x" * 4000,))
        size = path.stat().st_size
        writer.execute("BEGIN IMMEDIATE")
        sqlite_writers.Checkpoints(make_url(f"sqlite:///{path}"), 0.01).after_commit(engine)
        assert path.stat().st_size == size
        writer.execute("ROLLBACK")
        sqlite_writers.Checkpoints(make_url(f"sqlite:///{path}"), 0.01).after_commit(engine)
        assert (wal_bytes(path), path.stat().st_size > size) == (0, True)
    engine.dispose()
