"""The ledger's bills: cost rows, shares of costs, pruning (a part of `Ledger`).

The cost of a pool is borne by the works of its uses, detached calls and recorded shares, and for the rest by the work
to which the pool belongs. The rest is what no call has held: start, idle and warm time, end, rounding. A pool to which
its user has given a name belongs to nobody: its rest is a part of its own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Table,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    not_,
    or_,
    select,
    update,
)

from skyward_core.errors import ZERO_USD
from skyward_core.ledger.database import NUMBERS_PER_STATEMENT, Database
from skyward_core.ledger.pools import select_pools
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    PRUNED_SPEC,
    SECONDS_PER_HOUR,
    Bucket,
    CostBy,
    CostPart,
    CostRow,
    PoolEntry,
    PoolRow,
    Pruned,
    UnreadableRow,
)
from skyward_core.ledger.tables import (
    ATTEMPTS,
    CALLS,
    CLIENTS,
    COST,
    IS_OPEN,
    MILLISECONDS,
    NOT_BILLABLE,
    ON_DEMAND,
    POOLS,
    RESERVATIONS,
    RESOURCES,
    SHARES,
    USES,
    WORK_COLUMNS,
    in_usd,
    is_billable,
    milliseconds_of,
    pool_seen,
    read_rows,
    stamp,
    total_milliseconds,
    whole_number,
    work_of,
    work_values,
)
from skyward_core.ledger.uses import ESTIMATED_MICRO_USD, select_uses
from skyward_core.providers.base import LAUNCH_TAG, RANK_TAG, TYPE_TAG
from skyward_core.work import NO_WORK, Work, of_system

_DAY_MICROSECONDS = 86_400_000_000
POOLS_PER_PRUNING = 100
"""How many pools one transaction prunes: others cannot write meanwhile, for some tens of milliseconds."""


class Bills:
    """What pools and resources cost, what their costs are for, and the pruning of old details."""

    _database: Database

    def pool_rows(
        self, *, include_ended: bool = False, limit: int | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[PoolRow]:
        """Return the pools with what each has cost so far, oldest first; with `limit` only so many of the newest."""
        newest = (
            select_pools(include_ended).order_by(POOLS.c.created_microseconds.desc(), POOLS.c.id.desc()).limit(limit)
        )
        r = RESOURCES.c
        with self._database.read() as connection:
            clock, billable = self._database.lease_clock(), is_billable(connection)
            amounts = (func.sum(case((billable, amount), else_=0)) for amount in (MILLISECONDS, COST, ON_DEMAND))
            sums = select(r.pool_id, func.sum(case((IS_OPEN, 1), else_=0)), func.count(), *amounts)
            # without a limit all resources are needed, and a list of 5,000 ids costs more time than it saves
            if limit is not None or not include_ended:
                sums = sums.where(r.pool_id.in_(newest.with_only_columns(POOLS.c.id)))
            entries = read_rows(connection.execute(newest).mappings(), lambda row: pool_seen(row, clock), unreadable)
            rows = connection.execute(sums.group_by(r.pool_id))
            by_pool = {pool_id: tuple(map(whole_number, numbers)) for pool_id, *numbers in rows}
        return [_pool_row(entry, *by_pool.get(entry.id, (0, 0, 0, 0, 0))) for entry in reversed(entries)]

    def cost_rows(
        self,
        by: CostBy = CostBy.POOL,
        *,
        pool_id: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        work: Work = NO_WORK,
        split: bool = False,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[CostRow]:
        """Return the bill, added up by `by`.

        It is the bill of all pools, one pool, intents from `since` until before `until`, or pools for this work.
        A pool is for `work` if the work to which it belongs, of one of its uses, detached calls or shares, has the same
        text in each field that is not empty in `work`. By bucket there is one more row, `BILLING_ROUNDING`. By run,
        task, asset, partition and owner, uses and detached calls count for their works (`_work_rows`), and so do the
        shares that pruning and earlier releases have left. The rest of the cost, and the number of resources, count for
        the work to which the pool belongs; of a pool that belongs to nobody they are a row of their own, `pool NAME`,
        unless `split` divides the rest among the others in proportion to their costs. With `work`, only the parts for
        it count in these bills, and by pool; otherwise the sum of the rows does not depend on `by`. Of intents in a
        time, a part of their pool counts in proportion to their cost. Machines whose rows are damaged are left out:
        they are appended to `unreadable`; without that list the first one is raised.
        """
        conditions: list[ColumnElement[bool]] = []
        if pool_id is not None:
            conditions.append(RESOURCES.c.pool_id == pool_id)
        if since is not None:
            conditions.append(RESOURCES.c.intended_microseconds >= stamp(since))
        if until is not None:
            conditions.append(RESOURCES.c.intended_microseconds < stamp(until))
        if work != NO_WORK:
            conditions.append(_pools_for(work))
        with self._database.snapshot(), self._database.read() as connection:
            damaged = _not_billable(connection, conditions)
            if unreadable is None and damaged:
                raise damaged[0]
            if unreadable is not None:
                unreadable += damaged
            conditions.append(is_billable(connection))
            which = _Which(conditions, is_whole=since is None and until is None)
            if by is CostBy.OWNER and work == NO_WORK:
                return _owner_rows(connection, which, split=split)
            if by in _KEYS or (by is CostBy.POOL and work != NO_WORK):
                return _work_rows(connection, by, which, work, split=split)
            if by is CostBy.BUCKET:
                return _bucket_rows(connection, which)
            key = _cost_keys()[by]
            if by is CostBy.RESOURCE:
                # sums over single rows would take more time
                wanted = select(key, literal(1), MILLISECONDS, COST, ON_DEMAND).where(*conditions)
            else:
                sums = select(key, func.count(), func.sum(MILLISECONDS), func.sum(COST), func.sum(ON_DEMAND))
                wanted = sums.where(*conditions).group_by(key)
            return [_cost_row(by, *row) for row in connection.execute(wanted.order_by(key))]

    def cost_parts(self, work: Work, ended_between: tuple[datetime, datetime] | None = None) -> list[CostPart]:
        """Return the parts of the cost of pools that are for a work: one for each pool, and each work that has the same
        text in all fields that are not empty in `work`. Their sum is that of `cost_rows(work=work)`. With
        `ended_between` only pools count that have ended in that time.
        """
        conditions = [_pools_for(work)]
        if ended_between is not None:
            first, last = map(stamp, ended_between)
            ended = POOLS.c.ended_microseconds.between(first, last)
            conditions.append(RESOURCES.c.pool_id.in_(select(POOLS.c.id).where(ended)))
        totals: dict[tuple[str, Work, str], list[int]] = defaultdict(lambda: [0, 0])
        still_grow: set[tuple[str, Work, str]] = set()
        with self._database.snapshot(), self._database.read() as connection:
            conditions.append(is_billable(connection))
            for pool_id, bearer, resources, (_, cost, on_demand) in _parts(connection, _Which(conditions)):
                key = pool_id, bearer.work, bearer.pool
                if is_for(bearer.work, work):
                    _add(totals[key], cost, on_demand)
                if resources:  # the rest of a pool, which grows until its end
                    still_grow.add(key)
            pool_ids = sorted({pool_id for pool_id, *_ in totals})
            closed = _closed(connection, pool_ids)
            still_grow |= _with_open_calls(connection, pool_ids)
        return [
            CostPart(key[0], key[1], in_usd(cost), in_usd(on_demand), key[0] in closed or key not in still_grow, key[2])
            for key, (cost, on_demand) in totals.items()
        ]

    def pool_cost_usd(self, pool_id: str) -> Decimal:
        """Return the bill of a pool so far, or in all, in USD. Machines whose rows are damaged are left out."""
        return sum((row.cost_usd for row in self.cost_rows(CostBy.POOL, pool_id=pool_id, unreadable=[])), ZERO_USD)

    def held_parts(self, pool_id: str) -> list[HeldPart]:
        """Return the parts of a pool's bill for each of its uses, and for the detached calls of each owner and work."""
        with self._database.snapshot(), self._database.read() as connection:
            its = _recorded_of(connection, select(POOLS.c.id).where(POOLS.c.id == pool_id)).get(pool_id)
            bill = _bills(connection, RESOURCES.c.pool_id == pool_id).get(pool_id, 0)
        if its is None:
            return []
        shares, held = _disjoint(its)
        costs = split_bill(bill, [*shares, *held])[len(shares) :]
        return [
            HeldPart(one.key, in_usd(cost), in_usd(max(0, cost - one.micro_usd)))
            for one, cost in zip(held, costs, strict=True)
        ]

    def prune(self, ended_before: datetime, *, is_dry_run: bool = True) -> Pruned:
        """Delete the details of pools that ended before `ended_before` and have no open entries. Idempotent.

        Each POOLS_PER_PRUNING pools have their own transaction: a killed one is gone on with by the next call.
        Details are specs, attempts to rent machines, tags of machines, settled reservations and detached calls. The
        cost of each machine and the spending of accounts stay: bills, receipts and budgets show the same as before.
        """
        p, r = POOLS.c, RESERVATIONS.c
        is_closed = (p.ended_microseconds < stamp(ended_before)) & (p.spec_json != PRUNED_SPEC)
        is_open = p.id.in_(select(RESOURCES.c.pool_id).where(IS_OPEN)) | p.id.in_(
            select(r.pool_id).where(r.settled_microseconds.is_(None))
        )
        old = select(p.id).where(is_closed, not_(is_open)).order_by(p.id)
        with self._database.read() as connection:
            pools = list(connection.execute(old).scalars())
        pruned = Pruned(0, 0, 0)
        size = NUMBERS_PER_STATEMENT if is_dry_run else POOLS_PER_PRUNING
        for start in range(0, len(pools), size):
            some = pools[start : start + size]
            with self._database.read() if is_dry_run else self._database.write() as connection:
                if not is_dry_run:
                    some = list(connection.execute(old.where(p.id.in_(some)).with_for_update()).scalars())
                pruned = _added(pruned, _details(connection, some))
                if not is_dry_run:
                    _keep_parts(connection, some)
                    _delete_details(connection, some)
        return pruned


