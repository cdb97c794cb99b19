"""Names in strings exist: modules that are imported by name, names that tests replace, and the programs that they run.

A type checker does not read strings. This test does, for the whole repository, and imports next to nothing.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = [ROOT, ROOT / "integrations"]
"""Folders that have our packages."""
PACKAGES = sorted(path.parent.name for root in ROOTS for path in root.glob("*/__init__.py"))
OLD = ("docs/decisions", "CHANGELOG.md")
"""Texts about earlier versions: their names may be gone."""
EXAMPLES = ("skyward_core.providers.acme",)
"""Modules that a reader is to write."""

OURS = rf"(?:{'|'.join(PACKAGES)})"
LITERAL = re.compile(rf"""(["'`])({OURS}(?:\.\w+)+)(?=["'`:]|\Z)""")
"""A dotted name as a whole string, or before a colon (an entry point)."""
IMPORT_FROM = re.compile(rf"\bfrom ({OURS}(?:\.\w+)*) import (\([^)]*\)|\w[\w, ]*)")
IMPORT = re.compile(rf"\bimport ({OURS}(?:\.\w+)+)")
MODULE_BY_NAME = re.compile(
    rf"""(?:(\w+)(?:: [^=\n]+)? = )?(?:cast\([^(]+, )?(?:importlib\.)?import_module\(\s*["']({OURS}(?:\.\w+)*)["']\s*\)+(?:\.(\w+))?"""
)
"""`importlib.import_module("...")`: the variable that has the module, its name, and the attribute that is read."""
REPLACED = re.compile(r"""\bsetattr\(\s*([a-z]\w*),\s*["'](\w+)["']""")
"""`monkeypatch.setattr(module, "name", ...)`."""
MODULE_IMPORT = re.compile(
    rf"^from ({OURS}(?:\.\w+)*) import (\([^)]*\)|\w[\w, ]*)|^import ({OURS}(?:\.\w+)*) as (\w+)", re.M
)


def test_names_in_strings_exist() -> None:
    """Every name is found; a failure shows the file and the line."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} does not exist"
        for path in _files()
        for line, name in missing(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('x = importlib.import_module("skyward_core.gone")', "skyward_core.gone"),
        ('x = importlib.import_module("skyward_core.ledger.ledger").gone', "skyward_core.ledger.ledger.gone"),
        (
            'x: Any = cast("Any", import_module("skyward_core.ledger.ledger"))\nx.Ledger\nx.gone()',
            "skyward_core.ledger.ledger.gone",
        ),
        ('monkeypatch.setattr("skyward_core.paths.gone", 1)', "skyward_core.paths.gone"),
        ('monkeypatch.setattr("skyward_core.ledger.ledger.Ledger.gone", 1)', "skyward_core.ledger.ledger.Ledger.gone"),
        ('from skyward_core import paths\nmonkeypatch.setattr(paths, "gone", 1)', "skyward_core.paths.gone"),
        ('run([python, "-m", "skyward_core.worker.gone"])', "skyward_core.worker.gone"),
        ('PROGRAM = """\nfrom skyward_core.paths import (\n    gone,\n)\n"""', "skyward_core.paths.gone"),
        ('run([python, "-c", "import skyward_core.gone; print()"])', "skyward_core.gone"),
        ('run([python, "-c", "from skyward_core import gone; print()"])', "skyward_core.gone"),
        ('app = "skyward_core.cli:main"', ""),
        ('monkeypatch.setattr("skyward_core.ledger.ledger.Ledger.close", 1)', ""),
        ('PROGRAM = """\nfrom skyward_core.ledger import Ledger, default_url\n"""', ""),
    ],
)
def test_a_name_that_is_gone_is_found(text: str, name: str) -> None:
    """One name for each kind of string."""
    assert {found for _, found in missing(text)} == ({name} if name else set())


def missing(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of each name in a text that does not exist."""
    for place, name in sorted(set(_names(text))):
        if not name.startswith(EXAMPLES) and not exists(name):
            yield text.count("\n", 0, place) + 1, name


def _names(text: str) -> Iterator[tuple[int, str]]:
    for found in LITERAL.finditer(text):
        yield found.start(2), found[2]
    for found in IMPORT.finditer(text):
        yield found.start(1), found[1]
    for found in IMPORT_FROM.finditer(text):
        for name, _ in _imported(found[2]):
            yield found.start(), f"{found[1]}.{name}"
    for found in MODULE_BY_NAME.finditer(text):
        variable, module, attribute = found.groups()
        if attribute is not None:
            yield found.start(2), f"{module}.{attribute}"
        elif variable is not None:
            for use in re.compile(rf"(?<![\w.]){variable}\.([A-Za-z]\w*)").finditer(text, *_scope(text, found)):
                yield use.start(), f"{module}.{use[1]}"
    modules = _modules(text)
    for found in REPLACED.finditer(text):
        if found[1] in modules:
            yield found.start(), f"{modules[found[1]]}.{found[2]}"


def _scope(text: str, assignment: re.Match[str]) -> tuple[int, int]:
    """Return where the variable of an assignment is used: in the rest of its function, or of its file."""
    is_of_the_file = text.rfind("\n", 0, assignment.start()) + 1 == assignment.start()
    end = None if is_of_the_file else re.compile(r"^\s*(?:async )?def ", re.MULTILINE).search(text, assignment.end())
    return assignment.end(), len(text) if end is None else end.start()


def _modules(text: str) -> dict[str, str]:
    """Return the modules of ours that a file imports, by their local names."""
    found: dict[str, str] = {}
    for package, names, module, alias in MODULE_IMPORT.findall(text):
        if module:
            found[alias] = module
        for name, local in _imported(names):
            if _file(f"{package}.{name}") is not None:
                found[local] = f"{package}.{name}"
    return found


def _imported(names: str) -> Iterator[tuple[str, str]]:
    """Yield the names of an import, and their local names."""
    for part in re.sub(r"#.*", "", names).strip("()").split(","):
        name, _, local = part.strip().partition(" as ")
        if (name := name.partition(" ")[0]).isidentifier():
            yield name, local or name


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, a name of a module, or a name of a class of a module."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (path := _file(".".join(parts[:end]))) is not None:
            return end == len(parts) or _has(".".join(parts[:end]), path, parts[end:])
    return False


def _has(module: str, path: Path, names: list[str]) -> bool:
    defined = _defined(path)
    if names[0] not in defined:
        return "__getattr__" in defined and hasattr(importlib.import_module(module), names[0])
    match defined[names[0]]:
        case str(origin):
            return origin.partition(".")[0] not in PACKAGES or exists(".".join([origin, *names[1:]]))
        case frozenset() as attributes:
            return len(names) == 1 or names[1] in attributes
        case None:
            return True


@cache
def _file(module: str) -> Path | None:
    """Return the file of a module of ours; the folder of a package without `__init__.py`."""
    relative = module.replace(".", "/")
    places = [root / place for root in ROOTS for place in (f"{relative}.py", f"{relative}/__init__.py", relative)]
    return next((place for place in places if place.exists()), None)


type Definition = str | frozenset[str] | None
"""Where an imported name is from, or the names of a class without bases; the syntax trees take too much memory."""


@cache
def _defined(path: Path) -> dict[str, Definition]:
    """Return what a module defines, by name."""
    found: dict[str, Definition] = {}
    waiting: list[ast.AST] = [] if path.is_dir() else [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        for statement in ast.iter_child_nodes(waiting.pop()):
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found[name] = None
                case ast.ClassDef(name=name, bases=bases):
                    found[name] = None if bases else frozenset(_names_of_class(statement))
                case ast.Import(names=names):
                    found |= {alias.asname or alias.name.partition(".")[0]: None for alias in names}
                case ast.ImportFrom(module=str(source), names=names):
                    found |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in names}
                case ast.If() | ast.Try() | ast.With() | ast.For() | ast.ExceptHandler():
                    waiting.append(statement)
                case _:
                    found |= {
                        node.id: None
                        for node in ast.walk(statement)
                        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                    }
    return found


def _names_of_class(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


def _files() -> list[Path]:
    folders = ("skyward_core", "integrations", "tests", "benchmarks", "dags", "examples", "flows", "docs")
    found = [path for name in folders for kind in ("*.py", "*.md") for path in sorted((ROOT / name).rglob(kind))]
    return [
        path
        for path in [*found, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
        if path != Path(__file__) and not str(path.relative_to(ROOT)).startswith(OLD)
    ]
