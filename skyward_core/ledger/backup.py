"""A whole copy of a ledger in SQLite as one file, and the way back.

A plain copy of `ledger.db` may be empty: what was committed last is in `ledger.db-wal` until a checkpoint. SQLite's
backup reads both as of one moment, while others write. A restore replaces all tables in one transaction, so a kill
leaves the ledger as it was.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from skyward_core.errors import BadRequest, LedgerError
from skyward_core.ledger.sql_engine import parse_url, shown

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from skyward_core.ledger.ledger import Ledger

BUSY_SECONDS = 30.0
VERSION, POOLS = "SELECT value FROM skyward_meta WHERE name = 'version'", "SELECT count(*) FROM skyward_pools"


@dataclass(frozen=True, slots=True)
class Copy:
    """A file with a ledger: its version, how many pools it has, and its size in bytes."""

    path: Path
    version: str
    pools: int
    size: int


def backup(url: str, file: Path) -> Copy:
    """Write the ledger at a URL into a file, which is replaced only by a complete and intact copy.

    A ledger of an earlier release is copied as it is. Raises BadRequest for PostgreSQL, and for a file that is the
    ledger itself; LedgerError if there is no ledger, or the copy cannot be written.
    """
    source = _file_of(parse_url(url), f"pg_dump --format=custom --file={file}")
    if file.exists() and source.exists() and file.samefile(source):
        raise BadRequest(f"{file} is the ledger itself: name another file for its backup")
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    with _errors(f"the backup of {source} into {file}"):
        if not source.is_file():
            raise LedgerError(f"there is no ledger at {source}: name another one with --ledger or SKYWARD_LEDGER")
        try:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with closing(_opened(source)) as ledger, closing(_opened(partial)) as copy:
                ledger.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # one file, without `-wal`
            inspect(partial)
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return inspect(file)


def restore(ledger: Ledger, file: Path) -> Copy:
    """Replace all that is in a ledger by a backup of one, in one transaction. The ledger is closed.

    Raises LedgerError while a pool of the ledger lives, or any process has it open: it would write on as if nothing had
    happened. Raises BadRequest for PostgreSQL, and for a file that is no backup.
    """
    path = _file_of(ledger.url, f"pg_restore --clean --if-exists --dbname=DATABASE {file}")
    copy = inspect(file)
    now = ledger.time_of_day()
    if living := [entry.id for entry in ledger.pools() if not entry.why_dead(now, entry.owner.state())]:
        raise LedgerError(
            "nothing was restored, because pools of the ledger live, and it would forget them:"
            f" {', '.join(living)}. End them (`skyward stop`), then try again."
        )
    ledger.close()
    words = f"the restore of {file} into {path}"
    with _errors(words), closing(_opened(file)) as source, closing(_opened(path)) as target:
        _take_alone(target, path)
        source.backup(target)
    return copy


def inspect(file: Path) -> Copy:
    """Return what a backup has. Raises BadRequest if it is no ledger, or a damaged one."""
    with _errors(f"the look at {file}"):
        if not file.is_file():
            raise BadRequest(f"there is no file {file}")
        try:
            with closing(_opened(file)) as ledger:
                if (state := ledger.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise BadRequest(f"{file} is damaged: {state}")
                version = ledger.execute(VERSION).fetchone()
                pools = ledger.execute(POOLS).fetchone()[0]
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                raise
            raise BadRequest(f"{file} is no ledger: {error}") from error
    return Copy(file, str(version[0]) if version else "?", pools, file.stat().st_size)


def _take_alone(target: sqlite3.Connection, path: Path) -> None:
    """Take the lock that SQLite gives only if no other connection is open. Raises LedgerError."""
    target.execute("PRAGMA busy_timeout=1000")
    target.execute("PRAGMA locking_mode=EXCLUSIVE")
    try:
        target.execute("BEGIN EXCLUSIVE")
        target.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        raise LedgerError(
            f"nothing was restored, because another process has the ledger {path} open: end it, then try again"
            f" ({error})"
        ) from error


def _file_of(url: URL, command: str) -> Path:
    """Return the file of a ledger. Raises BadRequest for PostgreSQL, with the command that does it there."""
    if url.get_backend_name() != "sqlite":
        raise BadRequest(f"the ledger at {shown(url)} is in PostgreSQL, which does this itself: {command}")
    return Path(str(url.database))


def _opened(path: Path) -> sqlite3.Connection:
    """Open a file that is there."""
    where = f"file:{quote(str(path.absolute()))}?mode=rw"
    connection = sqlite3.connect(where, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    with suppress(sqlite3.DatabaseError):  # it is no database, which the caller finds out
        connection.execute("PRAGMA wal_autocheckpoint=0")  # `sqlite_writers.py` says why
    return connection


@contextmanager
def _errors(what: str) -> Generator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"{what} has failed: {error}. The file that was there is as it was.") from error
