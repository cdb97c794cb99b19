"""Who bears what of a pool's cost: pools that belong to nobody, and the works of detached calls.

Earlier releases split the cost of the time in which calls ran among the processes of a pool with a name, by the time of
their slots, when a bill was read. The rows of these processes become uses with their parts as they are now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Column, String

if TYPE_CHECKING:
    from alembic.operations import Operations

revision = "13"
down_revision = "12"

_WORK = [f"work_{name}" for name in ("system", "workflow", "run", "task", "task_run", "attempt", "asset", "partition")]

_USES_OF_OLD_CLIENTS = f"""
INSERT INTO skyward_uses (id, pool_id, client_id, began_microseconds, ended_microseconds, slot_milliseconds, micro_usd,
    noted_microseconds, {", ".join(_WORK)})
SELECT c.id, c.pool_id, c.id, c.joined_microseconds, coalesce(c.left_microseconds, c.lease_expires_microseconds),
    c.slot_milliseconds, CAST(busy.micro_usd * 1.0 * c.slot_milliseconds / total.milliseconds AS BIGINT),
    c.joined_microseconds, {", ".join(f"c.{name}" for name in _WORK)}
FROM skyward_clients c
JOIN (SELECT pool_id, sum(price_micro_usd_per_hour * (running_calls_milliseconds / 1000) / 3600) AS micro_usd
    FROM skyward_resources GROUP BY pool_id) busy ON busy.pool_id = c.pool_id
JOIN (SELECT pool_id, sum(slot_milliseconds) AS milliseconds FROM skyward_clients GROUP BY pool_id) total
    ON total.pool_id = c.pool_id
WHERE c.slot_milliseconds > 0 AND c.id NOT IN (SELECT client_id FROM skyward_uses)
"""  # noqa: S608 - names of columns only


def upgrade(op: Operations) -> None:
    """Add the columns, and make uses of the processes that have none."""
    op.add_column("skyward_pools", Column("name", String(128), nullable=False, server_default=""))
    op.add_column("skyward_shares", Column("owner", String(511), nullable=False, server_default=""))
    for name in _WORK:
        op.add_column("skyward_calls", Column(name, String(500), nullable=False, server_default=""))
    op.create_index("skyward_calls_by_run", "skyward_calls", ["work_run"])
    op.execute(_USES_OF_OLD_CLIENTS)
