"""Migrations: old ledgers get the newest schema, atomically; newer ledgers are refused."""

import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, MetaData, create_engine, inspect, text

from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Bucket, CallState, CostBy, Period, Price
from skyward_core.ledger.schema import ALEMBIC_TABLE, MIGRATIONS, migrate, schema_version
from skyward_core.ledger.tables import METADATA, WORK_COLUMNS
from skyward_core.ledger.users import users_of
from skyward_core.machines.offers import Extra
from skyward_core.work import Work
from tests.ledger.fixtures import (
    NOON,
    TRAIN,
    USD,
    bill,
    claim,
    intend,
    open_pool,
    opened,
    pay,
    record_shares,
    resource_request,
    run_script,
    url_of,
)

NEWEST = len(MIGRATIONS)
UNDONE: dict[str, tuple[str, ...]] = {
    "before Alembic": (f"DROP TABLE {ALEMBIC_TABLE}",),
    "12": (
        "ALTER TABLE skyward_pools DROP COLUMN name",
        "ALTER TABLE skyward_shares DROP COLUMN owner",
        "DROP INDEX skyward_calls_by_run",
        *(f"ALTER TABLE skyward_calls DROP COLUMN {name}" for name in WORK_COLUMNS),
    ),
    "11": ("DROP TABLE skyward_uses", "ALTER TABLE skyward_clients DROP COLUMN topic"),
    "10": tuple(
        f"ALTER TABLE skyward_{table} DROP COLUMN {prefix}_{column}"
        for table, prefix in (("pools", "lease"), ("clients", "lease"), ("names", "warm"))
        for column in ("boot", "ahead_microseconds")
    ),
    "9": tuple(f"ALTER TABLE skyward_clients DROP COLUMN {column}" for column in ("calls", "busy_microseconds")),
    "8": ("ALTER TABLE skyward_accounts DROP COLUMN is_of_run", "ALTER TABLE skyward_pools DROP COLUMN run_account"),
    "7": (
        "ALTER TABLE skyward_resources DROP COLUMN warm_milliseconds",
        "ALTER TABLE skyward_pools DROP COLUMN warm_since_microseconds",
    ),
    "6": ("DROP TABLE skyward_names", "DROP TABLE skyward_clients"),
    "5": ("DROP TABLE skyward_calls",),
    "4": ("DROP TABLE skyward_sealed_leases",),
    "3": (
        "ALTER TABLE skyward_resources DROP COLUMN minimum_micro_usd",
        "ALTER TABLE skyward_resources DROP COLUMN extras_json",
    ),
    "2": (
        "DROP TABLE skyward_shares",
        "DROP INDEX skyward_pools_by_run",
        *(f"ALTER TABLE skyward_pools DROP COLUMN {name}" for name in WORK_COLUMNS),
    ),
    "1": ("DROP TABLE skyward_attempts", "ALTER TABLE skyward_pools DROP COLUMN provider_account"),
}
"""Each version, and what turns a ledger of the version above it into one of it."""


def make_old(ledger: Ledger, version: str) -> str:
    """Turn an open ledger into one of this version, and return its URL."""
    with ledger._database.write() as connection:
        for each, statements in UNDONE.items():
            for statement in statements:
                connection.exec_driver_sql(statement)
            if each.isdigit():
                connection.exec_driver_sql(f"UPDATE skyward_meta SET value = '{each}' WHERE name = 'version'")
            if each == version:
                break
    return url_of(ledger)


def migration(number: int, upgrade: Callable[[Operations], None]) -> ModuleType:
    """Return a migration that follows those of this release."""
    module = ModuleType(f"v{number}", upgrade.__doc__)
    module.__file__ = f"v{number}.py"
    module.revision, module.down_revision, module.upgrade = str(number), str(number - 1), upgrade
    return module


def add_a_column(op: Operations) -> None:
    op.execute("ALTER TABLE skyward_pools ADD COLUMN note TEXT")


def fail(op: Operations) -> None:
    op.execute("CREATE TABLE half (x INTEGER)")
    raise RuntimeError("the power went")


NEXT = (*MIGRATIONS, migration(NEWEST + 1, add_a_column))
"""The migrations of a later release."""


