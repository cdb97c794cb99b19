"""Clocks of leases: which boot of a computer wrote them, and how its time of day was set then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, String

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "11"
down_revision = "10"


def upgrade(op: Operations) -> None:
    """Add two columns to each table with leases. Rows without a boot are judged by the time of day, as before."""
    for table, prefix in (("skyward_pools", "lease"), ("skyward_clients", "lease"), ("skyward_names", "warm")):
        op.add_column(table, Column(f"{prefix}_boot", String(64), nullable=False, server_default=""))
        op.add_column(table, Column(f"{prefix}_ahead_microseconds", BigInteger, nullable=False, server_default="0"))
