"""Arguments that come from an orchestrator, as values that a node without the orchestrator can load.

An integration gives a table of its types. What stands in collections is converted at once, in the thread that asks: a
conversion may talk to the orchestrator. What stands deeper (in an attribute, a closure) is converted while it is
pickled, by `PlainTypes.replace`. What cannot travel is named by the path from what the user has written.
"""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary
from zoneinfo import ZoneInfo

from skyward_core.errors import NotPicklable, SkywardError
from skyward_core.serialization import pickling
from skyward_core.serialization.unpicklable import SCALARS, item_path

type Conversion = Callable[[Any], Any]
"""Returns what travels in place of a value; NotImplemented: the value itself. Raises BadRequest, with what to write
instead, for one that must not travel.
"""


class PlainTypes:
    """What travels in place of values of an orchestrator's types, and of pendulum's, which come from all of them.

    A key is a class, or its full name where its import would take long or may fail ("pendulum.date.Date"). It stands
    for the subclasses too; the nearest class counts.
    """

    def __init__(self, conversions: Mapping[type | str, Conversion]) -> None:
        self._conversions: dict[type | str, Conversion] = {**_PENDULUM, **conversions}
        self._known: WeakKeyDictionary[type, Conversion | None] = WeakKeyDictionary()

    def replace(self, obj: Any) -> Any:
        """Return what to pickle in place of an object, NotImplemented for the object itself."""
        conversion = self._conversion(cast("type[Any]", type(obj)))
        return NotImplemented if conversion is None else conversion(obj)

    def plain(self, value: Any) -> Any:
        """Return the value with plain ones in its lists, tuples, dictionaries and sets. Where nothing is to be
        converted, it is the same object.

        Raises NotPicklable, whose path begins below the value, for what cannot be converted.
        """
        return self._plain(value, {})

    def _conversion(self, kind: type) -> Conversion | None:
        if kind not in self._known:
            names = ((cls, f"{cls.__module__}.{cls.__qualname__}") for cls in kind.__mro__)
            keys = (key for both in names for key in both if key in self._conversions)
            self._known[kind] = next((self._conversions[key] for key in keys), None)
        return self._known[kind]

    def _plain(self, value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
        kind = cast("type[Any]", type(value))
        if kind in SCALARS:
            return value
        if id(value) in seen:  # shared, or a part of itself
            return seen[id(value)][1]
        seen[id(value)] = (value, value)  # with the value, so that no other one takes its id
        if (conversion := self._conversion(kind)) is not None:
            new = _converted(value, conversion)
            new = value if new is NotImplemented else self._plain(new, seen)
        elif kind is dict:
            new = value if _are_scalars(value) and _are_scalars(value.values()) else self._dictionary(value, seen)
        elif kind in (list, tuple, set, frozenset):
            new = value if _are_scalars(value) or _are_rows(value) else self._items(value, kind, seen)
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            new = self._items(value, cast("Any", kind)._make, seen)
        else:
            return value
        seen[id(value)] = (value, new)
        return new

    def _dictionary(self, value: dict[Any, Any], seen: dict[int, tuple[Any, Any]]) -> dict[Any, Any]:
        new = {
            self._part(key, lambda key=key: f".<key> {reprlib.repr(key)}", seen): self._part(
                item, lambda key=key: item_path(key), seen
            )
            for key, item in value.items()
        }
        is_same = all(a is b and x is y for (a, x), (b, y) in zip(value.items(), new.items(), strict=False))
        return value if is_same else new

    def _items(self, value: Any, make: Callable[[Any], Any], seen: dict[int, tuple[Any, Any]]) -> Any:
        new = [self._part(item, lambda i=i: f"[{i}]", seen) for i, item in enumerate(value)]
        return value if all(a is b for a, b in zip(value, new, strict=True)) else make(new)

    def _part(self, value: Any, path: Callable[[], str], seen: dict[int, tuple[Any, Any]]) -> Any:
        if type(value) in SCALARS:
            return value
        try:
            return self._plain(value, seen)
        except NotPicklable as error:
            raise _moved(error, path()) from error.__cause__


class PlainObject(types.SimpleNamespace):
    """The values of an object whose class belongs to an orchestrator, as attributes; without its methods."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r} is no value of this object. On a node it has the values of the orchestrator's object"
            f" ({', '.join(vars(self))}), and not its methods: call them before, and pass what they return"
        )


def named_arguments(
    parameters: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, str] | None
) -> Iterator[tuple[str, Any]]:
    """Yield each argument with what the user calls it.

    `names` are those of positional and keyword arguments where the user writes them as a list and a dictionary
    (`op_args[0]`). None: the `parameters` of the function have them.
    """
    positional, keyword = names or ("args", "")
    for i, value in enumerate(args):
        yield parameters[i] if names is None and i < len(parameters) else f"{positional}[{i}]", value
    for name, value in kwargs.items():
        yield f"{keyword}{item_path(name)}" if keyword else name, value


def plain_arguments(
    named: list[tuple[str, Any]], table: PlainTypes, replace: pickling.Replace | None = None
) -> list[Any]:
    """Return arguments as plain values, after a trial whether they can travel.

    Raises NotPicklable, whose path begins with the name of the argument.
    """
    plain: list[Any] = []
    for name, value in named:
        try:
            plain.append(table.plain(value))
        except NotPicklable as error:
            raise _moved(error, name) from error.__cause__
    names = tuple(name for name, _ in named)
    pickling.refuse_what_cannot_travel(tuple(plain), label=names, replace=replace or table.replace)
    return plain


def _are_scalars(items: Iterable[Any]) -> bool:
    """In C: a list may have a million numbers."""
    return SCALARS.issuperset(map(type, items))


def _are_rows(items: Any) -> bool:
    """Whether all are lists, or all dictionaries, of scalars. In C: a table may have a million rows."""
    kinds = set(map(type, items))
    if kinds == {dict}:
        return _are_scalars(chain.from_iterable(items)) and _are_scalars(chain.from_iterable(map(dict.values, items)))
    return kinds <= {list, tuple} and _are_scalars(chain.from_iterable(items))


def _converted(value: Any, conversion: Conversion) -> Any:
    try:
        return conversion(value)
    except SkywardError as error:
        raise NotPicklable(f" cannot travel: {error}", "") from error


def _moved(error: NotPicklable, path: str) -> NotPicklable:
    """Return the error for a value that has the value of the error at this path."""
    text = str(error)
    return NotPicklable(f"{path}{text}", f"{path}{error.path}")


# ── pendulum ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _zone(zone: tzinfo | None, offset: timedelta | None) -> tzinfo | None:
    """A fixed offset: a node may have no time zone database."""
    if zone is None or offset is None:
        return None
    return timezone(offset) if offset else UTC


def _date_time(value: Any) -> datetime:
    zone = _zone(value.tzinfo, value.utcoffset())
    fields = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    return datetime(*fields, tzinfo=zone)


_PENDULUM: dict[type | str, Conversion] = {
    "pendulum.datetime.DateTime": _date_time,
    "pendulum.date.Date": lambda value: date(value.year, value.month, value.day),
    "pendulum.time.Time": lambda value: time(
        value.hour, value.minute, value.second, value.microsecond, _zone(value.tzinfo, value.utcoffset())
    ),
    "pendulum.duration.Duration": lambda value: timedelta(microseconds=round(value.total_seconds() * 1_000_000)),
    "pendulum.tz.timezone.Timezone": lambda zone: UTC if zone.key == "UTC" else ZoneInfo(zone.key),
    "pendulum.tz.timezone.FixedTimezone": lambda zone: timezone(zone.utcoffset(None)),
}
