"""Finds a live pool and its nodes: by the lease in the ledger, or by the listing of its provider.

The ledger has the lease of a pool with a name, one that was detached, and one with a detached call. Nodes of any other
pool are found where its provider lists them, if this machine can log in to them.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, NamedTuple

from skyward_core.errors import BadRequest, CommandFailed, NodeLost, Unreachable
from skyward_core.machines.instances import Endpoint, Instance, Lease
from skyward_core.paths import first_private, state_places
from skyward_core.providers.base import load
from skyward_core.session.sealed_lease import PoolKeys, exists, find_lease

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

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


@dataclass(frozen=True, slots=True)
class PoolNodes:
    """The nodes of a live pool, in the order of their ranks. `lease` and `keys` are there if the ledger has them."""

    pool_id: str
    instances: tuple[Instance, ...]
    lease: Lease | None = None
    keys: PoolKeys | None = None

    def instance(self, rank: int) -> Instance:
        """Return the node of a rank. Raises BadRequest."""
        for instance in self.instances:
            if instance.rank == rank:
                return instance
        known = ", ".join(str(instance.rank) for instance in self.instances)
        raise BadRequest(f"pool {self.pool_id} has no node {rank}; its nodes are {known}")


def find_nodes(ledger: Ledger, name: str) -> PoolNodes:
    """Return the nodes of the live pool with an id or a name.

    Raises BadRequest for an unknown pool, NodeLost for one that has ended, or whose nodes are not there; errors of the
    provider, of the lease's keys, and LedgerError.
    """
    named = ledger.names.named(name)
    pool_id = named.pool_id if named is not None and named.pool_id else name
    entry = ledger.pool(pool_id)
    if entry is None:
        raise BadRequest(f"the ledger has no pool {name!r}: look with `skyward ps --all`")
    if entry.ended_at is not None:
        raise NodeLost(
            f"pool {pool_id} ended at {entry.ended_at:%Y-%m-%d %H:%M:%S} UTC, and its nodes are gone with their logs."
            " What is kept: `skyward receipt`, `skyward why` and `skyward calls`"
        )
    if ledger.sealed_lease(pool_id) is not None:
        lease, keys = find_lease(pool_id, ledger=ledger)
        return PoolNodes(pool_id, _by_rank(node.instance for node in lease.nodes), lease, keys)
    provider = load(entry.provider)
    found = _by_rank(provider.instances(pool_id))
    if not found:
        raise NodeLost(
            f"{provider.name} lists no node of pool {pool_id}: it has none yet, or it runs on another machine"
        )
    return PoolNodes(pool_id, found)


def _by_rank(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    return tuple(sorted(instances, key=lambda instance: instance.rank))


def names_of_pools(ledger: Ledger) -> list[tuple[str, str]]:
    """Return the names and the ids of all open pools, each with its provider. Raises LedgerError."""
    pools = {entry.id: str(entry.provider.get("name", "")) for entry in ledger.pools(unreadable=[])}
    named = [(one.name, pools[one.pool_id]) for one in ledger.names.all_named(unreadable=[]) if one.pool_id in pools]
    return [*named, *pools.items()]


def login_command(nodes: PoolNodes, rank: int) -> list[str]:
    """Return the words of the command. It trusts only the host key that the pool knows. For a node that is a process of
    this machine it is a shell in its folder.

    Raises BadRequest for an unknown node, and if this machine has no file of the pool's key.
    """
    instance = nodes.instance(rank)
    if instance.endpoint is None:
        return ["sh", "-c", f'cd {shlex.quote(instance.directory or "/")} && exec "${{SHELL:-sh}}"']
    return ["ssh", *_options(nodes, instance.endpoint, instance.id), *_place(instance.endpoint)]


def command_on(nodes: PoolNodes, rank: int, script: str, words: Sequence[str]) -> list[str]:
    """Return the command that runs a sh script on a node, with the node's directory and these words as its arguments.

    Raises as `login_command`, and NodeLost for a machine that has no address yet.
    """
    instance = nodes.instance(rank)
    if instance.directory is None:
        raise NodeLost(f"node {rank} of pool {nodes.pool_id} does not run: it has no address yet")
    command = ["sh", "-c", script, "skyward", instance.directory, *words]
    if instance.endpoint is None:
        return command
    options = _options(nodes, instance.endpoint, instance.id)
    # a node that falls silent is an error, and does not hold the command for ever
    patience = ["-T", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
    return ["ssh", *options, *patience, *_place(instance.endpoint), shlex.join(command)]


def _options(nodes: PoolNodes, endpoint: Endpoint, instance_id: str) -> list[str]:
    if endpoint.key is not None and not exists(endpoint.key):
        raise BadRequest(
            f"the SSH key of pool {nodes.pool_id}, {endpoint.key}, is not on this machine: run the command where the"
            " pool was opened, or with a copy of that file"
        )
    words: list[str] = []
    if endpoint.config is not None:
        words += ["-F", endpoint.config]
    if endpoint.key is not None:
        words += ["-i", os.path.expanduser(endpoint.key), "-o", "IdentitiesOnly=yes"]
    if endpoint.port is not None:
        words += ["-p", str(endpoint.port)]
    if endpoint.proxy_command is not None:
        words += ["-o", f"ProxyCommand={shlex.join(endpoint.proxy_command)}"]
    if endpoint.host_key is not None:
        place = _known_hosts(instance_id, endpoint.host_key)
        words += ["-o", f"UserKnownHostsFile={place}", "-o", f"HostKeyAlias={instance_id}"]
        words += ["-o", "StrictHostKeyChecking=yes"]
    elif endpoint.known_hosts is not None:
        words += ["-o", f"UserKnownHostsFile={os.path.expanduser(endpoint.known_hosts)}"]
    return words


def _place(endpoint: Endpoint) -> list[str]:
    return [endpoint.host if endpoint.user is None else f"{endpoint.user}@{endpoint.host}"]


def _known_hosts(instance_id: str, host_key: str) -> Path:
    """Return a private file with the key of one host."""
    folder = first_private("known-hosts", state_places())
    place = folder / hashlib.sha256(instance_id.encode()).hexdigest()[:16]
    place.write_text(f"{instance_id} {host_key.strip()}\n")
    return place


# Files and folders to and from a node of a live pool: `skyward cp`.
#
# A small script on the node reads or writes them, over OpenSSH as `skyward ssh` does, and for a node of this machine
# in a shell. A folder travels as a tar stream, so the node needs sh, cat and tar only.


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
