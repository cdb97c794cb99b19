"""Exceptions travel from a node to the caller as their own class, with all parts that can be pickled.

Each part is pickled by itself: the class, each argument, each attribute. A socket stays on the node, and a tensor that
cannot be loaded here is left out; a note of the exception names both. The exception is made here without running its
`__init__`, unless its class defines how it is pickled. Its cause, its context and the members of a group travel in the
same way.

What remains is `RemoteError`: for a class that cannot be loaded here, and for those that would end or cancel the
caller's own program.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.machinery
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import packages_distributions
from typing import Any, NamedTuple, cast

from skyward_core.errors import RemoteError
from skyward_core.serialization import pickling
from skyward_core.serialization import unpicklable as exception_state
from skyward_core.serialization.pickling import Pickled
from skyward_core.serialization.unpicklable import ExceptionState, one_line
from skyward_core.shown_text import each_line, indented

DEEPEST = 50
"""Deeper causes of causes, and groups in groups, travel as text."""
MESSAGE_CHARACTERS = 10_000
CONTROL = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""They would end or cancel the caller, which was neither ended nor cancelled."""
_missing = object()


class RemoteTraceback(Exception):
    """Carries the traceback of the node as text, so that it is printed above the exception. Each of its lines is
    visible text and indented, as Python's own traceback around it is not.
    """

    def __str__(self) -> str:
        return f"\n{each_line('  ', self.args[0])}"


class ProcessTraceback(RemoteTraceback):
    """Carries the traceback of another process of this machine, which has run the call."""


class ExceptionReference(NamedTuple):
    """Stands for an exception, or (`of`) a list or tuple of exceptions, by their places in the table."""

    places: tuple[int, ...]
    of: type | None = None


class MissingValue(NamedTuple):
    """Stands for a value that could not travel."""

    text: str
    reason: str


type PackedPart = Pickled | ExceptionReference | MissingValue


class ExceptionParts(NamedTuple):
    """One exception in parts.

    `kind` is its class, `own` the whole of it in its class's own way, if it has one that works; `members` are those of
    a group.
    """

    name: str
    message: str
    kind: Pickled | None
    own: Pickled | None = None
    args: tuple[PackedPart, ...] = ()
    attributes: Mapping[str, PackedPart] = {}
    fields: Mapping[str, PackedPart] = {}
    notes: tuple[str, ...] = ()
    members: tuple[str, tuple[int, ...]] | None = None
    cause: int | None = None
    context: int | None = None
    is_context_hidden: bool = False


class PackedException(NamedTuple):
    """An exception, the first of the table, and all those that it refers to."""

    table: tuple[ExceptionParts, ...]


# ── on the node ──────────────────────────────────────────────────────────────────────────────────────────────────────


def pack(error: BaseException, clean: Callable[[Any], Any] = lambda value: value) -> Pickled:
    """Pickle an exception and what it refers to; parts that cannot travel are left out.

    `clean` removes secrets from a text or a collection.
    """
    packing = _Packing(clean)
    packing.place_of(error)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(
        PackedException(tuple(cast("list[ExceptionParts]", packing.table))), protocol=5, buffer_callback=buffers.append
    )
    return Pickled(data, tuple(buffer.raw() for buffer in buffers))


class _Packing:
    def __init__(self, clean: Callable[[Any], Any]) -> None:
        self._clean = clean
        self.table: list[ExceptionParts | None] = []
        self._places: dict[int, int] = {}
        self._depth = 0

    def place_of(self, error: BaseException) -> int:
        """Add an exception to the table, if it is not there, and return its place."""
        if id(error) not in self._places:
            place = self._places[id(error)] = len(self.table)
            self.table.append(None)
            self._depth += 1
            self.table[place] = (
                self._raised(error)
                if self._depth <= DEEPEST
                else ExceptionParts(name_of(type(error)), text_of(error, self._clean), None)
            )
            self._depth -= 1
        return self._places[id(error)]

    def _raised(self, error: BaseException) -> ExceptionParts:
        kind = type(error)
        state = exception_state.state_of(error)
        members = None
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            members = (self._clean(str(group.message)), tuple(map(self.place_of, group.exceptions)))
        return ExceptionParts(
            name_of(kind),
            text_of(error, self._clean),
            _picked(kind),
            self._in_own_pickling(error),
            tuple(map(self._piece, state.args)),
            {name: self._piece(value) for name, value in state.attributes.items()},
            {
                name: self._piece(value)
                for name, value in state.fields.items()
                if not (members and name in ("message", "exceptions"))
            },
            tuple(map(self._clean, state.notes)),
            members,
            None if error.__cause__ is None else self.place_of(error.__cause__),
            None if error.__context__ is None else self.place_of(error.__context__),
            error.__suppress_context__,
        )

    def _in_own_pickling(self, error: BaseException) -> Pickled | None:
        """Pickle an exception as its class defines it; None if it does not, or if that fails."""
        kind = type(error)
        if not exception_state.is_from_python(kind) or not (
            exception_state.has_own_pickling(kind) or not _can_be_bare(error)
        ):
            return None
        with suppress(Exception):
            pickled = pickling.dumps_or_raise(error)
            if type(pickling.loads(pickled)) is kind:
                return pickled
        return None

    def _piece(self, value: Any) -> PackedPart:
        value = self._clean(value)
        if isinstance(value, BaseException):
            return ExceptionReference((self.place_of(value),))
        if type(value) in (list, tuple) and value and all(isinstance(item, BaseException) for item in value):
            return ExceptionReference(tuple(map(self.place_of, value)), cast("type[Any]", type(value)))
        try:
            return pickling.dumps_or_raise(value)
        except Exception as failure:
            return MissingValue(self._clean(_safely(repr, value)), one_line(failure, self._clean))


