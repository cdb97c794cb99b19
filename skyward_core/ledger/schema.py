"""The version of a ledger's schema, and its migration to the newest version.

`skyward_meta` holds the version as a number. Every release reads it first, and refuses a number that it does not know.
Alembic runs the migrations and keeps its own copy of that number in `skyward_alembic`. One transaction writes both,
together with all changes of the schema: another process sees the old schema or the new one, never a part.

A new ledger gets the tables as they are now. Alembic is imported only if there is an older ledger to migrate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    func,
    insert,
    inspect,
    select,
    update,
)

from skyward_core.errors import LedgerError
from skyward_core.ledger import migrations
from skyward_core.ledger.sql_engine import shown
from skyward_core.ledger.tables import META, METADATA

ALEMBIC_TABLE = "skyward_alembic"
ALEMBIC_LOGGERS = ("alembic.runtime.migration", "alembic.runtime.plugins")
MIGRATION_LOCK = 0x736B7977617264  # "skyward" in ASCII: the advisory lock of a migration in PostgreSQL


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


def migrate(connection: Connection) -> None:
    """Migrate the schema to the newest version, within the transaction of the connection.

    The transaction must have the write lock in SQLite. Raises LedgerError if the schema is newer than that, or older
    than the first version.
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
