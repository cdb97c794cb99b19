"""Values to bytes and back, between a client that has the user's project and nodes that do not.

What belongs to the user's own project travels by value: functions, classes, and what they use of its modules. What is
installed travels by reference: the standard library, all that lies in a site-packages or dist-packages directory or
beside a `*.dist-info`, extension modules, and `skyward_core` itself. So a script, a DAG file or a notebook runs on a
bare node, and a new version of it needs no new node.

A module of the user's project becomes a stand-in on the node. Functions name what they use of it: from `helpers.f(x)`
and `pkg.sub.CONST`, read off the bytecode, exactly `helpers.f` and `pkg.sub.CONST` travel, with the values they have
now; a lock or a client beside them stays on the client. Where a function does something else with a module
(`getattr(helpers, name)`, `run(helpers)`), or a module is itself an argument, all of its globals travel that can;
reading one that could not raises an AttributeError that says why. Functions of one module share its globals on the node
as they do here.

Classes come back as themselves: an instance returned from a node is an instance of the client's own class, which a
result never alters. What a function imports inside its body travels as source text: see `sources.py`. The node
returns objects of such modules by name, and a class of theirs that arrives by value becomes the node's own.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import threading
import types
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle

from skyward_core.serialization import ownership as loading
from skyward_core.serialization import unpicklable as exception_state
from skyward_core.serialization.ownership import (
    Scope,
    StandInGlobals,
    StandInPart,
    StandInReference,
    belongs_to_user,
    class_body_globals,
    fill_cached,
    fill_class,
    fill_dispatcher,
    fill_module,
    home_module,
    is_user_module,
    itself,
    make_alias,
    make_cached,
    make_dispatcher,
    module_uses,
    names_used,
    note_original,
    portable_annotation,
    served_class,
    set_nothing,
    stand_in,
)
from skyward_core.serialization.unpicklable import SCALARS, Parts, PickleProbe, diagnose, one_line

SHOWN_CHARACTERS = 240
PYTEST_HELPERS = "_pytest.assertion.rewrite"
"""pytest's module of helpers. A rewritten module has it as the global "@pytest_ar"."""
OUT_OF_BAND_BYTES = 64 * 1024
"""Contiguous buffers of at least this size stay apart from the pickle; smaller ones are cheaper inside it."""
_PLAIN_ITEMS = 64  # beyond that, walking costs more than cloudpickle's set-up (about 15 µs)
_PLAIN_DEPTH = 4
_registration = threading.RLock()
_MAKERS = frozenset(
    value
    for module in (cloudpickle.cloudpickle, loading)
    for value in vars(module).values()
    if type(value) is types.FunctionType and value.__module__ == module.__name__
)
"""Functions that make objects on the other side. They are in each pickle of a function, always by reference."""
_DISPATCHER_CODE = cast("types.FunctionType", functools.singledispatch(lambda _: None)).__code__
_OF_DISPATCHER = {"register", "dispatch", "registry", "_clear_cache", "__wrapped__"}
_IMPORT_MACHINERY = {"__builtins__", "__cached__", "__loader__", "__spec__", "__name__"}


# The memory of PyTorch's tensors travels beside the pickle, as that of NumPy's arrays does.
#
# PyTorch's own way copies the memory into a file in memory and that into the pickle. And it refuses a tensor of a GPU
# in a process without one, so a client without a GPU could not read the weights that a node has trained.


def reduced(obj: Any) -> Any:
    """Return what pickles a storage of PyTorch, the memory of a tensor; NotImplemented for anything else.

    Memory of a GPU is copied to the processor's memory.
    """
    storages = sys.modules.get("torch.storage")
    if storages is None or type(obj) is not getattr(storages, "TypedStorage", None):
        return NotImplemented
    import torch  # pyright: ignore[reportMissingImports]

    memory = obj._untyped_storage
    data = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    try:
        buffer = pickle.PickleBuffer(data.cpu().numpy())
    except RuntimeError:  # NumPy is not there
        return NotImplemented
    return restored, (buffer, obj.dtype, str(memory.device))


