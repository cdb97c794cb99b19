"""`BudgetNotifier`: passes budget warnings, and failures for lack of money, on to other notifiers of Airflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from airflow.sdk import BaseNotifier

import skyward_core as sky


class BudgetNotifier(BaseNotifier):
    """Calls other notifiers if the money of a pool runs low, or was used up.

    It is for `on_budget_warning=` of an operator and for `on_failure_callback=`; of failures it passes on only those
    for lack of money. The notifiers' templates may use `skyward_warning`: `reason`, `spent_usd`, `limit_usd`,
    `account`, `pool_id`.

        to_slack = BudgetNotifier(send_slack_notification(text="{{ ti.task_id }}: {{ skyward_warning.reason }}"))
        SkywardOperator(..., max_cost=20, on_budget_warning=to_slack, on_failure_callback=to_slack)
    """

    def __init__(self, *notifiers: Callable[[Any], object]) -> None:
        super().__init__()
        self.notifiers = notifiers

    def notify(self, context: Any) -> None:
        """Call the notifiers, if there is something to say."""
        known = dict(context)
        if "skyward_warning" not in known:
            reason = _lack_of_money(known.get("exception"))
            if reason is None:
                return
            known["skyward_warning"] = dict.fromkeys(("spent_usd", "limit_usd", "account", "pool_id")) | {
                "reason": reason
            }
        for notifier in self.notifiers:
            notifier(known)


def _lack_of_money(error: object) -> str | None:
    found = next((one for one in _causes(error) if isinstance(one, sky.BudgetExceeded)), None)
    return None if found is None else str(found)


def _causes(error: object) -> Iterator[BaseException]:
    while isinstance(error, BaseException):
        yield error
        error = error.__cause__
