"""What travels to a node in place of Dagster's values: it has no Dagster."""

from collections.abc import Callable
from typing import Any

import dagster as dg

import skyward_core as sky


def _refuse_context(context: Any) -> Any:
    """It contains a database and a hundred other objects, and the first of them cannot travel."""
    raise sky.BadRequest(
        f"the function, or an argument of it, uses the step's `context` (a Dagster {type(context).__name__}), which"
        " cannot travel to a node. Take what it needs of it as arguments: compute.run(context, train,"
        " context.partition_key); and log with print or logging: both arrive in the step's log"
    )


def _refuse_resource(_: Any) -> Any:
    raise sky.BadRequest(
        "the function, or an argument of it, uses the resource itself, which cannot travel to a node: call"
        " compute.run(...) in the step, and not within the function that runs on a node"
    )


def _values_of(config: dg.Config) -> sky.PlainObject:
    return sky.PlainObject(**{name: getattr(config, name) for name in type(config).model_fields})


PLAIN = sky.PlainTypes(
    {
        **dict.fromkeys(
            (dg.AssetExecutionContext, dg.OpExecutionContext, dg.AssetCheckExecutionContext, dg.InitResourceContext),
            _refuse_context,
        ),
        "dagster_skyward.resource.SkywardResource": _refuse_resource,
        "dagster_skyward.pipes.PipesSkywardClient": _refuse_resource,
        # other resources travel as they are: to nodes that have Dagster
        dg.ConfigurableResource: lambda _: NotImplemented,
        dg.Config: _values_of,
    }
)


def plain_pending(
    fn: Callable[..., Any] | sky.ComputeFunction[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: tuple[str, str] | None = None,
) -> sky.PendingCompute[Any]:
    """Return a call with plain values. Raises NotPicklable, before a pool opens for it."""
    inner = fn.local if isinstance(fn, sky.ComputeFunction) else fn
    return sky.plain_call(sky.PendingCompute(inner, args, kwargs), PLAIN, names=names)
