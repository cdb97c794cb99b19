"""Files and folders to and from a node of a live pool: `skyward cp`.

A small script on the node reads or writes them, over OpenSSH as `skyward ssh` does, and for a node of this machine in a
shell. A folder travels as a tar stream, so the node needs sh, cat and tar only.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from skyward_core.errors import BadRequest, CommandFailed, NodeLost, Unreachable
from skyward_core.live.login import command_on
from skyward_core.live.pool_nodes import PoolNodes

NOT_RUNNING, SSH_FAILED = 97, 255
"""Exit codes: of our scripts, and of OpenSSH for its own errors (ssh(1))."""
LAST_LINES, PIECE_BYTES = 5, 1 << 20
_ON_THE_HEAD = re.compile(r"(?P<pool>[^:]+):(?P<path>.*)", re.DOTALL)
_WITH_NODE = re.compile(r"(?P<pool>.+?):(?P<node>[0-9]{1,6}):(?P<path>.*)", re.DOTALL)

ENTER = r"""
{ read -r pid rest <"$1/supervisor"; } 2>/dev/null &&
  { tr '\0' '\n' <"/proc/$pid/environ"; } 2>/dev/null | grep -qxF -e "SKYWARD_INSTANCE_DIRECTORY=$1" &&
  cd "$1/work" || exit 97
"""
"""Enters the working directory of the calls of a node that runs. $1 is the node's own directory."""

WRITE = (
    ENTER
    + r"""
target=${2:-.}
[ ! -d "$target" ] || target="${target%/}/$3"
parent=$(dirname -- "$target")
[ -d "$parent" ] || { echo "there is no folder $parent" >&2; exit 1; }
if [ "$4" = folder ]; then
  mkdir -p -- "$target" || exit 1
  exec tar -xf - -C "$target"
fi
[ ! -d "$target" ] || { echo "$target is a folder" >&2; exit 1; }
part="$parent/.skyward-cp.$$"
trap 'rm -f -- "$part"' EXIT
trap 'exit 1' HUP INT TERM
cat >"$part" || exit 1
[ "$(wc -c <"$part")" -eq "$5" ] || { echo "only a part arrived" >&2; exit 1; }
chmod "$6" "$part" && mv -f -- "$part" "$target"
"""
)
"""Writes stdin to $2, or below it under the name $3 if it is a folder: a tar of a folder, or a file of $5 bytes with
the mode $6.
"""

READ = (
    ENTER
    + r"""
source=${2:-.}
if [ -d "$source" ]; then
  echo "$3 folder"
  exec tar -cf - -C "$source" .
fi
[ -f "$source" ] || { echo "there is no file or folder $source" >&2; exit 1; }
if [ -x "$source" ]; then mode=755; else mode=644; fi
echo "$3 file $(wc -c <"$source") $mode"
exec cat -- "$source"
"""
)
"""Prints a line that begins with $3 and says what $2 is, then a tar of the folder, or the content of the file."""


class Place(NamedTuple):
    """A file or folder on a node. A relative path begins at the working directory of the calls."""

    pool: str
    node: int
    path: str


def read_place(text: str) -> Place | None:
    """Return the place on a node that POOL:PATH or POOL:NODE:PATH names; None for a path of this machine.

    As with scp, "./a:b" and "/a:b" are paths of this machine. A name with a colon needs the number of the node.
    """
    if text.startswith(("/", "./", "../")) or ":" not in text:
        return None
    found = _WITH_NODE.fullmatch(text) or _ON_THE_HEAD.fullmatch(text)
    return None if found is None else Place(found["pool"], int(found.groupdict().get("node", 0)), found["path"])


