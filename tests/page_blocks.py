"""The Python blocks of pages as programs: each is what a reader gets who copies it alone."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTINUES = "# continues the block above"
"""The first line of a block that needs the one before it. Readers see it too."""

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[str]:
    """Return each block of a page as a program of its own, together with those that continue it.

    The line numbers are those of the page.
    """
    text = (ROOT / page).read_text()
    found: list[str] = []
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        if block[1].startswith(CONTINUES):
            found[-1] += "\n" * (line - found[-1].count("\n")) + block[1]
        else:
            found.append("\n" * line + block[1])
    return found


def pages() -> list[str]:
    """Return README.md and the pages of docs/ that have Python blocks."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in every if BLOCK.search(page.read_text())]


def pages_of(subject: str) -> list[str]:
    """Return the first page of a subject, docs/SUBJECT.md, and then the pages of its folder, docs/SUBJECT/."""
    others = sorted((ROOT / "docs" / subject).glob("*.md"))
    return [f"docs/{subject}.md", *(page.relative_to(ROOT).as_posix() for page in others)]


IN_ORDER = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
"""


def run_in_a_process(page: str, folder: Path, variables: Mapping[str, str]) -> None:
    """Run the programs of a page one after the other, in one new process. Each has a module of its own as `__main__`."""
    paths = [folder / f"block_{number}.py" for number, _ in enumerate(programs(page))]
    for path, program in zip(paths, programs(page), strict=True):
        path.write_text(program)
    command = [sys.executable, "-c", IN_ORDER, *map(str, paths)]
    done = subprocess.run(command, env=os.environ | variables, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
