"""A call that an orchestrator makes, checked before anything is rented for it."""

from __future__ import annotations

import inspect
from typing import Any

from skyward_core.compute import PendingCompute
from skyward_core.engine.packed_functions import name_of
from skyward_core.serialization import pickling
from skyward_core.serialization.plain_arguments import PlainTypes, named_arguments, plain_arguments
from skyward_core.worker import shared_values


def plain_call[R](
    pending: PendingCompute[R],
    table: PlainTypes,
    *,
    names: tuple[str, str] | None = None,
    replace: pickling.Replace | None = None,
) -> PendingCompute[R]:
    """Return a call whose arguments are plain values by the table of an integration. Rents and sends nothing.

    `names` are what the user calls positional and keyword arguments (`("op_args", "op_kwargs")`); None: the function's
    parameters name them. `replace` is the pool's `replace_object`, by default that of the table. Raises NotPicklable
    for what cannot travel; its path begins with the user's name for it.
    """
    named = list(named_arguments(_parameters(pending.fn), pending.args, pending.kwargs, names))
    with shared_values.noted():
        plain = plain_arguments(named, table, replace)
        pickling.refuse_what_cannot_travel(pending.fn, label=name_of(pending.fn), replace=replace or table.replace)
    count = len(pending.args)
    kwargs = dict(zip(pending.kwargs, plain[count:], strict=True))
    return PendingCompute(pending.fn, tuple(plain[:count]), kwargs, pending.timeout_seconds)


def _parameters(fn: Any) -> list[str]:
    """The names of the parameters that positional arguments go to."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # of C
        return []
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