def schema(path: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as raw:
        return raw.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()


def versions(url: str) -> tuple[Any, Any]:
    """Return the version of the ledger, and Alembic's."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return (
                connection.execute(text("SELECT value FROM skyward_meta WHERE name = 'version'")).scalar(),
                connection.execute(text(f"SELECT version_num FROM {ALEMBIC_TABLE}")).scalar(),
            )
    finally:
        engine.dispose()


@pytest.mark.parametrize("version", ["before Alembic", "8", "3", "1"])
def test_an_old_ledger_is_migrated(ledger: Ledger, version: str) -> None:
    """Its entries and its money stay, and all that later versions have can be used."""
    ledger.set_account(Account("team", USD(4), Period.MONTH))
    ledger.reserve("team", "p", USD(1))
    intent = ledger.bind(intend(ledger, price=Price(USD("0.03"))), "i-1")
    (pool,) = ledger.pools()
    extras = (Extra(name="disk", usd_per_hour=0.25, source="a page", checked="2026-11-22"),)
    price = Price(USD("1.25"), USD("2.25"), minimum_usd=USD("0.01"), extras=extras)
    with Ledger(make_old(ledger, version)) as newer:
        assert (newer.pools(), newer.intents()) == ([pool], [intent])
        assert newer.accounts() == [Account("team", USD(4), Period.MONTH)]
        assert newer.attempts() == []
        newer.roll("team", "p", USD(1), USD(2))
        newer.turn_to(pool.id, {"name": "aws"}, "1234")
        (after,) = newer.pools()
        assert (after.provider, after.provider_account) == ({"name": "aws"}, "1234")
        assert newer.intend("p", resource_request("t2", price=price)).price == price
        newer.seal_lease("p", "lease", "keys")
        newer.note_calls("p", [CallState("c", "f", "", 1, "running", NOON)])
        pay(newer, "q", TRAIN, 2)
        record_shares(newer, "q", {TRAIN: USD(1)})
        assert "airflow:nightly/train" in bill(newer, CostBy.TASK)
        open_pool(newer, "run", work=TRAIN, run_limit_usd=USD(5))
        assert newer.reserve(None, "run", USD(5)).reserved_usd == USD(5)
        opened(newer)
        claim(newer, "b")
        assert newer.names.activity(["sky-a"])["sky-a"].users == 2
    if version.isdigit():  # else Alembic's version is written by the next migration
        assert versions(url_of(ledger)) == (str(NEWEST), str(NEWEST))


def test_processes_of_a_release_without_uses_keep_their_parts(ledger: Ledger) -> None:
    """Such a bill split the cost of running calls by the time of slots when it was read: now each process has a use."""
    opened(ledger, work=Work(run="1"))
    for client, run in (("b", "2"), ("c", "3")):
        claim(ledger, client, work=Work(run=run))
    (machine,) = ledger.intend_all("sky-a", [resource_request("m", "sky-a", Price(USD("3.6")))])
    ledger.bind(machine.id, "i-m")
    ledger.note_all({machine.id: {Bucket.RUNNING_CALLS: 300, Bucket.IDLE: 100}})
    with ledger._database.write() as connection:
        for client, milliseconds in (("a", 100_000), ("b", 200_000)):
            values = f"slot_milliseconds = {milliseconds} WHERE id = '{client}'"
            connection.exec_driver_sql(f"UPDATE skyward_clients SET {values}")
    with Ledger(make_old(ledger, "12")) as newer:
        assert bill(newer, CostBy.RUN, pool_id="sky-a") == {"1": (1, USD("0.2")), "2": (0, USD("0.2"))}
        users = users_of(newer, "sky-a")
        assert [(user.slot_seconds, user.cost_usd) for user in users] == [(100, USD("0.1")), (200, USD("0.2")), (0, 0)]


def test_a_migration_that_fails_changes_nothing_and_a_newer_ledger_is_refused(ledger: Ledger) -> None:
    """Neither the schema nor the version changes. A later migration runs once, also from a release before Alembic."""
    intent = intend(ledger)
    with pytest.raises(RuntimeError, match="power"), ledger._database.write() as connection:
        migrate(connection, (*NEXT, migration(NEWEST + 2, fail)))
    assert versions(url_of(ledger)) == (str(NEWEST), str(NEWEST))
    with ledger._database.read() as connection:
        assert not inspect(connection).has_table("half")
        assert "note" not in {column["name"] for column in inspect(connection).get_columns("skyward_pools")}
    make_old(ledger, "before Alembic")
    for _ in range(2):
        with ledger._database.write() as connection:
            migrate(connection, NEXT)
            assert schema_version(connection) == NEWEST + 1
            assert "note" in {column["name"] for column in inspect(connection).get_columns("skyward_pools")}
    assert ledger.intents() == [intent]
    expected = rf"has version {NEWEST + 1}; this release of skyward-core knows {NEWEST}\. Use the newer release"
    with pytest.raises(LedgerError, match=expected):
        Ledger(url_of(ledger))
    assert versions(url_of(ledger)) == (str(NEWEST + 1), str(NEWEST + 1))


def test_the_migrations_lead_to_the_tables_of_a_new_ledger(url: str) -> None:
    """A new ledger gets its tables without a migration. All migrations, from the first on, make the same ones."""
    Ledger(url).close()
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            created, numbers = tables(connection), versions(url)
            opts = {"version_table": ALEMBIC_TABLE, "compare_server_default": connection.dialect.name != "sqlite"}
            assert compare_metadata(MigrationContext.configure(connection, opts=opts), METADATA) == []
        everything = MetaData()
        everything.reflect(engine)
        everything.drop_all(engine)
        with engine.begin() as connection:
            migrate(connection, list(MIGRATIONS))
        with engine.connect() as connection:
            # Alembic compares the quotes of SQLite's defaults, which differ without a meaning
            assert compare_metadata(MigrationContext.configure(connection, opts=opts), METADATA) == []
            assert (tables(connection), versions(url)) == (created, numbers)
        assert len(created) == len(METADATA.tables) + 1
    finally:
        engine.dispose()


def tables(connection: Connection) -> dict[str, Any]:
    """Return what the database says of each table: columns in any order, keys and indexes."""
    found = inspect(connection)
    return {
        name: (
            {
                column["name"]: (
                    str(column["type"]),
                    column["nullable"],
                    str(column["default"]).strip("'"),
                    column.get("autoincrement"),
                )
                for column in found.get_columns(name)
            },
            found.get_pk_constraint(name),
            sorted(found.get_foreign_keys(name), key=str),
            sorted(
                str(dict(index) | {"dialect_options": {key: str(value) for key, value in options.items()}})
                for index in found.get_indexes(name)
                for options in [index.get("dialect_options", {})]
            ),
            found.get_unique_constraints(name),
            found.get_check_constraints(name),
        )
        for name in found.get_table_names()
    }


def test_a_database_with_foreign_tables_gets_the_same_schema_as_an_empty_one(tmp_path: Path) -> None:
    """The foreign tables stay."""
    Ledger(f"sqlite:///{tmp_path}/new.db").close()
    old = tmp_path / "old.db"
    with closing(sqlite3.connect(old)) as raw:
        raw.executescript("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (7);")
    Ledger(f"sqlite:///{old}").close()
    assert [entry for entry in schema(old) if entry[1] != "theirs"] == schema(tmp_path / "new.db")
    with closing(sqlite3.connect(old)) as raw:
        assert raw.execute("SELECT * FROM theirs").fetchall() == [(7,)]
    assert versions(f"sqlite:///{old}") == (str(NEWEST), str(NEWEST))


def test_a_migration_writes_no_records_of_alembic_below_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be in the log of a user's task. Those of another thread, and those of later migrations, are written."""
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("alembic.runtime.migration")

    def logs(op: Operations) -> None:
        """Write records."""
        logger.info("an info")
        logger.warning("a warning")
        other = threading.Thread(target=logger.info, args=["of another thread"])
        other.start()
        other.join()

    engine = create_engine(f"sqlite:///{tmp_path}/ledger.db")
    with engine.begin() as connection:
        migrate(connection, [*MIGRATIONS, migration(NEWEST + 1, logs)])
    engine.dispose()
    logger.info("afterwards")
    assert [record.getMessage() for record in caplog.records] == ["a warning", "of another thread", "afterwards"]


ONLY_WHAT_IS_NEEDED = """
import sys
import skyward_core
assert "sqlalchemy" not in sys.modules
from skyward_core.ledger.ledger import Ledger
Ledger(sys.argv[1]).close()
print("alembic" in sys.modules)
"""


def test_alembic_is_imported_only_for_a_migration(sqlite_url: str) -> None:
    """A new ledger needs none."""

    def imports_alembic() -> str:
        done = run_script(ONLY_WHAT_IS_NEEDED, sqlite_url)
        return done.stdout.strip() or done.stderr

    assert (imports_alembic(), versions(sqlite_url)) == ("False", (str(NEWEST), str(NEWEST)))
    with Ledger(sqlite_url) as ledger:
        make_old(ledger, "12")
    assert (imports_alembic(), imports_alembic()) == ("True", "False")


EIGHT_OPEN = """
import os, sys
import alembic.runtime.environment  # once, before the forks
from skyward_core.ledger.ledger import Ledger

start, go = os.pipe()
children = []
for _ in range(8):
    if not (pid := os.fork()):
        os.close(go)
        os.read(start, 1)  # until all have begun
        try:
            Ledger(sys.argv[1]).close()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    children.append(pid)
os.close(go)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


@pytest.mark.parametrize("is_old", [True, False])
def test_eight_processes_may_open_a_ledger_at_once(url: str, is_old: bool) -> None:
    """One of them creates it, or migrates an old one; the others find it so."""
    if is_old:
        with Ledger(url) as ledger:
            open_pool(ledger, "p")
            intend(ledger)
            make_old(ledger, "1")
    done = run_script(EIGHT_OPEN, url)
    assert done.returncode == 0, done.stdout + done.stderr
    with Ledger(url) as newer:
        assert len(newer.intents()) == is_old
    assert versions(url) == (str(NEWEST), str(NEWEST))


def test_threads_may_create_and_migrate_different_ledgers_at_once(tmp_path: Path) -> None:
    """A migration uses no state that all threads share."""
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(8)]
    for url in urls[:4]:
        with Ledger(url) as ledger:
            make_old(ledger, "1")
    barrier = threading.Barrier(len(urls))

    def create(url: str) -> None:
        barrier.wait()
        Ledger(url).close()

    threads = [threading.Thread(target=create, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [versions(url) for url in urls] == [(str(NEWEST), str(NEWEST))] * len(urls)
