"""The tables of the first release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Integer, String, Text, text

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "1"
down_revision = None

_ID = BigInteger().with_variant(Integer, "sqlite")
_BUCKETS = ("launching", "bootstrapping", "running_calls", "idle", "lost", "terminating")


def upgrade(op: Operations) -> None:
    """Create the tables."""
    op.create_table(
        "skyward_meta", Column("name", String(64), primary_key=True), Column("value", String(64), nullable=False)
    )
    _create_pools(op)
    _create_resources(op)
    _create_accounts(op)


def _create_pools(op: Operations) -> None:
    op.create_table(
        "skyward_pools",
        Column("id", String(255), primary_key=True),
        Column("owner_user", String(255), nullable=False),
        Column("owner_host", String(255), nullable=False),
        Column("owner_process", String(255), nullable=False),
        Column("provider_json", Text, nullable=False),
        Column("spec_json", Text, nullable=False),
        Column("account", String(255)),
        Column("created_microseconds", BigInteger, nullable=False),
        Column("lease_expires_microseconds", BigInteger, nullable=False),
        Column("lives_by_lease", Boolean, nullable=False),
        Column("condemned_microseconds", BigInteger),
        Column("ended_microseconds", BigInteger),
    )


def _create_resources(op: Operations) -> None:
    op.create_table(
        "skyward_resources",
        Column("id", _ID, primary_key=True),
        _pool_id(),
        Column("kind", String(32), nullable=False),
        Column("provider", String(64), nullable=False),
        Column("region", String(64), nullable=False),
        Column("name", String(255), nullable=False),
        Column("token", String(255), nullable=False, unique=True),
        Column("tags_json", Text, nullable=False),
        Column("price_micro_usd_per_hour", BigInteger, nullable=False),
        Column("on_demand_micro_usd_per_hour", BigInteger, nullable=False),
        Column("is_spot", Boolean, nullable=False),
        Column("increment_seconds", BigInteger, nullable=False),
        Column("minimum_seconds", BigInteger, nullable=False),
        Column("intended_microseconds", BigInteger, nullable=False),
        Column("expires_microseconds", BigInteger, nullable=False),
        Column("cloud_id", String(255)),
        Column("bound_microseconds", BigInteger),
        Column("end_asked_microseconds", BigInteger),
        Column("gone_microseconds", BigInteger),
        Column("evidence", Text),
        *(Column(f"{bucket}_milliseconds", BigInteger, nullable=False, server_default="0") for bucket in _BUCKETS),
        Column("filled_bucket", String(32)),
        Column("filled_milliseconds", BigInteger, nullable=False, server_default="0"),
    )
    is_open = text("gone_microseconds IS NULL")
    op.create_index(
        "skyward_resources_open", "skyward_resources", ["id"], sqlite_where=is_open, postgresql_where=is_open
    )


def _create_accounts(op: Operations) -> None:
    op.create_table(
        "skyward_accounts",
        Column("name", String(255), primary_key=True),
        Column("limit_micro_usd", BigInteger, nullable=False),
        Column("period", String(16), nullable=False),
    )
    op.create_table(
        "skyward_reservations",
        Column("id", _ID, primary_key=True),
        Column("account", String(255), ForeignKey("skyward_accounts.name"), nullable=False, index=True),
        _pool_id(),
        Column("scope", String(300), nullable=False),
        Column("reserved_micro_usd", BigInteger, nullable=False),
        Column("made_microseconds", BigInteger, nullable=False),
        Column("settled_microseconds", BigInteger),
        Column("spent_micro_usd", BigInteger),
    )
    op.create_table(
        "skyward_balances",
        Column("account", String(255), ForeignKey("skyward_accounts.name"), primary_key=True),
        Column("scope", String(300), primary_key=True),
        Column("committed_micro_usd", BigInteger, nullable=False),
    )


def _pool_id() -> Column[Any]:
    return Column("pool_id", String(255), ForeignKey("skyward_pools.id"), nullable=False, index=True)
