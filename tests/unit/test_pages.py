"""The pages for contributors are correct: their links and the tests that they name exist."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/index.md",
    "docs/getting-started.md",
    "docs/errors.md",
    "docs/questions.md",
    "docs/performance.md",
    "docs/architecture.md",
    "docs/glossary.md",
    "docs/stack.md",
    "docs/decisions/README.md",
]
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_exist(page: str) -> None:
    """Every relative link of the page is a file or a folder of the repository."""
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", (ROOT / page).read_text())
    assert targets
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if NAMED_TEST.search((ROOT / page).read_text())])
def test_a_test_that_a_page_names_exists(page: str) -> None:
    """`tests/test_x.py::test_y` on the page is a function, or a method, of that file."""
    named = NAMED_TEST.findall((ROOT / page).read_text())
    assert [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or (name and name not in functions_of(file))
    ] == []


def test_the_index_of_decisions_lists_every_record() -> None:
    """`docs/decisions/README.md` links to each record once, in the order of the numbers."""
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\) \|", (folder / "README.md").read_text())
    assert listed == sorted(record.name for record in folder.glob("[0-9]*.md"))


@cache
def functions_of(file: str) -> frozenset[str]:
    return frozenset(
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
    )


# ── every thread and lock of the core is in the tables of docs/architecture.md ───────────────────────────────────────

NAMING = {
    "Thread": ("name", None),
    "ThreadPoolExecutor": ("thread_name_prefix", 1),
    "PlainExecutor": ("name", 0),
    "Threads": ("name", 0),
    "PeriodicThread": ("name", 0),
    "side_by_side": ("name", 2),
    "end_in_thread": ("name", 2),
    "_in_thread": ("name", 0),
    "_begin": ("name", 0),
    "begin": ("name", 0),
}
"""Calls that start threads, and where the thread's name is among their arguments: by keyword and by position."""

NAMED_BY_THEIR_CALLERS = {
    "concurrency.Threads.submit",
    "concurrency.PlainExecutor.__init__",
    "concurrency.side_by_side",
    "concurrency.PeriodicThread.__init__",
    "engine._ThreadStarter.__call__",
    "provisioning.Terminations.end_in_thread",
    "session.Attached.__init__",
    "session.Renewal.begin",
}
"""Functions whose callers pass the name, which `NAMING` finds."""
CORE = ROOT / "skyward_core"
ARCHITECTURE = ROOT / "docs/architecture.md"


def test_the_architecture_names_each_package() -> None:
    """Each package and module of the root is in the list of packages, and the list has no others."""
    there = {
        path.name.removesuffix(".py")
        for path in CORE.iterdir()
        if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").exists()
    }
    listed = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows_below("Packages"))))
    assert there == listed, (
        f"not on the page: {sorted(there - listed)}; on the page and not in the code: {sorted(listed - there)}"
    )


def test_the_architecture_has_the_packages_in_the_order_of_the_layers() -> None:
    """The numbers of the list are those of the layers that import-linter checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    expected = [(name.strip(), str(number)) for number, layer in enumerate(layers, 1) for name in layer.split("|")]
    assert [(row[0].strip("`"), row[1]) for row in rows_below("Packages")[1:]] == expected


def test_the_architecture_names_each_thread() -> None:
    """A thread is identified by its name; one without a name, or with a caller's name, by the function that
    starts it.
    """
    listed = set(re.findall(r"`([^`]+)`", " ".join(row[0] for row in rows_below("Threads"))))
    there = set(threads_of_the_core())
    assert there == listed, (
        f"not on the page: {sorted(there - listed)}; on the page and not in the code: {sorted(listed - there)}"
    )


def test_the_paths_and_methods_of_the_architecture_exist() -> None:
    """A path such as `engine/owner.py` is a file of the core, and `EngineThread._do` is a method of it."""
    text = ARCHITECTURE.read_text()
    files = re.findall(r"`(\w+/[\w/]+\.py|compute\.py|pool\.py)`", text)
    methods = re.findall(r"`([A-Z]\w+\.\w+)`", text)
    assert files
    assert methods
    defined = {
        f"{kind.name}.{one.name}"
        for path in CORE.rglob("*.py")
        for kind, one in methods_of(ast.parse(path.read_text()))
    }
    missing = [file for file in files if not file.startswith("tests/") and not (CORE / file).exists()] + [
        name for name in methods if name not in defined
    ]
    assert missing == []


def methods_of(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    yield from ((kind, one) for kind in kinds for one in kind.body if isinstance(one, ast.FunctionDef))


def rows_below(heading: str) -> list[list[str]]:
    """The rows of all tables between this heading and the next."""
    section = ARCHITECTURE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return [row for row in rows if not set(row[0]) <= set("-: ")]


def threads_of_the_core() -> Iterator[str]:
    for place, call, constants, _ in calls_of_the_core():
        keyword, position = NAMING.get(called(call), (None, None))
        if keyword is None:
            continue
        given = next((word.value for word in call.keywords if word.arg == keyword), None)
        if given is None and position is not None and len(call.args) > position:
            given = call.args[position]
        if (name := text_of(given, constants)) is not None:
            if name.startswith("skyward"):
                yield name
        elif (
            called(call) in {"Thread", "ThreadPoolExecutor"}
            and (given is None or isinstance(given, ast.JoinedStr))
            and place not in NAMED_BY_THEIR_CALLERS
        ):
            yield place
        elif (
            called(call) in {"Thread", "ThreadPoolExecutor", "PlainExecutor", "Threads", "PeriodicThread"}
            and place not in NAMED_BY_THEIR_CALLERS
        ):
            yield f"{place}: its threads are named by its callers. Add it to NAMING and NAMED_BY_THEIR_CALLERS"


def called(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )


def text_of(node: ast.expr | None, constants: dict[str, str]) -> str | None:
    """Return the name in the argument, with N in place of parts that are known only at run time."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name)
        case ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]) if (
            start.startswith("skyward-") and start != "skyward-"
        ):
            return f"{start}N"
        case _:
            return None


def calls_of_the_core() -> Iterator[tuple[str, ast.Call, dict[str, str], str]]:
    """Every call, with "package.Class.function" around it, its module's constants, and the attribute or name to which
    it is assigned.
    """
    for path in sorted(CORE.rglob("*.py")):
        package = path.relative_to(CORE).parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        pairs = [(one.targets[0], one.value) for one in tree.body if isinstance(one, ast.Assign)]
        constants = {
            target.id: value.value
            for target, value in pairs
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
        }
        yield from calls_below(tree, package, constants, "")


def calls_below(
    node: ast.AST, place: str, constants: dict[str, str], target: str
) -> Iterator[tuple[str, ast.Call, dict[str, str], str]]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        place = f"{place}.{node.name}"
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        first = node.targets[0] if isinstance(node, ast.Assign) else node.target
        target = first.attr if isinstance(first, ast.Attribute) else first.id if isinstance(first, ast.Name) else ""
    elif isinstance(node, ast.Call):
        yield place, node, constants, target
    for child in ast.iter_child_nodes(node):
        yield from calls_below(child, place, constants, target)
