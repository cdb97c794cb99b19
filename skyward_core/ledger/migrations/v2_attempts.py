"""Attempts to rent machines, and the cloud account that has the machines of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Integer, String, Text

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "2"
down_revision = "1"

_ID = BigInteger().with_variant(Integer, "sqlite")


def upgrade(op: Operations) -> None:
    """Add one column and one table."""
    op.add_column("skyward_pools", Column("provider_account", String(255), nullable=False, server_default=""))
    op.create_table(
        "skyward_attempts",
        Column("id", _ID, primary_key=True),
        Column("pool_id", String(255), ForeignKey("skyward_pools.id"), nullable=False, index=True),
        Column("at_microseconds", BigInteger, nullable=False, index=True),
        Column("provider", String(64), nullable=False),
        Column("region", String(64), nullable=False),
        Column("instance_type", String(255), nullable=False),
        Column("is_spot", Boolean, nullable=False),
        Column("milliseconds", BigInteger, nullable=False),
        Column("error", String(64), nullable=False),
        Column("code", String(255), nullable=False),
        Column("message", Text, nullable=False),
    )