def restored(buffer: Any, dtype: Any, device: str) -> Any:
    """Return the storage with these bytes: on its device if this process has it, or in the processor's memory."""
    import torch  # pyright: ignore[reportMissingImports]

    view = memoryview(buffer)
    if view.readonly:  # a tensor is always writable
        view = memoryview(bytearray(view))
    data = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)
    if _is_local(device):
        data = data.to(device)
    return torch.storage.TypedStorage(wrap_storage=data.untyped_storage(), dtype=dtype, _internal=True)


def _is_local(device: str) -> bool:
    import torch  # pyright: ignore[reportMissingImports]

    wanted = torch.device(device)
    if wanted.type == "cpu":
        return True
    module = getattr(torch, wanted.type, None)  # torch.cuda, torch.xpu
    return module is not None and module.is_available() and (wanted.index or 0) < module.device_count()


# What the assertions of a module that pytest has rewritten call, for nodes without pytest.
#
# pytest changes each `assert` of a test module into code that calls its helpers to show the values. A function of
# such a module travels with these in their place. The text of an error is pytest's, without what its plugins add.


def helpers() -> types.SimpleNamespace:
    """Return the helpers under the names that rewritten code uses (pytest 8 and 9, `AssertionRewriter`)."""
    return types.SimpleNamespace(
        _saferepr=_shown,
        _format_assertmsg=_message,
        _format_explanation=_explanation,
        _format_boolop=_joined,
        _call_reprcompare=_first_that_failed,
        _should_repr_global_name=_has_no_name,
        _check_if_assertion_pass_impl=lambda: False,
        _call_assertion_pass=lambda *_: None,
    )


def _shown(obj: object) -> str:
    if isinstance(obj, types.MethodType):
        return obj.__name__
    try:
        text = repr(obj)
    except Exception as error:  # the user's own code: the assertion is shown anyway
        text = f"<{type(error).__name__} in the repr of {type(obj).__name__}>"
    if len(text) > SHOWN_CHARACTERS:
        begin = (SHOWN_CHARACTERS - 3) // 2
        text = f"{text[:begin]}...{text[begin + 3 - SHOWN_CHARACTERS :]}"
    return text.replace("\n", "\\n")


def _message(obj: object) -> str:
    text = obj if isinstance(obj, str) else _shown(obj).replace("\\n", "\n")
    return text.replace("\n", "\n~").replace("%", "%%")


def _joined(explanations: Iterable[str], is_or: bool) -> str:
    return f"({(' or ' if is_or else ' and ').join(explanations)})".replace("%", "%%")


def _first_that_failed(
    _operators: Sequence[str], results: Sequence[object], explanations: Sequence[str], _objects: Sequence[object]
) -> str:
    for result, explanation in zip(results, explanations, strict=True):
        try:
            if not result:
                return explanation
        except Exception:  # an array has no truth value: this comparison is the one
            return explanation
    return explanations[-1]


def _has_no_name(obj: object) -> bool:
    return not callable(obj) and not hasattr(obj, "__name__")


def _explanation(text: str) -> str:
    r"""Return the text for people: "\n{" begins what explains a part of the line before, "\n}" ends it."""
    lines, open_lines, parts = [""], [0], [0]
    for number, line in enumerate(text.split("\n")):
        mark, rest = line[:1], line[1:]
        if number == 0:
            lines[0] = line
        elif mark == "{":
            lines.append(f" +{'  ' * len(open_lines)}{'and   ' if parts[-1] else 'where '}{rest}")
            parts[-1] += 1
            open_lines.append(len(lines) - 1)
            parts.append(0)
        elif mark == "}":
            open_lines.pop()
            parts.pop()
            lines[open_lines[-1]] += rest
        elif mark in ("~", ">"):
            open_lines[-1] += 1
            lines.append("  " * (len(open_lines) - (mark == ">")) + rest)
        else:
            lines[-1] += f"\\n{line}"
    return "\n".join(lines)


