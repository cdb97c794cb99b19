"""Makes exceptions without running their `__init__`: from their class, their arguments and their attributes.

Python pickles an exception as its class and `args`, and calls the class with them. If `__init__` passes other arguments
on than it takes, this fails or changes the message. It also loses fields that C code keeps outside of `__dict__` (the
`name` of a NameError).
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a program has made, and no static type of C
_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_DATA = (types.MemberDescriptorType, types.GetSetDescriptorType)
_NO_FIELDS = {"args", "characters_written"}
"""Names that are no fields of C: `args` is set separately, `characters_written` cannot always be read."""


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
