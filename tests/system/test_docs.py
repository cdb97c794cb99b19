"""The Python blocks of the README and the how-tos run.

Those of docs/airflow.md run as a DAG file, in integrations/test_airflow.py.
"""

from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/getting-started.md",
    pytest.param("docs/concepts.md", marks=pytest.mark.nightly),  # three pools
    "docs/events.md",
    pytest.param("docs/integrations.md", marks=pytest.mark.nightly),  # what it shows is tested by itself
    "docs/selection.md",
    "docs/troubleshooting.md",
    "docs/pool.md",
    pytest.param("docs/scikit-learn.md", marks=pytest.mark.nightly),  # each of its pools loads scikit-learn
    "docs/async.md",
    "docs/data.md",
    "docs/shared-pools.md",
    "docs/secrets.md",
    "docs/accelerators.md",
    "docs/commands.md",
    *sorted(
        f"docs/clouds/{page.name}" for page in (ROOT / "docs/clouds").glob("*.md") if "```python" in page.read_text()
    ),
]


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_of_the_page_runs(page: str) -> None:
    examples = list(Sybil(parsers=[PythonCodeBlockParser()]).parse(ROOT / page).examples())
    assert examples
    for example in examples:
        example.evaluate()
