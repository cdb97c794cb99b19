"""The migrations of the ledger: one module here for each version of the schema after the first.

The first is 13: no release wrote a ledger of the twelve before it (decision 0051). It has no module, because
new ledgers get the tables of `tables.py` at once. Version N is `vN_title.py` with `revision = "N"`, the
`down_revision` before it and `upgrade(op)`, and the row `vN_title` of `MIGRATIONS`. A released module does not change
any more. It names tables and columns by text, because `tables.py` has the newest schema only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from skyward_core.ledger.migrations import v14_stopped_by

FIRST_VERSION = 13
MIGRATIONS: Sequence[ModuleType] = (v14_stopped_by,)
"""All migrations in their order. The revision of each is the version to which it leads."""

revision = str(FIRST_VERSION)
"""This module stands for the first revision in Alembic's history."""
down_revision = None