def _pool_row(
    entry: PoolEntry, open_resources: int, resources: int, milliseconds: int, cost: int, on_demand: int
) -> PoolRow:
    return PoolRow(entry, open_resources, resources, milliseconds / 1000, in_usd(cost), in_usd(on_demand))


def _details(connection: Connection, pool_ids: Sequence[str]) -> Pruned:
    """Return how many details these pools have."""
    attempts, reservations, calls = (
        int(connection.execute(select(func.count()).where(table.c.pool_id.in_(pool_ids))).scalar_one())
        for table in (ATTEMPTS, RESERVATIONS, CALLS)
    )
    return Pruned(len(pool_ids), attempts, reservations, calls)


def _added(first: Pruned, second: Pruned) -> Pruned:
    return Pruned(
        first.pools + second.pools,
        first.attempts + second.attempts,
        first.reservations + second.reservations,
        first.calls + second.calls,
    )


def _keep_parts(connection: Connection, pool_ids: Sequence[str]) -> None:
    """Make shares of the parts of a cost that the rows of uses and of detached calls decide."""
    recorded = _recorded_of(connection, select(POOLS.c.id).where(POOLS.c.id.in_(pool_ids)))
    bills = _bills(connection, RESOURCES.c.pool_id.in_(pool_ids))
    rows = [
        {"pool_id": pool_id, "micro_usd": micro_usd, "owner": bearer.owner, **work_values(bearer.work)}
        for pool_id, its in sorted(recorded.items())
        for bearer, micro_usd in parts_of(its, bills.get(pool_id, 0))[len(its.shares) :]
    ]
    if rows:
        connection.execute(insert(SHARES), rows)


