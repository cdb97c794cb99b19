"""Folders that no other user can read, change, rename or replace.

A folder is private if it belongs to this user, has mode 0700, and all folders above it are safe. A safe folder belongs
to root or to this user and lets no other user rename its entries. It is not writable by others, or it has the sticky
bit, as /tmp has. The path is followed with open descriptors and without symlinks, so that the checked folder is the
opened one.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

UID_MAP = Path("/proc/self/uid_map")
OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
MOST_LINKS = 40
_LOOK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotPrivate(PermissionError):
    """A folder, or one above it, that another user could change or replace; the message names it and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def opened_private(path: Path, *, make: bool = False) -> Generator[int]:
    """Open a private folder; with `make`, make it where it is missing, and those above it (mode 0700). Its descriptor
    serves `dir_fd=` and `os.fchdir`.

    A folder of this user that others may only read is closed to them. One that others may write to is refused, because
    they may have put files there. Raises NotPrivate, or another OSError where it cannot be opened or made.
    """
    path = real_path(path)
    with contextlib.ExitStack() as open_folders:

        def held(descriptor: int) -> int:
            open_folders.callback(os.close, descriptor)
            return descriptor

        parent, so_far = held(os.open("/", _LOOK)), Path("/")
        for part in path.parts[1:-1]:
            _refuse_parent(so_far, os.fstat(parent))
            so_far /= part
            parent = held(_entered(part, parent, _LOOK, so_far, make=make))
        _refuse_parent(so_far, os.fstat(parent))
        folder = held(_entered(path.name, parent, _READ, path, make=make))
        _close_to_others(path, folder)
        yield folder


def make_private(path: Path) -> Path:
    """Make a private folder, or check the one that is there; return its path, without symlinks.

    Raises NotPrivate or another OSError.
    """
    path = real_path(path)
    with opened_private(path, make=True):
        return path


def real_path(path: Path) -> Path:
    """Return where a private folder of this path is: the path without symlinks above it, of which no other user can
    replace a part. It may be missing.

    Raises NotPrivate for a symlink of another user.
    """
    return _without_links(path.absolute().parent) / path.name


def kept_path(path: Path) -> Path:
    """Return where a file of this path is, without symlinks. It, and folders above it, may be missing.

    Raises NotPrivate if another user could exchange one of the folders above it: each belongs to this user or root, and
    no other user may rename what is in it. Or if a symlink of another user leads there.
    """
    path = _without_links(path.absolute())
    for folder in reversed(path.parents):
        try:
            status = folder.lstat()
        except FileNotFoundError:
            break
        _refuse_parent(folder, status)
    return path


def read_kept(path: Path) -> bytes:
    """Return the content of a file that no other user could have written or put there: it and the folders above it
    belong to this user or root, and nobody else may write to them. In a folder with the sticky bit, as /tmp has, the
    file's owner decides.

    Raises NotPrivate, or another OSError, also for what is no file.
    """
    path = kept_path(path)
    with _opened_file(path, os.O_NOFOLLOW) as file:
        refuse_writers(path, os.fstat(file.fileno()))
        return file.read()


def read_file(path: Path) -> bytes:
    """Return the content of a file, whoever could have written it; /dev/null is one.

    Raises OSError, also for what is no file: a FIFO may never have a writer, and a device no end.
    """
    with _opened_file(path) as file:
        return file.read()


