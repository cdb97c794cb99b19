"""The migration of a release that follows this one: it adds a column to the pools, and a table.

`migrations.MIGRATIONS = (*migrations.MIGRATIONS, ADDED)` makes this process that release.
"""

from collections.abc import Callable
from types import ModuleType

from alembic.operations import Operations
from sqlalchemy import Column, Text

from skyward_core.ledger.database import newest_version

THIS = newest_version()


def migration(number: int, upgrade: Callable[[Operations], None]) -> ModuleType:
    module = ModuleType(f"v{number}", upgrade.__doc__)
    module.__file__ = f"v{number}.py"
    module.revision, module.down_revision, module.upgrade = str(number), str(number - 1), upgrade
    return module


def add(op: Operations) -> None:
    op.add_column("skyward_pools", Column("note", Text))
    op.create_table("skyward_notes", Column("note", Text, primary_key=True))
    op.execute("UPDATE skyward_pools SET note = id")


ADDED = migration(THIS + 1, add)