type Replace = Callable[[Any], Any]
"""Given an object, returns NotImplemented, or what to pickle in its place."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value as bytes: `data` is the pickle, `buffers` are its large contiguous parts, in order.

    The buffers are views of the caller's own memory, not copies: send them before the arrays change. A `Pickled`
    pickles with protocol 5 and hands its buffers on out of band, so that a transport which knows that protocol copies
    nothing either.
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


def dumps(
    obj: Any,
    *,
    label: str | tuple[str, ...] = "value",
    replace: Replace | None = None,
    carried: list[types.FunctionType] | None = None,
) -> Pickled:
    """Pickle a value for a process that has the installed distributions but not the user's project; see the head of
    this file for the rule.

    `label` is the value's name in an error: "result", "args"; for a tuple it may be a tuple of one name for each item.
    `replace` is called for each object except plain scalars and containers, and may return another one to pickle: for a
    Prefect task, its function. Functions that travel by value, methods among them, are appended to
    `carried`.
    Nothing is left registered with cloudpickle, and what a user has registered stays so. Raises `NotPicklable`, whose
    `path` names the part that cannot travel, such as `args[0].client.lock`, `train.<closure>.db` or `train.<global>
    CONNECTION`.

    >>> loads(dumps({"lr": 0.1}))
    {'lr': 0.1}
    """
    trials = _Trials(replace)
    try:
        return _dumped(obj, trials, carried)
    except MemoryError:
        raise
    except Exception as error:
        raise diagnose(obj, label, error, PickleProbe(trials.error_of, trials.parts_of)) from error


def refuse_what_cannot_travel(obj: Any, *, label: str | tuple[str, ...], replace: Replace | None = None) -> None:
    """Raise what `dumps` would raise. Keeps no byte of the pickle."""
    if _is_plain(obj, [_PLAIN_ITEMS], 0):
        return
    trials = _Trials(replace)
    if (error := trials.error_of(obj)) is not None:
        if isinstance(error, MemoryError):
            raise error
        raise diagnose(obj, label, error, PickleProbe(trials.error_of, trials.parts_of)) from error


def dumps_or_raise(obj: Any) -> Pickled:
    """Pickle a value as `dumps` does. Raises the pickler's error at once, without a search for the part."""
    return _dumped(obj, _Trials(None), None)


def _dumped(obj: Any, trials: _Trials, carried: list[types.FunctionType] | None) -> Pickled:
    views: list[memoryview] = []
    if _is_plain(obj, [_PLAIN_ITEMS], 0):
        return Pickled(
            pickle.dumps(obj, protocol=5, buffer_callback=functools.partial(_keep_in_band, views)), tuple(views)
        )
    file = io.BytesIO()
    _Pickler(file, trials, functools.partial(_keep_in_band, views), carried=carried).dump(obj)
    return Pickled(file.getvalue(), tuple(views))


