"""Files of this machine in `Image(pip=...)`: wheels and source archives, known by their content.

"./ours-1.0-py3-none-any.whl" becomes "ours @ file:///.../ours-1.0-py3-none-any.whl#sha256=..." when the
image is made. So a wheel that was rebuilt under the same path is another image. Nodes of this machine read the file
where it is; others get it uploaded into `$SKYWARD_HOME/files`. uv checks the hash on both. The lines of a requirements
file replace its name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from skyward_core.image.packages import canonical, requirement_lines

ARCHIVES = (".whl", ".tar.gz", ".zip")
_PATH_ENDS = (*ARCHIVES, ".txt", ".toml", "setup.py", "setup.cfg")
_PINNED = re.compile(r"file://(?P<path>/[^\s#'\"]*)#sha256=(?P<sha256>[0-9a-f]{64})")
_ENTRY = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<extras>\[[^]]*])?\s*@\s*)?(?P<path>.*?)\s*"
    r"(?P<own_extras>\[[\w\s,.-]*])?(?P<marker>\s*;.*)?"
)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file with its SHA-256, and its place below `$SKYWARD_HOME` of a node that gets it uploaded."""

    path: Path
    sha256: str

    @property
    def place(self) -> str:
        return f"files/{self.sha256}/{self.path.name}"

    @property
    def is_unchanged(self) -> bool:
        """Whether the file is still there, with this content."""
        return self.path.is_file() and sha256_of(self.path) == self.sha256


def expanded(entry: str) -> list[str]:
    """Return the requirements that an entry of `pip` stands for: itself, a file with its hash, or a file's lines.

    Relative paths begin at the working directory. Raises ValueError for what cannot be installed on a node.
    """
    parts = _ENTRY.fullmatch(entry)
    given = "" if parts is None else parts["path"]
    if parts is None or not _is_path(given, is_named=parts["name"] is not None):
        return [entry]
    is_url = given.startswith("file://")
    path = Path(os.path.abspath(Path(unquote(given.removeprefix("file://"))).expanduser()))
    if is_url and not path.exists():
        return [entry]  # a file of the nodes themselves
    if path.is_dir() or path.name in ("pyproject.toml", "setup.py", "setup.cfg"):
        raise ValueError(
            f"pip has the entry {entry!r}, a project of this machine: its functions and modules travel with the calls"
            ' and need no installation. For an installed package build a wheel ("uv build --wheel") and name its file,'
            f' as "{path if path.is_dir() else path.parent}/dist/NAME-VERSION-py3-none-any.whl"'
        )
    if not path.is_file():
        raise ValueError(f"pip has the entry {entry!r}, and there is no file {path} on this machine")
    if path.suffix == ".txt":
        return _lines_of(path)
    if not path.name.endswith(ARCHIVES):
        raise ValueError(
            f"pip has the entry {entry!r}: of the files of this machine only wheels, source archives"
            f" ({', '.join(ARCHIVES)}) and requirements files (.txt) can be installed"
        )
    extras, marker = parts["extras"] or parts["own_extras"] or "", (parts["marker"] or "").strip()
    named = parts["name"] or _distribution(path)
    return [f"{named}{extras} @ file://{quote(str(path))}#sha256={sha256_of(path)}{f' {marker}' if marker else ''}"]


def files_in(text: str) -> Iterator[LocalFile]:
    """Return the files that requirements or a lock name with their hashes."""
    for found in _PINNED.finditer(text):
        yield LocalFile(Path(unquote(found["path"])), found["sha256"])


def on_node(text: str) -> str:
    """Return a script, or requirements, with these files where a node has them. uv reads the variable in the URL."""
    return _PINNED.sub(lambda found: f"file://${{SKYWARD_HOME}}/{_place(found)}#sha256={found['sha256']}", text)


def without_folders(text: str) -> str:
    """Return requirements with these files named by content and name alone."""
    return _PINNED.sub(lambda found: _place(found), text)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place(found: re.Match[str]) -> str:
    return quote(next(files_in(found[0])).place)


def _is_path(given: str, *, is_named: bool) -> bool:
    if given.startswith("file://"):
        return "#" not in given
    if "://" in given:
        return False
    return is_named or given.startswith((".", "/", "~")) or "/" in given or given.endswith(_PATH_ENDS)


def _lines_of(path: Path) -> list[str]:
    """Return the requirements of a file. Paths in it begin at its folder."""
    lines: list[str] = []
    for line in requirement_lines(path.read_text()):
        if line.startswith("-") or "--hash" in line:
            raise ValueError(
                f"{path} has the line {line!r}: only requirements are read from it. An index goes to pip_indexes, a"
                " file with hashes to lock"
            )
        if line.startswith("."):
            line = str(path.parent / line)  # noqa: PLW2901
        lines += expanded(line)
    return lines


def _distribution(path: Path) -> str:
    name = path.name
    if name.endswith(".whl"):
        words = name.split("-")
        if len(words) < 5:
            raise ValueError(
                f"pip has {str(path)!r}, which has no wheel's name: NAME-VERSION-PYTHON-ABI-PLATFORM.whl, as its build"
                " gave it"
            )
        return canonical(words[0])
    stem = next(name.removesuffix(end) for end in ARCHIVES if name.endswith(end))
    named, _, version = stem.rpartition("-")
    if not named or not version[:1].isdigit():
        raise ValueError(f"pip has {str(path)!r}, whose name tells no package: write it as 'NAME @ {path}'")
    return canonical(named)
