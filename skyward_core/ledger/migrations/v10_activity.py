"""Activity of clients: how many of their calls run or wait, and when they had one last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "10"
down_revision = "9"


def upgrade(op: Operations) -> None:
    """Add two columns."""
    op.add_column("skyward_clients", Column("calls", BigInteger, nullable=False, server_default="0"))
    op.add_column("skyward_clients", Column("busy_microseconds", BigInteger))
