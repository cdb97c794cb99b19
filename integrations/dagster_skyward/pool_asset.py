"""The assets of pools: what is for no step is observed there, of the pools that the steps of a job's runs share, and of
each pool with a name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from dagster_skyward.metadata import shown

POOLS = ("skyward", "pools")
"""The first parts of their keys. The job or the name follows."""
OF_DAGSTER = "__"
"""Dagster's names for the runs of assets that are in no job of their own begin so."""
TOTAL_USD = "skyward/pool_cost_usd"
PHASES, MACHINES, USERS = "skyward/phases", "skyward/machines", "skyward/users"


def pools_key(job: str) -> dg.AssetKey:
    """Return the key of the pools of a job's runs."""
    return dg.AssetKey([*POOLS, "assets" if job.startswith(OF_DAGSTER) else job])


def key_of_pool(receipt: Mapping[str, Any]) -> dg.AssetKey:
    """Return the key of a pool that belongs to no run: by its name, in which the id of a run is "run"; of a backfill's
    the key of the pools of its job.
    """
    if receipt["work"]:
        return pools_key(receipt["work"].get("workflow", ""))
    name: str = receipt["name"]
    for run in {user["work"].get("run") for user in receipt["users"]} - {None, ""}:
        name = name.replace(run, "run")
    return dg.AssetKey([*POOLS, *name.split("/")])


def pools_metadata(receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bill of pools as metadata: in all, by phase, by machine, and by user. Each adds up to the whole.

    The receipts are those of `sky.receipts_of`.
    """
    if not receipts:
        return {}
    return {
        TOTAL_USD: round(sum(one["total_cost_usd"] for one in receipts), 6),
        PHASES: _table(_phases(receipts)),
        MACHINES: _table(_machines(receipts)),
        USERS: _table(_users(receipts)),
    }


def _phases(receipts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in receipts:
        for name, its in one["buckets"].items():
            yield {"pool": one["pool_id"], "phase": name, "seconds": its["seconds"], "USD": its["cost_usd"]}


def _machines(receipts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in receipts:
        for its in one["resources"]:
            yield {
                "pool": one["pool_id"],
                "machine": its["cloud_id"] or its["name"],
                "kind": its["kind"],
                "provider": its["provider"],
                "region": its["region"],
                "type": its["instance_type"] or "",
                "market": "spot" if its["is_spot"] else "on demand",
                "USD per hour": its["price_per_hour_usd"],
                "gone": its["gone_at"] or "",
                "USD": its["cost_usd"],
            }


def _users(receipts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in receipts:
        rest = one["total_cost_usd"]
        for its in one["users"]:
            rest -= its["cost_usd"]
            work = its["work"]
            yield {
                "pool": one["pool_id"],
                "step": work.get("task", ""),
                "run": work.get("run", ""),
                "attempt": work.get("attempt", ""),
                "slot seconds": its["slot_seconds"],
                "USD": its["cost_usd"],
            }
        words = "none: start, idle time and end"
        yield {
            "pool": one["pool_id"], "step": words, "run": "", "attempt": "", "slot seconds": 0.0, "USD": round(rest, 6)
        }  # fmt: skip


def _table(rows: Iterable[dict[str, Any]]) -> dg.TableMetadataValue:
    return dg.MetadataValue.table([dg.TableRecord(shown(row)) for row in rows])
