"""The connections and transactions of one ledger, the version of its schema, and its migration to the newest one.

`skyward_meta` holds the version as a number. Every release reads it first, and refuses a number that it does not know.
Alembic runs the migrations and keeps its own copy of that number in `skyward_alembic`. One transaction writes both,
together with all changes of the schema: another process sees the old schema or the new one, never a part.

    older ──a look──▶ refused, unchanged
      └──an opening, `skyward sweep --yes` or `skyward ledger migrate`──▶ migrated; refused while a pool of it lives

The processes of a pool that lives have the older release. They could not write to a migrated ledger any more, and what
their machines cost would be nowhere.

A new ledger gets the tables as they are now. Alembic is imported only if there is an older ledger to migrate.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    extract,
    false,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy import cast as cast_to

from skyward_core.errors import LedgerError
from skyward_core.ledger import migrations
from skyward_core.ledger.lease_clock import LeaseClock, read_clock
from skyward_core.ledger.rows import PoolEntry
from skyward_core.ledger.sql_engine import SHARED, ledger_errors, open_engine, parse_url, shown
from skyward_core.ledger.sqlite_writers import Checkpoints, WriterQueue, begin_in_turn
from skyward_core.ledger.tables import (
    ATTEMPTS,
    CALLS,
    META,
    METADATA,
    POOLS,
    RESERVATIONS,
    RESOURCES,
    pool_seen,
    stamp,
)

NUMBERS_PER_STATEMENT = 1000
"""The most values in one `IN`. SQLite allows 32,766 in a statement, PostgreSQL twice as many."""
ALEMBIC_TABLE = "skyward_alembic"
ALEMBIC_LOGGERS = ("alembic.runtime.migration", "alembic.runtime.plugins")
MOST_NAMED = 5
"""How many living pools a message names."""
MIGRATION_LOCK = 0x736B7977617264  # "skyward" in ASCII: the advisory lock of a migration in PostgreSQL


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
        may_migrate: bool = False,
    ) -> None:
        """Open the database at a SQLAlchemy URL, and create its tables if there are none.

        `uses_server_clock`: `now` is the time of a PostgreSQL server, which all clients share. `awake` counts the
        seconds since the boot of this machine; None: leases are judged by `clock` alone. `may_migrate`: migrate tables
        of an earlier release, unless a pool of it lives.
        """
        self.url = parse_url(url)
        self.clock = clock
        """Returns the time of this machine."""
        self._awake = awake
        self.has_server_clock = uses_server_clock and self.url.get_backend_name() == "postgresql"
        self._is_closed = False
        self._snapshots = threading.local()
        self._engine = open_engine(self.url, busy_timeout_seconds)
        self._writing = self._engine.execution_options(skyward_writes=True)
        self._writers = WriterQueue(self.url)
        self._checkpoints = Checkpoints(self.url, busy_timeout_seconds)
        try:
            self._prepare(may_migrate=may_migrate)
        except BaseException:
            self.close()
            raise

    def _prepare(self, *, may_migrate: bool) -> None:
        with self.read() as connection:
            version = schema_version(connection)
        if version == newest_version():
            return
        if migrations.FIRST_VERSION <= version < newest_version() and not may_migrate:
            raise LedgerError(
                f"The ledger at {shown(self.url)} has version {version}, of an earlier release of skyward-core; this"
                f" release has {newest_version()}. This command does not migrate it, because processes of the earlier"
                " release may write to it. Use the earlier release as long as they run, then `skyward ledger migrate`."
            )
        with self.write() as connection, _at_leisure(connection):
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            migrate(connection, self._living)

    def _living(self, connection: Connection) -> list[PoolEntry]:
        """Return the pools that live, of any version since the first: columns that it lacks are taken as empty."""
        names = {column["name"] for column in inspect(connection).get_columns(POOLS.name)}
        is_open = POOLS.c.ended_microseconds.is_(None) & POOLS.c.condemned_microseconds.is_(None)
        statement = select(*(column for column in POOLS.c if column.name in names)).where(is_open).order_by(POOLS.c.id)
        clock, missing = self.lease_clock(), dict.fromkeys(set(POOLS.c.keys()) - names, "")
        entries = [pool_seen({**missing, **row}, clock) for row in connection.execute(statement).mappings()]
        return [entry for entry in entries if not entry.why_dead(self.clock(), entry.owner.state())]

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
        """Open a transaction that reads, or go on in the `snapshot` of this thread. It never waits for a writer."""
        if (present := getattr(self._snapshots, "connection", None)) is not None:
            with ledger_errors(self.url):
                yield present
            return
        with ledger_errors(self.url), self._pooled(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Let all that this thread reads in the block be of one moment: figures that others write meanwhile would not
        add up.
        """
        if getattr(self._snapshots, "connection", None) is not None:
            yield
            return
        with self.read() as connection:
            if connection.dialect.name == "postgresql":  # a transaction of SQLite is of one moment anyway
                connection.execution_options(isolation_level="REPEATABLE READ")
            self._snapshots.connection = connection
            try:
                yield
            finally:
                self._snapshots.connection = None

    @contextmanager
    def write(self) -> Generator[Connection]:
        """Open a transaction that writes. It is committed at the end, or rolled back after an exception."""
        with ledger_errors(self.url), self._writers.turn(), self._pooled():
            with ExitStack() as transaction:
                yield begin_in_turn(lambda: transaction.enter_context(self._writing.begin()), self.url)
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


def newest_version() -> int:
    """Return the version of the schema that this release writes."""
    return migrations.FIRST_VERSION + len(migrations.MIGRATIONS)


