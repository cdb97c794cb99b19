"""The calls of a task: its function, its arguments, and what the function wants of Airflow's context."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS
from airflow.sdk.exceptions import AirflowFailException
from jinja2 import TemplateError, UndefinedError

import skyward_core as sky
from airflow_provider_skyward.asset_events import EVENTS, node_function
from airflow_provider_skyward.plain_values import NAMES, PLAIN, plain_context

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
OF_A_DATE = frozenset(
    {
        *("ds", "ds_nodash", "ts", "ts_nodash", "ts_nodash_with_tz", "logical_date"),
        *("data_interval_start", "data_interval_end"),
    }
)
"""Values that a DAG run has only if it has a logical date: one that an asset, or a request without a date, has started
has none.
"""


def calls_of(
    fn: Callable[..., Any],
    args: Collection[Any],
    kwargs: Mapping[str, Any],
    map_over: Sequence[str],
    context: Context,
    outlets: Sequence[str] = (),
) -> list[sky.PendingCompute[Any]]:
    """Return the calls of one execution, with the context values that the function takes.

    If it takes `outlet_events`, it gets an object for outlets of these names, and the result of each call is a pair:
    its own, and the events. Raises BadRequest for a function that cannot run on a node, and for arguments that do not
    fit, NotPicklable for those that cannot travel, AirflowFailException for a value that a run without a date lacks.
    """
    refuse_callable(fn, args := tuple(args), kwargs, map_over)
    names = _context_names(inspect.signature(fn).parameters, args, kwargs)
    from_context = plain_context(names - {EVENTS}, cast("Mapping[str, Any]", context))
    given = sky.plain_call(sky.PendingCompute(fn, args, kwargs), PLAIN, names=NAMES)
    call = _recorded(outlets) if EVENTS in names else _direct
    _refuse_undated(fn, names - from_context.keys())
    return _pending_calls(fn, given.args, {**from_context, **given.kwargs}, map_over, call)


def without_date(name: str) -> str:
    """Return why a value of Airflow's context is missing, and what to do; "" if that is not for want of a date."""
    if name not in OF_A_DATE:
        return ""
    return (
        f"{name!r} is not known, because this DAG run has no logical date: an asset, or a request without a date, has"
        " started it. Use run_id or params instead, give the argument a default, or start the run with a logical date"
    )


def reason_of(error: TemplateError) -> str:
    """Return what is wrong with a template, and what to do."""
    if not isinstance(error, UndefinedError):
        return f"{error}. Write {{{{ name }}}}, or {{% raw %}} and {{% endraw %}} around text that has braces itself"
    return without_date(str(error).partition("'")[2].partition("'")[0]) or (
        f"{error}. Write a name that this run has (run_id, params.NAME, ...), give the param a default in"
        " params= of the DAG, or write {{ NAME | default(...) }}"
    )


def _refuse_undated(fn: Callable[..., Any], missing: Collection[str]) -> None:
    """Raise AirflowFailException if a function needs a value that this DAG run lacks: another try would lack it too."""
    parameters = inspect.signature(fn).parameters
    for name in sorted(missing):
        needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        if needed and (why := without_date(name)):
            raise AirflowFailException(f"{getattr(fn, '__name__', fn)}: {why}")


def takes_outlet_events(fn: Callable[..., Any], args: Collection[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function is to write the events of outlets."""
    return EVENTS in _context_names(inspect.signature(fn).parameters, args, kwargs)


def refuse_callable(fn: Callable[..., Any], args: object, kwargs: object, map_over: Sequence[str]) -> None:
    """Raise BadRequest for a function that cannot run on a node."""
    if not map_over and _is_plain(fn):
        return
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
            near = get_close_matches(argument, parameters, 1, cutoff=0.8)
            raise sky.BadRequest(
                f"map_over={argument!r}: {name} has no such argument{f'; did you mean {near[0]!r}?' if near else ''}"
            )
    if (
        isinstance(args, (list, tuple))
        and isinstance(kwargs, Mapping)
        and (unplain := _context_names(parameters, args, kwargs) - PLAIN_CONTEXT - {EVENTS})
    ):
        raise sky.BadRequest(
            f"{name} asks for {', '.join(map(repr, sorted(unplain)))}, which talks to Airflow and cannot travel to a"
            " node. Ask for plain data instead (ds, ts, run_id, params, ...), pass what you need of it as a template,"
            " such as op_kwargs={'try_number': '{{ ti.try_number }}'}, or return the value and push it in"
            " another task"
        )


def _is_plain(fn: object) -> bool:
    """Return whether a function certainly can run on a node. It reads no signature: that takes longer than the rest."""
    if type(fn) is not FunctionType or fn.__dict__:  # a wrapped function, or one with another signature
        return False
    code = fn.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return not code.co_flags & inspect.CO_COROUTINE and KNOWN_CONTEXT_KEYS.isdisjoint(names)


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


type _Call = Callable[[Callable[..., Any], inspect.BoundArguments], sky.PendingCompute[Any]]


def _direct(fn: Callable[..., Any], arguments: inspect.BoundArguments) -> sky.PendingCompute[Any]:
    return sky.compute(fn)(*arguments.args, **arguments.kwargs)


def _recorded(outlets: Sequence[str]) -> _Call:
    """Return what makes calls that record the events of outlets."""

    def call(fn: Callable[..., Any], arguments: inspect.BoundArguments) -> sky.PendingCompute[Any]:
        recorder = node_function()
        # the call has the name of the user's function in the ledger
        named = FunctionType(recorder.__code__, recorder.__globals__, getattr(fn, "__name__", "call"))
        named.__dict__["forms_group"] = getattr(fn, "forms_group", False)
        place = list(inspect.signature(fn).parameters).index(EVENTS)
        after = dict(zip(list(arguments.signature.parameters)[place:], arguments.args[place:], strict=False))
        return sky.compute(named)(fn, tuple(outlets), arguments.args[:place], {**arguments.kwargs, **after})

    return call


def _signature(fn: Callable[..., Any], call: _Call) -> inspect.Signature:
    """Return the signature of a function, without `outlet_events` if the node gives it."""
    signature = inspect.signature(fn)
    if call is _direct:
        return signature
    return signature.replace(parameters=[one for name, one in signature.parameters.items() if name != EVENTS])


def _pending_calls(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], map_over: Sequence[str], call: _Call
) -> list[sky.PendingCompute[Any]]:
    """Return the calls to make: one, or with `map_over` one for each item.

    Raises BadRequest for arguments that do not fit.
    """
    try:
        arguments = _signature(fn, call).bind(*args, **kwargs)
    except TypeError as error:
        raise sky.BadRequest(f"{getattr(fn, '__name__', fn)}: {error}") from error
    if not map_over:
        return [call(fn, arguments)]
    given = {**dict(kwargs), **arguments.arguments}
    columns = [_items(name, given.get(name)) for name in map_over]
    if len(lengths := {len(column) for column in columns}) > 1:
        raise sky.BadRequest(f"map_over={tuple(map_over)}: the sequences differ in length ({sorted(lengths)})")
    calls = list[sky.PendingCompute[Any]]()
    for items in zip(*columns, strict=True):
        arguments.arguments.update(zip(map_over, items, strict=True))
        calls.append(call(fn, arguments))
    return calls


def _items(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return value
    raise sky.BadRequest(
        f"map_over={name!r} needs a list or tuple in {name}, one item for each call, and found {type(value).__name__}"
    )
