"""What the tries of a task have cost: by pool and try, from the ledger, and as the XCom `skyward_cost` has it.

All sums are of whole micro-dollars, as in the ledger. What is not known is never final, and 0 is a price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import skyward_core as sky


@dataclass(frozen=True, slots=True)
class Cost:
    """What one try has cost on one pool. `is_final`: that does not change any more."""

    pool_id: str
    attempt: str
    micro_usd: int
    is_final: bool


def costs_of(work: sky.Work, log: Any) -> list[Cost] | None:
    """Return what all tries of a task instance have cost so far, by the ledger; None if it does not answer."""
    try:
        parts = sky.cost_parts(replace(work, attempt=""))
    except sky.LedgerError as error:  # `skyward cost --by task` shows it when the ledger answers again
        log.warning("the cost of earlier tries is not known: %s", error)
        return None
    return [Cost(part.pool_id, part.work.attempt, micro(part.cost_usd), part.is_final) for part in parts]


def bill_of(
    pool_id: str, tries: Sequence[str], costs: Sequence[Cost] | None, use: sky.UseBill | None
) -> dict[str, Any]:
    """Return the money of a bill, as JSON data in USD.

    `tries`: those whose calls on this pool it is for, this one last: more than one if it has adopted a call. `use` is
    the use of this try; None for detached calls, of which the ledger knows.
    """
    known = list(costs or ())
    if use is not None:  # the ledger may not have it yet
        known = [one for one in known if (one.pool_id, one.attempt) != (pool_id, tries[-1])]
        known.append(Cost(pool_id, tries[-1], micro(use.cost_usd), use.is_final))
    its = [one for one in known if one.pool_id == pool_id and one.attempt in tries]
    numbers = map(str, range(1, int(tries[-1]) + 1)) if costs is not None else {one.attempt for one in its}
    return {
        "is_final": costs is not None and bool(its) and all(one.is_final for one in its),
        "pool_id": pool_id,
        "cost_usd": usd(its),
        "all_tries_usd": usd(known),
        "pools": sorted({pool_id, *(one.pool_id for one in known)}),
        "tries": {number: usd(one for one in known if one.attempt == number) for number in numbers},
    }


def micro(value: Any) -> int:
    """Return USD as whole micro-dollars."""
    return round(value * 1_000_000)


def usd(costs: Iterable[Cost]) -> float:
    """Return the sum of costs in USD."""
    return sum(one.micro_usd for one in costs) / 1_000_000
