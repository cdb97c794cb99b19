"""What the nodes are sent: a copy of our own package, as this client runs it, so that both sides always speak the same language; and uv where there is none."""

from __future__ import annotations

import compileall
import gzip
import hashlib
import os
import shutil
import tarfile
import threading
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import uv
from platformdirs import user_cache_path

PIECE_BYTES = 1 << 20
PACKAGE = "skyward_core"


@dataclass(frozen=True, slots=True)
class Archive:
    """The copy as a tar.gz file, named by its content."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Packed:
    """A file that is compressed with gzip, and how many bytes it has when it is not."""

    path: Path
    unpacked_bytes: int


_making = threading.Lock()
"""Threads that ask at once wait for the first: `cache` alone has each of them make it, and 64 nodes are prepared in 64 threads."""


def shipped_archive() -> Archive:
    """Return `shipped_package()` as an archive for another machine. Made once for each content, under the user's cache."""
    with _making:
        return _archive()


def shipped_uv() -> Packed:
    """Return our own uv, compressed with gzip to less than half: it is sent to each node that has none. Made once for each uv, under the user's cache."""
    with _making:
        return _compressed_uv()


def shipped_package() -> Path:
    """Return a directory that holds a copy of our package and nothing else, for PYTHONPATH. Made once for each content, under the user's cache."""
    with _making:
        return _package()


@cache
def _archive() -> Archive:
    package = _package()
    path = package.with_suffix(".tar.gz")
    if not path.exists():
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
        with tarfile.open(partial, "w:gz", compresslevel=3) as archive:
            archive.add(package / PACKAGE, PACKAGE, filter=_owned_by_nobody)
        partial.replace(path)
    return Archive(package.name, path)


def _owned_by_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who the files belong to here."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


@cache
def _compressed_uv() -> Packed:
    binary = Path(uv.find_uv_bin())
    stat = binary.stat()
    path = user_cache_path("skyward") / "ship" / f"uv-{stat.st_size:x}-{stat.st_mtime_ns:x}.gz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
        with binary.open("rb") as content, gzip.open(partial, "wb", compresslevel=3) as compressed:
            shutil.copyfileobj(content, compressed, PIECE_BYTES)
        partial.replace(path)
    return Packed(path, stat.st_size)


@cache
def _package() -> Path:
    source = Path(__file__).parent
    files = sorted(path for path in source.rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes())
    target = user_cache_path("skyward") / "ship" / digest.hexdigest()[:12]
    if not target.exists():
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}")
        for path in files:
            copy = partial / PACKAGE / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        compileall.compile_dir(str(partial), quiet=2)
        try:
            os.rename(partial, target)
        except OSError:  # another process was faster
            shutil.rmtree(partial, ignore_errors=True)
    return target
