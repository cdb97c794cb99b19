"""Pools with a name, and the processes that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, String, Text

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "7"
down_revision = "6"

_WORK = ("system", "workflow", "run", "task", "task_run", "attempt", "asset", "partition")


def upgrade(op: Operations) -> None:
    """Create two tables."""
    op.create_table(
        "skyward_names",
        Column("name", String(128), primary_key=True),
        Column("pool_id", String(255), nullable=False, server_default=""),
        Column("terms_json", Text, nullable=False, server_default="{}"),
        Column("state", String(16), nullable=False, server_default=""),
        Column("steward", String(64), nullable=False, server_default=""),
        Column("epoch", BigInteger, nullable=False, server_default="0"),
        Column("keep_warm_milliseconds", BigInteger, nullable=False, server_default="0"),
        Column("warm_until_microseconds", BigInteger),
    )
    op.create_table(
        "skyward_clients",
        Column("id", String(64), primary_key=True),
        Column("pool_id", String(255), nullable=False, index=True),
        Column("owner_user", String(255), nullable=False),
        Column("owner_host", String(255), nullable=False),
        Column("owner_process", String(255), nullable=False),
        Column("joined_microseconds", BigInteger, nullable=False),
        Column("lease_expires_microseconds", BigInteger, nullable=False),
        Column("left_microseconds", BigInteger),
        Column("slot_milliseconds", BigInteger, nullable=False, server_default="0"),
        *(Column(f"work_{name}", String(500), nullable=False, server_default="") for name in _WORK),
    )
