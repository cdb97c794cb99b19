"""The uses of pools: a row for each step that makes calls on a pool, from before its first call on.

    begun ──its process notes what it has had, every few seconds──▶ ended by it
      └──its process is dead──▶ settled: by the next try of its work, a process that keeps the pool, or the pool's end

The bill of a use is the price of the slots that its calls have held, for as long as they held them. Its process notes
that, and what the slots that are held at that moment cost per hour. The process that settles the use of a dead one adds
the time until its calls have ended. Figures only grow; an end stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import BigInteger, Connection, bindparam, case, literal, select, update

from skyward_core.ledger.database import Database
from skyward_core.ledger.rows import SECONDS_PER_HOUR
from skyward_core.ledger.tables import (
    USES,
    Values,
    in_usd,
    insert_new,
    moment,
    moment_or_none,
    stamp,
    work_of,
    work_values,
)
from skyward_core.work import Work


@dataclass(frozen=True, slots=True)
class NewUse:
    """A use that begins. `client_id` is the process in a pool with a name, else ""."""

    id: str
    pool_id: str
    work: Work
    client_id: str = ""


@dataclass(frozen=True, slots=True)
class UseCount:
    """What a use has had until `age_seconds` ago: seconds of slots and their cost in USD. `held_slots` are held since
    then, for `usd_per_hour`.
    """

    slot_seconds: float = 0.0
    cost_usd: float = 0.0
    held_slots: int = 0
    usd_per_hour: float = 0.0
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class UseEntry:
    """A use of a pool, as it was noted last. `client_id` is the process in a pool with a name, else "".

    With `ended_at` the figures are final, unless its process lives and was taken for dead.
    """

    id: str
    pool_id: str
    client_id: str
    work: Work
    began_at: datetime
    ended_at: datetime | None
    slot_seconds: float
    cost_usd: Decimal


class Uses:
    """The rows of uses. Each method is one transaction, and raises LedgerError."""

    def __init__(self, database: Database) -> None:
        """Use this database."""
        self._database = database

    def write(
        self,
        begun: Sequence[NewUse] = (),
        counts: Mapping[str, UseCount] | None = None,
        ended: Mapping[str, UseCount] | None = None,
    ) -> None:
        """Record uses that begin, what others have had so far, and what those that end have had in all, by id."""
        with self._database.write() as connection:
            now = stamp(self._database.now(connection))
            begin_uses(connection, begun, now)
            note_uses(connection, counts or {}, now, is_final=False)
            note_uses(connection, ended or {}, now, is_final=True)

    def settle(self, use_ids: Collection[str]) -> None:
        """End uses whose processes are dead, and whose calls have ended now. Those that have ended stay as they are."""
        with self._database.write() as connection:
            settle_uses(connection, USES.c.id.in_(sorted(use_ids)), stamp(self._database.now(connection)))

    def of_pool(self, pool_id: str) -> list[UseEntry]:
        """Return the uses of a pool, in the order in which they began."""
        wanted = select(USES).where(USES.c.pool_id == pool_id).order_by(USES.c.began_microseconds, USES.c.id)
        with self._database.read() as connection:
            return [use_of(row) for row in connection.execute(wanted).mappings()]

    def use(self, use_id: str) -> UseEntry | None:
        """Return a use; None if it is unknown."""
        with self._database.read() as connection:
            row = connection.execute(select(USES).where(USES.c.id == use_id)).mappings().first()
        return None if row is None else use_of(row)


def use_of(row: Values) -> UseEntry:
    """Return the use of a row."""
    return UseEntry(
        row["id"],
        row["pool_id"],
        row["client_id"],
        work_of(row),
        moment(row["began_microseconds"]),
        moment_or_none(row["ended_microseconds"]),
        row["slot_milliseconds"] / 1000,
        in_usd(row["micro_usd"]),
    )


# ── in a transaction of the caller; times are microseconds since 1970 ────────────────────────────────────────────────


def begin_uses(connection: Connection, begun: Sequence[NewUse], now: int) -> None:
    """Record uses, before their first calls. Recorded again, after an answer was lost, they stay as they are."""
    values = {"began_microseconds": now, "noted_microseconds": now}
    rows = [
        {"id": new.id, "pool_id": new.pool_id, "client_id": new.client_id, **values, **work_values(new.work)}
        for new in begun
    ]
    if rows:
        connection.execute(insert_new(connection, USES), rows)


def note_uses(connection: Connection, counts: Mapping[str, UseCount], now: int, *, is_final: bool) -> None:
    """Record what uses have had so far, by id."""
    if not counts:
        return
    known_ms, known_usd = USES.c.slot_milliseconds, USES.c.micro_usd
    milliseconds, cost = bindparam("new_milliseconds", type_=BigInteger), bindparam("new_micro_usd", type_=BigInteger)
    values: dict[str, Any] = {
        "slot_milliseconds": case((known_ms < milliseconds, milliseconds), else_=known_ms),
        "micro_usd": case((known_usd < cost, cost), else_=known_usd),
        "noted_microseconds": bindparam("noted_at", type_=BigInteger),
        "held_slots": bindparam("holds", type_=BigInteger),
        "held_micro_usd_per_hour": bindparam("holds_micro_usd_per_hour", type_=BigInteger),
    }
    if is_final:
        values["ended_microseconds"] = case((USES.c.ended_microseconds.is_(None), now), else_=USES.c.ended_microseconds)
    rows = [
        {
            "use_id": use_id,
            "new_milliseconds": round(count.slot_seconds * 1000),
            "new_micro_usd": _micro(count.cost_usd),
            "noted_at": now - round(count.age_seconds * 1_000_000),
            "holds": 0 if is_final else count.held_slots,
            "holds_micro_usd_per_hour": 0 if is_final else _micro(count.usd_per_hour),
        }
        for use_id, count in counts.items()
    ]
    # one statement for all: a flow run has thousands of uses, and to build a statement takes longer than its row
    connection.execute(update(USES).where(USES.c.id == bindparam("use_id")).values(values), rows)


def settle_uses(connection: Connection, which: Any, until: int) -> None:
    """End the uses for which a condition holds, with the time until then for the slots that they held."""
    since = case(
        (USES.c.noted_microseconds < until, literal(until, BigInteger) - USES.c.noted_microseconds),
        else_=literal(0, BigInteger),
    )
    # the product of a day in microseconds and 1,000 USD an hour in micro-dollars would exceed 64 bits
    milliseconds = since // 1000
    values = {
        "slot_milliseconds": USES.c.slot_milliseconds + milliseconds * USES.c.held_slots,
        "micro_usd": USES.c.micro_usd + milliseconds * USES.c.held_micro_usd_per_hour // (SECONDS_PER_HOUR * 1000),
        "ended_microseconds": until,
        "held_slots": 0,
        "held_micro_usd_per_hour": 0,
    }
    connection.execute(update(USES).where(which, USES.c.ended_microseconds.is_(None)).values(values))


def _micro(usd: float) -> int:
    """Return the nearest micro-dollars, as all who show a use's cost round it."""
    return round(usd * 1_000_000)
