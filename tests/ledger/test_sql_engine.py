"""Engines for the databases of a ledger: the settings of each connection."""

from pathlib import Path

import pytest

from skyward_core.ledger.sql_engine import parse_url, open_engine


@pytest.mark.parametrize("seconds", [0, 0.05, 30])
def test_a_connection_waits_for_writers_as_long_as_it_should(tmp_path: Path, seconds: float) -> None:
    """SQLite's own default is five seconds."""
    engine = open_engine(parse_url(f"sqlite:///{tmp_path}/ledger.db"), seconds)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == seconds * 1000
    engine.dispose()
