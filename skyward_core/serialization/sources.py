"""Modules of the user's project that functions import inside their bodies: their source text travels to the node.

`pickling` carries by value what a function reads of imported modules. An import inside a body is only a name. So the
module's text travels, with the texts of all project modules that it imports, at its head or inside bodies, and of the
packages that contain them. Only names in import statements are found. No module is imported during the search.

On the node each runner imports such a module once, when the body's import runs. It does not see changes that the client
has made to the module's globals. A package that is installed on the node goes before a text of the same name. An
instance of its classes comes back as an instance of the client's, which imports the module if it has not. Files beside
the modules, and extension modules, do not travel.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import pickle
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dis import get_instructions
from pathlib import Path
from typing import Any, NamedTuple, cast

from skyward_core.serialization import ownership, pickling
from skyward_core.serialization import ownership as loading
from skyward_core.serialization.pickling import Pickled, Replace


class Source(NamedTuple):
    """A module as text.

    `file` is where the client has it, for tracebacks; None for a folder without an `__init__.py`.
    """

    name: str
    text: str
    is_package: bool
    file: str | None


class Loaded(NamedTuple):
    """A value, and the sources that came with it: `install` them before each call that uses the value."""

    value: Any
    sources: tuple[Source, ...]


def pack(obj: Any, *, label: str | tuple[str, ...] = "value", replace: Replace | None = None) -> Pickled:
    """Pickle a value as `pickling.dumps` does, together with the sources that its functions need.

    Raises NotPicklable.
    """
    functions: list[types.FunctionType] = []
    pickled = pickling.dumps(obj, label=label, replace=replace, carried=functions)
    sources = collect(functions) if functions else ()
    if not sources:
        return pickled
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(_PackedSources(sources, pickled), protocol=5, buffer_callback=buffers.append)
    return Pickled(data, tuple(buffer.raw() for buffer in buffers))


def unpack(data: bytes | bytearray | memoryview, buffers: Iterable[Any] = ()) -> Loaded:
    """Rebuild what `pack` pickled, and install what came with it."""
    value = pickling.loads(data, buffers)
    if type(value) is not _PackedSources:
        return Loaded(value, ())
    install(value.sources)
    return Loaded(pickling.loads(value.pickled), value.sources)


class _PackedSources(NamedTuple):
    sources: tuple[Source, ...]
    pickled: Pickled


# ── on the client: which modules do bodies import ────────────────────────────────────────────────────────────────────


def collect(functions: Iterable[types.FunctionType], first: str | None = None) -> tuple[Source, ...]:
    """Return the modules of the user's project that importing in the bodies of these functions can reach, in the order
    of their names. Those of the folder `first` go before what this process has imported, and before its path.
    """
    names: set[str] = set()
    for function in functions:
        if imports := _imports_in_code(function.__code__):
            names.update(_targets(imports, _package_of(function)))
    if not names:
        return ()
    walk = _SourceSearch(first)
    walk.follow(names)
    return tuple(source for _, source in sorted(walk.found.items()))


class _Import(NamedTuple):
    """`from ..name import a, b` has the level 2 and these `members`, any of which may be a submodule."""

    name: str
    level: int
    members: tuple[str, ...]


_imports_by_code: weakref.WeakKeyDictionary[types.CodeType, frozenset[_Import]] = weakref.WeakKeyDictionary()


def _imports_in_code(code: types.CodeType) -> frozenset[_Import]:
    known = _imports_by_code.get(code)
    if known is None:
        inner = (_imports_in_code(const) for const in code.co_consts if isinstance(const, types.CodeType))
        known = _imports_by_code[code] = frozenset(_read_imports(code)).union(*inner)
    return known


def _read_imports(code: types.CodeType) -> Iterator[_Import]:
    steps = [step for step in get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE", "NOP")]
    for index, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, members = steps[index - 2].argval, steps[index - 1].argval
            yield _Import(step.argval, level, members or ())


def _package_of(function: types.FunctionType) -> str:
    package = function.__globals__.get("__package__")
    return package if isinstance(package, str) else str(function.__globals__.get("__name__", "")).rpartition(".")[0]


def _targets(imports: Iterable[_Import], package: str) -> Iterator[str]:
    """Yield the full names of what these imports may import, from inside this package."""
    for name, level, members in imports:
        base = name
        if level:
            parts = package.rsplit(".", level - 1) if package else []
            if len(parts) < level:
                continue  # beyond the top: on the node it raises as it would here
            base = f"{parts[0]}.{name}" if name else parts[0]
        if base.partition(".")[0] in sys.stdlib_module_names:
            continue
        yield base
        yield from (f"{base}.{member}" for member in members if member != "*")


class _SourceSearch:
    """Finds the sources of names, then of what these import, until nothing new is found."""

    def __init__(self, first: str | None) -> None:
        self.found: dict[str, Source] = {}
        self._first = first
        self._folders: dict[str, Sequence[str]] = {}
        self._seen: set[str] = set()
        self._foreign = _foreign_names()

    def follow(self, names: Iterable[str]) -> None:
        left = list(names)
        while left:
            parts = left.pop().split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                if name not in self._seen:
                    self._seen.add(name)
                    left.extend(self._visit(name))
                if name not in self._folders:
                    break  # has no submodules, or is not the user's

    def _visit(self, name: str) -> Iterable[str]:
        """Add a module, if it is the user's, and return what it imports."""
        own = self._in_first(name)
        if own is None and name in self._foreign and name not in sys.modules:
            return ()
        file, folders, loader = _placed(name, own) if own else _locate(name, self._folders.get(name.rpartition(".")[0]))
        if file is None and folders is None:
            if "." not in name:
                self._foreign.add(name)
            return ()
        text = _read(name, file, loader) if file is not None else _SourceText(0, 0, "", frozenset())
        if text is None:
            return ()
        self.found[name] = Source(name, text.text, folders is not None, file)
        if folders is not None:
            self._folders[name] = folders
        return _targets(text.imports, name if folders is not None else name.rpartition(".")[0])

    def _in_first(self, name: str) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module below the folder that goes first; None if it is elsewhere."""
        if self._first is None:
            return None
        spec = _find_spec(name, self._folders.get(name.rpartition(".")[0]) or [self._first, *sys.path])
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        return spec if any(place.startswith(f"{self._first}{os.sep}") for place in places) else None


_foreign: tuple[Any, set[str]] = (None, set())


def _foreign_names() -> set[str]:
    """Return names that are known not to be the user's. Emptied when the search path or one of its folders changes."""
    global _foreign  # noqa: PLW0603 - one assignment, so that other threads see both parts change together
    surroundings = [(entry, _mtime_ns(entry)) for entry in sys.path]
    if _foreign[0] != surroundings:
        _foreign = (surroundings, set())
    return _foreign[1]


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


