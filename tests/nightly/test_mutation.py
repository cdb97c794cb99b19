"""`make mutate`, on a toy module: its tests notice one fault and miss another."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests import mutation

MODULE = """
    def is_full(used, slots):
        return used >= slots

    def label(count):
        return str(count) + " of all"
    """

TESTS = """
    import subprocess
    import sys
    import pytest
    from toy.slots import is_full, label

    def test_more_is_full():
        assert is_full(3, 2)
        assert not is_full(1, 2)

    def test_label():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        assert label(1).startswith("1")

    def test_as_many_is_full():
        assert is_full(2, 2)
    """


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A project of one module; the test that starts a process leaves it running."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy/__init__.py").touch()
    (tmp_path / "toy/slots.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "tests/test_slots.py").write_text(textwrap.dedent(TESTS))
    pytest_settings = 'addopts = ["--import-mode=importlib"]\npythonpath = ["."]\n'
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{pytest_settings}")
    return tmp_path


def changed(outcomes: Sequence[mutation.Outcome]) -> dict[str, str]:
    """The new line of each mutant, and its result."""
    return {re.findall(r"^\+ +(.*)$", outcome.diff, re.MULTILINE)[0]: outcome.status for outcome in outcomes}


def test_a_mutant_that_no_fast_test_notices_survives(toy: Path) -> None:
    """The working tree does not change, and processes that tests have started are ended."""
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    running = set(psutil.Process().children(recursive=True))
    outcomes = changed(list(mutation.explored(toy, ["toy/slots.py"], ["tests/test_slots.py"])))
    assert outcomes["return used > slots"] == "survived"
    assert outcomes['return str(None) + " of all"'] == "killed"
    assert 'return str(count) + "XX of allXX"' not in outcomes
    assert {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()} == before
    assert set(psutil.Process().children(recursive=True)) == running


def test_the_modules_and_files_of_the_table_exist() -> None:
    """A renamed module or test file would be skipped without a message."""
    core, tests = mutation.ROOT / "skyward_core", mutation.ROOT / "tests"
    missing = [f"{module}.py" for module in mutation.OTHERS if not (core / f"{module}.py").exists()]
    missing += [
        name for names in mutation.OTHERS.values() for name in names if not (tests / name.partition("::")[0]).exists()
    ]
    assert missing == []
