"""Migrations: old ledgers get the newest schema, atomically; newer ledgers are refused."""

import logging
import sqlite3
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from alembic.operations import Operations
from sqlalchemy import create_engine, inspect, text

from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import CostBy, Price
from skyward_core.ledger.schema import ALEMBIC_TABLE, MIGRATIONS, migrate, schema_version
from skyward_core.ledger.tables import WORK_COLUMNS
from skyward_core.machines.offers import Extra
from tests.system.ledger.test_ledger import TRAIN, bill, pay, run_script
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    clock,
    file_ledger,
    intend,
    ledger,
    open_pool,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)

USD = Decimal
NEWEST = len(MIGRATIONS)

BEFORE_ALEMBIC = (f"DROP TABLE {ALEMBIC_TABLE}",)
"""Turns a ledger into one of the last release before Alembic."""
VERSION_9 = (
    *BEFORE_ALEMBIC,
    *(f"ALTER TABLE skyward_clients DROP COLUMN {column}" for column in ("calls", "busy_microseconds")),
    "UPDATE skyward_meta SET value = '9' WHERE name = 'version'",
)
"""Turns a ledger into one of the ninth version."""
VERSION_8 = (
    *VERSION_9,
    "ALTER TABLE skyward_accounts DROP COLUMN is_of_run",
    "ALTER TABLE skyward_pools DROP COLUMN run_account",
    "UPDATE skyward_meta SET value = '8' WHERE name = 'version'",
)
"""Turns a ledger into one of the eighth version."""
VERSION_7 = (
    *VERSION_8,
    "ALTER TABLE skyward_resources DROP COLUMN warm_milliseconds",
    "ALTER TABLE skyward_pools DROP COLUMN warm_since_microseconds",
    "UPDATE skyward_meta SET value = '7' WHERE name = 'version'",
)
"""Turns a ledger into one of the seventh version."""
VERSION_6 = (
    *VERSION_7,
    "DROP TABLE skyward_names",
    "DROP TABLE skyward_clients",
    "UPDATE skyward_meta SET value = '6' WHERE name = 'version'",
)
"""Turns a ledger into one of the sixth version."""
VERSION_5 = (*VERSION_6, "DROP TABLE skyward_calls", "UPDATE skyward_meta SET value = '5' WHERE name = 'version'")
"""Turns a ledger into one of the fifth version."""
VERSION_4 = (
    *VERSION_5,
    "DROP TABLE skyward_sealed_leases",
    "UPDATE skyward_meta SET value = '4' WHERE name = 'version'",
)
"""Turns a ledger into one of the fourth version."""
VERSION_3 = (
    *VERSION_4,
    "ALTER TABLE skyward_resources DROP COLUMN minimum_micro_usd",
    "ALTER TABLE skyward_resources DROP COLUMN extras_json",
    "UPDATE skyward_meta SET value = '3' WHERE name = 'version'",
)
"""Turns a ledger into one of the third version."""
VERSION_2 = (
    *VERSION_3,
    "DROP TABLE skyward_shares",
    "DROP INDEX skyward_pools_by_run",
    *(f"ALTER TABLE skyward_pools DROP COLUMN {name}" for name in WORK_COLUMNS),
    "UPDATE skyward_meta SET value = '2' WHERE name = 'version'",
)
"""Turns a ledger into one of the second version."""
VERSION_1 = (
    *VERSION_2,
    "DROP TABLE skyward_attempts",
    "ALTER TABLE skyward_pools DROP COLUMN provider_account",
    "UPDATE skyward_meta SET value = '1' WHERE name = 'version'",
)
"""Turns a ledger into one of the first release."""


def make_old(ledger: Ledger, statements: tuple[str, ...]) -> str:
    """Turn an open ledger into an older one, and return its URL."""
    with ledger._database.write() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    return ledger.url.render_as_string(hide_password=False)


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
FAILING = (*NEXT, migration(NEWEST + 2, fail))
"""The same, and then one that fails."""


def schema(path: Path) -> list[tuple[str, ...]]:
    raw = sqlite3.connect(path)
    try:
        return raw.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()
    finally:
        raw.close()


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


def test_a_migration_writes_no_records_of_alembic_below_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be in the log of a user's task."""
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


def test_a_database_with_foreign_tables_gets_the_same_schema_as_an_empty_one(tmp_path: Path) -> None:
    Ledger(f"sqlite:///{tmp_path}/new.db").close()
    old = tmp_path / "old.db"
    raw = sqlite3.connect(old)
    raw.executescript("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (7);")
    raw.close()
    Ledger(f"sqlite:///{old}").close()
    assert [entry for entry in schema(old) if entry[1] != "theirs"] == schema(tmp_path / "new.db")
    raw = sqlite3.connect(old)
    assert raw.execute("SELECT * FROM theirs").fetchall() == [(7,)]
    raw.close()
    assert versions(f"sqlite:///{old}") == (str(NEWEST), str(NEWEST))


