"""Migrations: old ledgers get the newest schema, atomically; newer ledgers are refused."""

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.schema import ALEMBIC_TABLE
from skyward_core.ledger.tables import METADATA
from tests.system.ledger.test_ledger import TRAIN, bill, pay, run_script  # noqa: F401 - fixtures
from tests.system.ledger.test_schema import EIGHT_OPEN, NEWEST, VERSION_1, make_old, schema, versions
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


def test_the_migrations_lead_to_the_tables(ledger: Ledger) -> None:
    with ledger._database.read() as connection:
        # Alembic compares the quotes of SQLite's defaults, which differ without a meaning
        opts = {"version_table": ALEMBIC_TABLE, "compare_server_default": connection.dialect.name != "sqlite"}
        context = MigrationContext.configure(connection, opts=opts)
        assert compare_metadata(context, METADATA) == []


ONLY_WHAT_IS_NEEDED = """
import sys
import skyward_core
assert "sqlalchemy" not in sys.modules
from skyward_core.ledger.ledger import Ledger
Ledger(sys.argv[1]).close()
print("alembic" in sys.modules)
"""


def test_alembic_is_imported_only_for_a_migration(sqlite_url: str) -> None:
    for expected in ("True", "False"):
        done = run_script(ONLY_WHAT_IS_NEEDED, sqlite_url)
        assert done.stdout.split() == [expected], done.stderr


KILLED_AT = """
import os, shutil, signal, sys
import alembic.runtime.environment  # once, before the forks
from sqlalchemy import Engine, event
from skyward_core.ledger.ledger import Ledger

folder, left = sys.argv[1], 0

def step(*_, **__):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
    event.listen(Engine, name, step)

point = 0
while True:
    point += 1
    shutil.copy(f"{folder}/old.db", f"{folder}/{point}.db")
    if not (pid := os.fork()):
        left = point
        Ledger(f"sqlite:///{folder}/{point}.db").close()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
print(point)
"""


def test_a_migration_that_is_killed_at_any_statement_leaves_the_old_ledger(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path}/old.db") as ledger:
        open_pool(ledger, "p")
        intent = intend(ledger)
        make_old(ledger, VERSION_1)
        ledger.vacuum()  # the file has all of it now, the write-ahead log nothing
    old = schema(tmp_path / "old.db")
    done = run_script(KILLED_AT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 40
    for point in range(1, points):
        path = tmp_path / f"{point}.db"
        assert schema(path) == old
        with Ledger(f"sqlite:///{path}") as ledger:
            assert ledger.intents() == [intent]
        assert versions(f"sqlite:///{path}") == (str(NEWEST), str(NEWEST))


def test_eight_processes_may_create_the_ledger_at_once(url: str) -> None:
    done = run_script(EIGHT_OPEN, url)
    assert done.returncode == 0, done.stdout + done.stderr
