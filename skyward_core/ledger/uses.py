"""The uses of pools: a row for each step that makes calls on a pool, from before its first call on.

    begun ──its process notes what it has had, every few seconds──▶ ended by it
      └──its process is dead──▶ settled: by the next try of its work, a process that keeps the pool, or the pool's end

The bill of a use is the price of the slots that its calls have held, for as long as they held them. Its process notes
that, and what the slots that are held at that moment cost per hour. Figures of an open use only grow. An end stays, and
so do the figures: what is written after it may only lower an estimate.

A use that others settle keeps what was held at its last note. The time from there to its end is an estimate, which is
in no figure of the row: bills compute it when they are read (`ESTIMATED_MICRO_USD`), and give it at most what the
measured figures leave of the bill (`bills.split_bill`). So no order of writes changes a sum.

The time of a pool's machines is at least what its calls have held: `cover_held` adds what is missing, in the
transaction that notes these.

Warm time begins when the last process leaves a pool with a name. It ends when another one joins, or when the pool ends.
`skyward_pools.warm_since_microseconds` is set while a pool is warm. No process counts its time then. The transaction in
which another process joins adds the time to the machines' bucket WARM, and so does the one that records their end. A
kill at any line leaves the pool as it was: warm, with the time since then still to be counted.

Detached calls belong to no use: each has a row of its own, with what it has cost (`Calls`, a part of `Ledger`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from functools import partial
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    bindparam,
    case,
    func,
    insert,
    literal,
    select,
    update,
)

from skyward_core.errors import ZERO_USD, LedgerConflict
from skyward_core.ledger.database import NUMBERS_PER_STATEMENT, Database
from skyward_core.ledger.rows import SECONDS_PER_HOUR, Bucket, CallEntry, CallState, UnreadableRow
from skyward_core.ledger.tables import (
    CALLS,
    COST,
    IS_OPEN,
    POOLS,
    RESOURCES,
    USES,
    WORK_COLUMNS,
    Values,
    call_of,
    in_usd,
    insert_new,
    is_billable,
    milliseconds_of,
    moment,
    moment_or_none,
    read_rows,
    reader,
    stamp,
    whole_number,
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

    With `ended_at` the figures grow no more. They include an estimate, `estimated_usd` and `estimated_seconds`, if
    others have settled it: for the slots that it held at its last note, until its end. Bills bound it.
    """

    id: str
    pool_id: str
    client_id: str
    work: Work
    began_at: datetime
    ended_at: datetime | None
    slot_seconds: float
    cost_usd: Decimal
    estimated_seconds: float = 0.0
    estimated_usd: Decimal = ZERO_USD


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
            noted = sorted({*(counts or {}), *(ended or {})})
            for start in range(0, len(noted), NUMBERS_PER_STATEMENT):
                lock_uses(connection, USES.c.id.in_(noted[start : start + NUMBERS_PER_STATEMENT]))
            note_uses(connection, counts or {}, now, is_final=False)
            note_uses(connection, ended or {}, now, is_final=True)
            cover_held_by(connection, [*(counts or {}), *(ended or {})], now)

    def settle(self, use_ids: Collection[str]) -> None:
        """End uses whose processes are dead, and whose calls have ended now. Those that have ended stay as they are."""
        with self._database.write() as connection:
            settle_uses(connection, USES.c.id.in_(sorted(use_ids)), stamp(self._database.now(connection)))

    def of_pool(self, pool_id: str, unreadable: list[UnreadableRow] | None = None) -> list[UseEntry]:
        """Return the uses of a pool, in the order in which they began."""
        wanted = select_uses().where(USES.c.pool_id == pool_id).order_by(USES.c.began_microseconds, USES.c.id)
        with self._database.read() as connection:
            return read_rows(connection.execute(wanted).mappings(), use_of, unreadable)

    def use(self, use_id: str) -> UseEntry | None:
        """Return a use; None if it is unknown."""
        with self._database.read() as connection:
            row = connection.execute(select_uses().where(USES.c.id == use_id)).mappings().first()
        return None if row is None else use_of(row)


@reader(USES)
def use_of(row: Values) -> UseEntry:
    """Return the use of a row of `select_uses`. Raises UnreadableRow."""
    return UseEntry(
        row["id"],
        row["pool_id"],
        row["client_id"],
        work_of(row),
        moment(row["began_microseconds"]),
        moment_or_none(row["ended_microseconds"]),
        (row["slot_milliseconds"] + row["estimated_milliseconds"]) / 1000,
        in_usd(row["micro_usd"] + row["estimated_micro_usd"]),
        row["estimated_milliseconds"] / 1000,
        in_usd(row["estimated_micro_usd"]),
    )


