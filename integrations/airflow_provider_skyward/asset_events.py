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

    `cost` has the fields to add.
    """
    for outlet in outlets:
        events = [written[name] for name in _names(outlet) if name in written]
        if isinstance(outlet, Asset):
            extra = dict(cost)
            for event in events:
                extra |= event["extra"]
            accessors[outlet].extra.update(extra)
        elif isinstance(outlet, AssetAlias):
            for event in events:
                for added in event["added"]:
                    accessors[outlet].add(Asset(uri=added["uri"]), extra={**cost, **event["extra"], **added["extra"]})


def _names(outlet: Any) -> Iterator[str]:
    for name in (getattr(outlet, "name", None), getattr(outlet, "uri", None)):
        if name:
            yield str(name)
