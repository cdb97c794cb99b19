"""The leases of pools that outlive their owners, with sealed keys for other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, ForeignKey, String, Text

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "5"
down_revision = "4"


def upgrade(op: Operations) -> None:
    """Add one table."""
    op.create_table(
        "skyward_sealed_leases",
        Column("pool_id", String(255), ForeignKey("skyward_pools.id"), primary_key=True),
        Column("lease_json", Text, nullable=False),
        Column("sealed", Text, nullable=False),
        Column("updated_microseconds", BigInteger, nullable=False),
    )
