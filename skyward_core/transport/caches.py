"""What pools leave in a cache folder (`~/.cache/skyward`) for later ones, and what of it no pool needs any more.

    envs/HASH         an environment of an image          ship/files/SHA    included files and wheels of this computer
    files/SHA         the same, on a host over SSH        ship/HASH         a copy of our package, one for each version

Whoever uses an entry sets its time, so an entry is as old as its last use. One that a process of this computer names in
its environment is in use, whatever its age: nodes have the paths of their environment and package there. Included files
are in use while a process that has sent them to nodes lives (`note_use`): a node that replaces another needs them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skyward_core.machines.owner import Owner, OwnerState

UNUSED_SECONDS = 30 * 86_400.0
"""Without a command, entries are removed that were not used for so long."""
COMPLETE, USER_ENDING = ".skyward-complete", ".user"
KINDS = {"environment": "envs", "files": "ship/files", "uploaded files": "files", "package": "ship"}
"""The kinds of entries, and where they lie."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a cache. `used_at` is its last use, in seconds since 1970; `is_used`: a living process uses it."""

    kind: str
    path: Path
    bytes: int
    used_at: float
    is_used: bool


def note_use(folder: Path) -> None:
    """Record that this process uses an entry with included files, until it ends."""
    here = Owner.here()
    with contextlib.suppress(OSError):  # a full disk: the entry is young
        (folder / f"{here.process}{USER_ENDING}").write_text(here.name)
        os.utime(folder)
        for file, state in _users(folder):
            if state is OwnerState.DEAD:
                file.unlink(missing_ok=True)


def cache_home() -> Path:
    """Return the folder of the environments of nodes on this computer."""
    return Path(os.environ.get("SKYWARD_HOME") or "~/.cache/skyward").expanduser()


def entries(home: Path, proc: Path = Path("/proc")) -> list[Entry]:
    """Return the entries of a cache folder, least recently used first."""
    named = _named_by_processes(proc)
    cached: list[Entry] = []
    for kind, place in KINDS.items():
        for path in _folders(home / place):
            with contextlib.suppress(OSError):  # another process removes it
                places = {os.fsencode(path), os.fsencode(path.resolve())}
                is_used = not named.isdisjoint(places) or _has_user(path)
                cached.append(Entry(kind, path, _bytes(path), _used_at(path), is_used))
    return sorted(cached, key=lambda entry: entry.used_at)


def superfluous(
    cached: Iterable[Entry], *, unused_seconds: float | None = None, keep_bytes: float | None = None, now: float
) -> list[Entry]:
    """Return the entries that are not in use and were not used for so long, or that exceed `keep_bytes` with all that
    were used later.
    """
    chosen: list[Entry] = []
    total = 0
    for entry in sorted(cached, key=lambda entry: entry.used_at, reverse=True):
        total += entry.bytes
        is_old = unused_seconds is not None and now - entry.used_at > unused_seconds
        if not entry.is_used and (is_old or (keep_bytes is not None and total > keep_bytes)):
            chosen.append(entry)
    return chosen[::-1]


def remove(entry: Entry) -> bool:
    """Remove an entry; return False if it was used meanwhile. A killed removal leaves no entry that looks whole."""
    removed = entry.path.with_name(f".{entry.path.name}.{os.getpid()}.removed")
    try:
        with _locked(entry.path):
            if _used_at(entry.path) != entry.used_at:
                return False
            entry.path.rename(removed)
            if _has_user(removed):  # who has noted its use before the rename, and sees the entry from now on
                removed.rename(entry.path)
                return False
    except OSError:  # another process was faster, or makes this entry
        return False
    shutil.rmtree(removed, ignore_errors=True)
    entry.path.with_suffix(".tar.gz").unlink(missing_ok=True)  # of a package
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the lock under which a node makes or takes an environment (`image/shell.py`), if it has one.

    Raises BlockingIOError if a node has it.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(FileNotFoundError):
            lock = held.enter_context(path.with_name(f"{path.name}.lock").open("rb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def prune_files(folder: Path, clock: Callable[[], float] = time.time) -> None:
    """Remove the included files of this computer that no pool has used for UNUSED_SECONDS."""
    now = clock()
    for path in _folders(folder):
        with contextlib.suppress(OSError):
            entry = Entry("files", path, 0, _used_at(path), _has_user(path))
            for old in superfluous([entry], unused_seconds=UNUSED_SECONDS, now=now):
                remove(old)


def _folders(place: Path) -> Iterator[Path]:
    """Return the folders of entries; those that a killed removal has left are finished."""
    with contextlib.suppress(OSError):
        for path in sorted(place.iterdir()):
            if path.name.endswith(".removed") and path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir() and not path.is_symlink() and path.name != "files" and "." not in path.name:
                yield path


def _used_at(path: Path) -> float:
    mark = path / COMPLETE
    return (mark if mark.exists() else path).stat().st_mtime


def _has_user(path: Path) -> bool:
    # of a process on another computer with the same home, nothing is known: the age of the entry decides
    return any(state in {OwnerState.ALIVE, OwnerState.STOPPED} for _, state in _users(path))


def _users(path: Path) -> Iterator[tuple[Path, OwnerState]]:
    """Return the marks of processes that have noted their use of an entry, and whether they live."""
    for file in path.glob(f"*{USER_ENDING}"):
        with contextlib.suppress(OSError, ValueError):
            yield file, Owner.parse(file.read_text(), file.name.removesuffix(USER_ENDING)).state()


def _bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _named_by_processes(proc: Path) -> set[bytes]:
    """Return the paths of entries that processes have in their environments: of the environment or of the package."""
    named: set[bytes] = set()
    for file in proc.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            for variable in file.read_bytes().split(b"\0"):
                for path in variable.partition(b"=")[2].split(b":"):
                    named.add(path)
                    named.add(path.rpartition(b"/bin/")[0])
    return named
