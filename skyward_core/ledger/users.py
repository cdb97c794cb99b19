"""Who has used a pool, and the part of its cost that is for the calls of each: uses (`uses.py`) and detached calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from skyward_core.errors import ZERO_USD
from skyward_core.ledger.bills import divided
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Client
from skyward_core.ledger.rows import MICRO_USD, CallEntry, CostBy, UnreadableRow
from skyward_core.ledger.uses import UseEntry
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class PoolUser:
    """A use of a pool; a process that has made no calls; or all detached calls of a work for one owner.

    `name` is user@host, or the owner of the detached calls. `joined_at` is when it came, or when the first of these
    calls was started. `slot_seconds` is for how long its calls have held slots, as it was recorded last, and `cost_usd`
    what that has cost. `lives`: whether the process may still use the pool, or one of the calls has not ended.
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
    has_calls: bool = True


def users_of(
    ledger: Ledger, pool_id: str, *, split: bool = False, unreadable: list[UnreadableRow] | None = None
) -> list[PoolUser]:
    """Return the users of a pool, in the order in which they came; none for a pool without a name and without uses.

    Their costs are those of `Ledger.cost_rows`. `split` divides among them what no call has used of a pool that belongs
    to nobody, in proportion to their costs. Raises LedgerError.
    """
    clients, uses, entry = ledger.names.clients(pool_id), ledger.uses.of_pool(pool_id), ledger.pool(pool_id)
    if not clients and not uses:
        return []
    calls = ledger.calls(pool_id=pool_id, unreadable=unreadable)
    now, owners = ledger.names.now(), {client.id: client.owner for client in clients}
    opener = entry.owner if entry is not None else Owner.unknown("")
    has_use = {use.client_id for use in uses}
    steps = [_of_use(use, owners.get(use.client_id, opener)) for use in uses]
    others = [_of_client(client, now) for client in clients if client.id not in has_use]
    found = [*sorted([*steps, *others], key=lambda user: user.joined_at), *_of_calls(calls)]
    if split and entry is not None and entry.belongs_to_nobody:
        rows = ledger.cost_rows(CostBy.POOL, pool_id=pool_id, unreadable=None if unreadable is None else [])
        return _with_all_of(sum((row.cost_usd for row in rows), ZERO_USD), found)
    return found


def _with_all_of(cost_usd: Decimal, users: Sequence[PoolUser]) -> list[PoolUser]:
    """Return the users with the whole cost of their pool, divided among those that have made calls."""
    costs = [int(user.cost_usd / MICRO_USD) for user in users if user.has_calls]
    parts = iter(divided(max(0, int(cost_usd / MICRO_USD) - sum(costs)), costs))
    return [
        replace(user, cost_usd=user.cost_usd + next(parts) * MICRO_USD) if user.has_calls else user for user in users
    ]


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
        0.0,
        ZERO_USD,
        pid=client.owner.pid or None,
        lives=client.lives(now, client.owner.state()),
        has_calls=False,
    )


def _of_calls(calls: Sequence[CallEntry]) -> list[PoolUser]:
    """Return one user for the detached calls of each owner and work."""
    by_owner: dict[tuple[str, Work], list[CallEntry]] = {}
    for call in calls:
        by_owner.setdefault((call.owner, call.work), []).append(call)
    return [
        PoolUser(
            owner,
            work,
            min(call.started_at for call in its),
            _last_end(its),
            sum(round(call.seconds * 1000) for call in its) / 1000,
            sum((call.cost_usd for call in its), ZERO_USD),
            is_detached=True,
            lives=_last_end(its) is None and its[0].pool_ended_at is None,
        )
        for (owner, work), its in sorted(by_owner.items(), key=lambda one: (one[0][0], str(one[0][1])))
    ]


def _last_end(calls: Sequence[CallEntry]) -> datetime | None:
    """Return when the last one has ended; None while one runs."""
    ends = [call.ended_at for call in calls if call.ended_at is not None]
    return max(ends) if len(ends) == len(calls) else None
