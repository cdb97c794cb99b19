"""The costs of a run that are in none of its materializations, as observations: each part of the bill once.

    open (tag of the run) ──▶ the pool ends: the bill is final ──▶ the parts are compared with the events ──▶ reported

The ledger has the part of each step, also of one that was killed. The run's events have what was reported of it. The
difference is written as observations. So the events are the state: a settler that is killed between two lines leaves
them incomplete, and the next one writes what is missing. Who settles: the process of a step for its own steps, the last
one that needs a shared pool for all that have ended, and the sensors of `upkeep` for runs that have ended.

Two settlers on one host take turns by the lock of a file. Two on different hosts may both write a difference; then the
sum is too large, and the next one writes the negative difference (docs/decisions/0034).
"""

import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward.dagster_events import report_note, report_observation
from dagster_skyward.metadata import (
    COST_USD,
    MICRO_PER_USD,
    OTHER_COST_USD,
    POOL_ID,
    RECEIPT,
    names_of,
    partition_of,
    split_micro,
)

STATE_TAG = "skyward/costs"
"""The run's tag that says whether all its costs are in its events."""
OPEN, REPORTED = "open", "reported"
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

_log = logging.getLogger("skyward")


def note_open(instance: dg.DagsterInstance, run_id: str) -> None:
    """Write on a run that it may have costs which are in no event. Before anything is rented."""
    instance.add_run_tags(run_id, {STATE_TAG: OPEN})


def settle(instance: dg.DagsterInstance, run: dg.DagsterRun, steps: Collection[str] | None = None) -> bool:
    """Report what is missing of the costs of these steps (None: of all, because the run has ended).

    Returns whether nothing can be missing any more: the bills of its pools are final, and nothing was missing. After it
    has written, another call says whether another host has written the same. Raises LedgerError, and what Dagster's
    storage raises.
    """
    with _turn(instance) as is_mine:
        if not is_mine:
            return False
        bill = _bill_of(sky.cost_parts(sky.Work(system="dagster", run=run.run_id)))
        due = bill.due if steps is None or set(bill.due) <= set(steps) else bill.without_common(steps)
        if not due and bill.common and bill.is_final(""):
            due = {"": bill.common}
        reported = _reported(instance, run.run_id) if due else {}
        written = 0
        for step, micro_usd in due.items():
            if (steps is None or step in steps) and bill.is_final(step):
                written += _report(instance, run, step, micro_usd, bill, reported.get(step, Reported()))
        return steps is None and bill.is_all_final and not written


def settle_ended_runs(instance: dg.DagsterInstance) -> list[str]:
    """Settle the runs that have ended and whose costs are not all reported; return the ids of those that are settled
    now.

    The oldest come first. An error with one run is logged, and the next tick tries again.
    """
    wanted = dg.RunsFilter(tags={STATE_TAG: OPEN}, statuses=FINISHED)
    settled: list[str] = []
    for record in instance.get_run_records(wanted, limit=RUNS_AT_ONCE, ascending=True):
        run = record.dagster_run
        try:
            if settle(instance, run) or settle(instance, run):  # the second one looks what the first one has left
                instance.add_run_tags(run.run_id, {STATE_TAG: REPORTED})
                settled.append(run.run_id)
        except sky.SkywardError as error:
            _log.warning("the costs of the run %s could not be reported yet: %s", run.run_id, error)
    return settled


