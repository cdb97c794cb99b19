"""Checkpoints of ledgers in SQLite: the `-wal` file stays small, and nothing is lost."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import OperationalError

from skyward_core.ledger import sqlite_writers
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Period
from skyward_core.ledger.sqlite_writers import SQLITE_BUSY, LockHolder, begin_in_turn, lock_holder
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


# ── who holds the write lock ─────────────────────────────────────────────────────────────────────────────────────────


def told(tmp_path: Path, rest: str, *, state: str = "S", start: str = "120", pid: str = "4711") -> LockHolder | None:
    """Return who holds the lock, as this /proc says."""
    shared_memory = tmp_path / "ledger.db-shm"
    shared_memory.touch()
    process = tmp_path / pid
    process.mkdir(exist_ok=True)
    (process / "cmdline").write_bytes(rest.encode())
    (process / "stat").write_text(f"{pid} (a ) b) {state} 1 2 3")
    inode = shared_memory.stat().st_ino
    (tmp_path / "locks").write_text(
        f"1: POSIX  ADVISORY  WRITE 99 fe:00:{inode + 1} 120 120\n"
        f"2: POSIX  ADVISORY  READ 98 fe:00:{inode} 123 123\n"
        f"3: POSIX  ADVISORY  WRITE {pid} fe:00:{inode} {start} {start}\n"
        f"3: -> POSIX  ADVISORY  WRITE 97 fe:00:{inode} 120 120\n"
    )
    return lock_holder(make_url(f"sqlite:///{tmp_path}/ledger.db"), tmp_path)


def test_the_holder_of_the_write_lock_is_named_with_its_program(tmp_path: Path) -> None:
    """Later words of its command may be secrets, and characters that are not printable are left out."""
    holder = told(tmp_path, "/usr/bin/python3\0/home/ada/\x1b[2Jtrain.py\0--password=hunter2\0")
    assert str(holder) == "process 4711 (python3 [2Jtrain.py)"
    assert str(told(tmp_path, "")) == "process 4711"
    assert told(tmp_path, "", state="T") == LockHolder(4711, "", is_stopped=True)
    assert str(told(tmp_path, "", pid=str(os.getpid()))).startswith("this process, ")


def test_another_lock_of_the_ledger_is_no_write_lock(tmp_path: Path) -> None:
    assert told(tmp_path, "", start="121") is None
    assert lock_holder(make_url(f"sqlite:///{tmp_path}/ledger.db"), tmp_path / "not-there") is None


@pytest.mark.parametrize(
    ("holder_words", "turns"), [("1", 2), ("1 stopped", 1), ("", 1)], ids=["it runs", "it is stopped", "unknown"]
)
def test_a_writer_waits_once_more_for_a_process_that_runs(
    monkeypatch: pytest.MonkeyPatch, holder_words: str, turns: int
) -> None:
    """So it waits for twice the busy timeout at most: heartbeats of 5 s must not be late by minutes."""
    tried: list[int] = []
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = SQLITE_BUSY

    def begin() -> None:
        tried.append(1)
        raise OperationalError("BEGIN IMMEDIATE", None, busy)

    def holder(_url: object) -> LockHolder | None:
        pid, _, state = holder_words.partition(" ")
        return LockHolder(int(pid), is_stopped=bool(state)) if pid else None

    monkeypatch.setattr(sqlite_writers, "lock_holder", holder)
    with pytest.raises(OperationalError):
        begin_in_turn(begin, make_url("sqlite:////ledger.db"))
    assert len(tried) == turns
