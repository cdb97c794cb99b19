"""Limits of runs: the account that all pools of one run share, and which pools draw on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Boolean, Column, String, false

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "9"
down_revision = "8"


def upgrade(op: Operations) -> None:
    """Add two columns."""
    op.add_column("skyward_accounts", Column("is_of_run", Boolean, nullable=False, server_default=false()))
    op.add_column("skyward_pools", Column("run_account", String(255)))
