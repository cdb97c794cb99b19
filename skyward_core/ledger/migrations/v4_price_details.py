"""The minimum price of a resource, and what is billed in addition to the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, Text

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "4"
down_revision = "3"


def upgrade(op: Operations) -> None:
    """Add two columns."""
    op.add_column("skyward_resources", Column("minimum_micro_usd", BigInteger, nullable=False, server_default="0"))
    op.add_column("skyward_resources", Column("extras_json", Text, nullable=False, server_default="[]"))
