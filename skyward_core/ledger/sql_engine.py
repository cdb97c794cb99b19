"""Opens the database of a ledger, SQLite or PostgreSQL, and turns its errors into LedgerError.

Ledgers of one process on the same PostgreSQL server share an engine: one for each URL and its settings.

    not known ──first ledger──▶ in use ──the last one is closed──▶ idle, without connections ──next ledger──▶ in use

SQLAlchemy keeps some two hundred objects of each engine for a server, also after its end. A process that opens pools
with a name again and again, as an orchestrator does, would grow without end. An engine is never forgotten: there are as
many as URLs. A fork makes its own, and leaves those of its parent alone.
"""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import Any

from platformdirs import user_state_path
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import PoolProxiedConnection

from skyward_core.errors import HIDDEN, LedgerConflict, LedgerError, shown_unread, without_logins
from skyward_core.ledger import sqlite_writers
from skyward_core.wire.private_folders import NotPrivate, kept_path, make_file, other_writers

CONNECT_TIMEOUT_SECONDS = 10
ANSWER_SECONDS = 10.0
"""How long a server may take for a statement, beside the time for which it waits for a lock."""
IDLE_SECONDS = 8.0
"""How long a process may do nothing inside a transaction. Then the server ends its connection: the process is stopped,
and holds locks. Those who open a pool by name wait for a lock a little longer (`named_use.LEDGER_BUSY_SECONDS`).
"""
SQLITE_HEADER = b"SQLite format 3\0"
BESIDE = ("-wal", "-shm", "-journal", sqlite_writers.QUEUE_ENDING)
"""Endings of the files beside a database: those of SQLite, which makes them with the mode of that one
(sqlite.org/wal.html), and the queue of its writers.
"""
_log = logging.getLogger("skyward")


def parse_url(url: str) -> URL:
    """Return the URL of a ledger. Raises LedgerError if no ledger can be there, without its cause, which may have a
    piece of the password.
    """
    found = None
    with suppress(ArgumentError, ValueError):  # ValueError: a port that is no number
        found = make_url(url)
    if found is None or "@" in (found.host or ""):
        raise LedgerError(
            f"{shown_unread(url)} is no URL of a ledger. Examples: sqlite:////var/lib/skyward/ledger.db,"
            " postgresql+psycopg://user@host:5432/database. Special characters of a password are written as codes, such"
            " as %40 for @ and %2F for /."
        )
    if found.get_backend_name() not in ("sqlite", "postgresql"):
        raise LedgerError(f"A ledger is kept in SQLite or PostgreSQL, not in {found.get_backend_name()}.")
    if found.get_backend_name() == "sqlite" and found.database in (None, "", ":memory:"):
        raise LedgerError(
            "A ledger in memory would be lost with its process. Name a file: sqlite:////var/lib/skyward/ledger.db."
        )
    return found


def open_engine(url: URL, busy_timeout_seconds: float) -> Engine:
    """Return the engine for the URL of a ledger, which calls `SHARED.leave` at its end. Ledgers on one PostgreSQL
    server share it.

    In SQLite, a transaction with the execution option `skyward_writes` takes the write lock when it begins.
    """
    with ledger_errors(url):
        if url.get_backend_name() == "postgresql":
            settings: dict[str, Any] = {
                "connect_timeout": CONNECT_TIMEOUT_SECONDS,
                "options": " ".join(f"-c {name}={value}" for name, value in _limits(busy_timeout_seconds).items()),
                # a server that was set up with LC_ALL=C has no encoding, and the driver would return texts as bytes
                "client_encoding": "utf8",
            }
            answer_seconds = busy_timeout_seconds + ANSWER_SECONDS
            key = (url.render_as_string(hide_password=False), answer_seconds, tuple(settings.items()))
            return SHARED.take(key, lambda: _open_server(url, settings, answer_seconds))
        _make_private(Path(str(url.database)))
        engine = create_engine(url, connect_args={"timeout": busy_timeout_seconds})
    event.listen(engine, "connect", lambda connection, _: _prepare_sqlite(connection, busy_timeout_seconds))
    event.listen(engine, "begin", _begin_sqlite)
    event.listen(engine, "handle_error", _keep_connection)
    return engine


