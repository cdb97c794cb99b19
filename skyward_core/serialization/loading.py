"""Functions that pickles of `pickling.py` call: stand-ins for user modules, classes and cached functions."""

from __future__ import annotations

import functools
import importlib
import types
import typing
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

served_modules: set[str] = set()
"""On a node: names of the modules whose source came with the present call.

Their classes are the node's own, also if they come by value.
"""
_original_classes: weakref.WeakSet[type] = weakref.WeakSet()
_carried_classes: weakref.WeakSet[type] = weakref.WeakSet()


class _StandIn(types.ModuleType):
    """A module of the user's project on a node, with the parts that have travelled."""

    def __getattr__(self, name: str) -> Any:
        reason = self.__dict__.get("__skyward_absent__", {}).get(name)
        detail = "" if reason is None else f": it could not travel to the node ({reason}); make it inside the function"
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} here{detail}", name=name, obj=self)


@dataclass(eq=False, slots=True)
class StandInReference:
    """Loads as the stand-in of a module, without filling it."""

    stand_ins: dict[str, Any]
    name: str

    def __reduce__(self) -> Any:
        return stand_in, (self.stand_ins, self.name)


@dataclass(eq=False, slots=True)
class StandInGlobals:
    """Loads as the dictionary of a stand-in, to be the globals of functions."""

    module: StandInReference
    base: dict[str, Any]

    def __reduce__(self) -> Any:
        return _namespace, (self.module, self.base)


@dataclass(eq=False, slots=True)
class StandInPart:
    """Loads as an effect: puts values into a stand-in."""

    module: StandInReference
    values: dict[str, Any]

    def __reduce__(self) -> Any:
        return fill_module, (self.module, (self.values, {}))


def stand_in(stand_ins: dict[str, types.ModuleType], name: str) -> types.ModuleType:
    """Return the stand-in of this name, empty if it is new."""
    if name not in stand_ins:
        stand_ins[name] = _StandIn(name)
    return stand_ins[name]


def _namespace(module: types.ModuleType, base: dict[str, Any]) -> dict[str, Any]:
    vars(module).update(base)
    return vars(module)


def fill_module(module: types.ModuleType, state: tuple[dict[str, Any], dict[str, str]]) -> None:
    carried, absent = state
    vars(module).update(carried)
    if absent:
        vars(module)["__skyward_absent__"] = absent


def served_class(module: str, qualname: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """Return the class of a module whose source came with this call, or else make it anew."""
    if module not in served_modules:
        return make(*args)
    try:
        cls = functools.reduce(getattr, qualname.split("."), cast(Any, importlib.import_module(module)))
    # the import runs the user's code; if a body needs the module, its own import raises the same error
    except Exception:
        served_modules.discard(module)
        return make(*args)
    if not isinstance(cls, type):
        return make(*args)
    _original_classes.add(cls)
    return cls


def note_original(cls: type) -> None:
    """Remember a class that this process pickles as its own, unless it came here by value."""
    if cls not in _carried_classes:
        _original_classes.add(cls)


def fill_class(cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    """Give a class its contents, unless it is this process's own: cloudpickle alone would replace its methods by
    copies.
    """
    if cls not in _original_classes:
        set_state, contents = state
        set_state(cls, contents)
        _carried_classes.add(cls)


def make_cached(parameters: dict[str, Any], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return an `lru_cache` around a function that is filled later."""
    return functools.lru_cache(**parameters)(make(*args))


def fill_cached(wrapper: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    set_state, contents = state
    set_state(wrapper.__wrapped__, contents)
    functools.update_wrapper(wrapper, wrapper.__wrapped__)


def make_dispatcher(name: str) -> Any:
    """Return a function of `functools.singledispatch` that is filled later."""

    def none_yet(*_: Any) -> Any: ...

    none_yet.__name__ = name
    return functools.singledispatch(none_yet)


def fill_dispatcher(dispatcher: Any, state: tuple[dict[Any, Callable[..., Any]], dict[str, Any]]) -> None:
    """Register the implementations, with their classes. The one for `object` is the function that was decorated."""
    implementations, attributes = state
    for cls, implementation in implementations.items():
        dispatcher.register(cls, implementation)
    functools.update_wrapper(dispatcher, implementations[object])
    vars(dispatcher).update(attributes)


def set_nothing(_obj: Any, _state: Any) -> None: ...


def make_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> typing.TypeAliasType:
    return typing.TypeAliasType(name, value, type_params=parameters)  # pyright: ignore[reportGeneralTypeIssues]


def itself[T](obj: T) -> T:
    return obj
