"""A backup is one whole file, also of what only `-wal` has; a restore needs the ledger for itself."""

import os
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from skyward_core.errors import BadRequest, LedgerError
from skyward_core.ledger import backup as copies
from skyward_core.ledger.backup import backup, inspect, restore
from skyward_core.ledger.ledger import Ledger
from tests.ledger.fixtures import LATER, Clock, open_pool


def ended(ledger: Ledger, pool_id: str) -> None:
    open_pool(ledger, pool_id)
    ledger.end_pool(pool_id)


def ids(url: str, clock: Clock) -> list[str]:
    with Ledger(url, clock=clock) as ledger:
        return [entry.id for entry in ledger.pools(include_ended=True)]


def test_a_backup_has_all_that_was_committed_and_a_restore_brings_it_back(
    file_ledger: Ledger, sqlite_url: str, clock: Clock, tmp_path: Path
) -> None:
    """The ledger is open: its own file has nothing yet, and a copy of it would be empty."""
    ledger_file, file = Path(sqlite_url.removeprefix("sqlite:///")), tmp_path / "kept.db"
    ended(file_ledger, "q")
    for pool in file_ledger.pools():
        file_ledger.end_pool(pool.id)
    before = ids(sqlite_url, clock)
    with closing(sqlite3.connect(f"file:{ledger_file}?immutable=1", uri=True)) as alone:
        assert alone.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    copy = backup(sqlite_url, file)
    assert (copy.pools, copy.path, file.stat().st_mode & 0o777) == (len(before), file, 0o600)
    assert sorted(path.name for path in tmp_path.iterdir() if "kept" in path.name) == ["kept.db"]
    ended(file_ledger, "later")
    with pytest.raises(LedgerError, match="another process has the ledger"):
        with Ledger(sqlite_url, clock=clock) as other:
            restore(other, file)
    assert "later" in ids(sqlite_url, clock)
    file_ledger.close()
    with Ledger(sqlite_url, clock=clock) as other:
        assert restore(other, file).pools == len(before)
    assert ids(sqlite_url, clock) == before


def test_a_ledger_with_a_living_pool_is_not_replaced(
    file_ledger: Ledger, sqlite_url: str, clock: Clock, tmp_path: Path
) -> None:
    """Its machines would be known to nobody. A pool whose lease has run out keeps nothing."""
    open_pool(file_ledger, "alive")
    backup(sqlite_url, tmp_path / "kept.db")
    with pytest.raises(LedgerError, match=r"pools of the ledger live.*alive"):
        restore(file_ledger, tmp_path / "kept.db")
    clock.time = LATER + timedelta(days=1)
    for pool in file_ledger.pools():
        file_ledger.end_pool(pool.id)
    assert restore(file_ledger, tmp_path / "kept.db").pools


def test_a_failed_backup_leaves_the_earlier_one(
    file_ledger: Ledger, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept.db"
    file.write_bytes(b"earlier")
    monkeypatch.setattr(copies, "inspect", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(LedgerError, match=r"No space left.*The file that was there is as it was\."):
        backup(sqlite_url, file)
    assert file.read_bytes() == b"earlier"
    assert not list(tmp_path.glob("*.partial"))


def test_what_is_no_backup_is_refused_in_words(file_ledger: Ledger, sqlite_url: str, tmp_path: Path) -> None:
    text, empty, other = tmp_path / "text", tmp_path / "empty", tmp_path / "other"
    text.write_text("no database, and longer than a header of SQLite " * 9)
    empty.touch()
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE others (value)")
    for file in (text, empty, other):
        with pytest.raises(BadRequest, match="is no ledger"):
            restore(file_ledger, file)
    with pytest.raises(BadRequest, match="there is no file"):
        inspect(tmp_path / "absent")
    with pytest.raises(BadRequest, match="the ledger itself"):
        backup(sqlite_url, Path(os.path.relpath(sqlite_url.removeprefix("sqlite:///"))))
    with pytest.raises(LedgerError, match="there is no ledger at"):
        backup(f"sqlite:///{tmp_path}/none.db", tmp_path / "kept.db")
    with pytest.raises(BadRequest, match=r"PostgreSQL.*pg_dump --format=custom --file=.*kept.db"):
        backup("postgresql+psycopg://ada:secret@host/skyward", tmp_path / "kept.db")
