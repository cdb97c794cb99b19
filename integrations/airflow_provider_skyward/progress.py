"""What Airflow shows of a running pool: live metrics in the task state store, gauges, and warnings about money.

`see` gets each event of the pool, under the attempt's lock, in any thread. `tick` and `end` talk to Airflow, so only
the main thread calls them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import skyward_core as sky
from airflow_provider_skyward.airflow_compat import gauge
from airflow_provider_skyward.task_log import alarm_waits

METRICS_KEY = "skyward_metrics"
"""The key of the live metrics in Airflow's task state store."""
SECONDS_BETWEEN_WRITES = 15.0
SECONDS_AFTER_AN_ERROR = 60.0
"""Each request to an api-server that is away takes the main thread some seconds."""
GAUGES = {"skyward.cost_usd": "cost_usd", "skyward.usd_per_hour": "usd_per_hour", "skyward.nodes": "nodes"}
"""Names of gauges, by the metric that each one shows. Tags: dag_id, task_id, provider."""

MOST_POINTS = 120
"""Of the course over time in the live metrics. When there are more, every other one is dropped."""

type OnWarning = Callable[[Any], object]


class Progress:
    """The newest facts of one pool, and when they were written last."""

    def __init__(self, log: Any, context: Any, work: sky.Work) -> None:
        self._log = log
        self._context = context
        self._work = work
        self.on_warning: Sequence[OnWarning] = ()
        """Called with the task's context and the warning in it, under `skyward_warning`."""
        self._facts: dict[str, Any] = {"pool_id": "", "provider": "", "cost_usd": 0.0, "usd_per_hour": 0.0, "nodes": 0}
        self.live_cost: Callable[[], float | None] | None = None
        """Returns what the task has cost so far on a pool that others use too, None if that is not known now; without
        it the cost is that of the pool.
        """
        self._use = sky.Utilisation()
        self._warnings: list[dict[str, Any]] = []
        self._course: list[list[float | None]] = []
        """Points over time: seconds since 1970, accelerators and processors in percent, USD."""
        self._written_at = 0.0
        self._paused_until = 0.0

    def see(self, event: sky.SkywardEvent) -> None:
        """Take note of an event. Sends nothing."""
        self._use.see(event)
        match event:
            case sky.InfraCreating():
                self._facts["pool_id"] = event.pool_id
            case sky.InfraCreated():
                self._facts["usd_per_hour"] = event.price_per_hour or 0.0  # until the first CostUpdate
            case sky.InstanceProvisioned():
                self._facts["provider"] = event.provider
            case sky.PoolReady():
                self._facts |= {"pool_id": event.pool_id, "nodes": event.nodes, "slots": event.slots}
            case sky.NodesScaled():
                self._facts["nodes"] = event.nodes
            case sky.CallProgress():
                self._facts |= {"calls": event.submitted, "calls_done": event.done, "calls_failed": event.failed}
            case sky.CostUpdate():
                self._facts |= {
                    "cost_usd": event.accumulated_cost if self.live_cost is None else self._facts["cost_usd"],
                    "usd_per_hour": event.hourly_rate,
                    "nodes": event.spot_count + event.ondemand_count,
                    "spot_nodes": event.spot_count,
                    "seconds": round(event.elapsed_seconds, 1),
                }
            case sky.BudgetWarning():
                self._warnings.append(
                    {"reason": event.reason, "spent_usd": event.spent_usd, "limit_usd": event.limit_usd}
                    | {"account": event.account, "pool_id": self._facts["pool_id"]}
                )
            case _:
                pass

    def tick(self) -> None:
        """Write what is new, at most every 15 seconds, and deliver warnings."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            self._warn(warning)
        if time.monotonic() - self._written_at >= SECONDS_BETWEEN_WRITES and self._facts["pool_id"]:
            self._written_at = time.monotonic()
            self._write()

    def end(self, bill: Mapping[str, Any]) -> None:
        """Write the last facts: those of the bill, of a pool without nodes."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            self._warn(warning)
        self._facts |= {"pool_id": bill["pool_id"], "cost_usd": bill["cost_usd"], "seconds": bill["seconds"]}
        self._facts |= {"usd_per_hour": 0.0, "nodes": 0, "spot_nodes": 0}
        self.live_cost = None
        self._write()

    def calls_run(self, count: int) -> None:
        """Say that so many calls run from now on, of those for which the pool has no event."""
        self._use.running(count)

    def utilisation(self) -> dict[str, float]:
        """Return the means and the maxima over all nodes while calls ran, in percent; none of what was not measured."""
        return self._use.numbers()

    def metrics(self) -> dict[str, Any]:
        """Return the facts as JSON data: percent are means over the nodes; those that end with _mean and _max are
        of the time in which calls ran.
        """
        if self.live_cost is not None and (cost_usd := self.live_cost()) is not None:
            self._facts["cost_usd"] = cost_usd
        reported = self._use.last_values()
        known = self._use.now() | self._use.numbers() | ({"reported": reported} if reported else {})
        return self._facts | known | {"updated_at": datetime.now(UTC).isoformat(timespec="seconds")}

    def _write(self) -> None:
        metrics = self.metrics()
        now = round(datetime.now(UTC).timestamp(), 1)
        self._course.append([now, metrics.get("gpu_percent"), metrics.get("cpu_percent"), metrics["cost_usd"]])
        if len(self._course) > MOST_POINTS:
            del self._course[1:-1:2]
        metrics["course"] = self._course
        tags = {"dag_id": self._work.workflow, "task_id": self._work.task, "provider": metrics["provider"]}
        for name, metric in GAUGES.items():
            gauge(name, float(metrics[metric]), tags)
        store = self._context.get("task_state_store")
        if store is None or time.monotonic() < self._paused_until:
            return
        try:
            with alarm_waits():
                store.set(METRICS_KEY, sky.shown_text.visible_data(metrics))
        except Exception as error:  # the work is more important than its metrics
            self._paused_until = time.monotonic() + SECONDS_AFTER_AN_ERROR
            self._log.warning("the live metrics could not be stored; the next try is in a minute: %s", error)

    def _warn(self, warning: dict[str, Any]) -> None:
        for callback in self.on_warning:
            try:
                callback({**self._context, "skyward_warning": warning})
            except Exception:  # the work goes on: the log has the warning too
                self._log.exception("a callback of on_budget_warning has failed")
