"""Which errors of a pool another try can help with, and when: what Airflow decides without a policy, and with ours."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import BaseOperator, ExceptionRetryPolicy, RetryAction, RetryRule
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

import skyward_core as sky

CAPACITY_WAIT = timedelta(minutes=10)
"""Clouds say nothing about when machines come back; a shorter wait mostly asks again for nothing."""


def raise_as_airflows(error: BaseException, task: BaseOperator) -> None:
    """Raise what makes Airflow skip a task, or not try it again, for an error that asks for it; return for others.

    For an error that is final by itself a policy is not asked: another try would meet the same error, or pay a second
    time for work that is done.
    """
    if isinstance(error, sky.Skip):
        raise AirflowSkipException(str(error) or "the function has asked to be skipped") from error
    if isinstance(error, sky.BudgetExceeded):
        raise AirflowFailException(
            f"{error}: not tried again. Allow more (max_cost, budget), or ask for less"
        ) from error
    if fails_for_good(error, has_policy=bool(task.retry_policy)):
        connection: str | None = getattr(task, "provider_conn_id", None)
        raise AirflowFailException(f"{error}: not tried again{_where(error, connection)}") from error


def fails_for_good(error: BaseException, *, has_policy: bool) -> bool:
    """Return whether a task is not tried again after an error. `has_policy`: it has a policy for retries of its own."""
    if not isinstance(error, sky.SkywardError):
        return False
    return error.is_final or (error.needs_change and not has_policy)


def _where(error: BaseException, connection: str | None) -> str:
    """Return where this task has its credentials from, if the error is about them."""
    if not isinstance(error, sky.CredentialsError) or isinstance(error, sky.LeaseTampered):
        return ""
    if connection:
        return f". The task has its credentials from the connection {connection!r} (provider_conn_id)"
    return (
        ". The task has no connection, and looks in the worker's environment: put the credentials into a connection of"
        ' Airflow, and name it, provider_conn_id="..."'
    )


def default_retry_policy(capacity_wait: timedelta = CAPACITY_WAIT) -> ExceptionRetryPolicy:
    """Return the retry policy for tasks with a pool: `SkywardOperator(retries=3, retry_policy=default_retry_policy())`.

    No capacity: wait `capacity_wait` and try again. A lost node or a withdrawn offer: try again at once. Used-up money,
    credentials and bad input: fail, because another try fails again. Other errors: as Airflow does without a policy.
    A policy cannot add to the task's `retries`.
    """
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(
                exception=[sky.BadRequest, sky.NotPicklable],
                action=RetryAction.FAIL,
                reason="the request cannot be met as it is written",
            ),
            RetryRule(
                exception=sky.CredentialsError,
                action=RetryAction.FAIL,
                reason="the provider refused the credentials",
            ),
            RetryRule(
                exception=sky.BudgetExceeded,
                action=RetryAction.FAIL,
                reason="the money is used up, and another try would cost again",
            ),
            RetryRule(
                exception=[sky.NoCapacity, sky.ProvisioningTimeout],
                action=RetryAction.RETRY,
                retry_delay=capacity_wait,
                reason="no provider has these machines at present",
            ),
            RetryRule(
                exception=[sky.NodeLost, sky.LeaseLost, sky.OfferGone],
                action=RetryAction.RETRY,
                retry_delay=timedelta(0),
                reason="the machine is gone, and another one may be there",
            ),
        ]
    )
