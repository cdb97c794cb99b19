"""Detached calls: whom they are for, how they ended, and what they have cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, ForeignKey, String

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "6"
down_revision = "5"


def upgrade(op: Operations) -> None:
    """Add one table."""
    op.create_table(
        "skyward_calls",
        Column("pool_id", String(255), ForeignKey("skyward_pools.id"), primary_key=True),
        Column("call_id", String(128), primary_key=True),
        Column("name", String(255), nullable=False),
        Column("owner", String(500), nullable=False),
        Column("generation", BigInteger, nullable=False),
        Column("state", String(32), nullable=False),
        Column("started_microseconds", BigInteger, nullable=False, index=True),
        Column("ended_microseconds", BigInteger),
        Column("milliseconds", BigInteger, nullable=False),
        Column("micro_usd", BigInteger, nullable=False),
    )
