"""Which events of a pool become events of Prefect: few, because the graph of a run shows only fifty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import skyward_core as sky
from prefect_skyward.report.pool_state import PoolState

READY = "skyward.pool.ready"
LOST = "skyward.instance.lost"
NOTICED = "skyward.preemption.noticed"
FINAL = "skyward.cost.final"
WARNING = "skyward.budget.warning"
EXCEEDED = "skyward.budget.exceeded"
WARNING_SHARE = 0.8
MOST_OF_ONE_NAME = 5
"""How many events of one name a flow run emits, at most; its log has all of them. The bill of each pool is exempt."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An event for Prefect: its name and its payload, JSON data. Money is USD."""

    event: str
    payload: Mapping[str, Any]


def notice_of(event: sky.SkywardEvent, pool: PoolState) -> Notice | None:
    """Return the notice of an event, or None if Prefect gets none. The pool's state has taken the event in."""
    match event:
        case sky.PoolReady(_, nodes, slots, seconds):
            payload = {
                "nodes": nodes, "slots": slots, "seconds": round(seconds, 3), "hardware": pool.hardware,
                "usd_per_hour": round(sum(machine.price_per_hour for machine in pool.machines.values()), 6),
            }  # fmt: skip
            return Notice(READY, payload)
        case sky.InstanceLost(instance_id, node, reason):
            return Notice(LOST, {"instance_id": instance_id, "node": node, "reason": reason})
        case sky.PreemptionNoticed(instance_id, node, action, at, seconds_left):
            payload = {"instance_id": instance_id, "node": node, "action": action, "at": at}
            return Notice(NOTICED, {**payload, "seconds_left": seconds_left})
        case sky.CostFinal() if not pool.shared_name:  # of a shared pool the flow run has a part
            payload = {
                "usd": event.total_cost, "seconds": round(event.total_seconds, 3), "buckets": dict(event.buckets),
                "saved_usd": event.savings_vs_ondemand, "hardware": pool.hardware,
            }  # fmt: skip
            return Notice(FINAL, payload)
        case sky.BudgetWarning(spent_usd, limit_usd, account, reason):
            return Notice(WARNING, _money(spent_usd, limit_usd, account, reason))
        case _:
            return None


def share_final(pool: PoolState) -> Notice:
    """Return the notice of the part of a shared pool's cost that is for this flow run, once it has left the pool."""
    payload = {
        "usd": pool.usd, "seconds": round(pool.seconds, 3), "hardware": pool.hardware, "share_of": pool.shared_name,
        "has_opened": pool.joined_at is None,
    }  # fmt: skip
    return Notice(FINAL, payload)


def exceeded(reason: str, pool: PoolState | None, limit_usd: float | None, account: str) -> Notice:
    """Return the notice that the money is used up, or was too little to begin with."""
    return Notice(EXCEEDED, _money(pool.usd if pool is not None else 0.0, limit_usd, account or None, reason))


class Sieve:
    """Lets the first events of each name through."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def lets(self, notice: Notice) -> bool:
        """Count the notice, and return whether it is to be emitted."""
        self._counts[notice.event] += 1
        return notice.event == FINAL or self._counts[notice.event] <= MOST_OF_ONE_NAME


class RunWarning:
    """Warns once when all pools of a flow run have spent most of its limit. A pool that warns of this limit before has
    said it.
    """

    def __init__(self) -> None:
        self.limit_usd: float | None = None
        """The `max_cost` of the flow run; None without one."""
        self._is_given = False

    def repeats(self, notice: Notice) -> bool:
        """Return whether this notice of a pool says what was said before."""
        is_of_this = (
            notice.event == WARNING
            and notice.payload["account"] is None
            and notice.payload["limit_usd"] == self.limit_usd
        )
        before, self._is_given = self._is_given, self._is_given or is_of_this
        return is_of_this and before

    def due(self, spent_usd: float) -> Notice | None:
        """Return the warning if it is due now, with the cost of the flow run in USD."""
        if self._is_given or self.limit_usd is None or spent_usd < WARNING_SHARE * self.limit_usd:
            return None
        self._is_given = True
        reason = f"all pools of the flow run have cost {spent_usd:.4f} USD of max_cost={self.limit_usd:g}"
        return Notice(WARNING, _money(spent_usd, self.limit_usd, None, reason))


def _money(spent_usd: float, limit_usd: float | None, account: str | None, reason: str) -> dict[str, Any]:
    share = round(spent_usd / limit_usd, 4) if limit_usd else None
    return {
        "spent_usd": spent_usd,
        "limit_usd": limit_usd,
        "share": share,
        "account": account,
        "reason": reason,
    }
