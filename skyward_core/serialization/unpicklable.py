"""Finds the part of a value that cannot be pickled, for the error message.

It does not know how values are pickled. `PickleProbe` tries to pickle a part by itself, and lists the parts of values
that only the pickler knows (functions, cached functions, replaced objects).
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from skyward_core.errors import NotPicklable

SCALARS = frozenset({int, float, str, bool, bytes, complex, type(None)})
"""Types that can always be pickled and have no parts."""

type Parts = Iterable[tuple[str, Any]]
"""Parts of a value, each with the expression that leads to it: `.lock`, `[0]`."""


@dataclass(frozen=True, slots=True)
class PickleProbe:
    """Questions to the pickler: why a value cannot be pickled (None: it can), and the parts of values that only the
    pickler knows (None: other values).
    """

    error_of: Callable[[Any], Exception | None]
    parts_of: Callable[[Any], Parts | None]


_MAX_DEPTH = 32
_MAX_TRIALS = 5_000
_MAX_ITEMS = 1_000  # of one container; an error beyond them names the container


def diagnose(obj: Any, label: str | tuple[str, ...], error: Exception, probe: PickleProbe) -> NotPicklable:
    """Return an error that names the part that fails by itself: it cannot be pickled although all of its parts can.

    `label` is what the value is called, or for a tuple the names of its items. The error's `path` leads from there to
    the part.
    """
    search = _Search(probe)
    if isinstance(label, tuple):
        whole, found = ", ".join(label), search.among(zip(label, obj, strict=False))
    else:
        whole = obj.__name__ if label == "value" and isinstance(obj, types.FunctionType) else label
        found = search.within(whole, obj, error)
    path, leaf, error = found or (whole, obj, error)
    return NotPicklable(f"{path} cannot travel: {_kind_of(leaf)} ({one_line(error)}). {_advice(path, label)}", path)


class _Search:
    """A search from a value that fails, through parts that fail, to the cause. It is bounded, and safe in cycles."""

    def __init__(self, probe: PickleProbe) -> None:
        self._probe = probe
        self._failing: dict[int, Any] = {}
        self._left = _MAX_TRIALS
        self._depth = 0

    def within(self, path: str, obj: Any, error: Exception) -> tuple[str, Any, Exception] | None:
        """Return the cause at or below this object; None if it fails only because of an object around it."""
        self._failing[id(obj)] = obj
        blames_a_part = False
        self._depth += 1
        for suffix, part in self._parts(obj) if self._depth < _MAX_DEPTH else ():
            if id(part) in self._failing:
                blames_a_part = True
            elif (failure := self._error_of(part)) is not None:
                blames_a_part = True
                if found := self.within(path + suffix, part, failure):
                    return found
        self._depth -= 1
        return None if blames_a_part else (path, obj, error)

    def among(self, items: Iterable[tuple[str, Any]]) -> tuple[str, Any, Exception] | None:
        """Return the cause in the first of these that fails."""
        for path, item in items:
            if (failure := self._error_of(item)) is not None and (found := self.within(path, item, failure)):
                return found
        return None

    def _error_of(self, part: Any) -> Exception | None:
        if type(part) in SCALARS or self._left == 0:
            return None
        self._left -= 1
        return self._probe.error_of(part)

    def _parts(self, obj: Any) -> Generator[tuple[str, Any]]:
        # a user's __getstate__, __getattr__ or iterator may raise: then the object itself is the cause
        with suppress(Exception):
            known = self._probe.parts_of(obj)
            yield from _parts_of(obj) if known is None else known


def _parts_of(obj: Any) -> Parts:
    kind = cast("type[Any]", type(obj))
    if kind is dict:
        return _items_of(obj)
    if kind in (list, tuple):
        return [(f"[{i}]", item) for i, item in enumerate(obj[:_MAX_ITEMS])]
    if kind in (set, frozenset):
        return [(f"{{{type(item).__name__}}}", item) for item, _ in zip(obj, range(_MAX_ITEMS), strict=False)]
    if issubclass(kind, tuple) and (fields := getattr(cast(Any, kind), "_fields", None)):
        return [(f".{name}", item) for name, item in zip(fields, obj, strict=True)]
    if kind is functools.partial:
        return [(".func", obj.func), (".args", obj.args), (".keywords", obj.keywords)]
    if kind is types.MethodType:
        return [(".__self__", obj.__self__), ("", obj.__func__)]
    if kind is property:
        return [("", part) for part in (obj.fget, obj.fset, obj.fdel)]
    if kind in (classmethod, staticmethod):
        return [("", obj.__func__)]
    if issubclass(kind, type):
        bases: list[tuple[str, Any]] = [(f".<base> {base.__name__}", base) for base in obj.__bases__]
        return [*((f".{name}", value) for name, value in cast("Mapping[str, Any]", vars(obj)).items()), *bases]
    if issubclass(kind, types.ModuleType):
        return []
    return _parts_of_instance(obj)


def item_path(key: Any) -> str:
    """Return the expression that leads from a dictionary to the value of a key."""
    return f"[{reprlib.repr(key)}]"


def _items_of(items: Mapping[Any, Any]) -> Generator[tuple[str, Any]]:
    for (key, value), _ in zip(items.items(), range(_MAX_ITEMS), strict=False):
        yield item_path(key), value
        yield f".<key> {reprlib.repr(key)}", key


def _parts_of_instance(obj: Any) -> Generator[tuple[str, Any]]:
    """Return what the object gives to pickle, so that a `__getstate__` that leaves a lock out is respected."""
    reduced = obj.__reduce_ex__(5)
    if isinstance(reduced, str):
        return
    make, args, state, items, pairs = cast("list[Any]", [*reduced, None, None, None][:5])
    yield from _parts_of_state(obj, state)
    for i, arg in enumerate(args):
        if arg is not type(obj):
            yield f".args[{i}]", arg
    for i, item in zip(range(_MAX_ITEMS), items or (), strict=False):
        yield f"[{i}]", item
    for (key, value), _ in zip(cast(Any, pairs or ()), range(_MAX_ITEMS), strict=False):
        yield f"[{reprlib.repr(key)}]", value
    yield f".<class> {type(obj).__name__}", type(obj)
    yield ".<constructor>", make


def _parts_of_state(obj: Any, state: Any) -> Parts:
    match state:
        case None:
            return []
        case dict():
            return [(f".{name}", value) for name, value in cast("dict[str, Any]", state).items()]
        case (dict() | None, dict()):  # the attributes, and those in slots
            attributes, slots = cast("tuple[dict[str, Any] | None, dict[str, Any]]", state)
            return [(f".{name}", value) for name, value in {**(attributes or {}), **slots}.items()]
        # dataclass(slots=True) and frozen: the values in the order of the fields
        case list() if dataclasses.is_dataclass(obj):
            return [
                (f".{field.name}", value)
                for field, value in zip(dataclasses.fields(obj), cast("list[Any]", state), strict=True)
            ]
        case _:
            return [(".<state>", state)]


def _kind_of(obj: Any) -> str:
    kind = cast("type[Any]", type(obj))
    return (
        f"it is a {kind.__qualname__}"
        if kind.__module__ == "builtins"
        else f"it is a {kind.__module__}.{kind.__qualname__}"
    )


def one_line(error: Exception, clean: Callable[[str], str] = lambda text: text) -> str:
    """Return type and beginning of the text of an error; `clean` before it is cut."""
    text = " ".join(clean(str(error)).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _advice(path: str, label: str | tuple[str, ...]) -> str:
    if label == "result":
        return "Return plain data in its place, or save it to a volume and return the path."
    if "<closure>" in path or "<global>" in path:
        return "Create it inside the function, or pass what it is made from (a path, a URL) as an argument."
    return "Pass what it is made from (a path, a URL, plain data) and create it inside the function."
