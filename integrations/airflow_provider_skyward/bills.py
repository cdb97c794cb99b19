"""What the tries of a task have cost: by pool and try, from the ledger, and as the XCom `skyward_cost` has it.

All sums are of whole micro-dollars, as in the ledger. What is not known is never final, and 0 is a price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import xcom_class

COST_KEY = "skyward_cost"
"""The XCom with the bill of a task instance."""
SETTLED_KEY = "skyward_bills_settled_until"
"""The key of the state store of an asset that has the end of the time in which `settle_bills` has looked."""
OLDEST, NEWEST = timedelta(days=7), timedelta(minutes=1)
"""How long ago a pool has ended, at most and at least, whose tasks get their last bill: a worker that lives writes its
own in the seconds after the end. The first one is that of a first look: each later one begins where the last has ended.
"""


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
    return [cost_of_part(part) for part in parts]


def cost_of_part(part: sky.CostPart) -> Cost:
    """Return the part of a try in the cost of a pool."""
    return Cost(part.pool_id, part.work.attempt, micro(part.cost_usd), part.is_final)


def whole_pool_usd(pool_id: str, log: Any) -> float | None:
    """Return what a pool that several tasks use has cost so far, by the ledger; None if it does not answer."""
    try:
        return float(sky.receipt_of(pool_id)["total_cost_usd"])
    except sky.LedgerError as error:
        log.warning("the cost of the pool %s is not known: %s", pool_id, error)
        return None


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
        "of_tries": list(tries),
        "pool_cost_usd": usd(one for one in known if one.pool_id == pool_id),
        "all_tries_usd": usd(known),
        "pools": sorted({pool_id, *(one.pool_id for one in known)}),
        "tries": {number: usd(one for one in known if one.attempt == number) for number in numbers},
    }


def settle_bills(store: Any = None, oldest: timedelta = OLDEST, newest: timedelta = NEWEST) -> list[str]:
    """Make the XCom `skyward_cost` final of task instances that could not do it themselves, such as a task that was
    killed in its last try; return them, as DAG, run, task and map index.

    Only for a running task. It looks at pools that have ended since the last call with this `store`, the state store of
    an asset; without one, and in the first call, since `oldest` ago. So no bill is left out after an outage, and none
    is looked at twice. Raises LedgerError, and then the next call looks at the same time again.
    """
    until = datetime.now(UTC) - newest
    since = _settled_until(store) or until - oldest
    parts = sky.cost_parts(sky.Work(system="airflow"), ended_between=(since, until))
    instances = dict.fromkeys(replace(part.work, attempt="", asset="", partition="") for part in parts)
    settled = [str(one) for one in instances if one.task and make_final(one)]
    if store is not None:
        store.set(SETTLED_KEY, until.isoformat())
    return settled


def _settled_until(store: Any) -> datetime | None:
    """Users may edit the store: what is no time is as if there were none."""
    try:
        return None if store is None else datetime.fromisoformat(store.get(SETTLED_KEY)).astimezone(UTC)
    except (TypeError, ValueError):
        return None


def make_final(work: sky.Work, costs: Sequence[Cost] | None = None) -> bool:
    """Write the bill of the ledger into the XCom of a task instance that could not write its last one: its worker was
    killed, or its pool went on. Return whether there was something to write.

    Without `costs` they are read, and nothing is written while they may change: a worker may have the task.
    """
    of_instance: dict[str, Any] = {"dag_id": work.workflow, "run_id": work.run, "task_id": work.task}
    of_instance["map_index"] = int(work.task_run) if work.task_run else -1
    xcom = xcom_class()
    found: Any = xcom.get_one(key=COST_KEY, **of_instance)
    if not isinstance(found, dict) or found.get("is_final") is not False or not found.get("of_tries"):
        return False
    known = [cost_of_part(part) for part in sky.cost_parts(work)] if costs is None else costs
    bill = bill_of(str(found["pool_id"]), [str(number) for number in found["of_tries"]], known, None)
    if costs is None and not bill["is_final"]:
        return False
    if found.get("share_of"):
        bill["pool_cost_usd"] = float(sky.receipt_of(bill["pool_id"])["total_cost_usd"])
    xcom.set(COST_KEY, {**found, **bill}, **of_instance)
    return True


def micro(value: Any) -> int:
    """Return USD as whole micro-dollars."""
    return round(value * 1_000_000)


def usd(costs: Iterable[Cost]) -> float:
    """Return the sum of costs in USD."""
    return sum(one.micro_usd for one in costs) / 1_000_000
