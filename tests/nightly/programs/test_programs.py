"""`skyward run`: what is to run, what is printed, signals, and programs on a real pool of this machine."""

import logging
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.programs.output import ProgramOutput
from skyward_core.programs.run import run_program, spec_of
from skyward_core.programs.target import read_target
from tests.unit.programs.test_programs import (  # noqa: F401 - fixtures
    project,
)


def test_functions_run_on_a_pool_with_a_name(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its result is printed; its exception with the remote traceback gives the exit code 1; the pool is left warm."""
    (project / "work.py").write_text(
        "import sys\n"
        "def half(x):\n    print('halving')\n    return int(x) / 2\n"
        "def fail(x):\n    raise ValueError(f'not {x}')\n"
        "def leave(code):\n    sys.exit(int(code))\n"
    )
    spec = spec_of({"provider": "local", "name": "nightly", "keep_warm": 120})
    codes = list[int]()
    for target, arg in (("work:half", "9"), ("work:fail", "me"), ("work:leave", "3"), ("work:leave", "0")):
        output = ProgramOutput(sys.stdout, sys.stderr, has_ranks=False, least_level=logging.WARNING)
        codes.append(run_program(read_target(target, [arg]), spec, output))
    printed = capfd.readouterr()
    try:
        assert codes == [0, 1, 3, 0]
        assert printed.out.splitlines() == ["halving", "4.5"]
        assert "ValueError: not me" in printed.err
        assert "in fail" in printed.err
    finally:
        sky.release("nightly")
