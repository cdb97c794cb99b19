"""Our own package for the nodes: a copy of what this client runs, so that both sides always speak the same language."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import tarfile
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

PACKAGE = "skyward_core"


@dataclass(frozen=True, slots=True)
class Archive:
    """The copy as a tar.gz file, named by its content."""

    name: str
    path: Path


@cache
def shipped_archive() -> Archive:
    """Return `shipped_package()` as an archive for another machine. Made once for each content, under the user's cache."""
    package = shipped_package()
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
def shipped_package() -> Path:
    """Return a directory that holds a copy of our package and nothing else, for PYTHONPATH. Made once for each content, under the user's cache."""
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