def _delete_details(connection: Connection, pool_ids: Sequence[str]) -> None:
    connection.execute(delete(ATTEMPTS).where(ATTEMPTS.c.pool_id.in_(pool_ids)))
    connection.execute(delete(RESERVATIONS).where(RESERVATIONS.c.pool_id.in_(pool_ids)))
    connection.execute(delete(CALLS).where(CALLS.c.pool_id.in_(pool_ids)))
    connection.execute(delete(CLIENTS).where(CLIENTS.c.pool_id.in_(pool_ids)))
    connection.execute(delete(USES).where(USES.c.pool_id.in_(pool_ids)))
    rows = connection.execute(
        select(RESOURCES.c.id, RESOURCES.c.tags_json).where(RESOURCES.c.pool_id.in_(pool_ids))
    ).all()
    if slim := [{"number": number, "tags": _slim(tags)} for number, tags in rows]:
        connection.execute(
            update(RESOURCES).where(RESOURCES.c.id == bindparam("number")).values(tags_json=bindparam("tags")), slim
        )
    connection.execute(update(POOLS).where(POOLS.c.id.in_(pool_ids)).values(spec_json=PRUNED_SPEC))


def _slim(tags_json: str) -> str:
    """Keep only the tags that a receipt shows, and those that identify the machine if it is listed again."""
    try:
        return json.dumps(
            {name: value for name, value in json.loads(tags_json).items() if name in (TYPE_TAG, LAUNCH_TAG, RANK_TAG)},
            sort_keys=True,
        )
    except (ValueError, AttributeError):  # a damaged row stays as it is
        return tags_json