def schema_version(connection: Connection) -> int:
    """Return the version of the schema; 0 if the ledger has no tables."""
    if not inspect(connection).has_table(META.name):
        return 0
    version = connection.execute(select(META.c.value).where(META.c.name == "version")).scalar()
    if version is None:
        return 0
    if not (str(version).isascii() and str(version).isdecimal()):
        raise LedgerError(
            f"The ledger at {shown(connection.engine.url)} says that it has version {version!r}, which is none: it is"
            f" damaged, or not skyward's. Name another ledger (SKYWARD_LEDGER), or set the right number in {META.name};"
            f" this release of skyward-core writes {newest_version()}."
        )
    return int(version)


def must_be_newest(connection: Connection) -> None:
    """Raise LedgerError if the schema was migrated after this process has opened the ledger."""
    version = connection.execute(select(META.c.value).where(META.c.name == "version")).scalar()
    if version != str(newest_version()):
        raise LedgerError(
            f"The ledger at {shown(connection.engine.url)} was migrated to version {version} by another release of"
            f" skyward-core, while this process had it open with {newest_version()}. Restart this program with that"
            " release."
        )


def migrate(connection: Connection, living: Callable[[Connection], Sequence[PoolEntry]]) -> None:
    """Migrate the schema to the newest version, within the transaction of the connection.

    The transaction must have the write lock in SQLite. `living` returns the pools that live. Raises LedgerError if the
    schema is newer than that, or older than the first version, and if a pool lives: its processes have the older
    release.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    version, newest = schema_version(connection), newest_version()
    if version == newest:
        return
    if version > newest:
        raise LedgerError(
            f"The ledger at {shown(connection.engine.url)} has version {version}; this release of skyward-core knows"
            f" {newest}. Use the newer release, or another ledger (SKYWARD_LEDGER)."
        )
    if version >= migrations.FIRST_VERSION:
        if connection.dialect.name == "postgresql":  # no pool is opened between the look and the migration
            connection.exec_driver_sql(f"LOCK TABLE {POOLS.name} IN ACCESS EXCLUSIVE MODE")
        if pools := living(connection):
            names = ", ".join(f"{pool.id} of {pool.owner.name}" for pool in pools[:MOST_NAMED])
            more = f" and {len(pools) - MOST_NAMED} others" if len(pools) > MOST_NAMED else ""
            raise LedgerError(
                f"The ledger at {shown(connection.engine.url)} has version {version}, of an earlier release of"
                f" skyward-core, and is not migrated while pools of that release live: {names}{more}. Their processes"
                " could record no costs any more. Wait for their end, or end them with the earlier release"
                " (`skyward stop`); then try again."
            )
        with _alembic_is_quiet():
            _run(connection, version)
    elif _is_new(connection):
        _create(connection)
    else:
        raise LedgerError(
            f"The ledger at {shown(connection.engine.url)} has version {version}, of code before the first release,"
            f" which cannot be migrated: the first release has {migrations.FIRST_VERSION}. End what is in it with that"
            " code (`skyward sweep`), and name another ledger (SKYWARD_LEDGER)."
        )
    _write_version(connection, newest)


def _is_new(connection: Connection) -> bool:
    """Return whether the database has no table of ours."""
    return not any(name.startswith("skyward_") for name in inspect(connection).get_table_names())


def _create(connection: Connection) -> None:
    """Create the newest tables, and Alembic's, with which the next release goes on."""
    METADATA.create_all(connection, checkfirst=False)
    connection.exec_driver_sql("DROP INDEX skyward_resources_open")
    connection.exec_driver_sql(
        "CREATE INDEX skyward_resources_open ON skyward_resources (id) WHERE gone_microseconds IS NULL"
    )
    heads = _alembic_table()
    heads.create(connection)
    connection.execute(insert(heads).values(version_num=str(newest_version())))


def _alembic_table() -> Table:
    """Return Alembic's table as Alembic makes it (`DefaultImpl.version_table_impl`)."""
    column = Column("version_num", String(32), nullable=False)
    return Table(ALEMBIC_TABLE, MetaData(), column, PrimaryKeyConstraint("version_num", name=f"{ALEMBIC_TABLE}_pkc"))


@contextmanager
def _alembic_is_quiet() -> Generator[None]:
    """Drop the records of Alembic below WARNING in this thread: Airflow would write them to the log of a user's task.

    Another thread may migrate the database of another program.
    """
    thread = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    loggers = [logging.getLogger(name) for name in ALEMBIC_LOGGERS]
    for logger in loggers:
        logger.addFilter(is_kept)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_kept)


def _run(connection: Connection, version: int) -> None:
    """Let Alembic run the migrations after `version`."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext, MigrationStep
    from alembic.script import Script
    from alembic.script.revision import RevisionMap

    modules = [migrations, *migrations.MIGRATIONS]
    history = RevisionMap(lambda: [Script(module, module.revision, str(module.__file__)) for module in modules])

    def steps(*_: Any) -> Iterator[MigrationStep]:
        for script in reversed(list(history.iterate_revisions("head", str(version)))):
            yield MigrationStep.upgrade_from_script(history, cast("Script", script))

    context = MigrationContext.configure(
        connection, opts={"fn": steps, "version_table": ALEMBIC_TABLE, "transactional_ddl": True}
    )
    # not `with Operations.context`: it sets a global of Alembic, and other threads may migrate other databases
    context.run_migrations(op=Operations(context))


def _write_version(connection: Connection, version: int) -> None:
    statement = update(META).where(META.c.name == "version").values(value=str(version))
    if connection.execute(statement).rowcount == 0:
        connection.execute(insert(META).values(name="version", value=str(version)))