# ── the bill ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Bill:
    """The parts of a run's bill, in micro-dollars."""

    parts: dict[str, list[sky.CostPart]]
    """By step. "" has those of no step: opening, idle and warm time of a pool that several steps of a process share."""

    @property
    def common(self) -> int:
        return _sum(self.parts.get("", ()))

    @property
    def due(self) -> dict[str, int]:
        """What each step bears, with its proportion of the parts of no step."""
        own = {step: _sum(its) for step, its in self.parts.items() if step}
        shares = split_micro(self.common, list(own.values())) if own else []
        return {step: cost + share for (step, cost), share in zip(own.items(), shares, strict=True)}

    def without_common(self, steps: Collection[str]) -> dict[str, int]:
        """What each of these steps bears while others may still come."""
        return {step: _sum(its) for step, its in self.parts.items() if step and step in steps}

    def is_final(self, step: str) -> bool:
        """Whether what a step bears does not change any more."""
        return all(part.is_final for part in (*self.parts.get(step, ()), *self.parts.get("", ())))

    @property
    def is_all_final(self) -> bool:
        return all(part.is_final for its in self.parts.values() for part in its)

    def work_of(self, step: str) -> sky.Work:
        """The work of a step's newest part."""
        return max((part.work for part in self.parts[step]), key=lambda work: work.attempt)

    def assets_of(self, step: str) -> list[dg.AssetKey]:
        """The assets of a step: those that it should make or check."""
        names = {name for part in self.parts[step] for name in part.work.asset.split(", ") if name}
        return [dg.AssetKey.from_user_string(name) for name in sorted(names)]


def _bill_of(parts: Iterable[sky.CostPart]) -> _Bill:
    by_step: defaultdict[str, list[sky.CostPart]] = defaultdict(list)
    for part in parts:
        by_step[part.work.task].append(part)
    return _Bill(dict(by_step))


def _sum(parts: Iterable[sky.CostPart]) -> int:
    return int(sum(part.cost_usd for part in parts) * MICRO_PER_USD)


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


def made_by(instance: dg.DagsterInstance, run_id: str) -> Mapping[str, set[dg.AssetKey]]:
    """Return the assets that each step of a run has made."""
    return {step: its.made for step, its in _reported(instance, run_id).items() if its.made}


def _micro_usd(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    return round(value.value * MICRO_PER_USD) if isinstance(value, dg.FloatMetadataValue) and value.value else 0


def _report(
    instance: dg.DagsterInstance, run: dg.DagsterRun, step: str, due: int, bill: _Bill, reported: Reported
) -> int:
    """Write the difference: to the assets that the step has made, else to all that it should have made.

    Returns the number of events.
    """
    assets = sorted(reported.made) or bill.assets_of(step)
    if not assets:
        if rest := due - reported.of_op:
            words = f"the rest of the cost of {step or 'the run'}: {rest / MICRO_PER_USD:.6f} USD"
            report_note(instance, run, step, words, _metadata(rest, run, step, bill))
        return int(rest != 0)
    wanted = dict(zip(assets, split_micro(due, [1] * len(assets)), strict=True))
    rests = {asset: wanted.get(asset, 0) - reported.of_assets[asset] for asset in {*wanted, *reported.of_assets}}
    missing = {asset: rest for asset, rest in sorted(rests.items()) if rest}
    for asset, rest in missing.items():
        metadata = _metadata(rest, run, step, bill)
        observation = dg.AssetObservation(asset, metadata=metadata, partition=partition_of(bill.work_of(step)))
        report_observation(instance, run, step, observation, "the cost that is in no materialization")
    return len(missing)


def _metadata(rest: int, run: dg.DagsterRun, step: str, bill: _Bill) -> dict[str, Any]:
    """Return the metadata of a difference, with the receipts of the pools that were opened for the step."""
    pools = ", ".join(sorted({part.pool_id for part in (*bill.parts[step], *bill.parts.get("", ()))}))
    opened = [
        receipt
        for receipt in sky.receipts_of(sky.Work(system="dagster", run=run.run_id))
        if receipt["work"].get("task", "") in (step, "")
    ]
    receipt = {RECEIPT: dg.MetadataValue.json(opened[0] if len(opened) == 1 else opened)} if opened else {}
    return {OTHER_COST_USD: rest / MICRO_PER_USD, POOL_ID: pools, **names_of(bill.work_of(step)), **receipt}


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
