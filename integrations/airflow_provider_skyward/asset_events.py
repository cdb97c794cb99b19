"""Asset events of a task: the cost in their `extra`, and what the function has written into `outlet_events`.

Airflow's own `outlet_events` talks to Airflow. A function on a node gets an object of its own (`node_events.py`), whose
contents come back with the result; the worker then writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, AssetAlias

EVENTS = "outlet_events"


def names_of(outlets: Sequence[Any]) -> tuple[str, ...]:
    """Return by which names a function may write the events of outlets: the name and the URI of each."""
    return tuple(name for outlet in outlets for name in _names(outlet))


@cache
def node_function() -> Callable[..., Any]:
    """Return `with_outlet_events`, in a module that nodes do not have, so that it travels by value."""
    functions: dict[str, Any] = {"__name__": "skyward_airflow_node"}
    source = Path(__file__).with_name("node_events.py")
    exec(compile(source.read_text(), str(source), "exec"), functions)  # noqa: S102
    return functions["with_outlet_events"]


def write_events(outlets: Sequence[Any], accessors: Any, written: Mapping[str, Any], cost: Mapping[str, Any]) -> None:
    """Write the events of outlets: the function's extras, and the cost in those of assets, unless it has written one.

    `cost` has the fields to add. Each asset has an equal part of `cost_usd`, in whole micro-dollars.
    """
    its_events = [[written[name] for name in _names(outlet) if name in written] for outlet in outlets]
    assets = sum(
        1 if isinstance(outlet, Asset) else sum(len(event["added"]) for event in events)
        for outlet, events in zip(outlets, its_events, strict=True)
        if isinstance(outlet, (Asset, AssetAlias))
    )
    costs = _divided(cost, assets)
    for outlet, events in zip(outlets, its_events, strict=True):
        if isinstance(outlet, Asset):
            extra = next(costs)
            for event in events:
                extra |= event["extra"]
            accessors[outlet].extra.update(extra)
        elif isinstance(outlet, AssetAlias):
            for event in events:
                for added in event["added"]:
                    extra = {**next(costs), **event["extra"], **added["extra"]}
                    accessors[outlet].add(Asset(uri=added["uri"]), extra=extra)


def _divided(cost: Mapping[str, Any], assets: int) -> Iterator[dict[str, Any]]:
    whole = round(cost.get("cost_usd", 0.0) * 1_000_000)
    for place in range(assets):
        part = (whole * (place + 1) // assets - whole * place // assets) / 1_000_000
        yield {**cost, "cost_usd": part} if "cost_usd" in cost else dict(cost)


def _names(outlet: Any) -> Iterator[str]:
    for name in (getattr(outlet, "name", None), getattr(outlet, "uri", None)):
        if name:
            yield str(name)
