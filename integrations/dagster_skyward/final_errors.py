"""Errors that another try of a step meets again: Dagster's retry policy does not apply to them."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import dagster as dg

import skyward_core as sky

SKIP_ADVICE = (
    "Dagster skips what is downstream of an output that was not made: give the asset output_required=False (an op"
    " dg.Out(is_required=False)), write it with `yield`, and `except sky.Skip: return`"
)


@contextmanager
def not_tried_again() -> Generator[None]:
    """Apply `refuse_retries` to an error of the block."""
    try:
        yield
    except Exception as error:
        refuse_retries(error)
        raise


def refuse_retries(error: Exception) -> None:
    """Make a final error a failure after which Dagster does not try the step again. Others stay as they are.

    Dagster tries a step again after any error but a `Failure` with `allow_retries=False`. The error stays the same
    object, with its attributes, causes and notes, and `except sky.BudgetExceeded` still catches it.
    """
    if isinstance(error, dg.Failure) or not isinstance(error, sky.SkywardError):
        return
    if not error.is_final and not error.needs_change:
        return
    if isinstance(error, sky.Skip):
        error.advised(SKIP_ADVICE)
    failure: Any = error
    failure.__class__ = _failure_class(type(error))
    failure.description, failure.metadata, failure.allow_retries = str(error), {}, False


@functools.cache
def _failure_class(kind: type[Exception]) -> type[Exception]:
    return type(
        kind.__name__,
        (kind, dg.Failure),  # pyright: ignore[reportGeneralTypeIssues] - both are exceptions
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__},
    )