def copy_to(nodes: PoolNodes, rank: int, source: Path, path: str) -> None:
    """Copy a file or folder of this machine to a node. If `path` is a folder there, it gets it under its own name.

    Raises BadRequest, NodeLost for a node that does not run, Unreachable and CommandFailed.
    """
    if not source.exists():
        raise BadRequest(f"there is no file or folder {source} on this machine")
    name = Path(os.path.abspath(source)).name
    if source.is_dir():
        with (
            _script(nodes, rank, WRITE, path, name, "folder") as (stdin, _),
            _told_by_the_node(),
            tarfile.open(fileobj=stdin, mode="w|") as archive,
        ):
            archive.add(source, ".", filter=_without_owner)
        return
    with source.open("rb") as file:
        status = os.fstat(file.fileno())
        words = ["file", str(status.st_size), "755" if status.st_mode & 0o100 else "644"]
        with _script(nodes, rank, WRITE, path, name, *words) as (stdin, _), _told_by_the_node():
            shutil.copyfileobj(file, stdin, PIECE_BYTES)


def copy_from(nodes: PoolNodes, rank: int, path: str, target: Path) -> None:
    """Copy a file or folder of a node to this machine. If `target` is a folder, it gets it under its own name.

    Raises as `copy_to`.
    """
    if target.is_dir():
        target /= PurePosixPath(path).name or "work"
    if not target.parent.is_dir():
        raise BadRequest(f"there is no folder {target.parent} on this machine")
    mark = secrets.token_hex(8)
    with _script(nodes, rank, READ, path, mark) as (_, stdout):
        kind, *rest = _header(stdout, mark)
        if kind == "folder":
            try:
                with tarfile.open(fileobj=stdout, mode="r|") as archive:
                    archive.extractall(target, filter="data")
            except tarfile.FilterError as error:
                raise BadRequest(f"{error}: the copy stopped there; copy what is beside it by itself") from error
        elif kind == "file":
            _write(target, stdout, int(rest[0]), int(rest[1], 8))


@contextmanager
def _script(nodes: PoolNodes, rank: int, script: str, *words: str) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Run a script on a node; yield its stdin and stdout, and raise at the end if it has failed.

    If its output was cut, its own words say why.
    """
    command = command_on(nodes, rank, script, words)
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        cut: Exception | None = None
        try:
            yield process.stdin, process.stdout
        except (tarfile.ReadError, EOFError) as error:
            cut = error
        except BaseException:
            process.kill()
            raise
        with suppress(BrokenPipeError):
            process.stdin.close()
        while process.stdout.read(PIECE_BYTES):
            pass  # tar fills its last block after the end of the archive
        _raise_failure(nodes, rank, process.wait(), said)
        if cut is not None:
            raise BadRequest(f"the copy is not whole: {cut}") from cut


def _raise_failure(nodes: PoolNodes, rank: int, code: int, said: IO[bytes]) -> None:
    if code == 0:
        return
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]
    words = "\n".join(lines) or f"exit code {code}"
    node = f"node {rank} of pool {nodes.pool_id}"
    if code == NOT_RUNNING:
        raise NodeLost(
            f"{node} does not run: it is being prepared, or has ended. `skyward logs {nodes.pool_id}` shows it"
        )
    if code == SSH_FAILED:
        raise Unreachable(f"{node} cannot be reached: {words}")
    raise CommandFailed(f"{node}: {words}", code, "\n".join(lines))


@contextmanager
def _told_by_the_node() -> Generator[None]:
    """A script that has ended early closes its stdin: its own words say why."""
    with suppress(BrokenPipeError):
        yield


def _header(stdout: IO[bytes], mark: str) -> list[str]:
    """Return the words after the mark; what a login shell prints before it is skipped. [""] if the script has ended."""
    for line in iter(stdout.readline, b""):
        if line.startswith(f"{mark} ".encode()):
            return line.decode().split()[1:]
    return [""]


def _write(target: Path, content: IO[bytes], size: int, mode: int) -> None:
    if target.is_dir():
        raise BadRequest(f"{target} is a folder")
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with part.open("wb") as file:
            shutil.copyfileobj(content, file, PIECE_BYTES)
        if (found := part.stat().st_size) != size:
            raise EOFError(f"{found} of {size} bytes of {target.name} have come")
        part.chmod(mode)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
