"""Settles pools of this computer whose nodes have ended themselves, for any process that looks at the ledger.

    dead, its nodes have written their ends ──▶ condemned ──▶ entries closed, with these ends ──▶ the pool has ended

It reads files and the process table, and asks no provider over a network: `skyward ps` must not wait for a cloud. Pools
elsewhere are settled by the next process that opens their name, and by a sweep. Each step may be repeated, by several
processes at once; after a kill between two of them the next process goes on (docs/decisions/0046).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from skyward_core.cleanup.ends import Ends, known_end, shown_ends
from skyward_core.cleanup.policy import can_see
from skyward_core.cleanup.pool_record import Clock, close_entries, end_entries, utc_now
from skyward_core.errors import SkywardError
from skyward_core.ledger.rows import Intent, PoolEntry, ResourceKind, UnreadableRow
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import Provider, load

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

MOST_POOLS = 50
"""How many pools one look settles, the oldest first: it takes some milliseconds for each."""
_log = logging.getLogger("skyward")


def settle_here(ledger: Ledger, *, clock: Clock = utc_now, load: Callable[..., Provider] = load) -> list[str]:
    """Settle the dead pools of this computer of which nothing is left; return their ids. Raises nothing: a ledger that
    cannot be written to is settled by the next process.

    A pool is settled if each of its machines has written its end, and no process of one is left. Its lease has run out,
    or its owner is dead, or it was condemned.
    """
    try:
        return _settled(ledger, clock, load)
    except (SkywardError, OSError) as error:
        _log.debug("pools that have ended themselves are not settled now: %s", error)
        return []


def _settled(ledger: Ledger, clock: Clock, load: Callable[..., Provider]) -> list[str]:
    unreadable: list[UnreadableRow] = []
    dead = _dead_here(ledger.pools(unreadable=unreadable), clock(), load)
    if not dead:
        return []
    intents = defaultdict[str, list[Intent]](list)
    for intent in ledger.open_intents(unreadable=unreadable):
        intents[intent.pool_id].append(intent)
    spoilt = {error.pool_id for error in unreadable}
    wanted = {entry.id: entry for entry, _ in dead if entry.id not in spoilt}
    ends = _ends(dead, {pool_id: intents[pool_id] for pool_id in wanted}, clock())
    # a process that has come meanwhile has renewed the lease: then the pool lives
    condemned = ledger.condemn_all({pool_id: wanted[pool_id].written_lease for pool_id in ends})
    over = [pool_id for pool_id in ends if pool_id in condemned]
    for pool_id in over:
        if its := intents[pool_id]:
            close_entries(ledger, its, "nothing of it is left", clock(), ends[pool_id])
    end_entries(ledger, [wanted[pool_id] for pool_id in over])
    return over


def _dead_here(
    entries: Sequence[PoolEntry], now: datetime, load: Callable[..., Provider]
) -> list[tuple[PoolEntry, Provider]]:
    """Return the pools that are dead, and whose machines are processes that can be seen from here."""
    found: list[tuple[PoolEntry, Provider]] = []
    here = Owner.here()
    for entry in entries:
        if len(found) == MOST_POOLS:
            break
        if not entry.trouble and entry.provider.get("name") == "local" and entry.why_dead(now, entry.owner.state()):
            provider = load(entry.provider)
            if provider.is_here and can_see(provider, entry.owner, here):
                found.append((entry, provider))
    return found


def _ends(
    dead: Sequence[tuple[PoolEntry, Provider]], intents: Mapping[str, Sequence[Intent]], now: datetime
) -> dict[str, Ends]:
    """Return, for each of these pools of which nothing is left, when its machines have ended."""
    running = {machine.pool_id for machine in dead[0][1].instances()}
    found: dict[str, Ends] = {}
    for entry, provider in dead:
        its = intents.get(entry.id)
        if its is None or entry.id in running or any(one.kind is not ResourceKind.INSTANCE for one in its):
            continue
        shown = shown_ends(provider, its)
        ended = {one.id: end for one in its if (end := shown.get(one.cloud_id or "")) is not None}
        if len(ended) == len(its):
            found[entry.id] = Ends(
                {one.id: known_end(one, ended[one.id], now) for one in its},
                {number: str(end) for number, end in ended.items()},
            )
    return found
