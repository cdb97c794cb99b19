"""The ledger's tables of names and of clients: which pool a name has, and which processes use it.

Each method is one transaction. It locks the row of the name first, then that of the pool (docs/decisions/0028, 0007).
The rules of its decisions are in `names_policy.py`. Times are those of the PostgreSQL server, or of the one machine of
SQLite.

A named pool has one steward: the client that replaces nodes and keeps the money.

    no steward ──`take`──▶ client a, epoch n ──`release`, or `Names.leave`──▶ no steward
                             ├──`close`──▶ a ends the pool: a process that comes waits
                             └──a is dead, or does not renew its row: `take` of another client──▶ client b, epoch n + 1

Writes that only the steward may make name its epoch. The same transaction refuses them when another client has become
the steward (`must_be_steward`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, case, func, insert, select, update

from skyward_core.errors import LeaseLost
from skyward_core.ledger.database import Database
from skyward_core.ledger.lease_clock import NO_CLOCK, LeaseClock
from skyward_core.ledger.names_policy import (
    NOTHING_USED,
    SKEW_SECONDS,
    Activity,
    Claim,
    Client,
    Join,
    NamedPool,
    NameFacts,
    NameState,
    NotSteward,
    Rent,
    Silent,
    Standing,
    Usage,
    decide_claim,
    ended_by,
    is_last,
    may_be_condemned,
    may_be_kept_warm,
    may_come_back,
    silent_clients,
    standing,
    warm_end,
)
from skyward_core.ledger.rows import PoolEntry, UnreadableRow
from skyward_core.ledger.tables import (
    CALLS,
    CLIENTS,
    NAMES,
    POOLS,
    USES,
    client_seen,
    insert_new,
    later_lease,
    name_of,
    name_seen,
    pool_of,
    pool_seen,
    read_rows,
    stamp,
    work_values,
)
from skyward_core.ledger.uses import (
    UseCount,
    begin_warm_time,
    cover_held_by,
    end_warm_time,
    lock_uses,
    note_uses,
    settle_uses,
)
from skyward_core.machines.owner import Owner
from skyward_core.work import NO_WORK, Work


class Names:
    """The rows of names, and of the clients of named pools."""

    def __init__(self, database: Database) -> None:
        """Use this database."""
        self._database = database
        self._skew = SKEW_SECONDS if database.has_server_clock else 0.0
        """For how long the lease of a pool counts beyond its end: it is written by the clocks of machines."""

    def now(self) -> datetime:
        """Return the time by which the rows are written and judged."""
        if not self._database.has_server_clock:
            return self._database.clock()
        with self._database.read() as connection:
            return self._database.now(connection)

    # ── open ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(
        self,
        name: str,
        pool_id: str,
        client_id: str,
        *,
        owner: Owner,
        terms: Mapping[str, Any],
        keep_warm_seconds: float,
        lease_seconds: float,
        work: Work = NO_WORK,
        dead: Collection[Silent] = (),
    ) -> Claim:
        """Decide what a process that opens a name does, and record it. `dead` is that of `decide_claim`.

        After `Rent` the name belongs to `pool_id`, and this client is its steward. After `Join` it is a client of the
        pool of the row. `Wait`, `Refused` and `LookAgain` change nothing.
        """
        with self._database.write() as connection:
            facts = self._facts(connection, name)
            claim = decide_claim(facts, terms, dead)
            if isinstance(claim, Rent):
                self._take_over(connection, name, claim, pool_id, client_id, terms, keep_warm_seconds)
                self._insert_client(connection, client_id, pool_id, owner, lease_seconds, work)
            elif isinstance(claim, Join):
                self._insert_client(connection, client_id, claim.row.pool_id, owner, lease_seconds, work)
                # the lease of a warm pool ends with the warm time, perhaps before the first renewal
                if claim.row.state is NameState.WARM:
                    lease_end = self._database.clock() + timedelta(seconds=lease_seconds)
                    later = later_lease(lease_end, self._database.lease_clock())
                    connection.execute(update(POOLS).where(POOLS.c.id == claim.row.pool_id).values(later))
                self._set(connection, name, state=NameState.IN_USE.value, warm_until_microseconds=None)
                end_warm_time(connection, claim.row.pool_id, stamp(self._database.now(connection)))
            return claim

    def opened(self, name: str, epoch: int) -> None:
        """Let other processes use the pool. Raises LeaseLost if the name has another pool, or another steward, or if
        the pool is being ended, because it has reached a limit.
        """
        may_be = (NameState.OPENING.value, NameState.IN_USE.value)
        with self._database.write() as connection:
            wanted = update(NAMES).where(NAMES.c.name == name, NAMES.c.epoch == epoch, NAMES.c.state.in_(may_be))
            if connection.execute(wanted.values(state=NameState.IN_USE.value)).rowcount == 0:
                raise LeaseLost(
                    f"the name {name!r} has another pool or another steward now, because this process was silent for"
                    " too long; or the pool is being ended, because it has reached a limit. Open the pool again"
                )

    def _take_over(
        self,
        connection: Connection,
        name: str,
        claim: Rent,
        pool_id: str,
        client_id: str,
        terms: Mapping[str, Any],
        keep_warm_seconds: float,
    ) -> None:
        if claim.dead_pool:
            condemned = func.coalesce(POOLS.c.condemned_microseconds, self._database.stamp_after(0.0))
            connection.execute(
                update(POOLS).where(POOLS.c.id == claim.dead_pool).values(condemned_microseconds=condemned)
            )
        self._set(
            connection,
            name,
            pool_id=pool_id,
            terms_json=json.dumps(dict(terms), sort_keys=True),
            state=NameState.OPENING.value,
            steward=client_id,
            epoch=claim.epoch,
            keep_warm_milliseconds=round(keep_warm_seconds * 1000),
            warm_until_microseconds=None,
        )

    # ── in use ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def renew(self, client_id: str, lease_seconds: float, used: Usage = NOTHING_USED) -> None:
        """Extend the lease of a client, and record what it has of the pool.

        Raises LeaseLost if it has left, or is not known.
        """
        end = self._database.stamp_after(lease_seconds)
        values = {"lease_expires_microseconds": end, **self._clock().values(), **self._used(used)}
        with self._database.write() as connection:
            wanted = update(CLIENTS).where(CLIENTS.c.id == client_id, CLIENTS.c.left_microseconds.is_(None))
            if connection.execute(wanted.values(values)).rowcount == 0:
                raise LeaseLost(f"client {client_id} does not use its pool any more: open the pool again")

    def keep_warm(self, name: str, pool_id: str, seconds: float) -> NamedPool | None:
        """Let a warm pool stay for so many seconds from now, never shorter than before; a pool in use gets them for the
        time when its last client has left.

        Return the changed row. None, and nothing is changed: the name has another pool, or its pool is being closed, is
        condemned or has ended, or its warm time is over.
        """
        with self._database.write() as connection:
            facts = self._facts(connection, name)
            if facts is None or facts.row.pool_id != pool_id or not may_be_kept_warm(facts):
                return None
            if facts.row.state is NameState.WARM:
                until = facts.now + timedelta(seconds=seconds)
                until = until if facts.row.warm_until is None else max(until, facts.row.warm_until)
                self._set_warm(connection, name, until)
                later = later_lease(until - facts.now + self._database.clock(), self._database.lease_clock())
                connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(later))
            else:
                self._set(connection, name, keep_warm_milliseconds=round(seconds * 1000))
            row = connection.execute(select(NAMES).where(NAMES.c.name == name)).mappings().one()
        return name_seen(row, self._clock())

    def note_topic(self, client_id: str, topic: str) -> None:
        """Record by what the pool's scheduler knows a client, before its first call."""
        with self._database.write() as connection:
            connection.execute(update(CLIENTS).where(CLIENTS.c.id == client_id).values(topic=topic))

    def ended_by(self, name: str, client_id: str) -> list[Client]:
        """Return the clients whose calls this one has to end (`names_policy.ended_by`)."""
        with self._database.write() as connection:
            facts = self._facts(connection, name)
            own = None if facts is None else next((one for one in facts.clients if one.id == client_id), None)
            return [] if facts is None or own is None else ended_by(own, facts)

    def silent(self, name: str, client_id: str) -> list[Client]:
        """Return the other clients of a pool that are silent (`names_policy.silent_clients`). It may change at once."""
        with self._database.read() as connection:
            facts = self._facts(connection, name, is_locked=False)
            own = None if facts is None else next((one for one in facts.clients if one.id == client_id), None)
            return [] if facts is None or own is None else silent_clients(own, facts)

    def ended(self, client_id: str, counts: Mapping[str, UseCount]) -> None:
        """Record that the calls of a client were ended now: it uses its pool no more, and its uses are settled.

        `counts` has what the nodes say of its uses. The others have what they had when they were noted last, and as an
        estimate the slots that they held then until now.
        """
        with self._database.write() as connection:
            now = stamp(self._database.now(connection))
            self._end_client(connection, client_id, None)
            lock_uses(connection, USES.c.client_id == client_id)
            note_uses(connection, counts, now, is_final=True)
            settle_uses(connection, USES.c.client_id == client_id, now)
            cover_held_by(connection, counts.keys(), now)

    # ── leave ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_last(self, name: str, client_id: str) -> bool:
        """Return whether no other client uses the pool of a name. It may change at once."""
        with self._database.read() as connection:
            facts = self._facts(connection, name, is_locked=False)
            return facts is None or is_last(facts, client_id)

    def in_doubt(self, name: str, client_id: str) -> frozenset[Silent]:
        """Return the other clients of a pool of which it is in doubt whether they live (`NameFacts.in_doubt`)."""
        with self._database.read() as connection:
            facts = self._facts(connection, name, is_locked=False)
            silent = frozenset[Silent]() if facts is None else facts.in_doubt()
            return frozenset(one for one in silent if one[0] != client_id)

    def may_come_back(self, name: str, client_id: str, silent_seconds: float) -> bool:
        """Return whether no other client uses the pool of a name, but one may renew its row again: the ledger was out
        of reach of this client, and so perhaps of all, for so many seconds until now.
        """
        with self._database.read() as connection:
            facts = self._facts(connection, name, is_locked=False)
            return facts is not None and may_come_back(facts, client_id, silent_seconds)

    def leave(
        self,
        name: str,
        client_id: str,
        used: Usage = NOTHING_USED,
        *,
        may_be_warm: bool = True,
        warm_seconds: float = math.inf,
    ) -> NameState | None:
        """Record that a client leaves; return what the pool is now.

        IN_USE: others use it. WARM: none does, and it stays for `keep_warm` seconds, unless `may_be_warm` is false. It
        stays for less if one of its limits ends it, or if its nodes are paid for `warm_seconds` only.
        CLOSING: none does, and the caller must end it; it stays the steward until the pool has ended. None: the name
        has another pool, or the client had left before.
        """
        with self._database.write() as connection:
            facts = self._facts(connection, name)
            if facts is None or all(client.id != client_id or client.left_at for client in facts.clients):
                return None
            row = facts.row
            if not is_last(facts, client_id):
                self._end_client(connection, client_id, used)
                if row.steward == client_id:  # with CLOSING it was already leaving when it reached a limit
                    self._set(connection, name, state=NameState.IN_USE.value, steward="")
                return NameState.IN_USE
            if may_be_warm and row.keep_warm_seconds and row.state in {NameState.IN_USE, NameState.WARM}:
                self._end_client(connection, client_id, used)
                self._set(connection, name, state=NameState.WARM.value, steward="")
                until = warm_end(facts, warm_seconds)
                self._set_warm(connection, name, until)
                self._end_lease(connection, row.pool_id, until - facts.now)
                begin_warm_time(connection, row.pool_id, stamp(facts.now))
                return NameState.WARM
            # the client stays until the pool has ended: its life shows that the pool is being closed. In place of a
            # steward that is silent it has the next term, so that the silent one rents nothing more when it goes on
            epoch = row.epoch + (row.steward != client_id)
            self._set(connection, name, state=NameState.CLOSING.value, steward=client_id, epoch=epoch)
            spent = update(CLIENTS).where(CLIENTS.c.id == client_id)
            connection.execute(spent.values(self._used(used)))
            return NameState.CLOSING

    def closed(self, client_id: str, used: Usage = NOTHING_USED) -> None:
        """Record that a client has left, also one that had to end the pool, with its last time. Idempotent."""
        with self._database.write() as connection:
            self._end_client(connection, client_id, used)

    def leave_unfinished(self, name: str, client_id: str, used: Usage = NOTHING_USED) -> None:
        """Record that a client does not use the pool any more, although it could not leave it. Idempotent. If it was
        the steward, the pool has none from now on: the next process that opens it does not wait until the client's
        lease expires.
        """
        with self._database.write() as connection:
            connection.execute(
                update(NAMES).where(NAMES.c.name == name, NAMES.c.steward == client_id).values(steward="")
            )
            self._end_client(connection, client_id, used)

    def report_unreachable(self, name: str, pool_id: str, client_id: str) -> bool:
        """Record that a client could not reach the pool; return whether the pool is condemned (`may_be_condemned`).

        A name that has got another pool meanwhile counts as condemned: claim it again.
        """
        with self._database.write() as connection:
            facts = self._facts(connection, name)
            self._end_client(connection, client_id, NOTHING_USED)
            if facts is None or facts.row.pool_id != pool_id:
                return True
            if not may_be_condemned(facts, client_id):
                return False
            condemned = func.coalesce(POOLS.c.condemned_microseconds, self._database.stamp_after(0.0))
            connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(condemned_microseconds=condemned))
            return True

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def named(self, name: str) -> NamedPool | None:
        """Return the row of a name; None if there is none."""
        with self._database.read() as connection:
            row = connection.execute(select(NAMES).where(NAMES.c.name == name)).mappings().first()
        return None if row is None else name_seen(row, self._clock())

    def all_named(self, *, unreadable: list[UnreadableRow] | None = None) -> list[NamedPool]:
        """Return the rows of all names that have or had a pool, by name."""
        wanted = select(NAMES).where(NAMES.c.pool_id != "").order_by(NAMES.c.name)
        with self._database.read() as connection:
            clock = self._clock()
            return read_rows(connection.execute(wanted).mappings(), lambda row: name_seen(row, clock), unreadable)

    def activity(
        self, pool_ids: Collection[str], *, unreadable: list[UnreadableRow] | None = None
    ) -> dict[str, Activity]:
        """Return how these pools with names are used now, by pool id."""
        c = CALLS.c
        detached = select(c.pool_id, func.sum(case((c.ended_microseconds.is_(None), 1), else_=0)).label("calls"))
        detached = detached.add_columns(func.max(c.ended_microseconds).label("ended"))
        with self._database.read() as connection:
            wanted = select(CLIENTS).where(CLIENTS.c.pool_id.in_(pool_ids))
            clock = self._clock()
            rows = connection.execute(wanted).mappings()
            clients = read_rows(rows, lambda row: client_seen(row, clock), unreadable)
            grouped = detached.where(c.pool_id.in_(pool_ids)).group_by(c.pool_id)
            calls = {row.pool_id: (int(row.calls), row.ended) for row in connection.execute(grouped)}
            now = self._database.now(connection)
        return {
            pool_id: _activity(
                [client for client in clients if client.pool_id == pool_id], *calls.get(pool_id, (0, None)), now
            )
            for pool_id in pool_ids
        }

    def clients(self, pool_id: str) -> list[Client]:
        """Return the clients of a pool, also those that have left, in the order in which they came."""
        with self._database.read() as connection:
            return _clients(connection, pool_id, self._clock())

    # ── parts of a transaction ───────────────────────────────────────────────────────────────────────────────────────

    def _facts(self, connection: Connection, name: str, *, is_locked: bool = True) -> NameFacts | None:
        """Return what is known of a name; None: it has no pool.

        `is_locked`: lock the row of the name, which is made if there is none. Without it, nothing is written, and what
        is known may change at once: a hundred processes that leave a pool do not wait for each other to ask.
        """
        wanted = select(NAMES).where(NAMES.c.name == name)
        if is_locked:
            _insert_name(connection, name)
            wanted = wanted.with_for_update()
        row = connection.execute(wanted).mappings().first()
        if row is None or not row["pool_id"]:
            return None
        clock = self._clock()
        named = name_seen(row, clock)
        found = connection.execute(select(POOLS).where(POOLS.c.id == named.pool_id)).mappings().first()
        clients = _clients(connection, named.pool_id, clock)
        states = {client.owner: client.owner.state() for client in clients}
        now = self._database.now(connection)
        pool = None if found is None else self._pool(found, now)
        machine_now = self._database.clock() if self._database.has_server_clock else None
        return NameFacts(named, pool, clients, now, states, self._skew, machine_now)

    def _clock(self) -> LeaseClock:
        """Return the clock beside the times of names and clients; a server's time needs none."""
        return NO_CLOCK if self._database.has_server_clock else self._database.lease_clock()

    def _pool(self, row: Mapping[Any, Any], now: datetime) -> PoolEntry:
        """Return the pool of a row, with its lease by the clock that judges the name."""
        entry = pool_seen(row, self._database.lease_clock())
        if entry.lease_shift is None or not self._database.has_server_clock:
            return entry
        return replace(entry, lease_expires_at=entry.lease_expires_at - self._database.clock() + now)

    def _set_warm(self, connection: Connection, name: str, until: datetime) -> None:
        self._set(connection, name, warm_until_microseconds=stamp(until), **self._clock().values("warm"))

    def _end_lease(self, connection: Connection, pool_id: str, left: timedelta) -> None:
        """Let the lease of a pool that no client uses end in this time, also if that is earlier than before."""
        end = {"lease_expires_microseconds": stamp(self._database.clock() + left)}
        values = {**end, **self._database.lease_clock().values()}
        connection.execute(update(POOLS).where(POOLS.c.id == pool_id).values(values))

    def _insert_client(
        self, connection: Connection, client_id: str, pool_id: str, owner: Owner, lease_seconds: float, work: Work
    ) -> None:
        now = self._database.now(connection)
        values = {
            "id": client_id,
            "pool_id": pool_id,
            "owner_user": owner.user,
            "owner_host": owner.host,
            "owner_process": owner.process,
            "joined_microseconds": stamp(now),
            "lease_expires_microseconds": stamp(now + timedelta(seconds=lease_seconds)),
            **self._clock().values(),
            **work_values(work),
        }
        connection.execute(insert(CLIENTS).values(values))

    def _end_client(self, connection: Connection, client_id: str, used: Usage | None) -> None:
        left = func.coalesce(CLIENTS.c.left_microseconds, self._database.stamp_after(0.0))
        values = {**({} if used is None else self._used(used)), "left_microseconds": left, "calls": 0}
        connection.execute(update(CLIENTS).where(CLIENTS.c.id == client_id).values(values))

    def _used(self, used: Usage) -> dict[str, Any]:
        values: dict[str, Any] = {"calls": used.calls}
        if used.idle_seconds is not None:
            values["busy_microseconds"] = self._database.stamp_after(-used.idle_seconds)
        return values

    def _set(self, connection: Connection, name: str, **values: Any) -> None:
        connection.execute(update(NAMES).where(NAMES.c.name == name).values(values))