def _open_server(url: URL, settings: dict[str, Any], answer_seconds: float) -> Engine:
    # without a limit of connections: each of many ledgers had its own before, and none may wait for those of another
    engine = create_engine(url, pool_pre_ping=True, max_overflow=-1, connect_args=settings)
    connect = importlib.import_module("skyward_core.ledger.bounded_answers").connector(answer_seconds)
    event.listen(engine, "do_connect", lambda _, __, args, settings: connect(*args, **settings))
    return engine


def _limits(busy_timeout_seconds: float) -> dict[str, int]:
    """Return the settings of PostgreSQL by which no process waits for long for one that is stopped or has vanished."""
    return {
        "lock_timeout": round(busy_timeout_seconds * 1000),
        "idle_in_transaction_session_timeout": round(IDLE_SECONDS * 1000),
        "tcp_keepalives_idle": 15,
        "tcp_keepalives_interval": 5,
        "tcp_keepalives_count": 3,
    }


def _make_private(path: Path) -> None:
    """Create the file if it does not exist, and take all rights on it from other users. Raises OSError.

    No other user may be able to exchange it or a folder above it: who renames one makes the next process begin an empty
    ledger. The files that SQLite keeps beside it are treated the same. No file is opened, because closing it would drop
    all locks that this process has on it (fcntl(2)).
    """
    path = kept_path(path)
    for folder in reversed(path.parents):
        if not folder.exists():
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    kept_path(path)  # another user may have made one of them first
    status = path.parent.stat()
    if others := other_writers(status):
        raise NotPrivate(
            f"{path.parent} may be written to by {others} (mode {S_IMODE(status.st_mode):04o}), who could replace the"
            " ledger"
        )
    if status.st_mode & 0o077 and status.st_uid == os.geteuid() and path.parent == user_state_path("skyward"):
        path.parent.chmod(0o700)
    if not path.exists():
        make_file(path)
    for file in (path, *(path.with_name(f"{path.name}{ending}") for ending in BESIDE)):
        with suppress(FileNotFoundError):  # SQLite creates and deletes the files beside it
            _deny_others(file)


def _deny_others(file: Path) -> None:
    status = file.lstat()
    if not S_ISREG(status.st_mode):
        return  # SQLite raises an error for it
    if status.st_uid != os.geteuid():
        raise NotPrivate(
            f"{file} belongs to user {status.st_uid}: a ledger that several users share is kept in PostgreSQL. Run the"
            " command as that user, or name another ledger"
        )
    if status.st_mode & 0o077:
        is_main = not file.name.endswith(BESIDE)
        if is_main and not _may_be_ledger(file):
            return  # a file of another kind, named by mistake: SQLite raises an error for it
        file.chmod(0o600)
        if is_main:
            _log.warning(
                "other users could read the ledger %s (mode %04o); its mode is 0600 now",
                file,
                S_IMODE(status.st_mode),
            )


def _may_be_ledger(file: Path) -> bool:
    """Return whether a file is empty or one of SQLite. It is opened: this process may hold no lock on it yet, as on a
    ledger of mode 0600 that it has open.
    """
    with file.open("rb") as opened:
        return opened.read(len(SQLITE_HEADER)) in {b"", SQLITE_HEADER}


