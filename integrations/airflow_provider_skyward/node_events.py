"""What a function on a node gets as `outlet_events`. It travels by value, and imports nothing of Airflow."""

import json
from collections.abc import Callable, Sequence
from typing import Any


class OutletEvent:
    """The event of one outlet: `extra` is a dictionary; `add` names an asset of an alias."""

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}
        self.added: list[dict[str, Any]] = []

    def add(self, uri: str, extra: dict[str, Any] | None = None) -> None:
        """Add an event of the asset with this URI, for an outlet that is an alias."""
        self.added.append({"uri": uri, "extra": extra or {}})


class OutletEvents:
    """The outlets' events, by the name or the URI of each outlet."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._events: dict[str, OutletEvent] = {}

    def __getitem__(self, outlet: object) -> OutletEvent:
        name = next((str(one) for one in (getattr(outlet, "name", None), outlet) if str(one) in self._names), None)
        if name is None:
            raise KeyError(f"{outlet!r} is no outlet of this task; they are {', '.join(self._names) or 'none'}")
        return self._events.setdefault(name, OutletEvent())

    def plain(self) -> dict[str, Any]:
        """Return the events as JSON data. Raises TypeError for an extra that is none."""
        found = {name: {"extra": event.extra, "added": event.added} for name, event in self._events.items()}
        return json.loads(json.dumps(found))


def with_outlet_events(fn: Callable[..., Any], names: Sequence[str], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call a function with `outlet_events`; return its result, and the events as JSON data."""
    events = OutletEvents(names)
    result = fn(*args, **kwargs, outlet_events=events)
    return result, events.plain()
