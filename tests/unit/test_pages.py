"""The pages for contributors are correct: their links and the tests that they name exist."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests import mutation

ROOT = Path(__file__).parents[2]
DOCS = "index getting-started errors questions performance architecture glossary compose decisions/README"
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{name}.md" for name in DOCS.split())]
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES)
def test_the_links_and_tests_that_a_page_names_exist(page: str) -> None:
    """A link is a file or a folder of the repository, and `tests/test_x.py::test_y` a function of that file."""
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", text)
    assert targets
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []
    named = NAMED_TEST.findall(text)
    missing = [test for test in named if not (ROOT / test[0]).exists() or test[1] not in {"", *functions_of(test[0])}]
    assert missing == []


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(node.name for node in tree if isinstance(node, ast.FunctionDef))


def test_the_index_of_decisions_lists_every_record() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\) \|", (folder / "README.md").read_text())
    assert listed == sorted(record.name for record in folder.glob("[0-9]*.md"))


def test_the_architecture_names_each_package_in_the_order_of_the_layers() -> None:
    """The numbers of the list are those of the layers that import-linter checks."""
    core = ROOT / "skyward_core"
    modules = {path.stem for path in core.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in core.glob("*/__init__.py")}
    section = (ROOT / "docs/architecture.md").read_text().partition("\n## Packages\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))) == modules | packages
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    expected = [(name.strip(), str(number)) for number, layer in enumerate(layers, 1) for name in layer.split("|")]
    assert [(row[0].strip("`"), row[1]) for row in rows[1:]] == expected


def test_the_modules_and_files_of_the_mutation_table_exist() -> None:
    """A renamed one would be skipped without a message."""
    named = [f"skyward_core/{module}.py" for module in mutation.OTHERS]
    named += [f"tests/{file.partition('::')[0]}" for files in mutation.OTHERS.values() for file in files]
    assert [name for name in named if not (ROOT / name).exists()] == []