def _prepare_sqlite(connection: PoolProxiedConnection, busy_timeout_seconds: float) -> None:
    driver: Any = connection
    # a damaged text makes its own row unreadable, not the whole listing
    driver.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
    # `_begin_sqlite` sends BEGIN: the driver would send it too late for DDL, and without the write lock
    driver.isolation_level = None
    _switch_to_wal(driver, time.monotonic() + busy_timeout_seconds)
    # before SQLite 3.51.3 a checkpoint beside a commit may damage the file (sqlite.org/wal.html, "The WAL-Reset Bug");
    # the automatic one runs beside commits, that of `Checkpoints` does not
    driver.execute("PRAGMA wal_autocheckpoint=0")
    # an intent must survive a power cut: without it a machine could run that no ledger knows
    driver.execute("PRAGMA synchronous=FULL")
    driver.execute("PRAGMA foreign_keys=ON")


def _switch_to_wal(driver: Any, deadline: float) -> None:
    """Switch a database to WAL mode, and retry while another process does the same.

    SQLite does not always wait for that lock (sqlite.org/wal.html, section 9).
    """
    while True:
        try:
            driver.execute("PRAGMA journal_mode=WAL")
        except driver.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite_writers.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    """Begin a transaction; a writer takes the lock at once.

    A writer that reads first and then finds the file changed could only fail.
    """
    connection.exec_driver_sql(
        "BEGIN IMMEDIATE" if connection.get_execution_options().get("skyward_writes") else "BEGIN"
    )


def _keep_connection(context: ExceptionContext) -> None:
    """Let SQLAlchemy roll back a transaction that a signal has interrupted.

    By default it drops the connection. The exception keeps its statement alive, and so the write lock.
    """
    if not isinstance(context.original_exception, Exception):
        context.is_disconnect = False


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────

(
    SQLITE_LOCKED,
    SQLITE_READONLY,
    SQLITE_IOERR,
    SQLITE_CORRUPT,
    SQLITE_FULL,
    SQLITE_CANTOPEN,
    SQLITE_NOTADB,
) = (6, 8, 10, 11, 13, 14, 26)
"""Primary result codes (sqlite.org/rescode.html)."""

_IS_DAMAGED = (
    "is damaged, or no ledger. Move it away: a new one is created, and `skyward sweep` finds by their tags the machines"
    " that only this one knew."
)
_ADVICE = {
    SQLITE_LOCKED: "is locked by another connection of this process. Try again.",
    SQLITE_READONLY: (
        "may not be written to. Correct the permissions of the file and its directory, or name another ledger"
        " (SKYWARD_LEDGER)."
    ),
    SQLITE_IOERR: ("could not be read or written by the operating system. Check the disk: it may be full or removed."),
    SQLITE_CORRUPT: _IS_DAMAGED,
    SQLITE_FULL: "is on a full disk. Free some space; all earlier entries are safe.",
    SQLITE_CANTOPEN: (
        "could not be opened. Check the path and its permissions, or name another ledger (SKYWARD_LEDGER)."
    ),
    SQLITE_NOTADB: _IS_DAMAGED,
}


READ_ONLY = (
    "is on a file system that is read-only. Mount it with write access, or name another ledger (SKYWARD_LEDGER)."
)
LOCK_NOT_AVAILABLE, NOT_ALLOWED = "55P03", "42501"
"""SQLSTATE of PostgreSQL after lock_timeout, and of a statement for which the role has no right."""


def shown(url: URL) -> str:
    """Return the URL of a ledger for messages: without passwords, wherever they are in it."""
    return without_logins(url.render_as_string(hide_password=True))


@contextmanager
def ledger_errors(url: URL) -> Generator[None]:
    """Turn errors of the database, its driver and the operating system into LedgerError, without passwords."""
    try:
        yield
    except IntegrityError as error:
        raise LedgerConflict(
            f"The ledger at {shown(url)} refuses this entry: {error.orig}. Its pool or account is not in the ledger,"
            " or another process was faster; try again."
        ) from error
    except DBAPIError as error:
        raise LedgerError(f"The ledger at {shown(url)} {_advice(error, url)} ({_cause(error, url)})") from error
    except (NoSuchModuleError, ImportError) as error:
        raise LedgerError(
            f"The driver for {shown(url)} is not installed: {error}. For postgresql+psycopg: pip install"
            " 'psycopg[binary]'."
        ) from error
    except SQLAlchemyError as error:
        raise LedgerError(f"The ledger at {shown(url)} could not be used: {error}") from error
    except OSError as error:
        advice = READ_ONLY if error.errno == errno.EROFS else _ADVICE[SQLITE_CANTOPEN]
        raise LedgerError(f"The ledger at {shown(url)} {advice} ({error})") from error