def loads(pickled: Pickled | bytes | bytearray | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Rebuild what `dumps` pickled.

    Large arrays are views of their buffers, so they are writable if and only if the buffers are.
    """
    if isinstance(pickled, Pickled):
        return pickle.loads(pickled.data, buffers=pickled.buffers)
    return pickle.loads(pickled, buffers=buffers)


# ── plain values: they have no classes of users, so the C pickler alone is right and fast
# ────────────────────────────────


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


# ── the pickler ──────────────────────────────────────────────────────────────────────────────────────────────────────

# no fork while another thread is inside: the child would inherit a held lock and a module registered for good
os.register_at_fork(
    before=_registration.acquire, after_in_parent=_registration.release, after_in_child=_registration.release
)


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
        # pickled empty, once: on loading, one dictionary of the stand-ins made so far
        self._stand_ins: dict[str, Any] = {}
        self._references: dict[str, StandInReference] = {}
        self._namespaces: dict[str, StandInGlobals] = {}
        self._sent: set[tuple[str, str]] = set()
        self._open_aliases: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        """Called by the C pickler for every object that is neither a plain scalar nor a plain container."""
        kind = cast("type[Any]", type(obj))
        if kind is types.FunctionType and obj in _MAKERS:
            return NotImplemented
        if self._trials.replace is not None:
            other = self._trials.replace(obj)
            if other is not NotImplemented:
                return itself, (other,)
        if kind is types.FunctionType:
            return self._reduce_dispatcher(obj) if _is_dispatcher(obj) else self._reduce_function(obj)
        if issubclass(kind, type):
            return self._reduce_class(obj)
        if issubclass(kind, types.ModuleType):
            if obj.__name__ == PYTEST_HELPERS:
                return helpers, ()
            return self._reduce_module(obj) if belongs_to_user(obj) else NotImplemented
        if issubclass(kind, BaseException):
            return exception_state.reduced(obj)
        reduce = _TYPE_REDUCERS.get(kind)
        return reduced(obj) if reduce is None else reduce(self, obj)

    def _reduce_class(self, cls: type) -> Any:
        home = home_module(cls)
        with _registered(home):
            reduced = cast(Any, super().reducer_override(cls))
        if reduced is NotImplemented or len(reduced) < 6:
            return reduced
        note_original(cls)
        make, args, state, _, _, set_state = reduced
        if home is not None and home.__name__ != "__main__" and "<locals>" not in cls.__qualname__:
            make, args = served_class, (home.__name__, cls.__qualname__, make, args)
        return make, args, (set_state, state), None, None, fill_class

    def _reduce_function(self, function: types.FunctionType) -> Any:
        home = home_module(function)
        with _registered(home):
            reduced = cast(Any, super().reducer_override(function))
        if reduced is NotImplemented:
            return reduced
        if self._carried is not None:
            self._carried.append(function)
        make, (code, base, *rest), (attributes, slots), _, _, set_state = reduced
        if home is not None and function.__globals__ is vars(home):
            base = self._namespaces.setdefault(home.__name__, StandInGlobals(self._reference(home), base))
        slots["__annotations__"] = {name: portable_annotation(hint) for name, hint in slots["__annotations__"].items()}
        outer = {**class_body_globals(function), **slots["__globals__"]}
        slots["__globals__"] = {
            name: self._reference(value) if is_user_module(value) else value for name, value in outer.items()
        }
        if slots["__closure__"]:
            slots["__closure__"] = tuple(self._cell(cell) for cell in slots["__closure__"])
        installed = [module for module in slots["_cloudpickle_submodules"] if not is_user_module(module)]
        # cloudpickle only loads this list: so it can fill the stand-ins before a call
        slots["_cloudpickle_submodules"] = [*installed, *self._parts(function)]
        return make, (code, base, *rest), (attributes, slots), None, None, set_state

    def _parts(self, function: types.FunctionType) -> Iterator[StandInPart | types.ModuleType]:
        for use in module_uses(function):
            if use.whole:
                yield use.module
            new = {name: value for name, value in use.values.items() if (use.module.__name__, name) not in self._sent}
            self._sent.update((use.module.__name__, name) for name in new)
            if new:
                carried = {
                    name: self._reference(value) if is_user_module(value) else value for name, value in new.items()
                }
                yield StandInPart(self._reference(use.module), carried)

    def _cell(self, cell: types.CellType) -> types.CellType:
        with suppress(ValueError):  # an empty cell
            if is_user_module(cell.cell_contents):
                return types.CellType(self._reference(cell.cell_contents))
        return cell

    def _reference(self, module: types.ModuleType) -> StandInReference:
        return self._references.setdefault(module.__name__, StandInReference(self._stand_ins, module.__name__))

    def _reduce_module(self, module: types.ModuleType) -> Any:
        make = (stand_in, (self._stand_ins, module.__name__))
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
        return *make, (carried, absent), None, None, fill_module

    def _reduce_cached(self, wrapper: Any) -> Any:
        """`functools.lru_cache` pickles by name alone; a recursive one refers to itself, so it is made first and filled
        after.
        """
        reduced: Any = (
            self._reduce_function(wrapper.__wrapped__)
            if type(wrapper.__wrapped__) is types.FunctionType
            else NotImplemented
        )
        if reduced is NotImplemented:
            return (
                make_cached,
                (wrapper.cache_parameters(), itself, (wrapper.__wrapped__,)),
                (set_nothing, None),
                None,
                None,
                fill_cached,
            )
        make, args, state, _, _, set_state = cast("tuple[Any, ...]", reduced)
        return make_cached, (wrapper.cache_parameters(), make, args), (set_state, state), None, None, fill_cached

    def _reduce_dispatcher(self, dispatcher: Any) -> Any:
        """A function of `functools.singledispatch` keeps its cache in weak references, so the node makes its own."""
        attributes = {name: value for name, value in vars(dispatcher).items() if name not in _OF_DISPATCHER}
        state = dict(dispatcher.registry), attributes
        return make_dispatcher, (dispatcher.__name__,), state, None, None, fill_dispatcher

    def _reduce_type_variable(self, variable: Any) -> Any:
        with _registered(home_module(variable)):
            return self.dispatch_table[type(variable)](variable)

    def _reduce_alias(self, alias: typing.TypeAliasType) -> Any:
        if id(alias) in self._open_aliases:
            return itself, (Any,)  # a recursive alias cannot be pickled
        self._open_aliases.add(id(alias))
        value: Any = Any
        with suppress(NameError):
            value = alias.__value__
        return make_alias, (alias.__name__, value, alias.__type_params__)


def _is_dispatcher(function: types.FunctionType) -> bool:
    return function.__code__ is _DISPATCHER_CODE and home_module(function) is not None


def _only_users(reduce: Callable[[_Pickler, Any], Any]) -> Callable[[_Pickler, Any], Any]:
    return lambda pickler, obj: reduce(pickler, obj) if home_module(obj) is not None else NotImplemented


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
"""Types that Python pickles only by name, although they can be made again."""


class _Trials:
    """Tries whether a value can be pickled by itself.

    `replace` is the caller's; the answers for module globals are kept.
    """

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
        """Return the parts of values that this module pickles in its own way; None for others."""
        if self.replace is not None and (other := self.replace(obj)) is not NotImplemented:
            return [("", other)]
        kind = cast("type[Any]", type(obj))
        if kind is types.FunctionType and _is_dispatcher(obj):
            return [(f".registry[{cls.__name__}]", implementation) for cls, implementation in obj.registry.items()]
        if kind is types.FunctionType:
            return _parts_of_function(obj)
        return [("", getattr(obj, "__wrapped__", None))] if kind in _TYPE_REDUCERS else None


class _Sink:
    def write(self, data: Any) -> int:
        return len(data)


def _parts_of_function(function: types.FunctionType) -> Generator[tuple[str, Any]]:
    scope = Scope(function)
    for name in function.__code__.co_freevars:
        yield f".<closure>.{name}", scope.get(name)
    for name in sorted({name for name, _ in names_used(function.__code__).chains}):
        if (
            name not in function.__code__.co_freevars
            and name in function.__globals__
            and not is_user_module(function.__globals__[name])
        ):
            yield f".<global> {name}", function.__globals__[name]
    for use in module_uses(function):
        for name, value in use.values.items():
            yield f".<global> {use.module.__name__}.{name}", value
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    for name, value in [
        *zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True),
        *(function.__kwdefaults__ or {}).items(),
    ]:
        yield f".<default> {name}", value
    for name, value in vars(function).items():
        yield f".{name}", value
    for name, value in function.__annotations__.items():
        yield f".<annotation> {name}", value
