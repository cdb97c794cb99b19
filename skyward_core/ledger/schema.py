"""The version of a ledger's schema, and its migration to the newest version.

`skyward_meta` holds the version as a number. Every release reads it first, and refuses a number that it does not know.
Alembic runs the migrations and keeps its own copy of that number in `skyward_alembic`. One transaction writes both,
together with all changes of the schema: another process sees the old schema or the new one, never a part.

A new ledger gets the tables as they are now: that takes a third of the time of all migrations, and a test compares the
two. Alembic is imported only if there is an older ledger to migrate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, cast

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
from skyward_core.ledger.migrations import (
    v1_first_release,
    v2_attempts,
    v3_work,
    v4_price_details,
    v5_sealed_leases,
    v6_detached_calls,
    v7_names,
    v8_warm,
    v9_run_limits,
    v10_activity,
    v11_lease_clocks,
    v12_uses,
    v13_bearers,
)
from skyward_core.ledger.sql_engine import shown
from skyward_core.ledger.tables import META, METADATA

if TYPE_CHECKING:
    from alembic.runtime.migration import MigrationContext, MigrationStep
    from alembic.script.revision import RevisionMap

MIGRATIONS: Sequence[ModuleType] = (
    v1_first_release,
    v2_attempts,
    v3_work,
    v4_price_details,
    v5_sealed_leases,
    v6_detached_calls,
    v7_names,
    v8_warm,
    v9_run_limits,
    v10_activity,
    v11_lease_clocks,
    v12_uses,
    v13_bearers,
)
"""All migrations in their order. The revision of each is the version to which it leads; 0 is a database without our
tables.
"""
ALEMBIC_TABLE = "skyward_alembic"
ALEMBIC_LOGGERS = ("alembic.runtime.migration", "alembic.runtime.plugins")
MIGRATION_LOCK = 0x736B7977617264  # "skyward" in ASCII: the advisory lock of a migration in PostgreSQL


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
            f" this release of skyward-core writes {len(MIGRATIONS)}."
        )
    return int(version)


def migrate(connection: Connection, migrations: Sequence[ModuleType] = MIGRATIONS) -> None:
    """Migrate the schema to the last of `migrations`, within the transaction of the connection.

    The transaction must have the write lock in SQLite. Raises LedgerError if the schema is newer than that.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    version = schema_version(connection)
    if version > len(migrations):
        raise LedgerError(
            f"The ledger at {shown(connection.engine.url)} has version {version}; this release of skyward-core knows"
            f" {len(migrations)}. Use the newer release, or another ledger (SKYWARD_LEDGER)."
        )
    if version < len(migrations):
        if migrations is MIGRATIONS and _is_new(connection):
            _create(connection)
        else:
            with _alembic_is_quiet():
                _run(connection, migrations, version)
        _write_version(connection, len(migrations))


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
    connection.execute(insert(heads).values(version_num=MIGRATIONS[-1].revision))


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


def _run(connection: Connection, migrations: Sequence[ModuleType], version: int) -> None:
    """Let Alembic run the migrations from `version` on."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import Script
    from alembic.script.revision import RevisionMap

    history = RevisionMap(lambda: [Script(module, module.revision, str(module.__file__)) for module in migrations])

    def steps(heads: Iterable[str], _: MigrationContext) -> Iterator[MigrationStep]:
        return _steps(history, tuple(heads), version)

    context = MigrationContext.configure(
        connection, opts={"fn": steps, "version_table": ALEMBIC_TABLE, "transactional_ddl": True}
    )
    # not `with Operations.context`: it sets a global of Alembic, and other threads may migrate other databases
    context.run_migrations(op=Operations(context))


def _steps(history: RevisionMap, heads: tuple[str, ...], version: int) -> Iterator[MigrationStep]:
    """Generate the steps from Alembic's heads to the newest migration.

    A ledger of a release before Alembic has a version and no heads. It is stamped with its version first.
    """
    from alembic.runtime.migration import MigrationStep, StampStep
    from alembic.script import Script

    if version and not heads:
        heads = (str(version),)
        yield StampStep((), heads, is_upgrade=True, branch_move=True, revision_map=history)
    newer = list(history.iterate_revisions("head", heads or "base"))
    for script in reversed(newer):
        yield MigrationStep.upgrade_from_script(history, cast("Script", script))


def _write_version(connection: Connection, version: int) -> None:
    statement = update(META).where(META.c.name == "version").values(value=str(version))
    if connection.execute(statement).rowcount == 0:
        connection.execute(insert(META).values(name="version", value=str(version)))
