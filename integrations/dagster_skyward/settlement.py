"""The costs of a run that are in none of its materializations, as observations: each part of the bill once.

    open (tag of the run) ──▶ a bill is final ──▶ it is compared with the events ──▶ reported

The ledger has the bill of each step, also of one that was killed, and the rest that is for the run. The run's events
have what was reported of them. The difference is written: to the assets of a step, and in an event of the step or of
the run. What no call has held of a pool that belongs to no run is an observation of the pool's asset, once it has
ended. So the events are the state: a settler that is killed between two lines leaves them incomplete, and the next
one writes what is missing. Who settles: the process of a step for its own steps, the last one that needs a shared pool
for all that have ended, and the sensors of `upkeep` for runs that have ended.

Two settlers on one host take turns by the lock of a file. Two on different hosts may both write a difference; then the
events have too much, which is only logged, as no cost is negative (docs/decisions/0034).
"""

import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward.backfills import OF_BACKFILL
from dagster_skyward.dagster_events import report_note, report_observation
from dagster_skyward.metadata import (
    COST_USD,
    MICRO_PER_USD,
    OTHER_COST_USD,
    POOL_ID,
    RECEIPT,
    equal_parts,
    partition_of,
)
from dagster_skyward.pool_asset import key_of_pool, pools_key, pools_metadata

STATE_TAG = "skyward/costs"
"""The run's tag that says whether all its costs are in its events."""
OPEN, REPORTED = "open", "reported"
TOTAL_TAG = COST_USD
"""The run's tag with what it has cost so far, by the ledger; all of it when STATE_TAG is REPORTED."""
LOCK_SECONDS = 30.0
LOCK_FILE = "skyward-settlement.lock"
OF_COSTS = {
    dg.DagsterEventType.ASSET_MATERIALIZATION,
    dg.DagsterEventType.ASSET_OBSERVATION,
    dg.DagsterEventType.STEP_OUTPUT,
    dg.DagsterEventType.ENGINE_EVENT,
}
FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
RUNS_AT_ONCE = 50
OBSERVATIONS_PER_PAGE = 200

_log = logging.getLogger("skyward")


def note_open(instance: dg.DagsterInstance, run_id: str) -> None:
    """Write on a run that it may have costs which are in no event. Before anything is rented."""
    instance.add_run_tags(run_id, {STATE_TAG: OPEN})


