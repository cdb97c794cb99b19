"""The types of the API, as a type checker finds them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests/typing_examples.py"
IGNORE = re.compile(r"  # pyright: ignore\[(\w+)\]")


def pyright(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyright", "--project", ROOT, file]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.timeout(300)
def test_the_types_are_those_of_the_examples() -> None:
    """Pyright in strict mode agrees with every assert_type of typing_examples.py."""
    done = pyright(EXAMPLES)
    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_wrong_uses_are_refused_by_the_type_checker(tmp_path: Path) -> None:
    """Pyright finds the error that each ignored line of typing_examples.py names, and no other."""
    lines = EXAMPLES.read_text().splitlines()
    (tmp_path / "wrong.py").write_text("\n".join(IGNORE.sub("", line) for line in lines))
    expected = {(str(number), match[1]) for number, line in enumerate(lines, 1) if (match := IGNORE.search(line))}
    found = re.findall(r"wrong\.py:(\d+):\d+ - error: [\s\S]*?\((report\w+)\)", pyright(tmp_path / "wrong.py").stdout)
    assert set(found) == expected
    assert len(expected) > 10
