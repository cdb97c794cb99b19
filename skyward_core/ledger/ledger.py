"""What we asked for, what we got, what it costs, what is gone: SQLite by default, PostgreSQL by URL.

An intent is written and committed before the call that creates something, bound to the cloud's id after it, and closed with the evidence that the
thing is gone. Whatever dies in between leaves an open intent, with all that is needed to find the thing: kind, provider, region, name, token, tags.

`rows.py` has the values, `tables.py` the tables and the databases; here are the verbs.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from sqlalchemy import BigInteger, ColumnElement, Connection, RowMapping, Select, and_, bindparam, case, delete, func, insert, literal, not_, select, update

from skyward_core.errors import ZERO_USD, BadRequest, BudgetExceeded, LeaseLost, LedgerConflict, LedgerError
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    MICRO_USD,
    PRUNED_SPEC,
    SECONDS_PER_HOUR,
    Account,
    Attempt,
    Bucket,
    CostBy,
    CostRow,
    Intent,
    Period,
    PoolEntry,
    PoolRow,
    Pruned,
    Rented,
    Reservation,
    UnreadableRow,
    Wish,
    micro_usd,
)
from skyward_core.ledger.tables import (
    ACCOUNTS,
    ATTEMPTS,
    BALANCES,
    IS_OPEN,
    MIGRATIONS,
    POOLS,
    RESERVATIONS,
    RESOURCES,
    SHARES,
    Values,
    account_of,
    attempt_of,
    in_usd,
    intent_of,
    migrate,
    milliseconds_of,
    opened,
    parsed,
    pool_of,
    read_rows,
    reservation_of,
    schema_version,
    stamp,
    told,
    work_of,
    work_values,
)
from skyward_core.machines.owner import Owner
from skyward_core.paths import first_private, state_places
from skyward_core.providers.base import LAUNCH_TAG, RANK_TAG, TYPE_TAG
from skyward_core.work import NO_WORK, Work, of_system
from skyward_core.worker.private_folders import NotPrivate

BUSY_TIMEOUT_SECONDS = 30.0
"""How long a statement waits for another process that is writing; a write takes milliseconds."""
ELSEWHERE = "name another place, SKYWARD_LEDGER=sqlite:////var/lib/skyward/ledger.db or postgresql+psycopg://host/database"
NUMBERS_PER_STATEMENT = 1000
"""How many values one `IN` may list; SQLite takes 32,766 in a statement, PostgreSQL twice that."""
_log = logging.getLogger("skyward")
_DAY_MICROSECONDS = 86_400_000_000
_MAY_SPEND = POOLS.c.condemned_microseconds.is_(None) & POOLS.c.ended_microseconds.is_(None)


def default_url(environ: Mapping[str, str] = os.environ, *, must_last: bool = False) -> str:
    """Return the ledger's URL: `SKYWARD_LEDGER`, or a SQLite file under the user's state directory.

    Where that may not be written to, it is a file in the user's runtime folder, after a warning: such a ledger may be gone after a reboot. `must_last` raises
    LedgerError instead, for what is paid from an account; and so does whoever has no home at all.
    """
    if url := environ.get("SKYWARD_LEDGER"):
        return url
    home, *others = state_places()
    try:
        folder = home[1]()
    except (RuntimeError, KeyError) as error:
        raise LedgerError(f"there is no place for the ledger, for this user has no home ({error}): set HOME, or {ELSEWHERE}") from error
    if not folder.is_absolute():
        raise LedgerError(f"there is no place for the ledger, for this user has no home ({folder} leads nowhere): set HOME, or {ELSEWHERE}")
    if _can_be_written(folder):
        return f"sqlite:///{folder / 'ledger.db'}"
    if must_last:
        raise LedgerError(f"{folder} may not be written to, and a budget needs a ledger that lasts: {ELSEWHERE}")
    try:
        runtime = first_private("ledger", others)
    except NotPrivate as error:
        raise LedgerError(f"{folder} may not be written to, and nothing else may be: {error}. {ELSEWHERE[0].upper()}{ELSEWHERE[1:]}") from error
    _log.warning("%s may not be written to: the ledger is in %s, which may be gone after a reboot; %s", folder, runtime, ELSEWHERE)
    return f"sqlite:///{runtime / 'ledger.db'}"


def _can_be_written(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(there, os.W_OK | os.X_OK)


def now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(UTC)


class Ledger:
    """An open ledger, usable from many threads; each process opens its own (not across a fork). Close it, or use it as a context manager.

    Every verb is one transaction, committed when it returns, and raises LedgerError when the database cannot be used. SQLite files are in WAL mode:
    readers never wait and are never waited for; they must not lie on a network file system, whose processes could not see each other's locks.
    """

    def __init__(self, url: str, *, clock: Callable[[], datetime] = now, busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> None:
        """Open the ledger at a SQLAlchemy URL; make it if there is none, migrate it if it is of an older version."""
        self.url = parsed(url)
        self._clock = clock
        self._is_closed = False
        self._engine = opened(self.url, busy_timeout_seconds)
        self._writing = self._engine.execution_options(skyward_writes=True)
        try:
            self._bring_up_to_date()
        except BaseException:
            self.close()
            raise

    def _bring_up_to_date(self) -> None:
        with self._read() as connection:
            is_current = schema_version(connection) == len(MIGRATIONS)
        if not is_current:
            with self._write() as connection:
                migrate(connection)

    def close(self) -> None:
        """Close all connections; may be called twice. What is used later opens a connection for the time of its transaction."""
        self._is_closed = True
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_pool(
        self,
        pool_id: str,
        *,
        owner: Owner,
        provider: Mapping[str, Any],
        spec_json: str,
        lease_expires_at: datetime,
        account: str | None = None,
        work: Work = NO_WORK,
    ) -> PoolEntry:
        """Write down a pool before anything is asked for on its behalf. Raises LedgerConflict if there is one of that id."""
        values = {
            "id": pool_id,
            "owner_user": owner.user,
            "owner_host": owner.host,
            "owner_process": owner.process,
            "provider_json": json.dumps(dict(provider), sort_keys=True),
            "spec_json": spec_json,
            "account": account,
            "created_microseconds": stamp(self._clock()),
            "lease_expires_microseconds": stamp(lease_expires_at),
            "lives_by_lease": False,
            **work_values(work),
        }
        with self._write() as connection:
            if connection.execute(select(POOLS.c.id).where(POOLS.c.id == pool_id)).first() is not None:
                raise LedgerConflict(f"The ledger already has a pool {pool_id!r}. Take a new id.")
            return pool_of(connection.execute(insert(POOLS).values(values).returning(*POOLS.c)).mappings().one())

    def turn_to(self, pool_id: str, provider: Mapping[str, Any], provider_account: str) -> None:
        """Write down who is to rent out a pool's machines from now on, and to whom; what others had of it must be known to be gone.

        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown.
        """
        with self._write() as connection:
            wanted = update(POOLS).where(POOLS.c.id == pool_id, _MAY_SPEND)
            if connection.execute(wanted.values(provider_json=json.dumps(dict(provider), sort_keys=True), provider_account=provider_account)).rowcount == 0:
                _must_live(connection, pool_id)

    def renew(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Move the end of a pool's lease, never to an earlier time.

        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown. Cheap: it touches one row.
        """
        self._lengthen(pool_id, lease_expires_at)

    def live_by_lease(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Let a pool outlive its owner until its lease runs out; as `renew` otherwise."""
        self._lengthen(pool_id, lease_expires_at, lives_by_lease=True)

    def _lengthen(self, pool_id: str, lease_expires_at: datetime, **more: bool) -> None:
        end = stamp(lease_expires_at)
        later = case((POOLS.c.lease_expires_microseconds < end, end), else_=POOLS.c.lease_expires_microseconds)
        with self._write() as connection:
            wanted = update(POOLS).where(POOLS.c.id == pool_id, _MAY_SPEND)
            if connection.execute(wanted.values(lease_expires_microseconds=later, **more)).rowcount == 0:
                _must_live(connection, pool_id)

    def condemn(self, pool_id: str, *, seen: datetime) -> bool:
        """Judge one pool dead, and return whether it is; see `condemn_all`."""
        return pool_id in self.condemn_all({pool_id: seen})

    def condemn_all(self, seen: Mapping[str, datetime]) -> set[str]:
        """Judge pools dead, each unless its lease was renewed since it was `seen` to end then. From now on nothing is asked for on their behalf.

        Returns the ids of those that are dead: by this, or because they were condemned or had ended before. Of the others somebody has renewed the lease;
        look again. Raises LedgerConflict if one is unknown.
        """
        p = POOLS.c
        condemned = func.coalesce(p.condemned_microseconds, stamp(self._clock()))
        dead: set[str] = set()
        with self._write() as connection:
            for pool_id, lease_expires_at in sorted(seen.items()):
                is_unchanged = (p.lease_expires_microseconds == stamp(lease_expires_at)) | p.condemned_microseconds.is_not(None)
                wanted = update(POOLS).where(p.id == pool_id, p.ended_microseconds.is_(None), is_unchanged)
                is_done = connection.execute(wanted.values(condemned_microseconds=condemned)).rowcount != 0
                if is_done or _known_pool(connection, pool_id).ended_at is not None:
                    dead.add(pool_id)
        return dead

    def end_pool(self, pool_id: str) -> None:
        """Write down that one pool has ended; see `end_pools`."""
        self.end_pools([pool_id])

    def end_pools(self, pool_ids: Iterable[str]) -> None:
        """Write down that pools have ended; the first time stands. Their open intents stay open. Raises LedgerConflict if one is unknown."""
        ended = func.coalesce(POOLS.c.ended_microseconds, stamp(self._clock()))
        with self._write() as connection:
            for pool_id in sorted(set(pool_ids)):
                if connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(ended_microseconds=ended)).rowcount == 0:
                    raise _no_pool(pool_id)

    def pool(self, pool_id: str) -> PoolEntry | None:
        """Return a pool; None if the ledger has never heard of it."""
        with self._read() as connection:
            row = connection.execute(select(POOLS).where(POOLS.c.id == pool_id)).mappings().first()
        return None if row is None else pool_of(row)

    def pools(self, *, include_ended: bool = False, unreadable: list[UnreadableRow] | None = None) -> list[PoolEntry]:
        """Return the pools, oldest first. What cannot be read is put into `unreadable`; without that list it is raised, here and in the other listings."""
        with self._read() as connection:
            wanted = _pools(include_ended).order_by(POOLS.c.created_microseconds, POOLS.c.id)
            return read_rows(connection.execute(wanted).mappings(), pool_of, unreadable)

    def pool_rows(self, *, include_ended: bool = False, limit: int | None = None, unreadable: list[UnreadableRow] | None = None) -> list[PoolRow]:
        """Return the pools with what each has cost so far, oldest first; only the newest so many, if so asked."""
        newest = _pools(include_ended).order_by(POOLS.c.created_microseconds.desc(), POOLS.c.id.desc()).limit(limit)
        r = RESOURCES.c
        sums = select(r.pool_id, func.sum(case((IS_OPEN, 1), else_=0)), func.count(), func.sum(_MILLISECONDS), func.sum(_COST), func.sum(_ON_DEMAND))
        if limit is not None or not include_ended:  # else all resources are wanted, and a list of 5,000 pools costs more than it saves
            sums = sums.where(r.pool_id.in_(newest.with_only_columns(POOLS.c.id)))
        with self._read() as connection:
            entries = read_rows(connection.execute(newest).mappings(), pool_of, unreadable)
            found = {row[0]: tuple(map(_whole, row[1:])) for row in connection.execute(sums.group_by(r.pool_id))}
        return [_pool_row(entry, *found.get(entry.id, (0, 0, 0, 0, 0))) for entry in reversed(entries)]

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Write down what became of tries to rent machines."""
        rows = [
            {
                "pool_id": attempt.pool_id,
                "at_microseconds": stamp(attempt.at),
                "provider": attempt.provider,
                "region": attempt.region,
                "instance_type": attempt.instance_type,
                "is_spot": attempt.is_spot,
                "milliseconds": round(attempt.seconds * 1000),
                "error": attempt.error,
                "code": attempt.code[:255],
                "message": attempt.message,
            }
            for attempt in attempts
        ]
        if rows:
            with self._write() as connection:
                connection.execute(insert(ATTEMPTS), rows)

    def attempts(self, *, pool_id: str | None = None, since: datetime | None = None, unreadable: list[UnreadableRow] | None = None) -> list[Attempt]:
        """Return tries to rent machines, oldest first: those of a pool, those since a time, or all."""
        wanted = select(ATTEMPTS, POOLS.c.spec_json).join(POOLS).order_by(ATTEMPTS.c.at_microseconds, ATTEMPTS.c.id)
        if pool_id is not None:
            wanted = wanted.where(ATTEMPTS.c.pool_id == pool_id)
        if since is not None:
            wanted = wanted.where(ATTEMPTS.c.at_microseconds >= stamp(since))
        with self._read() as connection:
            return read_rows(connection.execute(wanted).mappings(), attempt_of, unreadable)

    # ── intents ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def intend(self, pool_id: str, wish: Wish) -> Intent:
        """Write down one thing that is about to be asked for; see `intend_all`."""
        return self.intend_all(pool_id, [wish])[0]

    def intend_all(self, pool_id: str, wishes: Sequence[Wish]) -> list[Intent]:
        """Write down what is about to be asked for, all of it or nothing. It is committed when this returns: only then make the creating call.

        With a token that the ledger knows, that entry is returned as it is (the call is being tried again). Raises LedgerConflict if it is for another
        thing or the pool is unknown, LeaseLost if the pool was condemned or has ended: nothing is asked for on behalf of the dead.
        """
        rows = [self._row_of(pool_id, wish) for wish in wishes]
        with self._write() as connection:
            _must_live(connection, pool_id)
            return _written(connection, rows)

    def adopt(self, pool_id: str, wish: Wish, cloud_id: str) -> Intent:
        """Write down a thing that is there and that no intent tells of, intent and bond in one; again with the same changes nothing.

        Allowed for a pool that is condemned or has ended: it is the truth, and what is there has to be ended. Errors as of `intend_all` and `bind`.
        """
        with self._write() as connection:
            _known_pool(connection, pool_id, is_alone=True)  # two sweeps may have found the same
            intent = _written(connection, [self._row_of(pool_id, wish)])[0]
            return self._change_all(connection, [intent.id], self._binding({intent.id: cloud_id}, []))[0]

    def _row_of(self, pool_id: str, wish: Wish) -> dict[str, Any]:
        price = wish.price
        if price.increment_seconds < 1 or price.minimum_seconds < 0 or price.minimum_usd < 0:
            raise BadRequest(f"A billing increment is at least one second and a minimum not negative; given {price}.")
        return {
            "pool_id": pool_id,
            "kind": wish.kind.value,
            "provider": wish.provider,
            "region": wish.region,
            "name": wish.name,
            "token": wish.token,
            "tags_json": json.dumps(dict(wish.tags), sort_keys=True),
            "price_micro_usd_per_hour": micro_usd(price.per_hour),
            "on_demand_micro_usd_per_hour": micro_usd(price.per_hour if price.on_demand_per_hour is None else price.on_demand_per_hour),
            "is_spot": price.is_spot,
            "increment_seconds": price.increment_seconds,
            "minimum_seconds": price.minimum_seconds,
            "minimum_micro_usd": micro_usd(price.minimum_usd),
            "extras_json": json.dumps([extra.model_dump() for extra in price.extras]),
            "intended_microseconds": stamp(self._clock()),
            "expires_microseconds": stamp(wish.expires_at),
        }

    def bind(self, intent: Intent | int, cloud_id: str) -> Intent:
        """Write down the cloud's id of one thing that was created; see `bind_all`."""
        number = _number(intent)
        return self.bind_all({number: cloud_id})[0]

    def bind_all(self, ids: Mapping[int, str], as_rented: Mapping[int, Rented] | None = None) -> list[Intent]:
        """Write down the cloud's ids, by the numbers of their intents; again with the same ids changes nothing.

        `as_rented` says of some that they are not quite what was asked for. Their price takes the place of the intent's where it is lower: money
        was set aside for that one, and no bill may rise above it.

        An intent that was closed unbound (a listing lagged behind, the answer came late) is open again: there is something after all. Allowed for a pool
        that is condemned. Raises LedgerConflict for those that are bound to another id, after the others have been written down.
        """
        conflicts: list[str] = []
        with self._write() as connection:
            intents = self._change_all(connection, ids, self._binding(ids, conflicts, as_rented or {}))
        if conflicts:
            raise LedgerConflict(" ".join(conflicts))
        return intents

    def _binding(self, ids: Mapping[int, str], conflicts: list[str], as_rented: Mapping[int, Rented] | None = None) -> Callable[[Values], dict[str, Any]]:
        bound = stamp(self._clock())

        def change(row: Values) -> dict[str, Any]:
            cloud_id = ids[row["id"]]
            if row["cloud_id"] is None:
                rented = (as_rented or {}).get(row["id"])
                changed = {} if rented is None else _as_rented(row, rented)
                return {"cloud_id": cloud_id, "bound_microseconds": bound, "gone_microseconds": None, "evidence": None} | changed
            if row["cloud_id"] != cloud_id:
                conflicts.append(
                    f"{row['kind']} {row['name']!r} at {row['provider']} is {row['cloud_id']} in the ledger, now {cloud_id} is said."
                    f" One request has created two things: terminate {cloud_id}, or write an intent of its own for it."
                )
            return {}

        return change

    def ask_end_all(self, numbers: Iterable[int]) -> list[Intent]:
        """Write down that the termination of these has been asked for; the first time stands."""
        asked = stamp(self._clock())

        def change(row: Values) -> dict[str, Any]:
            return {"end_asked_microseconds": asked} if row["end_asked_microseconds"] is None and row["gone_microseconds"] is None else {}

        with self._write() as connection:
            return self._change_all(connection, numbers, change)

    def close_all(self, numbers: Iterable[int], evidence: str, *, fill: Bucket | None = None, paid_until: Mapping[int, datetime] | None = None) -> list[Intent]:
        """Write down that these are gone, or never were, and how we know; the first evidence stands.

        With `fill`, what of the time since its intent no bucket has yet is put into that one, for what was bound: every second is in a bucket. `paid_until`
        tells of some that they cost nothing any more since then, long before it was known that they are gone.
        """
        if not evidence.strip():
            raise BadRequest("An intent is closed with the evidence that the thing is gone; none was given.")
        gone = stamp(self._clock())

        def change(row: Values) -> dict[str, Any]:
            if row["gone_microseconds"] is not None:
                return {}
            closed: dict[str, Any] = {"gone_microseconds": gone, "evidence": evidence}
            if fill is None or row["cloud_id"] is None:
                return closed
            end = min(gone, stamp(paid_until[row["id"]])) if paid_until and row["id"] in paid_until else gone
            missing = max(0, (end - row["intended_microseconds"]) // 1000 - sum(row[milliseconds_of(bucket)] for bucket in Bucket))
            filled = {milliseconds_of(fill): row[milliseconds_of(fill)] + missing, "filled_bucket": fill.name, "filled_milliseconds": missing}
            return closed | filled

        with self._write() as connection:
            return self._change_all(connection, numbers, change)

    def note_all(self, seconds: Mapping[int, Mapping[Bucket, float]]) -> None:
        """Write down what the seconds of resources went to so far: totals by bucket, kept to the millisecond. Again with the same changes nothing.

        The buckets of a resource are replaced together, if their sum is not smaller than what is known: a second may turn out to have gone elsewhere, and is
        never lost. Allowed after the close: who noted knows better than who filled, so that what is noted then takes the place of what was filled in, and
        is never added to it.
        """
        noted = {number: {bucket: round(total * 1000) for bucket, total in its.items()} for number, its in seconds.items()}
        if wrong := [total for its in noted.values() for total in its.values() if total < 0]:
            raise BadRequest(f"Seconds only add up; given {wrong[0] / 1000}.")
        with self._write() as connection:
            self._change_all(connection, noted, lambda row: _noted(row, noted[row["id"]]))

    def _change_all(self, connection: Connection, numbers: Iterable[int], change: Callable[[Values], dict[str, Any]]) -> list[Intent]:
        """Apply what `change` makes of the locked rows; return the intents in the order of their numbers as given."""
        wanted = list(numbers)
        rows = {row["id"]: row for row in self._locked(connection, sorted(set(wanted)))}
        if missing := next((number for number in wanted if number not in rows), None):
            raise LedgerConflict(f"The ledger at {self.url!r} has no entry {missing}. Is it another ledger than the one it was written to?")
        changes = {number: changed for number, row in rows.items() if (changed := change(row))}
        columns = sorted({column for changed in changes.values() for column in changed})
        if changes:
            statement = update(RESOURCES).where(RESOURCES.c.id == bindparam("number")).values({column: bindparam(f"new_{column}") for column in columns})
            new = [{f"new_{column}": ({**rows[number], **changed})[column] for column in columns} | {"number": number} for number, changed in changes.items()]
            connection.execute(statement, new)
        return [intent_of({**rows[number], **changes.get(number, {})}) for number in wanted]

    def _locked(self, connection: Connection, numbers: Sequence[int]) -> Generator[RowMapping]:
        """In the order of their numbers, as everybody locks them: two who change the same rows wait for each other and never in a circle."""
        for start in range(0, len(numbers), NUMBERS_PER_STATEMENT):
            some = select(RESOURCES).where(RESOURCES.c.id.in_(numbers[start : start + NUMBERS_PER_STATEMENT]))
            yield from connection.execute(some.order_by(RESOURCES.c.id).with_for_update()).mappings()

    def open_intents(
        self,
        *,
        pool_id: str | None = None,
        provider: str | None = None,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[Intent]:
        """Return what is not known to be gone, oldest first: of one pool, or at one provider, if so asked."""
        return self._intents(select(RESOURCES).where(IS_OPEN), pool_id, provider, unreadable)

    def intents(self, *, pool_id: str | None = None, provider: str | None = None, unreadable: list[UnreadableRow] | None = None) -> list[Intent]:
        """Return all entries, open and closed, oldest first."""
        return self._intents(select(RESOURCES), pool_id, provider, unreadable)

    def _intents(self, wanted: Select[Any], pool_id: str | None, provider: str | None, unreadable: list[UnreadableRow] | None) -> list[Intent]:
        if pool_id is not None:
            wanted = wanted.where(RESOURCES.c.pool_id == pool_id)
        if provider is not None:
            wanted = wanted.where(RESOURCES.c.provider == provider)
        with self._read() as connection:
            return read_rows(connection.execute(wanted.order_by(RESOURCES.c.id)).mappings(), intent_of, unreadable)

    # ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def cost_rows(
        self,
        by: CostBy = CostBy.POOL,
        *,
        pool_id: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        work: Work = NO_WORK,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[CostRow]:
        """Return the bill, added up: of one pool, of what was intended from `since` until before `until`, of pools for this work, if so asked.

        A pool is for `work` if its own has the same texts wherever that is not empty. Whatever it is added up by, the rows have the same sum. By bucket there
        is one row more, `BILLING_ROUNDING`. By run, task and asset the shares of a pool's cost (`set_shares`) go where they belong, and what no share takes,
        with the number of the resources, to the pool's own work.
        With `unreadable`, rows whose numbers are none (SQLite takes anything) are left out and put there.
        """
        conditions: list[ColumnElement[bool]] = []
        if pool_id is not None:
            conditions.append(RESOURCES.c.pool_id == pool_id)
        if since is not None:
            conditions.append(RESOURCES.c.intended_microseconds >= stamp(since))
        if until is not None:
            conditions.append(RESOURCES.c.intended_microseconds < stamp(until))
        if work != NO_WORK:
            conditions.append(RESOURCES.c.pool_id.in_(select(POOLS.c.id).where(*_is_for(work))))
        with self._read() as connection:
            if unreadable is not None and connection.dialect.name == "sqlite":
                unreadable += _without_numbers(connection, conditions)
                conditions.append(_HAS_NUMBERS)
            if by in _WORK_KEYS:
                return _work_rows(connection, by, conditions)
            if by is CostBy.BUCKET:
                return _bucket_rows(connection, conditions)
            key = _cost_keys()[by]
            if by is CostBy.RESOURCE:
                wanted = select(key, literal(1), _MILLISECONDS, _COST, _ON_DEMAND).where(*conditions)  # adding up single rows takes time too
            else:
                joined = RESOURCES.join(POOLS, RESOURCES.c.pool_id == POOLS.c.id) if by is CostBy.OWNER else RESOURCES
                sums = select(key, func.count(), func.sum(_MILLISECONDS), func.sum(_COST), func.sum(_ON_DEMAND)).select_from(joined)
                wanted = sums.where(*conditions).group_by(key)
            return [_cost_row(by, *row) for row in connection.execute(wanted.order_by(key))]

    def set_shares(self, pool_id: str, shares: Mapping[Work, Decimal]) -> None:
        """Write down what parts of a pool's cost are for, in USD, in the place of what was written before. Allowed after the end of the pool.

        Raises BadRequest for a negative share, LedgerConflict if the pool is unknown.
        """
        if wrong := [usd for usd in shares.values() if usd < 0]:
            raise BadRequest(f"A share of a cost is zero or more; given {wrong[0]} USD.")
        rows = [{"pool_id": pool_id, "micro_usd": round(usd / MICRO_USD), **work_values(work)} for work, usd in shares.items()]
        with self._write() as connection:
            _known_pool(connection, pool_id, is_alone=True)
            connection.execute(delete(SHARES).where(SHARES.c.pool_id == pool_id))
            if rows:
                connection.execute(insert(SHARES), rows)

    def shares(self, pool_id: str) -> dict[Work, Decimal]:
        """Return what parts of a pool's cost are for, in USD."""
        with self._read() as connection:
            rows = connection.execute(select(SHARES).where(SHARES.c.pool_id == pool_id).order_by(SHARES.c.id)).mappings()
            return {work_of(row): in_usd(row["micro_usd"]) for row in rows}

    # ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_account(self, account: Account) -> None:
        """Make an account, or change its limit or period; with another period counting starts anew."""
        values = {"limit_micro_usd": micro_usd(account.limit_usd), "period": account.period.value}
        with self._write() as connection:
            if connection.execute(update(ACCOUNTS).where(ACCOUNTS.c.name == account.name).values(values)).rowcount == 0:
                connection.execute(insert(ACCOUNTS).values(name=account.name, **values))

    def accounts(self, *, unreadable: list[UnreadableRow] | None = None) -> list[Account]:
        """Return the accounts, by name."""
        with self._read() as connection:
            return read_rows(connection.execute(select(ACCOUNTS).order_by(ACCOUNTS.c.name)).mappings(), account_of, unreadable)

    def left_usd(self, account: str, pool_id: str) -> Decimal:
        """Return what a pool could reserve from an account now; negative when more was spent than had been reserved."""
        with self._read() as connection:
            row = _account_row(connection, account)
            scope = _scope(Period(row["period"]), pool_id, self._clock())
            return in_usd(row["limit_micro_usd"] - (_committed(connection, account, scope) or 0))

    def reserve(self, account: str, pool_id: str, usd: Decimal) -> Reservation:
        """Set money aside for a pool, in one transaction that no other can come between.

        Raises BudgetExceeded if the account has less left in this period (what is reserved and what has been spent both count), LeaseLost if the pool was
        condemned or has ended: nobody would ever settle it.
        """
        amount = micro_usd(usd)
        if amount <= 0:
            raise BadRequest(f"One reserves a positive sum; given {usd} USD.")
        with self._write() as connection:
            _must_live(connection, pool_id)
            return self._reserve(connection, _account_row(connection, account, is_locked=True), pool_id, amount)

    def roll(self, account: str, pool_id: str, spent_usd: Decimal, next_usd: Decimal) -> Reservation:
        """Settle what a pool has reserved from an account with what it has spent since it last did so, and reserve for what comes next: both or neither.

        How the sum is shared among several reservations is said at `settle_pool`. Nothing may come next (0 USD). Errors as of `reserve`; BudgetExceeded
        leaves everything as it was.
        """
        spent, amount = micro_usd(spent_usd), micro_usd(next_usd)
        if spent < 0 or amount < 0:
            raise BadRequest(f"One spends and reserves nothing or more; given {spent_usd} and {next_usd} USD.")
        with self._write() as connection:
            _must_live(connection, pool_id)
            row = _account_row(connection, account, is_locked=True)
            are_its = (RESERVATIONS.c.pool_id == pool_id) & (RESERVATIONS.c.account == account)
            if spent and not _open_reservations(connection, are_its):
                self._insert_reservation(connection, account, pool_id, _scope(Period(row["period"]), pool_id, self._clock()), 0)
            self._settle_open(connection, are_its, spent)
            return self._reserve(connection, row, pool_id, amount)

    def _reserve(self, connection: Connection, account: Values, pool_id: str, amount: int) -> Reservation:
        name, limit = account["name"], account["limit_micro_usd"]
        scope = _scope(Period(account["period"]), pool_id, self._clock())
        committed = _committed(connection, name, scope) or 0
        if amount and committed + amount > limit:
            left = in_usd(limit - committed)
            raise BudgetExceeded(f"Account {name!r} has {left} USD left of {in_usd(limit)} for {scope}; {in_usd(amount)} asked for.", name, left)
        return self._insert_reservation(connection, name, pool_id, scope, amount)

    def _insert_reservation(self, connection: Connection, account: str, pool_id: str, scope: str, amount: int) -> Reservation:
        if _committed(connection, account, scope) is None:
            connection.execute(insert(BALANCES).values(account=account, scope=scope, committed_micro_usd=amount))
        else:
            _commit_more(connection, account, scope, amount)
        values = {"account": account, "pool_id": pool_id, "scope": scope, "reserved_micro_usd": amount, "made_microseconds": stamp(self._clock())}
        return reservation_of(connection.execute(insert(RESERVATIONS).values(values).returning(*RESERVATIONS.c)).mappings().one())

    def settle(self, reservation: Reservation | int, spent_usd: Decimal) -> Reservation:
        """Say what was really spent of a reservation: the rest is free again. More than was reserved is written down too, for it is the truth.

        Again with the same sum changes nothing; raises LedgerConflict with another.
        """
        number = reservation if isinstance(reservation, int) else reservation.id
        spent = micro_usd(spent_usd)
        if spent < 0:
            raise BadRequest(f"One spends nothing or more; given {spent_usd} USD.")
        with self._write() as connection:
            row = connection.execute(select(RESERVATIONS).where(RESERVATIONS.c.id == number).with_for_update()).mappings().first()
            if row is None:
                raise LedgerConflict(f"The ledger at {self.url!r} has no reservation {number}. Is it another ledger than the one it was made in?")
            if row["settled_microseconds"] is not None:
                if row["spent_micro_usd"] != spent:
                    raise LedgerConflict(f"Reservation {number} was settled with {in_usd(row['spent_micro_usd'])} USD; now {spent_usd} is said.")
                return reservation_of(row)
            _commit_more(connection, row["account"], row["scope"], spent - row["reserved_micro_usd"])
            return self._settled(connection, number, spent)

    def _settled(self, connection: Connection, number: int, spent: int) -> Reservation:
        statement = update(RESERVATIONS).where(RESERVATIONS.c.id == number).values(settled_microseconds=stamp(self._clock()), spent_micro_usd=spent)
        return reservation_of(connection.execute(statement.returning(*RESERVATIONS.c)).mappings().one())

    def settle_pool(self, pool_id: str, spent_usd: Decimal) -> None:
        """Settle all open reservations of a pool, so that its settled sums together are what it has spent; again changes nothing.

        Oldest first, each takes what it had reserved, and the newest what is beyond: so no period and no account pays for another while there is enough.
        If more than was spent has been settled already, the open ones are settled with nothing.
        """
        spent = micro_usd(spent_usd)
        if spent < 0:
            raise BadRequest(f"One spends nothing or more; given {spent_usd} USD.")
        are_its = RESERVATIONS.c.pool_id == pool_id
        its_accounts = select(RESERVATIONS.c.account).where(are_its, RESERVATIONS.c.settled_microseconds.is_(None))
        with self._write() as connection:
            connection.execute(select(ACCOUNTS.c.name).where(ACCOUNTS.c.name.in_(its_accounts)).order_by(ACCOUNTS.c.name).with_for_update()).all()
            settled = int(connection.execute(select(func.sum(RESERVATIONS.c.spent_micro_usd)).where(are_its)).scalar() or 0)
            self._settle_open(connection, are_its, max(0, spent - settled))

    def _settle_open(self, connection: Connection, which: ColumnElement[bool], spent: int) -> None:
        more: dict[tuple[str, str], int] = defaultdict(int)
        rows = _open_reservations(connection, which)
        for row in rows:
            share = spent if row is rows[-1] else min(spent, row["reserved_micro_usd"])
            spent -= share
            self._settled(connection, row["id"], share)
            more[row["account"], row["scope"]] += share - row["reserved_micro_usd"]
        for (account, scope), amount in sorted(more.items()):
            _commit_more(connection, account, scope, amount)

    def release(self, reservation: Reservation | int) -> Reservation:
        """Give a reservation back unspent."""
        return self.settle(reservation, ZERO_USD)

    def open_reservations(self, *, pool_id: str | None = None, unreadable: list[UnreadableRow] | None = None) -> list[Reservation]:
        """Return the reservations that are not settled, oldest first."""
        wanted = select(RESERVATIONS).where(RESERVATIONS.c.settled_microseconds.is_(None)).order_by(RESERVATIONS.c.id)
        with self._read() as connection:
            its = connection.execute(wanted if pool_id is None else wanted.where(RESERVATIONS.c.pool_id == pool_id))
            return read_rows(its.mappings(), reservation_of, unreadable)

    # ── keeping it small ─────────────────────────────────────────────────────────────────────────────────────────────

    def prune(self, ended_before: datetime, *, is_dry_run: bool = True) -> Pruned:
        """Take away the details of pools that ended before then, of which nothing is open; again with the same changes nothing.

        Their specs, their tries to rent machines, the tags of their machines and their settled reservations go. What they have cost stays, machine by
        machine, and so does what accounts have spent: bills, receipts and budgets say what they said before.
        """
        p, r = POOLS.c, RESERVATIONS.c
        is_closed = (p.ended_microseconds < stamp(ended_before)) & (p.spec_json != PRUNED_SPEC)
        is_open = p.id.in_(select(RESOURCES.c.pool_id).where(IS_OPEN)) | p.id.in_(select(r.pool_id).where(r.settled_microseconds.is_(None)))
        with self._write() as connection:
            pools = list(connection.execute(select(p.id).where(is_closed, not_(is_open)).order_by(p.id).with_for_update()).scalars())
            attempts = reservations = 0
            for start in range(0, len(pools), NUMBERS_PER_STATEMENT):
                some = pools[start : start + NUMBERS_PER_STATEMENT]
                attempts += int(connection.execute(select(func.count()).where(ATTEMPTS.c.pool_id.in_(some))).scalar_one())
                reservations += int(connection.execute(select(func.count()).where(r.pool_id.in_(some))).scalar_one())
                if not is_dry_run:
                    _take_details(connection, some)
        return Pruned(len(pools), attempts, reservations)

    def vacuum(self) -> None:
        """Give the room of what was pruned back to the disk (SQLite), or to the tables (PostgreSQL, where it is done by itself too)."""
        with told(self.url), self._pooled(), self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            tables = [table.name for table in (POOLS, RESOURCES, ATTEMPTS, RESERVATIONS)]
            driver = cast("Any", connection.connection)
            if connection.dialect.name == "sqlite":
                driver.rollback()
                driver.execute("VACUUM")
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            else:
                connection.exec_driver_sql(f"VACUUM {', '.join(tables)}")

    # ── transactions ─────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _read(self) -> Generator[Connection]:
        with told(self.url), self._pooled(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Generator[Connection]:
        with told(self.url), self._pooled(), self._writing.begin() as connection:
            yield connection

    @contextmanager
    def _pooled(self) -> Generator[None]:
        """Keep no connection after a transaction that ends in a closed ledger: `dispose` closes only connections that no thread uses."""
        pool = self._engine.pool
        try:
            yield
        finally:
            if self._is_closed:
                pool.dispose()  # of the time before `close`, if it was called meanwhile
                self._engine.dispose()


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _take_details(connection: Connection, pool_ids: Sequence[str]) -> None:
    connection.execute(delete(ATTEMPTS).where(ATTEMPTS.c.pool_id.in_(pool_ids)))
    connection.execute(delete(RESERVATIONS).where(RESERVATIONS.c.pool_id.in_(pool_ids)))
    rows = connection.execute(select(RESOURCES.c.id, RESOURCES.c.tags_json).where(RESOURCES.c.pool_id.in_(pool_ids))).all()
    if slim := [{"number": number, "tags": _slim(tags)} for number, tags in rows]:
        connection.execute(update(RESOURCES).where(RESOURCES.c.id == bindparam("number")).values(tags_json=bindparam("tags")), slim)
    connection.execute(update(POOLS).where(POOLS.c.id.in_(pool_ids)).values(spec_json=PRUNED_SPEC))


def _slim(tags_json: str) -> str:
    """Keep of a machine's tags what a receipt says of it, and what tells it from others of its pool should it be listed once more."""
    try:
        return json.dumps({name: value for name, value in json.loads(tags_json).items() if name in (TYPE_TAG, LAUNCH_TAG, RANK_TAG)}, sort_keys=True)
    except (ValueError, AttributeError):  # a damaged row stays as it is
        return tags_json


def _pools(include_ended: bool) -> Select[Any]:
    return select(POOLS) if include_ended else select(POOLS).where(POOLS.c.ended_microseconds.is_(None))


def _must_live(connection: Connection, pool_id: str) -> None:
    """Raise LeaseLost for a pool that may not spend any more; nobody can condemn it until the transaction is over."""
    entry = _known_pool(connection, pool_id)
    if entry.ended_at is not None:
        raise LeaseLost(f"Pool {pool_id!r} has ended, at {entry.ended_at:%Y-%m-%d %H:%M:%S} UTC; nothing more is rented for it. Open another.")
    if entry.condemned_at is not None:
        raise LeaseLost(
            f"Pool {pool_id!r} was judged dead at {entry.condemned_at:%Y-%m-%d %H:%M:%S} UTC: its lease had run out, or its owner was not there any more."
            " Its machines are being ended. Open another."
        )


def _known_pool(connection: Connection, pool_id: str, *, is_alone: bool = False) -> PoolEntry:
    """Return a pool that stays as it is until the transaction is over; alone, nobody else can write down anything of it either."""
    row = connection.execute(select(POOLS).where(POOLS.c.id == pool_id).with_for_update(read=not is_alone)).mappings().first()
    if row is None:
        raise _no_pool(pool_id)
    return pool_of(row)


def _no_pool(pool_id: str) -> LedgerConflict:
    return LedgerConflict(f"The ledger has no pool {pool_id!r}. Is it another ledger than the one it was opened in?")


def _whole(number: object) -> int:
    """A sum that the database has made; 0 where a damaged row has made it no number at all."""
    try:
        return int(cast("Any", number))
    except (TypeError, ValueError, OverflowError):
        return 0


def _pool_row(entry: PoolEntry, open_resources: int, resources: int, milliseconds: int, cost: int, on_demand: int) -> PoolRow:
    return PoolRow(entry, open_resources, resources, milliseconds / 1000, in_usd(cost), in_usd(on_demand))


# ── intents ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _number(intent: Intent | int) -> int:
    return intent if isinstance(intent, int) else intent.id


def _as_rented(row: Values, rented: Rented) -> dict[str, Any]:
    tags = json.loads(row["tags_json"]) | dict(rented.tags)
    price = min(row["price_micro_usd_per_hour"], micro_usd(rented.per_hour))
    return {"price_micro_usd_per_hour": price, "tags_json": json.dumps(tags, sort_keys=True)}


def _written(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[Intent]:
    """Insert those whose tokens are new; return all in their order."""
    by_token: dict[str, Intent] = {}
    tokens = [row["token"] for row in rows]
    for start in range(0, len(tokens), NUMBERS_PER_STATEMENT):
        known = select(RESOURCES).where(RESOURCES.c.token.in_(tokens[start : start + NUMBERS_PER_STATEMENT]))
        by_token |= {row["token"]: intent_of(row) for row in connection.execute(known).mappings()}
    if new := list({row["token"]: row for row in reversed(rows) if row["token"] not in by_token}.values())[::-1]:
        made = connection.execute(insert(RESOURCES).returning(*RESOURCES.c, sort_by_parameter_order=True), new)
        by_token |= {row["token"]: intent_of(row) for row in made.mappings()}
    for row in rows:
        found = by_token[row["token"]]
        if (found.pool_id, found.kind, found.provider, found.region, found.name) != tuple(row[of] for of in ("pool_id", "kind", "provider", "region", "name")):
            raise LedgerConflict(
                f"Token {found.token!r} stands for {found.kind} {found.name!r} of pool {found.pool_id!r} at {found.provider}. Use a new token."
            )
    return [by_token[token] for token in tokens]


def _noted(row: Values, totals: Mapping[Bucket, int]) -> dict[str, Any]:
    """Return what changes when these totals are noted: what a close had filled in makes room for them, and once it has there is no more room.

    They take the place of those before all together, for what was idle may turn out to have run: all together they never shrink.
    """
    filled, filled_bucket = row["filled_milliseconds"], row["filled_bucket"]
    known = {bucket: row[milliseconds_of(bucket)] - (filled if filled_bucket == bucket.name else 0) for bucket in Bucket}
    new = {**known, **totals}
    growth = sum(new.values()) - sum(known.values())
    if growth < 0 or new == known:
        return {}
    if filled_bucket is not None:
        over = max(0, growth - filled)
        filled -= growth - over
        for bucket in reversed(Bucket):
            cut = min(over, max(0, new[bucket] - known[bucket]))
            new[bucket], over = new[bucket] - cut, over - cut
        new[Bucket[filled_bucket]] += filled
    return {milliseconds_of(bucket): total for bucket, total in new.items()} | {"filled_milliseconds": filled}


# ── cost, in whole numbers that add up on both databases ─────────────────────────────────────────────────────────────


def _total_milliseconds(buckets: Sequence[Bucket]) -> ColumnElement[int]:
    total: ColumnElement[int] = literal(0, BigInteger)
    for bucket in buckets:
        total += RESOURCES.c[milliseconds_of(bucket)]
    return total


def _billed_micro_usd(price_per_hour: ColumnElement[int]) -> ColumnElement[int]:
    """As `Price.cost` counts; what was never bound and has no seconds costs nothing."""
    r = RESOURCES.c
    increments = ((_MILLISECONDS + 999) // 1000 + r.increment_seconds - 1) // r.increment_seconds
    seconds = increments * r.increment_seconds
    billed = case((seconds < r.minimum_seconds, r.minimum_seconds), else_=seconds)
    cost = (price_per_hour * billed + SECONDS_PER_HOUR - 1) // SECONDS_PER_HOUR
    return case((r.bound_microseconds.is_(None) & (_MILLISECONDS == 0), 0), (cost < r.minimum_micro_usd, r.minimum_micro_usd), else_=cost)


_MILLISECONDS = _total_milliseconds(tuple(Bucket))
_COST = _billed_micro_usd(RESOURCES.c.price_micro_usd_per_hour)
_ON_DEMAND = _billed_micro_usd(RESOURCES.c.on_demand_micro_usd_per_hour)


_NUMBERS = ("intended_microseconds", "price_micro_usd_per_hour", "on_demand_micro_usd_per_hour", "increment_seconds", "minimum_seconds", "minimum_micro_usd")
_HAS_NUMBERS = and_(*(func.typeof(RESOURCES.c[name]) == "integer" for name in (*_NUMBERS, *map(milliseconds_of, Bucket))))


def _without_numbers(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> list[UnreadableRow]:
    """Return the rows of which a bill cannot be made: SQLite compares and adds up text and infinities as it likes."""
    wanted = select(RESOURCES).where(*conditions, not_(_HAS_NUMBERS)).order_by(RESOURCES.c.id)
    return [UnreadableRow(RESOURCES.name, row["id"], str(row["pool_id"]), "a price or a time is no number") for row in connection.execute(wanted).mappings()]


def _cost_keys() -> Mapping[CostBy, ColumnElement[Any]]:
    return {
        CostBy.RESOURCE: RESOURCES.c.id,
        CostBy.POOL: RESOURCES.c.pool_id,
        CostBy.OWNER: POOLS.c.owner_user + "@" + POOLS.c.owner_host,
        CostBy.DAY: RESOURCES.c.intended_microseconds // literal(_DAY_MICROSECONDS, BigInteger),
    }


def _cost_row(by: CostBy, key: Any, resources: int, milliseconds: int, cost: int, on_demand: int) -> CostRow:
    return CostRow(_day(int(key)) if by is CostBy.DAY else str(key), resources, int(milliseconds) / 1000, in_usd(cost), in_usd(on_demand))


def _day(number: int) -> str:
    try:
        return (date(1970, 1, 1) + timedelta(days=number)).isoformat()
    except OverflowError:  # a damaged row
        return f"day {number} after 1970-01-01"


_WORK_KEYS: Mapping[CostBy, Callable[[Work], str]] = {
    CostBy.RUN: lambda work: of_system(work.system, f"{work.workflow}/{work.run}" if work.workflow else work.run) if work.run else "(no run)",
    CostBy.TASK: lambda work: of_system(work.system, f"{work.workflow}/{work.task}" if work.workflow else work.task) if work.task else "(no task)",
    CostBy.ASSET: lambda work: work.asset or "(no asset)",
}


def _is_for(work: Work) -> list[ColumnElement[bool]]:
    return [POOLS.c[name] == value for name, value in work_values(work).items() if value]


def _work_rows(connection: Connection, by: CostBy, conditions: Sequence[ColumnElement[bool]]) -> list[CostRow]:
    """Add up by the work: each pool's sums are dealt out in whole milliseconds and micro-dollars, so that nothing is lost to rounding."""
    sums = select(RESOURCES.c.pool_id, func.count(), func.sum(_MILLISECONDS), func.sum(_COST), func.sum(_ON_DEMAND)).where(*conditions)
    found = {row[0]: tuple(map(int, row[1:])) for row in connection.execute(sums.group_by(RESOURCES.c.pool_id))}
    its_pools = select(RESOURCES.c.pool_id).where(*conditions)
    works = {row["id"]: work_of(row) for row in connection.execute(select(POOLS).where(POOLS.c.id.in_(its_pools))).mappings()}
    shares: dict[str, list[tuple[Work, int]]] = defaultdict(list)
    for row in connection.execute(select(SHARES).where(SHARES.c.pool_id.in_(its_pools)).order_by(SHARES.c.id)).mappings():
        shares[row["pool_id"]].append((work_of(row), row["micro_usd"]))
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for pool_id, (resources, milliseconds, cost, on_demand) in found.items():
        its_shares = shares.get(pool_id, [])
        whole = max(cost, sum(part for _, part in its_shares))  # more is shared out than it costs where not all of its resources are asked for
        left = [milliseconds, cost, on_demand]
        for work, part in its_shares:
            dealt = [amount * part // whole if whole else 0 for amount in (milliseconds, cost, on_demand)]
            left = [rest - amount for rest, amount in zip(left, dealt, strict=True)]
            _add(totals[_WORK_KEYS[by](work)], 0, *dealt)
        _add(totals[_WORK_KEYS[by](works.get(pool_id, Work()))], resources, *left)  # its pool's row may be damaged: the bill is whole all the same
    return [_cost_row(by, key, *sums) for key, sums in sorted(totals.items())]


def _add(total: list[int], *amounts: int) -> None:
    total[:] = [one + other for one, other in zip(total, amounts, strict=True)]


def _bucket_rows(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> list[CostRow]:
    """Price each bucket as the difference of what was reached with it and without it: whatever is rounded, the shares add up to the whole."""
    columns: list[ColumnElement[Any]] = []
    before, before_on_demand = literal(0, BigInteger), literal(0, BigInteger)
    r = RESOURCES.c
    for place, bucket in enumerate(Bucket):
        reached_seconds = _total_milliseconds(tuple(Bucket)[: place + 1]) // 1000
        reached = r.price_micro_usd_per_hour * reached_seconds // SECONDS_PER_HOUR
        reached_on_demand = r.on_demand_micro_usd_per_hour * reached_seconds // SECONDS_PER_HOUR
        own = r[milliseconds_of(bucket)]
        columns += [func.sum(case((own > 0, 1), else_=0)), func.sum(own), func.sum(reached - before), func.sum(reached_on_demand - before_on_demand)]
        before, before_on_demand = reached, reached_on_demand
    columns += [func.count(), literal(0), func.sum(_COST - before), func.sum(_ON_DEMAND - before_on_demand)]
    numbers = [int(number or 0) for number in connection.execute(select(*columns).where(*conditions)).one()]
    keys = (*Bucket, BILLING_ROUNDING)
    fours = [numbers[start : start + 4] for start in range(0, len(numbers), 4)]
    return [CostRow(str(key), four[0], four[1] / 1000, in_usd(four[2]), in_usd(four[3])) for key, four in zip(keys, fours, strict=True)]


# ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _account_row(connection: Connection, account: str, *, is_locked: bool = False) -> Values:
    """Return an account's row; locked, so that everything that reserves from it goes one after the other (in SQLite all writers do anyway)."""
    wanted = select(ACCOUNTS).where(ACCOUNTS.c.name == account)
    row = connection.execute(wanted.with_for_update() if is_locked else wanted).mappings().first()
    if row is None:
        there = ", ".join(sorted(connection.execute(select(ACCOUNTS.c.name)).scalars())) or "none"
        how = f"`skyward budget set {account} --limit USD --per month`, or `Ledger.set_account`"
        raise BadRequest(f"The ledger has no account {account!r}; it has: {there}. Make it: {how}.")
    return row


def _scope(period: Period, pool_id: str, time: datetime) -> str:
    day = time.astimezone(UTC).date().isoformat()
    return {Period.RUN: f"pool {pool_id}", Period.DAY: day, Period.MONTH: day[:7]}[period]


def _committed(connection: Connection, account: str, scope: str) -> int | None:
    return connection.execute(select(BALANCES.c.committed_micro_usd).where(BALANCES.c.account == account, BALANCES.c.scope == scope)).scalar()


def _commit_more(connection: Connection, account: str, scope: str, amount: int) -> None:
    is_it = (BALANCES.c.account == account) & (BALANCES.c.scope == scope)
    connection.execute(update(BALANCES).where(is_it).values(committed_micro_usd=BALANCES.c.committed_micro_usd + amount))


def _open_reservations(connection: Connection, which: ColumnElement[bool]) -> Sequence[RowMapping]:
    wanted = select(RESERVATIONS).where(which, RESERVATIONS.c.settled_microseconds.is_(None))
    return connection.execute(wanted.order_by(RESERVATIONS.c.id).with_for_update()).mappings().all()
