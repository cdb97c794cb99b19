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

HOME = """
    import os
    import tempfile

    def pytest_configure(config):
        os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
    """

TESTS_WITH_A_HOME = """
    import os
    from pathlib import Path
    from toy.slots import is_full

    def test_more_is_full():
        left = Path(os.environ["XDG_STATE_HOME"], "left")
        assert not left.exists()
        left.parent.mkdir(exist_ok=True)
        left.touch()
        assert is_full(3, 2)
        assert not is_full(1, 2)
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


def test_tests_that_fail_without_a_fault_fail_the_run(toy: Path) -> None:
    """The error has the output of pytest."""
    (toy / "tests/test_slots.py").write_text("import toy.slots\ndef test_it():\n    assert toy.slots.is_full(1, 2)\n")
    with pytest.raises(mutation.Failed, match=r"assert toy\.slots\.is_full"):
        list(mutation.explored(toy, ["toy/slots.py"], ["tests/test_slots.py"]))


def test_files_of_one_mutants_tests_are_gone_before_the_next(toy: Path) -> None:
    """The ledger and the caches of a killed test cannot fail the tests of a later mutant."""
    (toy / "tests/test_slots.py").write_text(textwrap.dedent(TESTS_WITH_A_HOME))
    (toy / "tests/conftest.py").write_text(textwrap.dedent(HOME))
    outcomes = changed(list(mutation.explored(toy, ["toy/slots.py"], ["tests/test_slots.py"])))
    assert outcomes["return used > slots"] == "survived"


def test_a_mutant_that_never_ends_is_timed_out(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a test counts from what it takes without a mutant."""
    (toy / "toy/slots.py").write_text("def rest(count):\n    while count > 0:\n        count -= 1\n    return count\n")
    (toy / "tests/test_slots.py").write_text("import toy.slots\ndef test_it():\n    assert toy.slots.rest(3) == 0\n")
    monkeypatch.setattr(mutation, "SECONDS_LONGER", 1.0)
    outcomes = changed(list(mutation.explored(toy, ["toy/slots.py"], ["tests/test_slots.py"])))
    assert outcomes["count += 1"] == "timeout"
    assert outcomes["while count >= 0:"] == "killed"


def test_a_sample_is_the_same_for_the_same_seed(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed draws other mutants."""
    drawn = []

    def remember(copy: Path, tests: Sequence[str], names: Sequence[str], temporary: Path) -> list[tuple[str, str]]:
        drawn.append(list(names))
        return []

    monkeypatch.setattr(mutation, "_run", remember)
    for seed in (0, *range(10)):
        list(mutation.explored(toy, ["toy/slots.py"], [], sample=2, seed=seed))
    assert {len(names) for names in drawn} == {2}
    assert drawn[0] == drawn[1]
    assert len({tuple(names) for names in drawn}) > 1


def test_a_module_is_tested_by_the_file_that_mirrors_it_and_by_those_of_the_table() -> None:
    """Files that test several modules together are in `OTHERS`."""
    assert mutation.tests_of("skyward_core/spec.py") == ["tests/unit/test_spec.py"]
    assert mutation.tests_of("skyward_core/ledger/budgets.py") == ["tests/unit/ledger/test_budgets.py"]
    assert "tests/unit/engine/test_dispatcher.py" in mutation.tests_of("skyward_core/engine/placement.py")
    with pytest.raises(SystemExit, match=r"has no tests/errors/test_tree\.py"):
        mutation.tests_of("skyward_core/errors/tree.py")


def test_the_modules_and_files_of_the_table_exist() -> None:
    """A renamed module or test file would be skipped without a message."""
    core, tests = mutation.ROOT / "skyward_core", mutation.ROOT / "tests"
    missing = [f"{module}.py" for module in mutation.OTHERS if not (core / f"{module}.py").exists()]
    missing += [
        name for names in mutation.OTHERS.values() for name in names if not (tests / name.partition("::")[0]).exists()
    ]
    assert missing == []


def test_survivors_are_printed_and_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Survivors do not fail the run."""
    outcomes = [
        mutation.Outcome("skyward_core/spec.py", "a", "- x\n+ y", "survived"),
        mutation.Outcome("skyward_core/spec.py", "b", "- u\n+ v", "killed"),
        mutation.Outcome("skyward_core/spec.py", "c", "- r\n+ s", "no tests"),
        mutation.Outcome("skyward_core/spec.py", "d", "- p\n+ q", "timeout"),
    ]
    monkeypatch.setattr(mutation, "explored", lambda *arguments: outcomes)
    assert mutation.main(["skyward_core/spec.py"]) == 0
    printed = capsys.readouterr().out
    assert "# survived: a\n- x\n+ y\n" in printed
    assert "- u" not in printed
    assert printed.endswith("skyward_core/spec.py: 4 mutants, 1 killed, 2 survived, 1 timed out\n")