def _opened_file(path: Path, flags: int = 0) -> BinaryIO:
    _refuse_no_file(path.stat())  # before: opening some devices has effects
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags), "rb")
    try:
        _refuse_no_file(os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def _refuse_no_file(status: os.stat_result) -> None:
    mode = status.st_mode
    if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and status.st_rdev == os.stat(os.devnull).st_rdev):
        return
    kinds = (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket")
    kind = next((name for is_kind, name in kinds if is_kind(mode)), "device")
    raise OSError(errno.EINVAL, f"it is a {kind}, no file")


def refuse_writers(path: Path, status: os.stat_result) -> None:
    """Raise NotPrivate for a file with this status that another user owns or may write to."""
    if status.st_uid not in (os.geteuid(), *_roots()):
        raise NotPrivate(f"{path} belongs to {_name(status.st_uid)}, not to {_name(os.geteuid())} or root")
    if others := other_writers(status):
        raise NotPrivate(f"{path} may be written to by {others} (mode {stat.S_IMODE(status.st_mode):04o})")


def make_file(path: Path, content: bytes = b"") -> None:
    """Make a file that only this user can read (mode 0600), atomically. A file that exists already, perhaps from
    another process, is not changed.
    """
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        os.unlink(part)


def check_private(path: Path) -> None:
    """Raise NotPrivate, or another OSError, if this is no private folder.

    A path with `..` is refused: it leads through folders that are not checked, and another user can replace one of them
    by a symlink afterwards.
    """
    if ".." in path.parts:
        raise NotPrivate(f"{path} has '..' in it: give the path that it stands for")
    with opened_private(path):
        pass


def is_private(path: Path) -> bool:
    """Return whether this folder exists and is private."""
    try:
        check_private(path)
    except OSError:
        return False
    return True


def other_writers(status: os.stat_result) -> str:
    """Return who may write to a file with this status, beside its owner, root and the owner's own group; "" if none."""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    return f"group {status.st_gid}" if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid) else ""


def _without_links(path: Path) -> Path:
    """Return where a path leads.

    Raises NotPrivate for a symlink of another user: /run may be one, and a home, but not a symlink that another user
    has put into /tmp, or could exchange.
    """
    found, left, links = Path("/"), list(reversed(path.parts[1:])), 0
    while left:
        part = left.pop()
        if part == "..":
            found = found.parent
            continue
        found /= part
        try:
            status = found.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if status.st_uid not in (os.geteuid(), *_roots()):
                raise NotPrivate(f"{found} is a symlink of {_name(status.st_uid)}, who chooses where it leads")
            for folder in found.parents:  # who can rename the link chooses too
                _refuse_parent(folder, folder.lstat())
            target = Path(os.readlink(found))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            found = Path("/") if target.is_absolute() else found.parent
    return found


def _entered(name: str, parent: int, flags: int, path: Path, *, make: bool) -> int:
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    try:
        return os.open(name, flags, dir_fd=parent)
    except OSError as error:
        status = (
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES)
            else None
        )
        if status is None:
            raise type(error)(error.errno, error.strerror, str(path)) from None
        if stat.S_ISLNK(status.st_mode):
            raise NotPrivate(f"{path} is a symlink, and another user may have chosen its target") from error
        if status.st_uid != os.geteuid():
            raise NotPrivate(_belongs(path, status)) from error
        raise NotPrivate(f"{path} is no folder that can be opened: {error.strerror}") from error


def _refuse_parent(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), *_roots()):
        raise NotPrivate(f"{path} belongs to {_name(status.st_uid)}, who could exchange what is in it")
    if not status.st_mode & stat.S_ISVTX and (others := other_writers(status)):
        raise NotPrivate(
            f"{path} may be written to by {others} (mode {stat.S_IMODE(status.st_mode):04o}), who could exchange what"
            " is in it"
        )


def _close_to_others(path: Path, folder: int) -> None:
    status = os.fstat(folder)
    if status.st_uid != os.geteuid():
        raise NotPrivate(_belongs(path, status))
    if others := other_writers(status):
        raise NotPrivate(
            f"{path} may be written to by {others} (mode {stat.S_IMODE(status.st_mode):04o}), who may have put"
            " something there: remove it"
        )
    if status.st_mode & 0o077:
        os.fchmod(folder, 0o700)


def _belongs(path: Path, status: os.stat_result) -> str:
    return f"{path} belongs to {_name(status.st_uid)}, not to {_name(os.geteuid())}: ask for its removal"


def _is_own_group(gid: int) -> bool:
    """Whether a group is root's, or that of this user alone, as Debian makes one for each user (and its sshd's
    StrictModes accepts it).

    Root's is the group of all users of a container whose image is made for any user id, as Airflow's is.
    """
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _roots() -> tuple[int, ...]:
    """Root. In a user namespace without root (Apptainer, rootless containers), also the user that stands for all
    unmapped ones: / belongs to that user there.
    """
    try:
        ranges = [tuple(map(int, line.split())) for line in UID_MAP.read_text().splitlines()]
        if any(inside == 0 for inside, _, _ in ranges):
            return (0,)
        return (0, int(OVERFLOW_UID.read_text()))
    except (OSError, ValueError):
        return (0,)


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
