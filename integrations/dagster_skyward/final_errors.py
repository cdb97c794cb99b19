"""Errors that another try of a step meets again: Dagster's retry policy does not apply to them."""

from __future__ import annotations

import functools

import dagster as dg

import skyward_core as sky

FINAL = (sky.BadRequest, sky.NotPicklable, sky.CredentialsError, sky.BudgetExceeded)
"""Bad input, refused credentials, and used-up money; the same as in Airflow's `default_retry_policy`."""


def refuse_retries(error: Exception) -> None:
    """Make an error of FINAL a failure after which Dagster does not try the step again. Others stay as they are.

    Dagster tries a step again after any error but a `Failure` with `allow_retries=False`. The error stays the same
    object, with its attributes, causes and notes, and `except sky.BudgetExceeded` still catches it.
    """
    if not isinstance(error, FINAL) or isinstance(error, dg.Failure):
        return
    error.__class__ = _failure_class(type(error))
    assert isinstance(error, dg.Failure)
    error.description, error.metadata, error.allow_retries = str(error), {}, False


@functools.cache
def _failure_class(kind: type[Exception]) -> type[Exception]:
    return type(
        kind.__name__,
        (kind, dg.Failure),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__},
    )
