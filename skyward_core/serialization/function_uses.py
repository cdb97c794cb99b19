"""What a function uses of the modules of the user's project, read off its bytecode."""

from __future__ import annotations

import sys
import types
import typing
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from dis import get_instructions
from typing import Any

from skyward_core.serialization.ownership import home_module, is_user_module

_missing = object()


@dataclass(slots=True)
class Use:
    """What a function uses of one module: the values of these names, and with `whole` all of it."""

    module: types.ModuleType
    values: dict[str, Any]
    whole: bool = False


def module_uses(function: types.FunctionType) -> Iterable[Use]:
    """Return what a function uses of the modules of the user's project, following `pkg.sub.f` from module to module."""
    scope = Scope(function)
    uses: dict[str, Use] = {}
    for name, attributes in names_used(function.__code__).chains:
        module = scope.get(name)
        if is_user_module(module):
            _follow(module, attributes, uses)
    return uses.values()


def _follow(module: types.ModuleType, attributes: tuple[str, ...], uses: dict[str, Use]) -> None:
    for attribute in attributes:
        use = uses.setdefault(module.__name__, Use(module, {}))
        value = vars(module).get(attribute, _missing)
        if value is _missing and "__getattr__" in vars(module):
            with suppress(Exception):
                value = getattr(module, attribute)
        if value is _missing:
            return
        use.values[attribute] = value
        if not is_user_module(value):
            return
        module = value
    uses.setdefault(module.__name__, Use(module, {})).whole = True


class Scope:
    """The variables outside a function that it can see."""

    def __init__(self, function: types.FunctionType) -> None:
        self._globals = function.__globals__
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str) -> Any:
        """Return the value of a variable, or a mark for one that has none."""
        if name in self._cells:
            try:
                return self._cells[name].cell_contents
            except ValueError:
                return _missing
        return self._globals.get(name, _missing)


@dataclass(frozen=True, slots=True)
class Names:
    """Of a code object: each outer name with the attributes read from it (empty: used as a value), and the names that
    class bodies read.
    """

    chains: frozenset[tuple[str, tuple[str, ...]]]
    in_class_bodies: frozenset[str]


_READS = {
    "LOAD_GLOBAL",
    "LOAD_NAME",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_FROM_DICT_OR_GLOBALS",
    "LOAD_FROM_DICT_OR_DEREF",
}
_CLASS_BODY_READS = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTE_READS = {"LOAD_ATTR", "LOAD_METHOD"}
_ATTRIBUTE_WRITES = {"STORE_ATTR", "DELETE_ATTR"}
_SILENT = {"EXTENDED_ARG", "CACHE", "NOP"}
_names_by_code: weakref.WeakKeyDictionary[types.CodeType, Names] = weakref.WeakKeyDictionary()


def names_used(code: types.CodeType) -> Names:
    """Return the outer names that a code object and those inside it use."""
    known = _names_by_code.get(code)
    if known is None:
        known = _names_by_code[code] = _read_names(code)
    return known


def _read_names(code: types.CodeType) -> Names:
    chains: set[tuple[str, tuple[str, ...]]] = set()
    in_class_bodies: set[str] = set()
    steps = [step for step in get_instructions(code) if step.opname not in _SILENT]
    for index, step in enumerate(steps):
        if step.opname not in _READS:
            continue
        attributes: list[str] = []
        for follower in steps[index + 1 :]:
            if follower.opname not in _ATTRIBUTE_READS | _ATTRIBUTE_WRITES:
                break
            attributes.append(follower.argval)
            if follower.opname in _ATTRIBUTE_WRITES:
                break
        chains.add((step.argval, tuple(attributes)))
        if step.opname in _CLASS_BODY_READS:
            in_class_bodies.add(step.argval)
    for inner in (names_used(const) for const in code.co_consts if isinstance(const, types.CodeType)):
        chains |= inner.chains
        in_class_bodies |= inner.in_class_bodies
    return Names(frozenset(chains), frozenset(in_class_bodies))


def class_body_globals(function: types.FunctionType) -> dict[str, Any]:
    """Globals that only the body of a class inside the function reads: cloudpickle 3.1 overlooks them (it knows
    LOAD_GLOBAL alone).
    """
    names = names_used(function.__code__).in_class_bodies
    return {
        name: function.__globals__[name]
        for name in sorted(names)
        if name in function.__globals__ and name != "__name__"
    }


def portable_annotation(hint: Any) -> Any:
    """Return the annotation, or its text if it mentions an installed distribution: a hint must not force a node to
    import pandas.
    """
    if not _is_foreign(hint):
        return hint
    return (
        f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) and not typing.get_args(hint) else repr(hint)
    )


def _is_foreign(hint: Any) -> bool:
    if arguments := typing.get_args(hint):
        return any(map(_is_foreign, arguments)) or _is_foreign(typing.get_origin(hint))
    if not isinstance(hint, type):
        return False
    top = hint.__module__.partition(".")[0]
    return (
        top not in sys.stdlib_module_names
        and top != "__main__"
        and hint.__module__ in sys.modules
        and home_module(hint) is None
    )
