"""Warm time begins when the last process leaves a pool with a name. It ends when another one joins, or when the pool
ends.

`skyward_pools.warm_since_microseconds` is set while a pool is warm. No process counts its time then. The transaction in
which another process joins adds the time to the machines' bucket WARM, and so does the one that records their end. A
kill at any line leaves the pool as it was: warm, with the time since then still to be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, select, update

from skyward_core.ledger.rows import Bucket
from skyward_core.ledger.tables import IS_OPEN, POOLS, RESOURCES, Values, milliseconds_of

_WARM = milliseconds_of(Bucket.WARM)


def begin(connection: Connection, pool_id: str, now: int) -> None:
    """Record that no process uses a pool from now on, in microseconds since 1970."""
    connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(warm_since_microseconds=now))


def end(connection: Connection, pool_id: str, now: int) -> None:
    """Record that a process uses a pool again: its machines have the time until now in their bucket WARM."""
    since = warm_since(connection, [pool_id]).get(pool_id)
    if since is None:
        return
    wanted = select(RESOURCES).where(
        RESOURCES.c.pool_id == pool_id, RESOURCES.c.bound_microseconds.is_not(None), IS_OPEN
    )
    for row in connection.execute(wanted.order_by(RESOURCES.c.id).with_for_update()).mappings().all():
        warm = row[_WARM] + warm_milliseconds(row, since, now)
        connection.execute(update(RESOURCES).where(RESOURCES.c.id == row["id"]).values({_WARM: warm}))
    connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(warm_since_microseconds=None))


def warm_since(connection: Connection, pool_ids: Iterable[str]) -> dict[str, int]:
    """Return since when pools are warm, in microseconds since 1970; those that are not are absent."""
    wanted = select(POOLS.c.id, POOLS.c.warm_since_microseconds).where(
        POOLS.c.id.in_(sorted(set(pool_ids))), POOLS.c.warm_since_microseconds.is_not(None)
    )
    return {row.id: row.warm_since_microseconds for row in connection.execute(wanted)}


def warm_milliseconds(row: Values, since: int, until: int) -> int:
    """Return how many milliseconds of a machine were warm and are in no bucket yet.

    Args:
        row: its row of RESOURCES.
        since: when its pool became warm, in microseconds since 1970.
        until: the end of the warm time, or of the machine.
    """
    ending = row[milliseconds_of(Bucket.TERMINATING)]  # its end was requested while the pool was warm
    return max(0, min(unnoted_milliseconds(row, until), (until - since) // 1000 - ending))


def unnoted_milliseconds(row: Values, until: int) -> int:
    """Return how many milliseconds of a machine before `until` are in no bucket."""
    return max(
        0, (until - row["intended_microseconds"]) // 1000 - sum(row[milliseconds_of(bucket)] for bucket in Bucket)
    )


def with_warm(known: Mapping[Bucket, int], totals: Mapping[Bucket, int]) -> dict[Bucket, int]:
    """Return new totals of a machine with its warm time, which is not idle.

    A process that counts its time counts its whole life, and takes warm time for idle time.
    """
    warm = known[Bucket.WARM]
    if not warm or totals.get(Bucket.WARM) or Bucket.IDLE not in totals:
        return {**known, **totals}
    return {**known, **totals, Bucket.WARM: warm, Bucket.IDLE: max(0, totals[Bucket.IDLE] - warm)}


def closing_values(row: Values, since: int | None, until: int) -> dict[str, Any]:
    """Return the changed columns of a machine that ends, for the part of its life for which its pool was warm."""
    warm = 0 if since is None else warm_milliseconds(row, since, until)
    return {_WARM: row[_WARM] + warm} if warm else {}
