"""The README and the how-tos are true: their Python blocks run. (Those of docs/airflow.md run as a DAG file, in integrations/test_airflow.py.)"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/pool.md"]
PAGES_OF_ORCHESTRATORS = ["docs/prefect.md", "docs/dagster.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_of_the_page_runs(page: str) -> None:
    """A page's Python blocks run from top to bottom, in one namespace, as a reader would type them."""
    examples = list(Sybil(parsers=[PythonCodeBlockParser()]).parse(ROOT / page).examples())
    assert examples
    for example in examples:
        example.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_OF_ORCHESTRATORS)
def test_the_page_of_an_orchestrator_runs_as_a_script(page: str, tmp_path: Path) -> None:
    """The page's Python blocks, put together in one file, run to the end in a process and a home of their own."""
    blocks = [str(example.parsed) for example in Sybil(parsers=[PythonCodeBlockParser()]).parse(ROOT / page).examples()]
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    homes = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], env=os.environ | homes, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
