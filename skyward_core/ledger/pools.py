"""The ledger's tables of pools and of attempts to rent machines (a part of `Ledger`).

The account of a run is one limit for all pools whose work names the same run (docs/decisions/0037). It is a row of
ACCOUNTS that no user sees. It is made in the transaction that records the first pool of the run. A pool that has one
draws on it with each reservation, beside the account of its budget.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, cast

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from skyward_core.errors import BadRequest, BudgetExceeded, LeaseLost, LedgerConflict
from skyward_core.ledger.database import Database, must_be_newest
from skyward_core.ledger.names import must_be_steward
from skyward_core.ledger.rows import Attempt, Bucket, Period, PoolEntry, SealedLease, UnreadableRow, micro_usd
from skyward_core.ledger.tables import (
    ACCOUNTS,
    ATTEMPTS,
    POOLS,
    RESOURCES,
    SEALED_LEASES,
    USES,
    attempt_of,
    in_usd,
    insert_new,
    later_lease,
    milliseconds_of,
    pool_of,
    pool_seen,
    provider_text,
    read_rows,
    sealed_lease_of,
    stamp,
    work_values,
)
from skyward_core.ledger.uses import settle_uses
from skyward_core.machines.owner import Owner
from skyward_core.work import NO_WORK, Work

_MAY_SPEND = POOLS.c.condemned_microseconds.is_(None) & POOLS.c.ended_microseconds.is_(None)


class Pools:
    """The rows of pools, and of the attempts to rent machines for them."""

    _database: Database

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
        name: str = "",
        run_limit_usd: Decimal | None = None,
    ) -> PoolEntry:
        """Record a pool before anything is requested for it. Raises LedgerConflict if the id is taken.

        `work` is that to which the pool belongs. With a `name` and without a work it belongs to nobody.
        `run_limit_usd` limits the cost of all pools whose work has the same system, workflow and run, in USD: the
        pool draws on an account that they share, with each of its reservations. The newest limit counts. Raises
        BadRequest if the work names no run. Raises LedgerError if another release has migrated the ledger meanwhile.
        """
        values: dict[str, Any] = {
            "id": pool_id,
            "owner_user": owner.user,
            "owner_host": owner.host,
            "owner_process": owner.process,
            "provider_json": provider_text(pool_id, provider),
            "spec_json": spec_json,
            "account": account,
            "created_microseconds": stamp(self._database.clock()),
            "lease_expires_microseconds": stamp(lease_expires_at),
            "lives_by_lease": False,
            "name": name,
            **self._database.lease_clock().values(),
            **work_values(work),
        }
        with self._database.write() as connection:
            must_be_newest(connection)
            if connection.execute(select(POOLS.c.id).where(POOLS.c.id == pool_id)).first() is not None:
                raise LedgerConflict(f"The ledger already has a pool {pool_id!r}. Use a new id.")
            if run_limit_usd is not None:
                values["run_account"] = share_limit(connection, work, run_limit_usd)
            return pool_of(connection.execute(insert(POOLS).values(values).returning(*POOLS.c)).mappings().one())

    def turn_to(self, pool_id: str, provider: Mapping[str, Any], provider_account: str) -> None:
        """Record the provider and account of a pool from now on.

        All machines at an earlier provider must be known to be gone.
        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown.
        """
        values = {"provider_json": provider_text(pool_id, provider), "provider_account": provider_account}
        with self._database.write() as connection:
            wanted = update(POOLS).where(POOLS.c.id == pool_id, _MAY_SPEND)
            if connection.execute(wanted.values(values)).rowcount == 0:
                must_live(connection, pool_id)

    def renew(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Move the end of a pool's lease, never to an earlier time.

        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown. Changes one row.
        """
        self._lengthen(pool_id, lease_expires_at)

    def live_by_lease(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Let a pool outlive its owner until its lease runs out; as `renew` otherwise."""
        self._lengthen(pool_id, lease_expires_at, lives_by_lease=True)

    def _lengthen(self, pool_id: str, lease_expires_at: datetime, **more: bool) -> None:
        later = later_lease(lease_expires_at, self._database.lease_clock())
        with self._database.write() as connection:
            wanted = update(POOLS).where(POOLS.c.id == pool_id, _MAY_SPEND)
            if connection.execute(wanted.values({**later, **more})).rowcount == 0:
                must_live(connection, pool_id)

    def condemn(self, pool_id: str, *, seen: datetime, stopped_by: str = "") -> bool:
        """Condemn one pool, and return whether it is dead; see `condemn_all`. `seen` is its `written_lease`."""
        return pool_id in self.condemn_all({pool_id: seen}, stopped_by=stopped_by)

    def condemn_all(self, seen: Mapping[str, datetime], *, stopped_by: str = "") -> set[str]:
        """Condemn pools, each unless its lease was renewed: `seen` has the ends that were read, as they were written.

        From now on nothing is requested for them. `stopped_by`: who stops them on purpose.
        Returns the ids of those that are dead: condemned now or before, or ended. The leases of the others were
        renewed: read them again. Raises LedgerConflict if one is unknown.
        """
        p = POOLS.c
        values: dict[str, Any] = {
            "condemned_microseconds": func.coalesce(p.condemned_microseconds, stamp(self._database.clock()))
        }
        if stopped_by:
            values["stopped_by"] = stopped_by[:NAME_CHARACTERS]
        dead: set[str] = set()
        with self._database.write() as connection:
            for pool_id, lease_expires_at in sorted(seen.items()):
                is_unchanged = (
                    p.lease_expires_microseconds == stamp(lease_expires_at)
                ) | p.condemned_microseconds.is_not(None)
                wanted = update(POOLS).where(p.id == pool_id, p.ended_microseconds.is_(None), is_unchanged)
                is_done = connection.execute(wanted.values(values)).rowcount != 0
                if is_done or known_pool(connection, pool_id).ended_at is not None:
                    dead.add(pool_id)
        return dead

    def end_pool(self, pool_id: str) -> None:
        """Record that one pool has ended; see `end_pools`."""
        self.end_pools([pool_id])

    def end_pools(self, pool_ids: Iterable[str]) -> None:
        """Record that pools have ended; the first time is kept. Their sealed leases are deleted.

        Their open intents stay open. Raises LedgerConflict if one is unknown.
        """
        ended = func.coalesce(POOLS.c.ended_microseconds, stamp(self._database.clock()))
        with self._database.write() as connection:
            for pool_id in sorted(set(pool_ids)):
                if (
                    connection.execute(
                        update(POOLS).where(POOLS.c.id == pool_id).values(ended_microseconds=ended)
                    ).rowcount
                    == 0
                ):
                    raise no_pool(pool_id)
                connection.execute(delete(SEALED_LEASES).where(SEALED_LEASES.c.pool_id == pool_id))
                now = stamp(self._database.now(connection))
                settle_uses(connection, USES.c.pool_id == pool_id, _end_of_machines(connection, pool_id, now))

    def seal_lease(self, pool_id: str, lease_json: str, sealed: str, *, epoch: int | None = None) -> None:
        """Record the newest lease of a pool that outlives its owner, with the keys for it as a sealed text.

        It replaces an earlier one. Raises LeaseLost if the pool was condemned or has ended, and LedgerConflict if it is
        unknown. Raises NotSteward if a named pool has had another steward after this epoch.
        """
        values = {
            "lease_json": lease_json,
            "sealed": sealed,
            "updated_microseconds": stamp(self._database.clock()),
        }
        is_its = SEALED_LEASES.c.pool_id == pool_id
        with self._database.write() as connection:
            must_be_steward(connection, pool_id, epoch)
            must_live(connection, pool_id, is_alone=True)
            if connection.execute(update(SEALED_LEASES).where(is_its).values(values)).rowcount == 0:
                connection.execute(insert(SEALED_LEASES).values(pool_id=pool_id, **values))

    def sealed_lease(self, pool_id: str) -> SealedLease | None:
        """Return the newest lease of a pool with its sealed keys, not verified; None if there is none."""
        with self._database.read() as connection:
            row = connection.execute(select(SEALED_LEASES).where(SEALED_LEASES.c.pool_id == pool_id)).mappings().first()
        return None if row is None else sealed_lease_of(row)

    def pool(self, pool_id: str) -> PoolEntry | None:
        """Return a pool; None if it is unknown."""
        with self._database.read() as connection:
            row = connection.execute(select(POOLS).where(POOLS.c.id == pool_id)).mappings().first()
        return None if row is None else pool_seen(row, self._database.lease_clock())

    def pools(self, *, include_ended: bool = False, unreadable: list[UnreadableRow] | None = None) -> list[PoolEntry]:
        """Return the pools, oldest first.

        Rows that cannot be read are appended to `unreadable`; without that list they raise, as in the other listings.
        """
        with self._database.read() as connection:
            wanted = select_pools(include_ended).order_by(POOLS.c.created_microseconds, POOLS.c.id)
            clock = self._database.lease_clock()
            return read_rows(connection.execute(wanted).mappings(), lambda row: pool_seen(row, clock), unreadable)

    def note_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Record the results of attempts to rent machines."""
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
            with self._database.write() as connection:
                connection.execute(insert(ATTEMPTS), rows)

    def attempts(
        self,
        *,
        pool_id: str | None = None,
        since: datetime | None = None,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[Attempt]:
        """Return attempts to rent machines, oldest first: of one pool, since a time, or all."""
        wanted = select(ATTEMPTS, POOLS.c.spec_json).join(POOLS).order_by(ATTEMPTS.c.at_microseconds, ATTEMPTS.c.id)
        if pool_id is not None:
            wanted = wanted.where(ATTEMPTS.c.pool_id == pool_id)
        if since is not None:
            wanted = wanted.where(ATTEMPTS.c.at_microseconds >= stamp(since))
        with self._database.read() as connection:
            return read_rows(connection.execute(wanted).mappings(), attempt_of, unreadable)


def select_pools(include_ended: bool) -> Select[Any]:
    return select(POOLS) if include_ended else select(POOLS).where(POOLS.c.ended_microseconds.is_(None))


def _end_of_machines(connection: Connection, pool_id: str, now: int) -> int:
    """Return when the last machine of a pool ended, in microseconds since 1970: by its buckets, if that was recorded
    long after it. `now` if one has not ended, or none was rented.
    """
    machines = connection.execute(select(RESOURCES).where(RESOURCES.c.pool_id == pool_id)).mappings().all()
    if any(row["gone_microseconds"] is None for row in machines):
        return now
    ends = [row["intended_microseconds"] + 1000 * sum(row[milliseconds_of(b)] for b in Bucket) for row in machines]
    return min(now, max(ends, default=now))


def must_live(connection: Connection, pool_id: str, *, is_alone: bool = False) -> None:
    """Raise LeaseLost if a pool is condemned or has ended; it cannot be condemned before the transaction ends."""
    entry = known_pool(connection, pool_id, is_alone=is_alone)
    entry.raise_if_stopped()
    if entry.ended_at is not None:
        raise LeaseLost(
            f"Pool {pool_id!r} has ended, at {entry.ended_at:%Y-%m-%d %H:%M:%S} UTC; nothing more is rented for it."
            " Open another."
        )
    if entry.condemned_at is not None:
        raise LeaseLost(
            f"Pool {pool_id!r} was judged dead at {entry.condemned_at:%Y-%m-%d %H:%M:%S} UTC: its lease had run out, or"
            " its owner was dead. Its machines are being terminated. Open another."
        )


def known_pool(connection: Connection, pool_id: str, *, is_alone: bool = False) -> PoolEntry:
    """Return a pool, and lock its row until the transaction ends.

    With `is_alone`, no other transaction can add entries of the pool meanwhile.
    """
    row = (
        connection.execute(select(POOLS).where(POOLS.c.id == pool_id).with_for_update(read=not is_alone))
        .mappings()
        .first()
    )
    if row is None:
        raise no_pool(pool_id)
    return pool_of(row)


def no_pool(pool_id: str) -> LedgerConflict:
    return LedgerConflict(f"The ledger has no pool {pool_id!r}. Is it another ledger than the one it was opened in?")


# ── accounts of runs ──────────────────────────────────────────────────────────────────────────────────────────────────


SCOPE = "run"
"""The one period of such an account."""
NAME_CHARACTERS = 255


def account_of_run(work: Work) -> str:
    """Return the name of the account of a run. Raises BadRequest if the work names none."""
    if not work.run:
        raise BadRequest('a limit for all pools of a run needs the run: work=Work(system="...", run="...")')
    name = f"run {Work(work.system, work.workflow, work.run)}"
    if len(name) <= NAME_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]
    return f"{name[: NAME_CHARACTERS - len(digest) - 1]}#{digest}"


def share_limit(connection: Connection, work: Work, limit_usd: Decimal) -> str:
    """Make the account of a run, or change its limit: the newest pool's counts. Return its name."""
    name, limit = account_of_run(work), micro_usd(limit_usd)
    values = {"name": name, "limit_micro_usd": limit, "period": Period.RUN.value, "is_of_run": True}
    connection.execute(insert_new(connection, ACCOUNTS).values(values))
    is_it = (ACCOUNTS.c.name == name) & ACCOUNTS.c.is_of_run
    connection.execute(update(ACCOUNTS).where(is_it, ACCOUNTS.c.limit_micro_usd != limit).values(limit_micro_usd=limit))
    return name


def run_account_of(connection: Connection, pool_id: str) -> str | None:
    """Return the account of a pool's run; None if it has none, or the pool is unknown. It does not change."""
    found = connection.execute(select(POOLS.c.run_account).where(POOLS.c.id == pool_id)).scalar()
    return cast("str | None", found)


def refusal(limit: int, left: int, amount: int) -> BudgetExceeded:
    """Return the error of a reservation for which the limit of the run, in micro-dollars, is too small.

    It names no account: the limit is a `max_cost`.
    """
    words = f"max_cost={in_usd(limit).normalize():f} is for all pools of the run: {in_usd(left).normalize():f} USD are"
    return BudgetExceeded(f"{words} left, and {in_usd(amount).normalize():f} requested", left_usd=in_usd(left))
