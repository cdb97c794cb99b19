"""The connections and transactions of one ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import BigInteger, ColumnElement, Connection, extract, false, func, select, update
from sqlalchemy import cast as cast_to

from skyward_core.ledger.lease_clock import LeaseClock, read_clock
from skyward_core.ledger.schema import migrate, newest_version, schema_version
from skyward_core.ledger.sql_engine import SHARED, ledger_errors, open_engine, parse_url
from skyward_core.ledger.sqlite_writers import Checkpoints, WriterQueue
from skyward_core.ledger.tables import ATTEMPTS, CALLS, POOLS, RESERVATIONS, RESOURCES, stamp

NUMBERS_PER_STATEMENT = 1000
"""The most values in one `IN`. SQLite allows 32,766 in a statement, PostgreSQL twice as many."""


class Database:
    """The database of one ledger: connections, transactions and the clock for its rows. Safe to use from threads."""

    def __init__(
        self,
        url: str,
        clock: Callable[[], datetime],
        busy_timeout_seconds: float,
        *,
        uses_server_clock: bool = False,
        awake: Callable[[], float] | None = None,
    ) -> None:
        """Open the database at a SQLAlchemy URL, and create or migrate its tables.

        `uses_server_clock`: `now` is the time of a PostgreSQL server, which all clients share. `awake` counts the
        seconds since the boot of this machine; None: leases are judged by `clock` alone.
        """
        self.url = parse_url(url)
        self.clock = clock
        """Returns the time of this machine."""
        self._awake = awake
        self.has_server_clock = uses_server_clock and self.url.get_backend_name() == "postgresql"
        self._is_closed = False
        self._engine = open_engine(self.url, busy_timeout_seconds)
        self._writing = self._engine.execution_options(skyward_writes=True)
        self._writers = WriterQueue(self.url)
        self._checkpoints = Checkpoints(self.url, busy_timeout_seconds)
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def _migrate(self) -> None:
        with self.read() as connection:
            is_current = schema_version(connection) == newest_version()
        if not is_current:
            with self.write() as connection, _at_leisure(connection):
                if connection.dialect.name == "postgresql":
                    connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
                migrate(connection)

    def close(self) -> None:
        """Close all connections, unless other ledgers of this process share them. May be called twice. A later
        transaction opens its own connection.
        """
        if not self._is_closed:
            self._is_closed = True
            SHARED.leave(self._engine)

    def vacuum(self) -> None:
        """Free the space of deleted rows: on the disk (SQLite), or in the tables (PostgreSQL)."""
        with (
            ledger_errors(self.url),
            self._pooled(),
            self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ):
            tables = [table.name for table in (POOLS, RESOURCES, ATTEMPTS, RESERVATIONS, CALLS)]
            driver = cast("Any", connection.connection)
            if connection.dialect.name == "sqlite":
                driver.rollback()
                driver.execute("VACUUM")
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            else:
                with _at_leisure(connection):
                    connection.exec_driver_sql(f"VACUUM {', '.join(tables)}")

    def now(self, connection: Connection) -> datetime:
        """Return the time of the server; without one (SQLite), that of this machine."""
        if not self.has_server_clock:
            return self.clock()
        found: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return found.astimezone(UTC)

    def lease_clock(self) -> LeaseClock:
        """Return how this machine's time of day is set now, to be stored beside a lease, or to read one."""
        return read_clock(self.clock, self._awake)

    def stamp_after(self, seconds: float) -> ColumnElement[int] | int:
        """Return the microseconds since 1970 of so many seconds after `now`, as a part of a statement."""
        more = timedelta(seconds=seconds)
        if not self.has_server_clock:
            return stamp(self.clock() + more)
        microseconds = extract("epoch", func.clock_timestamp()) * 1_000_000
        return cast_to(microseconds, BigInteger) + more // timedelta(microseconds=1)

    @contextmanager
    def read(self) -> Generator[Connection]:
        """Open a transaction that reads. It never waits for a writer."""
        with ledger_errors(self.url), self._pooled(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Generator[Connection]:
        """Open a transaction that writes. It is committed at the end, or rolled back after an exception."""
        with ledger_errors(self.url), self._writers.turn(), self._pooled():
            with self._writing.begin() as connection:
                yield connection
            self._checkpoints.after_commit(self._engine)

    def try_write(self) -> int:
        """Write to a table without changing a row; return the version of the schema. Raises LedgerError if this
        process may not write.
        """
        with self.write() as connection:
            connection.execute(update(POOLS).where(false()).values(id=""))
            return schema_version(connection)

    @contextmanager
    def _pooled(self) -> Generator[None]:
        """Close the connection of a transaction that ends after `close`.

        `dispose` closes only connections that no thread uses at that time.
        """
        pool = self._engine.pool
        try:
            yield
        finally:
            if self._is_closed and not SHARED.is_used(self._engine):
                pool.dispose()  # the pool from before `close`, if that was called meanwhile
                self._engine.dispose()


@contextmanager
def _at_leisure(connection: Connection) -> Generator[None]:
    """Let statements to PostgreSQL take as long as they need (`bounded_answers.py`)."""
    if connection.dialect.name != "postgresql":
        yield
        return
    driver = cast("Any", connection.connection.dbapi_connection)
    usual, driver.answer_seconds = driver.answer_seconds, math.inf
    try:
        yield
    finally:
        driver.answer_seconds = usual