def forget_parent(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """A re-execution begins with its parent's tags: it has cost nothing yet."""
    if _has_total_of_parent(instance, run):
        instance.add_run_tags(run.run_id, {TOTAL_TAG: _usd(0)})


def _has_total_of_parent(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    total = run.tags.get(TOTAL_TAG)
    parent = None if total is None or run.parent_run_id is None else instance.get_run_by_id(run.parent_run_id)
    return parent is not None and parent.tags.get(TOTAL_TAG) == total


def forget_parents(instance: dg.DagsterInstance) -> None:
    """Do the same for the newest runs that have ended and whose steps have used no pool. Raises LedgerError."""
    for record in instance.get_run_records(dg.RunsFilter(tags={STATE_TAG: REPORTED}, statuses=FINISHED), RUNS_AT_ONCE):
        run = record.dagster_run
        if _has_total_of_parent(instance, run) and not sky.cost_parts(sky.Work(system="dagster", run=run.run_id)):
            instance.add_run_tags(run.run_id, {TOTAL_TAG: _usd(0)})


def settle(instance: dg.DagsterInstance, run: dg.DagsterRun, steps: Collection[str] | None = None) -> bool:
    """Report what is missing of the costs of these steps (None: of all, because the run has ended), and of the rest.

    Returns whether nothing can be missing any more: all bills are final, and nothing was missing. After it has written,
    another call says whether another host has written the same. Raises LedgerError, and what Dagster's storage raises.
    """
    with _turn(instance) as is_mine:
        if not is_mine:
            return False
        bills: defaultdict[str, list[sky.CostPart]] = defaultdict(list)
        for part in sky.cost_parts(sky.Work(system="dagster", run=run.run_id)):
            bills[part.work.task].append(part)
        final = {step: its for step, its in bills.items() if all(part.is_final for part in its)}
        wanted = {step: its for step, its in final.items() if steps is None or step in steps or not step}
        reported = _reported(instance, run.run_id) if wanted else {}
        written = sum(_report(instance, run, step, its, reported.get(step, Reported())) for step, its in wanted.items())
        _note_total(instance, run.run_id, [part for its in bills.values() for part in its])
        return steps is None and len(final) == len(bills) and not written


def settle_ended_runs(instance: dg.DagsterInstance, open_pools: set[str] | None = None) -> list[str]:
    """Settle the runs that have ended and whose costs are not all reported; return the ids of those that are settled
    now.

    The oldest come first. An error with one run is logged, and the next tick tries again. `open_pools` are the pools
    for which `report_rests` is asked at each tick. The open ones of a run are added, and the run is settled at the next
    tick only, when they are kept.
    """
    wanted = dg.RunsFilter(tags={STATE_TAG: OPEN}, statuses=FINISHED)
    settled: list[str] = []
    kept = frozenset(open_pools or ())
    for record in instance.get_run_records(wanted, limit=RUNS_AT_ONCE, ascending=True):
        run = record.dagster_run
        try:
            if not (settle(instance, run) or settle(instance, run)):  # the second one looks what the first one has left
                continue
            found = report_rests(instance, _pools_used_by(run.run_id))
            if open_pools is not None:
                open_pools |= found
            if open_pools is None or found <= kept:
                instance.add_run_tags(run.run_id, {STATE_TAG: REPORTED})
                settled.append(run.run_id)
        except sky.SkywardError as error:
            _log.warning("the costs of the run %s could not be reported yet: %s", run.run_id, error)
    return settled


# ── pools of no run ──────────────────────────────────────────────────────────────────────────────────────────────────


def report_rests(instance: dg.DagsterInstance, pool_ids: Collection[str]) -> set[str]:
    """Observe what no call has held of those of these pools that belong to no run, once, when they have ended.

    These have a name from their user, or are those of a backfill. Returns those that have not ended. Raises
    LedgerError, and what Dagster's storage raises.
    """
    if not pool_ids:
        return set()
    with _turn(instance) as is_mine:
        receipts = {pool_id: _receipt_of(pool_id) for pool_id in sorted(pool_ids)}
        of_no_run = {pool_id: its for pool_id, its in receipts.items() if its is not None and _is_of_no_run(its)}
        ended = {pool_id for pool_id, its in of_no_run.items() if its["ended_at"] is not None and not its["left"]}
        for pool_id in sorted(ended) if is_mine else ():
            _report_rest(instance, of_no_run[pool_id])
        return of_no_run.keys() - (ended if is_mine else set())


def _receipt_of(pool_id: str) -> dict[str, Any] | None:
    """None if the ledger does not have the pool: it is another ledger now."""
    try:
        return sky.receipt_of(pool_id)
    except sky.LedgerConflict:
        return None


def _pools_used_by(run_id: str) -> set[str]:
    return {part.pool_id for part in sky.cost_parts(sky.Work(system="dagster", run=run_id))}


def _is_of_no_run(receipt: Mapping[str, Any]) -> bool:
    """Whether the run of a settler does not bear its rest."""
    work: Mapping[str, str] = receipt["work"]
    return (not work and receipt["name"] is not None) or (
        work.get("system") == "dagster" and work.get("run", "").startswith(OF_BACKFILL)
    )


def _report_rest(instance: dg.DagsterInstance, receipt: Mapping[str, Any]) -> None:
    held = sum(round(user["cost_usd"] * MICRO_PER_USD) for user in receipt["users"])
    rest = round(receipt["total_cost_usd"] * MICRO_PER_USD) - held
    key, pool_id = key_of_pool(receipt), receipt["pool_id"]
    if rest <= 0 or _is_observed(instance, key, receipt):
        return
    metadata = {OTHER_COST_USD: rest / MICRO_PER_USD, POOL_ID: pool_id, **_as_metadata([dict(receipt)])}
    instance.report_runless_asset_event(
        dg.AssetObservation(
            key,
            description="what no step has used of the pool",
            metadata={**metadata, **pools_metadata([receipt])},
        )
    )


def _is_observed(instance: dg.DagsterInstance, key: dg.AssetKey, receipt: Mapping[str, Any]) -> bool:
    """Whether the asset has an observation of this pool's rest; all since the pool was opened are read."""
    opened = datetime.fromisoformat(receipt["created_at"]).timestamp()
    pool, wanted, cursor = (
        dg.MetadataValue.text(receipt["pool_id"]),
        dg.AssetRecordsFilter(key, after_timestamp=opened),
        None,
    )
    while True:
        page = instance.fetch_observations(wanted, limit=OBSERVATIONS_PER_PAGE, cursor=cursor)
        observed = [one.asset_observation.metadata for one in page.records if one.asset_observation is not None]
        if any(its.get(POOL_ID) == pool and OTHER_COST_USD in its for its in observed):
            return True
        if not page.has_more:
            return False
        cursor = page.cursor


# ── what is reported ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Reported:
    """What the events of a run say of one step's costs, in micro-dollars."""

    of_assets: defaultdict[dg.AssetKey, int] = field(default_factory=lambda: defaultdict(int))
    made: set[dg.AssetKey] = field(default_factory=set[dg.AssetKey])
    of_op: int = 0
    """In metadata of outputs, and in engine events."""


def _reported(instance: dg.DagsterInstance, run_id: str) -> Mapping[str, Reported]:
    found: defaultdict[str, Reported] = defaultdict(Reported)
    for record in instance.get_records_for_run(run_id, of_type=OF_COSTS).records:
        event: Any = record.event_log_entry.dagster_event
        its = found[event.step_key or ""]
        match event.event_type:
            case dg.DagsterEventType.ASSET_MATERIALIZATION:
                its.made.add(event.asset_key)
                metadata = event.step_materialization_data.materialization.metadata
                its.of_assets[event.asset_key] += _micro_usd(metadata, COST_USD)
            case dg.DagsterEventType.ASSET_OBSERVATION:
                metadata = event.asset_observation_data.asset_observation.metadata
                its.of_assets[event.asset_key] += _micro_usd(metadata, OTHER_COST_USD)
            case dg.DagsterEventType.STEP_OUTPUT:
                its.of_op += _micro_usd(event.step_output_data.metadata, COST_USD)
            case _:
                data = event.event_specific_data
                its.of_op += _micro_usd(data.metadata, OTHER_COST_USD) if data is not None else 0
    return found


def _micro_usd(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    return round(value.value * MICRO_PER_USD) if isinstance(value, dg.FloatMetadataValue) and value.value else 0


def _report(
    instance: dg.DagsterInstance, run: dg.DagsterRun, step: str, bill: Sequence[sky.CostPart], reported: Reported
) -> int:
    """Write the difference: to the assets that the step has made, else to all that it should have made, in equal parts.

    Returns the number of events. "" is no step, but what no call has held of the pools of the run: it goes to the asset
    of these pools.
    """
    newest = max((part.work for part in bill), key=lambda work: work.attempt)
    due = int(sum(part.cost_usd for part in bill) * MICRO_PER_USD)
    assets = sorted(reported.made) or _assets_of(bill)
    missing = due - (sum(reported.of_assets.values()) if assets or not step else 0) - (0 if assets else reported.of_op)
    if missing < 0:
        _log.warning("the events of %s have %.6f USD more than its bill", step or "the run", -missing / MICRO_PER_USD)
    if missing <= 0:
        return 0
    receipts = _receipts(run, step)
    common = {POOL_ID: ", ".join(sorted({part.pool_id for part in bill})), **_as_metadata(receipts)}
    if not step:
        metadata = {OTHER_COST_USD: missing / MICRO_PER_USD, **common, **pools_metadata(receipts)}
        observation = dg.AssetObservation(pools_key(run.job_name), metadata=metadata)
        report_observation(instance, run, step, observation, "what no step has used of the pools of the run")
        return 1
    if not assets:
        words = f"the rest of the cost of {step}: {missing / MICRO_PER_USD:.6f} USD"
        report_note(instance, run, step, words, {OTHER_COST_USD: missing / MICRO_PER_USD, **common})
        return 1
    written = 0
    for asset, part in zip(assets, equal_parts(due, len(assets)), strict=True):
        rest = min(missing, part - reported.of_assets[asset])
        if rest > 0:
            missing -= rest
            written += 1
            metadata = {OTHER_COST_USD: rest / MICRO_PER_USD, **common}
            observation = dg.AssetObservation(asset, metadata=metadata, partition=partition_of(newest))
            report_observation(instance, run, step, observation, "the cost that is in no materialization")
    return written


def _assets_of(bill: Sequence[sky.CostPart]) -> list[dg.AssetKey]:
    """The assets of a step: those that it should make or check."""
    names = {name for part in bill for name in part.work.asset.split(", ") if name}
    return [dg.AssetKey.from_user_string(name) for name in sorted(names)]


def _receipts(run: dg.DagsterRun, step: str) -> list[dict[str, Any]]:
    """The receipts of the pools that belong to the step, or to the run."""
    receipts = sky.receipts_of(sky.Work(system="dagster", run=run.run_id))
    return [receipt for receipt in receipts if receipt["work"].get("task", "") == step]


def _as_metadata(receipts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = receipts[0] if len(receipts) == 1 else list(receipts)
    return {RECEIPT: dg.MetadataValue.json(sky.shown_text.visible_data(found))} if found else {}


def _note_total(instance: dg.DagsterInstance, run_id: str, parts: Sequence[sky.CostPart]) -> None:
    total, run = _usd(sum(part.cost_usd for part in parts)), instance.get_run_by_id(run_id)
    if parts and run is not None and run.tags.get(TOTAL_TAG) != total:
        instance.add_run_tags(run_id, {TOTAL_TAG: total})


def _usd(amount: Decimal | int) -> str:
    return f"{amount:.6f}"


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _turn(instance: dg.DagsterInstance) -> Generator[bool]:
    """Hold the lock of the settlers of this host; yield whether it was got in time. The kernel unlocks it after a
    kill.

    Without a folder that can be written there is no lock, and the next settler mends the sum.
    """
    try:
        descriptor = os.open(Path(instance.root_directory) / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True
