"""The end of the money of a flow run: it fails with the reason, and neither the task nor the flow is tried again."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from prefect.client.schemas.objects import FlowRunPolicy
from prefect.context import SyncClientContext

import skyward_core as sky
from prefect_skyward.ui import RunLog

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from prefect_skyward.report.run_report import RunReport


class MoneyEnd:
    """Sees to it, once for each flow run, that its money being used up is its end. Subflows that use the pools of the
    flow run around them are flow runs of it (`covers`).

    Prefect's server decides whether a flow run is tried again, when its failure is proposed, by the policy of the run.
    So the policy is changed before the error reaches the flow.
    """

    def __init__(self, flow_run: FlowRun | None, log: RunLog, report: RunReport | None) -> None:
        self._flow_runs = [flow_run] if flow_run is not None else []
        """Those that may be tried again."""
        self._log = log
        self._report = report
        self._lock = threading.Lock()
        self._has_ended = False

    def covers(self, flow_run: FlowRun) -> None:
        """A subflow uses the same money: it is not tried again either, also if it begins when the money is used up."""
        with self._lock:
            self._flow_runs.append(flow_run)
            if self._has_ended:
                self._forbid_all()

    def after(self, error: BaseException, max_cost: float | None, pool_id: str = "") -> None:
        """Act if this is the error of money that is used up; called before the error is raised in a task.

        `max_cost` is the limit of the call's pool in USD, `pool_id` is "" if it is not known.
        """
        if not isinstance(error, sky.BudgetExceeded):
            return
        if self._report is not None:
            self._report.money_is_used_up(error, None if error.account else max_cost, pool_id)
        with self._lock:  # held over the request: another task must not fail the flow before it is answered
            self._has_ended = True
            self._forbid_all()

    def _forbid_all(self) -> None:
        while self._flow_runs:
            self._log.run(self._forbid_retries, self._flow_runs.pop())

    def _forbid_retries(self, flow_run: FlowRun) -> None:
        policy = flow_run.empirical_policy
        if not policy.retries:
            return
        try:
            with SyncClientContext.get_or_create() as context:
                context.client.update_flow_run(flow_run.id, empirical_policy=FlowRunPolicy(retries=0, retry_delay=0))
        except Exception as failure:
            self._log.say(logging.WARNING, f"the flow run may be tried again, though its money is used up: {failure!r}")
        else:
            self._log.say(logging.ERROR, "the money of the flow run is used up: it is not tried again")
