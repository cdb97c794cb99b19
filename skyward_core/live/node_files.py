"""Files and folders to and from a node of a live pool: `skyward cp`.

A small script on the node reads or writes them, over OpenSSH as `skyward ssh` does, and for a node of this machine in a
shell. A folder travels as a tar stream, so the node needs sh, tar and the tools of POSIX only.

What a node sends decides no more than the content of the copy. The name comes from what the user wrote. Sizes are asked
first, compared with the disk, and are the limit of what is read. The copy is made in a private folder beside its
target, and moved when it is whole. `node_tar.py` writes the members of a tar.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import subprocess
import tarfile
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import BadRequest, CommandFailed, NodeLost, Unreachable
from skyward_core.live.node_tar import PIECE_BYTES, Bounded, kept_mode, receive_folder
from skyward_core.live.pool_nodes import PoolNodes, command_on

NOT_RUNNING, SSH_FAILED = 97, 255
"""Exit codes: of our scripts, and of OpenSSH for its own errors (ssh(1))."""
LAST_LINES = 5
MOST_WORDS_BYTES = 1 << 20
"""Of what a login shell prints, and of what may follow the end of a tar."""
KEPT_PIECES, END_SECONDS = 64, 2.0
GROWTH_BYTES = 1 << 24
"""By how much a folder may grow, beside a tenth, between the question for its size and its end."""
_ON_THE_HEAD = re.compile(r"(?P<pool>[^:]+):(?P<path>.*)", re.DOTALL)
_WITH_NODE = re.compile(r"(?P<pool>.+?):(?P<node>[0-9]{1,6}):(?P<path>.*)", re.DOTALL)
_HEADER = re.compile(rb"(?:(folder) ([0-9]{1,18})|(file) ([0-9]{1,18}) ([0-7]{3,4}))")
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
part="$parent/.skyward-cp.$7"
trap 'rm -f -- "$part"' EXIT
trap 'exit 1' HUP INT TERM
(umask 077; set -C; cat >"$part") || exit 1
[ "$(wc -c <"$part")" -eq "$5" ] || { echo "only a part arrived" >&2; exit 1; }
chmod "$6" "$part" && mv -f -- "$part" "$target"
"""
)
"""Writes stdin to $2, or below it under the name $3 if it is a folder: a tar of a folder, or a file of $5 bytes with
the mode $6. $7 is part of the name of the unfinished file, so that another user of the node cannot guess it.
"""
READ = (
    ENTER
    + r"""
source=${2:-.}
if [ -d "$source" ]; then
  bytes=$(LC_ALL=C tar --totals -cf /dev/null -C "$source" . 2>&1 |
    sed -n 's/^Total bytes written: \([0-9][0-9]*\) .*/\1/p')
  gnu=$bytes
  [ -n "$bytes" ] || bytes=$(tar -cf - -C "$source" . | wc -c)
  echo "$3" folder $bytes
  tar -cf - -C "$source" .
  code=$?
  [ -z "$gnu" ] || [ "$code" -ne 1 ] || exit 0 # a file changed while it was read
  exit "$code"
fi
[ -f "$source" ] || { echo "there is no file or folder $source" >&2; exit 1; }
mode=$(stat -L -c %a -- "$source" 2>/dev/null) || if [ -x "$source" ]; then mode=755; else mode=644; fi
bytes=$(wc -c <"$source") || exit 1
echo "$3" file $bytes $mode
exec head -c $bytes -- "$source" # it may grow
"""
)
"""Prints a line that begins with $3 and says what $2 is and how long, then a tar of the folder, or the content of the
file. GNU tar counts without reading the files; of others the tar is made twice.
"""


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
        mode = f"{status.st_mode & 0o755 | 0o600:o}"  # nobody else may write to it there
        words = ["file", str(status.st_size), mode, secrets.token_hex(8)]
        with _script(nodes, rank, WRITE, path, name, *words) as (stdin, _), _told_by_the_node():
            shutil.copyfileobj(file, stdin, PIECE_BYTES)


