"""The pages for contributors are correct: their links and the tests that they name exist."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests import mutation

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


# ── docs/architecture.md ─────────────────────────────────────────────────────────────────────────────────────────────


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


def rows_below(heading: str) -> list[list[str]]:
    """The rows of all tables between this heading and the next."""
    section = ARCHITECTURE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return [row for row in rows if not set(row[0]) <= set("-: ")]


def test_the_modules_and_files_of_the_mutation_table_exist() -> None:
    """A renamed one would be skipped without a message."""
    named = [f"skyward_core/{module}.py" for module in mutation.OTHERS]
    named += [f"tests/{file.partition('::')[0]}" for files in mutation.OTHERS.values() for file in files]
    assert [name for name in named if not (ROOT / name).exists()] == []