def _picked(kind: type[BaseException]) -> Pickled | None:
    with suppress(Exception):
        return pickling.dumps_or_raise(kind)
    return None


def _can_be_bare(error: BaseException) -> bool:
    try:
        if isinstance(error, BaseExceptionGroup):
            exception_state.make(type(error), "", [ValueError()])  # pyright: ignore[reportUnknownArgumentType]
        else:
            exception_state.make(type(error))
    except TypeError:
        return False
    return True


# ── at the caller ────────────────────────────────────────────────────────────────────────────────────────────────────


def unpack(data: Any, buffers: Sequence[Any], node: int, text: str) -> BaseException:
    """Rebuild an exception that was raised on a node, whose traceback there is `text`.

    Raises any error of the unpickler.
    """
    carried = pickling.loads(data, buffers)
    return _Rebuilding(cast(PackedException, carried).table, node, text).result()


def unpack_here(data: Any, buffers: Sequence[Any], text: str) -> BaseException:
    """Rebuild an exception that another process of this machine has raised, for the process that raises it again.

    The end of its chain of causes has the traceback there. Raises any error of the unpickler.
    """
    carried = pickling.loads(data, buffers)
    error = _Rebuilding(cast(PackedException, carried).table, -1, text).error()
    _set(_first_cause(error), "__cause__", ProcessTraceback(text))
    return error


def take_process_text(error: BaseException) -> str:
    """Remove the traceback that `unpack_here` has added, and return it; "" if there is none."""
    seen: set[int] = set()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error.__cause__, ProcessTraceback):
            text = str(error.__cause__.args[0])
            _set(error, "__cause__", None)
            return text
        error = error.__cause__
    return ""


def remote_error(node: int, text: str, name: str = "", message: str = "", reason: str = "") -> RemoteError:
    """Return the error for an exception that stays on its node: first its type and message, then its traceback."""
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    first = _headline(name, message) if name else last or "an unknown exception"
    return RemoteError(f"{first} (raised on node {node}; {reason or 'it cannot be rebuilt here'})", text, name)


class _Rebuilding:
    def __init__(self, table: Sequence[ExceptionParts], node: int, text: str) -> None:
        self._table = table
        self._node = node
        self._text = text
        self._made: dict[int, BaseException] = {}
        self._is_whole: set[int] = set()
        """Places of exceptions that are complete: pickled as their class defines it, or RemoteErrors."""

    def error(self) -> BaseException:
        """Return the exception, filled, with its causes, its context and the members of a group."""
        for place in range(len(self._table)):
            self._make(place)
        for place, raised in enumerate(self._table):
            self._fill(place, raised)
        return self._made[0]

    def result(self) -> BaseException:
        """Return the exception, with the traceback of the node at the end of its chain of causes."""
        error, raised = self.error(), self._table[0]
        if isinstance(error, CONTROL):
            return remote_error(
                self._node,
                self._text,
                raised.name,
                raised.message,
                "it is not raised here, where it would end the program that waits",
            )
        if isinstance(error, RemoteError) and 0 in self._is_whole and raised.name != name_of(RemoteError):
            return error
        _set(_first_cause(error), "__cause__", RemoteTraceback(self._text))
        exception_state.add_note(
            error, f"raised on node {self._node} of the pool; its traceback there is the cause shown above"
        )
        return error

    def _make(self, place: int) -> BaseException:
        if place not in self._made:
            self._made[place] = self._new(place, self._table[place])
        return self._made[place]

    def _new(self, place: int, raised: ExceptionParts) -> BaseException:
        reason = "it cannot be rebuilt here"
        try:
            kind = pickling.loads(raised.kind) if raised.kind is not None else None
            if isinstance(kind, type) and issubclass(kind, BaseException):
                if (whole := _in_own_pickling(raised, kind)) is not None:
                    self._is_whole.add(place)
                    return whole
                if raised.members is not None:
                    message, places = raised.members
                    return exception_state.make(kind, message, [self._make(member) for member in places])
                return exception_state.make(kind)
        except Exception as failure:  # importing its module runs other people's code
            reason = f"its class cannot be loaded here: {one_line(failure)}"
        self._is_whole.add(place)
        return remote_error(self._node, self._text if place == 0 else "", raised.name, raised.message, reason)

    def _fill(self, place: int, raised: ExceptionParts) -> None:
        error = self._made[place]
        losses: list[str] = []
        if place not in self._is_whole:
            args = tuple(
                self._value(f"args[{index}]", piece, losses, in_its_place=_text_in_place_of(piece))
                for index, piece in enumerate(raised.args)
            )
            exception_state.fill(
                error,
                ExceptionState(args, self._values(raised.attributes, losses), self._values(raised.fields, losses), ()),
            )
        for note in raised.notes:
            if note not in object.__getattribute__(error, "__dict__").get("__notes__", ()):
                exception_state.add_note(error, note)
        if losses:
            exception_state.add_note(error, f"it has come without {', '.join(losses)}")
        if place not in self._is_whole and text_of(error) != raised.message:
            exception_state.add_note(error, indented(f"on its node it says: {raised.message}"))
        if raised.context is not None:
            _set(error, "__context__", self._made[raised.context])
        if raised.cause is not None:
            _set(error, "__cause__", self._made[raised.cause])
        _set(error, "__suppress_context__", raised.is_context_hidden)

    def _values(self, pieces: Mapping[str, PackedPart], losses: list[str]) -> dict[str, Any]:
        values = {name: self._value(name, piece, losses, in_its_place=_missing) for name, piece in pieces.items()}
        return {name: value for name, value in values.items() if value is not _missing}

    def _value(self, name: str, piece: PackedPart, losses: list[str], in_its_place: object) -> Any:
        match piece:
            case ExceptionReference(places, None):
                return self._made[places[0]]
            case ExceptionReference(places, of):
                return cast("type[Any]", of)(self._made[place] for place in places)
            case MissingValue(_, reason):
                losses.append(f"{name} ({reason})")
                return in_its_place
            case _:
                try:
                    return pickling.loads(piece)
                except Exception as failure:  # of a type that is not installed here, or whose code raises
                    losses.append(f"{name} ({one_line(failure)})")
                    return in_its_place


