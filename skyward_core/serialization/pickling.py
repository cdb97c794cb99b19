"""Values to bytes and back, between a client that has the user's project and nodes that do not.

What belongs to the user's own project travels by value: functions, classes, and what they use of its modules. What is installed travels
by reference: the standard library, all that lies in a site-packages or dist-packages directory or beside a `*.dist-info`, extension
modules, and `skyward_core` itself. So a script, a DAG file or a notebook runs on a bare node, and a new version of it needs no new node.

A module of the user's project becomes a stand-in on the node. Functions name what they use of it: from `helpers.f(x)` and `pkg.sub.CONST`,
read off the bytecode, exactly `helpers.f` and `pkg.sub.CONST` travel, with the values they have now; a lock or a client beside them stays
at home. Where a function does something else with a module (`getattr(helpers, name)`, `run(helpers)`), or a module is itself an argument,
all of its globals travel that can; reading one that could not raises an AttributeError that says why. Functions of one module share its
globals on the node as they do here.

Classes come back as themselves: an instance returned from a node is an instance of the client's own class, which a result never alters.
What a function imports inside its body travels as source text: see `sources.py`. Such modules the node names to the client, which has them, and
a class of theirs that comes by value becomes the node's own.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# (cloudpickle has no type hints)

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import io
import os
import pickle
import sys
import sysconfig
import threading
import types
import typing
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dis import get_instructions
from pathlib import Path
from typing import Any, cast

import cloudpickle

from skyward_core.serialization import exception_state
from skyward_core.serialization.unpicklable import SCALARS, Ask, Parts, diagnose, one_line

OUT_OF_BAND_BYTES = 64 * 1024
"""Contiguous buffers of at least this size stay apart from the pickle; smaller ones are cheaper inside it."""

type Replace = Callable[[Any], Any]
"""Given an object, returns NotImplemented, or what to pickle in its place."""

served_modules: set[str] = set()
"""On a node: names of the modules whose source came with the present call. Their classes are the node's own, also when they come by value."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value as bytes: `data` is the pickle, `buffers` are its large contiguous parts, in order.

    The buffers are views of the caller's own memory, not copies: send them before the arrays change. A `Pickled` pickles with protocol 5
    and hands its buffers on out of band, so that a transport which knows that protocol copies nothing either.
    """

    data: bytes
    buffers: tuple[memoryview | bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of everything, in bytes."""
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def __reduce_ex__(self, protocol: typing.SupportsIndex) -> tuple[Any, ...]:
        wrap: Callable[[Any], Any] = pickle.PickleBuffer if protocol.__index__() >= 5 else bytes
        return Pickled, (self.data, tuple(wrap(buffer) for buffer in self.buffers))


def dumps(obj: Any, *, label: str | tuple[str, ...] = "value", replace: Replace | None = None, carried: list[types.FunctionType] | None = None) -> Pickled:
    """Pickle a value for a process that has the installed distributions but not the user's project; see the head of this file for the rule.

    `label` is what an error calls the value: "result", "args"; for a tuple it may be a tuple of one name for each item. `replace` is asked
    for each object met, plain scalars and containers aside, whether to pickle another one in its place: for a Prefect task, its function.
    Functions that travel by value, methods among them, are appended to `carried`.
    Nothing is left registered with cloudpickle, and what a user has registered stays so. Raises `NotPicklable`, whose `path` names the part
    that cannot travel, such as `args[0].client.lock`, `train.<closure>.db` or `train.<global> CONNECTION`.

    >>> loads(dumps({"lr": 0.1}))
    {'lr': 0.1}
    """
    trials = _Trials(replace)
    try:
        return _dumped(obj, trials, carried)
    except MemoryError:
        raise
    except Exception as error:
        raise diagnose(obj, label, error, Ask(trials.error_of, trials.parts_of)) from error


def dumps_or_raise(obj: Any) -> Pickled:
    """Pickle a value as `dumps` does; raises whatever is in the way, at once: nothing is looked for in the value's parts."""
    return _dumped(obj, _Trials(None), None)


