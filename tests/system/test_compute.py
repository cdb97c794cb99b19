"""The operators alone, with a runner that records what it receives."""

import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky


def pyright(*files: Path) -> subprocess.CompletedProcess[str]:
    root = Path(sky.__file__).parents[1]
    command = [sys.executable, "-m", "pyright", "--project", str(root), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=root)


@pytest.mark.timeout(300)
def test_the_types_are_those_of_the_examples() -> None:
    """Pyright in strict mode agrees with every assert_type of typing_examples.py."""
    done = pyright(Path(__file__).parents[1] / "typing_examples.py")
    assert done.returncode == 0, done.stdout