def _activity(clients: Sequence[Client], detached: int, ended: int | None, now: datetime) -> Activity:
    """Return the use of one pool. `detached` is how many detached calls run or wait, `ended` when the last one ended,
    in microseconds.
    """
    living = [client for client in clients if client.lives(now, client.owner.state())]
    calls = detached + sum(client.calls for client in living)
    times = [moment for client in clients for moment in (client.joined_at, client.busy_at) if moment is not None]
    if ended is not None:
        times.append(datetime.fromtimestamp(ended / 1_000_000, UTC))
    return Activity(len(living), calls, max(times, default=None) if not calls else None)


def _clients(connection: Connection, pool_id: str, clock: LeaseClock) -> list[Client]:
    wanted = select(CLIENTS).where(CLIENTS.c.pool_id == pool_id).order_by(CLIENTS.c.joined_microseconds, CLIENTS.c.id)
    return [client_seen(row, clock) for row in connection.execute(wanted).mappings()]


def _insert_name(connection: Connection, name: str) -> None:
    """Make the row of a name, unless there is one: only a row can be locked."""
    connection.execute(insert_new(connection, NAMES).values(name=name))


# ── stewards ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Stewards:
    """The stewards of named pools. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        """Use this database."""
        self._database = database

    def look(self, name: str, client_id: str) -> tuple[Standing, int]:
        """Return what a client is to the steward of its pool, and the steward's epoch. It may change at once."""
        with self._database.read() as connection:
            facts = self._facts(connection, name, client_id)
        return standing(facts, client_id), 0 if facts is None else facts.row.epoch

    def take(self, name: str, client_id: str) -> int | None:
        """Make a client the steward, if the pool has none that lives; return its epoch. None: it is not the steward.

        For a client that is the steward already nothing changes.
        """
        with self._database.write() as connection:
            facts = self._facts(connection, name, client_id, is_locked=True)
            found = standing(facts, client_id)
            if facts is None or found not in {Standing.HELD, Standing.VACANT}:
                return None
            if found is Standing.HELD:
                return facts.row.epoch
            epoch = facts.row.epoch + 1
            connection.execute(update(NAMES).where(NAMES.c.name == name).values(steward=client_id, epoch=epoch))
            return epoch

    def close(self, name: str, client_id: str, epoch: int) -> None:
        """Record that the steward of this epoch ends the pool. Processes that open it wait for the end, and then rent
        new machines.

        Raises NotSteward, and changes nothing, if this client is not that steward any more.
        """
        is_its = (NAMES.c.name == name) & (NAMES.c.steward == client_id) & (NAMES.c.epoch == epoch)
        with self._database.write() as connection:
            ending = update(NAMES).where(is_its).values(state=NameState.CLOSING.value)
            if connection.execute(ending).rowcount == 0:
                raise NotSteward(f"another process keeps the pool {name!r} now, and decides about its end")

    def release(self, name: str, client_id: str, epoch: int) -> None:
        """Let another client become the steward. Changes nothing if this one is not the steward of this epoch."""
        is_its = (NAMES.c.name == name) & (NAMES.c.steward == client_id) & (NAMES.c.epoch == epoch)
        with self._database.write() as connection:
            connection.execute(update(NAMES).where(is_its).values(steward=""))

    def _facts(self, connection: Connection, name: str, client_id: str, *, is_locked: bool = False) -> NameFacts | None:
        """Return what is known of a name, with this client and the steward only; None if the name has no pool.

        The steward's row is locked too: a steward that renews it at this moment waits, and then sees its successor.
        """
        wanted = select(NAMES).where(NAMES.c.name == name)
        row = connection.execute(wanted.with_for_update() if is_locked else wanted).mappings().first()
        if row is None or not row["pool_id"]:
            return None
        named = name_of(row)
        pool = connection.execute(select(POOLS).where(POOLS.c.id == named.pool_id)).mappings().first()
        both = select(CLIENTS).where(CLIENTS.c.id.in_([client_id, named.steward])).order_by(CLIENTS.c.id)
        rows = connection.execute(both.with_for_update() if is_locked else both).mappings()
        clock = self._database.lease_clock()
        clients = [client_seen(client, clock) for client in rows]
        states = {client.owner: client.owner.state() for client in clients}
        now = self._database.now(connection)
        return NameFacts(named, None if pool is None else pool_of(pool), clients, now, states)


def must_be_steward(connection: Connection, pool_id: str, epoch: int | None) -> None:
    """Raise NotSteward if the pool has had another steward after this epoch. None: the pool has no name."""
    if epoch is None:
        return
    now = connection.execute(
        select(NAMES.c.epoch).where(NAMES.c.pool_id == pool_id).with_for_update(read=True)
    ).scalar()
    if now != epoch:
        raise NotSteward(
            f"another process keeps pool {pool_id!r} now: this one was silent for too long. Its calls go on, but it"
            " rents nothing more for the pool"
        )