def copy_from(nodes: PoolNodes, rank: int, path: str, target: Path) -> None:
    """Copy a file or folder of a node to this machine. If `target` is a folder, it gets it under its own name.

    As `cp -r` does, a file replaces a file, also that to which a link of ours leads, and a folder is added to a folder
    of its name. A copy that fails leaves nothing. Raises as `copy_to`, and BadRequest for what does not fit on the disk
    and for names, links, kinds and sizes that a node may not send.
    """
    target = _target(path, target)
    mark = secrets.token_hex(8)
    with _beside(target) as part:
        with _script(nodes, rank, READ, path, mark) as (_, stdout), _written(target):
            what = _header(stdout, mark)
            _refuse_too_large(what.size, target)
            if what.is_folder:
                receive_folder(Bounded(stdout, what.size + what.size // 10 + GROWTH_BYTES), part)
            else:
                _receive_file(Bounded(stdout, what.size), part, what)
        with _written(target):
            _put(part, target)


def _target(path: str, target: Path) -> Path:
    """Return the path of the copy. Its name comes from what the user wrote. Raises BadRequest."""
    if target.is_dir():
        name = PurePosixPath(path).name or ("work" if not path.startswith("/") else "")
        if name in ("", ".."):
            raise BadRequest(f"{path} has no name for the copy: name it, as {target / 'copy'}")
        target /= name
    elif target.is_symlink():
        target = _followed(target)
    if not target.parent.is_dir():
        raise BadRequest(f"there is no folder {target.parent} on this machine")
    return target


def _followed(link: Path) -> Path:
    """Return the file to which a link leads, as cp writes to it. Raises BadRequest for another user's link."""
    if link.lstat().st_uid not in (os.geteuid(), 0):
        raise BadRequest(f"{link} is a link of another user, who chooses what is replaced: name another target")
    if not link.exists():
        raise BadRequest(f"{link} is a link to nothing: name another target")
    return link.resolve()


@contextmanager
def _beside(target: Path) -> Generator[Path]:
    """Yield where the copy is made: in a private folder on the target's disk, which is removed at the end."""
    folder = target.parent / f".skyward-cp-{secrets.token_hex(16)}"
    try:  # before the folder is made: a signal may come right after that
        with _written(target):
            folder.mkdir(mode=0o700)
        yield folder / "part"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _written(target: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise BadRequest(f"{target} cannot be written: {error.strerror}; nothing was copied") from error


class _What(NamedTuple):
    """What a node will send: a file with its bytes, or a folder with the bytes of its tar."""

    is_folder: bool
    size: int
    mode: int


def _header(stdout: IO[bytes], mark: str) -> _What:
    """Return what the words after the mark say; what a login shell prints before it is skipped.

    Raises EOFError if the script has ended without them, and BadRequest for other words.
    """
    skipped = 0
    while line := stdout.readline(MOST_WORDS_BYTES):
        if line.startswith(f"{mark} ".encode()):
            words = line.split(b" ", 1)[1].strip()
            found = _HEADER.fullmatch(words)
            if found is None:
                raise BadRequest(f"the node does not say what it sends, but {words[:80]!r}: nothing was copied")
            is_folder = found[1] is not None
            return _What(is_folder, int(found[2] if is_folder else found[4]), int(found[5] or b"0", 8))
        if (skipped := skipped + len(line)) >= MOST_WORDS_BYTES:
            raise BadRequest("the node sends other text than an answer: nothing was copied")
    raise EOFError("the node has sent nothing")


def _refuse_too_large(size: int, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise BadRequest(
            f"{target.name} has {size:,} bytes, and the disk of {target.parent} has {free:,} bytes free: nothing was"
            " copied"
        )


def _receive_file(stream: Bounded, part: Path, what: _What) -> None:
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, kept_mode(what.mode)), "wb") as file:
        file.writelines(stream.pieces(what.size))


def _put(part: Path, target: Path) -> None:
    """Move a copy to its place. Raises BadRequest, before anything is moved, where a file and a folder would meet."""
    moves = list(_moves(part, target))
    for source, place in moves:
        os.replace(source, place)


def _moves(part: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield what is moved where. A folder that is there already gets the entries of the new one."""
    is_folder = stat.S_ISDIR(part.lstat().st_mode)
    try:
        there = target.lstat().st_mode
    except FileNotFoundError:
        yield part, target
        return
    if is_folder != stat.S_ISDIR(there):
        what = "a folder" if stat.S_ISDIR(there) else "there already, and no folder"
        raise BadRequest(f"{target} is {what}: remove it, or name another target")
    if not is_folder:
        yield part, target
        return
    for name in sorted(os.listdir(part)):
        yield from _moves(part / name, target / name)


# The script on the node.


@contextmanager
def _script(nodes: PoolNodes, rank: int, script: str, *words: str) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Run a script on a node; yield its stdin and stdout, and raise at the end if it has failed.

    If its output was cut, its own words say why.
    """
    command = command_on(nodes, rank, script, words)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            words_of_node = _Words(process.stderr)
        except RuntimeError:  # no thread can be started
            process.kill()
            raise
        cut: Exception | None = None
        try:
            yield process.stdin, process.stdout
            with suppress(BrokenPipeError):
                process.stdin.close()
            _read_rest(process.stdout)
        except EOFError as error:
            cut = error
            process.stdout.close()
        except BaseException:
            process.kill()
            raise
        _raise_failure(nodes, rank, process.wait(), words_of_node.last())
        if cut is not None:
            raise BadRequest(f"the copy is not whole: {cut}") from cut


class _Words:
    """Reads what a node says about its errors, in a thread, and keeps the end of it."""

    def __init__(self, stderr: IO[bytes]) -> None:
        self._stderr = stderr
        self._pieces = deque[bytes](maxlen=KEPT_PIECES)
        self._thread = LoopThread("skyward-cp", self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError):  # it was closed
            while piece := os.read(self._stderr.fileno(), 1024):
                self._pieces.append(piece)

    def last(self) -> list[str]:
        """Return the last lines, when the script has ended."""
        self._thread.join(END_SECONDS)  # a process that the script has left may hold the pipe
        return b"".join(self._pieces).decode(errors="replace").strip().splitlines()[-LAST_LINES:]


def _read_rest(stdout: IO[bytes]) -> None:
    """Read the last block of a tar. Raises BadRequest if more comes."""
    left = MOST_WORDS_BYTES
    while piece := stdout.read(PIECE_BYTES):
        if (left := left - len(piece)) < 0:
            raise BadRequest("the node goes on after the end of what it said: nothing was copied")


def _raise_failure(nodes: PoolNodes, rank: int, code: int, lines: list[str]) -> None:
    if code == 0:
        return
    words = "\n".join(lines) or f"exit code {code}"
    node = f"node {rank} of pool {nodes.pool_id}"
    if code == NOT_RUNNING:
        raise NodeLost(
            f"{node} does not run: it is being prepared, or has ended. `skyward logs {nodes.pool_id}` shows it"
        )
    if code == SSH_FAILED:
        raise Unreachable(f"{node} cannot be reached: {words}")
    raise CommandFailed(f"{node}: {words}", code)


@contextmanager
def _told_by_the_node() -> Generator[None]:
    """A script that has ended early closes its stdin: its own words say why."""
    with suppress(BrokenPipeError):
        yield


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
