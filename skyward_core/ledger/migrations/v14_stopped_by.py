"""Pools say who has stopped them on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Column, String

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "14"
down_revision = "13"


def upgrade(op: Operations) -> None:
    """Add the column; "" for all pools so far."""
    op.add_column("skyward_pools", Column("stopped_by", String(255), nullable=False, server_default=""))
