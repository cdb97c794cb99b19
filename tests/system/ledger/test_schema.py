"""Versions of the ledger: a later release migrates it, atomically; newer and unreleased ones are refused."""

import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from skyward_core.errors import LedgerError
from skyward_core.ledger import migrations
from skyward_core.ledger.database import ALEMBIC_TABLE, migrate, newest_version
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.tables import METADATA
from tests.ledger.fixtures import LATER, Clock, intend, open_pool, run_script, url_of
from tests.ledger.next_release import ADDED, migration

THIS = newest_version()


def fail(op: Operations) -> None:
    op.execute("CREATE TABLE half (x INTEGER)")
    raise RuntimeError("the power went")


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


def test_a_ledger_of_this_release_is_migrated_by_the_next_one(
    ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries stay. The migration runs once, and this release refuses the ledger then."""
    intent = intend(ledger)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))
        for may_migrate in (True, False):
            with Ledger(url, may_migrate=may_migrate) as newer:
                assert newer.intents() == [intent]
                assert versions(url) == (str(THIS + 1), str(THIS + 1))
                with newer._database.read() as connection:
                    assert connection.execute(text("SELECT note FROM skyward_pools")).scalars().all() == ["p"]
    expected = rf"has version {THIS + 1}; this release of skyward-core knows {THIS}\. Use the newer release"
    with pytest.raises(LedgerError, match=expected):
        Ledger(url)
    assert versions(url) == (str(THIS + 1), str(THIS + 1))


def test_a_look_never_migrates_a_ledger(ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused in words that say which release to use, and changes nothing. The older release goes on."""
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))
    with pytest.raises(LedgerError, match=rf"has version {THIS}, of an earlier release.*skyward ledger migrate"):
        Ledger(url)
    monkeypatch.undo()
    assert versions(url) == (str(THIS), str(THIS))
    assert [pool.id for pool in ledger.pools()] == ["p"]


def test_no_ledger_is_migrated_while_a_pool_of_the_older_release_lives(
    ledger: Ledger, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes could record no costs any more. The message names the pools; after their end it is migrated."""
    open_pool(ledger, "q")
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))
    with pytest.raises(LedgerError, match=r"while pools of that release live: p of ada@laptop, q of ada@laptop\."):
        Ledger(url, clock=clock, may_migrate=True)
    assert versions(url) == (str(THIS), str(THIS))
    clock.time = LATER
    Ledger(url, clock=clock, may_migrate=True).close()
    assert versions(url) == (str(THIS + 1), str(THIS + 1))


def test_no_pool_is_opened_in_a_ledger_that_another_release_has_migrated_meanwhile(
    ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that had the ledger open before is told to start again with that release."""
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))
        Ledger(url, may_migrate=True).close()
    with pytest.raises(LedgerError, match=rf"was migrated to version {THIS + 1} by another release"):
        open_pool(ledger, "late")
    assert [pool.id for pool in ledger.pools()] == ["p"]


def test_a_ledger_of_the_first_version_is_migrated_to_this_one(ledger: Ledger, url: str) -> None:
    """Version 14 adds who has stopped a pool. The entries stay, and the tables are those that are declared."""
    intent = intend(ledger)
    with ledger._database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE skyward_pools DROP COLUMN stopped_by")
        connection.exec_driver_sql("UPDATE skyward_meta SET value = '13' WHERE name = 'version'")
        connection.exec_driver_sql(f"UPDATE {ALEMBIC_TABLE} SET version_num = '13'")
    with Ledger(url, may_migrate=True) as newer:
        assert newer.intents() == [intent]
        assert [(pool.id, pool.stopped_by) for pool in newer.pools()] == [("p", "")]
        assert versions(url) == (str(THIS), str(THIS))
        assert newer.condemn("p", seen=newer.pools()[0].written_lease, stopped_by="ada@lab")
        assert newer.pools()[0].stopped_by == "ada@lab"
        with newer._database.read() as connection:
            opts = {"version_table": ALEMBIC_TABLE, "compare_server_default": connection.dialect.name != "sqlite"}
            assert compare_metadata(MigrationContext.configure(connection, opts=opts), METADATA) == []


def test_a_migration_that_fails_changes_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the schema nor the version."""
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED, migration(THIS + 2, fail)))
    with pytest.raises(RuntimeError, match="power"), ledger._database.write() as connection:
        migrate(connection, lambda _: [])
    assert versions(url_of(ledger)) == (str(THIS), str(THIS))
    with ledger._database.read() as connection:
        assert not {"half", "skyward_notes"} & set(inspect(connection).get_table_names())
        assert "note" not in {column["name"] for column in inspect(connection).get_columns("skyward_pools")}


def test_a_ledger_from_before_the_first_release_is_refused_unchanged(ledger: Ledger, url: str) -> None:
    with ledger._database.write() as connection:
        connection.exec_driver_sql("UPDATE skyward_meta SET value = '12'")
    with pytest.raises(LedgerError, match=r"has version 12, of code before the first release.*name another ledger"):
        Ledger(url)
    assert versions(url) == ("12", str(THIS))


def test_a_new_ledger_has_the_tables_that_are_declared(ledger: Ledger) -> None:
    """So Alembic finds nothing to migrate, and the index of open resources is as small as they are few."""
    with ledger._database.read() as connection:
        opts = {"version_table": ALEMBIC_TABLE, "compare_server_default": connection.dialect.name != "sqlite"}
        assert compare_metadata(MigrationContext.configure(connection, opts=opts), METADATA) == []
        indexes = {one["name"]: one for one in inspect(connection).get_indexes("skyward_resources")}
        condition = str(next(iter(indexes["skyward_resources_open"]["dialect_options"].values())))
        assert condition.strip("()") == "gone_microseconds IS NULL"


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
    assert versions(f"sqlite:///{old}") == (str(THIS), str(THIS))


def test_a_migration_writes_no_records_of_alembic_below_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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

    Ledger(f"sqlite:///{tmp_path}/ledger.db").close()
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, migration(THIS + 1, logs)))
    Ledger(f"sqlite:///{tmp_path}/ledger.db", may_migrate=True).close()
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
NEXT_RELEASE = """
from skyward_core.ledger import migrations
from tests.ledger.next_release import ADDED
migrations.MIGRATIONS = (*migrations.MIGRATIONS, ADDED)
"""


def test_alembic_is_not_imported_for_a_new_ledger_or_one_of_this_release(sqlite_url: str) -> None:
    for _ in range(2):
        done = run_script(ONLY_WHAT_IS_NEEDED, sqlite_url)
        assert (done.stdout.strip(), done.stderr) == ("False", "")


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
            Ledger(sys.argv[1], may_migrate=True).close()
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
    done = run_script(NEXT_RELEASE * is_old + EIGHT_OPEN, url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(url) == (str(THIS + is_old), str(THIS + is_old))


def test_threads_may_create_and_migrate_different_ledgers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration uses no state that all threads share."""
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(4)]
    for url in urls:
        Ledger(url).close()
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))
    barrier = threading.Barrier(4)

    def migrate_one(url: str) -> None:
        barrier.wait()
        Ledger(url, may_migrate=True).close()

    threads = [threading.Thread(target=migrate_one, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [versions(url) for url in urls] == [(str(THIS + 1), str(THIS + 1))] * 4
