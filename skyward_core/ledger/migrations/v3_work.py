"""The work that pools, and shares of their costs, are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, ForeignKey, Integer, String

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "3"
down_revision = "2"

_ID = BigInteger().with_variant(Integer, "sqlite")
_WORK = ("system", "workflow", "run", "task", "task_run", "attempt", "asset", "partition")


def upgrade(op: Operations) -> None:
    """Add the columns to pools, and the table of shares."""
    for column in _work_columns():
        op.add_column("skyward_pools", column)
    op.create_index("skyward_pools_by_run", "skyward_pools", ["work_run"])
    op.create_table(
        "skyward_shares",
        Column("id", _ID, primary_key=True),
        Column("pool_id", String(255), ForeignKey("skyward_pools.id"), nullable=False, index=True),
        *_work_columns(),
        Column("micro_usd", BigInteger, nullable=False),
    )


def _work_columns() -> list[Column[str]]:
    return [Column(f"work_{name}", String(500), nullable=False, server_default="") for name in _WORK]