def _advice(error: DBAPIError, url: URL) -> str:
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        if sqlite_writers.is_busy(error):
            return _busy(url)
        if code & 0xFF in {SQLITE_READONLY, SQLITE_CANTOPEN, SQLITE_IOERR} and _is_read_only(Path(str(url.database))):
            return READ_ONLY
        return _ADVICE.get(code & 0xFF, "refuses.")
    state = getattr(error.orig, "sqlstate", None)
    if state is None or error.connection_invalidated:
        return "cannot be reached. Check that its server runs and that the URL is right; then try again."
    if state == NOT_ALLOWED:
        words = "because this role lacks a right (docs/ledger.md lists them)"
        return f"refuses (SQLSTATE {state}), {words}. Tables are made and migrated by the owner of the database."
    if state == LOCK_NOT_AVAILABLE:
        words = "because another transaction holds a row for long. Try again; the server's pg_stat_activity says which"
        return f"refuses (SQLSTATE {state}), {words}."
    return f"refuses (SQLSTATE {state}). Look at the server's log; then try again."


def _busy(url: URL) -> str:
    """Return who keeps the others from writing, and what to do."""
    holder = sqlite_writers.lock_holder(url)
    if holder is None:
        return "is busy: other processes wrote to it for the whole time. Try again."
    if holder.is_stopped:
        return (
            f"is locked: {holder} writes to it, and is stopped. Let it go on (kill -CONT"
            f" {holder.pid}) or end it; then try again."
        )
    return f"is locked: {holder} writes to it for long. Try again when that has ended."


def _is_read_only(path: Path) -> bool:
    """Return whether the file system of a path is read-only, also for root."""
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    with suppress(OSError):
        return there is not None and bool(os.statvfs(there).f_flag & os.ST_RDONLY)
    return False


def _cause(error: DBAPIError, url: URL) -> str:
    """Return the words of the driver, which may repeat what it was given."""
    text = " ".join(str(error.orig).split())
    return text.replace(str(url.password), HIDDEN) if url.password else text


class SharedEngines:
    """The engines of this process, and how many ledgers use each. Safe to use from threads."""

    def __init__(self) -> None:
        self._engines: dict[Hashable, Engine] = {}
        self._users: Counter[Engine] = Counter()
        self._lock = threading.Lock()
        """Held while an engine is made, which connects to nothing."""
        os.register_at_fork(after_in_child=self._forget_lock)

    def _forget_lock(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it

    def take(self, key: Hashable, make: Callable[[], Engine]) -> Engine:
        """Return the engine of this key for one more ledger, which calls `leave` at its end."""
        with self._lock:
            of_this_process = (os.getpid(), key)
            if (engine := self._engines.get(of_this_process)) is None:
                engine = self._engines[of_this_process] = make()
            self._users[engine] += 1
            return engine

    def leave(self, engine: Engine) -> None:
        """A ledger does not use the engine any more: the last one closes its connections, and so does the only user of
        an engine that is not shared.
        """
        with self._lock:
            self._users[engine] -= 1
            if self._users[engine] <= 0:
                del self._users[engine]
            is_over = engine not in self._users
        if is_over:
            engine.dispose()

    def is_used(self, engine: Engine) -> bool:
        """Return whether a ledger uses the engine."""
        return engine in self._users


SHARED = SharedEngines()