class _Location(NamedTuple):
    """The source file of a module, the folders of its submodules (None: not a package), and its loader."""

    file: str | None = None
    folders: Sequence[str] | None = None
    loader: object = None


def _locate(name: str, parent_folders: Sequence[str] | None) -> _Location:
    """Return where a module of the user's project is, without importing it; an empty place for other modules."""
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType):
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
        loader = getattr(module, "__loader__", None)
    else:
        spec = _find_spec(name, parent_folders)
        return _Location() if spec is None else _placed(name, spec)
    return _of_user(name, file, folders, loader)


def _placed(name: str, spec: importlib.machinery.ModuleSpec) -> _Location:
    file = spec.origin if spec.has_location else None
    return _of_user(name, file, spec.submodule_search_locations, spec.loader)


def _of_user(name: str, file: str | None, folders: Iterable[str] | None, loader: object) -> _Location:
    folders = None if folders is None else list(folders)
    place = file or next(iter(folders or ()), None)
    if place is None or not os.path.isabs(place) or not ownership.is_of_user(name, place):
        return _Location()
    if file is not None and not file.endswith(tuple(importlib.machinery.SOURCE_SUFFIXES)):
        return _Location()
    return _Location(file, folders, loader)


def _find_spec(name: str, parent_folders: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    with suppress(Exception):  # finders may be other people's code
        if parent_folders is None:
            return importlib.util.find_spec(name)  # of a name without dots, this imports nothing
        return importlib.machinery.PathFinder.find_spec(name, parent_folders)
    return None


class _SourceText(NamedTuple):
    mtime_ns: int
    size: int
    text: str
    imports: frozenset[_Import]


_texts: dict[str, _SourceText] = {}


def _read(name: str, file: str, loader: object) -> _SourceText | None:
    """Return a module's text and imports; None if it cannot be read. Read again when its file, or its zip, has changed.

    A module without a file is read through its loader.
    """
    archive = getattr(loader, "archive", None)
    try:
        status = os.stat(file if archive is None else archive)
        stamp = status.st_mtime_ns, status.st_size
    except OSError:
        stamp = None
    known = _texts.get(file)
    if known is None or stamp is None or (known.mtime_ns, known.size) != stamp:
        is_file = stamp is not None and archive is None
        text = _text_of_file(file) if is_file else _text_of_loader(name, loader)
        if text is None:
            return None
        known = _texts[file] = _SourceText(*(stamp or (0, 0)), text, frozenset(_imports_in_text(text)))
    return known


def _text_of_file(file: str) -> str | None:
    try:
        return importlib.util.decode_source(Path(file).read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):  # an unknown encoding is a SyntaxError
        return None


def _text_of_loader(name: str, loader: object) -> str | None:
    text: object = None
    with suppress(Exception):  # loaders may be other people's code
        text = cast("importlib.abc.InspectLoader", loader).get_source(name)
    return text if isinstance(text, str) else None


def _imports_in_text(text: str) -> Iterator[_Import]:
    try:
        tree = ast.parse(text)
    # the text travels anyway: its import raises the error, with the line
    except (SyntaxError, ValueError, RecursionError):
        return
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            yield from (_Import(alias.name, 0, ()) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield _Import(statement.module or "", statement.level, tuple(alias.name for alias in statement.names))


# ── on the node: texts become modules ────────────────────────────────────────────────────────────────────────────────

_served: dict[str, Source] = {}


def install(sources: Iterable[Source]) -> None:
    """Make these modules importable, after the node's own packages.

    If a text has changed, all modules that were imported from texts are forgotten, because any of them may have old
    values. The next import gets the new text.
    """
    texts = {source.name: source for source in sources}
    if not texts:
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if any(_served.get(name, source) != source for name, source in texts.items()):
        _forget_modules()
    loading.served_modules.update(texts)
    for name, source in texts.items():
        if _served.get(name) is source:
            continue
        _served[name] = source
        if source.file is not None:  # the node has no such file; without a time, linecache keeps the lines
            linecache.cache[source.file] = (len(source.text), None, source.text.splitlines(keepends=True), source.file)


def installed() -> tuple[Source, ...]:
    """Return the sources that have come with the present call, for a process that this one starts."""
    return tuple(_served[name] for name in sorted(loading.served_modules) if name in _served)


def begin_call() -> None:
    """Forget which sources came with the last call; `install` and `unpack` set those of the next.

    Modules stay imported.
    """
    loading.served_modules.clear()


def _forget_modules() -> None:
    for name in _served:
        if isinstance(getattr(sys.modules.get(name), "__loader__", None), _Loader):
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    """The first finder.

    It prefers what the others find, except folders without `__init__.py`, which may be anything.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None, /
    ) -> importlib.machinery.ModuleSpec | None:
        source = _served.get(fullname)
        if source is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and (
                source.file is None or not isinstance(spec.loader, importlib.machinery.NamespaceLoader | None)
            ):
                return spec
        # A package's search path stays empty: nodes that see the client's disk must behave like all others.
        spec = importlib.machinery.ModuleSpec(
            fullname, _Loader(source), origin=source.file, is_package=source.is_package
        )
        spec.has_location = source.file is not None
        return spec


_finder = _Finder()


class _Loader(importlib.abc.ExecutionLoader):
    client_has_it = True
    """Read by `ownership.belongs_to_user`: objects of the module return to the client by name."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._source.file or f"<{fullname}>"

    def get_source(self, fullname: str) -> str:
        return self._source.text

    def is_package(self, fullname: str) -> bool:
        return self._source.is_package
