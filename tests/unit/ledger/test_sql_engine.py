"""Engines for the databases of a ledger: the settings of each connection."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from skyward_core.ledger.sql_engine import open_engine, parse_url


@pytest.mark.parametrize("seconds", [0, 0.05, 30])
def test_a_connection_waits_for_writers_as_long_as_it_should(tmp_path: Path, seconds: float) -> None:
    engine = open_engine(parse_url(f"sqlite:///{tmp_path}/ledger.db"), seconds)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == seconds * 1000
    engine.dispose()


def test_a_database_that_stays_locked_is_an_error_of_sqlite(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as raw:
        raw.execute("CREATE TABLE t (x)")
        raw.execute("BEGIN EXCLUSIVE")
        engine = open_engine(parse_url(f"sqlite:///{tmp_path}/ledger.db"), 0.05)
        with pytest.raises(OperationalError, match="database is locked"):
            engine.connect()
        raw.execute("COMMIT")
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        engine.dispose()
