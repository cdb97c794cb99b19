"""The pages for contributors are true: what they link to is there, and the tests that they name are tests of ours."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "SECURITY.md", "docs/glossary.md"]
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page: str) -> None:
    """Every relative link of the page leads to a file or a folder of the repository."""
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", (ROOT / page).read_text())
    assert targets
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if NAMED_TEST.search((ROOT / page).read_text())])
def test_a_test_that_a_page_names_exists(page: str) -> None:
    """`tests/test_x.py::test_y` on the page is a function, or a method, of that file."""
    named = NAMED_TEST.findall((ROOT / page).read_text())
    assert [f"{file}::{name}" for file, name in named if not (ROOT / file).exists() or (name and name not in functions_of(file))] == []


@cache
def functions_of(file: str) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef))
