"""Warm time: the seconds of resources for which no process used their pool, and since when that is so now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "8"
down_revision = "7"


def upgrade(op: Operations) -> None:
    """Add two columns."""
    op.add_column("skyward_resources", Column("warm_milliseconds", BigInteger, nullable=False, server_default="0"))
    op.add_column("skyward_pools", Column("warm_since_microseconds", BigInteger))