def _in_own_pickling(raised: ExceptionParts, kind: type[BaseException]) -> BaseException | None:
    """Load an exception as its class defines it; None if it does not, or if its code fails here."""
    if raised.own is not None:
        with suppress(Exception):
            whole = pickling.loads(raised.own)
            return whole if type(whole) is kind else None
    return None


def _text_in_place_of(piece: PackedPart) -> str:
    return piece.text if isinstance(piece, MissingValue) else "<not loaded>"


def name_of(kind: type) -> str:
    """Return the name of a class, with its module unless that is `builtins` or `__main__`."""
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def text_of(error: BaseException, clean: Callable[[str], str] = lambda text: text) -> str:
    """Return the text of an exception, even if its class raises.

    `clean` runs first, so that no part of a secret stays.
    """
    return clean(_safely(str, error))[:MESSAGE_CHARACTERS]


def _safely(write: Callable[[Any], str], value: Any) -> str:
    try:
        return write(value)
    except Exception as failure:
        return f"<{type(value).__name__}, which does not say what it is: {type(failure).__name__}>"


def _headline(name: str, message: str) -> str:
    line = next((line for line in message.splitlines() if line.strip()), "")
    return f"{name}: {line}" if line else name


def _first_cause(error: BaseException) -> BaseException:
    """Return the end of the chain of causes: the first exception."""
    seen: set[int] = set()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__
    return error


def _set(error: BaseException, name: str, value: object) -> None:
    """Set an attribute even if the class refuses it, as a frozen dataclass does."""
    BaseException.__setattr__(error, name, value)


def note_for(error: BaseException) -> str | None:
    """Return what to do about an exception that a call has raised on a node; None if that is unknown.

    Looks at the packages that are installed here.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing_module(error.name)
    if isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT:
        return _missing_file(error.filename)
    return None


def _missing_module(name: str) -> str | None:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None  # a part of Python that this interpreter was built without
    distributions = sorted(set(packages_distributions().get(top, ())))
    if not distributions and (file := _own_file(top)) is not None:
        if file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            return (
                f"{top!r} is compiled ({file}), and machine code does not travel with a call: build a wheel of it and"
                " list that in Image(pip=[...])"
            )
        return (
            f"{top!r} is a module of your own ({file}) that travels if an `import` statement names it: write one in the"
            " function, or at the head of its module"
        )
    wanted = " or ".join(f'"{one}"' for one in distributions or [top])
    if top != name:
        return (
            f"the node has {top!r}, but no {name!r} in it: name the version that you use here in Image(pip=[...]), for"
            f" {wanted}"
        )
    return f"the module {name!r} is not installed on the node: list it in Image(pip=[...]), as {wanted}"


def _own_file(module: str) -> str | None:
    """Return the file of a module that this client can import, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _missing_file(path: object) -> str | None:
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str) or not path or os.path.isabs(path):
        return None
    return (
        f"{path!r} is a relative path, and the working directory of a call is the node's own: the files beside your"
        " program are not there. Include the file in the image, Image(includes=[...]), pass the content as an argument,"
        " or name an absolute path on the node, such as that of a volume"
    )
