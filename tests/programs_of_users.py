"""The programs of examples/, flows/ and dags/, and the one command that installs what each needs."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(path for folder in ("examples", "flows", "dags") for path in (ROOT / folder).rglob("*.py"))
INSTALL = re.compile(
    r"^(?:# )?Install what it needs with `pip install (.+)` in a clone of the repository\.$", re.MULTILINE
)
NOTHING_MORE = ["."]
"""What a program without such a line needs."""


def wanted(program: Path) -> list[str]:
    """Return the arguments of `pip install` for a program: `.` or `.[EXTRA,...]` first, then other packages."""
    found = INSTALL.findall(program.read_text())
    assert len(found) <= 1, program
    return shlex.split(found[0]) if found else NOTHING_MORE
