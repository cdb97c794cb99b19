"""The uploads to nodes: a copy of our own package, so that client and node have the same version; the image's files;
and uv, if needed.

The client's own uv is uploaded where it runs. Other machines get one of `shell.WHEELS`, which our uv fetches from
the client's index and checks by its hash.
"""

from __future__ import annotations

import compileall
import gzip
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import uv

from skyward_core.errors import BadRequest
from skyward_core.image.local_files import IncludedFiles, LocalFile, NodeFile, sha256_of
from skyward_core.image.shell import VERSION, WHEELS, Wheel
from skyward_core.paths import cache_places, first_private
from skyward_core.transport.caches import note_use, prune_files
from skyward_core.wire.private_folders import NotPrivate

PIECE_BYTES = 1 << 20
PACKAGE = "skyward_core"
FETCH_SECONDS = 300.0


class FileChanged(Exception):
    """A file of the image is gone, or is another one by now."""


@dataclass(frozen=True, slots=True)
class CodeArchive:
    """The copy as a tar.gz file, named by its content."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class CompressedFile:
    """A file compressed with gzip, and its size in bytes without compression."""

    path: Path
    unpacked_bytes: int


_making = threading.Lock()
"""Only one thread makes an archive. With `cache` alone each of 64 threads, for 64 nodes, would make it."""


def shipped_archive() -> CodeArchive:
    """Return `shipped_package()` as an archive for another machine.

    Made once for each content, under the user's cache.
    """
    with _making:
        return _archive()


def shipped_uv(system: str, machine: str, *, is_musl: bool = False) -> CompressedFile | None:
    """Return the uv for this `uname`, compressed with gzip to less than half. Made once for each uv, in the user's
    cache.

    None for a kind of machine without a known uv. Raises OSError or SubprocessError if it must be fetched, and cannot
    be.
    """
    with _making:
        if (system, machine) == ("Linux", platform.machine()) and platform.system() == "Linux" and not is_musl:
            return _compressed_uv()
        return _fetched_uv(machine) if system == "Linux" and machine in WHEELS else None


def shipped_package() -> Path:
    """Return a directory that has only a copy of our package, for PYTHONPATH.

    Made once for each content, under the user's cache.
    """
    with _making:
        return _package()


def shipped_file(file: NodeFile) -> Path:
    """Return a copy of a file with the content that it had when the image was made, in the user's cache; or the archive
    of the included files.

    So a machine that replaces another gets the same file, though it was built again meanwhile. Raises FileChanged.
    """
    with _making:
        path = _folder() / file.place
        path.parent.mkdir(parents=True, exist_ok=True)
        note_use(path.parent)  # before the look: from now on no other process removes it
        if not path.exists():
            partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
            try:
                if (
                    changed := file.write_archive(partial)
                    if isinstance(file, IncludedFiles)
                    else _copied(file, partial)
                ):
                    raise FileChanged(changed)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            prune_files(path.parent.parent)
        return path


def _copied(file: LocalFile, place: Path) -> str:
    """Copy a file; return how it has changed since the image was made, in words."""
    try:
        shutil.copyfile(file.path, place)
    except FileNotFoundError:
        return f"{file.path}, which the pool's image installs, is not on this machine"
    return "" if sha256_of(place) == file.sha256 else f"{file.path} has changed since the pool's image was made"


@cache
def _archive() -> CodeArchive:
    package = _package()
    path = package.with_suffix(".tar.gz")
    if not path.exists():
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
        with tarfile.open(partial, "w:gz", compresslevel=3) as archive:
            archive.add(package / PACKAGE, PACKAGE, filter=_without_owner)
        partial.replace(path)
    return CodeArchive(package.name, path)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the files' owner and group from an entry."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


@cache
def _compressed_uv() -> CompressedFile:
    binary = Path(uv.find_uv_bin())
    stat = binary.stat()
    path = _folder() / f"uv-{stat.st_size:x}-{stat.st_mtime_ns:x}.gz"
    if not path.exists():
        _compress(binary, path)
    return CompressedFile(path, stat.st_size)


@cache
def _fetched_uv(machine: str) -> CompressedFile:
    wheel = WHEELS[machine]
    path = _folder() / f"uv-{VERSION}-{machine}-{wheel.sha256[:12]}.gz"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix=f"{path.stem}.", dir=path.parent) as folder:
            _fetch(wheel, Path(folder))
            _compress(Path(folder) / "bin" / "uv", path)
    with path.open("rb") as packed:
        packed.seek(-4, os.SEEK_END)  # RFC 1952: the size is at the end
        return CompressedFile(path, int.from_bytes(packed.read(4), "little"))


def _fetch(wheel: Wheel, folder: Path) -> None:
    """Unpack a wheel that is for another machine.

    Our uv knows the client's index, proxy and certificates, and refuses a wheel with another hash.
    """
    requirements = folder / "uv.txt"
    requirements.write_text(f"{wheel.requirement}\n")
    what = (
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--python-platform",
        wheel.uv_platform,
        "--requirements",
        str(requirements),
    )
    command = (
        uv.find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--no-progress",
        "--python",
        sys.executable,
        "--target",
        str(folder),
        *what,
    )
    environment = {name: value for name, value in os.environ.items() if name != "UV_NO_VERIFY_HASHES"}
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=FETCH_SECONDS,
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def _compress(binary: Path, path: Path) -> None:
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    with binary.open("rb") as content, gzip.open(partial, "wb", compresslevel=3) as compressed:
        shutil.copyfileobj(content, compressed, PIECE_BYTES)
    partial.replace(path)


@cache
def _package() -> Path:
    source = Path(__file__).parents[1]
    files = sorted(path for path in source.rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes())
    target = _folder() / digest.hexdigest()[:12]
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
    os.utime(target)  # its last use, for `caches.py`
    return target


def _folder() -> Path:
    """Return the private folder of the archives. Their content runs here and on nodes: no other user may write it."""
    try:
        return first_private("ship", cache_places())
    except NotPrivate as error:
        raise BadRequest(f"the archives for nodes cannot be stored: {error}") from error