# ── rows that cannot be billed ────────────────────────────────────────────────────────────────────────────────────────


def _not_billable(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> list[UnreadableRow]:
    """Return the rows of RESOURCES from which no cost can be computed."""
    damaged = select(RESOURCES).where(*conditions, not_(is_billable(connection))).order_by(RESOURCES.c.id)
    return [
        UnreadableRow(RESOURCES.name, row["id"], str(row["pool_id"]), NOT_BILLABLE)
        for row in connection.execute(damaged).mappings()
    ]


def _cost_keys() -> Mapping[CostBy, ColumnElement[Any]]:
    return {
        CostBy.RESOURCE: RESOURCES.c.id,
        CostBy.POOL: RESOURCES.c.pool_id,
        CostBy.DAY: RESOURCES.c.intended_microseconds // literal(_DAY_MICROSECONDS, BigInteger),
    }


def _cost_row(by: CostBy, key: Any, resources: int, milliseconds: int, cost: int, on_demand: int) -> CostRow:
    return CostRow(
        _day(int(key)) if by is CostBy.DAY else str(key),
        resources,
        int(milliseconds) / 1000,
        in_usd(cost),
        in_usd(on_demand),
    )


def _day(number: int) -> str:
    try:
        return (date(1970, 1, 1) + timedelta(days=number)).isoformat()
    except OverflowError:  # a damaged row
        return f"day {number} after 1970-01-01"


def _in_workflow(work: Work, name: str) -> str:
    return of_system(work.system, f"{work.workflow}/{name}" if work.workflow else name)


_KEYS: Mapping[CostBy, Callable[[Bearer], str]] = {
    CostBy.RUN: lambda one: _in_workflow(one.work, one.work.run) if one.work.run else "(no run)",
    CostBy.TASK: lambda one: _in_workflow(one.work, one.work.task) if one.work.task else "(no task)",
    CostBy.ASSET: lambda one: one.work.asset or "(no asset)",
    CostBy.PARTITION: lambda one: one.work.partition or "(no partition)",
    CostBy.OWNER: lambda one: one.owner,
}


def _is_for(table: Table, work: Work) -> list[ColumnElement[bool]]:
    return [table.c[name] == value for name, value in work_values(work).items() if value]


def _pools_for(work: Work) -> ColumnElement[bool]:
    """Return the condition of the pools that belong to a work, or of whose cost it bears a part."""
    found = (
        select(key).where(*_is_for(table, work))
        for table, key in (
            (POOLS, POOLS.c.id),
            (SHARES, SHARES.c.pool_id),
            (USES, USES.c.pool_id),
            (CALLS, CALLS.c.pool_id),
        )
    )
    return or_(*(RESOURCES.c.pool_id.in_(pools) for pools in found))


@dataclass(frozen=True, slots=True)
class _Which:
    """Which resources count. `is_whole`: all of a pool, or none."""

    conditions: Sequence[ColumnElement[bool]]
    is_whole: bool = True


def _work_rows(connection: Connection, by: CostBy, which: _Which, wanted: Work, *, split: bool) -> list[CostRow]:
    """Add up by who bears the cost, or for one work by pool. Only what is for `wanted` counts."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for pool_id, bearer, resources, amounts in _parts(connection, which, split=split):
        if is_for(bearer.work, wanted):
            key = pool_id if by is CostBy.POOL else f"pool {bearer.pool}" if bearer.pool else _KEYS[by](bearer)
            keys = key.split(", ") if by is CostBy.ASSET and not bearer.pool else [key]
            for number, one in enumerate(keys):
                _add(totals[one], 0 if number else resources, *(_nth_part(its, number, len(keys)) for its in amounts))
    return [_cost_row(by, key, *sums) for key, sums in sorted(totals.items())]


def _nth_part(amount: int, number: int, count: int) -> int:
    """Return one of so many equal parts of an amount; the first one has what cannot be divided."""
    return amount // count + (0 if number else amount % count)


def _owner_rows(connection: Connection, which: _Which, *, split: bool) -> list[CostRow]:
    """Add up by owner: of pools with a name by the processes of their uses; all others, of which a ledger may have very
    many, are wholly for the process that has opened them.
    """
    has_name = RESOURCES.c.pool_id.in_(select(POOLS.c.id).where(POOLS.c.name != ""))
    named = replace(which, conditions=[*which.conditions, has_name])
    found = _work_rows(connection, CostBy.OWNER, named, NO_WORK, split=split)
    owner = POOLS.c.owner_user + "@" + POOLS.c.owner_host
    sums = select(owner, func.count(), func.sum(MILLISECONDS), func.sum(COST), func.sum(ON_DEMAND))
    without = sums.select_from(RESOURCES.join(POOLS, RESOURCES.c.pool_id == POOLS.c.id)).where(
        *which.conditions, POOLS.c.name == ""
    )
    found += [_cost_row(CostBy.OWNER, *row) for row in connection.execute(without.group_by(owner))]
    rows: dict[str, CostRow] = {}
    for row in found:
        rows[row.key] = row if row.key not in rows else rows[row.key].plus(row)
    return [rows[key] for key in sorted(rows)]


def _parts(
    connection: Connection, which: _Which, *, split: bool = False
) -> Generator[tuple[str, Bearer, int, Sequence[int]]]:
    """Generate the parts of the cost of each pool: its id, the bearer, the number of resources, and the milliseconds
    and micro-dollars, real and on demand, as whole numbers.

    The last part of a pool is the rest of its sums, and its resources. `split` divides the rest of a pool that belongs
    to nobody among the others.
    """
    sums = select(RESOURCES.c.pool_id, func.count(), func.sum(MILLISECONDS), func.sum(COST), func.sum(ON_DEMAND)).where(
        *which.conditions
    )
    found = {row[0]: tuple(map(int, row[1:])) for row in connection.execute(sums.group_by(RESOURCES.c.pool_id))}
    recorded = _recorded_of(connection, select(RESOURCES.c.pool_id).where(*which.conditions))
    bills = {pool_id: amounts[2] for pool_id, amounts in found.items()} if which.is_whole else _whole(connection, which)
    for pool_id, (resources, *amounts) in found.items():
        its = recorded.get(pool_id, Recorded())  # the row of the pool may be damaged: its cost still counts
        bill = bills[pool_id]
        its_parts = parts_of(its, bill)
        bearers, costs = [bearer for bearer, _ in its_parts], [part for _, part in its_parts]
        columns = [[amount * cost // bill if bill else 0 for cost in costs] for amount in amounts]
        if split and its.own.pool and costs:
            columns = [_all_of(amount, column, costs) for amount, column in zip(amounts, columns, strict=True)]
        for bearer, *part in zip(bearers, *columns, strict=True):
            yield pool_id, bearer, 0, part
        left = [amount - sum(column) for amount, column in zip(amounts, columns, strict=True)]
        yield pool_id, its.own, resources, left


def _whole(connection: Connection, which: _Which) -> dict[str, int]:
    """Return the whole bill of each pool of which some resources count."""
    some = select(RESOURCES.c.pool_id).where(*which.conditions)
    return _bills(connection, RESOURCES.c.pool_id.in_(some))


def _bills(connection: Connection, condition: ColumnElement[bool]) -> dict[str, int]:
    """Return the micro-dollars of these resources, by pool, without machines whose rows are damaged."""
    sums = select(RESOURCES.c.pool_id, func.sum(COST)).where(condition, is_billable(connection))
    rows = connection.execute(sums.group_by(RESOURCES.c.pool_id))
    return {str(pool_id): whole_number(micro_usd) for pool_id, micro_usd in rows}


def _all_of(amount: int, parts: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Return the parts with all of an amount."""
    rests = divided(amount - sum(parts), costs)
    return [part + rest for part, rest in zip(parts, rests, strict=True)]


def _recorded_of(connection: Connection, pools: Select[tuple[Any]]) -> dict[str, Recorded]:
    """Return what is recorded of these pools."""
    found: dict[str, Recorded] = {}
    for row in connection.execute(select(POOLS).where(POOLS.c.id.in_(pools))).mappings():
        work, owner = work_of(row), f"{row['owner_user']}@{row['owner_host']}"
        found[row["id"]] = Recorded(Bearer(work, owner, "" if work.labels() else row["name"]))
    shares = select(SHARES).where(SHARES.c.pool_id.in_(pools)).order_by(SHARES.c.id)
    for row in connection.execute(shares).mappings():
        if its := found.get(row["pool_id"]):
            its.shares.append((Bearer(work_of(row), row["owner"] or its.own.owner), whole_number(row["micro_usd"])))
    process = USES.outerjoin(CLIENTS, CLIENTS.c.id == USES.c.client_id)
    uses = select_uses().add_columns(CLIENTS.c.owner_user, CLIENTS.c.owner_host).select_from(process)
    in_order = uses.where(USES.c.pool_id.in_(pools)).order_by(USES.c.began_microseconds, USES.c.id)
    for row in connection.execute(in_order).mappings():
        if its := found.get(row["pool_id"]):
            owner = its.own.owner if row["owner_user"] is None else f"{row['owner_user']}@{row['owner_host']}"
            amounts = whole_number(row["micro_usd"]), whole_number(row["estimated_micro_usd"])
            its.held.append(Held(Bearer(work_of(row), owner), *amounts, row["id"]))
    works = [CALLS.c[name] for name in WORK_COLUMNS]
    key = CALLS.c.pool_id, CALLS.c.owner, *works
    sums = select(*key, func.sum(CALLS.c.micro_usd).label("micro_usd")).where(CALLS.c.pool_id.in_(pools))
    for row in connection.execute(sums.group_by(*key).order_by(*key)).mappings():
        if its := found.get(row["pool_id"]):
            work = work_of(row)
            # calls of earlier releases have no work
            bearer = Bearer(work, its.own.owner) if work.labels() or its.own.pool else its.own
            its.held.append(Held(bearer, whole_number(row["micro_usd"]), 0, (row["owner"], work)))
    return found


def _closed(connection: Connection, pool_ids: Sequence[str]) -> set[str]:
    """Return those of some pools whose bill does not change any more: they have ended, and so has all they rented."""
    r = RESOURCES.c
    open_still = select(r.pool_id).where(IS_OPEN)
    closed: set[str] = set()
    for start in range(0, len(pool_ids), NUMBERS_PER_STATEMENT):
        some = POOLS.c.id.in_(pool_ids[start : start + NUMBERS_PER_STATEMENT])
        wanted = select(POOLS.c.id).where(some, POOLS.c.ended_microseconds.is_not(None), POOLS.c.id.not_in(open_still))
        closed |= set(connection.execute(wanted).scalars())
    return closed


def _with_open_calls(connection: Connection, pool_ids: Sequence[str]) -> set[tuple[str, Work, str]]:
    """Return the ids of these pools with the works of their uses and detached calls that have not ended, and "". A use
    with an estimate counts: what others have held may leave less for it.
    """
    found: set[tuple[str, Work, str]] = set()
    for start in range(0, len(pool_ids), NUMBERS_PER_STATEMENT):
        some = pool_ids[start : start + NUMBERS_PER_STATEMENT]
        for table in (USES, CALLS):
            works = (table.c[name] for name in WORK_COLUMNS)
            is_open = table.c.ended_microseconds.is_(None)
            changes = is_open | (ESTIMATED_MICRO_USD > 0) if table is USES else is_open
            wanted = select(table.c.pool_id, *works).where(table.c.pool_id.in_(some), changes)
            found |= {(row["pool_id"], work_of(row), "") for row in connection.execute(wanted).mappings()}
    return found


def _add(total: list[int], *amounts: int) -> None:
    total[:] = [one + other for one, other in zip(total, amounts, strict=True)]


def _bucket_rows(connection: Connection, which: _Which) -> list[CostRow]:
    """Return the cost of each bucket as the difference of two running totals, so that all add up to the bill.

    That of running calls is not below the parts of the uses and detached calls of the pool: while calls were short, no
    process may have kept the pool, and its time was not counted as theirs.
    """
    columns = _bucket_columns()
    lines = _lines(connection.execute(select(*columns).where(*which.conditions)).one())
    held = _held(connection, select(RESOURCES.c.pool_id).where(*which.conditions))
    bills = {} if which.is_whole else _whole(connection, which)
    has_held = or_(*(RESOURCES.c.pool_id.in_(select(table.c.pool_id)) for table in (USES, CALLS)))
    by_pool = select(RESOURCES.c.pool_id, *columns).where(*which.conditions, has_held)
    for pool_id, *numbers in connection.execute(by_pool.group_by(RESOURCES.c.pool_id)):
        cost = sum(line[2] for line in _lines(numbers).values())
        whole = bills.get(pool_id, cost)
        its_held = min(held.get(pool_id, 0), whole) * cost // whole if whole else 0
        for key, moved in _moved_to_calls(_lines(numbers), its_held).items():
            _add(lines[key], 0, *moved)
    return [
        CostRow(key, resources, milliseconds / 1000, in_usd(cost), in_usd(on_demand))
        for key, (resources, milliseconds, cost, on_demand) in lines.items()
    ]


def _bucket_columns() -> list[ColumnElement[Any]]:
    """Return four columns for each bucket, and for the billing rounding: those of `_lines`."""
    columns: list[ColumnElement[Any]] = []
    before, before_on_demand = literal(0, BigInteger), literal(0, BigInteger)
    r = RESOURCES.c
    for place, bucket in enumerate(Bucket):
        reached_seconds = total_milliseconds(tuple(Bucket)[: place + 1]) // 1000
        reached = r.price_micro_usd_per_hour * reached_seconds // SECONDS_PER_HOUR
        reached_on_demand = r.on_demand_micro_usd_per_hour * reached_seconds // SECONDS_PER_HOUR
        own = r[milliseconds_of(bucket)]
        columns += [
            func.sum(case((own > 0, 1), else_=0)),
            func.sum(own),
            func.sum(reached - before),
            func.sum(reached_on_demand - before_on_demand),
        ]
        before, before_on_demand = reached, reached_on_demand
    return [*columns, func.count(), literal(0), func.sum(COST - before), func.sum(ON_DEMAND - before_on_demand)]


def _lines(numbers: Sequence[Any]) -> dict[str, list[int]]:
    """Return resources, milliseconds and micro-dollars of each bucket, real and on demand, and of the rounding."""
    whole = [int(number or 0) for number in numbers]
    return {str(key): whole[4 * place : 4 * place + 4] for place, key in enumerate((*Bucket, BILLING_ROUNDING))}


def _held(connection: Connection, pools: Select[tuple[Any]]) -> dict[str, int]:
    """Return the micro-dollars of the slots that calls have held, also by estimate, of each of these pools that has any
    recorded.
    """
    held: defaultdict[str, int] = defaultdict(int)
    for table, micro_usd in ((USES, USES.c.micro_usd + ESTIMATED_MICRO_USD), (CALLS, CALLS.c.micro_usd)):
        sums = select(table.c.pool_id, func.sum(micro_usd)).where(table.c.pool_id.in_(pools))
        for pool_id, total in connection.execute(sums.group_by(table.c.pool_id)):
            held[str(pool_id)] += whole_number(total)
    return held


def _moved_to_calls(lines: Mapping[str, Sequence[int]], held: int) -> dict[str, list[int]]:
    """Return what each bucket of a pool gets, so that calls have what was held. Idle and warm time give it first."""
    calls = str(Bucket.RUNNING_CALLS)
    moved = {calls: [0, 0, 0]}
    missing = held - lines[calls][2]
    for key in sorted(lines.keys() - {calls}, key=lambda one: (one not in {Bucket.IDLE, Bucket.WARM}, one)):
        _, milliseconds, cost, on_demand = lines[key]
        taken = min(missing, cost)
        if taken > 0:
            its = [milliseconds * taken // cost, taken, on_demand * taken // cost]
            _add(moved[calls], *its)
            moved[key] = [-amount for amount in its]
            missing -= taken
    return moved


# ── who bears what ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Bearer:
    """Who bears a part of a cost: a work, in processes of `owner` (user@host), or with `pool` the pool of that name."""

    work: Work = NO_WORK
    owner: str = ""
    pool: str = ""


type Part = tuple[Bearer, int]
"""A bearer and its micro-dollars."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a use, or the detached calls of an owner for a work, have held: micro-dollars that were measured, and those
    that were only estimated. `key` is the id of the use, or owner and work.
    """

    bearer: Bearer
    micro_usd: int
    estimated: int = 0
    key: str | tuple[str, Work] = ""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a bill for a use or for detached calls (`Held.key`), in USD, and what of it is estimated."""

    key: str | tuple[str, Work]
    cost_usd: Decimal
    estimated_usd: Decimal


@dataclass(slots=True)
class Recorded:
    """What is recorded of a pool, in micro-dollars: who bears the rest, shares, and what uses and detached calls have
    held.
    """

    own: Bearer = Bearer()
    shares: list[Part] = field(default_factory=list[Part])
    held: list[Held] = field(default_factory=list[Held])


def parts_of(recorded: Recorded, bill: int) -> list[Part]:
    """Return the parts of a pool's bill for others than its own bearer, who bears the rest: shares first, in order.

    No part is negative, and their sum is at most the bill, so that the rest is not negative either. A share within the
    work of a use, such as one of its tasks, is taken from that use's part.
    """
    shares, held = _disjoint(recorded)
    costs = split_bill(bill, [*shares, *held])
    parts: defaultdict[Bearer, int] = defaultdict(int)
    for one, cost in zip(held, costs[len(shares) :], strict=True):
        parts[one.bearer] += cost
    with_shares = {one.bearer for one, left in zip(recorded.held, held, strict=True) if one != left}
    others = [(bearer, part) for bearer, part in parts.items() if bearer != recorded.own]
    return [
        *((share.bearer, cost) for share, cost in zip(shares, costs, strict=False)),
        *((bearer, part) for bearer, part in others if part or bearer not in with_shares),
    ]


def _disjoint(recorded: Recorded) -> tuple[list[Held], list[Held]]:
    """Return shares, and what uses and detached calls have held without the shares within their works."""
    held = list(recorded.held)
    for bearer, micro_usd in recorded.shares:
        left = micro_usd
        for place, one in enumerate(held):
            if left and one.bearer.work.labels() and is_for(bearer.work, one.bearer.work):
                measured = min(left, one.micro_usd)
                estimated = min(left - measured, one.estimated)
                held[place] = replace(one, micro_usd=one.micro_usd - measured, estimated=one.estimated - estimated)
                left -= measured + estimated
    return [Held(bearer, micro_usd) for bearer, micro_usd in recorded.shares], held


def split_bill(bill: int, held: Sequence[Held]) -> list[int]:
    """Return the part of a pool's bill for each of those who have held something, in micro-dollars.

    What was measured counts in full; only if that alone were more than the bill, in proportion. What was estimated
    counts as far as the measured parts leave something, in proportion too. The result depends on the amounts alone, and
    not on who wrote them when.
    """
    measured = [one.micro_usd for one in held]
    if (left := bill - sum(measured)) < 0:
        return split_exactly(bill, measured)
    estimated = [one.estimated for one in held]
    if sum(estimated) > left:
        estimated = split_exactly(left, estimated)
    return [known + more for known, more in zip(measured, estimated, strict=True)]


def divided(rest: int, costs: Sequence[int]) -> list[int]:
    """Divide what belongs to nobody among users, in proportion to their costs; equally if all are zero."""
    return split_exactly(rest, costs if any(costs) else [1] * len(costs))


def is_for(work: Work, wanted: Work) -> bool:
    """Return whether a work has the same text in each field that is not empty in `wanted`."""
    return wanted.labels().items() <= work.labels().items()


def split_exactly(amount: int, weights: Sequence[int]) -> list[int]:
    """Split a whole number of units in proportion to whole weights (largest remainder); the parts add up to `amount`.

    No part differs from its exact share by a unit or more. Of equal remainders the earlier one is rounded up. Without
    any weight all parts are 0: then the caller has to name another bearer. Raises ValueError for a negative number.
    """
    if amount < 0 or any(weight < 0 for weight in weights):
        raise ValueError(f"an amount and weights are zero or more; given {amount} and {list(weights)}")
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    parts = [amount * weight // total for weight in weights]
    remainders = [amount * weight % total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: -remainders[place])
    for place in by_remainder[: amount - sum(parts)]:
        parts[place] += 1
    return parts
