"""Several calls of one function as one call: the chunks of an executor's `map`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def call_each(fn: Callable[..., Any], chunk: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return what `fn` returns for each group of arguments, in order: a coroutine's result, a generator's list."""
    from skyward_core.worker.runner import completed  # it runs on nodes, which have loaded this

    return [completed(fn(*args)) for args in chunk]