def test_a_ledger_of_version_1_is_migrated(ledger: Ledger) -> None:
    intent = intend(ledger)
    (before,) = ledger.pools()
    with Ledger(make_old(ledger, VERSION_1)) as newer:
        assert newer.pools() == [before]
        assert newer.intents() == [intent]
        newer.turn_to(before.id, {"name": "aws"}, "1234")
        assert newer.attempts() == []
        (after,) = newer.pools()
    assert (after.provider, after.provider_account) == ({"name": "aws"}, "1234")


def test_a_ledger_of_version_2_is_migrated(ledger: Ledger) -> None:
    (before,) = ledger.pools()
    with Ledger(make_old(ledger, VERSION_2)) as newer:
        assert newer.pools() == [before]
        pay(newer, "q", TRAIN, 2)
        newer.set_shares("q", {TRAIN: Decimal(1)})
        assert "airflow:nightly/train" in bill(newer, CostBy.TASK)


def test_a_ledger_of_version_3_is_migrated(ledger: Ledger) -> None:
    before = ledger.bind(intend(ledger, price=Price(USD("0.03"))), "i-1")
    extras = (Extra(name="disk", usd_per_hour=0.25, source="a page", checked="2026-11-22"),)
    price = Price(USD("1.25"), USD("2.25"), minimum_usd=USD("0.01"), extras=extras)
    with Ledger(make_old(ledger, VERSION_3)) as newer:
        assert newer.intents() == [before]
        assert newer.intend("p", resource_request("t2", price=price)).price == price


@pytest.mark.parametrize("statements", [BEFORE_ALEMBIC, VERSION_3, VERSION_2, VERSION_1])
def test_a_ledger_of_a_release_before_alembic_is_stamped(ledger: Ledger, statements: tuple[str, ...]) -> None:
    make_old(ledger, statements)
    with ledger._database.write() as connection:
        migrate(connection, NEXT)
        assert {column["name"] for column in inspect(connection).get_columns("skyward_pools")} >= {"note"}
    assert versions(ledger.url.render_as_string(hide_password=False)) == (str(NEWEST + 1), str(NEWEST + 1))


def test_a_migration_that_fails_changes_nothing(file_ledger: Ledger, tmp_path: Path) -> None:
    intent = intend(file_ledger)
    path = tmp_path / "state/ledger.db"
    before = schema(path)
    with pytest.raises(RuntimeError, match="power"), file_ledger._database.write() as connection:
        migrate(connection, FAILING)
    assert schema(path) == before
    for _ in range(2):
        with file_ledger._database.write() as connection:
            migrate(connection, NEXT)
            assert schema_version(connection) == NEWEST + 1
    assert schema(path) != before
    assert file_ledger.intents() == [intent]


def test_in_postgresql_a_migration_that_fails_changes_nothing(postgresql_url: str) -> None:
    with Ledger(postgresql_url) as ledger:
        with pytest.raises(RuntimeError, match="power"), ledger._database.write() as connection:
            migrate(connection, FAILING)
        with ledger._database.write() as connection:
            assert not inspect(connection).has_table("half")
            assert schema_version(connection) == NEWEST
            migrate(connection, NEXT)
    with pytest.raises(LedgerError, match=f"has version {NEWEST + 1}"):
        Ledger(postgresql_url)


def test_a_newer_ledger_is_refused_and_not_changed(file_ledger: Ledger, tmp_path: Path) -> None:
    with file_ledger._database.write() as connection:
        migrate(connection, NEXT)
    before = schema(tmp_path / "state/ledger.db")
    expected = rf"has version {NEWEST + 1}; this release of skyward-core knows {NEWEST}\. Use the newer release"
    with pytest.raises(LedgerError, match=expected):
        Ledger(str(file_ledger.url))
    assert schema(tmp_path / "state/ledger.db") == before


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


def test_eight_processes_may_open_an_old_ledger_at_once(ledger: Ledger) -> None:
    intent = intend(ledger)
    url = make_old(ledger, VERSION_1)
    done = run_script(EIGHT_OPEN, url)
    assert done.returncode == 0, done.stdout + done.stderr
    with Ledger(url) as newer:
        assert newer.intents() == [intent]
    assert versions(url) == (str(NEWEST), str(NEWEST))


def test_threads_may_create_different_ledgers_at_once(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(8)]
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
