"""Which modules belong to the user's own project, and so travel by value; see `pickling.py` for the rule."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import sys
import sysconfig
import types
import typing
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from dis import get_instructions
from pathlib import Path
from typing import Any, cast

_INSTALL_DIRECTORIES = {"site-packages", "dist-packages"}
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_missing = object()
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
served_modules: set[str] = set()
"""On a node: names of the modules whose source came with the present call.

Their classes are the node's own, also if they come by value.
"""
_original_classes: weakref.WeakSet[type] = weakref.WeakSet()
_carried_classes: weakref.WeakSet[type] = weakref.WeakSet()


def belongs_to_user(module: types.ModuleType) -> bool:
    """Return whether a module is part of the user's own project, and so travels by value.

    A module without a file, made by a program (a notebook's `__main__`, an Airflow DAG), is the user's unless its name
    is in an installed package, as `torch.ops` is. On a node, a module that came as source
    is not the user's: the client has it.
    """
    if getattr(getattr(module, "__loader__", None), "client_has_it", False):
        return False
    name = module.__name__
    file = getattr(module, "__file__", None)
    if not file:
        file = next(iter(getattr(module, "__path__", ())), None)
    return is_of_user(name, file if isinstance(file, str) and os.path.isabs(file) else None)


@functools.lru_cache(maxsize=4096)
def is_of_user(name: str, file: str | None) -> bool:
    """Return whether a module of this name and (absolute) file is the user's; see `belongs_to_user`."""
    if name in ("__main__", "__mp_main__"):
        return True
    top = name.partition(".")[0]
    if top == "skyward_core" or name in sys.builtin_module_names:
        return False
    if file is not None:
        return not _is_installed(name, file)
    if top in sys.stdlib_module_names:
        return False
    package = sys.modules.get(top)
    return package is None or top == name or belongs_to_user(package)


def _is_installed(name: str, file: str) -> bool:
    if file.endswith(_EXTENSIONS):
        return True  # machine code cannot travel by value
    for path in {os.path.abspath(file), os.path.realpath(file)}:
        if not _INSTALL_DIRECTORIES.isdisjoint(Path(path).parts) or path.startswith(_STDLIB):
            return True
    levels = name.count(".") + (1 if Path(file).stem == "__init__" or os.path.isdir(file) else 0)
    return _holds_distributions(str(Path(os.path.abspath(file)).parents[levels]))


@functools.lru_cache(maxsize=1024)
def _holds_distributions(directory: str) -> bool:
    """Return whether distributions are installed in this directory, as `pip install --target` does."""
    with suppress(OSError):
        return any(entry.endswith(".dist-info") for entry in os.listdir(directory))
    return False


def home_module(obj: Any) -> types.ModuleType | None:
    """Return the module of the user's project that a function, class or type variable says it is from."""
    name = getattr(obj, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module if isinstance(module, types.ModuleType) and belongs_to_user(module) else None


def is_user_module(value: Any) -> typing.TypeGuard[types.ModuleType]:
    """Return whether a value is a module of the user's project."""
    return issubclass(type(value), types.ModuleType) and belongs_to_user(value)


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
