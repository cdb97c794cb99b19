"""Files of this machine in `Image(pip=...)`: wheels and source archives, known by their content.

"./ours-1.0-py3-none-any.whl" becomes "ours @ file:///.../ours-1.0-py3-none-any.whl#sha256=..." when the
image is made. So a wheel that was rebuilt under the same path is another image. Nodes of this machine read the file
where it is; others get it uploaded into `$SKYWARD_HOME/files`. uv checks the hash on both. The lines of a requirements
file replace its name.

Those of `Image(includes=...)` are known by their content too: "data/vocab.txt" becomes "data/vocab.txt @
file:///.../data/vocab.txt#sha256=..." when the image is made. So a file that has changed makes another image. On a node
it lies at the same relative path below the working directory of the calls. A path that is absolute, or leads out of the
working directory, lies there under its last name. They travel as one archive, which is named by their content.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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


MOST_BYTES = 100_000_000
"""Of all included files together. Each node gets them from the client, through its SSH connection."""
NEVER = ("__pycache__", ".git")
"""Names that never travel: the first changes by itself, and would make another image each time."""
_INCLUDED = re.compile(r"(?P<place>.+) @ file://(?P<path>/[^#]*)#sha256=(?P<sha256>[0-9a-f]{64})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Included:
    """A file or folder, its place below the working directory of the calls, and the SHA-256 of its content."""

    place: str
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class IncludedFiles:
    """All that an image includes, as one archive. `place` is where it lies below `$SKYWARD_HOME` of a node."""

    included: tuple[Included, ...]
    excludes: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """It is the same wherever the files are on this machine."""
        return hashlib.sha256("".join(f"{one.sha256} {one.place}\0" for one in self.included).encode()).hexdigest()

    @property
    def place(self) -> str:
        return f"files/{self.sha256}/includes.tar.gz"

    @property
    def changed(self) -> str:
        """Return which of them has changed since the image was made, or is gone, in words; "" if none."""
        for one in self.included:
            if not one.path.exists():
                return f"{one.path} is not on this machine"
            if _Tree(one.place, one.path, self.excludes).sha256() != one.sha256:
                return f"{one.path} has changed since this image was made"
        return ""

    def write_archive(self, place: Path) -> str:
        """Write the archive; return what has changed since the image was made, as `changed` does."""
        with gzip.open(place, "wb", compresslevel=3) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
            for one in self.included:
                try:
                    found = _Tree(one.place, one.path, self.excludes).sha256(archive)
                except FileNotFoundError as error:
                    return f"{error.filename} is not on this machine"
                if found != one.sha256:
                    return f"{one.path} has changed since this image was made"
        return ""


type NodeFile = LocalFile | IncludedFiles
"""What of this machine an image has on its nodes."""


def pinned(entries: Sequence[str], excludes: Sequence[str]) -> tuple[str, ...]:
    """Return entries with their places, paths and hashes. Those that have them stay as they are.

    Relative paths begin at the working directory. Raises ValueError for what is not there, or cannot travel.
    """
    found = [_INCLUDED.fullmatch(entry) or _Tree.of(entry, excludes) for entry in entries]
    trees = [one for one in found if isinstance(one, _Tree)]
    _refuse_too_much(trees)
    lines = [one[0] if isinstance(one, re.Match) else one.pinned() for one in found]
    _refuse_twice(included_in(lines))
    return tuple(dict.fromkeys(lines))


def included_in(entries: Sequence[str]) -> tuple[Included, ...]:
    """Return the files and folders of entries that are `pinned`, in the order of their places."""
    matches = [match for entry in entries if (match := _INCLUDED.fullmatch(entry))]
    return tuple(
        sorted(
            (Included(one["place"], Path(unquote(one["path"])), one["sha256"]) for one in matches),
            key=lambda one: one.place,
        )
    )


class _Tree:
    """A file, or a folder with all that is in it and not excluded."""

    def __init__(self, place: str, path: Path, excludes: Sequence[str]) -> None:
        self.place = place
        self.path = path
        self._excludes = tuple(pattern.rstrip("/") for pattern in excludes)

    @classmethod
    def of(cls, entry: str, excludes: Sequence[str]) -> _Tree:
        path = Path(os.path.abspath(os.path.expanduser(entry)))
        if not path.exists():
            raise ValueError(f"includes has the entry {entry!r}, and there is no file or folder {path} on this machine")
        place = os.path.normpath(os.path.expanduser(entry))
        if os.path.isabs(place) or place.split(os.sep)[0] == os.pardir:
            place = path.name
        if not place:
            raise ValueError(f"includes has the entry {entry!r}, which has no name: write one of the folders in it")
        return cls(place, path, excludes)

    def pinned(self) -> str:
        return f"{self.place} @ file://{quote(str(self.path))}#sha256={self.sha256()}"

    def sha256(self, archive: tarfile.TarFile | None = None) -> str:
        """Return the hash of names, contents and executable bits; also write all of it into an archive."""
        digest = hashlib.sha256()
        for place, path in self.walk():
            entry = tarfile.TarInfo(place)
            status = path.stat()
            entry.mtime = int(status.st_mtime)
            entry.mode = 0o755 if path.is_dir() or status.st_mode & 0o100 else 0o644
            content = b"" if path.is_dir() else path.read_bytes()
            entry.type = tarfile.DIRTYPE if path.is_dir() else tarfile.REGTYPE
            entry.size = len(content)
            digest.update(f"{entry.type!r} {entry.mode} {hashlib.sha256(content).hexdigest()} {place}\0".encode())
            if archive is not None:
                archive.addfile(entry, io.BytesIO(content))
        return digest.hexdigest()

    def walk(self) -> Iterator[tuple[str, Path]]:
        """Yield the place and the path of each folder and file. Raises ValueError for what cannot travel."""
        yield from self._walk(self.place, self.path, is_named=True)

    def _walk(self, place: str, path: Path, *, is_named: bool = False) -> Iterator[tuple[str, Path]]:
        if not is_named and self._is_excluded(place):
            return
        if path.is_symlink() and path.is_dir() and not is_named:
            raise ValueError(
                f"{path} is a link to a folder: include that folder itself, or leave the link out: excludes"
            )
        if not path.is_dir() and not path.is_file():
            raise ValueError(f"{path} is no file and no folder (a broken link, a socket?): leave it out with excludes")
        yield place, path
        if path.is_dir():
            for name in sorted(os.listdir(path)):
                yield from self._walk(name if place == "." else f"{place}/{name}", path / name)

    def _is_excluded(self, place: str) -> bool:
        name = place.rpartition("/")[2]
        return name in NEVER or any(
            fnmatchcase(place if "/" in pattern else name, pattern) for pattern in self._excludes
        )


def _refuse_too_much(trees: Sequence[_Tree]) -> None:
    sizes = {path: path.stat().st_size for tree in trees for _, path in tree.walk() if path.is_file()}
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"the includes have {total / 1e6:.0f} MB, and {MOST_BYTES / 1e6:.0f} MB is the limit, because each node"
            f" gets them from this machine. The largest of {len(sizes)} files is {largest},"
            f" {sizes[largest] / 1e6:.0f} MB."
            " Leave files out with excludes; put large data into a bucket and mount it (volume=sky.S3Volume(...)), or"
            " fetch it on the node (shell=[...])"
        )


def _refuse_twice(included: Sequence[Included]) -> None:
    by_place: dict[str, Path] = {}
    for one in included:
        if by_place.setdefault(one.place, one.path) != one.path:
            raise ValueError(
                f"includes has {by_place[one.place]} and {one.path}, and both would be {one.place} on a node: name one"
                " of them by a relative path, or include a folder that has it"
            )
