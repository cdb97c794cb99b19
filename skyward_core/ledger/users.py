"""Who has used a pool, and the part of its cost that is for the calls of each: steps (`uses.py`), processes, detached
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal

from skyward_core.errors import ZERO_USD
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Client
from skyward_core.ledger.rows import MICRO_USD, Bucket, CallEntry, CostBy, UnreadableRow
from skyward_core.ledger.split import split_exactly
from skyward_core.ledger.uses import UseEntry
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.work import NO_WORK, WORK_CHARACTERS, Work


@dataclass(frozen=True, slots=True)
class PoolUser:
    """A step that uses a pool, or has used it; a process that has no step recorded; or all detached calls for an owner.

    `name` is user@host, or the owner of the detached calls. `joined_at` is when it came, or when the first of these
    calls was started. `slot_seconds` is for how long its calls have held slots, as it was recorded last. `cost_usd` is
    what these slots have cost; of a process without a step its part of the cost of the time in which calls ran.
    `lives`: whether the process may still use the pool, or one of the calls has not ended.
    """

    name: str
    work: Work
    joined_at: datetime
    left_at: datetime | None
    slot_seconds: float
    cost_usd: Decimal
    is_detached: bool = False
    pid: int | None = None
    """Of the process on its host; None for detached calls."""
    lives: bool = False


def users_of(ledger: Ledger, pool_id: str, *, unreadable: list[UnreadableRow] | None = None) -> list[PoolUser]:
    """Return the users of a pool, in the order in which they came; none for a pool without a name and without steps.

    Without steps, their costs add up to that of the pool's bucket "running calls", to the micro-dollar, if any of them
    has used slots. Raises LedgerError.
    """
    clients, uses = ledger.names.clients(pool_id), ledger.uses.of_pool(pool_id)
    if not clients and not uses:
        return []
    calls = ledger.calls(pool_id=pool_id, unreadable=unreadable)
    buckets = ledger.cost_rows(CostBy.BUCKET, pool_id=pool_id, unreadable=None if unreadable is None else [])
    busy_usd = next((row.cost_usd for row in buckets if row.key == Bucket.RUNNING_CALLS), ZERO_USD)
    now, entry = ledger.names.now(), ledger.pool(pool_id)
    owners = {client.id: client.owner for client in clients}
    opener = entry.owner if entry is not None else Owner.unknown("")
    steps = [_of_use(use, owners.get(use.client_id, opener)) for use in uses]
    others = [client for client in clients if client.id not in {use.client_id for use in uses}]
    left_usd = max(ZERO_USD, busy_usd - sum((use.cost_usd for use in uses), ZERO_USD))
    by_time = [*(_of_client(client, now) for client in others), *(_of_calls(calls, clients) if clients else ())]
    return sorted([*steps, *with_costs(by_time, left_usd)], key=lambda user: user.is_detached)


def with_costs(users: Sequence[PoolUser], busy_usd: Decimal) -> list[PoolUser]:
    """Return the users with their parts of a cost in USD, by the milliseconds of their slots."""
    parts = split_exactly(int(busy_usd / MICRO_USD), [round(user.slot_seconds * 1000) for user in users])
    return [replace(user, cost_usd=part * MICRO_USD) for user, part in zip(users, parts, strict=True)]


def _of_use(use: UseEntry, owner: Owner) -> PoolUser:
    lives = use.ended_at is None and owner.state() is not OwnerState.DEAD
    figures = use.slot_seconds, use.cost_usd
    return PoolUser(owner.name, use.work, use.began_at, use.ended_at, *figures, pid=owner.pid or None, lives=lives)


def _of_client(client: Client, now: datetime) -> PoolUser:
    return PoolUser(
        client.owner.name,
        client.work,
        client.joined_at,
        client.left_at,
        client.slot_seconds,
        ZERO_USD,
        pid=client.owner.pid or None,
        lives=client.lives(now, client.owner.state()),
    )


def _of_calls(calls: Sequence[CallEntry], clients: Sequence[Client]) -> list[PoolUser]:
    """Return one user for the detached calls of each owner. Its work is that of the client whose work it names."""
    works = {str(client.work)[:WORK_CHARACTERS]: client.work for client in clients}
    by_owner: dict[str, list[CallEntry]] = {}
    for call in calls:
        by_owner.setdefault(call.owner, []).append(call)
    return [
        PoolUser(
            owner,
            works.get(owner, NO_WORK),
            min(call.started_at for call in its),
            _last_end(its),
            sum(round(call.seconds * 1000) for call in its) / 1000,
            ZERO_USD,
            is_detached=True,
            lives=_last_end(its) is None and its[0].pool_ended_at is None,
        )
        for owner, its in sorted(by_owner.items())
    ]


def _last_end(calls: Sequence[CallEntry]) -> datetime | None:
    """Return when the last one has ended; None while one runs."""
    ends = [call.ended_at for call in calls if call.ended_at is not None]
    return max(ends) if len(ends) == len(calls) else None
