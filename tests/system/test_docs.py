"""Each Python block of the pages runs alone, as a reader copies it.

The blocks of the pages of Airflow are DAG files (integrations/test_airflow.py). Those that need a server, hosts or a
framework run in tests/nightly.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.page_blocks import pages, pages_of, programs

ELSEWHERE = {
    page for subject in ("airflow", "dagster", "machines", "prefect", "training") for page in pages_of(subject)
}
LONG = {
    "docs/scikit-learn.md",
    "docs/concepts.md",
    "docs/integrations.md",
}  # pools that load scikit-learn, or many pools
SERVED = "from prefect import flow"
"""Blocks with this line need Prefect's server, and run in tests/nightly."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.nightly] * (page in LONG)) for page in pages() if page not in ELSEWHERE],
)
def test_each_python_block_of_the_page_runs_alone(page: str) -> None:
    for program in programs(page):
        if SERVED not in program:
            exec(compile(program, page, "exec", dont_inherit=True), {"__name__": "__main__"})


def test_each_python_block_of_all_pages_imports_what_it_uses(tmp_path: Path) -> None:
    """This is also true of blocks that run elsewhere, and of lines that no test reaches."""
    for page in pages():
        for number, program in enumerate(programs(page)):
            (tmp_path / f"{page.replace('/', '_')}-{number}.py").write_text(program)
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F",
        "--output-format",
        "concise",
        ".",
    ]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
