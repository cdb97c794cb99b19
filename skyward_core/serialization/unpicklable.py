"""Finds the part of a value that cannot be pickled, for the error message.

It does not know how values are pickled. `PickleProbe` tries to pickle a part by itself, and lists the parts of values
that only the pickler knows (functions, cached functions, replaced objects).
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import reprlib
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from skyward_core.errors import NotPicklable
from skyward_core.shown_text import visible

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a program has made, and no static type of C
_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_DATA = (types.MemberDescriptorType, types.GetSetDescriptorType)
_NO_FIELDS = {"args", "characters_written"}
"""Names that are no fields of C: `args` is set separately, `characters_written` cannot always be read."""
SCALARS = frozenset({int, float, str, bool, bytes, complex, type(None)})
"""Types that can always be pickled and have no parts."""
_MAX_DEPTH = 32
_MAX_TRIALS = 5_000
_MAX_ITEMS = 1_000  # of one container; an error beyond them names the container


# Makes exceptions without running their `__init__`: from their class, their arguments and their attributes.
#
# Python pickles an exception as its class and `args`, and calls the class with them. If `__init__` passes other
# arguments on than it takes, this fails or changes the message. It also loses fields that C code keeps outside of
# `__dict__` (the `name` of a NameError).


class ExceptionState(NamedTuple):
    """The contents of an exception: `args`, its `__dict__` without notes, and the values of `__slots__` or C fields."""

    args: tuple[Any, ...]
    attributes: dict[str, Any]
    fields: dict[str, Any]
    notes: tuple[str, ...]


def has_own_pickling(kind: type[BaseException]) -> bool:
    """Return whether a class defines how it is pickled, by a method or in `copyreg`."""
    base: Any = _static_base(kind)
    registered = getattr(copyreg.dispatch_table.get(kind), "__module__", None)
    # tblib registers all exceptions, and Dask calls it
    is_registered = registered is not None and not registered.startswith("tblib")
    return is_registered or any(getattr(kind, way, None) is not getattr(base, way, None) for way in _WAYS)


def is_from_python(kind: type[BaseException]) -> bool:
    """Return whether a class is defined in Python, and not in C."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def make(kind: type[BaseException], message: str = "", members: Iterable[BaseException] | None = None) -> BaseException:
    """Return an empty exception of this class; `members` are those of a group.

    Raises TypeError for a class of C that must be called.
    """
    base: Any = _static_base(kind)
    return base.__new__(kind) if members is None else base.__new__(kind, message, list(members))


def state_of(error: BaseException) -> ExceptionState:
    """Return the contents of an exception."""
    attributes = {**object.__getattribute__(error, "__dict__")}
    notes = attributes.pop("__notes__", ())
    texts = tuple(note for note in notes if isinstance(note, str)) if isinstance(notes, list | tuple) else ()  # pyright: ignore[reportUnknownVariableType]
    fields: dict[str, Any] = {}
    for name, descriptor in _descriptors(type(error)).items():
        with suppress(AttributeError):  # an empty slot
            value = descriptor.__get__(error, type(error))
            # None is a value in a slot, but means "empty" in a field of C
            if value is not None or is_from_python(descriptor.__objclass__):
                fields[name] = value
    return ExceptionState(error.args, attributes, fields, texts)


def fill(error: BaseException, state: ExceptionState) -> None:
    """Set the contents of an exception, without the `__setattr__` of its class."""
    BaseException.__setattr__(error, "args", state.args)
    attributes = object.__getattribute__(error, "__dict__")
    attributes.update(state.attributes)
    descriptors = _descriptors(type(error))
    for name, value in state.fields.items():
        # the members of a group are set already; a class may have lost a slot
        with suppress(AttributeError, TypeError, ValueError):
            descriptors[name].__set__(error, value)
    if state.notes:
        attributes["__notes__"] = [*state.notes]


def add_note(error: BaseException, note: str) -> None:
    """Add a note, also to an exception that refuses to be changed, as a frozen dataclass does."""
    object.__getattribute__(error, "__dict__").setdefault("__notes__", []).append(note)


def reduced(error: BaseException) -> Any:
    """Return how to pickle an exception whose class does not define it; NotImplemented if Python's way is right."""
    kind = type(error)
    if not is_from_python(kind) or has_own_pickling(kind):
        return NotImplemented
    group: tuple[Any, ...] = (error.message, list(error.exceptions)) if isinstance(error, BaseExceptionGroup) else ()  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    try:
        make(kind, *group)
    except TypeError:
        return NotImplemented
    return make, (kind, *group), tuple(state_of(error)), None, None, _fill_from


def _fill_from(error: BaseException, state: tuple[Any, ...]) -> None:
    fill(error, ExceptionState(*state))


def _static_base(kind: type[BaseException]) -> type:
    """Return the class of C that determines an exception's memory layout."""
    base: Any = kind
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__
    return base


def _descriptors(kind: type[BaseException]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for owner in kind.__mro__:
        for name, value in vars(owner).items():
            if isinstance(value, _DATA) and name not in _NO_FIELDS and not name.startswith("__"):
                found.setdefault(name, value)
    return found


type Parts = Iterable[tuple[str, Any]]
"""Parts of a value, each with the expression that leads to it: `.lock`, `[0]`."""


@dataclass(frozen=True, slots=True)
class PickleProbe:
    """Questions to the pickler: why a value cannot be pickled (None: it can), and the parts of values that only the
    pickler knows (None: other values).
    """

    error_of: Callable[[Any], Exception | None]
    parts_of: Callable[[Any], Parts | None]


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
    text = visible(" ".join(clean(str(error)).split()))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _advice(path: str, label: str | tuple[str, ...]) -> str:
    if label == "result":
        return "Return plain data in its place, or save it to a volume and return the path."
    if "<closure>" in path or "<global>" in path:
        return "Create it inside the function, or pass what it is made from (a path, a URL) as an argument."
    return "Pass what it is made from (a path, a URL, plain data) and create it inside the function."
