"""The README and the how-tos are true: their Python blocks run."""

from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "pool.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_the_page_runs(page: Path) -> None:
    """A page's Python blocks run from top to bottom, in one namespace, as a reader would type them."""
    examples = list(Sybil(parsers=[PythonCodeBlockParser()]).parse(page).examples())
    assert examples
    for example in examples:
        example.evaluate()
