"""The two passes of `make system`, with suites of a few lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONLY_XDIST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""Variables for a pytest that starts three times as fast."""
FIRST_TIME = "fails = not os.path.exists(__file__ + name); open(__file__ + name, 'w').close()"
"""Of a test: fails is True in the first pass only."""


def run(folder: Path, body: str, tests: int = 1) -> tuple[int, list[str]]:
    """Run a suite with one test that passes and some with this body; return the exit code and the lines after the last
    pass of pytest.
    """
    (folder / "test_suite.py").write_text(
        "import os, pytest\ndef test_passes(): pass\n"
        f"@pytest.mark.parametrize('name', {[f'n{number}' for number in range(tests)]})\n"
        f"def test_it(name):\n    {FIRST_TIME}\n    {body}\n"
    )
    argv = [sys.executable, "-m", "tests.two_passes", "-q", "-n", "1", "--rootdir", folder, "-c", "/dev/null", folder]
    environ = os.environ | ONLY_XDIST
    completed = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    passes = completed.stdout.split(" in ")  # pytest's last line: "1 failed, 1 passed in 0.10s"
    return completed.returncode, [line.strip() for line in passes[-1].splitlines()[1:] if line]


@pytest.mark.parametrize(
    ("body", "tests", "code", "after"),
    [
        pytest.param("assert True", 1, 0, [], id="green"),
        pytest.param("assert not fails", 1, 0, ["passed when run alone:", "test_suite.py::test_it[n0]"], id="once"),
        pytest.param("assert False", 1, 1, [], id="always"),
        pytest.param("assert not fails and name != 'n1'", 2, 1, ["passed when run alone:", "test_suite.py::test_it[n0]"], id="both"),
        pytest.param("assert not fails", 11, 1, [], id="too many"),
        pytest.param("nonsense nonsense", 1, 2, [], id="a file that cannot be read"),
    ],
)  # fmt: skip
def test_what_fails_in_parallel_runs_once_more_alone(
    tmp_path: Path, body: str, tests: int, code: int, after: list[str]
) -> None:
    """The second pass decides, unless more than ten failed or a file could not be read; what it saved is listed."""
    assert run(tmp_path, body, tests) == (code, after)
