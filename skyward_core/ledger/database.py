"""The connections and transactions of one ledger."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection

from skyward_core.ledger.tables import (
    ATTEMPTS,
    MIGRATIONS,
    POOLS,
    RESERVATIONS,
    RESOURCES,
    migrate,
    opened,
    parsed,
    schema_version,
    told,
)

NUMBERS_PER_STATEMENT = 1000
"""How many values one `IN` may list; SQLite takes 32,766 in a statement, PostgreSQL twice that."""


class Database:
    """The database of one ledger: its connections, its transactions, and the clock that stamps its rows.

    Usable from many threads.
    """

    def __init__(self, url: str, clock: Callable[[], datetime], busy_timeout_seconds: float) -> None:
        """Open the database at a SQLAlchemy URL; make the tables if there are none, migrate them if they are of an
        older version.
        """
        self.url = parsed(url)
        self.clock = clock
        self._is_closed = False
        self._engine = opened(self.url, busy_timeout_seconds)
        self._writing = self._engine.execution_options(skyward_writes=True)
        try:
            self._bring_up_to_date()
        except BaseException:
            self.close()
            raise

    def _bring_up_to_date(self) -> None:
        with self.read() as connection:
            is_current = schema_version(connection) == len(MIGRATIONS)
        if not is_current:
            with self.write() as connection:
                migrate(connection)

    def close(self) -> None:
        """Close all connections; may be called twice. A later call opens a connection for its transaction."""
        self._is_closed = True
        self._engine.dispose()

    def vacuum(self) -> None:
        """Give the room of what was pruned back to the disk (SQLite), or to the tables (PostgreSQL, where it is done by
        itself too).
        """
        with (
            told(self.url),
            self._pooled(),
            self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ):
            tables = [table.name for table in (POOLS, RESOURCES, ATTEMPTS, RESERVATIONS)]
            driver = cast("Any", connection.connection)
            if connection.dialect.name == "sqlite":
                driver.rollback()
                driver.execute("VACUUM")
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            else:
                connection.exec_driver_sql(f"VACUUM {', '.join(tables)}")

    @contextmanager
    def read(self) -> Generator[Connection]:
        """Open a transaction that reads; it never waits for a writer."""
        with told(self.url), self._pooled(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Generator[Connection]:
        """Open a transaction that writes; it is committed at the end, and rolled back after an exception."""
        with told(self.url), self._pooled(), self._writing.begin() as connection:
            yield connection

    @contextmanager
    def _pooled(self) -> Generator[None]:
        """Keep no connection after a transaction that ends in a closed ledger: `dispose` closes only connections that
        no thread uses.
        """
        pool = self._engine.pool
        try:
            yield
        finally:
            if self._is_closed:
                pool.dispose()  # of the time before `close`, if it was called meanwhile
                self._engine.dispose()
