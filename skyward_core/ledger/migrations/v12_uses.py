"""Uses of pools: what each step has cost, noted by its process while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, String

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "12"
down_revision = "11"

_WORK = ("system", "workflow", "run", "task", "task_run", "attempt", "asset", "partition")


def upgrade(op: Operations) -> None:
    """Create a table, and add the column by which the calls of a dead client are found."""
    op.create_table(
        "skyward_uses",
        Column("id", String(64), primary_key=True),
        Column("pool_id", String(255), nullable=False, index=True),
        Column("client_id", String(64), nullable=False, server_default=""),
        Column("began_microseconds", BigInteger, nullable=False),
        Column("ended_microseconds", BigInteger),
        Column("slot_milliseconds", BigInteger, nullable=False, server_default="0"),
        Column("micro_usd", BigInteger, nullable=False, server_default="0"),
        Column("noted_microseconds", BigInteger, nullable=False),
        Column("held_slots", BigInteger, nullable=False, server_default="0"),
        Column("held_micro_usd_per_hour", BigInteger, nullable=False, server_default="0"),
        *(Column(f"work_{name}", String(500), nullable=False, server_default="") for name in _WORK),
    )
    op.create_index("skyward_uses_by_run", "skyward_uses", ["work_run"])
    op.add_column("skyward_clients", Column("topic", String(64), nullable=False, server_default=""))
