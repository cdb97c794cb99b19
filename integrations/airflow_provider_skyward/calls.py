"""The calls of a task: its function, its arguments, and what the function wants of Airflow's context."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS
from airflow.sdk.execution_time.lazy_sequence import LazyXComSequence

import skyward_core as sky

if TYPE_CHECKING:
    from airflow.sdk import Context

PLAIN_CONTEXT = frozenset(
    {
        *(
            "ds",
            "ds_nodash",
            "ts",
            "ts_nodash",
            "ts_nodash_with_tz",
            "run_id",
            "task_instance_key_str",
            "try_number",
            "task_reschedule_count",
            "test_mode",
        ),
        *(
            "logical_date",
            "data_interval_start",
            "data_interval_end",
            "partition_key",
            "partition_date",
            "params",
            "templates_dict",
            "reason",
        ),
        *(
            "prev_data_interval_start_success",
            "prev_data_interval_end_success",
            "prev_start_date_success",
            "prev_end_date_success",
        ),
        *("map_index_template", "expanded_ti_count"),
    }
)
"""Values of Airflow's context that are plain data, and so may travel to a node.

The others (`ti`, `dag_run`, `task_state_store`, ...) talk to Airflow.
"""


def calls_of(
    fn: Callable[..., Any], args: Collection[Any], kwargs: Mapping[str, Any], map_over: Sequence[str], context: Context
) -> list[sky.PendingCompute[Any]]:
    """Return the calls of one execution, with the context values that the function takes.

    Raises BadRequest for a function that cannot run on a node, and for arguments that do not fit.
    """
    loaded_args, loaded_kwargs = _loaded(list(args)), _loaded(dict(kwargs))
    refuse_callable(fn, loaded_args, loaded_kwargs, map_over)
    names = _context_names(inspect.signature(fn).parameters, loaded_args, loaded_kwargs)
    from_context = {name: _as_plain(name, context[name]) for name in names if name in context}  # type: ignore[literal-required]
    return _pending_calls(fn, loaded_args, from_context | loaded_kwargs, map_over)


def refuse_callable(fn: Callable[..., Any], args: object, kwargs: object, map_over: Sequence[str]) -> None:
    """Raise BadRequest for a function that cannot run on a node."""
    if not callable(fn):
        raise sky.BadRequest(f"python_callable={fn!r} is no function")
    name = getattr(fn, "__name__", "") or repr(fn)
    if inspect.iscoroutinefunction(inspect.unwrap(fn)):
        raise sky.BadRequest(
            f"{name} is async, and a node runs plain functions: write `def {name}` and call asyncio.run(...) inside it"
        )
    parameters = inspect.signature(fn).parameters
    takes_any = _takes_any(parameters)
    for argument in map_over:
        if argument not in parameters and not takes_any:
            near = get_close_matches(argument, parameters, 1)
            raise sky.BadRequest(
                f"map_over={argument!r}: {name} has no such argument{f'; did you mean {near[0]!r}?' if near else ''}"
            )
    if (
        isinstance(args, (list, tuple))
        and isinstance(kwargs, Mapping)
        and (unplain := _context_names(parameters, args, kwargs) - PLAIN_CONTEXT)
    ):
        raise sky.BadRequest(
            f"{name} asks for {', '.join(map(repr, sorted(unplain)))}, which talks to Airflow and cannot travel to a"
            " node. Ask for plain data instead (ds, ts, run_id, params, ...), pass what you need of it as a template,"
            " such as op_kwargs={'try_number': '{{ ti.try_number }}'}, or return the value and push it in"
            " another task"
        )


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _context_names(
    parameters: Mapping[str, inspect.Parameter], args: Collection[Any], kwargs: Mapping[str, Any]
) -> set[str]:
    """Return the names of context values that a signature has and the caller has not given.

    With `**kwargs`, also those of all values that are loaded and can travel.
    """
    named = {name for name in list(parameters)[len(args) :] if name in KNOWN_CONTEXT_KEYS}
    others = PLAIN_CONTEXT - set(parameters) if _takes_any(parameters) else ()
    unnamed = {name for name in others if not name.startswith("prev_")}  # each queries Airflow's database
    return (named | unnamed) - set(kwargs)


def _as_plain(name: str, value: Any) -> Any:
    """Return a context value without Airflow's and pendulum's classes, which may be missing on a node."""
    if hasattr(value, "__wrapped__"):  # a lazy value: queries Airflow's database on first use
        value = value.__wrapped__
    if isinstance(value, datetime):
        return datetime.fromtimestamp(value.timestamp(), UTC)
    if isinstance(value, Mapping):
        return {key: _as_plain(name, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_plain(name, item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise sky.BadRequest(
        f"the context's {name!r} holds a {type(value).__name__}, which is no plain data: pass it as a template"
    )


def _loaded(value: Any) -> Any:
    """Return loaded values: results of mapped tasks are loaded one by one on access, which is impossible on a node."""
    if isinstance(value, LazyXComSequence):
        return list(value)
    if isinstance(value, dict):
        return {key: _loaded(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_loaded, value))
    return value


def _pending_calls(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], map_over: Sequence[str]
) -> list[sky.PendingCompute[Any]]:
    """Return the calls to make: one, or with `map_over` one for each item.

    Raises BadRequest for arguments that do not fit.
    """
    compute = sky.compute(fn)
    try:
        arguments = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise sky.BadRequest(f"{getattr(fn, '__name__', fn)}: {error}") from error
    if not map_over:
        return [compute(*arguments.args, **arguments.kwargs)]
    given = {**dict(kwargs), **arguments.arguments}
    columns = [_items(name, given.get(name)) for name in map_over]
    if len(lengths := {len(column) for column in columns}) > 1:
        raise sky.BadRequest(f"map_over={tuple(map_over)}: the sequences differ in length ({sorted(lengths)})")
    calls = list[sky.PendingCompute[Any]]()
    for items in zip(*columns, strict=True):
        arguments.arguments.update(zip(map_over, items, strict=True))
        calls.append(compute(*arguments.args, **arguments.kwargs))
    return calls


def _items(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return value
    raise sky.BadRequest(
        f"map_over={name!r} needs a list or tuple in {name}, one item for each call, and found {type(value).__name__}"
    )
