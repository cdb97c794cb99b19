"""What each task run has cost, and what its calls have reported with `sky.report`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import skyward_core as sky


@dataclass(slots=True)
class TaskRunCost:
    """One task run: its task's name, the number of its calls that have ended, and the cost in USD of each of its uses
    of pools, by the ids of the uses.
    """

    task_run_id: str
    task: str = ""
    calls: int = 0
    usd_by_use: dict[str, float] = field(default_factory=dict[str, float])
    use: sky.Utilisation = field(default_factory=sky.Utilisation)
    """Of its last use of a pool, and so of its last attempt. The thread of the pool's events adds to it."""

    @property
    def usd(self) -> float:
        """What it has cost so far."""
        return sum(self.usd_by_use.values())


class TaskCosts:
    """All task runs of a flow run. Not thread-safe."""

    def __init__(self) -> None:
        self.runs: dict[str, TaskRunCost] = {}
        self.changed: set[str] = set()
        """The ids of the task runs that have reported since this was last emptied."""
        self._task_run_of: dict[str, str] = {}
        """By use."""
        self._early: set[str] = set()
        """Uses that have reported before `begin`."""

    def begin(self, use: sky.PoolUse) -> None:
        """Note that a task run has made a call; more often for several ones."""
        run = self._run(use.work.task_run)
        run.task, run.use = use.work.task, use.utilisation
        self._task_run_of[use.id] = run.task_run_id
        if use.id in self._early:
            self._early.remove(use.id)
            self.changed.add(run.task_run_id)

    def note(self, task_run_id: str, use_id: str, usd: float, calls: int) -> None:
        """Take what a use of a pool has cost so far; so many more of its calls have ended."""
        run = self._run(task_run_id)
        run.usd_by_use[use_id] = usd
        run.calls += calls

    def report(self, event: sky.CallReported) -> None:
        """Note that a call has reported; its use has the values."""
        if (task_run_id := self._task_run_of.get(event.use)) is None:
            self._early.add(event.use)
        else:
            self.changed.add(task_run_id)

    def costliest(self, most: int | None = None) -> list[TaskRunCost]:
        """Return the task runs, those that cost most first."""
        return sorted(self.runs.values(), key=lambda run: -run.usd)[:most]

    def by_task(self) -> dict[str, tuple[int, float]]:
        """Return the number of task runs and the USD of each task, those that cost most first."""
        found: dict[str, tuple[int, float]] = {}
        for run in self.runs.values():
            count, usd = found.get(run.task, (0, 0.0))
            found[run.task] = count + 1, usd + run.usd
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    @property
    def usd(self) -> float:
        """The cost of all of them."""
        return total(run.usd for run in self.runs.values())

    def _run(self, task_run_id: str) -> TaskRunCost:
        return self.runs.setdefault(task_run_id, TaskRunCost(task_run_id))


def with_the_ledger(rows: Iterable[dict[str, Any]], parts: Iterable[sky.CostPart]) -> list[dict[str, Any]]:
    """Return the rows of task runs with their costs by the ledger; what it has of further task runs is added."""
    usd: dict[str, float] = {}
    task: dict[str, str] = {}
    for part in parts:
        if part.work.task_run:
            usd[part.work.task_run] = usd.get(part.work.task_run, 0.0) + float(part.cost_usd)
            task[part.work.task_run] = part.work.task
    known = [{**row, "USD": round(usd.pop(row["task run"], row["USD"]), 6)} for row in rows]
    return known + [{"task": task[one], "task run": one, "USD": round(its, 6)} for one, its in usd.items()]


def nodes_with_the_ledger(
    rows: Iterable[dict[str, Any]], receipts: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows of machines as the receipts of their pools have them: a killed process has left them as rented.

    A shared pool's rows have no cost.
    """
    machines = {one["cloud_id"]: one for receipt in receipts.values() for one in receipt["resources"]}
    return [_node_with_the_ledger(row, machines.get(row["instance id"])) for row in rows]


def _node_with_the_ledger(row: dict[str, Any], machine: Mapping[str, Any] | None) -> dict[str, Any]:
    if machine is None or machine["gone_at"] is None or row["state"] == "lost":
        return row
    seconds = round(sum(machine["seconds"].values()), 1)
    usd = row["USD"] if row["USD"] == "" else round(machine["cost_usd"], 6)
    return {**row, "seconds": seconds, "USD": usd, "state": "ended"}


def total(amounts: Iterable[float]) -> float:
    """Return the sum, without the noise below a hundredth of a micro-dollar."""
    return round(sum(amounts), 8)
