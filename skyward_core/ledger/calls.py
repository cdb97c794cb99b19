"""The ledger's table of detached calls (a part of `Ledger`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from typing import Any

from sqlalchemy import Connection, insert, select, update

from skyward_core.errors import LedgerConflict
from skyward_core.ledger.database import Database
from skyward_core.ledger.rows import SECONDS_PER_HOUR, CallEntry, CallState, UnreadableRow
from skyward_core.ledger.tables import (
    CALLS,
    POOLS,
    RESOURCES,
    WORK_COLUMNS,
    call_of,
    read_rows,
    stamp,
    work_of,
    work_values,
)

_ORDER = {"waiting": 0, "running": 1}
"""Of two states of one attempt the later one is kept. All other states are later than these."""
_MOST_NAME_CHARACTERS = 255


class Calls:
    """The rows of detached calls."""

    _database: Database

    def note_calls(self, pool_id: str, calls: Sequence[CallState]) -> None:
        """Record the states of detached calls. Idempotent: a later attempt and a later state win, an end stays.

        Raises LedgerConflict if the pool is unknown.
        """
        with self._database.write() as connection:
            # one client at a time: of two that see a new call, one inserts it and the other one updates it
            pool = connection.execute(
                select(*(POOLS.c[name] for name in WORK_COLUMNS)).where(POOLS.c.id == pool_id).with_for_update()
            ).one_or_none()
            if pool is None:
                raise LedgerConflict(f"There is no pool {pool_id!r} in the ledger.")
            prices = _prices(connection, pool_id)
            for call in calls:
                work = call.work if call.work.labels() else work_of(pool._mapping)  # pyright: ignore
                owner = call.owner or str(work)[: CALLS.c.owner.type.length]  # pyright: ignore
                _write(connection, pool_id, call, _values(call, owner, prices) | work_values(work))

    def calls(
        self,
        *,
        pool_id: str | None = None,
        owner: str | None = None,
        since: datetime | None = None,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[CallEntry]:
        """Return detached calls, oldest first: of one pool, of owners that contain this text, started since a time."""
        statement = (
            select(CALLS, POOLS.c.ended_microseconds.label("pool_ended"))
            .join(POOLS, POOLS.c.id == CALLS.c.pool_id)
            .order_by(CALLS.c.started_microseconds, CALLS.c.pool_id, CALLS.c.call_id)
        )
        if pool_id is not None:
            statement = statement.where(CALLS.c.pool_id == pool_id)
        if owner is not None:
            statement = statement.where(CALLS.c.owner.contains(owner, autoescape=True))
        if since is not None:
            statement = statement.where(CALLS.c.started_microseconds >= stamp(since))
        with self._database.read() as connection:
            rows = connection.execute(statement).mappings().all()
        return read_rows(rows, call_of, unreadable)


def _prices(connection: Connection, pool_id: str) -> dict[str, int]:
    """Return the micro-dollars per hour of a pool's resources, by their ids at the provider."""
    r = RESOURCES.c
    rows = connection.execute(
        select(r.cloud_id, r.price_micro_usd_per_hour).where(r.pool_id == pool_id, r.cloud_id.is_not(None))
    )
    return {str(cloud_id): int(price) for cloud_id, price in rows}


def _values(call: CallState, owner: str, prices: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": call.name[:_MOST_NAME_CHARACTERS],
        "owner": owner,
        "generation": call.generation,
        "state": call.state,
        "started_microseconds": stamp(call.started_at),
        "ended_microseconds": None if call.ended_at is None else stamp(call.ended_at),
        "milliseconds": round(sum(use.seconds for use in call.used) * 1000),
        "micro_usd": _cost(call, prices),
    }


def _cost(call: CallState, prices: Mapping[str, int]) -> int:
    """Return micro-dollars, rounded up once. An instance that the ledger does not know counts as nothing."""
    cost = sum(
        (
            Decimal(prices.get(use.instance_id, 0)) * Decimal(repr(use.seconds)) / (SECONDS_PER_HOUR * use.slots)
            for use in call.used
        ),
        Decimal(0),
    )
    return int(cost.to_integral_value(ROUND_CEILING))


def _write(connection: Connection, pool_id: str, call: CallState, values: dict[str, Any]) -> None:
    c = CALLS.c
    is_it = (c.pool_id == pool_id) & (c.call_id == call.call_id)
    known = connection.execute(select(c.generation, c.state, c.ended_microseconds).where(is_it)).one_or_none()
    if known is None:
        connection.execute(insert(CALLS).values(pool_id=pool_id, call_id=call.call_id, **values))
    elif known.ended_microseconds is None and (known.generation, _order(known.state)) <= (
        call.generation,
        _order(call.state),
    ):
        kept = {"owner", "started_microseconds", *WORK_COLUMNS}  # of the first one that wrote
        connection.execute(
            update(CALLS).where(is_it).values({name: value for name, value in values.items() if name not in kept})
        )


def _order(state: str) -> int:
    return _ORDER.get(state, len(_ORDER))