def _dumped(obj: Any, trials: _Trials, carried: list[types.FunctionType] | None) -> Pickled:
    views: list[memoryview] = []
    if _is_plain(obj, [_PLAIN_ITEMS], 0):
        return Pickled(pickle.dumps(obj, protocol=5, buffer_callback=functools.partial(_keep_in_band, views)), tuple(views))
    file = io.BytesIO()
    _Pickler(file, trials, functools.partial(_keep_in_band, views), carried=carried).dump(obj)
    return Pickled(file.getvalue(), tuple(views))


def loads(pickled: Pickled | bytes | bytearray | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Rebuild what `dumps` pickled. Large arrays are views of their buffers, so they are writable if and only if the buffers are."""
    if isinstance(pickled, Pickled):
        return pickle.loads(pickled.data, buffers=pickled.buffers)
    return pickle.loads(pickled, buffers=buffers)


# ── plain values: no class of anybody, so the C pickler alone is both right and quick ────────────────────────────────

_PLAIN_ITEMS = 64  # beyond that, walking costs more than cloudpickle's set-up (about 15 µs)
_PLAIN_DEPTH = 4


def _is_plain(obj: Any, left: list[int], depth: int) -> bool:
    kind = cast("type[Any]", type(obj))
    if kind in SCALARS:
        return True
    if kind is tuple or kind is list:
        items: Iterable[Any] = obj
    elif kind is dict:
        if not all(type(key) in SCALARS for key in obj):
            return False
        items = obj.values()
    else:
        numpy = sys.modules.get("numpy")
        return kind is getattr(numpy, "ndarray", None) and not obj.dtype.hasobject  # another thread may be importing it
    left[0] -= len(obj)
    if left[0] < 0 or depth == _PLAIN_DEPTH:
        return False
    return all(type(item) in SCALARS or _is_plain(item, left, depth + 1) for item in items)


def _keep_in_band(views: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    try:
        view = buffer.raw()
    except BufferError:  # not contiguous
        return True
    if view.nbytes < OUT_OF_BAND_BYTES:
        return True
    views.append(view)
    return False


# ── whose module is it ───────────────────────────────────────────────────────────────────────────────────────────────

_INSTALL_DIRECTORIES = {"site-packages", "dist-packages"}
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


def belongs_to_user(module: types.ModuleType) -> bool:
    """Whether a module is part of the user's own project, and so travels by value.

    A module without a file, made by a program rather than read (a notebook's `__main__`, an Airflow DAG), is the user's unless
    it calls itself a part of an installed package, as `torch.ops` does. On a node, what came as source is not: the client has it.
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
    """Whether a module of this name and (absolute) file would belong to the user's project; see `belongs_to_user`."""
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
    """Whether distributions are installed in this directory whatever its name, as `pip install --target` does."""
    with suppress(OSError):
        return any(entry.endswith(".dist-info") for entry in os.listdir(directory))
    return False


def _home(obj: Any) -> types.ModuleType | None:
    """Return the module of the user's project that a function, class or type variable says it is from."""
    name = getattr(obj, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module if isinstance(module, types.ModuleType) and belongs_to_user(module) else None


def _is_own_module(value: Any) -> typing.TypeGuard[types.ModuleType]:
    return issubclass(type(value), types.ModuleType) and belongs_to_user(value)


# ── the pickler ──────────────────────────────────────────────────────────────────────────────────────────────────────

_registration = threading.RLock()
# no fork while another thread is inside: the child would inherit a held lock and a module registered for good
os.register_at_fork(before=_registration.acquire, after_in_parent=_registration.release, after_in_child=_registration.release)


@contextmanager
def _registered(module: types.ModuleType | None) -> Generator[None]:
    """Let cloudpickle pickle what is in this module by value, for one step of the pickler."""
    if module is None:
        yield
        return
    with _registration:
        if module.__name__ in cloudpickle.list_registry_pickle_by_value() or module.__name__ not in sys.modules:
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle with the rule of this file: the user's project by value, and only what is used of its modules."""

    def __init__(
        self,
        file: Any,
        trials: _Trials,
        buffer_callback: Callable[[pickle.PickleBuffer], Any],
        *,
        shallow: bool = False,
        carried: list[types.FunctionType] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._trials = trials
        self._shallow = shallow
        self._carried = carried
        self._stand_ins: dict[str, Any] = {}  # pickled empty, once: on loading, one dictionary of the stand-ins made so far
        self._shells: dict[str, _Shell] = {}
        self._namespaces: dict[str, _Namespace] = {}
        self._sent: set[tuple[str, str]] = set()
        self._open_aliases: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Called by the C pickler for every object that is neither a plain scalar nor a plain container."""
        if self._trials.replace is not None:
            other = self._trials.replace(obj)
            if other is not NotImplemented:
                return _itself, (other,)
        kind = cast("type[Any]", type(obj))
        if kind is types.FunctionType:
            return self._reduce_function(obj)
        if issubclass(kind, type):
            return self._reduce_class(obj)
        if issubclass(kind, types.ModuleType):
            return self._reduce_module(obj) if belongs_to_user(obj) else NotImplemented
        if issubclass(kind, BaseException):
            return exception_state.reduced(obj)
        reduce = _TYPE_REDUCERS.get(kind)
        return NotImplemented if reduce is None else reduce(self, obj)

    def _reduce_class(self, cls: type) -> Any:
        home = _home(cls)
        with _registered(home):
            reduced = cast(Any, super().reducer_override(cls))
        if reduced is NotImplemented or len(reduced) < 6:
            return reduced
        if cls not in _carried_classes:
            _original_classes.add(cls)
        make, args, state, _, _, set_state = reduced
        if home is not None and home.__name__ != "__main__" and "<locals>" not in cls.__qualname__:
            make, args = _served_class, (home.__name__, cls.__qualname__, make, args)
        return make, args, (set_state, state), None, None, _fill_class

    def _reduce_function(self, function: types.FunctionType) -> Any:
        home = _home(function)
        with _registered(home):
            reduced = cast(Any, super().reducer_override(function))
        if reduced is NotImplemented:
            return reduced
        if self._carried is not None:
            self._carried.append(function)
        make, (code, base, *rest), (attributes, slots), _, _, set_state = reduced
        if home is not None and function.__globals__ is vars(home):
            base = self._namespaces.setdefault(home.__name__, _Namespace(self._shell(home), base))
        slots["__annotations__"] = {name: _portable_annotation(hint) for name, hint in slots["__annotations__"].items()}
        outer = {**_class_body_globals(function), **slots["__globals__"]}
        slots["__globals__"] = {name: self._shell(value) if _is_own_module(value) else value for name, value in outer.items()}
        if slots["__closure__"]:
            slots["__closure__"] = tuple(self._cell(cell) for cell in slots["__closure__"])
        installed = [module for module in slots["_cloudpickle_submodules"] if not _is_own_module(module)]
        # cloudpickle loads this list for its effect and forgets it: the right place for what must be in the stand-ins before a call
        slots["_cloudpickle_submodules"] = [*installed, *self._parts(function)]
        return make, (code, base, *rest), (attributes, slots), None, None, set_state

    def _parts(self, function: types.FunctionType) -> Iterator[_Part | types.ModuleType]:
        for use in _module_uses(function):
            if use.whole:
                yield use.module
            new = {name: value for name, value in use.values.items() if (use.module.__name__, name) not in self._sent}
            self._sent.update((use.module.__name__, name) for name in new)
            if new:
                carried = {name: self._shell(value) if _is_own_module(value) else value for name, value in new.items()}
                yield _Part(self._shell(use.module), carried)

    def _cell(self, cell: types.CellType) -> types.CellType:
        with suppress(ValueError):  # an empty cell
            if _is_own_module(cell.cell_contents):
                return types.CellType(self._shell(cell.cell_contents))
        return cell

    def _shell(self, module: types.ModuleType) -> _Shell:
        return self._shells.setdefault(module.__name__, _Shell(self._stand_ins, module.__name__))

    def _reduce_module(self, module: types.ModuleType) -> Any:
        make = (_stand_in, (self._stand_ins, module.__name__))
        if self._shallow:
            return make
        carried: dict[str, Any] = {}
        absent: dict[str, str] = {}
        for name, value in list(vars(module).items()):
            if name in _IMPORT_MACHINERY:
                continue
            reason = None if isinstance(value, types.ModuleType) else self._trials.reason_against(value)
            if reason is None:
                carried[name] = value
            else:
                absent[name] = reason
        return *make, (carried, absent), None, None, _fill_module

    def _reduce_cached(self, wrapper: Any) -> Any:
        """`functools.lru_cache` pickles by name alone; a recursive one refers to itself, so it is made first and filled after."""
        reduced: Any = self._reduce_function(wrapper.__wrapped__) if type(wrapper.__wrapped__) is types.FunctionType else NotImplemented
        if reduced is NotImplemented:
            return _cached, (wrapper.cache_parameters(), _itself, (wrapper.__wrapped__,)), (_nothing, None), None, None, _fill_cached
        make, args, state, _, _, set_state = cast("tuple[Any, ...]", reduced)
        return _cached, (wrapper.cache_parameters(), make, args), (set_state, state), None, None, _fill_cached

    def _reduce_type_variable(self, variable: Any) -> Any:
        with _registered(_home(variable)):
            return self.dispatch_table[type(variable)](variable)

    def _reduce_alias(self, alias: typing.TypeAliasType) -> Any:
        if id(alias) in self._open_aliases:
            return _itself, (Any,)  # a recursive alias: pickle has no way to tie that knot
        self._open_aliases.add(id(alias))
        value: Any = Any
        with suppress(NameError):
            value = alias.__value__
        return _alias, (alias.__name__, value, alias.__type_params__)


def _only_users(reduce: Callable[[_Pickler, Any], Any]) -> Callable[[_Pickler, Any], Any]:
    return lambda pickler, obj: reduce(pickler, obj) if _home(obj) is not None else NotImplemented


_TYPE_REDUCERS: dict[type, Callable[[_Pickler, Any], Any]] = {
    type(functools.lru_cache(_only_users)): _only_users(_Pickler._reduce_cached),  # pyright: ignore[reportPrivateUsage]
    typing.TypeVar: _only_users(_Pickler._reduce_type_variable),  # pyright: ignore[reportPrivateUsage]
    typing.TypeAliasType: _only_users(_Pickler._reduce_alias),  # pyright: ignore[reportPrivateUsage]
    typing.ParamSpec: _only_users(lambda _, p: (typing.ParamSpec, (p.__name__,))),
    typing.TypeVarTuple: _only_users(lambda _, p: (typing.TypeVarTuple, (p.__name__,))),
    typing.NewType: _only_users(lambda _, new: (typing.NewType, (new.__name__, new.__supertype__))),
    typing.ParamSpecArgs: lambda _, p: (getattr, (p.__origin__, "args")),
    typing.ParamSpecKwargs: lambda _, p: (getattr, (p.__origin__, "kwargs")),
}
"""What Python pickles by its name alone although it can be made anew."""


class _Trials:
    """Says of a value whether it can be pickled by itself. `replace` is the caller's; the answers for module globals are kept."""

    def __init__(self, replace: Replace | None) -> None:
        self.replace = replace
        self._reasons: dict[int, str | None] = {}

    def reason_against(self, value: Any) -> str | None:
        if id(value) not in self._reasons:
            error = self.error_of(value, shallow=True)
            self._reasons[id(value)] = None if error is None else one_line(error)
        return self._reasons[id(value)]

    def error_of(self, value: Any, *, shallow: bool = False) -> Exception | None:
        try:
            _Pickler(_Sink(), self, lambda _: False, shallow=shallow).dump(value)
        except Exception as error:  # pickling runs the user's own code, which may raise anything
            return error
        return None

    def parts_of(self, obj: Any) -> Parts | None:
        """The parts of what is pickled in a way of our own; None: of anything else."""
        if self.replace is not None and (other := self.replace(obj)) is not NotImplemented:
            return [("", other)]
        kind = cast("type[Any]", type(obj))
        if kind is types.FunctionType:
            return _parts_of_function(obj)
        return [("", getattr(obj, "__wrapped__", None))] if kind in _TYPE_REDUCERS else None


class _Sink:
    def write(self, data: Any) -> int:
        return len(data)


def _parts_of_function(function: types.FunctionType) -> Generator[tuple[str, Any]]:
    scope = _Scope(function)
    for name in function.__code__.co_freevars:
        yield f".<closure>.{name}", scope.get(name)
    for name in sorted({name for name, _ in _names_used(function.__code__).chains}):
        if name not in function.__code__.co_freevars and name in function.__globals__ and not _is_own_module(function.__globals__[name]):
            yield f".<global> {name}", function.__globals__[name]
    for use in _module_uses(function):
        for name, value in use.values.items():
            yield f".<global> {use.module.__name__}.{name}", value
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    for name, value in [*zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True), *(function.__kwdefaults__ or {}).items()]:
        yield f".<default> {name}", value
    for name, value in vars(function).items():
        yield f".{name}", value
    for name, value in function.__annotations__.items():
        yield f".<annotation> {name}", value


# ── what a function uses of modules ──────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Use:
    module: types.ModuleType
    values: dict[str, Any]
    whole: bool = False


def _module_uses(function: types.FunctionType) -> Iterable[_Use]:
    """Return what a function uses of the modules of the user's project, following `pkg.sub.f` from module to module."""
    scope = _Scope(function)
    uses: dict[str, _Use] = {}
    for name, attributes in _names_used(function.__code__).chains:
        module = scope.get(name)
        if _is_own_module(module):
            _follow(module, attributes, uses)
    return uses.values()


def _follow(module: types.ModuleType, attributes: tuple[str, ...], uses: dict[str, _Use]) -> None:
    for attribute in attributes:
        use = uses.setdefault(module.__name__, _Use(module, {}))
        value = vars(module).get(attribute, _missing)
        if value is _missing and "__getattr__" in vars(module):
            with suppress(Exception):
                value = getattr(module, attribute)
        if value is _missing:
            return
        use.values[attribute] = value
        if not _is_own_module(value):
            return
        module = value
    uses.setdefault(module.__name__, _Use(module, {})).whole = True


class _Scope:
    """The variables that a function can see outside itself."""

    def __init__(self, function: types.FunctionType) -> None:
        self._globals = function.__globals__
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str) -> Any:
        if name in self._cells:
            try:
                return self._cells[name].cell_contents
            except ValueError:
                return _missing
        return self._globals.get(name, _missing)


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a code object: each outer name with the attributes read from it (empty: used as a value), and the names that class bodies read."""

    chains: frozenset[tuple[str, tuple[str, ...]]]
    in_class_bodies: frozenset[str]


_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF"}
_CLASS_BODY_READS = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTE_READS = {"LOAD_ATTR", "LOAD_METHOD"}
_ATTRIBUTE_WRITES = {"STORE_ATTR", "DELETE_ATTR"}
_SILENT = {"EXTENDED_ARG", "CACHE", "NOP"}
_names_by_code: weakref.WeakKeyDictionary[types.CodeType, _Names] = weakref.WeakKeyDictionary()


def _names_used(code: types.CodeType) -> _Names:
    known = _names_by_code.get(code)
    if known is None:
        known = _names_by_code[code] = _read_names(code)
    return known


def _read_names(code: types.CodeType) -> _Names:
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
    for inner in (_names_used(const) for const in code.co_consts if isinstance(const, types.CodeType)):
        chains |= inner.chains
        in_class_bodies |= inner.in_class_bodies
    return _Names(frozenset(chains), frozenset(in_class_bodies))


def _class_body_globals(function: types.FunctionType) -> dict[str, Any]:
    """Globals that only the body of a class inside the function reads: cloudpickle 3.1 overlooks them (it knows LOAD_GLOBAL alone)."""
    names = _names_used(function.__code__).in_class_bodies
    return {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__ and name != "__name__"}


def _portable_annotation(hint: Any) -> Any:
    """Return the annotation, or its text if it mentions an installed distribution: a hint must not force a node to import pandas."""
    if not _is_foreign(hint):
        return hint
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) and not typing.get_args(hint) else repr(hint)


def _is_foreign(hint: Any) -> bool:
    if arguments := typing.get_args(hint):
        return any(map(_is_foreign, arguments)) or _is_foreign(typing.get_origin(hint))
    if not isinstance(hint, type):
        return False
    top = hint.__module__.partition(".")[0]
    return top not in sys.stdlib_module_names and top != "__main__" and hint.__module__ in sys.modules and _home(hint) is None


# ── what loading calls ───────────────────────────────────────────────────────────────────────────────────────────────

_missing = object()
_IMPORT_MACHINERY = {"__builtins__", "__cached__", "__loader__", "__spec__", "__name__"}
_original_classes: weakref.WeakSet[type] = weakref.WeakSet()
_carried_classes: weakref.WeakSet[type] = weakref.WeakSet()


class _StandIn(types.ModuleType):
    """A module of the user's project on a node: what has travelled of it."""

    def __getattr__(self, name: str) -> Any:
        reason = self.__dict__.get("__skyward_absent__", {}).get(name)
        detail = "" if reason is None else f": it could not travel to the node ({reason}); make it inside the function"
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} here{detail}", name=name, obj=self)


@dataclass(eq=False, slots=True)
class _Shell:
    """Loads as the stand-in of a module, without filling it."""

    stand_ins: dict[str, Any]
    name: str

    def __reduce__(self) -> Any:
        return _stand_in, (self.stand_ins, self.name)


@dataclass(eq=False, slots=True)
class _Namespace:
    """Loads as the dictionary of a stand-in, to be the globals of functions."""

    shell: _Shell
    base: dict[str, Any]

    def __reduce__(self) -> Any:
        return _namespace, (self.shell, self.base)


@dataclass(eq=False, slots=True)
class _Part:
    """Loads as an effect: puts values into a stand-in."""

    shell: _Shell
    values: dict[str, Any]

    def __reduce__(self) -> Any:
        return _fill_module, (self.shell, (self.values, {}))


def _stand_in(stand_ins: dict[str, types.ModuleType], name: str) -> types.ModuleType:
    if name not in stand_ins:
        stand_ins[name] = _StandIn(name)
    return stand_ins[name]


def _namespace(module: types.ModuleType, base: dict[str, Any]) -> dict[str, Any]:
    vars(module).update(base)
    return vars(module)


def _fill_module(module: types.ModuleType, state: tuple[dict[str, Any], dict[str, str]]) -> None:
    carried, absent = state
    vars(module).update(carried)
    if absent:
        vars(module)["__skyward_absent__"] = absent


def _served_class(module: str, qualname: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """Return the class of a module whose source came with this call, or else make it anew."""
    if module not in served_modules:
        return make(*args)
    try:
        cls = functools.reduce(getattr, qualname.split("."), cast(Any, importlib.import_module(module)))
    except Exception:  # importing runs the user's code; if a body needs the module, its own import raises the same, in the right place
        served_modules.discard(module)
        return make(*args)
    if not isinstance(cls, type):
        return make(*args)
    _original_classes.add(cls)
    return cls


def _fill_class(cls: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    """Give a class its contents, unless it is this process's own: cloudpickle alone would replace its methods by copies."""
    if cls not in _original_classes:
        set_state, contents = state
        set_state(cls, contents)
        _carried_classes.add(cls)


def _cached(parameters: dict[str, Any], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return functools.lru_cache(**parameters)(make(*args))


def _fill_cached(wrapper: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    set_state, contents = state
    set_state(wrapper.__wrapped__, contents)
    functools.update_wrapper(wrapper, wrapper.__wrapped__)


def _nothing(_obj: Any, _state: Any) -> None: ...


def _alias(name: str, value: Any, parameters: tuple[Any, ...]) -> typing.TypeAliasType:
    return typing.TypeAliasType(name, value, type_params=parameters)  # pyright: ignore[reportGeneralTypeIssues]


def _itself[T](obj: T) -> T:
    return obj