_AFTER_NOTE = case(
    (USES.c.noted_microseconds < USES.c.ended_microseconds, USES.c.ended_microseconds - USES.c.noted_microseconds),
    else_=literal(0, BigInteger),
)
"""Microseconds from the last note of a use to its end; 0 for an open one."""
_BEGUN = (_AFTER_NOTE + 999) // 1000  # rounded up, as the cost below: what is measured later is not more
_ESTIMATED_MILLISECONDS = _BEGUN * USES.c.held_slots
_HOUR = SECONDS_PER_HOUR * 1000
"""In milliseconds."""
# the product of a day in microseconds and 1,000 USD an hour in micro-dollars would exceed 64 bits
ESTIMATED_MICRO_USD = (_BEGUN * USES.c.held_micro_usd_per_hour + _HOUR - 1) // _HOUR
"""What nobody has measured of a settled use: the price of the slots that it held at its last note, until its end."""


def select_uses() -> Select[Any]:
    """Return the statement for the rows of uses, with their estimates."""
    return select(
        USES, _ESTIMATED_MILLISECONDS.label("estimated_milliseconds"), ESTIMATED_MICRO_USD.label("estimated_micro_usd")
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
    """Record what uses have had so far, by id. Of a use that has ended, what is measured replaces what was estimated;
    it is never more than both were. Whoever calls this has locked them (`lock_uses`).
    """
    if not counts:
        return
    u = USES.c
    milliseconds, cost = bindparam("new_milliseconds", type_=BigInteger), bindparam("new_micro_usd", type_=BigInteger)
    values: dict[str, Any] = {
        "slot_milliseconds": _measured(u.slot_milliseconds, milliseconds, _ESTIMATED_MILLISECONDS),
        "micro_usd": _measured(u.micro_usd, cost, ESTIMATED_MICRO_USD),
        "noted_microseconds": bindparam("noted_at", type_=BigInteger),
        "held_slots": case((_IS_OPEN_USE, bindparam("holds", type_=BigInteger)), else_=0),
        "held_micro_usd_per_hour": case(
            (_IS_OPEN_USE, bindparam("holds_micro_usd_per_hour", type_=BigInteger)), else_=0
        ),
    }
    if is_final:
        values["ended_microseconds"] = case((_IS_OPEN_USE, now), else_=u.ended_microseconds)
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


_IS_OPEN_USE = USES.c.ended_microseconds.is_(None)


def _measured(known: ColumnElement[int], new: ColumnElement[int], estimated: ColumnElement[int]) -> ColumnElement[int]:
    """Return the larger of two figures of a use; after its end not more than it had then."""
    return case((new <= known, known), (_IS_OPEN_USE, new), (new < known + estimated, new), else_=known + estimated)


def settle_uses(connection: Connection, which: ColumnElement[bool], until: int) -> None:
    """End the open uses for which a condition holds. What they held at their last note they have held until then, as an
    estimate.
    """
    lock_uses(connection, which & _IS_OPEN_USE)
    connection.execute(update(USES).where(which, _IS_OPEN_USE).values(ended_microseconds=until))


def lock_uses(connection: Connection, which: ColumnElement[bool]) -> None:
    """Lock rows of uses in the order of their ids: two processes that lock them in other orders wait for each other."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(USES.c.id).where(which).order_by(USES.c.id).with_for_update()).all()


def _micro(usd: float) -> int:
    """Return the nearest micro-dollars."""
    return round(usd * 1_000_000)


# ── the time of machines is at least that of their calls ─────────────────────────────────────────────────────────────


def cover_held_by(connection: Connection, use_ids: Collection[str], now: int) -> None:
    """As `cover_held`, for the pools of these uses."""
    pools = set[str]()
    ids = sorted(set(use_ids))
    for start in range(0, len(ids), NUMBERS_PER_STATEMENT):
        some = USES.c.id.in_(ids[start : start + NUMBERS_PER_STATEMENT])
        pools |= set(connection.execute(select(USES.c.pool_id).where(some).distinct()).scalars())
    for pool_id in sorted(pools):
        cover_held(connection, pool_id, now)


def cover_held(connection: Connection, pool_id: str, now: int) -> None:
    """Count the time of a pool's machines as far as its calls have held their slots, by what was measured: the process
    that keeps the pool notes the whole of it some seconds later, or never if it was killed.

    No machine gets more time than has passed since its request.
    """
    if _missing_micro_usd(connection, pool_id) <= 0:
        return
    r = RESOURCES.c
    machines = select(RESOURCES).where(
        r.pool_id == pool_id, r.bound_microseconds.is_not(None), IS_OPEN, is_billable(connection)
    )
    rows = connection.execute(machines.order_by(r.id).with_for_update()).mappings().all()
    # another process may have added the same time while this one waited for the lock
    missing = _missing_micro_usd(connection, pool_id)
    for row in rows:
        price = row["price_micro_usd_per_hour"]
        if missing > 0 and price:
            billed = _billed_milliseconds(row)
            spent = sum(row[milliseconds_of(bucket)] for bucket in Bucket)
            until = min(spent + unnoted_milliseconds(row, now), billed - (-missing * _HOUR // price))
            added = max(0, until - spent)
            calls = {_RUNNING_CALLS: row[_RUNNING_CALLS] + added}
            connection.execute(update(RESOURCES).where(r.id == row["id"]).values(calls))
            missing -= max(0, until - billed) * price // _HOUR


def _billed_milliseconds(row: Values) -> int:
    """Return for how long a machine is billed: begun increments count as whole ones."""
    increment = row["increment_seconds"] * 1000
    spent = sum(row[milliseconds_of(bucket)] for bucket in Bucket)
    return max(-(-spent // increment) * increment, row["minimum_seconds"] * 1000 if spent else 0)


_RUNNING_CALLS = milliseconds_of(Bucket.RUNNING_CALLS)


def _missing_micro_usd(connection: Connection, pool_id: str) -> int:
    """Return by how much the measured price of the slots that calls of a pool have held exceeds its bill."""
    r = RESOURCES.c
    billed = select(func.sum(COST)).where(r.pool_id == pool_id, is_billable(connection))
    held = (select(func.sum(table.c.micro_usd)).where(table.c.pool_id == pool_id) for table in (USES, CALLS))
    return sum(map(partial(_sum_of, connection), held)) - _sum_of(connection, billed)


def _sum_of(connection: Connection, statement: Select[Any]) -> int:
    return whole_number(connection.execute(statement).scalar())


# ── warm time ─────────────────────────────────────────────────────────────────────────────────────────────────────────


_WARM = milliseconds_of(Bucket.WARM)


def begin_warm_time(connection: Connection, pool_id: str, now: int) -> None:
    """Record that no process uses a pool from now on, in microseconds since 1970."""
    connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(warm_since_microseconds=now))


def end_warm_time(connection: Connection, pool_id: str, now: int) -> None:
    """Record that a process uses a pool again: its machines have the time until now in their bucket WARM."""
    since = warm_since(connection, [pool_id]).get(pool_id)
    if since is None:
        return
    machines = select(RESOURCES).where(
        RESOURCES.c.pool_id == pool_id, RESOURCES.c.bound_microseconds.is_not(None), IS_OPEN, is_billable(connection)
    )
    for row in connection.execute(machines.order_by(RESOURCES.c.id).with_for_update()).mappings().all():
        warm = row[_WARM] + warm_milliseconds(row, since, now)
        connection.execute(update(RESOURCES).where(RESOURCES.c.id == row["id"]).values({_WARM: warm}))
    connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(warm_since_microseconds=None))


def warm_since(connection: Connection, pool_ids: Iterable[str]) -> dict[str, int]:
    """Return since when pools are warm, in microseconds since 1970; those that are not are absent."""
    pools = select(POOLS.c.id, POOLS.c.warm_since_microseconds).where(
        POOLS.c.id.in_(sorted(set(pool_ids))), POOLS.c.warm_since_microseconds.is_not(None)
    )
    return {row.id: row.warm_since_microseconds for row in connection.execute(pools)}


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


# ── detached calls ────────────────────────────────────────────────────────────────────────────────────────────────────


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
            cover_held(connection, pool_id, stamp(self._database.now(connection)))

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
    machines = r.pool_id == pool_id, r.cloud_id.is_not(None), is_billable(connection)
    rows = connection.execute(select(r.cloud_id, r.price_micro_usd_per_hour).where(*machines))
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
